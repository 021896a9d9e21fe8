//! The ranges in which two disks differ. Equal subtrees are skipped, so the cost follows the change.
//!
//! ```text
//! two roots ─► the slots whose children differ ─► one level down ─► chunks that differ ─► ranges
//! ```
//!
//! The trees may have different heights: a disk that has grown has more levels. The lower tree is then
//! in slot 0 of every level above its root.

use std::sync::Arc;

use super::node::Node;
use super::walk::PARALLEL_READS;
use super::{NodePosition, Root, Trees};
use crate::error::{Error, Result};
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::{ChunkId, NodeId};

/// What the second disk has where it differs from the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RangeContent {
    /// Stored chunks.
    Data,
    /// Zeros.
    Zero,
    /// Nothing: the second disk is smaller.
    Gone,
}

impl RangeContent {
    /// The content as one word.
    pub const fn as_str(self) -> &'static str {
        match self {
            RangeContent::Data => "data",
            RangeContent::Zero => "zero",
            RangeContent::Gone => "gone",
        }
    }
}

/// A range in which two disks differ. It consists of whole chunks, cut at the ends of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedRange {
    /// The offset of its first byte.
    pub start: u64,
    /// The offset behind its last byte.
    pub end: u64,
    /// What the second disk has there.
    pub content: RangeContent,
}

/// A subtree, with its root's node.
#[derive(Clone)]
struct Subtree {
    id: NodeId,
    level: u8,
    node: Arc<Node>,
}

/// What gets the chunks that differ, with their names in the second tree.
type EachChunk<'a> = dyn FnMut(ChunkIndex, Option<ChunkId>) -> Result<()> + 'a;

impl Trees {
    /// Passes the ranges in which the second disk differs from the first to `each`, in order. Of two
    /// neighbours that are passed, the content differs.
    pub(crate) fn changed_ranges(
        &self,
        first: (&Root, Geometry),
        second: (&Root, Geometry),
        each: &mut dyn FnMut(ChangedRange) -> Result<()>,
    ) -> Result<()> {
        let (before, after) = (first.1, second.1);
        if before.chunk_size() != after.chunk_size() {
            return Err(Error::BadArgument(format!(
                "their chunks have {} and {} bytes, and only disks with chunks of the same size can \
                 be compared",
                before.chunk_size(),
                after.chunk_size()
            )));
        }
        let mut ranges = Ranges::new(before.size(), after, each);
        if ranges.is_chunk_cut() {
            let cut = after.chunk_of(before.size());
            ranges.cut_is_data = self.chunk_at(second.0, after, cut)?.is_some();
        }
        let trees = [self.subtree(first)?, self.subtree(second)?];
        let level = trees.iter().flatten().map(|tree| tree.level).max();
        if let Some(level) = level {
            let [one, other] = &trees;
            let mut each_chunk = |index, chunk: Option<_>| ranges.chunk(index, chunk.is_some());
            let mut walk = Walk { geometries: [before, after], each: &mut each_chunk };
            let position = NodePosition { level, first: 0 };
            self.compare(one.as_ref(), other.as_ref(), position, &mut walk)?;
        }
        ranges.finish()
    }

    fn subtree(&self, (root, geometry): (&Root, Geometry)) -> Result<Option<Subtree>> {
        let Some(id) = root.0 else { return Ok(None) };
        let (position, node) = self.load_root(id, geometry)?;
        Ok(Some(Subtree { id, level: position.level, node }))
    }

    /// Compares two subtrees at one position. A subtree may be lower than the position.
    fn compare(
        &self,
        one: Option<&Subtree>,
        other: Option<&Subtree>,
        position: NodePosition,
        walk: &mut Walk<'_, '_>,
    ) -> Result<()> {
        if one.map(|tree| tree.id) == other.map(|tree| tree.id) {
            return Ok(());
        }
        let below = |slot: &u8| {
            let child = |tree: Option<&Subtree>| tree.and_then(|one| one.child(position, *slot));
            (child(one), child(other))
        };
        let differing: Vec<u8> = (0..=u8::MAX)
            .filter(|slot| {
                let (one, other) = below(slot);
                one != other
            })
            .collect();
        if position.level == 0 {
            let name = |slot: &u8| below(slot).1.map(ChunkId::from_bytes);
            let index = |slot: &u8| ChunkIndex(position.first_of(*slot));
            return differing.iter().try_for_each(|slot| (walk.each)(index(slot), name(slot)));
        }
        for slots in differing.chunks(PARALLEL_READS) {
            let ones = self.children_of(one, position, slots, walk.geometries[0])?;
            let others = self.children_of(other, position, slots, walk.geometries[1])?;
            for ((slot, one), other) in slots.iter().zip(&ones).zip(&others) {
                self.compare(one.as_ref(), other.as_ref(), position.child(*slot), walk)?;
            }
        }
        Ok(())
    }

    /// The subtrees in these slots, loaded at the same time.
    fn children_of(
        &self,
        tree: Option<&Subtree>,
        position: NodePosition,
        slots: &[u8],
        geometry: Geometry,
    ) -> Result<Vec<Option<Subtree>>> {
        let Some(tree) = tree else { return Ok(vec![None; slots.len()]) };
        if tree.level < position.level {
            return Ok(slots.iter().map(|slot| (*slot == 0).then(|| tree.clone())).collect());
        }
        let ids = slots.iter().map(|slot| tree.node.get(*slot).map(|id| NodeId::from_bytes(*id)));
        let ids: Vec<Option<NodeId>> = ids.collect();
        let present = ids.iter().zip(slots).filter_map(|(id, slot)| Some(((*id)?, *slot)));
        let present: Vec<_> = present.map(|(id, slot)| (id, position.child(slot))).collect();
        let mut loaded = self.load_all(&present, geometry).into_iter();
        let level = position.level - 1;
        let subtree = |id: &Option<NodeId>| {
            let Some(id) = *id else { return Ok(None) };
            let node = loaded.next().expect("a node for each name")?;
            Ok(Some(Subtree { id, level, node }))
        };
        ids.iter().map(subtree).collect()
    }
}

impl Subtree {
    /// The name of what is in a slot of the position.
    fn child(&self, position: NodePosition, slot: u8) -> Option<[u8; 32]> {
        match self.level < position.level {
            true => (slot == 0).then(|| *self.id.as_bytes()),
            false => self.node.get(slot).copied(),
        }
    }
}

struct Walk<'a, 'b> {
    /// The shapes of the two disks.
    geometries: [Geometry; 2],
    each: &'a mut EachChunk<'b>,
}

/// Joins chunks that differ to ranges, and adds what only one of the disks has.
struct Ranges<'a> {
    before: u64,
    after: Geometry,
    /// Up to here, what only the second disk has is in ranges already.
    tail: u64,
    /// Whether the second disk has data in the chunk that the end of the first disk cuts.
    cut_is_data: bool,
    /// The last range, which may continue.
    last: Option<ChangedRange>,
    each: &'a mut dyn FnMut(ChangedRange) -> Result<()>,
}

impl<'a> Ranges<'a> {
    fn new(
        before: u64,
        after: Geometry,
        each: &'a mut dyn FnMut(ChangedRange) -> Result<()>,
    ) -> Ranges<'a> {
        let tail = before.min(after.size());
        Ranges { before, after, tail, cut_is_data: false, last: None, each }
    }

    /// Whether the first disk ends in a chunk that the second disk has more of.
    fn is_chunk_cut(&self) -> bool {
        self.before < self.after.size() && !self.before.is_multiple_of(self.chunk_size())
    }

    fn chunk_size(&self) -> u64 {
        self.after.chunk_size().into()
    }

    /// Adds a chunk that differs. Chunks arrive in order.
    fn chunk(&mut self, index: ChunkIndex, is_data: bool) -> Result<()> {
        let start = self.after.offset_of(index);
        let end = start + self.after.len_of(index) as u64;
        if start >= end {
            // Only the first disk has it.
            return Ok(());
        }
        if start > self.tail {
            self.fill_tail(start)?;
        }
        self.tail = self.tail.max(if self.before < self.after.size() { end } else { 0 });
        self.add(start, end, if is_data { RangeContent::Data } else { RangeContent::Zero })
    }

    /// Adds what only the second disk has up to here, and is equal in the trees. Behind the chunk that
    /// is cut, that is zeros.
    fn fill_tail(&mut self, end: u64) -> Result<()> {
        if self.before >= self.after.size() {
            return Ok(());
        }
        if self.tail == self.before && self.is_chunk_cut() && self.cut_is_data {
            let cut = self.before.next_multiple_of(self.chunk_size()).min(self.after.size());
            self.add(self.tail, cut, RangeContent::Data)?;
            self.tail = cut;
        }
        if self.tail < end {
            self.add(self.tail, end, RangeContent::Zero)?;
            self.tail = end;
        }
        Ok(())
    }

    fn add(&mut self, start: u64, end: u64, content: RangeContent) -> Result<()> {
        if let Some(last) = &mut self.last
            && (last.end, last.content) == (start, content)
        {
            last.end = end;
            return Ok(());
        }
        let ended = self.last.replace(ChangedRange { start, end, content });
        ended.map_or(Ok(()), |range| (self.each)(range))
    }

    fn finish(mut self) -> Result<()> {
        let after = self.after.size();
        self.fill_tail(after)?;
        if after < self.before {
            self.add(after, self.before, RangeContent::Gone)?;
        }
        self.last.map_or(Ok(()), |range| (self.each)(range))
    }
}

#[cfg(test)]
mod tests;
