//! Presence: which blocks of the disk are local.
//!
//! A bit is set when the block's data is in the data file. It is cleared only if that data cannot
//! be read any more and the parent snapshot has it
//! ([`Mirror::invalidate`](super::Mirror::invalidate)). Changes since the last flush are tracked by
//! pages, so that a flush costs as much as has changed.
//!
//! All of it is in shared memory that outlives the process. The process can end between any two
//! steps here. So a page is marked as changed before its bits are set, and counts as changed until
//! it is durable.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::bits::{Bits, masks, ones};
use super::block_set::BlockSet;
use super::files::disk_file::allocate_more;
use super::layout::{BLOCK_BYTES, Blocks, Layout};
use crate::mapping::Buffer;

/// The number of words in a page of the bitmap. The map file is written by pages.
const PAGE_WORDS: usize = 512;

/// The size of a page of the bitmap.
pub(crate) const PAGE_BYTES: usize = PAGE_WORDS * 8;

/// The copy of one page of the bitmap.
pub(crate) struct Page {
    /// The index of the page.
    pub(crate) index: u64,
    /// Its content as in the map file: little-endian words.
    pub(crate) bytes: Buffer,
}

/// The presence bits of a disk.
pub(crate) struct Presence {
    bits: Bits,
    /// Pages that have to become durable.
    changed: PageFlags,
    /// Pages that are being made durable.
    writing: PageFlags,
    count: AtomicU64,
    /// Incremented with each change.
    version: AtomicU64,
    /// Held while bits, page flags and version change together. A thread that sees a bit and then
    /// reads the version must get a version that covers the bit. Otherwise a flush would consider
    /// the map complete.
    changing: Mutex<()>,
}

/// One flag for each page.
struct PageFlags(Bits);

impl Presence {
    /// The presence of a disk without local blocks, in this process's own memory.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn absent(blocks: u64) -> io::Result<Presence> {
        let [bits, changed, writing] = Presence::parts(blocks).map(|(_, len)| Bits::zeroed(len));
        Ok(Presence::over([bits?, changed?, writing?]))
    }

    /// The presence that `file` holds, starting at `offset`, which is the start of a page. It must
    /// have space: see [`Presence::allocate`].
    pub(crate) fn shared(file: &File, offset: u64, layout: &Layout) -> io::Result<Presence> {
        let bits = |(from, len, capacity)| Bits::shared(file, offset + from, len, capacity);
        let [all, changed, writing] = Presence::shared_parts(layout).map(bits);
        Ok(Presence::over([all?, changed?, writing?]))
    }

    /// Allocates the space that a disk needs in that file, which is long enough for its capacity.
    pub(crate) fn allocate(file: &File, offset: u64, layout: &Layout) -> io::Result<()> {
        Presence::shared_parts(layout).into_iter().try_for_each(|(from, len, _)| {
            allocate_more(file, offset + from, len.div_ceil(64).max(1) * 8)
        })
    }

    /// Makes room for the blocks of a disk that has grown. The file must have space for them.
    pub(crate) fn grow(&self, layout: &Layout) {
        let [bits, changed, writing] = Presence::parts(layout.block_count()).map(|(_, len)| len);
        self.writing.0.grow(writing);
        self.changed.0.grow(changed);
        self.bits.grow(bits);
    }

    /// The number of bytes of that file for a disk with this capacity.
    pub(crate) fn shared_len(layout: &Layout) -> u64 {
        let [.., (offset, bits)] = Presence::parts(layout.capacity_blocks());
        (offset + bits.div_ceil(8)).next_multiple_of(PAGE_BYTES as u64)
    }

    /// The offset of each part in the file, its number of bits, and its number of bits when the disk
    /// is as large as its capacity.
    fn shared_parts(layout: &Layout) -> [(u64, u64, u64); 3] {
        let now = Presence::parts(layout.block_count());
        let later = Presence::parts(layout.capacity_blocks());
        std::array::from_fn(|part| (later[part].0, now[part].1, later[part].1))
    }

    /// The offset in the file and the number of bits, for the bitmap and for the two sets of page
    /// flags.
    fn parts(blocks: u64) -> [(u64, u64); 3] {
        let bits = Presence::bytes_for(blocks);
        let pages = bits / PAGE_BYTES as u64;
        let flags = pages.div_ceil(64).max(1) * 8;
        let flags = flags.next_multiple_of(PAGE_BYTES as u64);
        [(0, bits * 8), (bits, pages), (bits + flags, pages)]
    }

    fn over([bits, changed, writing]: [Bits; 3]) -> Presence {
        Presence {
            bits,
            changed: PageFlags(changed),
            writing: PageFlags(writing),
            count: AtomicU64::new(0),
            version: AtomicU64::new(0),
            changing: Mutex::new(()),
        }
    }

    /// Takes over the bits that another process has set.
    pub(crate) fn recount(&self) {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Acquire).count_ones());
        self.count.store(self.bits.words().iter().map(ones).sum(), Ordering::Relaxed);
        self.writing.hand_over(&self.changed);
        // Pages that are marked are not durable.
        self.version.store(1, Ordering::SeqCst);
    }

    /// The size of the bitmap in the map file, which is whole pages.
    pub(crate) fn bytes(&self) -> u64 {
        self.bits.words().len() as u64 * 8
    }

    /// [`Presence::bytes`] of a disk with `blocks` blocks.
    pub(crate) fn bytes_for(blocks: u64) -> u64 {
        blocks.next_multiple_of(PAGE_WORDS as u64 * 64) / 8
    }

    /// Loads a page that was read from the map file.
    pub(crate) fn load_page(&self, index: u64, bytes: &[u8]) {
        if cairn_store::is_zero(bytes) {
            // Memory that is not touched costs nothing.
            return;
        }
        let start = index as usize * PAGE_WORDS;
        for (word, bytes) in self.bits.words()[start..].iter().zip(bytes.chunks_exact(8)) {
            let value = u64::from_le_bytes(bytes.try_into().expect("chunks of eight"));
            word.store(value, Ordering::Release);
            self.count.fetch_add(u64::from(value.count_ones()), Ordering::Relaxed);
        }
    }

    pub(crate) fn all(&self, blocks: Blocks) -> bool {
        masks(blocks.first, blocks.count)
            .all(|(word, mask)| self.bits.words()[word].load(Ordering::Acquire) & mask == mask)
    }

    pub(crate) fn get(&self, block: u64) -> bool {
        self.bits.get(block)
    }

    /// Whether `block` or a later block is present.
    pub(crate) fn any_from(&self, block: u64) -> bool {
        masks(block, self.bytes() * 8 - block)
            .any(|(word, mask)| self.bits.words()[word].load(Ordering::Acquire) & mask != 0)
    }

    /// Marks blocks as present. Their data must be in the data file.
    pub(crate) fn set(&self, blocks: Blocks) {
        if self.all(blocks) {
            return;
        }
        let _changing = self.changing();
        for (word, mask) in masks(blocks.first, blocks.count) {
            let page = (word / PAGE_WORDS) as u64;
            self.changed.mark(page);
            let before = self.bits.words()[word].fetch_or(mask, Ordering::AcqRel);
            let added = mask & !before;
            self.count.fetch_add(u64::from(added.count_ones()), Ordering::Relaxed);
        }
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Marks a block as absent.
    pub(crate) fn clear(&self, block: u64) {
        let _changing = self.changing();
        for (word, mask) in masks(block, 1) {
            self.changed.mark((word / PAGE_WORDS) as u64);
            let before = self.bits.words()[word].fetch_and(!mask, Ordering::AcqRel);
            let removed = mask & before;
            self.count.fetch_sub(u64::from(removed.count_ones()), Ordering::Relaxed);
        }
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// The present blocks of a chunk, counted from the chunk's start.
    pub(crate) fn in_chunk(&self, blocks: Blocks) -> BlockSet {
        // A chunk has at least 16 blocks, and their number is a power of two. So its bits either
        // fill whole words or lie within one word.
        BlockSet::from_words(masks(blocks.first, blocks.count).map(|(word, mask)| {
            let bits = self.bits.words()[word].load(Ordering::Acquire) & mask;
            if blocks.count < 64 { bits >> (blocks.first % 64) } else { bits }
        }))
    }

    /// The size of the local blocks in bytes.
    pub(crate) fn local_bytes(&self) -> u64 {
        self.count.load(Ordering::Relaxed) * BLOCK_BYTES
    }

    /// The number of changes so far. A later [`Presence::take_changed`] returns every bit that was
    /// visible before this call.
    pub(crate) fn version(&self) -> u64 {
        drop(self.changing());
        self.version.load(Ordering::SeqCst)
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().expect("no code panics with the presence locked")
    }

    /// Returns copies of the pages that have changed since the last call.
    ///
    /// Only one caller at a time. Each call is followed by [`Presence::are_durable`] or
    /// [`Presence::give_back`].
    pub(crate) fn take_changed(&self) -> Vec<Page> {
        // Not between the mark of a page and its bits: then the mark would be gone, and the copy
        // would lack the bits.
        let changing = self.changing();
        let taken = self.changed.hand_over(&self.writing);
        drop(changing);
        taken.into_iter().map(|index| self.page(index)).collect()
    }

    /// Records that the pages of [`Presence::take_changed`] are durable.
    pub(crate) fn are_durable(&self) {
        drop(self.writing.take());
    }

    /// Records that the pages of [`Presence::take_changed`] did not become durable.
    pub(crate) fn give_back(&self) {
        self.writing.hand_over(&self.changed);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    fn page(&self, index: u64) -> Page {
        let start = index as usize * PAGE_WORDS;
        let words = &self.bits.words()[start..start + PAGE_WORDS];
        let mut bytes = Buffer::zeroed(PAGE_BYTES);
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.load(Ordering::Acquire).to_le_bytes());
        }
        Page { index, bytes }
    }

    /// The chunks of `per_chunk` blocks that have at least one local block, in ascending order.
    pub(crate) fn touched_chunks(&self, per_chunk: u64) -> impl Iterator<Item = u64> + '_ {
        let mut last = None;
        self.bits
            .words()
            .iter()
            .enumerate()
            .flat_map(|(index, word)| {
                ones(word.load(Ordering::Acquire)).map(move |bit| index as u64 * 64 + bit)
            })
            .map(move |block| block / per_chunk)
            .filter(move |chunk| last.replace(*chunk) != Some(*chunk))
    }
}

impl PageFlags {
    fn mark(&self, index: u64) {
        self.0.words()[(index / 64) as usize].fetch_or(1 << (index % 64), Ordering::AcqRel);
    }

    /// Clears the flags after setting them in `other`. Returns their indices.
    fn hand_over(&self, other: &PageFlags) -> Vec<u64> {
        let words = self.0.words().iter().zip(other.0.words()).enumerate();
        words
            .flat_map(|(index, (word, other))| {
                let mut flags = word.load(Ordering::Acquire);
                while flags != 0 {
                    other.fetch_or(flags, Ordering::AcqRel);
                    match word.compare_exchange(flags, 0, Ordering::AcqRel, Ordering::Acquire) {
                        Ok(_) => break,
                        Err(more) => flags = more,
                    }
                }
                ones(flags).map(move |bit| index as u64 * 64 + bit)
            })
            .collect()
    }

    /// Clears the flags. Returns their indices.
    fn take(&self) -> Vec<u64> {
        let words = self.0.words().iter().enumerate();
        words
            .flat_map(|(index, word)| {
                let taken = if word.load(Ordering::Relaxed) == 0 {
                    0
                } else {
                    word.swap(0, Ordering::AcqRel)
                };
                ones(taken).map(move |bit| index as u64 * 64 + bit)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use cairn_store::Geometry;

    use super::{BlockSet, Blocks, Layout, Presence};

    #[test]
    fn a_chunks_bits_are_its_own_whatever_the_chunk_size() {
        for per_chunk in [16u64, 64, 1024] {
            let presence = Presence::absent(per_chunk * 8).unwrap();
            presence.set(Blocks { first: per_chunk * 3 + 1, count: 2 });
            let third = presence.in_chunk(Blocks { first: per_chunk * 3, count: per_chunk });
            assert_eq!(third, BlockSet::run(Blocks { first: 1, count: 2 }));
            assert!(
                presence.in_chunk(Blocks { first: per_chunk * 2, count: per_chunk }).is_empty()
            );
            presence.set(Blocks { first: per_chunk * 5, count: per_chunk });
            let fifth = presence.in_chunk(Blocks { first: per_chunk * 5, count: per_chunk });
            assert_eq!(fifth.len(), per_chunk);
            assert_eq!(presence.touched_chunks(per_chunk).collect::<Vec<_>>(), [3, 5]);
        }
    }

    #[test]
    fn only_changed_pages_are_handed_out_and_each_once() {
        let presence = Presence::absent(4 * 32768).unwrap();
        presence.set(Blocks { first: 32768, count: 1 });
        presence.set(Blocks { first: 3 * 32768 + 5, count: 10 });
        let version = presence.version();
        let pages = presence.take_changed();
        assert_eq!(pages.iter().map(|page| page.index).collect::<Vec<_>>(), [1, 3]);
        assert!(presence.take_changed().is_empty());
        presence.set(Blocks { first: 32768, count: 1 });
        assert_eq!(presence.version(), version, "setting a set bit changes nothing");
        presence.give_back();
        assert_eq!(presence.take_changed().len(), 2);
        presence.are_durable();
        assert!(presence.take_changed().is_empty());
    }

    /// A fill sets a bit, a write finds it set and is acknowledged, and a flush checks whether the
    /// map is current. It must not be current until the page with that bit was taken.
    #[test]
    fn a_thread_that_sees_a_bit_sees_a_version_that_covers_it() {
        for _ in 0..200 {
            let presence = Presence::absent(32768).unwrap();
            let all = Blocks { first: 0, count: 512 };
            std::thread::scope(|scope| {
                scope.spawn(|| presence.set(all));
                while !presence.get(0) {
                    std::hint::spin_loop();
                }
                assert!(presence.version() > 0 && presence.take_changed().len() == 1);
            });
        }
    }

    #[test]
    fn what_was_not_durable_when_the_process_ended_counts_as_changed() {
        let file = tempfile::tempfile().unwrap();
        let layout = Layout::new(Geometry::new(4 * 32768 * 4096, 65536).unwrap());
        file.set_len(4096 + Presence::shared_len(&layout)).unwrap();
        let presence = Presence::shared(&file, 4096, &layout).unwrap();
        presence.set(Blocks { first: 5, count: 10 });
        assert_eq!(presence.take_changed().len(), 1);
        presence.set(Blocks { first: 2 * 32768, count: 1 });
        drop(presence);
        let again = Presence::shared(&file, 4096, &layout).unwrap();
        again.recount();
        assert!(again.all(Blocks { first: 5, count: 10 }) && again.get(2 * 32768));
        assert_eq!(again.local_bytes(), 11 * 4096);
        assert!(again.version() > 0);
        let pages: Vec<_> = again.take_changed().iter().map(|page| page.index).collect();
        assert_eq!(pages, [0, 2]);
    }

    #[test]
    fn pages_survive_a_round_trip() {
        let presence = Presence::absent(32768).unwrap();
        presence.set(Blocks { first: 7, count: 130 });
        let pages = presence.take_changed();
        let again = Presence::absent(32768).unwrap();
        again.load_page(0, &pages[0].bytes);
        assert!(again.all(Blocks { first: 7, count: 130 }));
        assert!(!again.get(6) && !again.get(137));
        assert_eq!(again.local_bytes(), 130 * 4096);
    }
}
