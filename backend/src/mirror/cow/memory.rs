//! Memory for preserved blocks that outlives the process, because it belongs to a file.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use super::buffer_pool::PooledBuffer;
use super::range_allocator::{AllocatedRange, RangeAllocator};
use crate::mapping::SharedBytes;
use crate::mirror::files::disk_file::allocate_more;
use crate::mirror::layout::BLOCK_BYTES;

/// The copy-on-write memory of a disk.
pub(crate) struct CowMemory {
    file: File,
    bytes: Arc<SharedBytes>,
    ranges: Arc<RangeAllocator>,
    /// The number of bytes for which the file has space. Memory beyond that must not be touched.
    allocated: Mutex<u64>,
}

/// The file grows in steps of this many bytes, because most disks never need much. In tests it
/// grows by blocks, so that the growth happens often.
const GROWTH_BYTES: u64 = if cfg!(test) { BLOCK_BYTES } else { 4 << 20 };

impl CowMemory {
    /// Uses `file` with its content, and at most `limit` bytes of it for new copies.
    pub(crate) fn new(file: File, limit: u64) -> io::Result<CowMemory> {
        let found = file.metadata()?.len();
        let bytes = Arc::new(SharedBytes::new(&file, limit.max(found) as usize)?);
        let ranges = RangeAllocator::new(limit, found);
        Ok(CowMemory { file, bytes, ranges, allocated: Mutex::new(found) })
    }

    /// Gives the memory behind the last buffer in use back to the system.
    pub(super) fn trim(&self) -> io::Result<()> {
        let Some(tail) = self.ranges.take_tail() else { return Ok(()) };
        let mut allocated = self.allocated();
        if *allocated > tail.offset {
            self.file.set_len(tail.offset)?;
            *allocated = tail.offset;
        }
        Ok(())
    }

    fn allocated(&self) -> MutexGuard<'_, u64> {
        self.allocated.lock().expect("no code panics with this lock held")
    }

    /// Returns a page-aligned buffer with arbitrary content, or `None` if no space is left.
    pub(crate) fn take(&self, len: u64) -> Option<PooledBuffer> {
        let range = self.ranges.take(len)?;
        let end = range.offset + len;
        let mut allocated = self.allocated();
        if end > *allocated {
            let more = (end - *allocated).next_multiple_of(GROWTH_BYTES);
            match allocate_more(&self.file, *allocated, more) {
                Ok(()) => *allocated += more,
                Err(error) => {
                    tracing::warn!(
                        %error,
                        "cannot get more copy-on-write memory; old blocks go to the spill file"
                    );
                    return None;
                }
            }
        }
        Some(self.buffer(range))
    }

    /// Returns the buffer at this offset, which an earlier process had allocated.
    pub(crate) fn take_at(&self, offset: u64, len: u64) -> Option<PooledBuffer> {
        let allocated = *self.allocated();
        let inside = offset.checked_add(len)? <= allocated;
        let aligned = (offset | len).is_multiple_of(BLOCK_BYTES);
        let range = (inside && aligned).then(|| self.ranges.take_at(offset, len))??;
        Some(self.buffer(range))
    }

    fn buffer(&self, range: AllocatedRange) -> PooledBuffer {
        PooledBuffer::shared(range, self.bytes.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::CowMemory;

    #[test]
    fn memory_keeps_its_content() {
        let file = tempfile::tempfile().unwrap();
        let memory = CowMemory::new(file.try_clone().unwrap(), 16 << 20).unwrap();
        let _first = memory.take(8192).unwrap();
        let mut second = memory.take(4096).unwrap();
        second.fill(0x5a);
        let offset = second.cow_memory_offset().unwrap();
        drop(memory);
        let again = CowMemory::new(file, 16 << 20).unwrap();
        let second = again.take_at(offset, 4096).unwrap();
        assert!(second.iter().all(|byte| *byte == 0x5a));
        assert!(again.take_at(offset, 4096).is_none(), "taken");
        assert!(again.take_at(8 << 20, 4096).is_none(), "there is no memory behind it");
        assert!(again.take_at(100, 4096).is_none());
    }

    #[test]
    fn memory_that_is_not_in_use_goes_back_to_the_system() {
        let file = tempfile::tempfile().unwrap();
        let memory = CowMemory::new(file.try_clone().unwrap(), 16 << 20).unwrap();
        let len = || file.metadata().unwrap().len();
        let first = memory.take(8192).unwrap();
        let mut second = memory.take(4096).unwrap();
        let third = memory.take(1 << 20).unwrap();
        second.fill(0x5a);
        drop((first, third));
        memory.trim().unwrap();
        assert_eq!(len(), 12288, "the second one stays where it is");
        assert!(second.iter().all(|byte| *byte == 0x5a));
        let mut behind = memory.take(1 << 20).unwrap();
        behind.fill(1);
        drop((second, behind));
        memory.trim().unwrap();
        assert_eq!(len(), 0);
        memory.take(4096).unwrap().fill(2);
    }

    #[test]
    fn an_earlier_process_with_more_memory_does_not_raise_the_limit() {
        let file = tempfile::tempfile().unwrap();
        let memory = CowMemory::new(file.try_clone().unwrap(), 16 << 20).unwrap();
        drop(memory.take(8 << 20).unwrap());
        drop(memory);
        let again = CowMemory::new(file, 1 << 20).unwrap();
        let old = again.take_at(4 << 20, 4096).unwrap();
        let new = again.take(1 << 20).unwrap();
        assert!(again.take(4096).is_none());
        drop((old, new));
    }
}
