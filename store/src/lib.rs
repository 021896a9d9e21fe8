//! The repository of disk snapshots: chunks, trees, names and leases.
//!
//! ```text
//!                 Repository ──────────── attach ──► Attachment
//!                 │    │    │                         │ reserve, begin, publish, renew
//!      put, get   │    │    └───────── Catalog ◄──────┘
//!                 │    │ chunk_at,     the names: images, snapshots, mirrors, leases
//!                 │    │ commit_tree
//!                 │  Trees             nodes of 256 children, cached, path-copied
//!                 ▼    ▼
//!                 Blobs                immutable bytes under the name of their content
//! ```
//!
//! A snapshot is written as: [`Repository::put_chunks`] for the changed chunks that are not
//! [zero](is_zero), [`Repository::commit_tree`] over the parent's root, [`Attachment::publish`].
//! Everything before the publication is garbage after a crash, everything after it is permanent.
//!
//! One repository is used by many processes at once: each of them opens it, and nothing is served.
//! `docs/formats.md` describes the bytes on disk.

mod blobs;
mod buffers;
mod catalog;
mod clock;
pub mod cluster;
pub mod documents;
mod durable;
pub mod encoding;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod geometry;
mod id;
pub mod maintenance;
mod name;
pub mod net;
mod process;
mod repository;
mod snapshot;
mod sys;
#[cfg(test)]
mod testing;
mod tree;
mod zero;

pub use blobs::{Blobs, NewBlob};
pub use catalog::{LEASE_SECONDS, Rebuilt};
pub use clock::now;
pub use cluster::Counters;
pub use error::{Error, ErrorKind, Result};
pub use geometry::{
    ChunkIndex, DEFAULT_CHUNK_SIZE, Geometry, MAX_CHUNK_SIZE, MAX_SIZE, MIN_CHUNK_SIZE, SECTOR_SIZE,
};
pub use id::{BlobId, CatalogId, ChunkId, InvalidId, MirrorId, NodeId, PeerId};
pub use name::{ImageName, MAX_NAME, Selector, SnapshotRef};
pub use process::{boot_id, host_name};
pub use repository::attachment::{Attachment, MAX_RESERVED};
pub use repository::{Durability, PutChunk, Repository, ReservedSpace};
pub use snapshot::{
    Consistency, Image, MirrorOwner, MirrorRecord, Mode, NewSnapshot, Snapshot, SnapshotState,
};
pub use tree::{Chunks, Root, TreeUpdate};
pub use zero::is_zero;
