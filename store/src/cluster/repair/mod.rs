//! Repair: every blob at its full redundancy, at the places where the ranking wants it.
//!
//! ```text
//! blobs that must exist ──► ask all peers ──► plan ──► the most endangered first ──► steps
//!                              ▲               pure                                    │
//!                              └──────────── until there is nothing left to do ◄───────┘
//! ```

mod matching;
mod members;
mod plan;
#[cfg(test)]
mod simulation;

pub use members::{Members, Node, State};
pub use plan::{Holding, Plan, Step, plan};
