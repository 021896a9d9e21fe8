//! Maintenance of a cluster: one supervisor declares peers lost and starts repairs.
//!
//! ```text
//! supervisor ─► repair ─► repair_lease: one repair at a time
//!                  │
//!                  ├─► repository: which blobs are referenced
//!                  └─► cluster::repair: plan and execute
//! ```
//!
//! | file | responsibility |
//! |---|---|
//! | `supervisor` | the threads that declare peers lost and decide when to repair |
//! | `repair` | the repair job: repairs all referenced blobs, sweeps drained peers |
//! | `repair_lease` | the document that lets one repair run at a time |

mod repair;
mod repair_lease;
pub mod supervisor;
#[cfg(test)]
mod sweep_tests;
