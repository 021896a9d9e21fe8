//! The buffers of requests.

use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use seeded_rng::Rng;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

use crate::sys;

/// The size of the unit that a stamp makes unique, in bytes.
const STAMPED: usize = 4096;

/// Slots of equal length in memory that another process can map.
///
/// The content is random, so it does not compress and differs from other chunks. Every write gets
/// stamps, so no two writes have the same content.
pub(crate) struct Memory {
    map: MmapRegion,
    slot_len: usize,
    stamp: u64,
}

impl Memory {
    pub(crate) fn new(slots: usize, slot_len: usize) -> Result<Memory> {
        let slot_len = slot_len.next_multiple_of(4096);
        let len = slots * slot_len;
        let file = sys::memfd(len as u64).context("creating the guest's memory")?;
        let map = MmapRegion::from_file(FileOffset::new(file, 0), len)
            .context("mapping the guest's memory")?;
        let seed = std::process::id() as u64 ^ map.as_ptr() as u64;
        let mut rng = Rng::new(seed);
        let mut page = vec![0; STAMPED];
        for at in (0..len).step_by(STAMPED) {
            rng.fill(&mut page);
            map.get_slice(at, STAMPED).context("filling the guest's memory")?.copy_from(&page);
        }
        Ok(Memory { map, slot_len, stamp: rng.next_u64() })
    }

    pub(crate) fn region(&self) -> blkio::MemoryRegion {
        let fd = self.map.file_offset().map_or(-1, |at| at.file().as_raw_fd());
        let (addr, len) = (self.map.as_ptr() as usize, self.map.size());
        blkio::MemoryRegion { addr, iova: 0, len, fd, fd_offset: 0, flags: 0 }
    }

    /// The memory of a slot. The pointer is valid as long as `self`.
    pub(crate) fn slot(&self, slot: usize, len: usize) -> *mut u8 {
        assert!(len <= self.slot_len && (slot + 1) * self.slot_len <= self.map.size());
        self.map.as_ptr().wrapping_add(slot * self.slot_len)
    }

    /// Makes the content of a slot different from everything that was written before.
    pub(crate) fn stamp(&mut self, slot: usize, len: usize) {
        for at in (0..len).step_by(STAMPED) {
            self.stamp = self.stamp.wrapping_add(1);
            let start = slot * self.slot_len + at;
            let to = self.map.get_slice(start, 8).expect("a slot is within the memory");
            to.copy_from(&self.stamp.to_le_bytes());
        }
    }
}
