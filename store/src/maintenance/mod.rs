//! Scheduled and manual work that keeps a repository whole.
//!
//! ```text
//! supervisor ─┬─► prune: snapshots that policies do not keep
//!             ├─► collection_schedule: when ─► collection
//!             ├─► repair_schedule: when
//!             └─► repair ─► repair_lease: one repair at a time
//!                    ├─► references: which blobs the catalog refers to
//!                    ├─► records: which records the peers list
//!                    ├─► wanted: both, sorted
//!                    ├─► cluster::repair: plan and execute
//!                    └─► whole_snapshots: which snapshots become stable
//! collection: catalog ─► mark ─► sweep of the directory or of the peers
//! rebuild: records on the peers ─► catalog
//! verify: all blobs of snapshots ─► which of them cannot be read
//! usage: all roots ─► what only one of them refers to
//! ```
//!
//! | file | responsibility |
//! |---|---|
//! | [`supervisor`] | the threads that declare peers lost, repair, prune and collect |
//! | [`prune`] | removes the snapshots that retention policies do not keep |
//! | `repair_schedule` | the decision when to repair |
//! | `repair` | the repair job: repairs all referenced blobs, sweeps drained peers |
//! | `repair_lease` | the document that lets one repair run at a time |
//! | `records` | the records that the peers list |
//! | `references` | the blobs that the catalog refers to |
//! | `unlisted` | snapshots that only records on the peers know |
//! | [`unused_mirrors`] | forgets the mirrors that no process uses |
//! | `wanted` | the wanted blobs in the order of their names, in temporary files |
//! | `whole_snapshots` | the *available* snapshots of which nothing is short |
//! | [`collection`] | deletes the blobs that nothing refers to |
//! | `collection_schedule` | the decision when to collect |
//! | `rebuild` | a lost catalog, restored from the records on the peers |
//! | [`verify`] | reads every blob of snapshots, in a directory too |
//! | [`usage`] | what images and snapshots take, and what their removal frees |

pub mod collection;
mod collection_schedule;
pub mod prune;
#[cfg(test)]
mod prune_tests;
mod rebuild;
mod records;
mod references;
mod repair;
mod repair_lease;
mod repair_schedule;
#[cfg(test)]
mod seal_tests;
pub mod supervisor;
#[cfg(test)]
mod sweep_tests;
mod unlisted;
pub mod unused_mirrors;
pub mod usage;
pub mod verify;
mod wanted;
mod whole_snapshots;

pub use rebuild::rebuild_catalog;
pub use repair::{has_available, repair_all, repair_blobs, repair_while};
pub use wanted::{SortedWanted, WantedBlobs};
