//! What a repair has found and done.

use std::collections::HashSet;

use super::plan::Plan;
use crate::id::BlobId;

/// Names and reasons that a report has at most.
const MAX_TOLD: usize = 10_000;

/// What a repair has found, and what it has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Blobs that were looked at.
    pub blobs: u64,
    /// Of them, those that were found with less than their redundancy.
    pub under: u64,
    /// Of them, those that have less than their redundancy still.
    pub left: u64,
    /// Of them, those of which a peer that is down may have a part: nothing is done about that.
    pub waiting: u64,
    /// Fragments that were computed from others.
    pub rebuilt: u64,
    /// Fragments that were copied to where they belong.
    pub moved: u64,
    /// Fragments that were surplus.
    pub dropped: u64,
    /// Fragments that a peer said to have, and did not, or not as they should be.
    pub damaged: u64,
    /// Bytes of blocks that were read and written.
    pub bytes: u64,
    /// How many more losses the worst blob survives; nothing if there are no blobs. Less than 0 if it cannot
    /// be read.
    pub survives: Option<i64>,
    /// Blobs that cannot be read. There may be more of them than are named here.
    pub unreadable: Vec<BlobId>,
    /// Nodes of trees that could not be read, so that nothing below them was looked at.
    pub unread: u64,
    /// What could not be done, and why.
    pub failures: Vec<String>,
    /// It was ended before it was done.
    pub is_stopped: bool,
    /// Blobs of which it is known how they are in the end, and which of them have less than their redundancy still.
    settled: u64,
    short: HashSet<BlobId>,
}

impl Report {
    /// Whether there is something left to do, maybe when some peers are back.
    pub fn is_incomplete(&self) -> bool {
        self.left > 0
            || self.is_stopped
            || self.unread > 0
            || !self.failures.is_empty()
            || !self.unreadable.is_empty()
    }

    /// The blobs that have less than their redundancy still, if it is known of all how they are.
    pub(crate) fn short(&self) -> Option<&HashSet<BlobId>> {
        (!self.is_stopped && self.settled == self.blobs).then_some(&self.short)
    }

    /// Adds what is known of a blob in the end.
    pub(super) fn settle(&mut self, blob: &BlobId, plan: &Plan) {
        self.settled += 1;
        if plan.missing > 0 || plan.survives < 0 {
            self.short.insert(*blob);
        }
        self.left += u64::from(plan.missing > 0);
        self.waiting += u64::from(plan.waiting > 0);
        let survives = i64::from(plan.survives);
        self.survives = Some(self.survives.map_or(survives, |worst| worst.min(survives)));
        if plan.survives < 0 && self.unreadable.len() < MAX_TOLD {
            self.unreadable.push(*blob);
        }
    }

    /// Adds something that was not done.
    pub(super) fn fail(&mut self, reason: String) {
        if self.failures.len() < MAX_TOLD {
            self.failures.push(reason);
        }
    }

    /// Adds what another part of the same repair has found and done.
    pub(super) fn add(&mut self, other: Report) {
        self.blobs += other.blobs;
        self.under += other.under;
        self.left += other.left;
        self.waiting += other.waiting;
        self.rebuilt += other.rebuilt;
        self.moved += other.moved;
        self.dropped += other.dropped;
        self.damaged += other.damaged;
        self.bytes += other.bytes;
        self.survives = match (self.survives, other.survives) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        let room = MAX_TOLD.saturating_sub(self.unreadable.len());
        self.unreadable.extend(other.unreadable.into_iter().take(room));
        other.failures.into_iter().for_each(|reason| self.fail(reason));
        self.is_stopped |= other.is_stopped;
        self.unread += other.unread;
        self.settled += other.settled;
        self.short.extend(other.short);
    }
}
