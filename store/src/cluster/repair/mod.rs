//! Repair: every blob at its full redundancy, at the places where the ranking wants it.
//!
//! ```text
//! blobs that must exist ──► ask all peers ──► plan ──► the most endangered first ──► steps
//!                              ▲               pure                                    │
//!                              └──────────── until there is nothing left to do ◄───────┘
//! ```

mod execute;
mod job;
mod members;
mod peers;
mod plan;
mod rate_limiter;
mod report;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

pub use job::{RepairLimits, repair};
pub use members::{PeerState, RepairMembers, RepairPeer};
pub use peers::{ConnectedPeers, DELETION_TIMEOUT, Peers};
pub use plan::{FragmentLocation, Holding, Plan, Step, plan};
pub use report::Report;
