//! Repair: brings every blob back to its full redundancy, and to the peers where it belongs.
//!
//! ```text
//! blobs that must exist ─► ask all peers ─► plan ─► most endangered first ─► execute steps
//!                              ▲            pure                                  │
//!                              └──────────── until nothing is left to do ◄────────┘
//! ```
//!
//! | file | responsibility |
//! |---|---|
//! | `job` | `repair`: scans all blobs, and works on groups of those that have something to do |
//! | `plan` | decides the steps for one blob; pure |
//! | `members` | the peers and their states as repair sees them |
//! | `execute` | `Executor`: carries out the steps for one blob |
//! | `peers` | the trait `Peers`, and its implementation over connections |
//! | `rate_limiter` | bounds the bytes a second |
//! | `report` | what a repair found and did |
//! | `simulation/` | random schedules of failures, without a network or a clock (tests) |

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
