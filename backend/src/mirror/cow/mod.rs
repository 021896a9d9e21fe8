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

impl CowSpace {
    /// Takes a buffer for a copy of `len` bytes and, if memory is full, a range of the spill file.
    pub(super) fn take(&self, len: u64) -> Option<(PooledBuffer, Option<AllocatedRange>)> {
        if let Some(buffer) = self.memory.take(len) {
            return Some((buffer, None));
        }
        let buffer = self.spill_buffers.take(len as usize)?;
        Some((buffer, Some(self.spill.take(len)?)))
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
