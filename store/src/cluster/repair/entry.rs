//! A blob under repair, and what this repair knows about it.

use std::collections::HashSet;

use super::plan::{Findings, FragmentLocation, Plan, Rejection, Wanted};
use crate::id::BlobId;

/// The rounds of asking and planning for one blob: for what is missing, for what is surplus then,
/// and for steps that fail.
const MAX_ROUNDS: usize = 6;

/// The most encodings of one blob whose rejection starts the rounds again. A peer holds 64 fragments
/// of a blob, so a client or a peer that stores forged encodings on others cannot use up the rounds.
const MAX_REJECTED: usize = 128;

/// A blob under repair.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) wanted: Wanted,
    pub(super) findings: Findings,
    /// Copies that this repair has stored, less those that it has deleted. As many surplus copies
    /// may be deleted without regard to their age.
    pub(super) stored: usize,
    /// Surplus copies that stay, because a client may rely on them.
    pub(super) spared: HashSet<FragmentLocation>,
    /// Why the last step failed.
    pub(super) reason: Option<String>,
    rounds: usize,
}

impl Entry {
    /// A blob of which this repair has stored `stored` copies.
    pub(super) fn new(wanted: Wanted, stored: usize) -> Entry {
        let (findings, spared) = (Findings::default(), HashSet::new());
        Entry { wanted, findings, stored, spared, reason: None, rounds: 0 }
    }

    /// Whether nothing of a plan can be carried out for now.
    pub(super) fn is_idle(&self, plan: &Plan) -> bool {
        let surplus = plan.removal.iter().flat_map(|removal| &removal.surplus);
        plan.steps.is_empty() && surplus.into_iter().all(|one| self.spared.contains(one))
    }

    /// Starts another round. Returns `false` if there were too many.
    pub(super) fn begin_round(&mut self) -> bool {
        self.rounds += 1;
        self.rounds <= MAX_ROUNDS
    }

    /// Notes that an encoding does not give the blob as it should. Returns whether that is new.
    pub(super) fn reject(&mut self, encoding: BlobId, rejection: Rejection) -> bool {
        let is_new = self.findings.rejected.insert(encoding, rejection).is_none();
        if is_new && self.findings.rejected.len() <= MAX_REJECTED {
            self.rounds = 0;
        }
        is_new
    }
}
