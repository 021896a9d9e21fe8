//! [`Commit`]: content on its way into the catalog.
//!
//! Repair restores only blobs that the catalog refers to. So while content is stored and not yet
//! published, the loss of peers may take blobs away that nobody restores. A commit therefore pins
//! an epoch of the cluster, which ends with the loss of a peer:
//!
//! ```text
//! begin ──► store blobs ──► flush ──► publish ──► same epoch: published
//!  pins E        ▲                       │
//!                │                       └─► another epoch E': ask the peers for all blobs
//!                │                                                    │
//!                └── store again what is missing ◄── pin E' ◄─────────┘
//! ```
//!
//! What is missing is read from the peers that still have enough of it, or from the copy that the
//! caller has. If a blob is in neither place, the commit fails and nothing is published.
//!
//! - The change of the catalog relies on the epoch. So no loss between the last question to the
//!   peers and the publication goes unnoticed.
//! - A commit that continues the work of a previous process, or of a commit that failed, is
//!   *unverified*: it does not know in which epoch the older blobs were stored. It asks for all
//!   blobs before it publishes.
//! - The same holds for collections. The document of the commit protects what was stored since it was
//!   created: for an image a document of its own, for a snapshot that of its mirror. The publication
//!   relies on it. If it has expired, or the catalog was restored from a copy, the commit becomes
//!   unverified.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, PoisonError};

use super::Repository;
use super::attachment::Attachment;
use super::leases::Lease;
use crate::blobs::{Blobs, NewBlob};
use crate::catalog::{Catalog, CommitBasis, Draft, FirstSnapshot, Published, commit_key};
use crate::cluster::Counters;
use crate::encoding::StoragePolicy;
use crate::encoding::fragment::MAX_CONTENT;
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::{BlobId, ChunkId, LeaseId};
use crate::name::ImageName;
use crate::snapshot::{Consistency, Snapshot, SnapshotState};
use crate::tree::{Changes, Referred, Root, TreeUpdate};

/// The most blobs in one question.
const QUERY_BATCH: usize = 4096;

/// What the catalog says of a commit of an image.
const COMMIT_OF_IMAGE: &str = "stores the content of a new image";

/// The chunks that a snapshot changes, in memory; `None` is a hole.
pub type ChangedChunks = BTreeMap<ChunkIndex, Option<ChunkId>>;

/// Reads a local copy of a chunk into a buffer of the image's chunk size. The copy need not be
/// right: it is used only if its hash is the chunk's name. Returns `false` if there is none.
pub type LocalCopy<'a> = &'a dyn Fn(ChunkIndex, &mut [u8]) -> bool;

/// Content on its way into the catalog.
pub struct Commit {
    repository: Repository,
    /// The document of the commit; `None` if that of a mirror protects the content.
    lease: Option<Lease>,
    /// What all blobs of the commit are known to be protected by; `None` if it is unknown.
    basis: Mutex<Option<CommitBasis>>,
    /// The bytes that had gone to the peers when the commit began. If several commits run at the
    /// same time, each of them counts the bytes of all.
    counters: Counters,
}

impl Commit {
    /// A commit of a mirror's snapshot, whose blobs are all stored later, through this process.
    pub(super) fn of_mirror(repository: &Repository, basis: CommitBasis) -> Result<Commit> {
        // Before any blob is put: blobs that are known from an older basis may be lost.
        repository.enter(basis)?;
        let (basis, counters) = (Mutex::new(Some(basis)), repository.counters());
        Ok(Commit { repository: repository.clone(), lease: None, basis, counters })
    }

    /// A commit of a mirror's snapshot, whose blobs were stored on an unknown basis.
    pub(super) fn unverified(repository: &Repository) -> Commit {
        let (basis, counters) = (Mutex::new(None), Counters::default());
        Commit { repository: repository.clone(), lease: None, basis, counters }
    }

    /// A commit of an image, whose blobs are all stored later, through this process.
    pub(super) fn of_image(repository: &Repository) -> Result<Commit> {
        let (lease, basis) = repository.leases().hold(commit_key, begin_commit_of_image)?;
        repository.enter(basis)?;
        let (basis, counters) = (Mutex::new(Some(basis)), repository.counters());
        Ok(Commit { repository: repository.clone(), lease: Some(lease), basis, counters })
    }

    /// Notes that a part of the content was stored before the commit began.
    pub fn mark_unverified(&self) {
        self.pin(None);
    }

    fn pin(&self, basis: Option<CommitBasis>) {
        *self.basis.lock().unwrap_or_else(PoisonError::into_inner) = basis;
    }

    fn basis(&self) -> Option<CommitBasis> {
        *self.basis.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates an image whose first snapshot has this content, which the caller has put.
    ///
    /// `dirty_bytes` is the length of the image's content, and `stored_bytes` the part of it that
    /// was not in the repository before.
    pub fn publish_image(
        &self,
        name: &ImageName,
        geometry: Geometry,
        root: &Root,
        stored_bytes: u64,
        dirty_bytes: u64,
    ) -> Result<Snapshot> {
        let repository = &self.repository;
        let lease = self
            .lease
            .as_ref()
            .ok_or_else(|| Error::BadArgument("the commit is that of a snapshot".into()))?;
        let begin = || lease.create_again(begin_commit_of_image);
        let verify = || self.verify_tree(root, geometry);
        let published = self.with_basis(begin, verify, |basis| {
            repository.flush()?;
            let (sent_bytes, saved_bytes) =
                repository.traffic_since(&self.counters, stored_bytes, dirty_bytes);
            let first = FirstSnapshot {
                root: *root,
                state: repository.published_state(),
                consistency: Consistency::Crash,
                dirty_bytes,
                stored_bytes,
                sent_bytes,
                saved_bytes,
            };
            let draft = Draft::new(name, geometry, repository.policy, &first)?;
            repository.insert(&draft, &basis, Some(lease.id()))
        })?;
        lease.note_removed();
        Ok(published)
    }

    /// Calls `publish` with the basis on which all blobs are stored, until that still holds when the
    /// catalog is changed. Before each call with a further basis, `begin` establishes it, and `verify`
    /// ensures that all blobs are stored.
    fn with_basis<T>(
        &self,
        begin: impl Fn() -> Result<CommitBasis>,
        verify: impl Fn() -> Result<()>,
        publish: impl Fn(CommitBasis) -> Result<Option<T>>,
    ) -> Result<T> {
        loop {
            let basis = match self.basis() {
                Some(basis) => basis,
                None => {
                    let basis = begin()?;
                    self.repository.enter(basis)?;
                    verify()?;
                    self.pin(Some(basis));
                    basis
                }
            };
            if let Some(published) = publish(basis)? {
                return Ok(published);
            }
            tracing::warn!(
                "a peer was lost during a commit, or its document has expired; asking for its blobs"
            );
            self.pin(None);
        }
    }

    /// Ensures that all blobs of a tree are stored.
    fn verify_tree(&self, root: &Root, geometry: Geometry) -> Result<()> {
        let none: LocalCopy<'_> = &|_, _| false;
        let policy = self.repository.policy;
        let mut chunks = Verification::new(&self.repository, policy, none, 0);
        let mut nodes = Verification::new(&self.repository, policy.of_small_blobs(), none, 0);
        let mut failed = None;
        let trees = self.repository.trees();
        let unreadable = trees.references(root, geometry, &mut HashSet::new(), &mut |referred| {
            let added = match referred {
                Referred::Node(id) => nodes.add(id.into(), None),
                Referred::Chunk(id) => chunks.add(id.into(), None),
            };
            failed = failed.take().or(added.err());
        });
        match failed {
            Some(error) => Err(error),
            None => none_lost(nodes.end()? + chunks.end()? + unreadable as usize),
        }
    }

    /// Ensures that changed chunks are stored.
    fn verify_chunks(
        &self,
        changes: &dyn Changes,
        local: LocalCopy<'_>,
        geometry: Geometry,
    ) -> Result<()> {
        let (policy, chunk_size) = (self.repository.policy, geometry.chunk_size() as usize);
        let mut chunks = Verification::new(&self.repository, policy, local, chunk_size);
        let mut from = ChunkIndex(0);
        while let Some((index, id)) = changes.next(from)? {
            if let Some(id) = id {
                chunks.add(id.into(), Some(index))?;
            }
            from = ChunkIndex(index.0 + 1);
        }
        none_lost(chunks.end()?)
    }
}

fn begin_commit_of_image(catalog: &Catalog, id: &LeaseId) -> Result<CommitBasis> {
    catalog.begin_commit(id, COMMIT_OF_IMAGE)
}

fn none_lost(lost: usize) -> Result<()> {
    if lost == 0 { Ok(()) } else { Err(Error::ContentLost { blobs: lost }) }
}

/// Asks for blobs, and stores again those that are missing or lack redundancy.
struct Verification<'a> {
    blobs: &'a dyn Blobs,
    policy: StoragePolicy,
    local: LocalCopy<'a>,
    /// The length of a local copy.
    chunk_size: usize,
    /// Blobs that wait for the next question, with their positions in the image.
    batch: Vec<(BlobId, Option<ChunkIndex>)>,
    buf: Vec<u8>,
    /// How many blobs are nowhere any more.
    lost: usize,
}

impl<'a> Verification<'a> {
    fn new(
        repository: &'a Repository,
        policy: StoragePolicy,
        local: LocalCopy<'a>,
        chunk_size: usize,
    ) -> Verification<'a> {
        let (blobs, batch, buf) = (repository.blobs(), Vec::new(), vec![0; MAX_CONTENT]);
        Verification { blobs, policy, local, chunk_size, batch, buf, lost: 0 }
    }

    fn add(&mut self, blob: BlobId, index: Option<ChunkIndex>) -> Result<()> {
        self.batch.push((blob, index));
        if self.batch.len() >= QUERY_BATCH { self.ask() } else { Ok(()) }
    }

    /// Returns how many of the blobs are lost. The others are on their way to full redundancy: a
    /// flush waits for that.
    fn end(mut self) -> Result<usize> {
        self.ask()?;
        Ok(self.lost)
    }

    fn ask(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        let blobs: Vec<_> = batch.iter().map(|(blob, _)| *blob).collect();
        let known = self.blobs.known(&blobs, &self.policy)?;
        for ((blob, index), _) in batch.into_iter().zip(known).filter(|(_, is_known)| !is_known) {
            self.store_again(blob, index)?;
        }
        Ok(())
    }

    fn store_again(&mut self, blob: BlobId, index: Option<ChunkIndex>) -> Result<()> {
        let len = match self.blobs.get(&blob, &mut self.buf) {
            Ok(len) => len,
            Err(error) => {
                let len = index.and_then(|index| self.read_local(&blob, index));
                match len {
                    Some(len) => len,
                    // It may be readable later.
                    None if error.kind() == ErrorKind::Unavailable => return Err(error),
                    None => {
                        tracing::error!(%blob, %error, "a blob of a commit is lost");
                        self.lost += 1;
                        return Ok(());
                    }
                }
            }
        };
        self.blobs.put(&[NewBlob::new(&self.buf[..len])], &self.policy).map(drop)
    }

    /// Reads the local copy of a chunk, if it has the right content.
    fn read_local(&mut self, blob: &BlobId, index: ChunkIndex) -> Option<usize> {
        let len = self.chunk_size;
        let buf = &mut self.buf[..len];
        ((self.local)(index, buf) && BlobId::of(buf) == *blob).then_some(len)
    }
}

/// A snapshot of an attached mirror on its way into the catalog. [`Attachment::begin`] returns it.
pub struct SnapshotCommit<'a> {
    attachment: &'a Attachment,
    number: u64,
    /// The shape of the snapshot.
    geometry: Geometry,
    commit: Commit,
    /// The number and the root of the snapshot that it is derived from, after the publication.
    base: Mutex<(u64, Root)>,
}

impl<'a> SnapshotCommit<'a> {
    pub(super) fn new(
        attachment: &'a Attachment,
        number: u64,
        geometry: Geometry,
        commit: Commit,
    ) -> Self {
        SnapshotCommit { attachment, number, geometry, commit, base: Mutex::default() }
    }

    /// Returns the snapshot's number.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Notes that a part of the content was stored before the commit began.
    pub fn mark_unverified(&self) {
        self.commit.mark_unverified();
    }

    /// Stores the tree that differs from the mirror's parent by these chunks, which the caller has
    /// put. Makes everything durable. Then, in one transaction, publishes the snapshot and moves
    /// the mirror's reference to it. The same content may be published again.
    ///
    /// A snapshot whose parent is only *available* is published as *available*. A later
    /// [`complete`](Self::complete) or the next repair makes it stable.
    pub fn publish(
        &self,
        changes: &dyn Changes,
        stored_bytes: u64,
        local: LocalCopy<'_>,
    ) -> Result<Snapshot> {
        let (parent, base) = self.attachment.parent();
        *self.base.lock().unwrap_or_else(PoisonError::into_inner) = (parent, base);
        let state = self.commit.repository.published_state();
        let verify = || self.commit.verify_chunks(changes, local, self.geometry);
        self.commit.with_basis(
            || self.begin_again(),
            verify,
            |basis| {
                let update = self.store_tree(&base, changes)?;
                self.commit.repository.flush()?;
                let stored_bytes = stored_bytes + update.new_bytes;
                let dirty_bytes = self.attachment.chunk_bytes(changes.count());
                let published =
                    self.published(state, parent, &update.root, stored_bytes, dirty_bytes, basis);
                let published = Published { base: Some(base), ..published };
                self.attachment.publish(self.number, published)
            },
        )
    }

    /// As [`publish`](Self::publish), for a whole tree that the caller has put.
    pub fn publish_tree(
        &self,
        root: &Root,
        stored_bytes: u64,
        dirty_bytes: u64,
    ) -> Result<Snapshot> {
        let (parent, _) = self.attachment.parent();
        let state = self.commit.repository.published_state();
        let verify = || self.commit.verify_tree(root, self.geometry);
        self.commit.with_basis(
            || self.begin_again(),
            verify,
            |basis| {
                self.commit.repository.flush()?;
                let published =
                    self.published(state, parent, root, stored_bytes, dirty_bytes, basis);
                self.attachment.publish(self.number, published)
            },
        )
    }

    /// Waits until a snapshot that [`publish`](Self::publish) has published with these chunks has
    /// its full redundancy, and makes it *stable*. Fails while its parent is not stable.
    pub fn complete(
        &self,
        snapshot: &Snapshot,
        changes: &dyn Changes,
        local: LocalCopy<'_>,
    ) -> Result<Snapshot> {
        let (parent, base) = *self.base.lock().unwrap_or_else(PoisonError::into_inner);
        let Snapshot { root, stored_bytes, dirty_bytes, .. } = *snapshot;
        let verify = || {
            self.commit.verify_chunks(changes, local, self.geometry)?;
            self.store_tree(&base, changes).map(drop)
        };
        // The published snapshot protects its blobs.
        let begin = || self.commit.repository.catalog().commit_basis();
        let completed = self.commit.with_basis(begin, verify, |basis| {
            self.commit.repository.flush_all()?;
            let state = SnapshotState::Stable;
            let published = self.published(state, parent, &root, stored_bytes, dirty_bytes, basis);
            self.attachment.complete(snapshot, published)
        })?;
        match completed.state {
            SnapshotState::Stable => Ok(completed),
            _ => Err(Error::LostMeanwhile { name: snapshot.name().to_string() }),
        }
    }

    /// Establishes a basis again: the mirror's document protects what is stored from here on, and the
    /// content of the parent.
    fn begin_again(&self) -> Result<CommitBasis> {
        let (basis, is_parent_unverified) = self.attachment.begin_again()?;
        if is_parent_unverified {
            self.commit.repository.enter(basis)?;
            let parent = self.attachment.parent();
            self.commit.verify_tree(&parent.1, self.geometry)?;
            self.attachment.note_parent_verified(parent)?;
        }
        Ok(basis)
    }

    fn store_tree(&self, base: &Root, changes: &dyn Changes) -> Result<TreeUpdate> {
        self.commit.repository.commit_tree(base, self.geometry, changes)
    }

    fn published(
        &self,
        state: SnapshotState,
        parent: u64,
        root: &Root,
        stored_bytes: u64,
        dirty_bytes: u64,
        basis: CommitBasis,
    ) -> Published {
        let Commit { repository, counters, .. } = &self.commit;
        let (sent_bytes, saved_bytes) =
            repository.traffic_since(counters, stored_bytes, dirty_bytes);
        let (root, record) = (*root, None);
        Published {
            root,
            state,
            stored_bytes,
            dirty_bytes,
            sent_bytes,
            saved_bytes,
            parent,
            basis,
            base: None,
            record,
        }
    }
}

#[cfg(test)]
mod tests;
