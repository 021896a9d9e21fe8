//! Carries out the steps for one blob that add redundancy. `remove` deletes.
//!
//! - Every fragment that is read is verified by its checksum. Before a fragment is computed from
//!   others, and before a copy is copied, the decoded content is compared with the blob's name.
//! - A fragment that is damaged, or missing although its holder reported it, is noted as damaged.
//!   The next plan does without it and has it rebuilt.
//! - An encoding that does not give the blob is rejected. The next plan chooses another one.

use super::entry::Entry;
use super::memory::memory;
use super::peers::Peers;
use super::plan::{FragmentLocation, Holding, Plan, Rejection, Step, Wanted};
use super::read::Gathered;
use super::report::{Report, WrongFragment};
use super::shared::Shared;
use crate::cluster::protocol::FragmentId;
use crate::encoding::fragment::{Fragment, Kind, encode, encode_record};
use crate::error::{Error, ErrorKind};
use crate::id::{BlobId, PeerId};

/// Works on one blob.
pub(super) struct Executor<'a, P> {
    pub(super) shared: &'a Shared<P>,
    pub(super) entry: Entry,
    pub(super) holdings: Vec<Holding>,
    /// What was done so far.
    pub(super) done: Report,
}

impl<'a, P: Peers> Executor<'a, P> {
    pub(super) fn new(shared: &'a Shared<P>, entry: Entry, mut holdings: Vec<Holding>) -> Self {
        holdings.retain(Holding::is_possible);
        Executor { shared, entry, holdings, done: Report::default() }
    }

    /// The most bytes that a plan holds in memory.
    pub(super) fn memory(&self, plan: &Plan) -> usize {
        memory(plan, &self.holdings, &self.entry.findings)
    }

    /// Carries out the steps of a plan that can be carried out.
    pub(super) async fn execute(&mut self, steps: &[Step]) {
        let mut gathered = None;
        for step in steps {
            if self.shared.is_stopped() {
                return;
            }
            match step {
                Step::Copy { encoding, index, from, to } if !self.is_computed(encoding, *index) => {
                    let place =
                        FragmentLocation { peer: *from, encoding: *encoding, index: *index };
                    if let Some(fragment) = self.get(&place).await {
                        let is_done = self.put(to, fragment).await;
                        self.done.moved += u64::from(is_done);
                    }
                }
                Step::Rebuild { encoding, index, to } | Step::Copy { encoding, index, to, .. } => {
                    if gathered.is_none() {
                        gathered = self.gather(encoding).await;
                    }
                    // Without enough fragments no later step can be carried out either.
                    let Some(gathered) = &gathered else { return };
                    let Some(fragment) = self.compute(gathered, *index) else { return };
                    let is_done = u64::from(self.put(to, fragment).await);
                    match step {
                        Step::Copy { .. } => self.done.moved += is_done,
                        _ => self.done.rebuilt += is_done,
                    }
                }
                Step::Encode { from, to } => self.encode(from, to).await,
            }
        }
    }

    /// Whether a fragment has to be computed from decoded content instead of copied: if it is a
    /// whole copy, which can be compared with the blob's name, or if a forged one was found.
    fn is_computed(&self, encoding: &BlobId, index: u8) -> bool {
        let is_copy = |one: &Holding| one.encoding == *encoding && one.data == 1;
        let is_same = |one: &FragmentLocation| (one.encoding, one.index) == (*encoding, index);
        self.holdings.iter().any(is_copy) || self.entry.findings.forged.iter().any(is_same)
    }

    /// Computes a fragment from decoded content.
    fn compute(&mut self, gathered: &Gathered, index: u8) -> Option<Fragment> {
        match gathered.assembly.rebuild(index) {
            Ok(fragment) => Some(fragment),
            Err(error) => {
                let encoding = gathered.assembly.description.id();
                self.reject(encoding, Rejection::Inconsistent, error.to_string());
                None
            }
        }
    }

    /// Notes that a step failed. A peer that does not answer is not asked again.
    pub(super) fn fail(&mut self, peer: &PeerId, error: &Error) {
        self.entry.reason = Some(error.to_string());
        if error.kind() == ErrorKind::Unavailable {
            self.shared.set_down(peer);
        }
    }

    /// Notes that a fragment is damaged.
    pub(super) fn note_damaged(&mut self, place: &FragmentLocation) {
        let blob = self.entry.wanted.blob;
        tracing::warn!(%blob, peer = %place.peer, index = place.index, "a fragment is damaged");
        self.done.damaged += 1;
        self.entry.findings.damaged.insert(*place);
    }

    /// Notes that a fragment differs from what the blob gives, although it matches its checksum.
    pub(super) fn note_forged(&mut self, place: &FragmentLocation) {
        let blob = self.entry.wanted.blob;
        tracing::warn!(%blob, peer = %place.peer, index = place.index, "a fragment is forged");
        self.entry.reason = Some(format!("peer {} holds a forged fragment", place.peer));
        self.entry.findings.forged.insert(*place);
        self.done.note_wrong(WrongFragment::new(blob, place));
    }

    /// Notes that an encoding does not give the blob as it should, and names its holders.
    pub(super) fn reject(&mut self, encoding: BlobId, rejection: Rejection, reason: String) {
        if !self.entry.reject(encoding, rejection) {
            return;
        }
        let blob = self.entry.wanted.blob;
        let own = self.holdings.iter().filter(|one| one.encoding == encoding);
        let own: Vec<_> = own.map(Holding::location).collect();
        for place in &own {
            self.done.note_wrong(WrongFragment::new(blob, place));
        }
        let holders: Vec<_> = own.iter().map(|place| place.peer.to_string()).collect();
        let holders = holders.join(" ");
        tracing::warn!(%blob, %encoding, holders, ?rejection, reason, "an encoding is rejected");
        self.entry.reason = Some(format!("an encoding on peers {holders} is rejected: {reason}"));
    }

    /// Stores a fragment. Returns whether it is durable.
    ///
    /// The fragment may come from a peer that has lost or changed its seal. It is of an encoding that
    /// somebody has sealed, or that was made here, so it is sealed again.
    async fn put(&mut self, to: &PeerId, mut fragment: Fragment) -> bool {
        let seals = self.shared.peers.seals();
        if !seals.is_sealed(&fragment.description) {
            fragment.description.seal = seals.seal(&fragment.description);
        }
        let (len, index) = (fragment.block.len() as u64, fragment.index);
        let encoding = fragment.description.id();
        let place = FragmentLocation { peer: *to, encoding, index };
        self.shared.throttle(len).await;
        if self.shared.is_stopped() {
            return false;
        }
        // A peer keeps a fragment that it has and that matches its checksum.
        if self.entry.findings.forged.contains(&place) && !self.delete_forged(&place).await {
            return false;
        }
        let is_copy = fragment.description.width() == 1;
        match self.shared.peers.put(*to, fragment).await {
            Ok(()) => {
                self.entry.stored += usize::from(is_copy);
                self.done.bytes += len;
                self.entry.findings.damaged.remove(&place);
                self.entry.findings.forged.remove(&place);
                true
            }
            Err(error) => {
                self.refuse(to, &error);
                false
            }
        }
    }

    /// Notes why a peer did not store a fragment.
    fn refuse(&mut self, peer: &PeerId, error: &Error) {
        match error {
            // The next peer takes the fragment, and those of other blobs.
            Error::PeerRefusedFull { .. } => self.shared.set_full(peer),
            error if error.kind() == ErrorKind::Unavailable => self.shared.set_down(peer),
            // The peer answers, and does not want this fragment: for example because it has too many
            // of this blob.
            _ => drop(self.entry.findings.refusing.insert(*peer)),
        }
        self.entry.reason = Some(error.to_string());
    }

    /// Encodes a blob as wanted. If the source is such an encoding, and only its seal is missing, the
    /// result is the same encoding.
    async fn encode(&mut self, from: &BlobId, to: &[PeerId]) {
        let Some(gathered) = self.gather(from).await else { return };
        let wanted = self.entry.wanted;
        let description = &gathered.assembly.description;
        let is_wanted = wanted.is_encoded_by(description);
        let fragments = match is_wanted.then(|| gathered.fragments()).flatten() {
            Some(fragments) => fragments,
            None => encode_all(&wanted, &gathered.content),
        };
        for (place, to) in to.iter().enumerate() {
            let fragment = fragments[place % fragments.len()].clone();
            let is_done = self.put(to, fragment).await;
            self.done.rebuilt += u64::from(is_done);
        }
    }

    /// The id of a fragment of this blob.
    pub(super) fn id(&self, place: &FragmentLocation) -> FragmentId {
        let FragmentLocation { encoding, index, .. } = *place;
        FragmentId { blob: self.entry.wanted.blob, encoding, index }
    }
}

/// All fragments of a blob as wanted.
fn encode_all(wanted: &Wanted, content: &[u8]) -> Vec<Fragment> {
    let (description, blocks) = match wanted.kind {
        Kind::Content => encode(&wanted.blob, content, wanted.redundancy),
        Kind::Record => encode_record(&wanted.blob, content, wanted.redundancy),
    };
    let fragment = |index: usize| {
        let (description, block) = (description.clone(), blocks.share(index));
        Fragment { description, index: index as u8, block }
    };
    (0..description.width()).map(fragment).collect()
}
