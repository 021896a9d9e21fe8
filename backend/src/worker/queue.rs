//! One virtqueue as a worker drives it.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::counters::Class;
use crate::memory::GuestMap;
use crate::request::{self, Descriptor, Kind, Refused, Segment};

/// Everything a worker needs to drive a queue.
pub(crate) struct QueueSetup {
    pub(crate) queue: Queue,
    pub(crate) map: Arc<GuestMap>,
    pub(crate) kick: File,
    pub(crate) call: Option<File>,
}

/// A popped chain. It is completed exactly once: losing one trips an assertion.
#[must_use]
pub(crate) struct Chain {
    head: u16,
    status: Option<GuestAddress>,
    pub(crate) class: Class,
    /// The beginning of the turn in which it was popped.
    pub(crate) since: Instant,
    returned: bool,
}

impl Drop for Chain {
    fn drop(&mut self) {
        debug_assert!(self.returned || std::thread::panicking(), "chain {} was lost", self.head);
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Done; the device wrote this many bytes of data.
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
    /// Completions that the guest was not told of.
    unannounced: bool,
    /// The guest broke its rings: nothing more is popped.
    broken: bool,
}

impl ActiveQueue {
    pub(crate) fn new(setup: QueueSetup) -> ActiveQueue {
        let QueueSetup { queue, map, kick, call } = setup;
        ActiveQueue { queue, map, kick, call, unannounced: false, broken: false }
    }

    pub(crate) fn map(&self) -> &Arc<GuestMap> {
        &self.map
    }

    /// Goes over to another map. Returns whether the rings are all in it.
    pub(crate) fn set_map(&mut self, map: Arc<GuestMap>) -> bool {
        self.map = map;
        self.queue.is_valid(self.map.memory())
    }

    pub(crate) fn set_call(&mut self, call: Option<File>) {
        self.call = call;
        // Completions may have been announced to the old descriptor, which nobody reads any more.
        self.unannounced = true;
    }

    pub(crate) fn kick_fd(&self) -> RawFd {
        self.kick.as_raw_fd()
    }

    pub(crate) fn next_avail(&self) -> u16 {
        self.queue.next_avail()
    }

    /// The next request. Chains that are none are answered here.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<(Chain, Kind)> {
        while !self.broken {
            // The ring is checked at each pop: an index that jumps by more than the queue holds
            // means that the guest's driver is beyond repair until it resets the device.
            let map = self.map.clone();
            let chain = match self.next_chain(&map) {
                Ok(chain) => chain?,
                Err(error) => {
                    tracing::error!(%error, "the guest broke a virtqueue; it is stopped until a reset");
                    self.broken = true;
                    return None;
                }
            };
            let head = chain.head_index();
            let descriptors = chain.map(|descriptor| Descriptor {
                segment: Segment { address: descriptor.addr().0, len: descriptor.len() },
                writable: descriptor.is_write_only(),
            });
            let parsed = request::parse(descriptors, map.memory());
            let status = parsed.as_ref().map(|parsed| parsed.status);
            let parsed = parsed.map(|parsed| parsed.request);
            let class = match &parsed {
                Some(Ok(Kind::Read { .. })) => Class::Read,
                Some(Ok(Kind::Write { .. })) => Class::Write,
                Some(Ok(Kind::Flush)) => Class::Flush,
                _ => Class::Other,
            };
            let chain = Chain { head, status, class, since: now, returned: false };
            let refused = match parsed {
                Some(Ok(kind)) => return Some((chain, kind)),
                Some(Err(refused)) => refused,
                None => Refused::Invalid,
            };
            tracing::debug!(head, ?refused, "a chain that is no request");
            let outcome = match refused {
                Refused::Unsupported => Outcome::Unsupported,
                Refused::Invalid => Outcome::Failed,
            };
            self.complete(chain, outcome);
        }
        None
    }

    fn next_chain<'m>(
        &mut self,
        map: &'m GuestMap,
    ) -> Result<
        Option<virtio_queue::DescriptorChain<&'m vm_memory::GuestMemoryMmap>>,
        virtio_queue::Error,
    > {
        use virtio_queue::QueueOwnedT;
        Ok(self.queue.iter(map.memory())?.next())
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
        if let Err(error) = self.queue.add_used(memory, chain.head, written) {
            tracing::error!(%error, head = chain.head, "the guest's used ring cannot be written");
            self.broken = true;
        }
        self.mark_used_ring();
        self.unannounced = true;
    }

    /// The descriptor to raise so that the guest learns of completions, if there are any and it
    /// wants to know.
    pub(crate) fn announce(&mut self) -> Option<RawFd> {
        if !std::mem::take(&mut self.unannounced) {
            return None;
        }
        let wanted = self.queue.needs_notification(self.map.memory()).unwrap_or(true);
        self.call.as_ref().filter(|_| wanted).map(AsRawFd::as_raw_fd)
    }

    /// Interrupts the guest at once, whether it asked for it or not.
    pub(crate) fn interrupt(&self) {
        if let Some(call) = &self.call {
            // A full counter is as good as an interrupt: it is pending already.
            let _ = (&mut &*call).write(&1u64.to_ne_bytes());
        }
    }

    /// Whether the guest has made requests available. A look at one number of its memory.
    pub(crate) fn has_more(&self) -> bool {
        let next = std::num::Wrapping(self.queue.next_avail());
        !self.broken
            && self
                .queue
                .avail_idx(self.map.memory(), Ordering::Acquire)
                .is_ok_and(|available| available != next)
    }

    /// Asks for kicks; returns whether requests came in meanwhile.
    pub(crate) fn enable_kicks(&mut self) -> bool {
        let more =
            !self.broken && self.queue.enable_notification(self.map.memory()).unwrap_or(false);
        self.mark_used_ring();
        more
    }

    /// Records that the used ring was written, while the hypervisor wants that.
    fn mark_used_ring(&self) {
        if self.map.is_logged() {
            // Flags, index, the entries, and the event index behind them.
            let len = 6 + 8 * u64::from(self.queue.size());
            self.map.mark(GuestAddress(self.queue.used_ring()), len);
        }
    }

    /// Asks for no kicks: the worker looks by itself.
    pub(crate) fn disable_kicks(&mut self) {
        if !self.broken && self.queue.disable_notification(self.map.memory()).is_err() {
            self.broken = true;
        }
        self.mark_used_ring();
    }
}
