//! Walks a descriptor chain from its head.
//!
//! `virtio-queue` walks only chains whose heads are in the available ring. A chain that an earlier
//! process popped is not there any more. So all chains are walked here.

use std::mem::size_of;

use virtio_bindings::bindings::virtio_ring::VRING_DESC_ALIGN_SIZE;
use virtio_queue::desc::split;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend};

use super::{Descriptor, Segment};

/// An iterator over the descriptors of one chain, which trusts nothing that the guest wrote. It ends
/// after the last descriptor, at the first invalid one, and after as many as the table has.
pub(crate) struct Descriptors<'a, M> {
    memory: &'a M,
    table: GuestAddress,
    /// The number of entries of the table.
    entries: u16,
    next: u16,
    /// The number of descriptors that may still follow. A loop has no end.
    left: u16,
    /// The bytes of all descriptors so far, which must fit a `u32`.
    bytes: u32,
    is_indirect: bool,
}

impl<'a, M: GuestMemoryBackend> Descriptors<'a, M> {
    /// The chain that begins with the entry `head` of a table with `entries` entries.
    pub(crate) fn new(
        memory: &'a M,
        table: GuestAddress,
        entries: u16,
        head: u16,
    ) -> Descriptors<'a, M> {
        let (next, left) = (head, entries);
        Descriptors { memory, table, entries, next, left, bytes: 0, is_indirect: false }
    }

    fn read(&self) -> Option<split::Descriptor> {
        if self.left == 0 || self.next >= self.entries {
            return None;
        }
        let offset = u64::from(self.next) * size_of::<split::Descriptor>() as u64;
        self.memory.read_obj(self.table.checked_add(offset)?).ok()
    }
}

impl<M: GuestMemoryBackend> Iterator for Descriptors<'_, M> {
    type Item = Descriptor;

    fn next(&mut self) -> Option<Descriptor> {
        let mut found = self.read()?;
        if found.refers_to_indirect_table() {
            // A table in a table is not allowed.
            if self.is_indirect || !found.len().is_multiple_of(VRING_DESC_ALIGN_SIZE) {
                self.left = 0;
                return None;
            }
            self.entries = u16::try_from(found.len() / VRING_DESC_ALIGN_SIZE).unwrap_or(0);
            (self.table, self.next, self.left) = (found.addr(), 0, self.entries);
            self.is_indirect = true;
            found = self.read().filter(|inner| !inner.refers_to_indirect_table())?;
        }
        self.bytes = self.bytes.checked_add(found.len())?;
        (self.next, self.left) =
            if found.has_next() { (found.next(), self.left - 1) } else { (self.next, 0) };
        Some(Descriptor {
            segment: Segment { address: found.addr().0, len: found.len() },
            writable: found.is_write_only(),
        })
    }
}
