//! Copy-on-write: space for the old content of blocks that the guest overwrites while a checkpoint
//! is stored.
//!
//! All space is bounded. Copies go into memory first, and into a file on the local disk (the *spill
//! file*) when that memory is full.

pub(crate) mod buffer_pool;
pub(crate) mod memory;
pub(crate) mod range_allocator;

use std::io;
use std::sync::Arc;

use self::buffer_pool::{BufferPool, PooledBuffer};
use self::memory::CowMemory;
use self::range_allocator::{AllocatedRange, RangeAllocator};
use super::block_set::BlockSet;
use super::files::journal::CopyLocation;
use super::layout::{BLOCK_BYTES, Blocks};

/// The space for copies.
pub(crate) struct CowSpace {
    /// Memory that keeps copies.
    pub(crate) memory: CowMemory,
    /// Buffers for copies on their way to the spill file.
    pub(crate) spill_buffers: Arc<BufferPool>,
    /// The free ranges of the spill file.
    pub(crate) spill: Arc<RangeAllocator>,
}

/// Why there is no space for a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoSpace {
    /// Memory and spill file are full. There is more when a chunk is stored.
    Full,
    /// All buffers are in use by copies on their way to the spill file. There is more when one of
    /// these copies has ended.
    Busy,
}

impl CowSpace {
    /// Takes a buffer for a copy of `len` bytes and, if memory is full, a range of the spill file.
    pub(super) fn take(&self, len: u64) -> Result<(PooledBuffer, Option<AllocatedRange>), NoSpace> {
        if let Some(buffer) = self.memory.take(len) {
            return Ok((buffer, None));
        }
        let range = self.spill.take(len).ok_or(NoSpace::Full)?;
        let buffer = self.spill_buffers.take(len as usize).ok_or(NoSpace::Busy)?;
        Ok((buffer, Some(range)))
    }

    /// Gives memory and space of the spill file back that no copy uses. `shorten_spill` shortens
    /// the spill file, if it is longer.
    pub(super) fn trim(&self, shorten_spill: impl FnOnce(u64) -> io::Result<()>) -> io::Result<()> {
        let memory = self.memory.trim();
        let spill = match self.spill.take_tail() {
            // Nobody writes behind its offset while it is taken.
            Some(tail) => shorten_spill(tail.offset),
            None => Ok(()),
        };
        memory.and(spill)
    }
}

/// The content of a copy.
pub(crate) enum CopyData {
    Memory(PooledBuffer),
    File(AllocatedRange),
}

impl CopyData {
    /// The location at which the next process finds the copy.
    pub(crate) fn location(&self) -> CopyLocation {
        match self {
            CopyData::Memory(buffer) => {
                let offset = buffer.cow_memory_offset();
                CopyLocation::Memory(offset.expect("copies are kept in copy-on-write memory"))
            }
            CopyData::File(range) => CopyLocation::File(range.offset),
        }
    }
}

/// The old content of a run of blocks. The run is counted from the start of the chunk.
pub(crate) struct PreservedRun {
    pub(crate) run: Blocks,
    pub(crate) data: CopyData,
}

/// The blocks of one chunk that writes have preserved for one epoch.
#[derive(Clone, Default)]
pub(crate) struct PreservedBlocks {
    /// Blocks whose content at the checkpoint does not depend on the mirror any more: the blocks of
    /// `runs`, and the blocks that were absent.
    pub(crate) decided: BlockSet,
    pub(crate) runs: Vec<Arc<PreservedRun>>,
}

impl PreservedBlocks {
    /// Copies the preserved content over `data`, which was read from the mirror when the blocks of
    /// `present` were valid. Returns the blocks that are valid afterwards. All other blocks have
    /// the parent's content. `read` reads from the spill file at an offset.
    pub(crate) fn overlay(
        &self,
        data: &mut [u8],
        present: BlockSet,
        read: impl Fn(&mut [u8], u64) -> io::Result<()>,
    ) -> io::Result<BlockSet> {
        let mut valid = present.without(&self.decided);
        for PreservedRun { run, data: old } in self.runs.iter().map(Arc::as_ref) {
            let from = (run.first * BLOCK_BYTES) as usize;
            let to = &mut data[from..from + run.span().len as usize];
            match old {
                CopyData::Memory(old) => to.copy_from_slice(old),
                CopyData::File(range) => read(to, range.offset)?,
            }
            valid = valid.union(&BlockSet::run(*run));
        }
        Ok(valid)
    }
}

#[cfg(test)]
mod tests {
    use super::{BufferPool, CowMemory, CowSpace, NoSpace, RangeAllocator};

    fn space(spill_bytes: u64) -> CowSpace {
        let space = CowSpace {
            memory: CowMemory::new(tempfile::tempfile().unwrap(), 4096).unwrap(),
            spill_buffers: BufferPool::new(4096),
            spill: RangeAllocator::new(spill_bytes, 0),
        };
        std::mem::forget(space.memory.take(4096).expect("the memory is full from here on"));
        space
    }

    #[test]
    fn a_buffer_that_is_busy_is_no_lack_of_space() {
        let space = space(1 << 20);
        let take = || space.take(4096).map(|(_, range)| range.map(|range| range.offset));
        let first = space.take(4096).unwrap();
        assert_eq!(take(), Err(NoSpace::Busy));
        drop(first);
        assert_eq!(take(), Ok(Some(0)));
    }

    #[test]
    fn a_spill_file_that_is_full_is_a_lack_of_space_even_if_no_buffer_is_free() {
        let space = space(4096);
        let (buffer, range) = space.take(4096).unwrap();
        assert!(matches!(space.take(4096), Err(NoSpace::Full)));
        drop(buffer);
        assert!(matches!(space.take(4096), Err(NoSpace::Full)));
        drop(range);
        assert!(space.take(4096).is_ok());
    }

    #[test]
    fn the_spill_file_is_shortened_to_what_is_in_use() {
        let space = space(1 << 20);
        let (buffer, first) = space.take(4096).unwrap();
        drop(buffer);
        let (_buffer, second) = space.take(4096).unwrap();
        let shortened = || {
            let mut to = None;
            let shorten = |len| {
                to = Some(len);
                Ok(())
            };
            space.trim(shorten).unwrap();
            to
        };
        drop(first);
        assert_eq!(shortened(), Some(8192), "the second one stays where it is");
        drop(second);
        assert_eq!(shortened(), Some(0));
    }
}
