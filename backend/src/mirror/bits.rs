//! Bitmaps that many threads read and set at the same time.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::mapping::Words;

/// A bitmap whose bits are only set, never cleared. It can grow; bits that it does not have are not
/// set.
///
/// Setting a bit releases and reading it acquires: a thread that sees a bit also sees what was done
/// before the bit was set.
pub(crate) struct Bits {
    words: Words,
}

impl Bits {
    /// Zero bits in this process's own memory.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn zeroed(len: u64) -> io::Result<Bits> {
        Ok(Bits { words: Words::zeroed(len.div_ceil(64) as usize)? })
    }

    /// Bits in a file, starting at a page. They can grow to `capacity`. The file must have space for
    /// the first `len` bits.
    pub(crate) fn shared(file: &File, offset: u64, len: u64, capacity: u64) -> io::Result<Bits> {
        let [len, capacity] = [len, capacity].map(|bits| bits.div_ceil(64) as usize);
        Ok(Bits { words: Words::shared_with_capacity(file, offset, len, capacity)? })
    }

    /// Makes the bitmap `len` bits long, if it is shorter. The file must have space for them.
    pub(crate) fn grow(&self, len: u64) {
        self.words.grow(len.div_ceil(64) as usize);
    }

    pub(crate) fn get(&self, bit: u64) -> bool {
        let word = self.words.get((bit / 64) as usize);
        word.is_some_and(|word| word.load(Ordering::Acquire) & (1 << (bit % 64)) != 0)
    }

    /// Sets the bit. Returns whether this call changed it.
    pub(crate) fn set(&self, bit: u64) -> bool {
        if self.get(bit) {
            return false;
        }
        let mask = 1 << (bit % 64);
        self.words[(bit / 64) as usize].fetch_or(mask, Ordering::AcqRel) & mask == 0
    }

    /// The words that hold the bits. Bit 0 is in word 0.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        &self.words
    }
}

/// The words that hold the bits `first..first + count`, each with the mask of its bits.
pub(crate) fn masks(first: u64, count: u64) -> impl Iterator<Item = (usize, u64)> {
    let end = first + count;
    let words = if count == 0 { 0..0 } else { first / 64..(end - 1) / 64 + 1 };
    words.map(move |word| {
        let from = first.max(word * 64) - word * 64;
        let to = end.min(word * 64 + 64) - word * 64;
        let mask = if to - from == 64 { u64::MAX } else { ((1 << (to - from)) - 1) << from };
        (word as usize, mask)
    })
}

/// The positions of the bits that are set in `word`, in ascending order.
pub(crate) fn ones(mut word: u64) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || {
        (word != 0).then(|| {
            let bit = word.trailing_zeros();
            word &= word - 1;
            u64::from(bit)
        })
    })
}

/// The chunks that one epoch has changed.
///
/// The set has two levels: one bit for each chunk, and one bit for each word of those. So iterating
/// costs as much as the set holds, and not as much as the disk could hold.
pub(crate) struct DirtySet {
    chunks: Bits,
    summary: Bits,
    count: AtomicU64,
}

impl DirtySet {
    /// An empty set, in constant time. All bits must be zero: one for each chunk, and one for each
    /// word of those.
    pub(crate) fn new(chunks: Bits, summary: Bits) -> DirtySet {
        DirtySet { chunks, summary, count: AtomicU64::new(0) }
    }

    /// Takes over the bits that another process has set for `chunks` chunks. The summary is
    /// computed again, because the process may have ended before it was complete. Bits beyond the
    /// last chunk are cleared.
    pub(crate) fn recount(&self, chunks: u64) {
        if let Some(last) = self.chunks.words().last().filter(|_| !chunks.is_multiple_of(64)) {
            last.fetch_and((1 << (chunks % 64)) - 1, Ordering::AcqRel);
        }
        self.summary.words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
        let mut count = 0;
        for (index, word) in self.chunks.words().iter().enumerate() {
            let word = word.load(Ordering::Acquire);
            if word != 0 {
                count += u64::from(word.count_ones());
                self.summary.set(index as u64);
            }
        }
        self.count.store(count, Ordering::Relaxed);
    }

    /// Makes the set one of `chunks` chunks, if it has fewer. The file must have space for them.
    pub(crate) fn grow(&self, chunks: u64) {
        self.summary.grow(chunks.div_ceil(64));
        self.chunks.grow(chunks);
    }

    pub(crate) fn insert(&self, chunk: u64) {
        if self.chunks.set(chunk) {
            self.summary.set(chunk / 64);
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Removes a chunk. This is a bug that tests plant.
    #[cfg(test)]
    pub(crate) fn remove(&self, chunk: u64) {
        self.chunks.words()[(chunk / 64) as usize]
            .fetch_and(!(1 << (chunk % 64)), Ordering::AcqRel);
    }

    pub(crate) fn contains(&self, chunk: u64) -> bool {
        self.chunks.get(chunk)
    }

    /// The number of chunks in the set.
    pub(crate) fn len(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// The first chunk of the set at `from` or behind it.
    pub(crate) fn first_from(&self, from: u64) -> Option<u64> {
        let (chunks, summary) = (self.chunks.words(), self.summary.words());
        let first =
            |word: u64, at: u64| (word != 0).then(|| at * 64 + u64::from(word.trailing_zeros()));
        let at_least =
            |word: &AtomicU64, bit: u64| word.load(Ordering::Acquire) & (u64::MAX << (bit % 64));
        let inner = from / 64;
        if let Some(found) = first(at_least(chunks.get(inner as usize)?, from), inner) {
            return Some(found);
        }
        let next = inner + 1;
        let outer = next / 64;
        let head = first(at_least(summary.get(outer as usize)?, next), outer);
        let tail = || {
            let mut words = (outer + 1..).zip(&summary[outer as usize + 1..]);
            words.find_map(|(at, word)| first(word.load(Ordering::Acquire), at))
        };
        let inner = head.or_else(tail)?;
        first(chunks[inner as usize].load(Ordering::Acquire), inner)
    }

    /// The chunks in the set, in ascending order. Complete only when no thread inserts any more.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.summary.words().iter().enumerate().flat_map(move |(outer, word)| {
            ones(word.load(Ordering::Acquire)).flat_map(move |bit| {
                let inner = outer as u64 * 64 + bit;
                let word = self.chunks.words()[inner as usize].load(Ordering::Acquire);
                ones(word).map(move |bit| inner * 64 + bit)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::{any, prop};
    use proptest::{prop_assert_eq, proptest};

    use super::{Bits, DirtySet, masks};

    #[test]
    fn what_is_set_for_no_chunk_means_nothing() {
        let bits = |len| Bits::zeroed(len).unwrap();
        let set = DirtySet::new(bits(100), bits(2));
        for chunk in [5, 99, 100, 127] {
            set.chunks.set(chunk);
        }
        set.summary.set(63);
        set.recount(100);
        assert_eq!(set.iter().collect::<Vec<_>>(), [5, 99]);
        assert_eq!(set.len(), 2);
    }

    proptest! {
        #[test]
        fn a_dirty_set_holds_what_was_inserted_in_order(chunks in prop::collection::vec(0u64..300_000, 0..200)) {
            let bits = |len| Bits::zeroed(len).unwrap();
            let set = DirtySet::new(bits(300_000), bits(300_000 / 64 + 1));
            for chunk in &chunks {
                set.insert(*chunk);
            }
            let model: BTreeSet<u64> = chunks.iter().copied().collect();
            prop_assert_eq!(set.len(), model.len() as u64);
            for from in chunks.iter().flat_map(|chunk| [*chunk, chunk + 1]).chain([0, 299_999]) {
                prop_assert_eq!(set.first_from(from), model.range(from..).next().copied());
            }
            prop_assert_eq!(set.iter().collect::<Vec<_>>(), model.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn masks_cover_exactly_the_range(first in 0u64..300, count in 0u64..300, probe in any::<u16>()) {
            let probe = u64::from(probe) % 640;
            let covered = masks(first, count)
                .any(|(word, mask)| word as u64 == probe / 64 && mask & (1 << (probe % 64)) != 0);
            prop_assert_eq!(covered, (first..first + count).contains(&probe));
        }
    }
}
