//! Memory for preserved blocks that outlives the process, because it belongs to a file.
//!
//! The memory is divided into slots of one block. A second file has a word for each slot, its
//! *owner*: which block of which epoch the slot preserves. The word is written when the copy is
//! complete, and before the write that depends on it is submitted. It is never cleared. A slot that
//! is used again still has its old owner until its next copy is complete. That does no harm: a slot
//! is free again only when its old owner's chunk is durable, or when the layer of its epoch has
//! ended, and what a process finds in such slots it ignores.

use std::fs::File;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use super::buffer_pool::PooledBuffer;
use super::range_allocator::{AllocatedRange, RangeAllocator};
use crate::log_limit::LogLimit;
use crate::mapping::{SharedBytes, Words};
use crate::mirror::epoch::Epoch;
use crate::mirror::files::disk_file::{allocate, allocate_more};
use crate::mirror::layout::{BLOCK_BYTES, Blocks};

/// The bits of a slot's owner: whether there is one, a block of the disk, and the low bits of an
/// epoch. At most sixteen epochs, which follow each other, have layers.
const OWNED_FLAG: u64 = 1 << 63;
const EPOCH_BITS: u32 = 29;
const EPOCH_MASK: u64 = (1 << EPOCH_BITS) - 1;

/// The memory and the owners of its slots.
pub(super) struct SharedSlots {
    pub(super) bytes: SharedBytes,
    owners: Words,
}

impl SharedSlots {
    /// Records that the slots at `offset` preserve `blocks` of the disk for an epoch.
    pub(super) fn set_owner(&self, offset: u64, epoch: Epoch, blocks: Blocks) {
        let slots = &self.owners[(offset / BLOCK_BYTES) as usize..];
        for (block, slot) in (blocks.first..blocks.end()).zip(slots) {
            let owner = OWNED_FLAG | block << EPOCH_BITS | epoch.0 & EPOCH_MASK;
            slot.store(owner, Ordering::Release);
        }
    }
}

/// A copy that an earlier process may have left in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnedSlot {
    /// The low bits of its epoch.
    epoch: u64,
    /// The block of the disk.
    pub(crate) block: u64,
    /// The offset in the memory.
    pub(crate) offset: u64,
}

impl OwnedSlot {
    /// Whether the copy was made for this epoch.
    pub(crate) fn is_of(&self, epoch: Epoch) -> bool {
        self.epoch == epoch.0 & EPOCH_MASK
    }
}

/// The copy-on-write memory of a disk.
pub(crate) struct CowMemory {
    file: File,
    slots: Arc<SharedSlots>,
    ranges: Arc<RangeAllocator>,
    /// The number of bytes for which the file has space. Memory beyond that must not be touched.
    allocated: Mutex<u64>,
    failures: Mutex<LogLimit>,
}

/// The file grows in steps of this many bytes, because most disks never need much. In tests it
/// grows by blocks, so that the growth happens often.
const GROWTH_BYTES: u64 = if cfg!(test) { BLOCK_BYTES } else { 4 << 20 };

impl CowMemory {
    /// Uses `file` with its content, and at most `limit` bytes of it for new copies. `owners` has the
    /// owners of its slots.
    pub(crate) fn new(file: File, owners: &File, limit: u64) -> io::Result<CowMemory> {
        let found = file.metadata()?.len();
        let len = limit.max(found);
        let bytes = SharedBytes::new(&file, len as usize)?;
        let slots = len.div_ceil(BLOCK_BYTES);
        let owners_len = slots.max(1) * 8;
        if owners.metadata()?.len() < owners_len {
            allocate(owners, owners_len)?;
        }
        let owners = Words::shared(owners, 0, slots as usize)?;
        let slots = Arc::new(SharedSlots { bytes, owners });
        let ranges = RangeAllocator::new(limit, found);
        let failures = Mutex::new(LogLimit::new(Instant::now()));
        Ok(CowMemory { file, slots, ranges, allocated: Mutex::new(found), failures })
    }

    /// An empty memory of this process alone.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn private(limit: u64) -> CowMemory {
        let file = || crate::sys::shared_memory(0).expect("memory");
        CowMemory::new(file(), &file(), limit).expect("memory")
    }

    /// The slots that have an owner, in ascending order.
    pub(crate) fn owned(&self) -> impl Iterator<Item = OwnedSlot> + '_ {
        self.slots.owners.iter().enumerate().filter_map(|(slot, owner)| {
            let owner = owner.load(Ordering::Acquire);
            (owner & OWNED_FLAG != 0).then(|| OwnedSlot {
                epoch: owner & EPOCH_MASK,
                block: (owner & !OWNED_FLAG) >> EPOCH_BITS,
                offset: slot as u64 * BLOCK_BYTES,
            })
        })
    }

    /// Gives the memory behind the last buffer in use back to the system.
    pub(crate) fn trim(&self) -> io::Result<()> {
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
                    drop(allocated);
                    self.report(&error);
                    return None;
                }
            }
        }
        Some(self.buffer(range))
    }

    fn report(&self, error: &io::Error) {
        let mut failures = self.failures.lock().expect("no code panics with this lock held");
        if let Some(times) = failures.count(Instant::now()) {
            tracing::warn!(
                %error,
                times,
                "cannot get more copy-on-write memory; old blocks go to the spill file"
            );
        }
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
        PooledBuffer::shared(range, self.slots.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::{BLOCK_BYTES, Blocks, CowMemory, Epoch, OwnedSlot};

    /// The files of a memory.
    struct Files(File, File);

    impl Files {
        fn new() -> Files {
            Files(tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap())
        }

        fn open(&self, limit: u64) -> CowMemory {
            CowMemory::new(self.0.try_clone().unwrap(), &self.1, limit).unwrap()
        }
    }

    #[test]
    fn memory_keeps_its_content_and_its_owners() {
        let files = Files::new();
        let memory = files.open(16 << 20);
        let first = memory.take(8192).unwrap();
        let mut second = memory.take(4096).unwrap();
        second.fill(0x5a);
        let _third = memory.take(4096).unwrap();
        let (last, epoch) = ((1 << 34) - 1, Epoch(1 << 40 | 7));
        first.set_owner(Epoch(3), Blocks { first: 8, count: 2 });
        first.set_owner(epoch, Blocks { first: 0, count: 2 });
        second.set_owner(epoch, Blocks { first: last, count: 1 });
        drop(memory);
        let again = files.open(16 << 20);
        let owned: Vec<_> = again.owned().collect();
        let slot = |block, offset| OwnedSlot { epoch: 7, block, offset };
        assert_eq!(owned, [slot(0, 0), slot(1, 4096), slot(last, 8192)]);
        assert!(owned[0].is_of(epoch) && !owned[0].is_of(Epoch(3)));
        let second = again.take_at(8192, 4096).unwrap();
        assert!(second.iter().all(|byte| *byte == 0x5a));
        assert!(again.take_at(8192, 4096).is_none(), "taken");
        assert!(again.take_at(8 << 20, 4096).is_none(), "there is no memory behind it");
        assert!(again.take_at(100, 4096).is_none());
    }

    #[test]
    fn memory_that_is_not_in_use_goes_back_to_the_system() {
        let files = Files::new();
        let memory = files.open(16 << 20);
        let len = || files.0.metadata().unwrap().len();
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
        let files = Files::new();
        let memory = files.open(16 << 20);
        let large = memory.take(8 << 20).unwrap();
        large.set_owner(Epoch(1), Blocks { first: 0, count: (8 << 20) / BLOCK_BYTES });
        drop(large);
        drop(memory);
        let again = files.open(1 << 20);
        assert_eq!(again.owned().last().unwrap().offset, (8 << 20) - BLOCK_BYTES);
        let old = again.take_at(4 << 20, 4096).unwrap();
        let new = again.take(1 << 20).unwrap();
        assert!(again.take(4096).is_none());
        drop((old, new));
    }
}
