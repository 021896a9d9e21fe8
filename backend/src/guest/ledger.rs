//! The ledger: which requests of a virtqueue are in flight, in shared memory. If this process is
//! killed, the next one finishes them.
//!
//! The layout is that of the vhost-user specification for split virtqueues, as words of 64 bits:
//!
//! ```text
//! 0        features, unused
//! 1        version (16 bits), entries (16), last head that was returned (16), used index (16)
//! 2 + 2h   in flight (8 bits) ... of the chain with head h
//! 3 + 2h   its age: a counter
//! ```
//!
//! A chain is in flight from the moment it is popped until the guest sees it in the used ring. The
//! process can end between the update of the ring's index and the update of the ledger's. Then the
//! two differ by one, and the last head tells which chain is done.
//!
//! QEMU and Cloud Hypervisor keep this memory (GET_INFLIGHT_FD and SET_INFLIGHT_FD), and drop it
//! when the guest resets. For other hypervisors this process has its own file with the same layout.
//! That file may belong to an earlier guest, so it is used only if it fits the rings. The
//! rings of a new guest look the same until a chain is returned. That is harmless: until then each
//! chain in flight is also in the available ring.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::mapping::{PAGE_BYTES, Words, check_part};
use crate::mirror::files::disk_file::{allocate, allocate_more};

const VERSION: u64 = 1;

/// The number of words before a queue's entries.
const HEADER_WORDS: usize = 2;

/// The value of the last head while no chain was returned.
const NO_HEAD: u16 = u16::MAX;

/// The ledgers of all queues of a device. Each has room for `entries` entries.
#[derive(Clone)]
pub(crate) struct LedgerRegion {
    words: Arc<Words>,
    queues: usize,
    entries: u16,
}

impl LedgerRegion {
    /// The size of the ledgers in bytes.
    pub(crate) fn len(queues: usize, entries: u16) -> u64 {
        (queues * LedgerRegion::queue_words(entries) * 8) as u64
    }

    /// The number of words of one queue, rounded up to whole cache lines.
    fn queue_words(entries: u16) -> usize {
        (HEADER_WORDS + 2 * usize::from(entries)).next_multiple_of(8)
    }

    /// Maps the ledgers that start at `offset` of `file`.
    pub(crate) fn map(
        file: &File,
        offset: u64,
        queues: usize,
        entries: u16,
    ) -> io::Result<LedgerRegion> {
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what);
        if entries == 0 || !offset.is_multiple_of(PAGE_BYTES as u64) {
            return Err(wrong("ledgers need entries and begin with a page"));
        }
        let len = LedgerRegion::len(queues, entries);
        check_part(file, offset, len)?;
        let words = Arc::new(Words::shared(file, offset, (len / 8) as usize)?);
        Ok(LedgerRegion { words, queues, entries })
    }

    /// Maps the ledgers that a hypervisor keeps. All their space is allocated first: the kernel ends a
    /// process that touches shared memory for which there is no space.
    pub(crate) fn map_shared(
        file: &File,
        offset: u64,
        queues: usize,
        entries: u16,
    ) -> io::Result<LedgerRegion> {
        let region = LedgerRegion::map(file, offset, queues, entries)?;
        allocate_more(file, offset, LedgerRegion::len(queues, entries))?;
        Ok(region)
    }

    /// The ledger of a queue with `size` entries, if there is one.
    pub(crate) fn ledger(&self, queue: usize, size: u16) -> Option<Ledger> {
        (queue < self.queues && size <= self.entries).then(|| Ledger {
            words: self.words.clone(),
            start: queue * LedgerRegion::queue_words(self.entries),
            size,
            counter: 0,
        })
    }
}

/// The indices of a ring when its ledger is resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingIndices {
    pub(crate) available: u16,
    pub(crate) used: u16,
}

/// The ledger of one queue.
pub(crate) struct Ledger {
    words: Arc<Words>,
    /// The index of its first word.
    start: usize,
    size: u16,
    /// The age of the next request.
    counter: u64,
}

impl Ledger {
    fn get(&self, at: usize) -> u64 {
        self.words[self.start + at].load(Ordering::Acquire)
    }

    /// The next process sees stores in the order in which they were made.
    fn set(&self, at: usize, value: u64) {
        self.words[self.start + at].store(value, Ordering::Release);
    }

    fn header(&self) -> [u16; 4] {
        let word = self.get(1);
        [0, 16, 32, 48].map(|shift| (word >> shift) as u16)
    }

    fn set_header(&self, last: u16, used: u16) {
        let parts = [VERSION, u64::from(self.size), u64::from(last), u64::from(used)];
        self.set(1, parts[0] | parts[1] << 16 | parts[2] << 32 | parts[3] << 48);
    }

    fn entry(head: u16) -> usize {
        HEADER_WORDS + 2 * usize::from(head)
    }

    fn is_in_flight(&self, head: u16) -> bool {
        self.get(Ledger::entry(head)) & 0xff != 0
    }

    /// Returns the chains that an earlier process popped and did not return, oldest first. Returns
    /// `None` if the ledger does not belong to this ring. Then the ledger is reset, and nothing is
    /// in flight.
    pub(crate) fn resume(&mut self, ring: RingIndices) -> Option<Vec<u16>> {
        let [version, entries, last, used] = self.header();
        let behind = ring.used.wrapping_sub(used);
        if u64::from(version) != VERSION || entries != self.size || behind > 1 {
            self.reset(ring.used);
            return None;
        }
        if behind == 1 && last < self.size {
            self.set(Ledger::entry(last), 0);
        }
        self.set_header(last, ring.used);
        // Each age is read once: a hypervisor may change them at any time.
        let with_age = |head: u16| (self.get(Ledger::entry(head) + 1), head);
        let in_flight = (0..self.size).filter(|head| self.is_in_flight(*head));
        let mut heads: Vec<(u64, u16)> = in_flight.map(with_age).collect();
        if heads.len() > usize::from(ring.available.wrapping_sub(ring.used)) {
            // The guest has made fewer chains available than are in flight, so it was reset.
            self.reset(ring.used);
            return None;
        }
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |(age, _)| age.wrapping_add(1));
        Some(heads.into_iter().map(|(_, head)| head).collect())
    }

    /// Removes all entries.
    pub(crate) fn reset(&mut self, used: u16) {
        // First: a partial reset must not look like a valid ledger.
        self.set(1, 0);
        for head in 0..self.size {
            self.set(Ledger::entry(head), 0);
        }
        self.counter = 0;
        self.set_header(NO_HEAD, used);
    }

    /// Whether no chain is in flight.
    pub(crate) fn is_empty(&self) -> bool {
        !(0..self.size).any(|head| self.is_in_flight(head))
    }

    /// Whether a process has used the ledger, for a ring of any state.
    pub(crate) fn is_initialised(&self) -> bool {
        let [version, ..] = self.header();
        u64::from(version) == VERSION
    }

    /// Whether no chain was returned since [`Ledger::reset`].
    fn is_unused(&self) -> bool {
        let [_, _, last, _] = self.header();
        last == NO_HEAD
    }

    /// Records that a chain was popped.
    pub(crate) fn popped(&mut self, head: u16) {
        if head < self.size {
            self.set(Ledger::entry(head) + 1, self.counter);
            self.set(Ledger::entry(head), 1);
            self.counter = self.counter.wrapping_add(1);
        }
    }

    /// Records that a chain is about to appear in the used ring, whose index is `used`.
    pub(crate) fn returning(&self, head: u16, used: u16) {
        self.set_header(head, used);
    }

    /// Records that the chain is in the used ring, whose index is `used` after that.
    pub(crate) fn returned(&self, head: u16, used: u16) {
        if head < self.size {
            self.set(Ledger::entry(head), 0);
        }
        self.set_header(head, used);
    }
}

/// The guest addresses of a ring. The process's own ledger is used only if they match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GuestRingAddresses {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// The process's own ledgers, for hypervisors that keep none.
pub(crate) struct LedgerFile {
    addresses: Words,
    region: LedgerRegion,
}

/// The number of words for the addresses of one ring.
const ADDRESS_WORDS: usize = 4;

impl LedgerFile {
    /// Opens the file. Its content is discarded if it is for other queues.
    pub(crate) fn open(path: &Path, queues: usize, entries: u16) -> io::Result<LedgerFile> {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(path)?;
        let ledgers = (queues * ADDRESS_WORDS * 8).next_multiple_of(PAGE_BYTES) as u64;
        let len = ledgers + LedgerRegion::len(queues, entries);
        let found = file.metadata()?.len();
        if found != len {
            if found > 0 {
                tracing::warn!(
                    "the number or size of queues has changed: requests in flight are lost, unless \
                     the hypervisor keeps a record of them"
                );
            }
            file.set_len(0)?;
            allocate(&file, len)?;
        }
        Ok(LedgerFile {
            addresses: Words::shared(&file, 0, queues * ADDRESS_WORDS)?,
            region: LedgerRegion::map(&file, ledgers, queues, entries)?,
        })
    }

    /// Returns the ledger of a ring at `addresses`. Also returns the chains in flight, if the ring
    /// had these addresses before.
    pub(crate) fn resume(
        &self,
        queue: usize,
        size: u16,
        addresses: GuestRingAddresses,
        ring: RingIndices,
    ) -> Option<(Ledger, Option<Vec<u16>>)> {
        let mut ledger = self.region.ledger(queue, size)?;
        let known = &self.addresses[queue * ADDRESS_WORDS..(queue + 1) * ADDRESS_WORDS];
        let wanted = [addresses.descriptors, addresses.available, addresses.used, u64::from(size)];
        let is_known = known.iter().zip(wanted).all(|(a, b)| a.load(Ordering::Acquire) == b);
        let heads = if is_known && ring.used == 0 && ledger.is_unused() {
            ledger.reset(ring.used);
            Some(Vec::new())
        } else if is_known {
            ledger.resume(ring)
        } else {
            ledger.reset(ring.used);
            known.iter().zip(wanted).for_each(|(to, from)| to.store(from, Ordering::Release));
            None
        };
        Some((ledger, heads))
    }

    /// Whether a request is in flight on any queue.
    pub(crate) fn is_in_use(&self) -> bool {
        (0..self.region.queues).any(|queue| {
            let ledger = self.region.ledger(queue, self.region.entries);
            ledger.is_some_and(|ledger| !ledger.is_empty())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::{GuestRingAddresses, Ledger, LedgerFile, LedgerRegion, RingIndices};

    fn region() -> LedgerRegion {
        let file = tempfile::tempfile().unwrap();
        file.set_len(LedgerRegion::len(2, 64)).unwrap();
        LedgerRegion::map(&file, 0, 2, 64).unwrap()
    }

    fn ring(available: u16, used: u16) -> RingIndices {
        RingIndices { available, used }
    }

    /// The next process's view of queue 1.
    fn again(region: &LedgerRegion, indices: RingIndices) -> (Ledger, Option<Vec<u16>>) {
        let mut ledger = region.ledger(1, 64).unwrap();
        let heads = ledger.resume(indices);
        (ledger, heads)
    }

    #[test]
    fn chains_in_flight_come_back_in_the_order_in_which_they_were_popped() {
        let region = region();
        let (mut ledger, heads) = again(&region, ring(0, 0));
        assert_eq!(heads, None, "a new ledger");
        for head in [5, 63, 0, 7] {
            ledger.popped(head);
        }
        ledger.returning(63, 0);
        ledger.returned(63, 1);
        let (mut ledger, heads) = again(&region, ring(9, 1));
        assert_eq!(heads, Some(vec![5, 0, 7]));
        ledger.popped(1);
        assert_eq!(again(&region, ring(9, 1)).1, Some(vec![5, 0, 7, 1]), "newer than the rest");
    }

    #[test]
    fn the_end_of_the_process_at_any_step_neither_loses_nor_repeats_a_chain() {
        for step in 0..4 {
            let region = region();
            let (mut ledger, _) = again(&region, ring(0, 0));
            ledger.popped(3);
            ledger.popped(4);
            let mut used = 0;
            if step > 0 {
                ledger.returning(3, 0);
            }
            if step > 1 {
                used = 1;
            }
            if step > 2 {
                ledger.returned(3, 1);
            }
            let expected = if used == 1 { vec![4] } else { vec![3, 4] };
            assert_eq!(again(&region, ring(2, used)).1, Some(expected), "ended after step {step}");
        }
    }

    /// The hypervisor keeps the memory, and may write to it at any time.
    #[test]
    fn ages_that_change_while_they_are_read_do_no_harm() {
        const ENTRIES: u16 = 1024;
        let file = tempfile::tempfile().unwrap();
        file.set_len(LedgerRegion::len(1, ENTRIES)).unwrap();
        let region = LedgerRegion::map(&file, 0, 1, ENTRIES).unwrap();
        let indices = ring(ENTRIES, 0);
        let mut ledger = region.ledger(0, ENTRIES).unwrap();
        ledger.reset(0);
        (0..ENTRIES).for_each(|head| ledger.popped(head));
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let hypervisor = region.ledger(0, ENTRIES).unwrap();
            let is_over = &is_over;
            scope.spawn(move || {
                let mut age: u64 = 1;
                while !is_over.load(Ordering::Relaxed) {
                    for head in 0..ENTRIES {
                        age = age.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        hypervisor.set(Ledger::entry(head) + 1, age);
                    }
                }
            });
            let resumed = std::panic::catch_unwind(|| {
                (0..300).all(|_| {
                    let mut ledger = region.ledger(0, ENTRIES).unwrap();
                    let mut heads = ledger.resume(indices).unwrap_or_default();
                    heads.sort_unstable();
                    heads.into_iter().eq(0..ENTRIES)
                })
            });
            is_over.store(true, Ordering::Relaxed);
            assert!(resumed.is_ok_and(|each_head_came_once| each_head_came_once));
        });
    }

    #[test]
    fn a_ledger_that_does_not_fit_the_ring_is_dropped() {
        let region = region();
        let (mut ledger, _) = again(&region, ring(0, 100));
        ledger.popped(3);
        ledger.popped(4);
        assert_eq!(again(&region, ring(101, 100)).1, None, "two in flight, one available");
        let (mut ledger, _) = again(&region, ring(100, 100));
        ledger.popped(3);
        assert_eq!(again(&region, ring(5, 0)).1, None, "the ring was reset");
        assert_eq!(again(&region, ring(5, 0)).1, Some(vec![]), "and so did the ledger");
        assert!(region.ledger(2, 64).is_none() && region.ledger(0, 128).is_none());
    }

    #[test]
    fn our_own_ledger_counts_only_for_the_same_rings() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger");
        let addresses = GuestRingAddresses { descriptors: 0x1000, available: 0x2000, used: 0x3000 };
        let open = |queues| LedgerFile::open(&path, queues, 64).unwrap();
        let (mut ledger, heads) = open(2).resume(1, 64, addresses, ring(0, 7)).unwrap();
        assert_eq!(heads, None, "it is another place than before");
        assert!(!open(2).is_in_use());
        ledger.popped(9);
        assert!(open(2).is_in_use());
        let heads =
            |queues, addresses| open(queues).resume(1, 64, addresses, ring(8, 7)).unwrap().1;
        assert_eq!(heads(2, addresses), Some(vec![9]));
        assert_eq!(heads(2, GuestRingAddresses { used: 0x4000, ..addresses }), None);
        assert_eq!(heads(2, addresses), None, "the last one is another guest's");
        assert_eq!(heads(3, addresses), None, "other queues");
    }

    #[test]
    fn while_nothing_was_returned_the_ring_itself_has_what_is_in_flight() {
        let dir = tempfile::tempdir().unwrap();
        let ledgers = LedgerFile::open(&dir.path().join("ledger"), 1, 64).unwrap();
        let addresses = GuestRingAddresses { descriptors: 0x1000, available: 0x2000, used: 0x3000 };
        let resume = |indices| ledgers.resume(0, 64, addresses, indices).unwrap();
        let (mut ledger, _) = resume(ring(0, 0));
        ledger.popped(9);
        let (mut ledger, heads) = resume(ring(1, 0));
        assert_eq!(heads, Some(vec![]), "the next to pop is the first, of whichever guest");
        ledger.popped(9);
        ledger.popped(4);
        ledger.returning(4, 0);
        ledger.returned(4, 1);
        assert_eq!(resume(ring(2, 1)).1, Some(vec![9]));
    }
}
