//! Write intent: which regions of the disk may differ from the parent snapshot, in a form that
//! survives the death of the host.
//!
//! Which chunks have changed is known only while the host lives. For the host's death the map has
//! one bit for each region of 64 MiB, which is durable before the first write to the region. After
//! an unclean stop, everything local in such a region counts as changed, and nothing else does.
//!
//! The bit of a region is cleared when nothing in the region has changed since the parent. A write
//! marks its chunks as changed, and then checks the bit. The thread that clears the bit
//! first clears it, and then checks the chunks. So at least one of them sees the other.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

use super::bits::ones;
use super::layout::{Layout, Span};

/// The size of a region.
const REGION_BYTES: u64 = 64 << 20;

/// The index of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region(u64);

impl Region {
    fn span(self) -> Span {
        Span { offset: self.0 * REGION_BYTES, len: REGION_BYTES }
    }
}

/// The regions whose bit is set in the map.
pub(crate) struct WriteIntent {
    /// Words for a disk as large as the capacity.
    all_words: Vec<AtomicU64>,
    /// The number of words that the disk has at present.
    len: AtomicUsize,
}

impl WriteIntent {
    /// The bits that the map holds, as [`WriteIntent::bytes`] returns them.
    pub(crate) fn new(layout: &Layout, bytes: &[u8]) -> WriteIntent {
        let (words, _) = bytes.as_chunks::<8>();
        let (len, capacity) = (words.len(), WriteIntent::capacity_bytes(layout) / 8);
        let word = |bytes: &[u8; 8]| AtomicU64::new(u64::from_le_bytes(*bytes));
        let mut all_words = Vec::with_capacity(capacity);
        all_words.extend(words.iter().map(word));
        all_words.resize_with(capacity.max(len), AtomicU64::default);
        WriteIntent { all_words, len: AtomicUsize::new(len) }
    }

    /// The number of bytes for the bits of a disk, rounded up to whole words.
    pub(crate) fn bytes_for(layout: &Layout) -> usize {
        layout.file_len().div_ceil(REGION_BYTES).div_ceil(64) as usize * 8
    }

    /// [`WriteIntent::bytes_for`] of a disk as large as the capacity. This is 2 KiB for each TiB.
    pub(crate) fn capacity_bytes(layout: &Layout) -> usize {
        layout.capacity().div_ceil(REGION_BYTES).div_ceil(64) as usize * 8
    }

    /// Makes room for the regions of a disk that has grown.
    pub(crate) fn grow(&self, layout: &Layout) {
        self.len.fetch_max(WriteIntent::bytes_for(layout) / 8, Ordering::SeqCst);
    }

    fn words(&self) -> &[AtomicU64] {
        &self.all_words[..self.len.load(Ordering::SeqCst)]
    }

    /// The bits as the map holds them.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.words().iter().flat_map(|word| word.load(Ordering::SeqCst).to_le_bytes()).collect()
    }

    fn regions(span: Span) -> impl Iterator<Item = u64> {
        span.offset / REGION_BYTES..(span.end().max(span.offset + 1) - 1) / REGION_BYTES + 1
    }

    fn get(&self, region: u64) -> bool {
        self.words()[(region / 64) as usize].load(Ordering::SeqCst) & (1 << (region % 64)) != 0
    }

    /// Whether the map has all regions of `span`.
    pub(crate) fn covers(&self, span: Span) -> bool {
        WriteIntent::regions(span).all(|region| self.get(region))
    }

    /// Whether the map has any region of `span`.
    pub(crate) fn covers_any(&self, span: Span) -> bool {
        WriteIntent::regions(span).any(|region| self.get(region))
    }

    /// The regions of `span`.
    #[cfg(test)]
    pub(crate) fn regions_of(&self, span: Span) -> RegionSet {
        let mut regions = RegionSet::default();
        regions.insert(span);
        regions
    }

    /// Whether the map has all of `regions`.
    pub(crate) fn has_all(&self, regions: &RegionSet) -> bool {
        let mut words = self.words().iter().zip(&regions.words);
        words.all(|(word, more)| more & !word.load(Ordering::SeqCst) == 0)
    }

    /// The bits together with those of `regions`, to be written to the map.
    pub(crate) fn bytes_with(&self, regions: &RegionSet) -> Vec<u8> {
        let more = regions.words.iter().chain(std::iter::repeat(&0));
        let words = self.words().iter().zip(more);
        words.flat_map(|(word, more)| (word.load(Ordering::SeqCst) | more).to_le_bytes()).collect()
    }

    /// Records that the map has `regions`.
    pub(crate) fn set(&self, regions: &RegionSet) {
        for (word, more) in self.words().iter().zip(&regions.words) {
            word.fetch_or(*more, Ordering::SeqCst);
        }
    }

    /// Clears the bits of regions in which `is_changed` finds no change. Returns these regions.
    ///
    /// The caller keeps everybody else from writing the map until the data of these regions is durable
    /// and the map is written. If the data cannot be made durable, it calls [`WriteIntent::restore`].
    pub(crate) fn clear_unchanged(&self, is_changed: impl Fn(Span) -> bool) -> Vec<Region> {
        let mut cleared = Vec::new();
        for (index, word) in self.words().iter().enumerate() {
            for bit in ones(word.load(Ordering::SeqCst)) {
                let region = Region(index as u64 * 64 + bit);
                if is_changed(region.span()) {
                    continue;
                }
                word.fetch_and(!(1 << bit), Ordering::SeqCst);
                fence(Ordering::SeqCst);
                match is_changed(region.span()) {
                    // A write came in between, and may have seen the bit.
                    true => drop(word.fetch_or(1 << bit, Ordering::SeqCst)),
                    false => cleared.push(region),
                }
            }
        }
        cleared
    }

    /// Sets the bits of regions again that were cleared, and that the map still has.
    pub(crate) fn restore(&self, cleared: &[Region]) {
        let mut regions = RegionSet::default();
        cleared.iter().for_each(|region| regions.insert(region.span()));
        self.set(&regions);
    }
}

/// A set of regions. Its size depends on the size of the disk, and not on how much is inserted.
#[derive(Clone, Default)]
pub(crate) struct RegionSet {
    words: Vec<u64>,
}

impl RegionSet {
    /// Inserts the regions of `span`.
    pub(crate) fn insert(&mut self, span: Span) {
        for region in WriteIntent::regions(span) {
            let word = (region / 64) as usize;
            self.make_room(word + 1);
            self.words[word] |= 1 << (region % 64);
        }
    }

    /// Inserts all regions of `other`.
    pub(crate) fn insert_all(&mut self, other: &RegionSet) {
        self.make_room(other.words.len());
        self.words.iter_mut().zip(&other.words).for_each(|(word, more)| *word |= more);
    }

    fn make_room(&mut self, words: usize) {
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Removes all regions, and returns them.
    pub(crate) fn take(&mut self) -> RegionSet {
        let words = vec![0; self.words.len()];
        RegionSet { words: std::mem::replace(&mut self.words, words) }
    }
}

#[cfg(test)]
mod tests {
    use cairn_store::Geometry;

    use super::{REGION_BYTES, Region, WriteIntent};
    use crate::mirror::layout::{Layout, Span};

    fn layout() -> Layout {
        Layout::new(Geometry::new(200 * REGION_BYTES, 256 * 1024).unwrap())
    }

    fn intent() -> WriteIntent {
        let layout = layout();
        assert_eq!(WriteIntent::bytes_for(&layout), 32);
        WriteIntent::new(&layout, &vec![0; WriteIntent::bytes_for(&layout)])
    }

    #[test]
    fn a_span_is_covered_when_all_its_regions_are() {
        let intent = intent();
        let span = Span { offset: 3 * REGION_BYTES - 512, len: 1024 };
        assert!(!intent.covers(span));
        intent.set(&intent.regions_of(Span { offset: 2 * REGION_BYTES, len: 512 }));
        assert!(!intent.covers(span));
        intent.set(&intent.regions_of(span));
        assert!(intent.covers(span));
        assert!(!intent.covers(Span { offset: 4 * REGION_BYTES, len: 512 }));
        let far = intent.regions_of(Span { offset: 100 * REGION_BYTES, len: 512 });
        let other = WriteIntent::new(&layout(), &intent.bytes_with(&far));
        assert!(other.has_all(&far) && !intent.has_all(&far));
        assert!(other.covers(span) && other.covers(Span { offset: 100 * REGION_BYTES, len: 512 }));
        let cleared = other.clear_unchanged(|region| region.offset == 2 * REGION_BYTES);
        assert_eq!(cleared, [Region(3), Region(100)]);
        assert!(!other.covers(span) && other.covers(Span { offset: 2 * REGION_BYTES, len: 512 }));
        assert!(other.clear_unchanged(|_| true).is_empty());
        other.restore(&cleared);
        assert!(other.covers(span) && other.covers(Region(100).span()));
    }
}
