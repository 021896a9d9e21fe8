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
pub struct Report {
    pub blobs: u64,
    pub under: u64,
    pub rebuilt: u64,
    pub moved: u64,
    pub dropped: u64,
    pub bytes: u64,
    pub survives: Option<i64>,
    pub unreadable: Vec<crate::id::BlobId>,
    pub failures: Vec<crate::error::Error>,
}
impl Report {
    pub fn is_incomplete(&self) -> bool {
        true
    }
}
