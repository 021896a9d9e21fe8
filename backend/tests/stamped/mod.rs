//! A writer that stamps what it writes, and the checker of the snapshots taken meanwhile.
//!
//! ```text
//! load ── stamped writes on every queue ──► device          control ◄── checkpoints
//!   │ submission and acknowledgement of each                    │ request and answer of each
//!   ▼                                                           ▼
//! history: one order of all events (one counter)  ──► checker ◄── the snapshot's bytes
//! ```

pub(crate) mod checker;
#[cfg(test)]
mod checker_tests;
pub(crate) mod history;
pub(crate) mod load;
pub(crate) mod pingpong;
pub(crate) mod stamp;
