//! The Merkle tree over the chunks of a snapshot.
//!
//! A node of level 0 names chunks, a node above names nodes. The height of a stored tree follows
//! from the disk's [`Geometry`] alone, and a node without children does not exist. So one content of
//! one size has one root, whatever changes led to it. Changing a chunk copies the path from the root
//! to it (path copying, also called *shadowing*). Everything else is shared with the older tree. A
//! *clone* refers to the same root.
//!
//! The root's level tells the height of a tree. So the tree of a disk can be read with the geometry
//! that the disk has after it has grown: chunks that the tree does not cover are holes. A commit to
//! a disk that has grown puts the old root under new ones, in slot 0.
//!
//! ```text
//!            root of @1      root of @2
//!               │  └──────┐ ┌────┘  │          @2 changed chunk 7 only:
//!               ▼         ▼ ▼       ▼          it shares every subtree but one path
//!            [0..256)   [256..)  [0..256)'
//!             │ ... chunk 7       ... chunk 7'
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `mod` | [`Trees`]: looking up a chunk, committing changes |
//! | `node` | a node and its canonical bytes |
//! | `walk` | all chunks in order; all blobs that a tree refers to |
//! | `difference` | the chunks in which two trees differ |
//! | `diff` | the ranges in which two disks differ |
//! | `cache` | decoded nodes, in bounded memory |

mod cache;
mod diff;
mod difference;
#[cfg(test)]
mod difference_tests;
pub(crate) mod node;
#[cfg(test)]
mod tests;
mod walk;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::cache::NodeCache;
use self::node::{Child, MAX_NODE, Node};
use crate::blobs::{Blobs, NewBlob};
use crate::encoding::StoragePolicy;
use crate::error::{Error, Result};
use crate::geometry::{ChunkIndex, FAN_OUT, Geometry};
use crate::id::{ChunkId, NodeId};

pub use self::diff::{ChangedRange, RangeContent};
pub use self::difference::{Difference, Differences};
pub use self::walk::Chunks;
pub(crate) use self::walk::Referred;

/// The content of a whole disk: the name of its tree's top node, or `None` if every chunk is a
/// hole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Root(pub Option<NodeId>);

/// The chunks that a snapshot changes, in ascending order. They need not fit into memory.
pub trait Changes: Sync {
    /// The first change at `from` or behind it; a chunk without a name is a hole.
    fn next(&self, from: ChunkIndex) -> Result<Option<(ChunkIndex, Option<ChunkId>)>>;

    /// The number of changed chunks.
    fn count(&self) -> u64;
}

impl Changes for BTreeMap<ChunkIndex, Option<ChunkId>> {
    fn next(&self, from: ChunkIndex) -> Result<Option<(ChunkIndex, Option<ChunkId>)>> {
        Ok(self.range(from..).next().map(|(index, chunk)| (*index, *chunk)))
    }

    fn count(&self) -> u64 {
        self.len() as u64
    }
}

/// A tree that was derived from another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeUpdate {
    /// Its root.
    pub root: Root,
    /// Bytes of nodes that the repository did not have.
    pub new_bytes: u64,
}

/// The trees in a blob store.
pub(crate) struct Trees {
    blobs: Arc<dyn Blobs>,
    cache: NodeCache,
}

/// The position of a node in a tree: its level and the first chunk that it covers.
#[derive(Clone, Copy)]
struct NodePosition {
    level: u8,
    first: u64,
}

impl NodePosition {
    /// The position of the root of a tree that is committed with this geometry.
    fn top(geometry: Geometry) -> Self {
        Self { level: geometry.height() - 1, first: 0 }
    }

    /// Whether the node covers this chunk.
    fn covers(self, index: u64) -> bool {
        (self.first..self.first + self.stride() * FAN_OUT).contains(&index)
    }

    /// How many chunks each child covers.
    fn stride(self) -> u64 {
        FAN_OUT.pow(self.level.into())
    }

    fn slot_of(self, index: u64) -> u8 {
        u8::try_from((index - self.first) / self.stride()).expect("the chunk is under this node")
    }

    fn first_of(self, slot: u8) -> u64 {
        self.first + u64::from(slot) * self.stride()
    }

    fn child(self, slot: u8) -> Self {
        Self { level: self.level - 1, first: self.first_of(slot) }
    }

    /// How many slots cover chunks of the disk.
    fn slots(self, geometry: Geometry) -> u64 {
        (geometry.chunk_count() - self.first).div_ceil(self.stride()).min(FAN_OUT)
    }
}

impl Trees {
    /// The trees in `blobs`. At most `cache` bytes of decoded nodes are kept in memory.
    pub(crate) fn new(blobs: Arc<dyn Blobs>, cache: usize) -> Self {
        Self { blobs, cache: NodeCache::new(cache) }
    }

    /// The chunk at `index`; `None` for a hole.
    pub(crate) fn chunk_at(
        &self,
        root: &Root,
        geometry: Geometry,
        index: ChunkIndex,
    ) -> Result<Option<ChunkId>> {
        geometry.check_index(index)?;
        let Some(id) = root.0 else { return Ok(None) };
        let (mut position, mut node) = self.load_root(id, geometry)?;
        if !position.covers(index.0) {
            return Ok(None);
        }
        loop {
            let slot = position.slot_of(index.0);
            let Some(child) = node.get(slot).copied() else { return Ok(None) };
            if position.level == 0 {
                return Ok(Some(ChunkId::from_bytes(child)));
            }
            position = position.child(slot);
            node = self.load(NodeId::from_bytes(child), geometry, position)?;
        }
    }

    /// Stores the tree that differs from `base` by these chunks. `base` may be the tree of a smaller
    /// disk.
    pub(crate) fn commit(
        &self,
        base: &Root,
        geometry: Geometry,
        changes: &dyn Changes,
        policy: &StoragePolicy,
    ) -> Result<TreeUpdate> {
        if let Some((outside, _)) = changes.next(ChunkIndex(geometry.chunk_count()))? {
            geometry.check_index(outside)?;
        }
        let mut edit =
            Edit { trees: self, geometry, changes, policy: policy.of_small_blobs(), new_bytes: 0 };
        let base = base.0.map(|id| edit.raise(id)).transpose()?;
        let root = match changes.next(ChunkIndex(0))?.is_none() {
            true => base,
            false => edit.apply(base, NodePosition::top(geometry))?,
        };
        Ok(TreeUpdate { root: Root(root), new_bytes: edit.new_bytes })
    }

    /// The chunks that are not holes, in order.
    pub(crate) fn chunks(self: &Arc<Self>, root: &Root, geometry: Geometry) -> Chunks {
        Chunks::new(Arc::clone(self), root, geometry)
    }

    /// Loads the root of a tree that was committed with this geometry, or before the disk has grown
    /// to it. The root's level tells its position.
    fn load_root(&self, id: NodeId, geometry: Geometry) -> Result<(NodePosition, Arc<Node>)> {
        let node = self.read(id)?;
        let top = NodePosition::top(geometry);
        if node.level() > top.level {
            return Err(corrupt(id, "it is the root of a larger disk"));
        }
        let position = NodePosition { level: node.level(), ..top };
        check_position(id, &node, geometry, position)?;
        Ok((position, node))
    }

    /// Reads a node, which may be at any position.
    fn read(&self, id: NodeId) -> Result<Arc<Node>> {
        if let Some(node) = self.cache.get(&id) {
            return Ok(node);
        }
        let mut bytes = [0; MAX_NODE];
        let len = self.blobs.get(&id.into(), &mut bytes)?;
        let node = Node::decode(&bytes[..len]).map_err(|reason| corrupt(id, reason))?;
        let node = Arc::new(node);
        self.cache.insert(id, Arc::clone(&node));
        Ok(node)
    }

    fn load(&self, id: NodeId, geometry: Geometry, position: NodePosition) -> Result<Arc<Node>> {
        let node = self.read(id)?;
        check_position(id, &node, geometry, position)?;
        Ok(node)
    }

    /// Stores a node. Returns its name and the bytes that the repository did not have.
    fn store(&self, node: Node, policy: &StoragePolicy) -> Result<(NodeId, u64)> {
        let bytes = node.encode();
        let blob = NewBlob::new(&bytes);
        let id = NodeId::from_bytes(*blob.id().as_bytes());
        let new_bytes = self.blobs.put(&[blob], policy)?;
        self.cache.insert(id, Arc::new(node));
        Ok((id, new_bytes))
    }
}

/// Fails unless a node fits a position in a tree.
fn check_position(
    id: NodeId,
    node: &Node,
    geometry: Geometry,
    position: NodePosition,
) -> Result<()> {
    let fits = node.check_position(position.level, position.slots(geometry));
    fits.map_err(|reason| corrupt(id, reason))
}

fn corrupt(id: NodeId, reason: &'static str) -> Error {
    Error::corrupt(format!("tree node {id}"), reason)
}

/// The application of changes to a tree. It holds one path of nodes at a time.
struct Edit<'a> {
    trees: &'a Trees,
    geometry: Geometry,
    changes: &'a dyn Changes,
    policy: StoragePolicy,
    new_bytes: u64,
}

impl Edit<'_> {
    /// Gives the tree with the root `id` the height of the disk.
    fn raise(&mut self, id: NodeId) -> Result<NodeId> {
        let low = self.trees.load_root(id, self.geometry)?.0.level;
        let mut root = id;
        for level in low..NodePosition::top(self.geometry).level {
            let mut above = Node::new(level + 1);
            above.set(0, Some(*root.as_bytes()));
            let (id, new_bytes) = self.trees.store(above, &self.policy)?;
            self.new_bytes += new_bytes;
            root = id;
        }
        Ok(root)
    }

    /// Applies the changes under `position` to the subtree `old`. Returns the resulting subtree.
    fn apply(&mut self, old: Option<NodeId>, position: NodePosition) -> Result<Option<NodeId>> {
        let before = match old {
            Some(id) => self.trees.load(id, self.geometry, position)?,
            None => Arc::new(Node::new(position.level)),
        };
        let mut after = Node::clone(&before);
        let end = position.first + position.stride() * FAN_OUT;
        let mut from = position.first;
        while let Some((index, chunk)) =
            self.changes.next(ChunkIndex(from))?.filter(|(index, _)| index.0 < end)
        {
            let slot = position.slot_of(index.0);
            let child: Option<Child> = if position.level == 0 {
                chunk.map(|id| *id.as_bytes())
            } else {
                let old = before.get(slot).map(|id| NodeId::from_bytes(*id));
                self.apply(old, position.child(slot))?.map(|id| *id.as_bytes())
            };
            after.set(slot, child);
            from = position.first_of(slot) + position.stride();
        }
        if after.is_empty() {
            return Ok(None);
        }
        if after == *before {
            return Ok(old);
        }
        let (id, new_bytes) = self.trees.store(after, &self.policy)?;
        self.new_bytes += new_bytes;
        Ok(Some(id))
    }
}
