//! The repository as one object: blobs, trees and the catalog.
//!
//! | file | has |
//! |---|---|
//! | `open` | the constructors: in a directory, or on peers |
//! | `layout` | the directory of a repository |
//! | `attachment` | a mirror's hold on its image: reserve, begin, publish, fail |

pub(crate) mod attachment;
mod layout;
mod open;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use self::attachment::Attachment;
use crate::blobs::Blobs;
use crate::catalog::{Catalog, Draft, FirstSnapshot, Record};
use crate::cluster::client::Cluster;
use crate::cluster::client::watcher::MembershipWatcher;
use crate::cluster::membership::{self, Health};
use crate::cluster::{ClusterBlobs, Counters};
use crate::documents::Documents;
use crate::encoding::{Redundancy, StoragePolicy};
use crate::error::{Error, Result};
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::{BlobId, ChunkId, PeerId};
use crate::name::{ImageName, SnapshotRef};
use crate::net::identity::Security;
use crate::snapshot::{Consistency, MirrorOwner, Mode, Snapshot, SnapshotState};
use crate::tree::{Chunks, Root, TreeUpdate, Trees};

/// What [`Repository::put_chunk`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutChunk {
    /// The chunk's name.
    pub id: ChunkId,
    /// Bytes that the repository did not have: 0 if it had the chunk.
    pub new_bytes: u64,
}

/// Space on the peers that stays reserved until this is dropped. In a directory nothing is reserved.
pub struct ReservedSpace(Option<(Arc<ClusterBlobs>, Vec<(PeerId, u64)>)>);

impl Drop for ReservedSpace {
    fn drop(&mut self) {
        if let Some((blobs, reserved)) = &self.0 {
            blobs.release(reserved);
        }
    }
}

/// When content counts as stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// When the content is durable with its full redundancy.
    #[default]
    Pessimistic,
    /// When enough is durable to read the content. The rest follows.
    Optimistic,
}

/// A handle on a repository. Clones are cheap and share everything.
#[derive(Clone)]
pub struct Repository {
    inner: Arc<Inner>,
    /// How what is put through this handle is kept safe.
    policy: StoragePolicy,
    durability: Durability,
}

struct Inner {
    blobs: Arc<dyn Blobs>,
    trees: Arc<Trees>,
    catalog: Catalog,
    documents: Arc<dyn Documents>,
    /// `None` if the blobs are in a directory.
    cluster: Option<ClusterPart>,
    /// How many peers had been lost when it was opened,
    losses: u64,
    /// and when what is known of the blobs was last forgotten for that.
    forgotten_at: AtomicU64,
}

/// What only a repository on peers has.
struct ClusterPart {
    blobs: Arc<ClusterBlobs>,
    watcher: MembershipWatcher,
}

impl Repository {
    /// A handle that stores by this policy.
    pub fn with_policy(&self, policy: StoragePolicy) -> Self {
        Self { policy, ..self.clone() }
    }

    /// A handle whose content counts as stored at this durability.
    pub fn with_durability(&self, durability: Durability) -> Self {
        Self { durability, ..self.clone() }
    }

    /// When content that is put through this handle counts as stored.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// How a new image is kept if nobody says otherwise: by the peers that there are.
    pub fn default_redundancy(&self) -> Result<Redundancy> {
        match &self.inner.cluster {
            Some(_) => {
                let (peers, _) = membership::peers(&*self.inner.documents)?;
                let able =
                    peers.iter().filter(|peer| matches!(peer.health, Health::Up | Health::Down));
                Ok(Redundancy::for_peers(able.count()))
            }
            None => Ok(Redundancy::NONE),
        }
    }

    /// The peers that hold the repository, and the documents that tell of them; nothing if it is in a directory.
    pub fn cluster(&self) -> Option<(&Cluster, &dyn Documents)> {
        let cluster = self.inner.cluster.as_ref()?;
        Some((cluster.watcher.cluster(), &*self.inner.documents))
    }

    // Images and snapshots.

    /// Makes an image whose first snapshot is empty.
    pub fn create_image(&self, name: &ImageName, geometry: Geometry) -> Result<Snapshot> {
        self.publish_image(name, geometry, &Root::default(), 0, 0)
    }

    /// Makes an image whose first snapshot has this content, and makes the content durable before.
    ///
    /// `stored_bytes` of the image's `dirty_bytes` were not in the repository before. All that went to the peers since the
    /// repository was opened counts as sent for it.
    pub fn publish_image(
        &self,
        name: &ImageName,
        geometry: Geometry,
        root: &Root,
        stored_bytes: u64,
        dirty_bytes: u64,
    ) -> Result<Snapshot> {
        self.flush()?;
        let (consistency, state) = (Consistency::Crash, self.published_state());
        let (sent_bytes, saved_bytes) =
            self.traffic_since(&Counters::default(), stored_bytes, dirty_bytes);
        let first = FirstSnapshot {
            root: *root,
            state,
            consistency,
            dirty_bytes,
            stored_bytes,
            sent_bytes,
            saved_bytes,
        };
        self.insert(&Draft::new(name, geometry, self.policy, &first)?.since(self.inner.losses))
    }

    fn insert(&self, draft: &Draft) -> Result<Snapshot> {
        // Before its record is stored: a catalog that is rebuilt must not take it for the image of this name.
        self.inner.catalog.check_free(draft)?;
        let record = self.put_record(&draft.record(), self.published_state())?;
        let inserted = self.inner.catalog.insert(draft, record);
        // Somebody else was faster. If the catalog was away, it may be there.
        if let Err(error) = &inserted
            && matches!(error, Error::ImageExists { .. } | Error::NoSnapshot { .. })
        {
            self.put_removal(&draft.removal());
        }
        inserted
    }

    /// Reserves space on the peers for `bytes` of chunks that are put through this handle. Fails at
    /// once if the peers do not have it.
    pub fn reserve_space(&self, bytes: u64) -> Result<ReservedSpace> {
        let reserve = |cluster: &ClusterPart| {
            let reserved = cluster.blobs.reserve(bytes, &self.policy)?;
            Ok((Arc::clone(&cluster.blobs), reserved))
        };
        self.inner.cluster.as_ref().map(reserve).transpose().map(ReservedSpace)
    }

    /// Bytes that went to the peers through this handle and its clones. All are 0 in a directory.
    pub fn counters(&self) -> Counters {
        self.inner.cluster.as_ref().map(|cluster| cluster.blobs.counters()).unwrap_or_default()
    }

    /// Bytes that were sent and saved since `before`. In a directory, both follow from the bytes that
    /// were stored of the changes.
    pub(crate) fn traffic_since(&self, before: &Counters, stored: u64, dirty: u64) -> (u64, u64) {
        if self.inner.cluster.is_none() {
            return (stored, dirty.saturating_sub(stored));
        }
        let now = self.counters();
        (now.sent.saturating_sub(before.sent), now.saved.saturating_sub(before.saved))
    }

    /// So many peers have been lost. What was known to be stored may be gone with one, unless a name refers to it.
    pub(crate) fn note_losses(&self, losses: u64) {
        if let Some(cluster) = &self.inner.cluster
            && self.inner.forgotten_at.fetch_max(losses, Ordering::SeqCst) < losses
        {
            cluster.blobs.forget_known();
        }
    }

    /// The state of a snapshot whose content was flushed.
    pub(crate) fn published_state(&self) -> SnapshotState {
        match self.durability {
            Durability::Pessimistic => SnapshotState::Stable,
            Durability::Optimistic => SnapshotState::Available,
        }
    }

    /// Stores the record of a snapshot that is in this state on the peers, durably, and returns its
    /// name. The record of a stable snapshot has its full redundancy. A directory needs no records: its
    /// catalog is lost with the blobs.
    pub(crate) fn put_record(
        &self,
        record: &Record,
        state: SnapshotState,
    ) -> Result<Option<BlobId>> {
        let Some(cluster) = &self.inner.cluster else { return Ok(None) };
        let policy = record.policy().of_small_blobs();
        let lenient = state != SnapshotState::Stable;
        cluster.blobs.put_record(&record.to_bytes(), &policy, lenient).map(Some)
    }

    /// Records on the peers that a snapshot or an image was removed. The removal itself has happened,
    /// so a failure is only logged.
    pub(crate) fn put_removal(&self, record: &Record) {
        if let Err(error) = self.put_record(record, SnapshotState::Available) {
            tracing::warn!(%error, "a rebuilt catalog may bring back a name that was removed");
        }
    }

    /// Makes an image whose first snapshot is this one. Nothing is copied.
    pub fn clone_snapshot(&self, source: &SnapshotRef, name: &ImageName) -> Result<Snapshot> {
        self.insert(&Draft::clone_of(&self.inner.catalog.resolve(source)?, name)?)
    }

    /// Removes a snapshot's name, unless it is the last one with content. Its blobs stay until garbage
    /// collection, and mirrors that are based on it keep their content.
    pub fn remove_snapshot(&self, name: &SnapshotRef) -> Result<Snapshot> {
        let (snapshot, record) = self.inner.catalog.remove_snapshot(name)?;
        self.put_removal(&record);
        Ok(snapshot)
    }

    /// Removes an image and the names of all its snapshots. It is refused while mirrors refer to the
    /// image, unless `force`, and always while a live writer holds it.
    pub fn remove_image(&self, name: &ImageName, force: bool) -> Result<()> {
        let record = self.inner.catalog.remove_image(name, force)?;
        self.put_removal(&record);
        Ok(())
    }

    // Content.

    /// The chunk at `index`, or nothing for a hole.
    pub fn chunk_at(
        &self,
        root: &Root,
        geometry: Geometry,
        index: ChunkIndex,
    ) -> Result<Option<ChunkId>> {
        self.inner.trees.chunk_at(root, geometry, index)
    }

    /// Reads a chunk. `buf` has the length of the image's chunks; after an error its content is
    /// undefined. What is read has the name that was asked for.
    pub fn read_chunk(&self, id: &ChunkId, buf: &mut [u8]) -> Result<()> {
        let len = self.inner.blobs.get(&(*id).into(), buf)?;
        if len == buf.len() {
            return Ok(());
        }
        let reason = format!("it has {len} bytes, {} are expected", buf.len());
        Err(Error::corrupt(format!("chunk {id}"), reason))
    }

    /// Takes chunks of full length under their names, and returns how many bytes the repository did not
    /// have. Chunks of zeros are holes and not stored (see [`is_zero`](crate::is_zero)). Chunks at
    /// addresses that are multiples of 4096 are written without a copy in the page cache, where the file
    /// system has direct I/O; many at once are written faster.
    pub fn put_chunks(&self, chunks: &[(ChunkId, &[u8])]) -> Result<u64> {
        for (id, content) in chunks {
            debug_assert!(!crate::is_zero(content), "a chunk of zeros is a hole");
            debug_assert_eq!(ChunkId::of(content), *id, "a chunk has the name of its content");
        }
        let blobs: Vec<_> = chunks.iter().map(|(id, content)| ((*id).into(), *content)).collect();
        self.inner.blobs.put(&blobs, &self.policy)
    }

    /// Stores again a chunk that an earlier process stored, which may have left it without its full
    /// redundancy. Only missing fragments are sent. `buf` has the length of the image's chunks. In a
    /// directory, where a stored chunk lacks nothing, this does nothing.
    pub fn restore_redundancy(&self, chunk: &ChunkId, buf: &mut [u8]) -> Result<()> {
        if self.inner.cluster.is_some() {
            self.read_chunk(chunk, buf)?;
            self.put_chunks(&[(*chunk, buf)])?;
        }
        Ok(())
    }

    /// Takes one chunk, and names it.
    pub fn put_chunk(&self, content: &[u8]) -> Result<PutChunk> {
        let id = ChunkId::of(content);
        Ok(PutChunk { id, new_bytes: self.put_chunks(&[(id, content)])? })
    }

    /// The tree that differs from `base` by these chunks; nothing stands for a hole. Equal content
    /// gives the same root, whatever it was derived from.
    pub fn commit_tree(
        &self,
        base: &Root,
        geometry: Geometry,
        changes: &BTreeMap<ChunkIndex, Option<ChunkId>>,
    ) -> Result<TreeUpdate> {
        self.inner.trees.commit(base, geometry, changes, &self.policy)
    }

    /// Returns when everything that was put through this handle and its clones is stored, as this handle
    /// understands it, and everybody can read it.
    pub fn flush(&self) -> Result<()> {
        match self.durability {
            Durability::Pessimistic => self.inner.blobs.flush(),
            Durability::Optimistic => match &self.inner.cluster {
                Some(cluster) => cluster.blobs.flush_available(),
                None => self.inner.blobs.flush(),
            },
        }
    }

    /// Returns when everything that was put is durable with its full redundancy, whatever this handle says.
    pub fn flush_all(&self) -> Result<()> {
        self.inner.blobs.flush()
    }

    /// The chunks of a tree that are not holes, in order.
    pub fn chunks(&self, root: &Root, geometry: Geometry) -> Chunks {
        self.inner.trees.chunks(root, geometry)
    }

    // Mirrors.

    /// Attaches a mirror to its image, for the first time or again.
    ///
    /// A mirror that was attached before keeps its own parent (see [`Attachment::parent`]), whatever
    /// `snapshot` says. For [`Mode::ReadWrite`] it takes the image's lease, or fails and names the
    /// holder.
    pub fn attach(
        &self,
        owner: &MirrorOwner,
        snapshot: &Snapshot,
        mode: Mode,
    ) -> Result<Attachment> {
        let (holder, parent, root) = self.inner.catalog.attach(owner, snapshot, mode)?;
        Ok(Attachment::new(self.with_policy(snapshot.policy), holder, parent, root))
    }

    pub(crate) fn security(&self) -> Option<&Security> {
        self.inner.cluster.as_ref().map(|cluster| cluster.watcher.security())
    }

    /// The records on the peers; `None` in a directory.
    pub(crate) fn records(&self) -> Option<Vec<Vec<u8>>> {
        self.inner.cluster.as_ref().map(|cluster| cluster.blobs.records())
    }

    pub(crate) fn trees(&self) -> &Trees {
        &self.inner.trees
    }

    /// The catalog: images, snapshots and mirrors.
    pub fn catalog(&self) -> &Catalog {
        &self.inner.catalog
    }
}
