//! The Merkle tree over the chunks of a snapshot.
//!
//! A node of level 0 names chunks, a node above names nodes. The height follows from the disk's
//! [`Geometry`] alone, and a node without children does not exist. So one content has one root,
//! whatever changes led to it. Changing a chunk copies the path from the root to it (path copying,
//! also called *shadowing*). Everything else is shared with the older tree. A *clone* refers to the
//! same root.
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
//! | `cache` | decoded nodes, in bounded memory |

mod cache;
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
    fn top(geometry: Geometry) -> Self {
        Self { level: geometry.height() - 1, first: 0 }
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
        let mut position = NodePosition::top(geometry);
        let mut next = root.0;
        while let Some(id) = next {
            let slot = position.slot_of(index.0);
            let Some(child) = self.load(id, geometry, position)?.get(slot).copied() else { break };
            if position.level == 0 {
                return Ok(Some(ChunkId::from_bytes(child)));
            }
            next = Some(NodeId::from_bytes(child));
            position = position.child(slot);
        }
        Ok(None)
    }

    /// Stores the tree that differs from `base` by these chunks.
    pub(crate) fn commit(
        &self,
        base: &Root,
        geometry: Geometry,
        changes: &dyn Changes,
        policy: &StoragePolicy,
    ) -> Result<TreeUpdate> {
        if changes.next(ChunkIndex(0))?.is_none() {
            return Ok(TreeUpdate { root: *base, new_bytes: 0 });
        }
        if let Some((outside, _)) = changes.next(ChunkIndex(geometry.chunk_count()))? {
            geometry.check_index(outside)?;
        }
        let mut edit =
            Edit { trees: self, geometry, changes, policy: policy.of_small_blobs(), new_bytes: 0 };
        let root = Root(edit.apply(base.0, NodePosition::top(geometry))?);
        Ok(TreeUpdate { root, new_bytes: edit.new_bytes })
    }

    /// The chunks that are not holes, in order.
    pub(crate) fn chunks(self: &Arc<Self>, root: &Root, geometry: Geometry) -> Chunks {
        Chunks::new(Arc::clone(self), root, geometry)
    }

    fn load(&self, id: NodeId, geometry: Geometry, position: NodePosition) -> Result<Arc<Node>> {
        let corrupt = |reason| Error::corrupt(format!("tree node {id}"), reason);
        let node = match self.cache.get(&id) {
            Some(node) => node,
            None => {
                let mut bytes = [0; MAX_NODE];
                let len = self.blobs.get(&id.into(), &mut bytes)?;
                let node = Arc::new(Node::decode(&bytes[..len]).map_err(corrupt)?);
                self.cache.insert(id, Arc::clone(&node));
                node
            }
        };
        node.check_position(position.level, position.slots(geometry)).map_err(corrupt)?;
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

/// The application of changes to a tree. It holds one path of nodes at a time.
struct Edit<'a> {
    trees: &'a Trees,
    geometry: Geometry,
    changes: &'a dyn Changes,
    policy: StoragePolicy,
    new_bytes: u64,
}

impl Edit<'_> {
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
