//! The state of a chunk in an epoch, and the only code that changes it.
//!
//! ```text
//!          a write changes it       persist takes it       its content is durable
//!   Clean ──────────────────► Scheduled ──────────────► Pending ──────────────► Idle
//!                                 ▲                        │
//!                                 └────────────────────────┘ storing it failed
//! ```
//!
//! While a chunk of a frozen epoch is Scheduled or Pending, the epoch *guards* it: a guest write
//! must preserve the old content of a block before it changes the block. Idle is final: the epoch
//! needs nothing of the mirror's chunk any more.
//!
//! Clean, Scheduled and Idle are kept in shared memory, as one bit for "dirty" and one bit for
//! "idle", and survive the process. Pending is known to the process alone. A process that takes
//! over finds the chunk Scheduled and stores it again. Each transition changes one bit, so the
//! process can end between any two stores.

use cairn_store::ChunkIndex;

use crate::mirror::bits::{Bits, DirtySet};

/// The state of one chunk in one epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkState {
    /// The epoch did not change the chunk.
    Clean,
    /// The epoch changed the chunk, and its content is not in the repository yet.
    Scheduled,
    /// A thread of this process is storing the chunk.
    Pending,
    /// The content that the chunk had in this epoch is durable in the repository.
    Idle,
}

impl ChunkState {
    /// Whether a chunk may go from this state to `to`.
    pub(crate) fn is_transition_valid(self, to: ChunkState) -> bool {
        matches!(
            (self, to),
            (ChunkState::Clean, ChunkState::Scheduled)
                | (ChunkState::Scheduled, ChunkState::Pending)
                | (ChunkState::Pending, ChunkState::Scheduled | ChunkState::Idle)
        )
    }

    /// Whether a write has to preserve the chunk's blocks before it changes them.
    pub(crate) fn is_guarded(self) -> bool {
        matches!(self, ChunkState::Scheduled | ChunkState::Pending)
    }
}

/// The states of an epoch's chunks. The bits are in shared memory.
///
/// The caller keeps the bit for Pending and passes it as `is_taken`. For all transitions but
/// Clean → Scheduled the caller holds a lock on the chunk.
pub(crate) struct ChunkStates {
    dirty: DirtySet,
    idle: Bits,
}

impl ChunkStates {
    pub(super) fn new(dirty: DirtySet, idle: Bits) -> ChunkStates {
        ChunkStates { dirty, idle }
    }

    /// The chunks that the epoch changed.
    pub(crate) fn dirty(&self) -> &DirtySet {
        &self.dirty
    }

    /// Derives a chunk's state. `is_taken` tells whether this process is storing the chunk.
    pub(super) fn get(&self, chunk: ChunkIndex, is_taken: bool) -> ChunkState {
        match (self.dirty.contains(chunk.0), self.idle.get(chunk.0), is_taken) {
            (false, ..) => ChunkState::Clean,
            (true, true, _) => ChunkState::Idle,
            (true, false, true) => ChunkState::Pending,
            (true, false, false) => ChunkState::Scheduled,
        }
    }

    /// Changes a chunk's state, and panics if the transition is illegal.
    pub(super) fn set(&self, chunk: ChunkIndex, is_taken: &mut bool, to: ChunkState) {
        let from = self.get(chunk, *is_taken);
        assert!(from.is_transition_valid(to), "chunk {} goes from {from:?} to {to:?}", chunk.0);
        match to {
            ChunkState::Clean => unreachable!("no transition leads back to Clean"),
            ChunkState::Scheduled if from == ChunkState::Clean => self.dirty.insert(chunk.0),
            ChunkState::Scheduled => *is_taken = false,
            ChunkState::Pending => *is_taken = true,
            ChunkState::Idle => drop(self.idle.set(chunk.0)),
        }
    }

    /// Clean → Scheduled. A chunk that has left Clean stays as it is. Several threads may do this
    /// to one chunk at the same time.
    pub(crate) fn schedule(&self, chunk: u64) {
        self.dirty.insert(chunk);
    }

    /// Makes room for the chunks of a disk that has grown. The file must have space for them.
    pub(super) fn grow(&self, chunks: u64) {
        self.idle.grow(chunks);
        self.dirty.grow(chunks);
    }

    /// Takes over bits that another process has set for `chunks` chunks.
    pub(super) fn adopt(&self, chunks: u64) {
        self.dirty.recount(chunks);
    }

    /// Sets the bit for Idle alone, as random bytes in shared memory could.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn corrupt_idle(&self, chunk: u64) {
        self.idle.set(chunk);
    }
}

#[cfg(test)]
mod tests {
    use cairn_store::ChunkIndex;

    use super::ChunkState::{Clean, Idle, Pending, Scheduled};
    use super::{Bits, ChunkState, ChunkStates, DirtySet};

    const ALL: [ChunkState; 4] = [Clean, Scheduled, Pending, Idle];
    const CHUNK: ChunkIndex = ChunkIndex(3);

    fn states() -> ChunkStates {
        let bits = |len| Bits::zeroed(len).unwrap();
        ChunkStates::new(DirtySet::new(bits(100), bits(2)), bits(100))
    }

    #[test]
    fn the_legal_transitions_are_those_of_the_diagram() {
        let legal: Vec<_> = ALL
            .into_iter()
            .flat_map(|from| ALL.map(|to| (from, to)))
            .filter(|(from, to)| from.is_transition_valid(*to))
            .collect();
        let diagram =
            [(Clean, Scheduled), (Scheduled, Pending), (Pending, Scheduled), (Pending, Idle)];
        assert_eq!(legal, diagram);
    }

    #[test]
    fn a_chunk_has_the_state_that_it_was_given_and_the_others_stay_clean() {
        let (states, mut is_taken) = (states(), false);
        assert_eq!(states.get(CHUNK, is_taken), Clean);
        for to in [Scheduled, Pending, Scheduled, Pending, Idle] {
            states.set(CHUNK, &mut is_taken, to);
            assert_eq!(states.get(CHUNK, is_taken), to);
        }
        states.schedule(CHUNK.0);
        assert_eq!(states.get(CHUNK, false), Idle, "idle is final");
        assert_eq!(states.get(ChunkIndex(4), false), Clean);
    }

    #[test]
    fn a_process_that_takes_over_finds_a_pending_chunk_scheduled() {
        let (states, mut is_taken) = (states(), false);
        states.schedule(CHUNK.0);
        states.set(CHUNK, &mut is_taken, Pending);
        assert_eq!(states.get(CHUNK, false), Scheduled);
    }

    #[test]
    fn every_illegal_transition_is_caught() {
        let path_to = |state| match state {
            Clean => &[][..],
            Scheduled => &[Scheduled][..],
            Pending => &[Scheduled, Pending],
            Idle => &[Scheduled, Pending, Idle],
        };
        for (from, to) in ALL.into_iter().flat_map(|from| ALL.map(|to| (from, to))) {
            let (states, mut is_taken) = (states(), false);
            path_to(from).iter().for_each(|step| states.set(CHUNK, &mut is_taken, *step));
            let change = || states.set(CHUNK, &mut is_taken, to);
            let change = std::panic::AssertUnwindSafe(change);
            let is_caught = std::panic::catch_unwind(change).is_err();
            assert_eq!(is_caught, !from.is_transition_valid(to), "{from:?} to {to:?}");
        }
    }
}
