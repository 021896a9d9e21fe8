//! Carries out the plan for one blob.
//!
//! - Every fragment that is read is verified by its checksum. Before a fragment is computed from
//!   others, the decoded content is compared with the blob's name.
//! - A fragment that is damaged, or missing although its holder reported it, is noted as damaged.
//!   The next plan does without it and has it rebuilt.
//! - A fragment is dropped only if what makes it surplus was read or written by this repair.

use std::collections::HashSet;

use tokio::task::JoinSet;

use super::job::Shared;
use super::peers::Peers;
use super::plan::{FragmentLocation, Holding, Plan, Step};
use super::report::Report;
use crate::cluster::client::assemble::EncodingAssembly;
use crate::cluster::protocol::FragmentId;
use crate::encoding::fragment::{Fragment, Kind, encode, encode_record};
use crate::encoding::redundancy::{MAX_WIDTH, Redundancy};
use crate::error::{Error, ErrorKind};
use crate::id::{BlobId, PeerId};

/// A surplus copy is dropped only if no client has stored or renewed it for this many seconds. A
/// client may be storing the blob with more copies than the catalog wants so far, and a large image
/// takes hours.
const SURPLUS_AGE_SECONDS: u32 = 24 * 3600;

/// A blob under repair.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) blob: BlobId,
    pub(super) wanted: Redundancy,
    /// Fragments that are damaged, or missing although their holders reported them.
    pub(super) damaged: HashSet<FragmentLocation>,
    /// Fragments that this repair has read or stored.
    pub(super) good: HashSet<FragmentLocation>,
    /// Copies that this repair has stored, less those that it has dropped. As many surplus copies
    /// may be dropped without regard to their age.
    stored: usize,
    /// Surplus copies that stay, because a client may rely on them.
    spared: HashSet<FragmentLocation>,
    /// Why the last step failed.
    pub(super) reason: Option<String>,
}

impl Entry {
    pub(super) fn new(blob: BlobId, wanted: Redundancy) -> Entry {
        let (damaged, good, spared) = (HashSet::new(), HashSet::new(), HashSet::new());
        Entry { blob, wanted, damaged, good, stored: 0, spared, reason: None }
    }

    /// Whether no step of a plan can be carried out for now.
    pub(super) fn is_idle(&self, plan: &Plan) -> bool {
        plan.steps.iter().all(|step| match *step {
            Step::Drop { peer, encoding, index, .. } => {
                self.spared.contains(&FragmentLocation { peer, encoding, index })
            }
            _ => false,
        })
    }

    /// Removes the fragments that are known to be damaged.
    pub(super) fn without_damaged(&self, mut holdings: Vec<Holding>) -> Vec<Holding> {
        holdings.retain(|one| !self.damaged.contains(&place(one)));
        holdings
    }
}

fn place(holding: &Holding) -> FragmentLocation {
    let Holding { peer, encoding, index, .. } = *holding;
    FragmentLocation { peer, encoding, index }
}

/// Carries out the steps for one blob.
pub(super) struct Executor<'a, P> {
    shared: &'a Shared<P>,
    pub(super) entry: Entry,
    holdings: Vec<Holding>,
    /// What was done so far.
    pub(super) done: Report,
}

impl<'a, P: Peers> Executor<'a, P> {
    pub(super) fn new(shared: &'a Shared<P>, entry: Entry, holdings: Vec<Holding>) -> Self {
        Executor { shared, entry, holdings, done: Report::default() }
    }

    /// The most bytes that the steps of a plan hold in memory.
    pub(super) fn memory(&self, plan: &Plan) -> usize {
        let len = self.holdings.iter().map(|one| one.len as usize).max().unwrap_or(0);
        let needed = self.holdings.iter().map(|one| usize::from(one.data)).max().unwrap_or(1);
        let written = plan.steps.iter().map(|step| match step {
            // The content, and all blocks of the new encoding.
            Step::Encode { .. } => 4 * needed.min(MAX_WIDTH),
            _ => 1,
        });
        len * (needed.min(MAX_WIDTH) + written.sum::<usize>())
    }

    /// Carries out the steps of a plan that can be carried out.
    pub(super) async fn execute(&mut self, plan: &Plan) {
        let mut gathered = None;
        for step in &plan.steps {
            if self.shared.is_stopped() {
                return;
            }
            match step {
                Step::Rebuild { encoding, index, to } => {
                    if gathered.is_none() {
                        gathered = self.gather(encoding).await;
                    }
                    // Without enough fragments no later step can be carried out either.
                    let Some(gathered) = &gathered else { return };
                    match gathered.0.rebuild(*index) {
                        Ok(fragment) => {
                            let is_done = self.put(to, *encoding, fragment).await;
                            self.done.rebuilt += u64::from(is_done);
                        }
                        Err(error) => self.entry.reason = Some(error.to_string()),
                    }
                }
                Step::Copy { encoding, index, from, to } => {
                    let place =
                        FragmentLocation { peer: *from, encoding: *encoding, index: *index };
                    if let Some(fragment) = self.get(&place).await {
                        let is_done = self.put(to, *encoding, fragment).await;
                        self.done.moved += u64::from(is_done);
                    }
                }
                Step::Encode { from, to } => self.encode(from, to).await,
                Step::Drop { peer, encoding, index, kept } => {
                    for place in kept {
                        if !self.entry.good.contains(place) && self.get(place).await.is_none() {
                            return;
                        }
                    }
                    // The reads may have taken long. Another repair may run by then and drop just
                    // these fragments.
                    if self.shared.is_stopped() {
                        return;
                    }
                    self.delete(peer, *encoding, *index).await;
                }
            }
        }
    }

    /// Notes that a step failed. A peer that does not answer is not asked again.
    fn fail(&mut self, peer: &PeerId, error: &Error) {
        self.entry.reason = Some(error.to_string());
        if error.kind() == ErrorKind::Unavailable {
            self.shared.set_down(peer);
        }
    }

    /// Reads a fragment.
    async fn get(&mut self, place: &FragmentLocation) -> Option<Fragment> {
        let found = fetch(self.shared, self.entry.blob, place).await;
        self.accept(place, found)
    }

    /// Notes the result of reading a fragment.
    fn accept(
        &mut self,
        place: &FragmentLocation,
        found: Result<Option<Fragment>, Error>,
    ) -> Option<Fragment> {
        match found {
            Ok(Some(fragment)) => {
                self.done.bytes += fragment.block.len() as u64;
                self.entry.good.insert(*place);
                return Some(fragment);
            }
            Err(error) if error.kind() != ErrorKind::Corrupt => self.fail(&place.peer, &error),
            Ok(None) | Err(_) => self.note_damaged(place),
        }
        None
    }

    /// Notes that a fragment is damaged.
    fn note_damaged(&mut self, place: &FragmentLocation) {
        let blob = self.entry.blob;
        tracing::warn!(%blob, peer = %place.peer, index = place.index, "a fragment is damaged");
        self.done.damaged += 1;
        self.entry.damaged.insert(*place);
        self.entry.good.remove(place);
    }

    /// Stores a fragment. Returns whether it is durable.
    async fn put(&mut self, to: &PeerId, encoding: BlobId, fragment: Fragment) -> bool {
        let (len, index) = (fragment.block.len() as u64, fragment.index);
        self.shared.throttle(len).await;
        if self.shared.is_stopped() {
            return false;
        }
        let is_copy = fragment.description.width() == 1;
        match self.shared.peers.put(*to, fragment).await {
            Ok(()) => {
                self.entry.stored += usize::from(is_copy);
                self.done.bytes += len;
                let place = FragmentLocation { peer: *to, encoding, index };
                self.entry.good.insert(place);
                self.entry.damaged.remove(&place);
                true
            }
            Err(error) => {
                // The peer is full or does not answer. The next peer takes the fragment.
                self.entry.reason = Some(error.to_string());
                self.shared.set_full(to);
                false
            }
        }
    }

    /// Deletes a surplus fragment. Of fragments, all that are needed are kept. Of copies, nobody
    /// knows how many a client wants that has not published yet, so their number never decreases
    /// unless they are old.
    async fn delete(&mut self, peer: &PeerId, encoding: BlobId, index: u8) {
        let fragment = FragmentId { blob: self.entry.blob, encoding, index };
        let ignores_age =
            self.entry.stored > 0 || !matches!(self.entry.wanted, Redundancy::Replicas(_));
        let idle = if ignores_age { 0 } else { SURPLUS_AGE_SECONDS };
        match self.shared.peers.delete(*peer, fragment, idle).await {
            Ok(freed_space) => {
                self.done.dropped += u64::from(freed_space || ignores_age);
                self.entry.stored = self.entry.stored.saturating_sub(1);
                if !ignores_age {
                    self.entry.spared.insert(FragmentLocation { peer: *peer, encoding, index });
                }
            }
            Err(error) => self.fail(peer, &error),
        }
    }

    /// Reads as many fragments of an encoding as are enough, all at once, and another one for each
    /// that is wrong, until they decode to the blob. Returns the fragments and the content.
    async fn gather(
        &mut self,
        encoding: &BlobId,
    ) -> Option<(EncodingAssembly<FragmentLocation>, Vec<u8>)> {
        let mut places: Vec<FragmentLocation> = Vec::new();
        let mut more: Vec<FragmentLocation> = Vec::new();
        let own: Vec<_> = self.holdings.iter().filter(|one| one.encoding == *encoding).collect();
        let needed: usize = own.first()?.data.into();
        // Spread the reads over the holders, differently for each blob.
        let rotation = usize::from(self.entry.blob.as_bytes()[1]) % own.len();
        for one in own[rotation..].iter().chain(&own[..rotation]) {
            let is_new =
                places.len() < needed && places.iter().all(|other| other.index != one.index);
            if is_new { places.push(place(one)) } else { more.push(place(one)) }
        }
        let mut gathered: Option<EncodingAssembly<FragmentLocation>> = None;
        let mut content = Vec::new();
        let mut asked = JoinSet::new();
        let mut next = places.into_iter().chain(more);
        loop {
            let missing = gathered.as_ref().map_or(needed, EncodingAssembly::missing);
            while asked.len() < missing
                && let Some(place) = next.next()
            {
                let (shared, blob) = (self.shared.clone(), self.entry.blob);
                asked.spawn(async move { (place, fetch(&shared, blob, &place).await) });
            }
            let (place, result) = asked.join_next().await?.ok()?;
            let Some(fragment) = self.accept(&place, result) else { continue };
            let Fragment { description, index, block } = fragment;
            content.resize(description.len as usize, 0);
            let gathered = gathered.get_or_insert_with(|| EncodingAssembly::new(description));
            gathered.add(index, place, block);
            match gathered.decode(&mut content) {
                Some(Ok(wrong)) => {
                    wrong.iter().for_each(|(place, _)| self.note_damaged(place));
                    break;
                }
                Some(Err(error)) => self.entry.reason = Some(error.to_string()),
                None => {}
            }
        }
        Some((gathered?, content))
    }

    /// Encodes a blob as wanted.
    async fn encode(&mut self, from: &BlobId, to: &[PeerId]) {
        let Some((EncodingAssembly { description, .. }, content)) = self.gather(from).await else {
            return;
        };
        let (blob, wanted) = (self.entry.blob, self.entry.wanted);
        let (description, blocks) = match description.kind() {
            Kind::Content => encode(&blob, &content, wanted),
            Kind::Record => encode_record(&blob, &content, wanted),
        };
        let encoding = description.id();
        for (place, to) in to.iter().enumerate() {
            let index = place % description.width();
            let block = blocks.share(index);
            let fragment = Fragment { description: description.clone(), index: index as u8, block };
            let is_done = self.put(to, encoding, fragment).await;
            self.done.rebuilt += u64::from(is_done);
        }
    }
}

/// Reads a fragment; `None` if it is damaged or missing.
async fn fetch<P: Peers>(
    shared: &Shared<P>,
    blob: BlobId,
    FragmentLocation { peer, encoding, index }: &FragmentLocation,
) -> Result<Option<Fragment>, Error> {
    let found = shared.peers.get(*peer, blob).await?;
    let is_it = |one: &Fragment| {
        one.index == *index && one.description.id() == *encoding && one.is_of(&blob)
    };
    let found = found.into_iter().find(is_it);
    if let Some(fragment) = &found {
        shared.throttle(fragment.block.len() as u64).await;
    }
    Ok(found)
}
