//! Scheduled and manual work that keeps a cluster whole.
//!
//! | file | does |
//! |---|---|
//! | [`supervisor`] | watches the members, declares peers lost, schedules repair |
//! | `repair` | repairs everything that the catalog refers to |
//! | `repair_lease` | ensures that one process repairs at a time |
//! | `references` | lists the blobs that the catalog refers to |
//! | `rebuild` | restores a lost catalog from the records on the peers |

mod rebuild;
mod references;
mod repair;
mod repair_lease;
pub mod supervisor;
#[cfg(test)]
mod sweep_tests;

pub use rebuild::rebuild_catalog;
pub use repair::{has_available, repair_all, repair_while};
