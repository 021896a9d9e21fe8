//! Allocates ranges of a file or of shared memory. This is arithmetic only: the caller owns the
//! bytes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// The free ranges of a file or of shared memory.
pub(crate) struct RangeAllocator {
    /// New ranges end here at the latest.
    limit: u64,
    /// All ranges end here at the latest.
    end: u64,
    /// The length of each free range, by its offset. No two free ranges touch.
    free: Mutex<BTreeMap<u64, u64>>,
}

impl RangeAllocator {
    /// Allocates within the first `limit` bytes. Ranges that an earlier process allocated may lie
    /// within the first `found` bytes, if that is more.
    pub(crate) fn new(limit: u64, found: u64) -> Arc<RangeAllocator> {
        let end = limit.max(found);
        Arc::new(RangeAllocator { limit, end, free: Mutex::new(BTreeMap::from([(0, end)])) })
    }

    fn free(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.free.lock().expect("no code panics with the free ranges locked")
    }

    /// Allocates `len` bytes, or returns `None` if no free range is long enough. It takes the first
    /// range that fits, so that the ranges in use stay close together.
    pub(crate) fn take(self: &Arc<RangeAllocator>, len: u64) -> Option<AllocatedRange> {
        let mut free = self.free();
        let fits =
            |(offset, available): &(&u64, &u64)| **available >= len && **offset + len <= self.limit;
        let (&offset, &available) = free.iter().find(fits)?;
        free.remove(&offset);
        if available > len {
            free.insert(offset + len, available - len);
        }
        Some(AllocatedRange { offset, len, allocator: self.clone() })
    }

    /// Allocates exactly this range, if all of it is free.
    pub(crate) fn take_at(
        self: &Arc<RangeAllocator>,
        offset: u64,
        len: u64,
    ) -> Option<AllocatedRange> {
        let end = offset.checked_add(len).filter(|_| len > 0)?;
        let mut free = self.free();
        let (&start, &available) = free.range(..=offset).next_back()?;
        if end > start + available {
            return None;
        }
        free.remove(&start);
        if start < offset {
            free.insert(start, offset - start);
        }
        if end < start + available {
            free.insert(end, start + available - end);
        }
        Some(AllocatedRange { offset, len, allocator: self.clone() })
    }

    /// Allocates everything behind the last range in use, or returns `None` if that is nothing.
    /// While the caller has it, the file can be shortened to the offset of the result.
    pub(super) fn take_tail(self: &Arc<RangeAllocator>) -> Option<AllocatedRange> {
        let mut free = self.free();
        let (&offset, &len) = free.last_key_value()?;
        if offset + len < self.end {
            return None;
        }
        free.remove(&offset);
        Some(AllocatedRange { offset, len, allocator: self.clone() })
    }
}

/// A range in use. It is free again when it is dropped.
pub(crate) struct AllocatedRange {
    pub(crate) offset: u64,
    pub(super) len: u64,
    allocator: Arc<RangeAllocator>,
}

impl Drop for AllocatedRange {
    fn drop(&mut self) {
        let (mut start, mut end) = (self.offset, self.offset + self.len);
        let mut free = self.allocator.free();
        if let Some((&before, &len)) = free.range(..start).next_back()
            && before + len == start
        {
            free.remove(&before);
            start = before;
        }
        if let Some(len) = free.remove(&end) {
            end += len;
        }
        free.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use super::RangeAllocator;

    #[test]
    fn ranges_do_not_overlap_and_are_used_again() {
        let ranges = RangeAllocator::new(4 * 4096, 0);
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
    fn a_range_can_be_taken_again_where_it_was() {
        let ranges = RangeAllocator::new(8 * 4096, 0);
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
    fn ranges_of_an_earlier_process_do_not_raise_the_limit() {
        let ranges = RangeAllocator::new(2 * 4096, 8 * 4096);
        let old = ranges.take_at(6 * 4096, 4096).unwrap();
        let new = ranges.take(8192).unwrap();
        assert_eq!(new.offset, 0);
        assert!(ranges.take(4096).is_none(), "the rest is behind the limit");
        assert_eq!(ranges.take_tail().unwrap().offset, 7 * 4096);
        drop(old);
        let tail = ranges.take_tail().unwrap();
        assert_eq!(tail.offset, 8192, "everything behind the last range in use");
        assert!(ranges.take_tail().is_none(), "somebody has it");
        drop((tail, new));
        assert_eq!(ranges.take_tail().unwrap().offset, 0);
    }
}
