//! Walks over a tree: its chunks in order, and all blobs that it refers to.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::thread;

use super::node::Node;
use super::{NodePosition, Root, Trees, corrupt};
use crate::error::{Error, Result};
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::{BlobId, ChunkId, NodeId};

/// The chunks of a snapshot that are not holes, in order. It holds one path of nodes at a time, and
/// ends after the first error.
pub struct Chunks {
    trees: Arc<Trees>,
    geometry: Geometry,
    /// The first chunk that is of interest.
    from: u64,
    /// The root, until it is loaded.
    start: Option<NodeId>,
    path: Vec<Step>,
}

struct Step {
    position: NodePosition,
    node: Arc<Node>,
    /// The next slot to visit; `None` when the node is done.
    slot: Option<u8>,
}

impl Chunks {
    pub(super) fn new(trees: Arc<Trees>, root: &Root, geometry: Geometry) -> Self {
        Self { trees, geometry, from: 0, start: root.0, path: Vec::new() }
    }

    /// Omits the chunks before `from`. Nodes that cover only those are not read.
    pub fn starting_at(self, from: ChunkIndex) -> Self {
        Self { from: from.0, ..self }
    }

    fn enter(&mut self, position: NodePosition, node: Arc<Node>) {
        let slot = match self.from <= position.first {
            true => Some(0),
            false => position.covers(self.from).then(|| position.slot_of(self.from)),
        };
        self.path.push(Step { position, node, slot });
    }

    fn advance(&mut self) -> Result<Option<(ChunkIndex, ChunkId)>> {
        if let Some(root) = self.start.take() {
            let (position, node) = self.trees.load_root(root, self.geometry)?;
            self.enter(position, node);
        }
        while let Some(step) = self.path.last_mut() {
            let Some(slot) = step.slot.and_then(|from| step.node.next_present(from)) else {
                self.path.pop();
                continue;
            };
            step.slot = slot.checked_add(1);
            let position = step.position;
            let child = *step.node.get(slot).expect("the slot is present");
            if position.level == 0 {
                let index = ChunkIndex(position.first_of(slot));
                return Ok(Some((index, ChunkId::from_bytes(child))));
            }
            let below = position.child(slot);
            let node = self.trees.load(NodeId::from_bytes(child), self.geometry, below)?;
            self.enter(below, node);
        }
        Ok(None)
    }
}

/// The nodes that a walk over all blobs reads at a time. Reading one from peers takes a round trip.
const PARALLEL_READS: usize = 16;

/// A blob that a tree refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Referred {
    Node(NodeId),
    Chunk(ChunkId),
}

impl Trees {
    /// Calls `visit` for every blob that a tree refers to: for a node, then for the chunks that it
    /// refers to. Skips the nodes in `seen` and everything below them, and adds the visited nodes to
    /// `seen`. Returns the number of nodes that cannot be read; blobs below these are not visited.
    pub(crate) fn references(
        &self,
        root: &Root,
        geometry: Geometry,
        seen: &mut HashSet<NodeId>,
        visit: &mut dyn FnMut(Referred),
    ) -> u64 {
        let mut unreadable = 0;
        self.walk(root, geometry, seen, visit, &mut |_, error| {
            tracing::error!(%error, "cannot read a tree node");
            unreadable += 1;
        });
        unreadable
    }

    /// Visits blobs like [`Trees::references`]. Calls `failed` for each node that cannot be read.
    pub(crate) fn walk(
        &self,
        root: &Root,
        geometry: Geometry,
        seen: &mut HashSet<NodeId>,
        visit: &mut dyn FnMut(Referred),
        failed: &mut dyn FnMut(NodeId, Error),
    ) {
        let Some(id) = root.0.filter(|id| seen.insert(*id)) else { return };
        let mut left = Vec::new();
        let mut expand = |id, loaded: Result<(NodePosition, Arc<Node>)>, left: &mut Vec<_>| {
            visit(Referred::Node(id));
            let (position, node) = match loaded {
                Ok(loaded) => loaded,
                Err(error) => return failed(id, error),
            };
            for (slot, child) in children(&node) {
                match position.level {
                    0 => visit(Referred::Chunk(ChunkId::from_bytes(child))),
                    _ => left.push((NodeId::from_bytes(child), position.child(slot))),
                }
            }
        };
        expand(id, self.load_root(id, geometry), &mut left);
        while !left.is_empty() {
            let mut some = Vec::with_capacity(PARALLEL_READS);
            while some.len() < PARALLEL_READS
                && let Some((id, position)) = left.pop()
            {
                if seen.insert(id) {
                    some.push((id, position));
                }
            }
            for ((id, position), node) in some.iter().zip(self.load_all(&some, geometry)) {
                expand(*id, node.map(|node| (*position, node)), &mut left);
            }
        }
    }

    /// Loads nodes, all at a time that are not in the cache.
    fn load_all(
        &self,
        nodes: &[(NodeId, NodePosition)],
        geometry: Geometry,
    ) -> Vec<Result<Arc<Node>>> {
        let load = |(id, position): &(NodeId, NodePosition)| self.load(*id, geometry, *position);
        match nodes.iter().all(|(id, _)| self.cache.get(id).is_some()) {
            true => nodes.iter().map(load).collect(),
            false => at_once(nodes, &load),
        }
    }

    /// Reads nodes, wherever they are in a tree, all at a time. There should be few of them.
    pub(crate) fn nodes(&self, ids: &[NodeId]) -> Vec<Result<Arc<Node>>> {
        match ids.iter().all(|id| self.cache.get(id).is_some()) {
            true => ids.iter().map(|id| self.read(*id)).collect(),
            false => at_once(ids, &|id| self.read(*id)),
        }
    }

    /// The number of chunks of a tree that are not holes. `counts` has the numbers of nodes that were
    /// visited before, and gets those of others.
    pub(crate) fn count_chunks(
        &self,
        root: &Root,
        counts: &mut HashMap<NodeId, u64>,
    ) -> Result<u64> {
        let Some(id) = root.0 else { return Ok(0) };
        if let Some(count) = counts.get(&id) {
            return Ok(*count);
        }
        let node = self.read(id)?;
        let mut count = 0;
        for (_, child) in children(&node) {
            count += match node.level() {
                0 => 1,
                level => {
                    let child = NodeId::from_bytes(child);
                    if self.read(child)?.level() + 1 != level {
                        return Err(corrupt(child, "it is a tree node of another level"));
                    }
                    self.count_chunks(&Root(Some(child)), counts)?
                }
            };
        }
        counts.insert(id, count);
        Ok(count)
    }

    /// Whether a tree has a node for which `is_sought` holds, or a node with nodes below it that cannot
    /// be read. `answers` has the answers for nodes that were visited before, and gets those for
    /// others. Nodes of level 0 are not read.
    pub(crate) fn has_node(
        &self,
        root: &Root,
        geometry: Geometry,
        is_sought: &dyn Fn(&NodeId) -> bool,
        answers: &mut HashMap<NodeId, bool>,
    ) -> bool {
        let Some(id) = root.0 else { return false };
        match answers.get(&id) {
            Some(answer) => *answer,
            None if is_sought(&id) => true,
            None => self.load_root(id, geometry).map_or(true, |(position, _)| {
                self.node_has(id, geometry, position, is_sought, answers)
            }),
        }
    }

    fn node_has(
        &self,
        id: NodeId,
        geometry: Geometry,
        position: NodePosition,
        is_sought: &dyn Fn(&NodeId) -> bool,
        answers: &mut HashMap<NodeId, bool>,
    ) -> bool {
        if let Some(answer) = answers.get(&id) {
            return *answer;
        }
        let answer = is_sought(&id)
            || position.level > 0
                && match self.load(id, geometry, position) {
                    Err(_) => true,
                    Ok(node) => children(&node).any(|(slot, child)| {
                        let (child, below) = (NodeId::from_bytes(child), position.child(slot));
                        self.node_has(child, geometry, below, is_sought, answers)
                    }),
                };
        answers.insert(id, answer);
        answer
    }

    /// Whether a tree refers to one of these blobs, or has a node that cannot be read. `answers`
    /// has the answers for nodes that were visited before, and gets those for others.
    pub(crate) fn refers_to(
        &self,
        root: &Root,
        geometry: Geometry,
        blobs: &HashSet<BlobId>,
        answers: &mut HashMap<NodeId, bool>,
    ) -> bool {
        let Some(id) = root.0 else { return false };
        match answers.get(&id) {
            Some(answer) => *answer,
            None => self.load_root(id, geometry).map_or(true, |(position, _)| {
                self.node_refers_to(id, geometry, position, blobs, answers)
            }),
        }
    }

    fn node_refers_to(
        &self,
        id: NodeId,
        geometry: Geometry,
        position: NodePosition,
        blobs: &HashSet<BlobId>,
        answers: &mut HashMap<NodeId, bool>,
    ) -> bool {
        if let Some(answer) = answers.get(&id) {
            return *answer;
        }
        let answer = blobs.contains(&id.into())
            || match self.load(id, geometry, position) {
                Err(_) => true,
                Ok(node) => children(&node).any(|(slot, child)| match position.level {
                    0 => blobs.contains(&ChunkId::from_bytes(child).into()),
                    _ => {
                        let (child, below) = (NodeId::from_bytes(child), position.child(slot));
                        self.node_refers_to(child, geometry, below, blobs, answers)
                    }
                }),
            };
        answers.insert(id, answer);
        answer
    }
}

/// Loads several nodes, each with a thread.
fn at_once<T: Sync>(
    all: &[T],
    load: &(dyn Fn(&T) -> Result<Arc<Node>> + Sync),
) -> Vec<Result<Arc<Node>>> {
    let Some((first, others)) = all.split_first() else { return Vec::new() };
    thread::scope(|scope| {
        // Without a thread the node is loaded by this one.
        let start = |one| thread::Builder::new().spawn_scoped(scope, move || load(one));
        let others: Vec<_> = others.iter().map(|one| (one, start(one))).collect();
        let others = others.into_iter().map(|(one, loading)| match loading {
            Ok(thread) => thread.join().expect("loading a node does not panic"),
            Err(_) => load(one),
        });
        std::iter::once(load(first)).chain(others).collect()
    })
}

/// The children of a node, with their slots.
fn children(node: &Node) -> impl Iterator<Item = (u8, [u8; 32])> {
    let mut next = node.next_present(0);
    std::iter::from_fn(move || {
        let slot = next?;
        next = slot.checked_add(1).and_then(|from| node.next_present(from));
        Some((slot, *node.get(slot).expect("the slot is present")))
    })
}

impl Iterator for Chunks {
    type Item = Result<(ChunkIndex, ChunkId)>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.advance().transpose();
        if matches!(next, Some(Err(_))) {
            self.path.clear();
        }
        next
    }
}
