//! The guest's memory, as the hypervisor shares it, and the translation of its addresses.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion,
};

use crate::request::Segment;

/// A region's range in the hypervisor's own address space. Ring addresses arrive as addresses of
/// that space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UserRange {
    pub(crate) user: u64,
    pub(crate) guest: u64,
    pub(crate) len: u64,
}

/// A memory region, as a message describes it.
pub(crate) struct Region {
    pub(crate) range: UserRange,
    pub(crate) mapping: MmapRegion<()>,
}

/// The size of a page of a [`DirtyLog`].
const LOG_PAGE_BYTES: u64 = 4096;

/// The hypervisor's log of guest pages that changed while the guest migrates, one bit per page.
pub(crate) struct DirtyLog {
    mapping: MmapRegion<()>,
}

impl DirtyLog {
    /// Maps the log.
    pub(crate) fn new(file: File, offset: u64, len: u64) -> io::Result<DirtyLog> {
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let file = vm_memory::FileOffset::new(file, offset);
        Ok(DirtyLog { mapping: MmapRegion::from_file(file, len).map_err(io::Error::other)? })
    }

    /// Marks a part of memory that was written. Call this after the write: the hypervisor may read
    /// the log and then the page at any time. Pages without a bit in the log do not belong to the
    /// guest.
    fn mark(&self, address: u64, len: u64) {
        let last = address.saturating_add(len.max(1) - 1) / LOG_PAGE_BYTES;
        for page in address / LOG_PAGE_BYTES..=last {
            let Some(byte) = usize::try_from(page / 8).ok().filter(|at| *at < self.mapping.size())
            else {
                return;
            };
            // SAFETY: the byte is inside the mapping, which lives as long as `self`. Both sides
            // access the bytes of this log atomically.
            let bits = unsafe { AtomicU8::from_ptr(self.mapping.as_ptr().add(byte)) };
            bits.fetch_or(1 << (page % 8), Ordering::SeqCst);
        }
    }
}

/// An immutable map of the guest's memory. Each submitted operation holds the map that it was made
/// with, so memory is unmapped only when no operation uses it.
#[derive(Clone, Default)]
pub(crate) struct GuestMap {
    memory: GuestMemoryMmap,
    ranges: Vec<UserRange>,
    log: Option<Arc<DirtyLog>>,
}

/// The guest named memory that it does not have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OutsideMemory;

impl GuestMap {
    /// A map of these regions.
    pub(crate) fn new(regions: Vec<Region>) -> io::Result<GuestMap> {
        regions.into_iter().try_fold(GuestMap::default(), |map, region| map.with(region))
    }

    /// This map with one more region.
    pub(crate) fn with(&self, region: Region) -> io::Result<GuestMap> {
        let Region { range, mapping } = region;
        range
            .user
            .checked_add(range.len)
            .ok_or_else(|| io::Error::other("a memory region wraps around"))?;
        let mapped = GuestRegionMmap::new(mapping, GuestAddress(range.guest))
            .ok_or_else(|| io::Error::other("a memory region wraps around"))?;
        let memory = self.memory.insert_region(Arc::new(mapped)).map_err(io::Error::other)?;
        let mut ranges = self.ranges.clone();
        ranges.push(range);
        Ok(GuestMap { memory, ranges, log: self.log.clone() })
    }

    /// This map without one region.
    pub(crate) fn without(&self, guest: u64, len: u64) -> io::Result<GuestMap> {
        let (memory, _) =
            self.memory.remove_region(GuestAddress(guest), len).map_err(io::Error::other)?;
        let ranges = self.ranges.iter().copied().filter(|range| range.guest != guest).collect();
        Ok(GuestMap { memory, ranges, log: self.log.clone() })
    }

    /// This map with another dirty log, or without one.
    pub(crate) fn with_log(&self, log: Option<Arc<DirtyLog>>) -> GuestMap {
        GuestMap { log, ..self.clone() }
    }

    /// Whether there is a dirty log.
    pub(crate) fn is_logged(&self) -> bool {
        self.log.is_some()
    }

    /// Marks a part of memory that was written, if there is a dirty log.
    pub(crate) fn mark(&self, address: GuestAddress, len: u64) {
        if let Some(log) = &self.log {
            log.mark(address.0, len);
        }
    }

    /// Does [`GuestMap::mark`] for the memory of a request.
    pub(crate) fn mark_all(&self, segments: &[Segment]) {
        if self.is_logged() {
            segments.iter().for_each(|one| self.mark(GuestAddress(one.address), one.len.into()));
        }
    }

    /// The memory by guest addresses.
    pub(crate) fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Translates an address of the hypervisor's address space to a guest address.
    pub(crate) fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        let range =
            self.ranges.iter().find(|range| range.user <= user && user - range.user < range.len)?;
        Some(GuestAddress(user - range.user + range.guest))
    }

    /// The addresses of `segments` in this process, in order.
    ///
    /// The kernel reads and writes this memory while the guest may do so too. So no Rust reference
    /// to the bytes is ever made.
    pub(crate) fn iovecs(&self, segments: &[Segment]) -> Result<Vec<libc::iovec>, OutsideMemory> {
        let mut iovecs = Vec::with_capacity(segments.len());
        for segment in segments {
            let address = GuestAddress(segment.address);
            for slice in self.memory.get_slices(address, segment.len as usize) {
                let slice = slice.map_err(|_| OutsideMemory)?;
                iovecs.push(libc::iovec {
                    iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                    iov_len: slice.len(),
                });
            }
        }
        Ok(iovecs)
    }

    /// The size of the guest's memory in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.memory.iter().map(|region| region.len()).sum()
    }
}

/// Maps the region that a message describes.
pub(crate) fn map_region(range: UserRange, file: File, offset: u64) -> io::Result<Region> {
    let file = vm_memory::FileOffset::new(file, offset);
    let mapping = MmapRegion::from_file(file, range.len as usize).map_err(io::Error::other)?;
    Ok(Region { range, mapping })
}
