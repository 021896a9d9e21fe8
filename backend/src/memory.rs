//! The guest's memory, as the hypervisor shares it, and the translation of its addresses.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use vm_memory::bitmap::{Bitmap, BitmapSlice, NewBitmap, WithBitmapSlice};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion,
};

use crate::mapping::check_part;
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
#[derive(Clone)]
pub(crate) struct Region {
    range: UserRange,
    mapping: Arc<MmapRegion<()>>,
}

impl Region {
    /// The region as a part of a map. What is written through the map is marked in the log.
    fn view(&self, log: Option<Arc<DirtyLog>>) -> io::Result<GuestRegionMmap<RegionLog>> {
        let mapping = &self.mapping;
        let bitmap = RegionLog { start: self.range.guest, log, _mapping: Some(mapping.clone()) };
        let builder = MmapRegionBuilder::new_with_bitmap(mapping.size(), bitmap)
            .with_mmap_prot(mapping.prot())
            .with_mmap_flags(mapping.flags());
        // SAFETY: the pointer and the size are those of the mapping. The view's bitmap holds the
        // mapping, so the mapping lives as long as the view.
        let builder = unsafe { builder.with_raw_mmap_pointer(mapping.as_ptr()) };
        let view = builder.build().map_err(io::Error::other)?;
        GuestRegionMmap::new(view, GuestAddress(self.range.guest))
            .ok_or_else(|| io::Error::other("a memory region wraps around"))
    }
}

/// The size of a page of a [`DirtyLog`].
const LOG_PAGE_BYTES: u64 = 4096;

/// The most memory that a guest can have. Address space is scarce: processors have 128 TiB of it, two
/// hypervisors can be connected, and while the memory changes, each has its old and its new one.
const MAX_MEMORY_BYTES: u64 = 8 << 40;

/// The longest dirty log. Guest addresses have gaps, so it covers twice the most memory.
const MAX_LOG_BYTES: u64 = 2 * MAX_MEMORY_BYTES / LOG_PAGE_BYTES / 8;

/// The hypervisor's log of guest pages that changed while the guest migrates, one bit per page.
#[derive(Debug)]
pub(crate) struct DirtyLog {
    mapping: MmapRegion<()>,
}

impl DirtyLog {
    /// Maps the log.
    pub(crate) fn new(file: &File, offset: u64, len: u64) -> io::Result<DirtyLog> {
        if len > MAX_LOG_BYTES {
            return Err(io::Error::other("the dirty log is longer than any guest needs"));
        }
        Ok(DirtyLog { mapping: map_file(file, offset, len)? })
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
            self.bits(byte).fetch_or(1 << (page % 8), Ordering::SeqCst);
        }
    }

    /// Whether the page of this address is marked.
    fn is_marked(&self, address: u64) -> bool {
        let page = address / LOG_PAGE_BYTES;
        let byte = usize::try_from(page / 8).ok().filter(|at| *at < self.mapping.size());
        byte.is_some_and(|at| self.bits(at).load(Ordering::SeqCst) & 1 << (page % 8) != 0)
    }

    fn bits(&self, byte: usize) -> &AtomicU8 {
        assert!(byte < self.mapping.size());
        // SAFETY: the byte is inside the mapping, which lives as long as `self`. Both sides access
        // the bytes of this log atomically.
        unsafe { AtomicU8::from_ptr(self.mapping.as_ptr().add(byte)) }
    }
}

/// The guest's memory. Everything that is written through it is marked in the dirty log, if there is
/// one. Only memory that the kernel fills must be marked by hand: see [`GuestMap::mark_filled`].
pub(crate) type LoggedMemory = GuestMemoryMmap<RegionLog>;

/// The dirty log of one region of memory, as `vm-memory` uses it: it marks what it has written.
#[derive(Debug, Default)]
pub(crate) struct RegionLog {
    /// The region's first guest address.
    start: u64,
    log: Option<Arc<DirtyLog>>,
    /// Holds the memory of a [`Region::view`].
    _mapping: Option<Arc<MmapRegion<()>>>,
}

/// A part of a [`RegionLog`]. It borrows the log: a reference count that all workers change would
/// make each access to guest memory slower.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionLogSlice<'a> {
    start: u64,
    log: Option<&'a DirtyLog>,
}

impl<'a> WithBitmapSlice<'a> for RegionLog {
    type S = RegionLogSlice<'a>;
}

impl Bitmap for RegionLog {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.slice_at(0).mark_dirty(offset, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.slice_at(0).dirty_at(offset)
    }

    fn slice_at(&self, offset: usize) -> RegionLogSlice<'_> {
        RegionLogSlice { start: self.start, log: self.log.as_deref() }.slice_at(offset)
    }
}

/// A region that is made like this has no log.
impl NewBitmap for RegionLog {
    fn with_len(_len: usize) -> RegionLog {
        RegionLog::default()
    }
}

impl WithBitmapSlice<'_> for RegionLogSlice<'_> {
    type S = Self;
}

impl BitmapSlice for RegionLogSlice<'_> {}

impl Bitmap for RegionLogSlice<'_> {
    fn mark_dirty(&self, offset: usize, len: usize) {
        if let Some(log) = self.log
            && len > 0
        {
            log.mark(self.start.saturating_add(offset as u64), len as u64);
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.log.is_some_and(|log| log.is_marked(self.start.saturating_add(offset as u64)))
    }

    fn slice_at(&self, offset: usize) -> Self {
        RegionLogSlice { start: self.start.saturating_add(offset as u64), log: self.log }
    }
}

/// An immutable map of the guest's memory. Each submitted operation holds the map that it was made
/// with, so memory is unmapped only when no operation uses it.
#[derive(Clone, Default)]
pub(crate) struct GuestMap {
    memory: LoggedMemory,
    regions: Vec<Region>,
    log: Option<Arc<DirtyLog>>,
}

/// The guest named memory that it does not have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OutsideMemory;

impl GuestMap {
    /// A map of these regions, with a dirty log or without one.
    pub(crate) fn new(regions: Vec<Region>, log: Option<Arc<DirtyLog>>) -> io::Result<GuestMap> {
        let memory = regions.iter().try_fold(LoggedMemory::default(), |memory, region| {
            let view = Arc::new(region.view(log.clone())?);
            memory.insert_region(view).map_err(io::Error::other)
        })?;
        Ok(GuestMap { memory, regions, log })
    }

    /// The regions of this map and one more.
    pub(crate) fn regions_with(&self, region: Region) -> Vec<Region> {
        self.regions.iter().cloned().chain([region]).collect()
    }

    /// The regions of this map without one. Fails if there is no such region.
    pub(crate) fn regions_without(&self, guest: u64, len: u64) -> io::Result<Vec<Region>> {
        let mut regions = self.regions.clone();
        let is_it = |one: &Region| one.range.guest == guest && one.range.len == len;
        let at = regions.iter().position(is_it);
        regions.remove(at.ok_or_else(|| io::Error::other("there is no such memory region"))?);
        Ok(regions)
    }

    /// The regions of this map.
    pub(crate) fn regions(&self) -> Vec<Region> {
        self.regions.clone()
    }

    /// Whether there is a dirty log.
    pub(crate) fn is_logged(&self) -> bool {
        self.log.is_some()
    }

    /// Marks memory that the kernel has filled, if there is a dirty log.
    pub(crate) fn mark_filled(&self, segments: &[Segment]) {
        if let Some(log) = &self.log {
            segments.iter().for_each(|one| log.mark(one.address, one.len.into()));
        }
    }

    /// The memory by guest addresses.
    pub(crate) fn memory(&self) -> &LoggedMemory {
        &self.memory
    }

    /// Translates an address of the hypervisor's address space to a guest address.
    pub(crate) fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        let mut ranges = self.regions.iter().map(|region| region.range);
        let range = ranges.find(|range| range.user <= user && user - range.user < range.len)?;
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

/// Checks the lengths of all regions of a guest, before they are mapped.
pub(crate) fn check_total(lens: impl IntoIterator<Item = u64>) -> io::Result<()> {
    let total = lens.into_iter().try_fold(0, u64::checked_add);
    match total.is_some_and(|total| total <= MAX_MEMORY_BYTES) {
        true => Ok(()),
        false => Err(io::Error::other("the guest has more memory than 8 TiB")),
    }
}

/// Maps the region that a message describes.
pub(crate) fn map_region(range: UserRange, file: &File, offset: u64) -> io::Result<Region> {
    if range.user.checked_add(range.len).is_none() {
        return Err(io::Error::other("a memory region wraps around"));
    }
    let mapping = map_file(file, offset, range.len)?;
    Ok(Region { range, mapping: Arc::new(mapping) })
}

/// Maps memory that the hypervisor shares. The mapping has a duplicate of the descriptor.
fn map_file(file: &File, offset: u64, len: u64) -> io::Result<MmapRegion<()>> {
    check_part(file, offset, len)?;
    let len = usize::try_from(len).map_err(io::Error::other)?;
    let file = FileOffset::new(file.try_clone()?, offset);
    let mapping = MmapRegionBuilder::new(len)
        .with_file_offset(file)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        // The hypervisor reserves huge pages, or has a reason not to: it may plug them in later.
        .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE);
    mapping.build().map_err(io::Error::other)
}

#[cfg(test)]
mod tests;
