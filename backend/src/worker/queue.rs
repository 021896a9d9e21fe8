//! One virtqueue, as a worker drives it.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::counters::Class;
use crate::guest::ledger::Ledger;
use crate::memory::GuestMap;
use crate::request::{self, Descriptors, Refused, RequestKind};

/// Everything that a worker needs to drive a queue.
pub(crate) struct QueueSetup {
    pub(crate) queue: Queue,
    pub(crate) map: Arc<GuestMap>,
    pub(crate) kick: File,
    pub(crate) call: Option<File>,
    pub(crate) ledger: Ledger,
    /// The heads of chains that an earlier process popped and did not return, oldest first.
    pub(crate) resubmit: VecDeque<u16>,
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
    /// The heads of chains that have to be served again.
    resubmit: VecDeque<u16>,
    /// The heads of all chains in flight. A guest that offers one of them again has broken the ring,
    /// so there are never more than the queue has entries.
    in_flight: HeadSet,
    /// Whether there are completions of which the guest was not notified.
    unannounced: bool,
    /// Whether the guest has to be interrupted, even if it does not want to be notified.
    interrupts: bool,
    /// Whether the guest wanted no notification of the last completions.
    guest_polls: bool,
    /// Whether the guest has broken its rings. Then nothing more is popped.
    broken: bool,
    /// How the guest has broken its rings, until that is reported.
    breakage: Option<String>,
}

impl ActiveQueue {
    pub(crate) fn new(setup: QueueSetup) -> ActiveQueue {
        let QueueSetup { queue, map, kick, call, ledger, resubmit } = setup;
        let in_flight = HeadSet::new(queue.size(), resubmit.iter().copied());
        ActiveQueue {
            queue,
            map,
            kick,
            call,
            ledger,
            resubmit,
            in_flight,
            unannounced: false,
            // An earlier process may have ended between a completion and its interrupt.
            interrupts: true,
            guest_polls: false,
            broken: false,
            breakage: None,
        }
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
        self.interrupts = true;
    }

    pub(crate) fn kick_fd(&self) -> RawFd {
        self.kick.as_raw_fd()
    }

    pub(crate) fn next_avail(&self) -> u16 {
        self.queue.next_avail()
    }

    /// The number of entries of the queue.
    pub(crate) fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Pops the next request. With `only_resubmit`, only chains of an earlier process are popped.
    /// Chains that are not valid requests are answered here. Each chain takes one from `budget`, and
    /// without a budget nothing is popped: a guest can refill its ring for ever.
    pub(crate) fn pop(
        &mut self,
        now: Instant,
        only_resubmit: bool,
        budget: &mut u16,
    ) -> Option<(Chain, RequestKind)> {
        while !self.broken && *budget > 0 {
            let head = match self.resubmit.pop_front() {
                // The chain is in the ledger already.
                Some(head) => head,
                None if only_resubmit => return None,
                None => self.pop_head()?,
            };
            *budget -= 1;
            let map = self.map.clone();
            let table = GuestAddress(self.queue.desc_table());
            let chain = Descriptors::new(map.memory(), table, self.queue.size(), head);
            let parsed = request::parse(chain, map.memory());
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

    /// Takes the head of the next chain from the available ring. The ring is checked each time. If
    /// its index jumps by more than the queue holds, or if the head is in flight or is none of the
    /// queue's, the guest's driver cannot go on until it resets the device.
    fn pop_head(&mut self) -> Option<u16> {
        let error = match self.queue.iter(self.map.memory()).map(|mut chains| chains.next()) {
            Ok(chain) => {
                let head = chain?.head_index();
                if head < self.queue.size() && self.in_flight.insert(head) {
                    self.ledger.popped(head);
                    return Some(head);
                }
                self.queue.go_to_previous_position();
                format!("head {head} is in flight already, or is beyond the table")
            }
            Err(error) => error.to_string(),
        };
        self.break_rings(error);
        None
    }

    /// Stops the queue until its guest resets it.
    fn break_rings(&mut self, error: String) {
        if !self.broken {
            self.broken = true;
            self.breakage = Some(error);
        }
    }

    /// How the guest has broken its rings, once. The caller reports it: a guest can do that as often
    /// as it resets the device.
    pub(super) fn take_breakage(&mut self) -> Option<String> {
        self.breakage.take()
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
            Some(address) if memory.write_obj(status as u8, address).is_ok() => data + 1,
            _ => 0,
        };
        self.in_flight.remove(chain.head);
        self.ledger.returning(chain.head, self.queue.next_used());
        match self.queue.add_used(memory, chain.head, written) {
            Ok(()) => self.ledger.returned(chain.head, self.queue.next_used()),
            Err(error) => self.break_rings(format!("cannot write the used ring: {error}")),
        }
        self.unannounced = true;
    }

    /// The descriptor to signal, if there are completions and the guest wants to be notified, or if
    /// it has to be interrupted anyway.
    pub(crate) fn announce(&mut self) -> Option<RawFd> {
        let mut interrupts = std::mem::take(&mut self.interrupts);
        if std::mem::take(&mut self.unannounced) {
            let is_wanted = self.queue.needs_notification(self.map.memory()).unwrap_or(true);
            self.guest_polls = !is_wanted;
            interrupts |= is_wanted;
        }
        self.call.as_ref().filter(|_| interrupts).map(AsRawFd::as_raw_fd)
    }

    /// Whether the guest seems to poll its used ring, and so may act at any moment.
    pub(crate) fn guest_polls(&self) -> bool {
        self.guest_polls
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
        !self.broken && self.queue.enable_notification(self.map.memory()).unwrap_or(false)
    }

    /// Disables kicks, while the worker checks the ring by itself.
    pub(crate) fn disable_kicks(&mut self) {
        if !self.broken
            && let Err(error) = self.queue.disable_notification(self.map.memory())
        {
            self.break_rings(error.to_string());
        }
    }
}

/// The heads of the chains in flight, one bit each.
struct HeadSet(Box<[u64]>);

impl HeadSet {
    /// The heads `heads` of a queue with `size` entries.
    fn new(size: u16, heads: impl IntoIterator<Item = u16>) -> HeadSet {
        let mut set = HeadSet(vec![0; usize::from(size).div_ceil(64)].into());
        for head in heads {
            set.insert(head);
        }
        set
    }

    /// Adds a head. Returns `false` if it was there already, or is not one of the queue's.
    fn insert(&mut self, head: u16) -> bool {
        let bit = 1 << (head % 64);
        let Some(word) = self.0.get_mut(usize::from(head / 64)) else { return false };
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    fn remove(&mut self, head: u16) {
        if let Some(word) = self.0.get_mut(usize::from(head / 64)) {
            *word &= !(1 << (head % 64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::HeadSet;

    #[test]
    fn a_head_is_in_the_set_at_most_once_and_only_if_the_queue_has_it() {
        let mut set = HeadSet::new(128, [5, 127]);
        assert!(!set.insert(5) && !set.insert(127), "chains of an earlier process are in flight");
        assert!(!set.insert(128) && !set.insert(u16::MAX), "beyond the queue");
        assert!((0..128).filter(|head| set.insert(*head)).count() == 126);
        set.remove(64);
        set.remove(9999);
        assert!(set.insert(64) && !set.insert(64));
    }
}
