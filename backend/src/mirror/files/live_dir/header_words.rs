//! What a use of the mirror keeps in single words of the page with the header: they change while the
//! guest runs, and outlive the process.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(test)]
use super::header::MAGIC;
use super::header::{HEADER_BYTES, INVALID_MAGIC};
use crate::mapping::{PAGE_BYTES, Words};

/// The index of the first word of the flags in the header's page.
pub(super) const FLAGS_WORD: usize = 2 * HEADER_BYTES / 8;

/// Maps the page with the header of a state file.
pub(super) fn header_page(state: &File) -> io::Result<Words> {
    Words::shared(state, 0, PAGE_BYTES / 8)
}

/// What is known of the guest, in the page of the header.
pub(crate) struct GuestFlags(pub(super) Words);

impl GuestFlags {
    /// The virtqueues, one bit each, that may be in use when they are started. These are the queues
    /// that were started in this use of the mirror, or all queues if nothing that a guest wrote
    /// before can be lost.
    pub(crate) fn known_rings(&self) -> &AtomicU64 {
        &self.0[FLAGS_WORD]
    }

    /// Not 0 if a write is answered only when it is durable. The numbers are those of `CachingMode`.
    pub(crate) fn write_through(&self) -> &AtomicU64 {
        &self.0[FLAGS_WORD + 1]
    }
}

/// Whether the live directory counts, in the first word of the header.
pub(crate) struct LiveValidity(pub(super) Words);

impl LiveValidity {
    /// The validity of no directory, in this process's own memory.
    #[cfg(test)]
    pub(crate) fn private() -> LiveValidity {
        let words = Words::zeroed(1).expect("memory");
        words[0].store(u64::from_ne_bytes(*MAGIC), Ordering::SeqCst);
        LiveValidity(words)
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.0[0].load(Ordering::SeqCst) != u64::from_ne_bytes(*INVALID_MAGIC)
    }

    /// Makes the directory invalid, for this process and for all later ones.
    pub(crate) fn invalidate(&self) {
        self.0[0].store(u64::from_ne_bytes(*INVALID_MAGIC), Ordering::SeqCst);
    }
}

/// The snapshot numbers that this use of the mirror has reserved and that no checkpoint has had, in the
/// page of the header.
pub(crate) struct UnusedNumbers(pub(super) Words);

impl UnusedNumbers {
    pub(crate) fn load(&self) -> Range<u64> {
        let [start, end] = [2, 3].map(|word| self.0[FLAGS_WORD + word].load(Ordering::SeqCst));
        start..end.max(start)
    }

    /// The id of the numbers' reservation, if it is recorded.
    pub(crate) fn reservation(&self) -> Option<u64> {
        let id = self.0[FLAGS_WORD + 4].load(Ordering::SeqCst);
        (id != 0).then_some(id)
    }

    /// Records the numbers that are unused from here on.
    pub(crate) fn record(&self, unused: &Range<u64>) {
        // In this order: if the process ends in between, no used number counts as unused.
        self.0[FLAGS_WORD + 2].store(unused.start, Ordering::SeqCst);
        self.0[FLAGS_WORD + 3].store(unused.end, Ordering::SeqCst);
    }

    /// Records the id of the reservation to which the numbers belong.
    pub(crate) fn record_reservation(&self, id: u64) {
        self.0[FLAGS_WORD + 4].store(id, Ordering::SeqCst);
    }
}
