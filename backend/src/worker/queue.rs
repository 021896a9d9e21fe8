//! One virtqueue, as a worker drives it.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap, MmapRegion,
};

use crate::counters::Class;
use crate::guest::ledger::Ledger;
use crate::memory::GuestMap;
use crate::request::{self, Descriptor, Refused, RequestKind, Segment};

/// Everything that a worker needs to drive a queue.
pub(crate) struct QueueSetup {
    pub(crate) queue: Queue,
    pub(crate) map: Arc<GuestMap>,
    pub(crate) kick: File,
    pub(crate) call: Option<File>,
    pub(crate) ledger: Ledger,
    /// Chains that an earlier process popped and did not return, oldest first.
    pub(crate) resubmit: VecDeque<InFlightChain>,
}

/// A popped chain. It must be completed exactly once, or left in flight explicitly; dropping it
/// otherwise fails an assertion.
#[must_use]
pub(crate) struct Chain {
    head: u16,
    status: Option<GuestAddress>,
    pub(crate) class: Class,
    /// The time at the start of the worker's loop in which the chain was popped.
    pub(crate) since: Instant,
    returned: bool,
}

impl Chain {
    /// Leaves the chain in flight. The next owner of the queue finds it in the ledger.
    pub(super) fn leave(mut self) {
        self.returned = true;
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        debug_assert!(self.returned || std::thread::panicking(), "chain {} was lost", self.head);
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The request succeeded, and the device wrote this many bytes of data.
    Ok(u32),
    Failed,
    Unsupported,
}

/// A virtqueue in operation.
pub(crate) struct ActiveQueue {
    queue: Queue,
    map: Arc<GuestMap>,
    kick: File,
    call: Option<File>,
    ledger: Ledger,
    /// Chains that have to be served again.
    resubmit: VecDeque<InFlightChain>,
    /// Whether there are completions of which the guest was not notified.
    unannounced: bool,
    /// Whether the guest has broken its rings. Then nothing more is popped.
    broken: bool,
}

impl ActiveQueue {
    pub(crate) fn new(setup: QueueSetup) -> ActiveQueue {
        let QueueSetup { queue, map, kick, call, ledger, resubmit } = setup;
        ActiveQueue { queue, map, kick, call, ledger, resubmit, unannounced: false, broken: false }
    }

    /// Whether chains of an earlier process are left to be served.
    pub(crate) fn has_resubmissions(&self) -> bool {
        !self.resubmit.is_empty() && !self.broken
    }

    pub(crate) fn map(&self) -> &Arc<GuestMap> {
        &self.map
    }

    /// Replaces the map. Returns whether all parts of the ring are in it.
    pub(crate) fn set_map(&mut self, map: Arc<GuestMap>) -> bool {
        self.map = map;
        self.queue.is_valid(self.map.memory())
    }

    pub(crate) fn set_call(&mut self, call: Option<File>) {
        self.call = call;
        // The old descriptor may have been signalled, and nobody reads it any more.
        self.unannounced = true;
    }

    pub(crate) fn kick_fd(&self) -> RawFd {
        self.kick.as_raw_fd()
    }

    pub(crate) fn next_avail(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Pops the next request. With `only_resubmit`, only chains of an earlier process are popped.
    /// Chains that are not valid requests are answered here.
    pub(crate) fn pop(
        &mut self,
        now: Instant,
        only_resubmit: bool,
    ) -> Option<(Chain, RequestKind)> {
        while !self.broken {
            let map = self.map.clone();
            let (head, parsed) = match self.resubmit.pop_front() {
                // The chain is in the ledger already.
                Some((head, chain)) => (head, request::parse(chain.into_iter(), map.memory())),
                None if only_resubmit => return None,
                // The ring is checked at each pop. If an index jumps by more than the queue holds,
                // the guest's driver cannot go on until it resets the device.
                None => match self.queue.iter(map.memory()).map(|mut chains| chains.next()) {
                    Ok(chain) => {
                        let chain = chain?;
                        let head = chain.head_index();
                        self.ledger.popped(head);
                        (head, request::parse(chain.map(descriptor), map.memory()))
                    }
                    Err(error) => {
                        tracing::error!(%error, "the guest broke a virtqueue: it stops until a reset");
                        self.broken = true;
                        return None;
                    }
                },
            };
            let status = parsed.as_ref().map(|parsed| parsed.status);
            let parsed = parsed.map(|parsed| parsed.request);
            let class = match &parsed {
                Some(Ok(RequestKind::Read { .. })) => Class::Read,
                Some(Ok(RequestKind::Write { .. })) => Class::Write,
                Some(Ok(RequestKind::Flush)) => Class::Flush,
                _ => Class::Other,
            };
            let chain = Chain { head, status, class, since: now, returned: false };
            let refused = match parsed {
                Some(Ok(kind)) => return Some((chain, kind)),
                Some(Err(refused)) => refused,
                None => Refused::Invalid,
            };
            tracing::debug!(head, ?refused, "a chain is not a valid request");
            let outcome = match refused {
                Refused::Unsupported => Outcome::Unsupported,
                Refused::Invalid => Outcome::Failed,
            };
            self.complete(chain, outcome);
        }
        None
    }

    /// Returns a chain to the guest.
    pub(crate) fn complete(&mut self, mut chain: Chain, outcome: Outcome) {
        chain.returned = true;
        let (status, data) = match outcome {
            Outcome::Ok(data) => (VIRTIO_BLK_S_OK, data),
            Outcome::Failed => (VIRTIO_BLK_S_IOERR, 0),
            Outcome::Unsupported => (VIRTIO_BLK_S_UNSUPP, 0),
        };
        let memory = self.map.memory();
        let written = match chain.status {
            Some(address) if memory.write_obj(status as u8, address).is_ok() => {
                self.map.mark(address, 1);
                data + 1
            }
            _ => 0,
        };
        self.ledger.returning(chain.head, self.queue.next_used());
        match self.queue.add_used(memory, chain.head, written) {
            Ok(()) => self.ledger.returned(chain.head, self.queue.next_used()),
            Err(error) => {
                tracing::error!(%error, head = chain.head, "cannot write the guest's used ring");
                self.broken = true;
            }
        }
        self.mark_used_ring();
        self.unannounced = true;
    }

    /// The descriptor to signal, if there are completions and the guest wants to be notified.
    pub(crate) fn announce(&mut self) -> Option<RawFd> {
        if !std::mem::take(&mut self.unannounced) {
            return None;
        }
        let wanted = self.queue.needs_notification(self.map.memory()).unwrap_or(true);
        self.call.as_ref().filter(|_| wanted).map(AsRawFd::as_raw_fd)
    }

    /// Interrupts the guest at once, whether it wants to be notified or not.
    pub(crate) fn interrupt(&self) {
        if let Some(call) = &self.call {
            // If the counter is full, an interrupt is pending already.
            let _ = (&mut &*call).write(&1u64.to_ne_bytes());
        }
    }

    /// Whether the guest has made requests available. This reads one number of its memory.
    pub(crate) fn has_more(&self) -> bool {
        let next = std::num::Wrapping(self.queue.next_avail());
        self.has_resubmissions()
            || !self.broken
                && self
                    .queue
                    .avail_idx(self.map.memory(), Ordering::Acquire)
                    .is_ok_and(|available| available != next)
    }

    /// Enables kicks. Returns whether requests came in meanwhile.
    pub(crate) fn enable_kicks(&mut self) -> bool {
        let more =
            !self.broken && self.queue.enable_notification(self.map.memory()).unwrap_or(false);
        self.mark_used_ring();
        more
    }

    /// Marks the used ring in the dirty log, if there is one.
    fn mark_used_ring(&self) {
        if self.map.is_logged() {
            // Flags, index, entries, and the event index after them.
            let len = 6 + 8 * u64::from(self.queue.size());
            self.map.mark(GuestAddress(self.queue.used_ring()), len);
        }
    }

    /// Disables kicks, while the worker checks the ring by itself.
    pub(crate) fn disable_kicks(&mut self) {
        if !self.broken && self.queue.disable_notification(self.map.memory()).is_err() {
            self.broken = true;
        }
        self.mark_used_ring();
    }
}

fn descriptor(one: virtio_queue::desc::split::Descriptor) -> Descriptor {
    Descriptor {
        segment: Segment { address: one.addr().0, len: one.len() },
        writable: one.is_write_only(),
    }
}

/// A chain that an earlier process popped: its head and its descriptors.
pub(crate) type InFlightChain = (u16, Vec<Descriptor>);

/// Returns the chains with these heads. The guest's available ring does not hold them any more. So
/// they are put into a temporary ring, in memory that is added to the guest's for this purpose.
pub(crate) fn chains(
    queue: &Queue,
    memory: &GuestMemoryMmap,
    heads: &[u16],
) -> io::Result<VecDeque<InFlightChain>> {
    const PAGE_BYTES: u64 = 4096;
    if heads.is_empty() {
        return Ok(VecDeque::new());
    }
    // Flags, index, entries, event index.
    let len = 6 + 2 * u64::from(queue.size());
    let ring =
        MmapRegion::new(len.next_multiple_of(PAGE_BYTES) as usize).map_err(io::Error::other)?;
    let behind = memory.last_addr().checked_align_up(PAGE_BYTES).unwrap_or(GuestAddress(0));
    let start = GuestAddress(behind.0.max(PAGE_BYTES));
    let region = GuestRegionMmap::new(ring, start).ok_or(io::ErrorKind::OutOfMemory)?;
    let memory = memory.insert_region(Arc::new(region)).map_err(io::Error::other)?;
    let mut own = Queue::new(queue.max_size()).map_err(io::Error::other)?;
    own.set_size(queue.size());
    own.try_set_desc_table_address(GuestAddress(queue.desc_table())).map_err(io::Error::other)?;
    own.try_set_avail_ring_address(start).map_err(io::Error::other)?;
    own.set_ready(true);
    memory.write_obj(heads.len() as u16, GuestAddress(start.0 + 2)).map_err(io::Error::other)?;
    for (at, head) in (start.0 + 4..).step_by(2).zip(heads) {
        memory.write_obj(*head, GuestAddress(at)).map_err(io::Error::other)?;
    }
    let chains = own.iter(&memory).map_err(io::Error::other)?;
    Ok(chains.map(|chain| (chain.head_index(), chain.map(descriptor).collect())).collect())
}
