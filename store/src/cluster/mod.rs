//! A repository whose blobs are on many machines, the *peers*.
//!
//! ```text
//! client: blob ─► k data blocks, m parity ─► ranked peers ─► connection ─► peer: log, one sync
//!    ▲                                          └─ a peer that fails          │
//!    │                                             is passed over             │ heartbeats
//!    │                                                                        │
//!    └─ watches ──────────────── catalog: members, images, snapshots ◄────────┘
//!                                   └─ supervisor: declares peers lost, runs repair
//! ```
//!
//! | module | responsibility |
//! |---|---|
//! | `placement/` | which peers hold a blob: a pure function of its name and the members |
//! | `protocol/` | the requests and answers between clients and peers |
//! | `membership` | the members' documents in the catalog: heartbeats, states, suspects |
//! | `list_check` | checks a list that a peer sends in pages |
//! | `client/` | many peers as one blob store: the window, reads, connections, reservations |
//! | `peer/` | a process that stores fragments: server, limits, group commit, log and table |
//! | `repair/` | back to full redundancy: the plan for a blob, its execution, the repair job |
//!
//! The supervisor is in [`maintenance`](crate::maintenance). `docs/cluster.md` describes the whole.

pub mod client;
pub(crate) mod list_check;
pub mod membership;
pub mod peer;
pub mod placement;
pub mod protocol;
pub mod repair;
#[cfg(test)]
pub(crate) mod stalling_proxy;
#[cfg(test)]
pub(crate) mod tests;

pub use client::{Cluster, ClusterBlobs, Connection, Counters, Stored};
pub use placement::{Member, MemberState};
