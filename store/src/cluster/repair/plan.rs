//! The plan for one blob: a pure decision.
//!
//! The *places* of a blob are the first *k* + *m* peers of its ranking. Which fragment is at which
//! place does not matter. A fragment at a place stays there. A place without a fragment gets one:
//! it is copied if another peer has it, and computed from others if no peer has it.
//!
//! | a peer is | its place | what it holds |
//! |---|---|---|
//! | up | gets a fragment if it has none | counts |
//! | full | belongs to another peer, unless it has a fragment | counts |
//! | draining | belongs to another peer, unless too few are left | counts, is copied to the places |
//! | down | stays its own | is awaited: one missing fragment is not rebuilt for each place that is down |
//! | lost | belongs to another peer | is gone |
//!
//! - A plan has steps, which only add, or a [`Removal`], or neither. What a step makes surplus is
//!   removed by a later plan, which sees that the step was done.
//! - Fragments outside their places are surplus when all places are filled and none of them is down.
//!   Before that, nobody knows what a peer that is down has: it may be the same fragment that seems
//!   to be surplus.
//! - A plan relies on what the peers claim. So a [`Removal`] names the fragments that are kept, and
//!   is carried out only after these were read and compared with the blob's name.
//! - Fragments of two encodings are never counted together. Of several encodings as wanted, one is
//!   completed; then the others are surplus. Encodings with another kind or other numbers of blocks
//!   may be wanted by others and are left alone.
//! - An encoding that does not give the blob ([`Findings::rejected`]) is never completed or kept.
//! - Nor is an encoding without a valid seal: a peer may have invented it. The blob is decoded from
//!   it if no other encoding can be read, and encoded and sealed again.

mod layout;
#[cfg(test)]
mod tests;
mod work;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use self::layout::{Layout, layouts};
use self::work::Work;
use super::members::RepairMembers;
use crate::cluster::protocol::Held;
use crate::encoding::fragment::{Description, Kind};
use crate::encoding::redundancy::{MAX_WIDTH, Redundancy};
use crate::encoding::{MAX_STORED, SealKeys};
use crate::id::{BlobId, PeerId};

/// A blob that must exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// The blob's name.
    pub blob: BlobId,
    /// Whether it is content or a record. A record that is stored as content is not found as a record.
    pub kind: Kind,
    /// The redundancy that it is to have.
    pub redundancy: Redundancy,
}

impl Wanted {
    /// A chunk, or a node of a tree.
    pub fn content(blob: BlobId, redundancy: Redundancy) -> Wanted {
        Wanted { blob, kind: Kind::Content, redundancy }
    }

    /// A record.
    pub fn record(blob: BlobId, redundancy: Redundancy) -> Wanted {
        Wanted { blob, kind: Kind::Record, redundancy }
    }

    /// Whether an encoding is as wanted.
    pub(super) fn is_encoded_by(&self, description: &Description) -> bool {
        let shape = (description.needed(), description.width());
        (description.kind(), shape) == (self.kind, self.shape())
    }

    /// Whether a fragment is of an encoding as wanted.
    pub(super) fn is_shape_of(&self, one: &Holding) -> bool {
        let shape = (usize::from(one.data), usize::from(one.data) + usize::from(one.parity));
        (one.kind, shape) == (self.kind, self.shape())
    }

    /// The numbers of data blocks and of all blocks of an encoding as wanted.
    fn shape(&self) -> (usize, usize) {
        match self.redundancy {
            Redundancy::Replicas(_) => (1, 1),
            code @ Redundancy::ReedSolomon { .. } => (code.needed(), code.width()),
        }
    }
}

/// A fragment that a peer reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// The peer that has it.
    pub peer: PeerId,
    /// The hash of its encoding's description.
    pub encoding: BlobId,
    /// Whether the blob is content or a record.
    pub kind: Kind,
    /// The number of data blocks, which are enough to decode the blob.
    pub data: u8,
    /// The number of parity blocks.
    pub parity: u8,
    /// The block's index.
    pub index: u8,
    /// The block's length in bytes, as its holder reports it.
    pub len: u32,
    /// Whether a client or a supervisor has sealed the encoding.
    pub is_sealed: bool,
}

impl Holding {
    /// A fragment of `blob` that a peer reports.
    pub(super) fn new(peer: PeerId, blob: &BlobId, held: &Held, seals: &SealKeys) -> Holding {
        let Held { encoding, data, parity, index, kind, len, .. } = *held;
        let is_sealed = held.is_sealed(blob, seals);
        Holding { peer, encoding, kind, data, parity, index, len, is_sealed }
    }

    /// Whether an honest peer can report this.
    pub(super) fn is_possible(&self) -> bool {
        let width = usize::from(self.data) + usize::from(self.parity);
        self.data > 0
            && width <= MAX_WIDTH
            && usize::from(self.index) < width
            && self.len as usize <= MAX_STORED
    }

    /// The order of holdings, which does not depend on which peer answers first.
    pub(super) fn order(&self) -> (BlobId, u8, PeerId) {
        (self.encoding, self.index, self.peer)
    }

    /// Where the fragment is.
    pub fn location(&self) -> FragmentLocation {
        let Holding { peer, encoding, index, .. } = *self;
        FragmentLocation { peer, encoding, index }
    }
}

/// A fragment of a blob on a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FragmentLocation {
    /// The peer that has it.
    pub peer: PeerId,
    /// The hash of its encoding's description.
    pub encoding: BlobId,
    /// The block's index.
    pub index: u8,
}

/// Why an encoding is neither completed nor kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// Enough of its blocks were read, and no choice of them gives the blob.
    Unreadable,
    /// Its data blocks give the blob, but it describes other parity blocks than theirs. The blob
    /// can be read from it, and it does not survive what it should.
    Inconsistent,
}

/// What a repair has found out about a blob by reading its fragments.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Fragments that are damaged, or that their holders reported and did not send.
    pub damaged: HashSet<FragmentLocation>,
    /// Fragments that match their checksums and differ from what the blob gives.
    pub forged: HashSet<FragmentLocation>,
    /// Encodings that do not give the blob as they should.
    pub rejected: HashMap<BlobId, Rejection>,
    /// Peers that refuse fragments of this blob, but not of others.
    pub refusing: HashSet<PeerId>,
}

impl Findings {
    /// Whether a fragment was read and is wrong.
    pub(super) fn is_wrong(&self, place: &FragmentLocation) -> bool {
        self.damaged.contains(place) || self.forged.contains(place)
    }

    /// Whether an encoding can be completed and kept, for all that is known.
    fn may_keep(&self, layout: &Layout) -> bool {
        layout.is_sealed && !self.rejected.contains_key(&layout.encoding)
    }

    /// How many more lost peers the blob survives by this encoding.
    fn survives(&self, layout: &Layout) -> Option<i32> {
        match self.rejected.get(&layout.encoding) {
            None if layout.is_sealed => Some(layout.survives()),
            None | Some(Rejection::Inconsistent) => Some(layout.survives().min(0)),
            Some(Rejection::Unreadable) => None,
        }
    }
}

/// A step that adds redundancy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Compute a fragment that no peer has from others of its encoding, and store it.
    Rebuild {
        /// The encoding.
        encoding: BlobId,
        /// The block's index.
        index: u8,
        /// The peer that gets it.
        to: PeerId,
    },
    /// Store a fragment at its place. The source stays until it is removed as surplus.
    Copy {
        /// The encoding.
        encoding: BlobId,
        /// The block's index.
        index: u8,
        /// The peer that has it.
        from: PeerId,
        /// The peer that gets it.
        to: PeerId,
    },
    /// Encode the blob as wanted from another encoding, because no encoding as wanted can be read.
    Encode {
        /// The encoding that can be read.
        from: BlobId,
        /// The peers that get the fragments, in the order of the indices.
        to: Vec<PeerId>,
    },
}

/// Fragments that are surplus, and the fragments that make them so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removal {
    /// One fragment for each place, all of one encoding. They must be read and compared with the
    /// blob's name before anything is deleted.
    pub kept: Vec<FragmentLocation>,
    /// The fragments to delete.
    pub surplus: Vec<FragmentLocation>,
}

/// The state of a blob, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The encoding that is kept; `None` if no encoding as wanted can be read.
    pub encoding: Option<BlobId>,
    /// How many more lost peers the blob survives, counting only fragments on live peers. Less than
    /// 0 if it cannot be read.
    pub survives: i32,
    /// The number of fragments, or copies, that no live peer has.
    pub missing: usize,
    /// Whether fewer live peers than wanted have a fragment of their own. Two fragments on one peer
    /// are lost together, so they count once.
    pub is_short: bool,
    /// Of the missing fragments, the number that may come back with a peer that is down.
    pub waiting: usize,
    /// Of the missing fragments, the number for which no peer is left.
    pub unplaced: usize,
    /// The steps that add redundancy.
    pub steps: Vec<Step>,
    /// The surplus. There is none while there are steps.
    pub removal: Option<Removal>,
}

impl Plan {
    fn of(encoding: Option<BlobId>, survives: i32, missing: usize) -> Plan {
        let (waiting, unplaced, steps, removal) = (0, 0, Vec::new(), None);
        let is_short = missing > 0;
        Plan { encoding, survives, missing, is_short, waiting, unplaced, steps, removal }
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.removal.is_none()
    }
}

/// Plans what to do about a blob.
pub fn plan(
    wanted: &Wanted,
    members: &RepairMembers,
    holdings: &[Holding],
    findings: &Findings,
) -> Plan {
    let members = accepting(members, findings);
    let usable = holdings.iter().filter(|one| !findings.is_wrong(&one.location()));
    let layouts = layouts(&members, usable);
    let survives = layouts.iter().filter_map(|one| findings.survives(one)).max();
    let survives = survives.unwrap_or(-(wanted.redundancy.needed() as i32));
    let is_wanted =
        |one: &&Layout| (one.kind, (one.data, one.width)) == (wanted.kind, wanted.shape());
    let candidates = || layouts.iter().filter(is_wanted).filter(|one| findings.may_keep(one));
    let readable = candidates().filter(|one| one.survives() >= 0);
    // Of equal encodings the first is chosen, so every repair chooses the same one.
    let chosen = readable.rev().max_by_key(|one| one.strength());
    let Some(chosen) = chosen else {
        let found = candidates().map(Layout::strength).max().unwrap_or(0);
        let missing = wanted.redundancy.width().saturating_sub(found);
        let is_source = |one: &&Layout| findings.survives(one).is_some_and(|more| more >= 0);
        // An encoding that is inconsistent or not sealed is the last choice.
        let source = layouts.iter().filter(is_source).min_by_key(|one| !findings.may_keep(one));
        return unreadable(wanted, &members, source, Plan::of(None, survives, missing));
    };
    let mut work = Work::new(wanted, &members, chosen);
    match chosen.is_copies() {
        true => work.copies(&wanted.blob),
        false => work.fragments(),
    }
    if work.is_complete() {
        let is_other = |one: &&Layout| one.encoding != chosen.encoding || !one.is_sealed;
        let others = layouts.iter().filter(is_wanted).filter(is_other);
        others.for_each(|other| work.remove_all(other));
        let is_live = |one: &&Holding| {
            members.find(&one.peer).is_some_and(|at| members.nodes()[at].is_live())
        };
        let forged = holdings.iter().filter(|one| findings.forged.contains(&one.location()));
        work.surplus.extend(forged.filter(is_live).map(Holding::location));
    }
    let removal = work.removal();
    let Work { missing, waiting, unplaced, steps, .. } = work;
    let (encoding, is_short) =
        (Some(chosen.encoding), chosen.strength() < wanted.redundancy.width());
    Plan { encoding, survives, missing, is_short, waiting, unplaced, steps, removal }
}

/// The members as this blob sees them: peers that refuse its fragments are full.
fn accepting<'a>(members: &'a RepairMembers, findings: &Findings) -> Cow<'a, RepairMembers> {
    let mut members = Cow::Borrowed(members);
    findings.refusing.iter().for_each(|peer| members.to_mut().set_full(peer));
    members
}

/// Completes the plan for a blob without a readable encoding as wanted.
fn unreadable(
    wanted: &Wanted,
    members: &RepairMembers,
    source: Option<&Layout>,
    mut plan: Plan,
) -> Plan {
    let width = wanted.redundancy.width();
    let places = members.places(&wanted.blob, width, &[]);
    let down = places.iter().filter(|at| !members.nodes()[**at].takes()).count();
    plan.waiting = down.min(plan.missing);
    plan.unplaced = plan.missing.min(width - places.len());
    // While a place is down, its peer may have an encoding as wanted.
    if let Some(source) = source
        && down == 0
        && places.len() >= wanted.redundancy.needed()
    {
        let to = places.into_iter().map(|at| members.nodes()[at].id).collect();
        plan.steps.push(Step::Encode { from: source.encoding, to });
    }
    plan
}
