//! The vhost-user side: turns the hypervisor's messages into commands for the queue workers.
//!
//! A ring runs while it has memory, addresses and a kick descriptor, and is enabled. A message that
//! takes one of these away stops the ring first. A stop ends when every request that was popped is
//! completed. A change of memory only pauses the rings: requests that wait for a fetch go on
//! waiting, so an unavailable repository never blocks the hypervisor.
//!
//! The ring of a guest that another process served starts with the requests that were in flight
//! there. See [`ledger`](crate::guest::ledger).

mod config;
mod messages;
pub(crate) mod server;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

use vhost::vhost_user::message::VhostUserVirtioFeatures;
use vhost::vhost_user::{Error, Result};
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};

use crate::guest::GuestState;
use crate::guest::ledger::{GuestRingAddresses, Ledger, LedgerRegion, RingIndices};
use crate::guest::ring_ownership::ConnectionId;
use crate::local_disk::LocalDisk;
use crate::memory::{DirtyLog, GuestMap};
use crate::worker::queue::{QueueSetup, chains};
use crate::worker::{Command, Mailbox, ParkedRequests};

/// The number of memory slots, which is as many as KVM guests use.
const MAX_MEMORY_SLOTS: u64 = 509;

/// The addresses of a ring in the hypervisor's address space.
#[derive(Clone, Copy)]
struct UserRingAddresses {
    descriptors: u64,
    available: u64,
    used: u64,
}

/// One virtqueue, as the messages describe it.
#[derive(Default)]
struct Ring {
    size: u16,
    addresses: Option<UserRingAddresses>,
    next_avail: u16,
    kick: Option<File>,
    call: Option<File>,
    enabled: bool,
    running: bool,
}

/// The state of one connection.
pub(crate) struct Handler {
    id: ConnectionId,
    /// Whether another hypervisor can connect and take over the guest.
    migratable: bool,
    disk: Arc<LocalDisk>,
    guest: Arc<GuestState>,
    workers: Vec<Mailbox>,
    queue_size: u16,
    features: u64,
    /// Whether writes are cached until the guest flushes them.
    cached: bool,
    /// The hypervisor's dirty log. It is used while its feature is set.
    log: Option<Arc<DirtyLog>>,
    /// The ledgers that the hypervisor keeps.
    ledgers: Option<LedgerRegion>,
    map: Arc<GuestMap>,
    rings: Vec<Ring>,
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::ReqHandlerError(io::Error::other(error.to_string()))
}

impl Handler {
    pub(crate) fn new(
        id: ConnectionId,
        migratable: bool,
        (disk, guest): (Arc<LocalDisk>, Arc<GuestState>),
        workers: Vec<Mailbox>,
        queue_size: u16,
    ) -> Handler {
        let rings = workers.iter().map(|_| Ring { size: queue_size, ..Ring::default() }).collect();
        Handler {
            id,
            migratable,
            disk,
            guest,
            workers,
            queue_size,
            features: 0,
            cached: true,
            log: None,
            ledgers: None,
            map: Arc::default(),
            rings,
        }
    }

    fn offered(&self) -> u64 {
        config::features(self.disk.read_only, self.migratable)
    }

    fn runs(&self) -> bool {
        self.rings.iter().any(|ring| ring.running)
    }

    /// Tells the workers whether writes are cached. The hypervisor whose rings run decides that.
    fn apply_caching(&self) {
        self.guest.set_write_through(!self.cached);
    }

    /// Keeps the write cache off for a guest that has turned it off: the guest does not do so again
    /// when its hypervisor reconnects.
    fn inherit_caching(&mut self, used: u16) {
        if used != 0 && !self.runs() && self.guest.is_write_through() {
            self.cached = false;
        }
    }

    /// Uses the dirty log while there is one and its feature is set.
    fn apply_log(&mut self) {
        let wanted = self.features & VhostUserVirtioFeatures::LOG_ALL.bits() != 0;
        let log = self.log.clone().filter(|_| wanted);
        if log.is_some() || self.map.is_logged() {
            self.replace_map(self.map.with_log(log));
        }
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        self.rings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    /// Starts the ring if it has everything it needs.
    fn update(&mut self, index: usize) -> Result<()> {
        let ring = &self.rings[index];
        let (Some(addresses), Some(kick), true, false) =
            (ring.addresses, &ring.kick, ring.enabled, ring.running)
        else {
            return Ok(());
        };
        if !self.guest.acquire_rings(self.id) {
            let reason = "another hypervisor runs this disk; stop its guest, or migrate it";
            tracing::error!("{reason}");
            return Err(failed(reason));
        }
        let kick = kick.try_clone().map_err(failed)?;
        let call = ring.call.as_ref().map(File::try_clone).transpose().map_err(failed)?;
        let mut queue = self.queue(index, addresses)?;
        let (ledger, heads) = self.ledger(index, &mut queue)?;
        let resubmit = chains(&queue, self.map.memory(), &heads).map_err(failed)?;
        if !resubmit.is_empty() {
            tracing::info!(
                index,
                requests = resubmit.len(),
                "serving requests that were in flight"
            );
        }
        self.inherit_caching(queue.next_used());
        self.apply_caching();
        self.guest.add_known_ring(index);
        let setup = QueueSetup { queue, map: self.map.clone(), kick, call, ledger, resubmit };
        self.workers[index].send(Command::Start(Box::new(setup)));
        self.rings[index].running = true;
        self.guest.queue_started();
        Ok(())
    }

    /// Builds the queue of a ring, and checks everything that the hypervisor says about it.
    fn queue(&self, index: usize, addresses: UserRingAddresses) -> Result<Queue> {
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
        self.check_known(index, used.0)?;
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
        let kept = self.ledgers.as_ref().and_then(|region| region.ledger(index, size));
        let (ledger, heads) = match kept {
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
    fn check_known(&self, index: usize, used: u16) -> Result<()> {
        if self.guest.knows_ring(index) || (used == 0 && self.rings[index].next_avail == 0) {
            return Ok(());
        }
        let reason = "the guest was running before this process started, but the mirror was not \
                      stopped cleanly and may lack data that the guest wrote; restart the guest, or \
                      start it from a snapshot";
        tracing::error!(index, used, "{reason}");
        Err(failed(reason))
    }

    /// Stops a ring after every request that was popped is completed.
    fn stop(&mut self, index: usize) {
        self.halt(index..index + 1, ParkedRequests::Finish);
        self.release_if_idle();
    }

    /// Stops all rings. If the connection has ended, parked requests are left to the next one.
    pub(crate) fn stop_all(&mut self, waiting: ParkedRequests) {
        self.halt(0..self.rings.len(), waiting);
        self.release_if_idle();
    }

    /// Lets another hypervisor run the disk if no ring of this one runs.
    fn release_if_idle(&self) {
        if !self.runs() {
            self.guest.release_rings(self.id);
        }
    }

    /// Stops a ring, applies `change`, and starts the ring again if it ran and still can.
    fn around_stop(
        &mut self,
        index: usize,
        change: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.halt(index..index + 1, ParkedRequests::Finish);
        let result = change(self).and_then(|()| self.update(index));
        self.release_if_idle();
        result
    }

    /// Stops several rings at the same time.
    fn halt(&mut self, indices: Range<usize>, waiting: ParkedRequests) {
        let mut answers = Vec::new();
        for index in indices {
            if std::mem::take(&mut self.rings[index].running) {
                self.guest.queue_stopped();
                let (reply, answer) = mpsc::channel();
                self.workers[index].send(Command::Stop(waiting, reply));
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

    /// Replaces the guest's memory while nothing is in flight.
    fn replace_map(&mut self, map: GuestMap) {
        // Other workers may serve another hypervisor.
        let own = self.workers.iter().zip(&self.rings).filter(|(_, ring)| ring.running);
        let own: Vec<_> = own.map(|(worker, _)| worker).collect();
        let pause = |worker: &&Mailbox| {
            let (reply, answer) = mpsc::channel();
            worker.send(Command::Pause(reply));
            answer
        };
        for answer in own.iter().map(pause).collect::<Vec<_>>() {
            // As in `stop`.
            let _ = answer.recv();
        }
        tracing::debug!(bytes = map.len(), "guest memory");
        self.map = Arc::new(map);
        for worker in own {
            worker.send(Command::Resume(self.map.clone()));
        }
    }
}
