//! A repository on many machines.

pub mod client;
pub mod membership;
pub mod peer;
pub mod placement;
pub mod protocol;
pub mod repair;
#[cfg(test)]
pub(crate) mod tests;

pub use client::{Cluster, ClusterBlobs, Connection, Counters, Stored};
pub use placement::{Member, MemberState};
