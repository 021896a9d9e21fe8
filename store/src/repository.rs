//! The repository as one object: blobs, trees and names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::attachment::Attachment;
use crate::blobs::{Blobs, LocalBlobs};
use crate::catalog::{Catalog, FirstSnapshot};
use crate::cluster::Keep;
use crate::error::{Error, Result};
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::{ChunkId, MirrorId};
use crate::layout;
use crate::name::{ImageName, SnapshotRef};
use crate::snapshot::{Consistency, Image, MirrorOwner, MirrorRecord, Mode, Snapshot};
use crate::tree::{Chunks, Root, TreeUpdate, Trees};

/// The most memory for decoded tree nodes, over all clones of a handle.
const NODE_CACHE: usize = 16 << 20;

/// What [`Repository::put_chunk`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutChunk {
    /// The chunk's name.
    pub id: ChunkId,
    /// Bytes that the repository did not have: 0 if it had the chunk.
    pub new_bytes: u64,
}

/// A handle on a repository. Clones are cheap and share everything.
#[derive(Clone)]
pub struct Repository {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    blobs: Arc<dyn Blobs>,
    trees: Arc<Trees>,
    catalog: Catalog,
}

impl Repository {
    /// Opens a repository that exists. Changes nothing if there is none.
    pub fn open(url: &str) -> Result<Self> {
        Self::open_with(url, |blobs| blobs)
    }

    /// Opens a repository, and makes it first if nothing is there.
    pub fn open_or_create(url: &str) -> Result<Self> {
        layout::create(&layout::directory_of(url)?)?;
        Self::open(url)
    }

    /// As [`Repository::open`], with something around the place of the blobs: to count, to slow down,
    /// or to fail what goes there.
    pub fn open_with(
        url: &str,
        wrap: impl FnOnce(Arc<dyn Blobs>) -> Arc<dyn Blobs>,
    ) -> Result<Self> {
        let path = layout::directory_of(url)?;
        layout::check(&path)?;
        let blobs = wrap(Arc::new(LocalBlobs::open(&path)?));
        let catalog = Catalog::open(&path)?;
        let trees = Arc::new(Trees::new(Arc::clone(&blobs), NODE_CACHE));
        Ok(Self { inner: Arc::new(Inner { path, blobs, trees, catalog }) })
    }

    /// The repository's directory.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    // Images and snapshots.

    /// Makes an image whose first snapshot is empty.
    pub fn create_image(&self, name: &ImageName, geometry: Geometry) -> Result<Snapshot> {
        self.publish_image(name, geometry, &Root::default(), 0, 0)
    }

    /// Makes an image whose first snapshot has this content, and makes the content durable before.
    ///
    /// `stored_bytes` of the image's `dirty_bytes` were not in the repository before.
    pub fn publish_image(
        &self,
        name: &ImageName,
        geometry: Geometry,
        root: &Root,
        stored_bytes: u64,
        dirty_bytes: u64,
    ) -> Result<Snapshot> {
        self.flush()?;
        let consistency = Consistency::Crash;
        let first = FirstSnapshot { root: *root, consistency, dirty_bytes, stored_bytes };
        self.inner.catalog.create_image(name, geometry, &first)
    }

    /// All images, by name.
    pub fn images(&self) -> Result<Vec<Image>> {
        self.inner.catalog.images()
    }

    /// One image.
    pub fn image(&self, name: &ImageName) -> Result<Image> {
        self.inner.catalog.image(name)
    }

    /// The snapshots of an image, oldest first, in any state.
    pub fn snapshots(&self, image: &ImageName) -> Result<Vec<Snapshot>> {
        self.inner.catalog.snapshots(image)
    }

    /// The snapshot that this names. Without a selector it is the newest stable one; one that is named
    /// may be pending or failed, so callers that need content ask [`Snapshot::require_stable`].
    pub fn resolve(&self, name: &SnapshotRef) -> Result<Snapshot> {
        self.inner.catalog.resolve(name)
    }

    /// Makes an image whose first snapshot is this one. Nothing is copied.
    pub fn clone_snapshot(&self, source: &SnapshotRef, name: &ImageName) -> Result<Snapshot> {
        self.inner.catalog.clone_snapshot(source, name)
    }

    /// Removes a snapshot's name, unless it is the last one with content. Its blobs stay until garbage
    /// collection, and mirrors that are based on it keep their content.
    pub fn remove_snapshot(&self, name: &SnapshotRef) -> Result<Snapshot> {
        self.inner.catalog.remove_snapshot(name)
    }

    /// Removes an image and the names of all its snapshots. It is refused while mirrors refer to the
    /// image, unless `force`, and always while a live writer holds it.
    pub fn remove_image(&self, name: &ImageName, force: bool) -> Result<()> {
        self.inner.catalog.remove_image(name, force)
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
        self.inner.blobs.put(&blobs, &Keep::default())
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
        self.inner.trees.commit(base, geometry, changes)
    }

    /// Returns when everything that was put through this handle and its clones is durable, and everybody
    /// can read it.
    pub fn flush(&self) -> Result<()> {
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
        Ok(Attachment::new(self.clone(), holder, parent, root))
    }

    /// What is known about a mirror.
    pub fn mirror(&self, id: &MirrorId) -> Result<Option<MirrorRecord>> {
        self.inner.catalog.mirror(id)
    }

    /// All mirrors, by image.
    pub fn mirrors(&self) -> Result<Vec<MirrorRecord>> {
        self.inner.catalog.mirrors()
    }

    /// Drops the reference of a mirror that is gone. It is refused while the mirror's lease is live.
    pub fn forget_mirror(&self, id: &MirrorId) -> Result<()> {
        self.inner.catalog.forget_mirror(id)
    }

    pub(crate) fn catalog(&self) -> &Catalog {
        &self.inner.catalog
    }
}
