//! The report of a repair: what it found and what it did.

use std::collections::{BTreeMap, BTreeSet};

use super::plan::{FragmentLocation, Plan};
use crate::id::{BlobId, PeerId};

/// The most blob names, reasons, and wrong fragments in a report.
const MAX_ENTRIES: usize = 10_000;

/// A fragment that matches its checksum and is not what the blob gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WrongFragment {
    /// The peer that has it.
    pub peer: PeerId,
    /// The blob's name.
    pub blob: BlobId,
    /// The hash of its encoding's description.
    pub encoding: BlobId,
    /// The block's index.
    pub index: u8,
}

impl WrongFragment {
    pub(super) fn new(blob: BlobId, place: &FragmentLocation) -> WrongFragment {
        let FragmentLocation { peer, encoding, index } = *place;
        WrongFragment { peer, blob, encoding, index }
    }
}

/// What a repair found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Blobs that were examined.
    pub blobs: u64,
    /// Blobs that were found with less than their redundancy.
    pub under: u64,
    /// Blobs that still have less than their redundancy.
    pub left: u64,
    /// Blobs that lack fragments that a peer that is down may have. Repair waits for the peer.
    pub waiting: u64,
    /// Fragments that were computed from others.
    pub rebuilt: u64,
    /// Fragments that were copied to their places.
    pub moved: u64,
    /// Surplus fragments that were deleted.
    pub dropped: u64,
    /// Copies of records that got a seal of the current key in place of an older one.
    pub resealed: u64,
    /// Fragments that a peer claimed to have but did not send, or sent damaged.
    pub damaged: u64,
    /// Fragments with right checksums and wrong content that were found. Only blobs with surplus
    /// fragments, and blobs that lack some, are read. The set is bounded, so there may be more.
    pub wrong: BTreeSet<WrongFragment>,
    /// Bytes of blocks that were read and written.
    pub bytes: u64,
    /// How many more losses the weakest blob survives; `None` if there are no blobs, less than 0 if
    /// it cannot be read.
    pub survives: Option<i64>,
    /// Blobs that cannot be read. The list is bounded, so there may be more.
    pub unreadable: Vec<BlobId>,
    /// Tree nodes that could not be read. The blobs below them were not examined.
    pub unread: u64,
    /// Why steps could not be carried out.
    pub failures: Vec<String>,
    /// Whether the repair was stopped before it was complete.
    pub is_stopped: bool,
    /// Blobs whose final state is known.
    settled: u64,
    /// Blobs that still have less than their redundancy, since the last progress.
    short: Vec<BlobId>,
}

impl Report {
    /// Whether something is left to do, perhaps when more peers are back.
    pub fn is_incomplete(&self) -> bool {
        self.left > 0
            || self.is_stopped
            || self.unread > 0
            || !self.failures.is_empty()
            || !self.unreadable.is_empty()
    }

    /// The peers that hold wrong fragments, and the number of these.
    pub fn suspects(&self) -> BTreeMap<PeerId, u64> {
        let mut suspects = BTreeMap::new();
        self.wrong.iter().for_each(|one| *suspects.entry(one.peer).or_default() += 1);
        suspects
    }

    /// Whether the final state of all blobs is known.
    pub fn is_settled(&self) -> bool {
        !self.is_stopped && self.settled == self.blobs
    }

    /// The blobs whose final state is that they have less than their redundancy or cannot be read,
    /// and which no earlier call of `progress` got. There may be very many, so a report does not
    /// collect them.
    pub fn newly_short(&self) -> &[BlobId] {
        &self.short
    }

    /// Shows the report so far to `progress`.
    pub(super) fn advance(&mut self, progress: &dyn Fn(&Report)) {
        progress(self);
        self.short.clear();
    }

    /// Adds the final state of a blob.
    pub(super) fn settle(&mut self, blob: &BlobId, plan: &Plan) {
        self.settled += 1;
        if plan.is_short || plan.survives < 0 {
            self.short.push(*blob);
        }
        self.left += u64::from(plan.is_short);
        self.waiting += u64::from(plan.waiting > 0);
        let survives = i64::from(plan.survives);
        self.survives = Some(self.survives.map_or(survives, |worst| worst.min(survives)));
        if plan.survives < 0 && self.unreadable.len() < MAX_ENTRIES {
            self.unreadable.push(*blob);
        }
    }

    /// Adds a wrong fragment.
    pub(super) fn note_wrong(&mut self, wrong: WrongFragment) {
        if self.wrong.len() < MAX_ENTRIES {
            self.wrong.insert(wrong);
        }
    }

    /// Adds the reason for a step that could not be carried out.
    pub(crate) fn fail(&mut self, reason: String) {
        if self.failures.len() < MAX_ENTRIES {
            self.failures.push(reason);
        }
    }

    /// Adds the report of another task of the same repair.
    pub(super) fn add(&mut self, other: Report) {
        self.blobs += other.blobs;
        self.under += other.under;
        self.left += other.left;
        self.waiting += other.waiting;
        self.rebuilt += other.rebuilt;
        self.moved += other.moved;
        self.dropped += other.dropped;
        self.resealed += other.resealed;
        self.damaged += other.damaged;
        other.wrong.into_iter().for_each(|one| self.note_wrong(one));
        self.bytes += other.bytes;
        self.survives = match (self.survives, other.survives) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        let room = MAX_ENTRIES.saturating_sub(self.unreadable.len());
        self.unreadable.extend(other.unreadable.into_iter().take(room));
        other.failures.into_iter().for_each(|reason| self.fail(reason));
        self.is_stopped |= other.is_stopped;
        self.unread += other.unread;
        self.settled += other.settled;
        self.short.extend(other.short);
    }
}
