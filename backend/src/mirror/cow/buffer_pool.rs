//! A bounded pool of page-aligned buffers.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::memory::SharedSlots;
use super::range_allocator::AllocatedRange;
use crate::mapping::Buffer;
use crate::mirror::epoch::Epoch;
use crate::mirror::layout::Blocks;

/// A bounded amount of memory for buffers.
pub(crate) struct BufferPool {
    limit: usize,
    used: AtomicUsize,
    /// Large buffers that are kept for reuse, because a fresh buffer costs a page fault for each
    /// page. All have one length. Together with the buffers in use they stay below the limit.
    idle: Mutex<Vec<Buffer>>,
}

/// Buffers of this length or longer are kept for reuse.
const REUSE_MIN_BYTES: usize = 64 << 10;

impl BufferPool {
    /// A pool of at most `limit` bytes.
    pub(crate) fn new(limit: usize) -> Arc<BufferPool> {
        Arc::new(BufferPool { limit, used: AtomicUsize::new(0), idle: Mutex::default() })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.idle.lock().expect("no code panics with the idle buffers locked")
    }

    /// Returns a page-aligned buffer with arbitrary content, or `None` if the limit would be
    /// exceeded. A buffer that is larger than the whole pool is given out while no other buffer is
    /// in use, so that every request can go on at some time.
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
        Some(PooledBuffer(BufferSource::Private { buffer: Some(buffer), pool: self.clone() }))
    }
}

/// A buffer of a [`BufferPool`] or of the [`CowMemory`](super::memory::CowMemory). It is given back
/// when it is dropped.
pub(crate) struct PooledBuffer(BufferSource);

enum BufferSource {
    Private {
        /// `None` only while the value is being dropped.
        buffer: Option<Buffer>,
        pool: Arc<BufferPool>,
    },
    Shared {
        range: AllocatedRange,
        slots: Arc<SharedSlots>,
    },
}

impl PooledBuffer {
    /// The buffer at `range` of shared memory. The caller guarantees that the range lies within
    /// `slots`, that the file behind it has space there, and that no other buffer overlaps it.
    pub(super) fn shared(range: AllocatedRange, slots: Arc<SharedSlots>) -> PooledBuffer {
        PooledBuffer(BufferSource::Shared { range, slots })
    }

    /// The address, for an operation that owns this buffer.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        match &mut self.0 {
            BufferSource::Private { buffer, .. } => {
                buffer.as_mut().expect("taken only by drop").as_mut_ptr()
            }
            BufferSource::Shared { range, slots } => slots.bytes.at(range.offset as usize),
        }
    }

    /// Records that the buffer, which is part of the copy-on-write memory, preserves `blocks` of the
    /// disk for an epoch. From here on the next process finds them.
    pub(crate) fn set_owner(&self, epoch: Epoch, blocks: Blocks) {
        match &self.0 {
            BufferSource::Private { .. } => unreachable!("copies are kept in shared memory"),
            BufferSource::Shared { range, slots } => slots.set_owner(range.offset, epoch, blocks),
        }
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            BufferSource::Private { buffer, .. } => buffer.as_ref().expect("taken only by drop"),
            BufferSource::Shared { range, slots } => {
                let start = slots.bytes.at(range.offset as usize);
                // SAFETY: the range is inside the mapping and has space, as the caller of `shared`
                // guarantees. It belongs to this value alone, because allocated ranges do not
                // overlap. Any bytes are valid.
                unsafe { std::slice::from_raw_parts(start, range.len as usize) }
            }
        }
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            BufferSource::Private { buffer, .. } => buffer.as_mut().expect("taken only by drop"),
            BufferSource::Shared { range, slots } => {
                let start = slots.bytes.at(range.offset as usize);
                // SAFETY: as in `deref`, and `self` is borrowed exclusively.
                unsafe { std::slice::from_raw_parts_mut(start, range.len as usize) }
            }
        }
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let BufferSource::Private { buffer, pool } = &mut self.0 else { return };
        let buffer = buffer.take().expect("taken only by drop");
        let len = buffer.len();
        let mut idle = pool.idle();
        let used = pool.used.fetch_sub(len, Ordering::AcqRel);
        let fits = used + idle.len() * len <= pool.limit;
        if len >= REUSE_MIN_BYTES && fits && idle.last().is_none_or(|last| last.len() == len) {
            idle.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::BufferPool;

    #[test]
    fn a_pool_is_bounded_but_gives_one_buffer_of_any_size() {
        let pool = BufferPool::new(8192);
        let first = pool.take(4096).unwrap();
        assert!(pool.take(8192).is_none());
        let second = pool.take(4096).unwrap();
        assert!(pool.take(4096).is_none());
        drop((first, second));
        assert_eq!(pool.take(1 << 20).unwrap().len(), 1 << 20);
    }

    #[test]
    fn large_buffers_are_used_again_but_never_beyond_the_limit() {
        let pool = BufferPool::new(4 * 65536);
        let buffers: Vec<_> = (0..4).map(|_| pool.take(65536).unwrap()).collect();
        drop(buffers);
        assert_eq!(pool.idle().len(), 4);
        let again = pool.take(65536).unwrap();
        assert_eq!(pool.idle().len(), 3);
        let small = pool.take(4096).unwrap();
        assert_eq!(pool.idle().len(), 0, "the rest makes room for others");
        drop((again, small));
    }
}
