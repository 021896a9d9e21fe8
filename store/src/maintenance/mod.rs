//! What keeps a cluster whole: the supervisor, and the repair of all that the catalog refers to.

mod repair;
mod repair_lease;
pub mod supervisor;
#[cfg(test)]
mod sweep_tests;
