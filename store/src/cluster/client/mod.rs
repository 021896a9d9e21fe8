//! The client of a cluster: many peers as one place for blobs.

pub(crate) mod assemble;
mod blobs;
#[cfg(test)]
pub(crate) mod blobs_tests;
mod cluster;
pub(crate) mod connection;
mod known;
pub(crate) mod pool;
mod recent_set;
mod records;
mod reservation;
pub(crate) mod watcher;
mod window;

pub use blobs::{ClusterBlobs, Counters};
pub use cluster::{Cluster, Stored};
pub use connection::Connection;
