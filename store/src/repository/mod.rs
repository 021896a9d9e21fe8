//! [`Repository`]: one handle on blobs, trees and the catalog.
//!
//! | file | contains |
//! |---|---|
//! | `open` | the constructors: in a directory, or on peers |
//! | `layout` | the layout of a repository in a directory |
//! | `attachment` | the attachment of a mirror to its image: reserve, begin, fail, release |
//! | `leases` | the documents of commits and readers, which this process renews |
//! | `commit` | content on its way into the catalog: publish, complete |

pub(crate) mod attachment;
pub(crate) mod commit;
mod layout;
mod leases;
mod open;

use std::sync::{Arc, Mutex, PoisonError};

use self::attachment::Attachment;
use self::commit::Commit;
use self::leases::{Lease, Leases};
use crate::blobs::directory::DirectoryBlobs;
use crate::blobs::{Blobs, NewBlob};
use crate::catalog::{
    Catalog, CommitBasis, Draft, MirrorReference, MirrorUse, PruneCheck, Record, Refused,
    SnapshotEdit, UnusedRule, reader_key,
};
use crate::cluster::client::Cluster;
use crate::cluster::client::records::FoundRecords;
use crate::cluster::client::reservation::Reservation;
use crate::cluster::client::watcher::MembershipWatcher;
use crate::cluster::membership::{self, Health};
use crate::cluster::{ClusterBlobs, Counters};
use crate::documents::Documents;
use crate::encoding::{Redundancy, StoragePolicy};
use crate::error::{Error, Result};
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::{BlobId, ChunkId, ImageId, LeaseId, MirrorId};
use crate::name::{ImageName, SnapshotRef};
use crate::net::identity::Security;
use crate::snapshot::{MirrorOwner, MirrorParent, Mode, Snapshot, SnapshotState};
use crate::tree::{ChangedRange, Changes, Chunks, Differences, Root, TreeUpdate, Trees};

/// The result of [`Repository::put_chunk`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutChunk {
    /// The chunk's name.
    pub id: ChunkId,
    /// The bytes that were added: 0 if the repository already had the chunk.
    pub new_bytes: u64,
}

/// Space on the peers. The reservation ends when this is dropped. In a directory no space is
/// reserved.
pub struct ReservedSpace(Option<(Arc<ClusterBlobs>, Reservation)>);

impl Drop for ReservedSpace {
    fn drop(&mut self) {
        if let Some((blobs, reserved)) = &self.0 {
            blobs.release(reserved);
        }
    }
}

/// Keeps the content of a snapshot readable until it is dropped.
pub struct ReaderLease(Lease);

impl ReaderLease {
    /// Whether the content was protected all the time, as far as this process knows. It was not if
    /// this process, or its way to the catalog, was stopped for many minutes.
    pub fn is_held(&self) -> bool {
        self.0.is_held()
    }
}

/// The condition under which content counts as stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Content is stored when it is durable with its full redundancy.
    #[default]
    Pessimistic,
    /// Content is stored when enough fragments are durable to read it. The other fragments follow.
    Optimistic,
}

/// A handle on a repository. Clones are cheap and share everything.
#[derive(Clone)]
pub struct Repository {
    inner: Arc<Inner>,
    /// The redundancy and compression of blobs that are put through this handle.
    policy: StoragePolicy,
    durability: Durability,
}

struct Inner {
    blobs: Arc<dyn Blobs>,
    trees: Arc<Trees>,
    catalog: Catalog,
    documents: Arc<dyn Documents>,
    /// `None` if the blobs are on peers.
    directory: Option<Arc<DirectoryBlobs>>,
    /// `None` if the blobs are in a directory.
    cluster: Option<ClusterPart>,
    /// The basis on which the cached names of stored blobs were learned.
    known_since: Mutex<Option<CommitBasis>>,
    leases: Leases,
}

/// The parts that only the repository of a cluster has.
struct ClusterPart {
    blobs: Arc<ClusterBlobs>,
    watcher: MembershipWatcher,
}

impl Repository {
    /// Returns a handle that stores blobs with this policy.
    pub fn with_policy(&self, policy: StoragePolicy) -> Self {
        Self { policy, ..self.clone() }
    }

    /// Returns a handle with this durability.
    pub fn with_durability(&self, durability: Durability) -> Self {
        Self { durability, ..self.clone() }
    }

    /// Returns the durability of this handle.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// Returns the default redundancy of a new image. It depends on the number of peers that are up
    /// or down: lost and draining peers do not count.
    pub fn default_redundancy(&self) -> Result<Redundancy> {
        match &self.inner.cluster {
            Some(_) => {
                let (peers, _) = membership::peers(&*self.inner.documents)?;
                let usable =
                    peers.iter().filter(|peer| matches!(peer.health, Health::Up | Health::Down));
                Ok(Redundancy::for_peers(usable.count()))
            }
            None => Ok(Redundancy::NONE),
        }
    }

    /// Returns the cluster client and the documents that describe the members. Returns `None` if
    /// the repository is in a directory.
    pub fn cluster(&self) -> Option<(&Cluster, &dyn Documents)> {
        let cluster = self.inner.cluster.as_ref()?;
        Some((cluster.watcher.cluster(), &*self.inner.documents))
    }

    // Images and snapshots.

    /// Creates an image whose first snapshot is empty.
    pub fn create_image(&self, name: &ImageName, geometry: Geometry) -> Result<Snapshot> {
        self.publish_image(name, geometry, &Root::default(), 0, 0)
    }

    /// Begins a commit of content that is put after this call.
    pub fn begin_commit(&self) -> Result<Commit> {
        Commit::of_image(self)
    }

    /// Begins to read a snapshot. Its content stays readable until the result is dropped, even if
    /// the snapshot is removed and a collection runs.
    pub fn begin_reading(&self, snapshot: &Snapshot, what: &str) -> Result<ReaderLease> {
        let begin = |catalog: &Catalog, id: &LeaseId| catalog.begin_reading(id, snapshot, what);
        let (lease, ()) = self.inner.leases.hold(reader_key, begin)?;
        Ok(ReaderLease(lease))
    }

    /// Creates an image whose first snapshot has this content, which may have been put at any time:
    /// see [`Commit::publish_image`].
    pub fn publish_image(
        &self,
        name: &ImageName,
        geometry: Geometry,
        root: &Root,
        stored_bytes: u64,
        dirty_bytes: u64,
    ) -> Result<Snapshot> {
        let commit = self.begin_commit()?;
        commit.mark_unverified();
        commit.publish_image(name, geometry, root, stored_bytes, dirty_bytes)
    }

    /// Stores the record of a draft and adds the image to the catalog. Returns `None` if the basis is
    /// gone: see [`Catalog::insert`].
    pub(crate) fn insert(
        &self,
        draft: &Draft,
        basis: &CommitBasis,
        commit: Option<&LeaseId>,
    ) -> Result<Option<Snapshot>> {
        let epoch = basis.epoch;
        // Before the record is stored: a rebuilt catalog must not mistake this draft for the image
        // that has the name, or restore it if this process is killed.
        match &self.inner.cluster {
            Some(_) if !self.inner.catalog.begin_draft(draft, epoch)? => return Ok(None),
            Some(_) => {}
            None => self.inner.catalog.check_free(draft)?,
        }
        let record = self.put_record(draft.record(epoch), self.published_state())?;
        let inserted = self.inner.catalog.insert(draft, basis, commit, record);
        let is_refused = match &inserted {
            Ok(inserted) => inserted.is_none(),
            // Another process took the name, or the source is gone. After other errors, such as an
            // unreachable catalog, the image may have been inserted, so its record must stay valid.
            Err(error) => matches!(
                error,
                Error::ImageExists { .. } | Error::BeingRemoved { .. } | Error::NoSnapshot { .. }
            ),
        };
        if is_refused && let Err(error) = self.bury_draft(&draft.id()) {
            tracing::warn!(%error, "a repair removes the record of an image that was not created");
        }
        inserted
    }

    /// Gives up the creation of an image: stores its tombstone, and removes the note of its draft.
    /// Does nothing if the image was created.
    pub(crate) fn bury_draft(&self, id: &ImageId) -> Result<()> {
        // Before the tombstone is stored: nobody may create the image after that.
        let Some(tombstone) = self.inner.catalog.give_up_draft(id)? else { return Ok(()) };
        self.put_record(tombstone, SnapshotState::Stable)?;
        self.inner.catalog.end_draft(id)
    }

    /// Reserves space on the peers for `bytes` of chunks that are put through this handle. Fails if
    /// the peers do not have enough free space.
    pub fn reserve_space(&self, bytes: u64) -> Result<ReservedSpace> {
        let reserve = |cluster: &ClusterPart| {
            let reserved = cluster.blobs.reserve(bytes, &self.policy)?;
            Ok((Arc::clone(&cluster.blobs), reserved))
        };
        self.inner.cluster.as_ref().map(reserve).transpose().map(ReservedSpace)
    }

    /// Returns the bytes that went to the peers through this handle and its clones. In a directory
    /// all counters are 0.
    pub fn counters(&self) -> Counters {
        self.inner.cluster.as_ref().map(|cluster| cluster.blobs.counters()).unwrap_or_default()
    }

    /// Returns the bytes that were sent and saved since `before`. In a directory, the sent bytes
    /// are those that were stored, and the saved bytes are the rest of the dirty bytes.
    pub(crate) fn traffic_since(&self, before: &Counters, stored: u64, dirty: u64) -> (u64, u64) {
        if self.inner.cluster.is_none() {
            return (stored, dirty.saturating_sub(stored));
        }
        let now = self.counters();
        (now.sent.saturating_sub(before.sent), now.saved.saturating_sub(before.saved))
    }

    /// Prepares for a commit on this basis, which was just read from the catalog. From here on blobs
    /// get at least its stamp. If the last commit was on another basis:
    ///
    /// - Updates the members. A peer that was declared lost may still answer.
    /// - Forgets which blobs are stored. A lost peer may have held blobs that no snapshot refers to,
    ///   which repair does not restore; and a collection may delete those with older stamps.
    pub(crate) fn enter(&self, basis: CommitBasis) -> Result<()> {
        self.inner.blobs.raise_stamp(basis.collection);
        let Some(cluster) = &self.inner.cluster else { return Ok(()) };
        let known_since = &self.inner.known_since;
        let mut known_since = known_since.lock().unwrap_or_else(PoisonError::into_inner);
        if *known_since != Some(basis) {
            cluster.watcher.update()?;
            cluster.blobs.forget_known();
            *known_since = Some(basis);
        }
        Ok(())
    }

    /// Returns the blobs on the peers; `None` in a directory.
    pub(crate) fn blobs_on_peers(&self) -> Option<&ClusterBlobs> {
        self.inner.cluster.as_ref().map(|cluster| &*cluster.blobs)
    }

    /// Returns the state of a snapshot whose content was flushed.
    pub(crate) fn published_state(&self) -> SnapshotState {
        match self.durability {
            Durability::Pessimistic => SnapshotState::Stable,
            Durability::Optimistic => SnapshotState::Available,
        }
    }

    /// Stores the record of a snapshot durably on the peers and returns the record's name. The
    /// record of a stable snapshot has its full redundancy. A directory needs no records, because
    /// its catalog is lost together with the blobs; the result is then `None`.
    pub(crate) fn put_record(
        &self,
        record: Record,
        state: SnapshotState,
    ) -> Result<Option<BlobId>> {
        let Some(cluster) = &self.inner.cluster else { return Ok(None) };
        let record = record.with_peers(cluster.watcher.cluster().members().len() as u64);
        let policy = record.policy().of_small_blobs();
        let lenient = state != SnapshotState::Stable;
        cluster.blobs.put_record(&record.to_bytes(), &policy, lenient).map(Some)
    }

    /// Stores the record of a mirror on the peers, so that it can be read. Repair completes its
    /// redundancy.
    fn put_mirror_record(&self, record: &MirrorReference) -> Result<()> {
        let Some(blobs) = self.blobs_on_peers() else { return Ok(()) };
        let policy = self.policy.of_small_blobs();
        blobs.put_record(&record.to_bytes(), &policy, true).map(drop)
    }

    /// Stores a record that a mirror is gone. A failure is only logged: a rebuilt catalog then
    /// keeps content that nobody needs.
    pub(crate) fn put_mirror_removal(&self, mirror: &MirrorId) {
        if let Err(error) =
            self.put_mirror_record(&MirrorReference::removal(*mirror, self.policy.redundancy))
        {
            tracing::warn!(%error, "a rebuilt catalog may have a mirror that is gone");
        }
    }

    /// Removes a mirror that no longer exists from the catalog. Fails while a process uses it.
    pub fn forget_mirror(&self, id: &MirrorId) -> Result<()> {
        let forgotten = self.inner.catalog.forget_mirror(id)?;
        self.with_policy(forgotten.policy.unwrap_or(self.policy)).put_mirror_removal(id);
        Ok(())
    }

    /// Removes a mirror that no process uses from the catalog. Returns the use of one that stays.
    pub(crate) fn forget_unused_mirror(
        &self,
        id: &MirrorId,
        rule: &UnusedRule,
    ) -> Result<Option<MirrorUse>> {
        match self.inner.catalog.forget_unused_mirror(id, rule)? {
            Some(Ok(forgotten)) => {
                self.with_policy(forgotten.policy.unwrap_or(self.policy)).put_mirror_removal(id);
                Ok(None)
            }
            Some(Err(used)) => Ok(Some(used)),
            None => Ok(None),
        }
    }

    /// Creates an image whose first snapshot has the content of `source`. Copies no content.
    pub fn clone_snapshot(&self, source: &SnapshotRef, name: &ImageName) -> Result<Snapshot> {
        let source = self.inner.catalog.resolve(source)?;
        loop {
            // The blobs are the source's, so another epoch is no reason to ask for them.
            let basis = self.inner.catalog.commit_basis()?;
            if let Some(clone) = self.insert(&Draft::clone_of(&source, name)?, &basis, None)? {
                return Ok(clone);
            }
        }
    }

    /// Removes a snapshot from the catalog. Refuses to remove a pinned one, and the last snapshot with
    /// content. The blobs stay until garbage collection, and mirrors that are based on the snapshot
    /// keep their content.
    ///
    /// In a cluster the removal is complete when the peers have a record of it with its full
    /// redundancy. If they cannot store it, the call fails and the snapshot is *removing*; the same
    /// call completes the removal later.
    pub fn remove_snapshot(&self, name: &SnapshotRef) -> Result<Snapshot> {
        let (snapshot, tombstone) = self.inner.catalog.begin_removal(name)?;
        self.put_record(tombstone, SnapshotState::Stable)?;
        self.inner.catalog.finish_removal(&snapshot)?;
        Ok(snapshot)
    }

    /// Removes a snapshot as [`remove_snapshot`](Self::remove_snapshot) does, if what a prune has
    /// decided by still holds.
    pub(crate) fn prune_snapshot(
        &self,
        name: &SnapshotRef,
        check: &PruneCheck,
    ) -> Result<Option<Refused>> {
        match self.inner.catalog.begin_pruning(name, check)? {
            Ok((snapshot, tombstone)) => {
                self.put_record(tombstone, SnapshotState::Stable)?;
                self.inner.catalog.finish_removal(&snapshot)?;
                Ok(None)
            }
            Err(refused) => Ok(Some(refused)),
        }
    }

    /// Changes the labels, the pin, the metadata or the obsolete mark of a snapshot. Returns the
    /// snapshot as it is then.
    ///
    /// In a cluster the call returns when the peers have a record of the change with its full
    /// redundancy. If they cannot store it, the call fails, and only the catalog has the change; the
    /// same call stores the record later.
    pub fn edit_snapshot(&self, name: &SnapshotRef, edit: &SnapshotEdit) -> Result<Snapshot> {
        let edited = self.inner.catalog.edit(name, edit)?;
        let (edits, snapshot) = (edited.edits(), edited.snapshot);
        if let Some(record) = self.put_record(edited.record, SnapshotState::Stable)? {
            self.inner.catalog.note_record(&snapshot, edits, record)?;
        }
        Ok(snapshot)
    }

    /// Removes an image and all its snapshots from the catalog. Fails while mirrors refer to the
    /// image, unless `force` is set. Always fails while a live writer holds the image's lease, and
    /// while a snapshot is pinned. It is complete under the same condition as [`remove_snapshot`](Self::remove_snapshot).
    pub fn remove_image(&self, name: &ImageName, force: bool) -> Result<()> {
        let tombstone = self.inner.catalog.begin_image_removal(name, force)?;
        self.put_record(tombstone.clone(), SnapshotState::Stable)?;
        self.inner.catalog.finish_image_removal(name, &tombstone)
    }

    // Content.

    /// Returns the name of the chunk at `index`, or `None` for a hole.
    pub fn chunk_at(
        &self,
        root: &Root,
        geometry: Geometry,
        index: ChunkIndex,
    ) -> Result<Option<ChunkId>> {
        self.inner.trees.chunk_at(root, geometry, index)
    }

    /// Reads a chunk and verifies that its hash is `id`. `buf` must have the length of the image's
    /// chunks. After an error the content of `buf` is undefined.
    pub fn read_chunk(&self, id: &ChunkId, buf: &mut [u8]) -> Result<()> {
        let len = self.inner.blobs.get(&(*id).into(), buf)?;
        if len == buf.len() {
            return Ok(());
        }
        let reason = format!("it has {len} bytes, {} are expected", buf.len());
        Err(Error::corrupt(format!("chunk {id}"), reason))
    }

    /// Stores chunks under their names and returns how many bytes the repository did not have.
    ///
    /// - Each chunk has the full length of the image's chunks.
    /// - A chunk of zeros is a hole and must not be put (see [`is_zero`](crate::is_zero)).
    /// - A chunk at an address that is a multiple of 4096 is written with direct I/O, if the file
    ///   system supports it, and is not copied through the page cache.
    /// - One call with many chunks is faster than many calls.
    pub fn put_chunks(&self, chunks: &[NewBlob<'_>]) -> Result<u64> {
        for chunk in chunks {
            debug_assert!(!crate::is_zero(chunk.content), "a chunk of zeros is a hole");
        }
        self.inner.blobs.put(chunks, &self.policy)
    }

    /// Stores one chunk and returns its name.
    pub fn put_chunk(&self, content: &[u8]) -> Result<PutChunk> {
        let chunk = NewBlob::new(content);
        let id = chunk.chunk_id();
        Ok(PutChunk { id, new_bytes: self.put_chunks(&[chunk])? })
    }

    /// Stores the tree that differs from `base` by these chunks; `None` is a hole. Equal content
    /// has the same root, whichever base it was derived from.
    pub fn commit_tree(
        &self,
        base: &Root,
        geometry: Geometry,
        changes: &dyn Changes,
    ) -> Result<TreeUpdate> {
        self.inner.trees.commit(base, geometry, changes, &self.policy)
    }

    /// Returns when everything that was put through this handle and its clones is stored, as
    /// defined by this handle's durability. Every process can then read it.
    pub fn flush(&self) -> Result<()> {
        match self.durability {
            Durability::Pessimistic => self.inner.blobs.flush(),
            Durability::Optimistic => match &self.inner.cluster {
                Some(cluster) => cluster.blobs.flush_available(),
                None => self.inner.blobs.flush(),
            },
        }
    }

    /// Returns when everything that was put is durable with its full redundancy, regardless of this
    /// handle's durability.
    pub fn flush_all(&self) -> Result<()> {
        self.inner.blobs.flush()
    }

    /// Iterates over the chunks of a tree in order, without the holes.
    pub fn chunks(&self, root: &Root, geometry: Geometry) -> Chunks {
        self.inner.trees.chunks(root, geometry)
    }

    /// Iterates over the chunks in which two snapshots differ, in order. Subtrees that both have are
    /// not read. The disks may have different sizes. Fails if their chunk sizes differ.
    pub fn differences(&self, old: &Snapshot, new: &Snapshot) -> Result<Differences> {
        let [old, new] = [old, new].map(|one| (&one.root, one.geometry));
        self.inner.trees.differences(old, new)
    }

    /// Passes the ranges in which the disk of `second` differs from that of `first` to `each`, in order.
    /// The snapshots may be of different images. Equal parts of their trees are not read. Fails with
    /// the error of `each` if it returns one, and if the chunks have different sizes.
    pub fn changed_ranges(
        &self,
        first: &Snapshot,
        second: &Snapshot,
        mut each: impl FnMut(ChangedRange) -> Result<()>,
    ) -> Result<()> {
        first.require_content()?;
        second.require_content()?;
        let tree = |one: &Snapshot| (one.root, one.geometry);
        let ((one, before), (other, after)) = (tree(first), tree(second));
        self.inner.trees.changed_ranges((&one, before), (&other, after), &mut each)
    }

    // Mirrors.

    /// Attaches a mirror to its image, for the first time or again.
    ///
    /// A mirror that was attached before keeps its own parent (see [`Attachment::parent`]),
    /// regardless of `snapshot`. [`Mode::ReadWrite`] takes the image's lease; if another writer
    /// holds it, the call fails and the error names the holder.
    pub fn attach(
        &self,
        owner: &MirrorOwner,
        snapshot: &Snapshot,
        mode: Mode,
    ) -> Result<Attachment> {
        self.attach_at(owner, snapshot, mode, None)
    }

    /// As [`attach`](Self::attach), for a mirror that has data. `parent` is the mirror's own record
    /// of its parent. If the catalog does not know the mirror, because it was rebuilt, the mirror
    /// continues from `parent`. Fails if the catalog does not have that snapshot. Also fails if the
    /// mirror has published a snapshot that its own record does not know: the directory is an older
    /// copy of the mirror.
    pub fn attach_again(
        &self,
        owner: &MirrorOwner,
        snapshot: &Snapshot,
        mode: Mode,
        parent: &MirrorParent,
    ) -> Result<Attachment> {
        self.attach_at(owner, snapshot, mode, Some(parent))
    }

    fn attach_at(
        &self,
        owner: &MirrorOwner,
        snapshot: &Snapshot,
        mode: Mode,
        parent: Option<&MirrorParent>,
    ) -> Result<Attachment> {
        let (catalog, repository) = (&self.inner.catalog, self.with_policy(snapshot.policy));
        if repository.blobs_on_peers().is_some()
            && let Some(record) = catalog.new_mirror(owner, snapshot, mode, parent)?
        {
            repository.put_mirror_record(&record)?;
        }
        let (holder, number, root) = catalog.attach(owner, snapshot, mode, parent)?;
        Ok(Attachment::new(repository, holder, snapshot.geometry, (number, root)))
    }

    /// Returns the keys of the cluster's connections; `None` in a directory.
    pub(crate) fn security(&self) -> Option<&Security> {
        self.inner.cluster.as_ref().map(|cluster| cluster.watcher.security())
    }

    /// Reads the records on the peers; `None` in a directory.
    pub(crate) fn records(&self) -> Option<FoundRecords> {
        self.blobs_on_peers().map(ClusterBlobs::records)
    }

    pub(crate) fn leases(&self) -> &Leases {
        &self.inner.leases
    }

    /// Returns the blobs in a directory; `None` if they are on peers.
    pub(crate) fn blobs_in_directory(&self) -> Option<&DirectoryBlobs> {
        self.inner.directory.as_deref()
    }

    pub(crate) fn documents(&self) -> &dyn Documents {
        &*self.inner.documents
    }

    pub(crate) fn blobs(&self) -> &dyn Blobs {
        &*self.inner.blobs
    }

    pub(crate) fn trees(&self) -> &Trees {
        &self.inner.trees
    }

    /// Returns the catalog: images, snapshots and mirrors.
    pub fn catalog(&self) -> &Catalog {
        &self.inner.catalog
    }
}
