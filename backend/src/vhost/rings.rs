//! The rings of a connection: what is known of each, how it starts, and how it stops.
//!
//! A hypervisor that keeps the record of requests in flight can negotiate that requests that wait
//! stay in this record when a ring stops. Then only requests that were submitted are completed.
//! QEMU disables a ring before it says how the ring stops, so a disabled ring is *suspended*: its
//! requests stay in the record, and a stop that has to complete them drains the ring. A change of
//! the ring's addresses or kick suspends it for a moment, too.
//!
//! ```text
//!            start                          disable, if requests may stay in flight
//!  Stopped ─────────► Running ──────────────────────────────────────────────────► Suspended
//!     ▲                │   ▲                                                       │   │
//!     │ stop, disable  │   └──────────────────────── enable ───────────────────────┘   │
//!     └────────────────┴──────────────── drain, stop, reset, end of the connection ────┘
//! ```

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::mpsc;

use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::vhost_user::{Error, Result};
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};

use super::{Handler, failed, skip_drain};
use crate::guest::ledger::{GuestRingAddresses, Ledger, RingIndices};
use crate::worker::queue::QueueSetup;
use crate::worker::{Command, ParkedRequests};

/// The addresses of a ring in the hypervisor's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UserRingAddresses {
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
}

/// One virtqueue, as the messages describe it.
#[derive(Default)]
pub(super) struct Ring {
    pub(super) size: u16,
    pub(super) addresses: Option<UserRingAddresses>,
    pub(super) next_avail: u16,
    pub(super) kick: Option<File>,
    pub(super) call: Option<File>,
    pub(super) enabled: bool,
    pub(super) state: RingState,
}

/// What is done with a ring. The header of this module has the transitions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RingState {
    /// Nothing.
    #[default]
    Stopped,
    /// A worker drives it.
    Running,
    /// It is disabled, and requests that were popped are in the hypervisor's ledger.
    Suspended,
}

impl Handler {
    pub(super) fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        self.rings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    /// Starts the ring if it has everything it needs, and is enabled.
    pub(super) fn update(&mut self, index: usize) -> Result<()> {
        let ring = &self.rings[index];
        if ring.enabled && ring.state != RingState::Running { self.start(index) } else { Ok(()) }
    }

    /// Starts the ring if it has everything it needs.
    fn start(&mut self, index: usize) -> Result<()> {
        let Some(setup) = self.queue_setup(index)? else { return Ok(()) };
        // A hypervisor that connects again may know an old size. QEMU reads the configuration again
        // only if a ring has started.
        if !self.runs() {
            self.guest.config_channels.notify(self.id);
        }
        self.workers[index].send(Command::Start(setup));
        self.rings[index].state = RingState::Running;
        self.guest.queue_started();
        Ok(())
    }

    /// Completes the requests of a suspended ring, and takes no new ones.
    fn drain(&mut self, index: usize) -> Result<()> {
        let lacks_kick = Error::InvalidOperation("a ring with requests in flight lacks a kick");
        let setup = self.queue_setup(index)?.ok_or(lacks_kick)?;
        let (reply, answer) = mpsc::channel();
        self.workers[index].send(Command::Drain(setup, reply));
        // As in `halt`.
        if let Ok(next_avail) = answer.recv() {
            self.rings[index].next_avail = next_avail;
        }
        Ok(())
    }

    /// What a worker needs to drive the ring, if it is complete.
    fn queue_setup(&mut self, index: usize) -> Result<Option<Box<QueueSetup>>> {
        let ring = &self.rings[index];
        let (Some(addresses), Some(kick)) = (ring.addresses, &ring.kick) else { return Ok(None) };
        if !self.guest.acquire_rings(self.id) {
            let reason = "another hypervisor runs this disk; stop its guest, or migrate it";
            tracing::error!("{reason}");
            return Err(failed(reason));
        }
        let kick = kick.try_clone().map_err(failed)?;
        let call = ring.call.as_ref().map(File::try_clone).transpose().map_err(failed)?;
        let mut queue = self.queue(index, addresses)?;
        // Before the ledger is initialised.
        self.inherit_caching();
        let (ledger, heads) = self.ledger(index, &mut queue)?;
        let resubmit = VecDeque::from(heads);
        if !resubmit.is_empty() {
            let requests = resubmit.len();
            tracing::info!(index, requests, "serving requests that were in flight");
        }
        self.apply_caching();
        self.guest.add_known_ring(index);
        let map = self.map.clone();
        Ok(Some(Box::new(QueueSetup { queue, map, kick, call, ledger, resubmit })))
    }

    /// Builds the queue of a ring, and checks everything that the hypervisor says about it.
    pub(super) fn queue(&self, index: usize, addresses: UserRingAddresses) -> Result<Queue> {
        let ring = &self.rings[index];
        let translate = |user| self.map.guest_address(user).ok_or(Error::InvalidParam);
        let mut queue = Queue::new(self.queue_size).map_err(failed)?;
        queue.try_set_size(ring.size).map_err(failed)?;
        queue.try_set_desc_table_address(translate(addresses.descriptors)?).map_err(failed)?;
        queue.try_set_avail_ring_address(translate(addresses.available)?).map_err(failed)?;
        queue.try_set_used_ring_address(translate(addresses.used)?).map_err(failed)?;
        queue.set_event_idx(self.features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0);
        queue.set_ready(true);
        if !queue.is_valid(self.map.memory()) {
            return Err(Error::InvalidParam);
        }
        let used = queue.used_idx(self.map.memory(), Ordering::Acquire).map_err(failed)?;
        self.check_known(index, addresses)?;
        queue.set_next_used(used.0);
        queue.set_next_avail(ring.next_avail);
        Ok(queue)
    }

    /// Returns the ring's ledger, and the chains that an earlier process popped and did not return.
    /// The next chain to pop follows those, whatever the hypervisor says, because it cannot know
    /// them.
    fn ledger(&self, index: usize, queue: &mut Queue) -> Result<(Ledger, Vec<u16>)> {
        let available = queue.avail_idx(self.map.memory(), Ordering::Acquire).map_err(failed)?.0;
        let indices = RingIndices { available, used: queue.next_used() };
        let size = queue.size();
        let ring_addresses = GuestRingAddresses {
            descriptors: queue.desc_table(),
            available: queue.avail_ring(),
            used: queue.used_ring(),
        };
        let (ledger, heads) = match self.kept_ledger(index) {
            Some(mut ledger) => {
                let heads = ledger.resume(indices);
                (ledger, heads)
            }
            None => {
                let own = self.guest.resume_ledger(index, size, ring_addresses, indices);
                own.ok_or(Error::InvalidParam)?
            }
        };
        if let Some(heads) = &heads {
            queue.set_next_avail(indices.used.wrapping_add(heads.len() as u16));
        }
        Ok((ledger, heads.unwrap_or_default()))
    }

    /// Refuses a guest that was running before this process started, if the mirror was not stopped
    /// cleanly: the guest would read old data without noticing. So a ring that this process sees
    /// for the first time must be unused then.
    fn check_known(&self, index: usize, addresses: UserRingAddresses) -> Result<()> {
        if self.guest.knows_ring(index) || !self.was_used(index, addresses) {
            return Ok(());
        }
        let reason = "the guest was running before this process started, but the mirror was not \
                      stopped cleanly and may lack data that the guest wrote; restart the guest, or \
                      start it from a snapshot";
        tracing::error!(index, "{reason}");
        Err(failed(reason))
    }

    /// What becomes of parked requests when the ring is disabled or stops. They may stay in flight
    /// if that was negotiated, and if the hypervisor keeps the record of them.
    pub(super) fn parked_requests(&self, index: u32) -> ParkedRequests {
        let negotiated =
            self.protocol_features.contains(VhostUserProtocolFeatures::GET_VRING_BASE_INFLIGHT);
        // The ledger is not replaced while a ring runs.
        match self.kept_ledger(index as usize) {
            Some(_) if negotiated => ParkedRequests::Leave,
            _ => ParkedRequests::Finish,
        }
    }

    /// The ledger that the hypervisor keeps of a ring.
    fn kept_ledger(&self, index: usize) -> Option<Ledger> {
        self.ledgers.as_ref()?.ledger(index, self.rings.get(index)?.size)
    }

    /// Disables a ring.
    pub(super) fn disable(&mut self, index: usize, parked: ParkedRequests) {
        self.suspend(index, parked);
        self.release_if_idle();
    }

    /// Takes a ring from its worker, if one drives it.
    fn suspend(&mut self, index: usize, parked: ParkedRequests) {
        if self.rings[index].state != RingState::Running {
            return;
        }
        self.halt(index..index + 1, parked);
        if parked == ParkedRequests::Leave {
            self.rings[index].state = RingState::Suspended;
        }
    }

    /// Stops a ring, and returns its next available index. A stopped ring starts again with the next
    /// kick descriptor.
    pub(super) fn stop(&mut self, index: u32, parked: ParkedRequests) -> Result<u32> {
        let state = self.ring(index)?.state;
        let at = index as usize;
        let is_empty = || self.kept_ledger(at).is_none_or(|ledger| ledger.is_empty());
        if state == RingState::Suspended && parked == ParkedRequests::Finish && !is_empty() {
            self.drain(at)?;
        }
        self.halt(at..at + 1, parked);
        let ring = &mut self.rings[at];
        ring.state = RingState::Stopped;
        ring.kick = None;
        ring.call = None;
        let base = ring.next_avail;
        self.release_if_idle();
        Ok(u32::from(base))
    }

    /// GET_VRING_BASE_SKIP_DRAIN.
    pub(super) fn get_vring_base_skip_drain(&mut self, index: u32) -> Result<u32> {
        if !self.protocol_features.contains(skip_drain::FEATURE) {
            return Err(Error::InvalidOperation("GET_VRING_BASE_SKIP_DRAIN was not negotiated"));
        }
        self.stop(index, self.parked_requests(index))
    }

    /// Stops all rings, because the device is reset or the connection has ended. If the connection
    /// has ended, parked requests are left to the next one. Requests of suspended rings are not
    /// executed by this connection.
    pub(crate) fn stop_all(&mut self, parked: ParkedRequests) {
        self.halt(0..self.rings.len(), parked);
        for ring in &mut self.rings {
            ring.state = RingState::Stopped;
        }
        self.release_if_idle();
    }

    /// Lets another hypervisor run the disk if all rings of this one are stopped. A suspended ring
    /// may have to complete requests.
    fn release_if_idle(&self) {
        if self.rings.iter().all(|ring| ring.state == RingState::Stopped) {
            self.guest.release_rings(self.id);
        }
    }

    /// Applies `change` while no worker drives the ring. Then the ring goes on if it still can.
    pub(super) fn around_stop(
        &mut self,
        index: usize,
        change: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.suspend(index, self.parked_requests(index as u32));
        let result = change(self).and_then(|()| self.update(index));
        self.release_if_idle();
        result
    }

    /// Takes several rings from their workers at the same time.
    fn halt(&mut self, indices: Range<usize>, parked: ParkedRequests) {
        let mut answers = Vec::new();
        for index in indices {
            if self.rings[index].state == RingState::Running {
                self.rings[index].state = RingState::Stopped;
                self.guest.queue_stopped();
                let (reply, answer) = mpsc::channel();
                self.workers[index].send(Command::Stop(parked, reply));
                answers.push((index, answer));
            }
        }
        for (index, answer) in answers {
            // A worker that has ended does not answer. Then nothing is in flight either.
            if let Ok(next_avail) = answer.recv() {
                self.rings[index].next_avail = next_avail;
            }
        }
    }
}
