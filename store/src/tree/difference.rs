//! The chunks in which two trees differ. Equal subtrees are not read.

use std::sync::Arc;

use super::node::{Child, Node};
use super::{NodePosition, Root, Trees};
use crate::error::{Error, Result};
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::{BlobId, ChunkId, NodeId};

/// A chunk that differs between two trees; `None` is a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The chunk's position.
    pub index: ChunkIndex,
    /// The chunk in the old tree.
    pub old: Option<ChunkId>,
    /// The chunk in the new tree.
    pub new: Option<ChunkId>,
}

/// The chunks in which two trees differ, in order. It holds one path of nodes of each tree at a time,
/// and ends after the first error. Its cost depends on the number of differences: a subtree that both
/// trees have is not read.
pub struct Differences {
    trees: Arc<Trees>,
    /// The geometry of the larger disk.
    geometry: Geometry,
    /// The roots, until they are loaded.
    start: Option<[Option<NodeId>; 2]>,
    /// The nodes above the root of the lower tree, which need not be stored.
    above: Vec<(NodeId, Arc<Node>)>,
    path: Vec<Step>,
}

/// Nodes of both trees at one position. A missing node has no children.
struct Step {
    position: NodePosition,
    nodes: [Arc<Node>; 2],
    /// The next slot to compare; `None` when both nodes are done.
    slot: Option<u8>,
}

impl Step {
    /// The next slot in which the nodes differ, and the children there.
    fn advance(&mut self) -> Option<(u8, [Option<Child>; 2])> {
        loop {
            let from = self.slot?;
            let next = self.nodes.iter().filter_map(|node| node.next_present(from)).min();
            let Some(slot) = next else {
                self.slot = None;
                return None;
            };
            self.slot = slot.checked_add(1);
            let [old, new] = [0, 1].map(|side: usize| self.nodes[side].get(slot).copied());
            if old != new {
                return Some((slot, [old, new]));
            }
        }
    }
}

impl Trees {
    /// The chunks in which the trees differ. The disks may have different sizes, and have one chunk
    /// size.
    pub(crate) fn differences(
        self: &Arc<Self>,
        (old, old_geometry): (&Root, Geometry),
        (new, new_geometry): (&Root, Geometry),
    ) -> Result<Differences> {
        let [a, b] = [old_geometry.chunk_size(), new_geometry.chunk_size()];
        if a != b {
            return Err(Error::BadArgument(format!(
                "the chunks of the two disks have {a} and {b} bytes, and only disks with chunks of the same size can \
                 be compared"
            )));
        }
        let geometry = match old_geometry.size() > new_geometry.size() {
            true => old_geometry,
            false => new_geometry,
        };
        let start = (old != new).then_some([old.0, new.0]);
        Ok(Differences {
            trees: Arc::clone(self),
            geometry,
            start,
            above: Vec::new(),
            path: Vec::new(),
        })
    }
}

impl Differences {
    /// Loads the roots, and gives the lower tree the height of the other one.
    fn start(&mut self, roots: [Option<NodeId>; 2]) -> Result<()> {
        let load = |root: Option<NodeId>| -> Result<Option<(NodeId, Arc<Node>)>> {
            let Some(id) = root else { return Ok(None) };
            Ok(Some((id, self.trees.load_root(id, self.geometry)?.1)))
        };
        let [old, new] = [load(roots[0])?, load(roots[1])?];
        let levels = [&old, &new].into_iter().flatten().map(|(_, node)| node.level());
        let Some(level) = levels.max() else { return Ok(()) };
        let nodes = [self.raise(old, level), self.raise(new, level)];
        let position = NodePosition { level, first: 0 };
        self.path.push(Step { position, nodes, slot: Some(0) });
        Ok(())
    }

    /// The node of this level above a root. Above its own root a tree has one child, in slot 0.
    fn raise(&mut self, root: Option<(NodeId, Arc<Node>)>, level: u8) -> Arc<Node> {
        let Some((mut id, mut node)) = root else { return Arc::new(Node::new(level)) };
        while node.level() < level {
            let mut above = Node::new(node.level() + 1);
            above.set(0, Some(*id.as_bytes()));
            id = NodeId::from_bytes(*BlobId::of(&above.encode()).as_bytes());
            node = Arc::new(above);
            self.above.push((id, Arc::clone(&node)));
        }
        node
    }

    fn load(&self, child: Option<Child>, position: NodePosition) -> Result<Arc<Node>> {
        let Some(id) = child.map(NodeId::from_bytes) else {
            return Ok(Arc::new(Node::new(position.level)));
        };
        match self.above.iter().find(|(above, _)| *above == id) {
            Some((_, node)) => Ok(Arc::clone(node)),
            None => self.trees.load(id, self.geometry, position),
        }
    }

    fn advance(&mut self) -> Result<Option<Difference>> {
        if let Some(roots) = self.start.take() {
            self.start(roots)?;
        }
        while let Some(step) = self.path.last_mut() {
            let Some((slot, children)) = step.advance() else {
                self.path.pop();
                continue;
            };
            let position = step.position;
            if position.level == 0 {
                let [old, new] = children.map(|child| child.map(ChunkId::from_bytes));
                let index = ChunkIndex(position.first_of(slot));
                return Ok(Some(Difference { index, old, new }));
            }
            let below = position.child(slot);
            let nodes = [self.load(children[0], below)?, self.load(children[1], below)?];
            self.path.push(Step { position: below, nodes, slot: Some(0) });
        }
        Ok(None)
    }
}

impl Iterator for Differences {
    type Item = Result<Difference>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.advance().transpose();
        if matches!(next, Some(Err(_))) {
            self.path.clear();
        }
        next
    }
}
