//! The state of a worker, and the only code that changes it.
//!
//! ```text
//!           Start              Pause               nothing in flight
//!   Idle ──────────► Running ─────────► Pausing ─────────────────────► Paused
//!    ▲                │   ▲                ▲              Pause         │ │ │
//!    │           Stop │   │                └────────────────────────────┘ │ │
//!    │                │   └───────────────────────────────────────────────┘ │
//!    │                ▼             Resume, with the ring's memory          │
//!    └─────────── Stopping ◄────────────────────────────────────────────────┘
//!      all answered                             Stop
//!      or left                                             any ──Exit──► Exited
//! ```
//!
//! A resume with a map that lacks a part of the ring leaves the worker Paused. That happens while a
//! hypervisor replaces a region. Then the next change of memory pauses the worker again, or the
//! queue stops.

use std::sync::mpsc::Sender;
use std::time::Instant;

use super::ParkedRequests;

/// The state of a worker.
pub(super) enum WorkerState {
    /// There is no queue.
    Idle,
    /// Requests are popped and submitted.
    Running,
    /// Nothing more is submitted. The sender is answered when nothing is in flight.
    Pausing(Sender<()>),
    /// Nothing is in flight, and guest memory may change.
    Paused,
    /// Requests that were popped come to their end.
    Stopping(Stop),
    /// The thread ends.
    Exited,
}

/// A stop that was requested.
pub(super) struct Stop {
    pub(super) parked: ParkedRequests,
    pub(super) deadline: Instant,
    pub(super) reply: Sender<u16>,
    /// Whether the ring's memory is mapped. Without it nothing can be planned.
    pub(super) is_mapped: bool,
}

/// A [`WorkerState`] without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    Running,
    Pausing,
    Paused,
    Stopping,
    Exited,
}

impl Phase {
    /// Whether a worker may go from this phase to `to`.
    pub(super) fn is_transition_valid(self, to: Phase) -> bool {
        matches!(
            (self, to),
            (Phase::Idle, Phase::Running)
                | (Phase::Running, Phase::Pausing | Phase::Stopping)
                | (Phase::Pausing, Phase::Paused)
                | (Phase::Paused, Phase::Running | Phase::Pausing | Phase::Stopping)
                | (Phase::Stopping, Phase::Idle)
                | (_, Phase::Exited)
        )
    }
}

impl WorkerState {
    pub(super) fn phase(&self) -> Phase {
        match self {
            WorkerState::Idle => Phase::Idle,
            WorkerState::Running => Phase::Running,
            WorkerState::Pausing(_) => Phase::Pausing,
            WorkerState::Paused => Phase::Paused,
            WorkerState::Stopping(_) => Phase::Stopping,
            WorkerState::Exited => Phase::Exited,
        }
    }

    /// Changes the state, and panics if that is illegal. Returns the state before.
    pub(super) fn transition(&mut self, to: WorkerState) -> WorkerState {
        let (from, next) = (self.phase(), to.phase());
        assert!(from.is_transition_valid(next), "a worker goes from {from:?} to {next:?}");
        std::mem::replace(self, to)
    }

    /// Whether requests are popped that no process has seen.
    pub(super) fn takes_requests(&self) -> bool {
        matches!(self, WorkerState::Running)
    }

    /// Whether requests may be planned and submitted.
    pub(super) fn may_plan(&self) -> bool {
        match self {
            WorkerState::Running => true,
            WorkerState::Stopping(stop) => stop.is_mapped,
            _ => false,
        }
    }

    /// The stop that was requested, if there is one.
    pub(super) fn stop(&self) -> Option<&Stop> {
        match self {
            WorkerState::Stopping(stop) => Some(stop),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::{ParkedRequests, Phase, Stop, WorkerState};

    const ALL: [Phase; 6] = [
        Phase::Idle,
        Phase::Running,
        Phase::Pausing,
        Phase::Paused,
        Phase::Stopping,
        Phase::Exited,
    ];

    fn state(phase: Phase) -> WorkerState {
        match phase {
            Phase::Idle => WorkerState::Idle,
            Phase::Running => WorkerState::Running,
            Phase::Pausing => WorkerState::Pausing(channel().0),
            Phase::Paused => WorkerState::Paused,
            Phase::Stopping => WorkerState::Stopping(Stop {
                parked: ParkedRequests::Finish,
                deadline: Instant::now(),
                reply: channel().0,
                is_mapped: true,
            }),
            Phase::Exited => WorkerState::Exited,
        }
    }

    #[test]
    fn the_legal_transitions_are_those_of_the_diagram() {
        let legal: Vec<_> = ALL
            .into_iter()
            .flat_map(|from| ALL.map(|to| (from, to)))
            .filter(|(from, to)| from.is_transition_valid(*to))
            .filter(|(_, to)| *to != Phase::Exited)
            .collect();
        let diagram = [
            (Phase::Idle, Phase::Running),
            (Phase::Running, Phase::Pausing),
            (Phase::Running, Phase::Stopping),
            (Phase::Pausing, Phase::Paused),
            (Phase::Paused, Phase::Running),
            (Phase::Paused, Phase::Pausing),
            (Phase::Paused, Phase::Stopping),
            (Phase::Stopping, Phase::Idle),
        ];
        assert_eq!(legal, diagram);
        assert!(ALL.into_iter().all(|from| from.is_transition_valid(Phase::Exited)));
    }

    #[test]
    fn every_illegal_transition_is_caught() {
        for (from, to) in ALL.into_iter().flat_map(|from| ALL.map(|to| (from, to))) {
            let change = || state(from).transition(state(to)).phase();
            let changed = std::panic::catch_unwind(change).ok();
            assert_eq!(changed, from.is_transition_valid(to).then_some(from), "{from:?} {to:?}");
        }
    }
}
