//! CowSpace for the old content of blocks that the guest overwrites, and for chunks on their way into the
//! repository. All of it is bounded: first memory is used, then a file on the local disk.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::mapping::{Buffer, SharedBytes};
use crate::mirror::block_set::BlockSet;
use crate::mirror::files::disk_file::allocate_more;
use crate::mirror::files::journal::CopyLocation;
use crate::mirror::layout::{BLOCK_BYTES, Blocks};

/// A bounded amount of memory.
pub(crate) struct BufferPool {
    limit: usize,
    used: AtomicUsize,
    /// Large buffers to be used again: fresh ones cost a page fault for each page. All have one
    /// length, and together with those in use they stay below the limit.
    idle: Mutex<Vec<Buffer>>,
}

/// From this length on buffers are kept.
const POOLED_MIN_BYTES: usize = 64 << 10;

impl BufferPool {
    /// At most `limit` bytes.
    pub(crate) fn new(limit: usize) -> Arc<BufferPool> {
        Arc::new(BufferPool { limit, used: AtomicUsize::new(0), idle: Mutex::default() })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.idle.lock().expect("no code panics with the idle buffers locked")
    }

    /// A page-aligned buffer with any content, or nothing if that would be too much. A buffer that is larger than the
    /// whole arena is given out while nothing else is, so that every request can go on some time.
    pub(crate) fn take(self: &Arc<BufferPool>, len: usize) -> Option<PooledBuffer> {
        let take = |used: usize| (used == 0 || used + len <= self.limit).then_some(used + len);
        let used = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).ok()? + len;
        let mut idle = self.idle();
        let kept =
            if idle.last().is_some_and(|last| last.len() == len) { idle.pop() } else { None };
        if idle.last().is_some_and(|last| used + idle.len() * last.len() > self.limit) {
            idle.clear();
        }
        drop(idle);
        let buffer = kept.unwrap_or_else(|| Buffer::zeroed(len));
        Some(PooledBuffer(BufferSource::Private { buffer: Some(buffer), arena: self.clone() }))
    }
}

/// Memory of an [`BufferPool`] or a [`CowMemory`], given back when it is dropped.
pub(crate) struct PooledBuffer(BufferSource);

enum BufferSource {
    Private {
        /// Taken by drop alone.
        buffer: Option<Buffer>,
        arena: Arc<BufferPool>,
    },
    Shared {
        range: SpillRange,
        bytes: Arc<SharedBytes>,
    },
}

impl PooledBuffer {
    /// The address, for an operation that owns this buffer.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        match &mut self.0 {
            BufferSource::Private { buffer, .. } => {
                buffer.as_mut().expect("taken by drop alone").as_mut_ptr()
            }
            BufferSource::Shared { range, bytes } => bytes.at(range.offset as usize),
        }
    }

    /// CopyLocation in the memory it lies, if it does.
    fn cow_memory_offset(&self) -> Option<u64> {
        match &self.0 {
            BufferSource::Private { .. } => None,
            BufferSource::Shared { range, .. } => Some(range.offset),
        }
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            BufferSource::Private { buffer, .. } => buffer.as_ref().expect("taken by drop alone"),
            BufferSource::Shared { range, bytes } => {
                let start = bytes.at(range.offset as usize);
                // SAFETY: the range is inside the mapping and has space, as `CowMemory` saw to, and it is
                // this value's alone: no two ranges overlap. Any bytes are valid.
                unsafe { std::slice::from_raw_parts(start, range.len as usize) }
            }
        }
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            BufferSource::Private { buffer, .. } => buffer.as_mut().expect("taken by drop alone"),
            BufferSource::Shared { range, bytes } => {
                let start = bytes.at(range.offset as usize);
                // SAFETY: as in `deref`, and `self` is borrowed exclusively.
                unsafe { std::slice::from_raw_parts_mut(start, range.len as usize) }
            }
        }
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let BufferSource::Private { buffer, arena } = &mut self.0 else { return };
        let buffer = buffer.take().expect("taken by drop alone");
        let len = buffer.len();
        let mut idle = arena.idle();
        let used = arena.used.fetch_sub(len, Ordering::AcqRel);
        let fits = used + idle.len() * len <= arena.limit;
        if len >= POOLED_MIN_BYTES && fits && idle.last().is_none_or(|last| last.len() == len) {
            idle.push(buffer);
        }
    }
}

/// RangeAllocator in a file or in shared memory. Only the arithmetic: what lies there is somebody else's.
pub(crate) struct RangeAllocator {
    /// Free extents by offset; no two touch.
    free: Mutex<BTreeMap<u64, u64>>,
}

impl RangeAllocator {
    /// RangeAllocator within `limit` bytes.
    pub(crate) fn new(limit: u64) -> Arc<RangeAllocator> {
        Arc::new(RangeAllocator { free: Mutex::new(BTreeMap::from([(0, limit)])) })
    }

    fn free(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.free.lock().expect("no code panics with the ranges locked")
    }

    /// A range for `len` bytes, or nothing if there is none left. The first one that fits, so that what
    /// is in use stays together.
    pub(crate) fn take(self: &Arc<RangeAllocator>, len: u64) -> Option<SpillRange> {
        let mut free = self.free();
        let (&offset, &room) = free.iter().find(|(_, room)| **room >= len)?;
        free.remove(&offset);
        if room > len {
            free.insert(offset + len, room - len);
        }
        Some(SpillRange { offset, len, ranges: self.clone() })
    }

    /// Just this range, if it is free.
    pub(crate) fn take_at(self: &Arc<RangeAllocator>, offset: u64, len: u64) -> Option<SpillRange> {
        let end = offset.checked_add(len).filter(|_| len > 0)?;
        let mut free = self.free();
        let (&start, &room) = free.range(..=offset).next_back()?;
        if end > start + room {
            return None;
        }
        free.remove(&start);
        if start < offset {
            free.insert(start, offset - start);
        }
        if end < start + room {
            free.insert(end, start + room - end);
        }
        Some(SpillRange { offset, len, ranges: self.clone() })
    }
}

/// A range, given back when it is dropped.
pub(crate) struct SpillRange {
    pub(crate) offset: u64,
    len: u64,
    ranges: Arc<RangeAllocator>,
}

impl Drop for SpillRange {
    fn drop(&mut self) {
        let (mut start, mut end) = (self.offset, self.offset + self.len);
        let mut free = self.ranges.free();
        if let Some((&before, &room)) = free.range(..start).next_back()
            && before + room == start
        {
            free.remove(&before);
            start = before;
        }
        if let Some(room) = free.remove(&end) {
            end += room;
        }
        free.insert(start, end - start);
    }
}

/// Memory for copies that outlives the process, because it is a file's.
pub(crate) struct CowMemory {
    file: File,
    bytes: Arc<SharedBytes>,
    ranges: Arc<RangeAllocator>,
    /// Bytes for which the file has space: memory that it has not must not be touched.
    allocated: Mutex<u64>,
}

/// The file gets its space in steps of this many bytes: most disks never need much. Tests see it grow.
const GROWTH_BYTES: u64 = if cfg!(test) { BLOCK_BYTES } else { 4 << 20 };

impl CowMemory {
    /// In `file`, with whatever it holds; at most `limit` bytes.
    pub(crate) fn new(file: File, limit: u64) -> io::Result<CowMemory> {
        let bytes = Arc::new(SharedBytes::new(&file, limit as usize)?);
        let allocated = Mutex::new(file.metadata()?.len().min(limit));
        Ok(CowMemory { file, bytes, ranges: RangeAllocator::new(limit), allocated })
    }

    /// A page-aligned buffer with any content, or nothing if there is no room.
    pub(crate) fn take(&self, len: u64) -> Option<PooledBuffer> {
        let range = self.ranges.take(len)?;
        let end = range.offset + len;
        let mut allocated = self.allocated.lock().expect("no code panics with this lock held");
        if end > *allocated {
            let more = (end - *allocated).next_multiple_of(GROWTH_BYTES);
            match allocate_more(&self.file, *allocated, more) {
                Ok(()) => *allocated += more,
                Err(error) => {
                    tracing::warn!(%error, "no more shared memory for copies: they go to the disk");
                    return None;
                }
            }
        }
        Some(self.buffer(range))
    }

    /// The buffer at this offset, which a process before this one had taken.
    pub(crate) fn take_at(&self, offset: u64, len: u64) -> Option<PooledBuffer> {
        let allocated = *self.allocated.lock().expect("as in `take`");
        let inside = offset.checked_add(len)? <= allocated;
        let aligned = (offset | len).is_multiple_of(BLOCK_BYTES);
        let range = (inside && aligned).then(|| self.ranges.take_at(offset, len))??;
        Some(self.buffer(range))
    }

    fn buffer(&self, range: SpillRange) -> PooledBuffer {
        PooledBuffer(BufferSource::Shared { range, bytes: self.bytes.clone() })
    }
}

/// CopyLocation old content is.
pub(crate) enum CopyData {
    Memory(PooledBuffer),
    File(SpillRange),
}

impl CopyData {
    /// CopyLocation the next process finds it.
    pub(crate) fn location(&self) -> CopyLocation {
        match self {
            CopyData::Memory(buffer) => CopyLocation::Memory(
                buffer.cow_memory_offset().expect("copies are kept on the memory"),
            ),
            CopyData::File(range) => CopyLocation::File(range.offset),
        }
    }
}

/// The old content of a run of blocks, counted from their chunk's start.
pub(crate) struct PreservedRun {
    pub(crate) run: Blocks,
    pub(crate) data: CopyData,
}

/// What writes have put aside of one chunk.
#[derive(Clone, Default)]
pub(crate) struct PreservedBlocks {
    /// Blocks whose state at the cut does not depend on the mirror any more: those of `pieces`, and
    /// those that were absent.
    pub(crate) decided: BlockSet,
    pub(crate) runs: Vec<Arc<PreservedRun>>,
}

impl PreservedBlocks {
    /// Lays the old content over `data`, which was read from the mirror, where the blocks of
    /// `present` were valid. Returns the blocks that are valid now; others are the parent's. `read`
    /// brings what lies in the spill file at an offset.
    pub(crate) fn overlay(
        &self,
        data: &mut [u8],
        present: BlockSet,
        read: impl Fn(&mut [u8], u64) -> io::Result<()>,
    ) -> io::Result<BlockSet> {
        let mut valid = present.without(&self.decided);
        for PreservedRun { run, data: old } in self.runs.iter().map(Arc::as_ref) {
            let from = (run.first * BLOCK_BYTES) as usize;
            let to = &mut data[from..from + run.span().len as usize];
            match old {
                CopyData::Memory(old) => to.copy_from_slice(old),
                CopyData::File(range) => read(to, range.offset)?,
            }
            valid = valid.union(&BlockSet::run(*run));
        }
        Ok(valid)
    }
}

/// A chunk as a frozen epoch had it.
pub(crate) struct ChunkContent {
    /// The chunk's bytes where `present`; others hold anything.
    pub(crate) data: PooledBuffer,
    /// The blocks that are valid. Others come from the parent root.
    pub(crate) present: BlockSet,
}

#[cfg(test)]
mod tests {
    use super::{BufferPool, CowMemory, RangeAllocator};

    #[test]
    fn an_arena_is_bounded_but_gives_one_buffer_of_any_size() {
        let arena = BufferPool::new(8192);
        let first = arena.take(4096).unwrap();
        assert!(arena.take(8192).is_none());
        let second = arena.take(4096).unwrap();
        assert!(arena.take(4096).is_none());
        drop((first, second));
        assert_eq!(arena.take(1 << 20).unwrap().len(), 1 << 20);
    }

    #[test]
    fn large_buffers_are_used_again_but_never_beyond_the_limit() {
        let arena = BufferPool::new(4 * 65536);
        let buffers: Vec<_> = (0..4).map(|_| arena.take(65536).unwrap()).collect();
        drop(buffers);
        assert_eq!(arena.idle().len(), 4);
        let again = arena.take(65536).unwrap();
        assert_eq!(arena.idle().len(), 3);
        let small = arena.take(4096).unwrap();
        assert_eq!(arena.idle().len(), 0, "the rest makes room for others");
        drop((again, small));
    }

    #[test]
    fn places_do_not_overlap_and_are_used_again() {
        let ranges = RangeAllocator::new(4 * 4096);
        let a = ranges.take(4096).unwrap();
        let b = ranges.take(8192).unwrap();
        assert_eq!((a.offset, b.offset), (0, 4096));
        assert!(ranges.take(8192).is_none());
        drop(a);
        assert_eq!(ranges.take(4096).unwrap().offset, 0);
        drop(b);
        assert_eq!(ranges.take(4 * 4096).unwrap().offset, 0, "free neighbours are one");
    }

    #[test]
    fn a_place_can_be_taken_again_where_it_was() {
        let ranges = RangeAllocator::new(8 * 4096);
        let a = ranges.take_at(2 * 4096, 4096).unwrap();
        let b = ranges.take_at(3 * 4096, 8192).unwrap();
        assert!(ranges.take_at(4 * 4096, 4096).is_none(), "taken");
        assert!(ranges.take_at(7 * 4096, 8192).is_none(), "outside");
        assert!(ranges.take_at(u64::MAX, 8192).is_none() && ranges.take_at(0, 0).is_none());
        assert_eq!(ranges.take(3 * 4096).unwrap().offset, 5 * 4096);
        drop((a, b));
        assert!(ranges.take_at(0, 8 * 4096).is_some());
    }

    #[test]
    fn a_shelf_keeps_what_lies_on_it() {
        let file = tempfile::tempfile().unwrap();
        let memory = CowMemory::new(file.try_clone().unwrap(), 16 << 20).unwrap();
        let _first = memory.take(8192).unwrap();
        let mut second = memory.take(4096).unwrap();
        second.fill(0x5a);
        let offset = second.cow_memory_offset().unwrap();
        drop(memory);
        let again = CowMemory::new(file, 16 << 20).unwrap();
        let second = again.take_at(offset, 4096).unwrap();
        assert!(second.iter().all(|byte| *byte == 0x5a));
        assert!(again.take_at(offset, 4096).is_none(), "taken");
        assert!(again.take_at(8 << 20, 4096).is_none(), "there is no memory behind it");
        assert!(again.take_at(100, 4096).is_none());
    }
}
