//! The repository of disk snapshots, as a library: in a directory or on many machines.
//!
//! ```text
//!                 Repository ──────────── attach ──► Attachment: a mirror's hold on its image
//!                 │    │    │                         │ reserve, begin, publish, renew
//!      put, get   │    │    └───────── Catalog ◄──────┘
//!                 │    │ chunk_at,     images, snapshots, mirrors and leases, as documents
//!                 │    │ commit_tree
//!                 │  Trees             nodes of 256 children, cached, path-copied
//!                 ▼    ▼
//!                 Blobs                immutable bytes under the name of their content
//!                 ├─ a directory       segments and an index
//!                 └─ a cluster         fragments on peers
//! ```
//!
//! To store a snapshot, a writer calls [`Repository::put_chunks`] for the changed chunks that are
//! not [zero](is_zero), then [`Repository::commit_tree`] over the parent's root, then
//! [`SnapshotCommit::publish`]. After a crash, everything before the publication is garbage, and
//! everything after it is permanent.
//!
//! Modules use only modules above them in this table, and `make lint` checks that they form no
//! cycle.
//!
//! | module | is |
//! |---|---|
//! | `id`, `error`, `geometry`, `name`, `metadata`, `clock`, `process`, `sys`, `buffers`, `zero` | basics |
//! | `durable` | files on a local disk: segments, data directories, databases |
//! | [`collection`] | the numbers of collections, which stamp every blob |
//! | [`encoding`] | how a blob becomes fragments: redundancy, frames, Reed-Solomon, seals |
//! | [`net`] | connections: identity and TLS, handshake, frames, requests in flight |
//! | [`documents`] | small documents with compare-and-swap: SQLite, a server, etcd |
//! | `blobs` | the trait [`Blobs`], and blobs in a directory |
//! | `tree` | Merkle trees over chunk names |
//! | `snapshot` | what the catalog says about images, snapshots and mirrors |
//! | [`retention`] | which snapshots a policy keeps: pure functions |
//! | [`cluster`] | peers and their clients: protocol, placement, membership, repair |
//! | `catalog` | images, snapshots, mirrors and leases, and their records on peers |
//! | `repository` | [`Repository`], [`Attachment`] and [`Commit`] |
//! | [`maintenance`] | supervisor, repair of everything, rebuild of a catalog, verification |
//!
//! Many processes use one repository at once. `docs/formats.md` describes the bytes on disk and on
//! the wire.

mod blobs;
mod buffers;
mod catalog;
mod clock;
pub mod cluster;
pub mod collection;
pub mod documents;
mod durable;
pub mod encoding;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod geometry;
mod id;
pub mod maintenance;
pub mod metadata;
mod name;
pub mod net;
mod planted;
mod process;
mod repository;
pub mod retention;
mod snapshot;
mod sys;
#[cfg(test)]
mod testing;
mod tree;
mod zero;

pub use blobs::{Blobs, NewBlob};
pub use catalog::{
    AppliedPolicy, Catalog, CompletedCollection, LEASE_SECONDS, MAX_LABELS, MirrorUse, Rebuilt,
    SnapshotEdit, SpaceHolder, VerifiedTimes,
};
pub use clock::now;
pub use cluster::Counters;
pub use error::{Error, ErrorKind, Result};
pub use geometry::{
    ChunkIndex, DEFAULT_CHUNK_SIZE, Geometry, MAX_CHUNK_SIZE, MAX_SIZE, MIN_CHUNK_SIZE, SECTOR_SIZE,
};
pub use id::{
    BlobId, CatalogId, CertificateSerial, ChunkId, ImageId, InvalidId, LeaseId, MirrorId, NodeId,
    PeerId,
};
pub use metadata::Metadata;
pub use name::{ImageName, MAX_NAME, Scope, Selector, SnapshotRef};
pub use process::{LockedFile, boot_id, host_name};
pub use repository::attachment::{Attachment, MAX_RESERVED};
pub use repository::commit::{ChangedChunks, Commit, LocalCopy, SnapshotCommit};
pub use repository::{Durability, PutChunk, ReaderLease, Repository, ReservedSpace};
pub use snapshot::{
    Consistency, Image, MirrorOwner, MirrorParent, MirrorRecord, Mode, NewSnapshot, Snapshot,
    SnapshotState,
};
pub use tree::{
    ChangedRange, Changes, Chunks, Difference, Differences, RangeContent, Root, TreeUpdate,
};
pub use zero::is_zero;
