//! How the bytes of a disk are divided into blocks and chunks. Pure arithmetic.

use cairn_store::{ChunkIndex, Geometry, MAX_SIZE};

/// The size of a sector, the unit of a virtio-blk request.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// The size of a block, the unit of presence.
pub(crate) const BLOCK_BYTES: u64 = 4096;

/// A byte range inside the disk. Both ends are multiples of [`SECTOR_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// The first byte.
    pub(crate) offset: u64,
    /// The number of bytes.
    pub(crate) len: u64,
}

impl Span {
    /// The end, which is the first byte after the range.
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// A range of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// The first block.
    pub(crate) first: u64,
    /// The number of blocks.
    pub(crate) count: u64,
}

impl Blocks {
    /// The end, which is the first block after the range.
    pub(crate) fn end(&self) -> u64 {
        self.first + self.count
    }

    /// Whether the two ranges share a block.
    pub(crate) fn overlaps(&self, other: &Blocks) -> bool {
        self.first < other.end() && other.first < self.end()
    }

    /// The bytes of these blocks.
    pub(crate) fn span(&self) -> Span {
        Span { offset: self.first * BLOCK_BYTES, len: self.count * BLOCK_BYTES }
    }
}

/// The smallest capacity of a mirror, unless its disk may not become so large.
const MIN_CAPACITY: u64 = 1 << 40;

/// How often a disk can double before its mirror has to be made anew.
const CAPACITY_DOUBLINGS: u32 = 3;

/// The size up to which the disk of a new mirror can grow. Files are laid out for the capacity, and
/// have space for the size only.
pub(crate) fn default_capacity(size: u64) -> u64 {
    (size << CAPACITY_DOUBLINGS).clamp(MIN_CAPACITY, MAX_SIZE)
}

/// The shape of one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    size: u64,
    chunk_size: u64,
    chunk_count: u64,
    /// The number of chunks that the disk can have after it has grown.
    capacity_chunks: u64,
}

impl Layout {
    /// The layout of a disk that cannot grow.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn new(geometry: Geometry) -> Layout {
        Layout::with_capacity(geometry, geometry.size())
    }

    /// The layout of a disk that can grow to `capacity` bytes.
    pub(crate) fn with_capacity(geometry: Geometry, capacity: u64) -> Layout {
        let chunk_size = u64::from(geometry.chunk_size());
        Layout {
            size: geometry.size(),
            chunk_size,
            chunk_count: geometry.chunk_count(),
            capacity_chunks: capacity.div_ceil(chunk_size).max(geometry.chunk_count()),
        }
    }

    /// The layout after the disk has got another size.
    pub(crate) fn with_size(self, size: u64) -> Layout {
        Layout { size, chunk_count: size.div_ceil(self.chunk_size), ..self }
    }

    /// The largest size to which the disk can grow.
    pub(crate) fn capacity(&self) -> u64 {
        (self.capacity_chunks * self.chunk_size).min(MAX_SIZE)
    }

    /// The number of chunks of a disk as large as the capacity.
    pub(crate) fn capacity_chunks(&self) -> u64 {
        self.capacity_chunks
    }

    /// The number of blocks of a disk as large as the capacity.
    pub(crate) fn capacity_blocks(&self) -> u64 {
        self.capacity_chunks * self.blocks_per_chunk()
    }

    /// The size of the guest's disk in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The size of a chunk in bytes.
    pub(crate) fn chunk_size(&self) -> usize {
        self.chunk_size as usize
    }

    /// The number of chunks, including a partial last one.
    pub(crate) fn chunk_count(&self) -> u64 {
        self.chunk_count
    }

    /// The number of blocks in a chunk.
    pub(crate) fn blocks_per_chunk(&self) -> u64 {
        self.chunk_size / BLOCK_BYTES
    }

    /// The number of blocks in all chunks.
    pub(crate) fn block_count(&self) -> u64 {
        self.chunk_count * self.blocks_per_chunk()
    }

    /// The length of the data file: whole chunks, so that all chunks are read and written alike.
    pub(crate) fn file_len(&self) -> u64 {
        self.chunk_count * self.chunk_size
    }

    /// The span of `len` bytes that starts at `sector`, or `None` if a part of it is not on the
    /// disk.
    pub(crate) fn span(&self, sector: u64, len: u64) -> Option<Span> {
        let offset = sector.checked_mul(SECTOR_BYTES)?;
        let end = offset.checked_add(len)?;
        (end <= self.size && len.is_multiple_of(SECTOR_BYTES)).then_some(Span { offset, len })
    }

    /// The chunks that `span` touches, in ascending order.
    pub(crate) fn chunks(&self, span: Span) -> impl Iterator<Item = ChunkIndex> + use<> {
        let first = span.offset / self.chunk_size;
        let end = span.end().div_ceil(self.chunk_size);
        (first..end).map(ChunkIndex)
    }

    /// The blocks of one chunk.
    pub(crate) fn blocks_of(&self, chunk: ChunkIndex) -> Blocks {
        let count = self.blocks_per_chunk();
        Blocks { first: chunk.0 * count, count }
    }

    /// The bytes of one chunk in the data file.
    pub(crate) fn span_of(&self, chunk: ChunkIndex) -> Span {
        Span { offset: chunk.0 * self.chunk_size, len: self.chunk_size }
    }

    /// The blocks that `span` touches.
    pub(crate) fn blocks(&self, span: Span) -> Blocks {
        let first = span.offset / BLOCK_BYTES;
        Blocks { first, count: span.end().div_ceil(BLOCK_BYTES) - first }
    }

    /// The blocks of `chunk` that `span` touches.
    pub(crate) fn blocks_within(&self, span: Span, chunk: ChunkIndex) -> Blocks {
        let all = self.blocks(span);
        let own = self.blocks_of(chunk);
        let first = all.first.max(own.first);
        Blocks { first, count: all.end().min(own.end()) - first }
    }

    /// The blocks that `span` covers completely. A block that is cut off by the end of the disk
    /// counts as covered if the span reaches the end.
    pub(crate) fn covered(&self, span: Span) -> Blocks {
        let first = span.offset.div_ceil(BLOCK_BYTES);
        let end = if span.end() == self.size {
            span.end().div_ceil(BLOCK_BYTES)
        } else {
            span.end() / BLOCK_BYTES
        };
        Blocks { first, count: end.saturating_sub(first) }
    }

    /// The blocks, at most two, that `span` covers only partly.
    pub(crate) fn edges(&self, span: Span) -> impl Iterator<Item = u64> + use<> {
        let touched = self.blocks(span);
        let covered = self.covered(span);
        let head = (touched.first < covered.first || covered.count == 0).then_some(touched.first);
        let last = touched.end() - 1;
        let tail = (covered.count == 0 || covered.end() <= last)
            .then_some(last)
            .filter(|tail| Some(*tail) != head);
        head.into_iter().chain(tail)
    }

    /// The chunk that holds `block`.
    pub(crate) fn chunk_of(&self, block: u64) -> ChunkIndex {
        ChunkIndex(block / self.blocks_per_chunk())
    }
}

#[cfg(test)]
mod tests {
    use cairn_store::{ChunkIndex, Geometry};

    use super::{Blocks, Layout, Span};

    fn layout(size: u64) -> Layout {
        Layout::new(Geometry::new(size, 64 * 1024).unwrap())
    }

    #[test]
    fn a_request_past_the_end_or_past_all_numbers_has_no_span() {
        let disk = layout(1 << 20);
        assert!(disk.span(2047, 512).is_some());
        assert!(disk.span(2048, 512).is_none());
        assert!(disk.span(2047, 1024).is_none());
        assert!(disk.span(u64::MAX, 512).is_none());
        assert!(disk.span(u64::MAX / 512, u64::MAX).is_none());
        assert!(disk.span(0, 100).is_none());
    }

    #[test]
    fn edges_are_the_blocks_that_are_covered_partly() {
        let disk = layout(1 << 20);
        let edges = |offset, len| disk.edges(Span { offset, len }).collect::<Vec<_>>();
        assert_eq!(edges(0, 4096), Vec::<u64>::new());
        assert_eq!(edges(512, 512), vec![0]);
        assert_eq!(edges(0, 512), vec![0]);
        assert_eq!(edges(512, 4096), vec![0, 1]);
        assert_eq!(edges(512, 8192 - 512), vec![0]);
        assert_eq!(edges(4096, 4608), vec![2]);
        assert_eq!(edges(512, 12288), vec![0, 3]);
    }

    #[test]
    fn the_block_cut_off_by_the_disks_end_counts_as_covered() {
        let disk = layout(65536 + 512);
        let tail = Span { offset: 65536, len: 512 };
        assert_eq!(disk.covered(tail), Blocks { first: 16, count: 1 });
        assert_eq!(disk.edges(tail).count(), 0);
        assert_eq!(disk.chunk_count(), 2);
    }

    #[test]
    fn a_span_that_crosses_chunks_names_each_of_them() {
        let disk = layout(1 << 20);
        let span = Span { offset: 65536 - 4096, len: 65536 + 8192 };
        let chunks: Vec<_> = disk.chunks(span).collect();
        assert_eq!(chunks, [ChunkIndex(0), ChunkIndex(1), ChunkIndex(2)]);
        assert_eq!(disk.blocks_within(span, ChunkIndex(0)), Blocks { first: 15, count: 1 });
        assert_eq!(disk.blocks_within(span, ChunkIndex(1)), Blocks { first: 16, count: 16 });
        assert_eq!(disk.blocks_within(span, ChunkIndex(2)), Blocks { first: 32, count: 1 });
    }
}
