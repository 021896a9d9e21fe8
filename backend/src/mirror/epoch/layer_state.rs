//! The state of an epoch from its beginning to the end of its layer, and the only code that
//! changes it.
//!
//! ```text
//!   Open ──► Frozen ──► Settled ──► Abandoned ──┐
//!                         │  │          │       │
//!                         │  └──────────┼───────┼──► Closed
//!                         ▼             ▼       │      ▲
//!                       Failed ──────► Lost ────┴──────┤
//!                         └────────────────────────────┘
//! ```
//!
//! | state | meaning | guards its chunks | its changes are in |
//! |---|---|---|---|
//! | Open | the current epoch: writes go into it | no | this epoch |
//! | Frozen | a checkpoint ended it; writes of it may be in flight | all writes wait | this epoch |
//! | Settled | no write of the epoch is in flight; its chunks are being stored | yes | this epoch |
//! | Failed | old content was lost; the checkpoint has not ended | no | also the current epoch |
//! | Abandoned | the checkpoint failed; a later layer can absorb this one | yes | this epoch |
//! | Lost | the checkpoint failed and old content was lost | no | also the current epoch |
//! | Closed | the snapshot is published, or the changes are in another epoch | no | elsewhere |
//!
//! The state is one word in shared memory, so a process that takes over finds the last state that
//! was set. Before a state is set, everything that it promises is stored: the changes of a layer
//! join the current epoch before the layer is Failed or Lost, and before it is Closed without a
//! snapshot. The reason of a failure is written before Failed or Lost. Recovery joins the changes
//! of Failed and Lost layers again. After a crash no write is in flight, so Frozen becomes Settled.
//! A Closed epoch has nothing to recover.
//!
//! The record of the checkpoint that ended the epoch is not a state: a guest write may settle the
//! layer before the checkpoint is recorded. A frozen epoch without that record belongs to a
//! checkpoint that was never answered.

use std::sync::atomic::{AtomicU64, Ordering};

use self::LayerState::{Abandoned, Closed, Failed, Frozen, Lost, Open, Settled};

/// The state of an epoch and its layer. The values are those of the epoch file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum LayerState {
    Open = 0,
    Frozen = 1,
    Settled = 2,
    Failed = 3,
    Abandoned = 4,
    Lost = 5,
    Closed = 6,
}

impl LayerState {
    const ALL: [LayerState; 7] = [Open, Frozen, Settled, Failed, Abandoned, Lost, Closed];

    /// Whether an epoch may go from this state to `to`.
    pub(crate) fn is_transition_valid(self, to: LayerState) -> bool {
        matches!(
            (self, to),
            (Open, Frozen)
                | (Frozen, Settled)
                | (Settled, Failed | Abandoned | Closed)
                | (Failed, Lost | Closed)
                | (Abandoned, Lost | Closed)
                | (Lost, Closed)
        )
    }

    /// Whether no write of the epoch is in flight, so that its dirty set is final.
    pub(crate) fn is_settled(self) -> bool {
        !matches!(self, Open | Frozen)
    }

    /// Whether writes have to preserve the blocks of chunks that are not stored yet.
    pub(crate) fn is_guarding(self) -> bool {
        matches!(self, Frozen | Settled | Abandoned)
    }

    /// Whether old content was lost, so that no snapshot can be made of the epoch.
    pub(crate) fn has_failed(self) -> bool {
        matches!(self, Failed | Lost)
    }

    /// Whether the checkpoint ended without a snapshot.
    pub(crate) fn is_abandoned(self) -> bool {
        matches!(self, Abandoned | Lost)
    }

    /// The state that `word` holds; `None` if it is the value of no state.
    pub(super) fn load(word: &AtomicU64) -> Option<LayerState> {
        let value = word.load(Ordering::Acquire);
        LayerState::ALL.into_iter().find(|state| *state as u64 == value)
    }

    /// Changes the state in `word` from `from` to `to`, and panics if that is illegal. Returns
    /// `false`, without a change, if the word is not in `from` any more.
    pub(super) fn transition(word: &AtomicU64, from: LayerState, to: LayerState) -> bool {
        assert!(from.is_transition_valid(to), "an epoch goes from {from:?} to {to:?}");
        let (from, to) = (from as u64, to as u64);
        word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::LayerState::{self, Abandoned, Closed, Failed, Frozen, Lost, Open, Settled};

    #[test]
    fn the_legal_transitions_are_those_of_the_diagram() {
        let legal: Vec<_> = LayerState::ALL
            .into_iter()
            .flat_map(|from| LayerState::ALL.map(|to| (from, to)))
            .filter(|(from, to)| from.is_transition_valid(*to))
            .collect();
        let diagram = [
            (Open, Frozen),
            (Frozen, Settled),
            (Settled, Failed),
            (Settled, Abandoned),
            (Settled, Closed),
            (Failed, Lost),
            (Failed, Closed),
            (Abandoned, Lost),
            (Abandoned, Closed),
            (Lost, Closed),
        ];
        assert_eq!(legal, diagram);
    }

    #[test]
    fn every_illegal_transition_is_caught() {
        for (from, to) in
            LayerState::ALL.into_iter().flat_map(|from| LayerState::ALL.map(|to| (from, to)))
        {
            let word = AtomicU64::new(from as u64);
            let change = || LayerState::transition(&word, from, to);
            let is_caught = std::panic::catch_unwind(change).is_err();
            assert_eq!(is_caught, !from.is_transition_valid(to), "{from:?} to {to:?}");
            let expected = if is_caught { from } else { to };
            assert_eq!(LayerState::load(&word), Some(expected));
        }
    }

    #[test]
    fn a_transition_from_a_state_that_is_over_changes_nothing() {
        let word = AtomicU64::new(Settled as u64);
        assert!(!LayerState::transition(&word, Frozen, Settled));
        assert_eq!(LayerState::load(&word), Some(Settled));
        assert_eq!(LayerState::load(&AtomicU64::new(77)), None);
    }
}
