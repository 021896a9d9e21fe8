//! The ranges in which two disks differ: the [chunks that differ](super::difference), joined, and what
//! only one of the disks has.

use std::sync::Arc;

use super::{Root, Trees};
use crate::error::Result;
use crate::geometry::{ChunkIndex, Geometry};

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

impl Trees {
    /// Passes the ranges in which the second disk differs from the first to `each`, in order. Of two
    /// neighbours that are passed, the content differs.
    pub(crate) fn changed_ranges(
        self: &Arc<Self>,
        first: (&Root, Geometry),
        second: (&Root, Geometry),
        each: &mut dyn FnMut(ChangedRange) -> Result<()>,
    ) -> Result<()> {
        let (before, after) = (first.1, second.1);
        let differences = self.differences(first, second)?;
        let mut ranges = Ranges::new(before.size(), after, each);
        if ranges.is_chunk_cut() {
            let cut = after.chunk_of(before.size());
            ranges.cut_is_data = self.chunk_at(second.0, after, cut)?.is_some();
        }
        for difference in differences {
            let difference = difference?;
            ranges.chunk(difference.index, difference.new.is_some())?;
        }
        ranges.finish()
    }
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
