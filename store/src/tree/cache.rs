//! A cache of decoded nodes, in bounded memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::node::Node;
use crate::id::NodeId;

/// A cache of two generations. A node that is used moves to the young generation. When the young
/// generation is full, it becomes the old one, and the previous old one is dropped. This
/// approximates least-recently-used eviction in constant time.
pub(crate) struct NodeCache {
    generations: Mutex<Generations>,
    /// The most bytes of one generation.
    bound: usize,
}

#[derive(Default)]
struct Generations {
    young: HashMap<NodeId, Arc<Node>>,
    young_bytes: usize,
    old: HashMap<NodeId, Arc<Node>>,
}

impl NodeCache {
    /// A cache of at most `bytes`.
    pub(crate) fn new(bytes: usize) -> Self {
        Self { generations: Mutex::default(), bound: bytes / 2 }
    }

    pub(crate) fn get(&self, id: &NodeId) -> Option<Arc<Node>> {
        let mut generations = self.lock();
        if let Some(node) = generations.young.get(id) {
            return Some(Arc::clone(node));
        }
        let node = generations.old.remove(id)?;
        generations.insert(*id, Arc::clone(&node), self.bound);
        Some(node)
    }

    pub(crate) fn insert(&self, id: NodeId, node: Arc<Node>) {
        self.lock().insert(id, node, self.bound);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Generations> {
        self.generations.lock().expect("no thread panics while it holds the cache")
    }
}

impl Generations {
    fn insert(&mut self, id: NodeId, node: Arc<Node>, bound: usize) {
        let weight = node.weight() + size_of::<(NodeId, Arc<Node>)>();
        if self.young_bytes + weight > bound {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        if self.young.insert(id, node).is_none() {
            self.young_bytes += weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Node, NodeCache, NodeId};
    use std::sync::Arc;

    fn id(byte: u8) -> NodeId {
        NodeId::from_bytes([byte; 32])
    }

    fn node() -> Arc<Node> {
        Arc::new(Node::new(0))
    }

    #[test]
    fn a_node_that_is_used_stays_and_others_are_evicted() {
        let cache = NodeCache::new(2048);
        cache.insert(id(0), node());
        for other in 1..=100 {
            cache.insert(id(other), node());
            assert!(cache.get(&id(0)).is_some(), "after {other}");
        }
        assert!(cache.get(&id(1)).is_none());
    }

    #[test]
    fn the_cache_does_not_exceed_its_bound() {
        let cache = NodeCache::new(4096);
        (0..=255).for_each(|n| cache.insert(id(n), node()));
        let kept = (0..=255).filter(|n| cache.get(&id(*n)).is_some()).count();
        assert!((1..=4096 / 64).contains(&kept), "{kept}");
    }
}
