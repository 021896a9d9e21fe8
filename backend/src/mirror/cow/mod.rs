//! Copy-on-write: space for the old content of blocks that the guest overwrites while a checkpoint
//! is stored.
//!
//! All space is bounded. Copies go into memory first, and into a file of their layer on the local
//! disk (the *spill file*) when that memory is full.

pub(crate) mod buffer_pool;
pub(crate) mod memory;
pub(crate) mod range_allocator;
pub(crate) mod spill_space;

use std::io;
use std::sync::Arc;

use self::buffer_pool::{BufferPool, PooledBuffer};
use self::memory::CowMemory;
use self::spill_space::{SpillReservation, SpillSpace};
use super::block_set::BlockSet;
use super::layout::{BLOCK_BYTES, Blocks};

/// The space for copies.
pub(crate) struct CowSpace {
    /// Memory that keeps copies.
    pub(crate) memory: CowMemory,
    /// Buffers for copies on their way to a spill file.
    pub(crate) spill_buffers: Arc<BufferPool>,
    /// The space that all spill files together may use.
    pub(crate) spill: Arc<SpillSpace>,
}

/// Why there is no space for a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoSpace {
    /// Memory and spill files are full. There is more when a chunk is stored.
    Full,
    /// All buffers are in use by copies on their way to a spill file. There is more when one of
    /// these copies has ended.
    Busy,
}

impl CowSpace {
    /// Takes a buffer for a copy of `len` bytes and, if memory is full, space in a spill file.
    pub(super) fn take(
        &self,
        len: u64,
    ) -> Result<(PooledBuffer, Option<SpillReservation>), NoSpace> {
        if let Some(buffer) = self.memory.take(len) {
            return Ok((buffer, None));
        }
        let reservation = self.spill.reserve(len).ok_or(NoSpace::Full)?;
        let buffer = self.spill_buffers.take(len as usize).ok_or(NoSpace::Busy)?;
        Ok((buffer, Some(reservation)))
    }
}

/// The old content of a run of blocks, in memory. The run is counted from the start of the chunk.
pub(crate) struct PreservedRun {
    pub(crate) run: Blocks,
    pub(crate) data: PooledBuffer,
}

/// The blocks of one chunk that writes have preserved for one epoch.
#[derive(Clone, Default)]
pub(crate) struct PreservedBlocks {
    /// Blocks whose content at the checkpoint does not depend on the mirror any more: the blocks of
    /// `runs` and `spilled`, and the blocks that were absent.
    pub(crate) decided: BlockSet,
    /// Blocks in the layer's spill file.
    pub(crate) spilled: BlockSet,
    pub(crate) runs: Vec<Arc<PreservedRun>>,
}

impl PreservedBlocks {
    /// Copies the preserved content over `data`, which was read from the mirror when the blocks of
    /// `present` were valid. Returns the blocks that are valid afterwards. All other blocks have
    /// the parent's content. `read` reads a run of the chunk's blocks from the spill file.
    pub(crate) fn overlay(
        &self,
        data: &mut [u8],
        present: BlockSet,
        read: impl Fn(&mut [u8], Blocks) -> io::Result<()>,
    ) -> io::Result<BlockSet> {
        let mut part = |run: Blocks, put: &dyn Fn(&mut [u8]) -> io::Result<()>| {
            let from = (run.first * BLOCK_BYTES) as usize;
            put(&mut data[from..from + run.span().len as usize])
        };
        let mut valid = present.without(&self.decided).union(&self.spilled);
        for run in self.spilled.runs() {
            part(run, &|to| read(to, run))?;
        }
        for PreservedRun { run, data: old } in self.runs.iter().map(Arc::as_ref) {
            part(*run, &|to| {
                to.copy_from_slice(old);
                Ok(())
            })?;
            valid = valid.union(&BlockSet::run(*run));
        }
        Ok(valid)
    }
}

#[cfg(test)]
mod tests {
    use super::{BufferPool, CowMemory, CowSpace, NoSpace, SpillSpace};

    fn space(spill_bytes: u64) -> CowSpace {
        let space = CowSpace {
            memory: CowMemory::private(4096),
            spill_buffers: BufferPool::new(4096),
            spill: SpillSpace::new(spill_bytes),
        };
        std::mem::forget(space.memory.take(4096).expect("the memory is full from here on"));
        space
    }

    #[test]
    fn a_buffer_that_is_busy_is_no_lack_of_space() {
        let space = space(1 << 20);
        let first = space.take(4096).unwrap();
        assert!(matches!(space.take(4096), Err(NoSpace::Busy)));
        drop(first);
        assert!(matches!(space.take(4096), Ok((_, Some(_)))));
    }

    #[test]
    fn a_spill_file_that_is_full_is_a_lack_of_space_even_if_no_buffer_is_free() {
        let space = space(4096);
        let (buffer, reservation) = space.take(4096).unwrap();
        assert!(matches!(space.take(4096), Err(NoSpace::Full)));
        drop(buffer);
        assert!(matches!(space.take(4096), Err(NoSpace::Full)));
        drop(reservation);
        assert!(space.take(4096).is_ok());
    }
}
