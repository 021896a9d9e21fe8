//! The shape of a disk: its size, its chunks, and the height of the tree over them.

use crate::error::{Error, Result};

/// The default chunk size, in bytes.
pub const DEFAULT_CHUNK_SIZE: u32 = 256 * 1024;
/// The smallest chunk size, in bytes.
pub const MIN_CHUNK_SIZE: u32 = 64 * 1024;
/// The largest chunk size, in bytes.
pub const MAX_CHUNK_SIZE: u32 = 4 * 1024 * 1024;
/// The size of the largest disk, in bytes.
pub const MAX_SIZE: u64 = 64 << 40;
/// Bytes of a sector. The size of a disk is a multiple of this.
pub const SECTOR_SIZE: u64 = 512;

/// The most children of a tree node.
pub(crate) const FAN_OUT: u64 = 256;

/// The position of a chunk in a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkIndex(pub u64);

/// The size of a disk and of its chunks. The chunk size is fixed when the image is created.
///
/// Every chunk is stored with its full length: the part of the last chunk beyond the disk's end is
/// zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    size: u64,
    chunk_size: u32,
}

impl Geometry {
    /// Checks the sizes: `size` is a positive multiple of 512 up to [`MAX_SIZE`], `chunk_size` is a
    /// power of two from [`MIN_CHUNK_SIZE`] to [`MAX_CHUNK_SIZE`].
    pub fn new(size: u64, chunk_size: u32) -> Result<Self> {
        if size == 0 || size > MAX_SIZE || !size.is_multiple_of(SECTOR_SIZE) {
            let rule = "it is a multiple of 512 bytes, more than 0 and at most 64 TiB";
            return Err(Error::BadGeometry { what: "size", value: size, rule });
        }
        if !chunk_size.is_power_of_two() || !(MIN_CHUNK_SIZE..=MAX_CHUNK_SIZE).contains(&chunk_size)
        {
            let rule = "it is a power of two from 64 KiB to 4 MiB";
            let value = chunk_size.into();
            return Err(Error::BadGeometry { what: "chunk size", value, rule });
        }
        Ok(Self { size, chunk_size })
    }

    /// The disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The size of a chunk in bytes.
    pub fn chunk_size(&self) -> u32 {
        self.chunk_size
    }

    /// The number of chunks of the disk. The last one may reach beyond the disk's end.
    pub fn chunk_count(&self) -> u64 {
        self.size.div_ceil(self.chunk_size.into())
    }

    /// The chunk that contains the byte at `offset`.
    pub fn chunk_of(&self, offset: u64) -> ChunkIndex {
        ChunkIndex(offset / u64::from(self.chunk_size))
    }

    /// The offset of the chunk's first byte.
    pub fn offset_of(&self, index: ChunkIndex) -> u64 {
        index.0 * u64::from(self.chunk_size)
    }

    /// The number of the chunk's bytes that are inside the disk.
    pub fn len_of(&self, index: ChunkIndex) -> usize {
        let rest = self.size.saturating_sub(self.offset_of(index));
        rest.min(self.chunk_size.into()) as usize
    }

    /// The number of levels of the tree: the smallest `h >= 1` with `256^h >= chunk_count`.
    pub(crate) fn height(&self) -> u8 {
        let mut height = 1;
        let mut reach = FAN_OUT;
        while reach < self.chunk_count() {
            reach *= FAN_OUT;
            height += 1;
        }
        height
    }

    pub(crate) fn check_index(&self, index: ChunkIndex) -> Result<()> {
        if index.0 < self.chunk_count() {
            return Ok(());
        }
        let count = self.chunk_count();
        Err(Error::BadArgument(format!("chunk {} is beyond the disk's {count} chunks", index.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::{ChunkIndex, DEFAULT_CHUNK_SIZE, Geometry, MAX_SIZE, MIN_CHUNK_SIZE};
    use crate::error::ErrorKind;

    #[test]
    fn invalid_sizes_are_refused() {
        for (size, chunk_size) in [
            (0, DEFAULT_CHUNK_SIZE),
            (513, DEFAULT_CHUNK_SIZE),
            (MAX_SIZE + 512, DEFAULT_CHUNK_SIZE),
            (512, 0),
            (512, MIN_CHUNK_SIZE / 2),
            (512, MIN_CHUNK_SIZE + 512),
            (512, 8 << 20),
        ] {
            let error = Geometry::new(size, chunk_size).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{size} {chunk_size}");
        }
        Geometry::new(MAX_SIZE, MIN_CHUNK_SIZE).unwrap();
    }

    #[test]
    fn the_last_chunk_may_reach_beyond_the_end() {
        let geometry =
            Geometry::new(u64::from(DEFAULT_CHUNK_SIZE) + 512, DEFAULT_CHUNK_SIZE).unwrap();
        assert_eq!(geometry.chunk_count(), 2);
        assert_eq!(geometry.len_of(ChunkIndex(0)), DEFAULT_CHUNK_SIZE as usize);
        assert_eq!(geometry.len_of(ChunkIndex(1)), 512);
        assert!(geometry.check_index(ChunkIndex(2)).is_err());
    }

    #[test]
    fn the_tree_has_the_fewest_levels_that_cover_all_chunks() {
        let chunk = u64::from(MIN_CHUNK_SIZE);
        for (chunks, height) in [(1, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 3)] {
            let geometry = Geometry::new(chunks * chunk, MIN_CHUNK_SIZE).unwrap();
            assert_eq!(geometry.height(), height, "{chunks}");
        }
        assert_eq!(Geometry::new(MAX_SIZE, MIN_CHUNK_SIZE).unwrap().height(), 4);
    }
}
