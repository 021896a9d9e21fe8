//! A peer: a process that keeps fragments for others.

mod group_commit;
pub mod heartbeat;
mod limits;
#[cfg(test)]
mod served_tests;
mod server;
pub(crate) mod store;

pub use server::serve;
pub use store::{PeerStore, Room};
