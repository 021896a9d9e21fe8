//! Repair: brings every blob back to its full redundancy, and to the peers where it belongs.
//!
//! ```text
//! blobs that must exist ─┬─► plan ─► most endangered first ─► ask the peers, plan ─► execute: adds
//! lists of the peers ────┘   pure                                 ▲                        │
//!                                                                 └─ until nothing is left ┤
//!                                                                                          ▼
//!                                     remove: decodes and compares what is kept, then deletes
//! ```
//!
//! | file | responsibility |
//! |---|---|
//! | `job` | `repair`: scans all blobs, and works on groups of those that have something to do |
//! | `listings` | the lists of all peers, merged |
//! | `plan` | decides what to do about one blob; pure |
//! | `members` | the peers and their states as repair sees them |
//! | `entry` | one blob under repair, and what this repair knows about it |
//! | `execute` | `Executor`: carries out the steps for one blob that add |
//! | `memory` | the memory that a plan takes; pure |
//! | `read` | reads fragments, and decodes a blob from them |
//! | `check` | reads all fragments of blobs and changes nothing; repairs what a check has found |
//! | `verify` | compares fragments with the blob's name; pure |
//! | `remove` | deletes the surplus of one blob |
//! | `peers` | the trait `Peers`, and its implementation over connections |
//! | `rate_limiter` | bounds the bytes a second |
//! | `shared` | the state that all tasks of a repair share, and the limits |
//! | `report` | what a repair found and did |
//! | `simulation/` | random schedules of failures, without a network or a clock (tests) |

mod check;
#[cfg(test)]
mod check_tests;
#[cfg(test)]
mod deletion_tests;
mod entry;
mod execute;
#[cfg(test)]
mod forged_tests;
mod job;
mod listings;
mod members;
mod memory;
mod peers;
mod plan;
mod rate_limiter;
mod read;
mod remove;
mod report;
mod shared;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
mod verify;

pub use check::{CheckedBlob, FoundBlob, FragmentProblem, FragmentState};
pub(crate) use check::{check_fragments, repair_found};
pub use job::repair;
pub use members::{PeerState, RepairMembers, RepairPeer};
#[cfg(test)]
pub(crate) use peers::permit_all;
pub use peers::{ConnectedPeers, DELETION_TIMEOUT, DeletionPermit, Peers, PermitFuture};
pub use plan::{Findings, FragmentLocation, Holding, Plan, Rejection, Removal, Step, Wanted, plan};
pub use report::{Report, WrongFragment};
pub use shared::RepairLimits;
