//! How much space the spill files of all layers use together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The space of spill files, in bytes.
pub(crate) struct SpillSpace {
    limit: u64,
    used: AtomicU64,
}

impl SpillSpace {
    /// At most `limit` bytes.
    pub(crate) fn new(limit: u64) -> Arc<SpillSpace> {
        Arc::new(SpillSpace { limit, used: AtomicU64::new(0) })
    }

    /// Reserves `len` bytes, or returns `None` if that exceeds the limit.
    pub(crate) fn reserve(self: &Arc<SpillSpace>, len: u64) -> Option<SpillReservation> {
        let take = |used: u64| used.checked_add(len).filter(|used| *used <= self.limit);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).ok()?;
        Some(SpillReservation { len, space: self.clone() })
    }

    /// Counts `len` bytes that an earlier process has used, maybe under a higher limit.
    pub(crate) fn adopt(self: &Arc<SpillSpace>, len: u64) -> SpillReservation {
        self.used.fetch_add(len, Ordering::AcqRel);
        SpillReservation { len, space: self.clone() }
    }

    /// The bytes in use.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }
}

/// Space in use. It is free again when this is dropped.
pub(crate) struct SpillReservation {
    len: u64,
    space: Arc<SpillSpace>,
}

impl SpillReservation {
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds the space of another reservation to this one.
    pub(crate) fn merge(&mut self, mut other: SpillReservation) {
        self.len += std::mem::take(&mut other.len);
    }

    /// Frees a part of the space.
    pub(crate) fn release(&mut self, len: u64) {
        let len = len.min(self.len);
        self.len -= len;
        self.space.used.fetch_sub(len, Ordering::AcqRel);
    }
}

impl Drop for SpillReservation {
    fn drop(&mut self) {
        self.release(self.len);
    }
}

#[cfg(test)]
mod tests {
    use super::SpillSpace;

    #[test]
    fn space_is_bounded_and_comes_back() {
        let space = SpillSpace::new(10);
        let mut first = space.reserve(6).unwrap();
        assert!(space.reserve(5).is_none() && space.reserve(u64::MAX).is_none());
        first.merge(space.reserve(4).unwrap());
        assert!(space.reserve(1).is_none());
        first.release(3);
        assert_eq!(space.used(), 7);
        first.release(100);
        assert_eq!(space.used(), 0);
        drop(first);
        let old = space.adopt(20);
        assert!(space.reserve(1).is_none(), "an earlier process had more");
        drop(old);
        assert_eq!(space.used(), 0);
        assert!(space.reserve(10).is_some());
    }
}
