//! The client of a cluster: many peers as one blob store.
//!
//! ```text
//! threads ─► blobs, window ─► cluster ─► pool ─► connection ─► peer
//!                 │             │  ▲
//!                 └─► known     │  └─ watcher ◄─ catalog
//!                               └─► assemble: fragments ─► blob
//! ```
//!
//! | file | responsibility |
//! |---|---|
//! | `blobs` | `ClusterBlobs`, the implementation of `Blobs`, and its threads |
//! | `window` | the blobs that were put and are not stored with full redundancy yet |
//! | `known` | asks the peers which blobs they have |
//! | `recent_set` | a bounded set of recently used names |
//! | `cluster` | `Cluster`: stores and reads blobs on the ranked peers |
//! | `assemble` | decodes a blob from its fragments, and finds wrong blocks |
//! | `records` | stores and lists the records of snapshots |
//! | `reservation` | reserves space on the peers for a commit |
//! | `pool` | one connection to each peer, with back-off |
//! | `connection` | the protocol's requests as calls |
//! | `watcher` | `MembershipWatcher`: updates the members from the catalog, reports suspects |

pub(crate) mod assemble;
mod blobs;
#[cfg(test)]
pub(crate) mod blobs_tests;
mod cluster;
pub(crate) mod connection;
#[cfg(test)]
mod hostile_peer_tests;
mod known;
pub(crate) mod pool;
mod recent_set;
pub(crate) mod records;
pub(crate) mod reservation;
pub(crate) mod watcher;
mod window;

pub use blobs::{ClusterBlobs, Counters};
pub use cluster::{Cluster, Stored};
pub use connection::Connection;
