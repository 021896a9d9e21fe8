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

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

use vhost::vhost_user::message::VhostUserVirtioFeatures;
use vhost::vhost_user::{Error, Result};
use virtio_bindings::bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Address, Bytes};

use crate::guest::ledger::{GuestRingAddresses, Ledger, LedgerRegion, RingIndices};
use crate::guest::ring_ownership::ConnectionId;
use crate::guest::{CachingMode, GuestState};
use crate::local_disk::LocalDisk;
use crate::memory::{DirtyLog, GuestMap, Region};
use crate::worker::queue::QueueSetup;
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

/// What a connection knows of the guest's write cache.
///
/// A guest that has turned off its write cache never flushes. So forgetting that loses data, while
/// write-through for a guest that flushes is only slow. These rules follow:
///
/// - A driver that has not negotiated FLUSH gets write-through.
/// - A mode that the guest writes holds for the connection, across resets of the device: QEMU shows
///   the next driver the mode that was last written, and never reads it from the device again.
/// - A hypervisor that connects again does not repeat the mode. If the guest goes on, the cache
///   stays off. A guest goes on if any of its rings was used, or if the hypervisor has a ledger of
///   it. Hypervisors drop the ledger when the guest resets.
/// - QEMU and Cloud Hypervisor describe all rings before they enable the first one, so all rings
///   are asked when the first one starts. For others, a ring that starts later and was used turns
///   the cache off again.
/// - A guest of another hypervisor process begins with unused rings, and with a write cache.
///
/// A guest without a ledger that turned off the cache and has never sent a request looks like a
/// new one.
#[derive(Default)]
struct Caching {
    /// Whether the guest has turned off the write cache, on this connection or before.
    turned_off: bool,
    /// Whether the cache was off before the first ring of this connection started.
    was_turned_off: bool,
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
    caching: Caching,
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
            caching: Caching::default(),
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

    /// Whether writes are cached until the guest flushes them. Before the driver has negotiated
    /// features this is what it will find if it can flush.
    fn cached(&self) -> bool {
        let can_flush = self.features & 1 << VIRTIO_BLK_F_FLUSH != 0;
        !self.caching.turned_off && (can_flush || self.features == 0)
    }

    /// Tells the workers whether writes are cached. The hypervisor whose rings run decides that.
    fn apply_caching(&self) {
        self.guest.set_caching(match (self.cached(), self.caching.turned_off) {
            (true, _) => CachingMode::WriteBack,
            (false, true) => CachingMode::TurnedOff,
            (false, false) => CachingMode::CannotFlush,
        });
    }

    /// Keeps the write cache off for a guest that has turned it off and goes on. See [`Caching`].
    fn inherit_caching(&mut self) {
        if !self.runs() {
            self.caching.was_turned_off = self.guest.caching() == CachingMode::TurnedOff;
        }
        if self.caching.was_turned_off && (0..self.rings.len()).any(|index| self.goes_on(index)) {
            self.caching.turned_off = true;
        }
    }

    /// Whether the guest goes on that another connection or process has served, as far as this ring
    /// tells: the ring was used, or the hypervisor has a ledger of it.
    fn goes_on(&self, index: usize) -> bool {
        let ring = &self.rings[index];
        let has_ledger = || {
            let ledger = self.ledgers.as_ref().and_then(|region| region.ledger(index, ring.size));
            ledger.is_some_and(|ledger| ledger.is_initialised())
        };
        ring.addresses.is_some_and(|addresses| self.was_used(index, addresses) || has_ledger())
    }

    /// Whether a chain was ever returned on a ring. A used index of 0 does not tell: it wraps around
    /// after 65536 chains. But by then the last entry of the used ring was written, and a driver
    /// begins with rings that are zero.
    fn was_used(&self, index: usize, addresses: UserRingAddresses) -> bool {
        let Ring { size, next_avail, .. } = self.rings[index];
        let memory = self.map.memory();
        let read = |offset| -> Option<u64> {
            let address = self.map.guest_address(addresses.used)?.checked_add(offset)?;
            memory.read_obj(address).ok()
        };
        // Flags and index come first. Then there are entries of eight bytes.
        let used_index = read(0).map_or(0, |word| u64::from_le(word) >> 16 & 0xffff);
        let last_entry = read(4 + 8 * (u64::from(size) - 1)).unwrap_or(0);
        next_avail != 0 || used_index != 0 || last_entry != 0
    }

    /// The dirty log, if there is one and its feature is set.
    fn wanted_log(&self) -> Option<Arc<DirtyLog>> {
        let wanted = self.features & VhostUserVirtioFeatures::LOG_ALL.bits() != 0;
        self.log.clone().filter(|_| wanted)
    }

    /// Uses another dirty log, or none.
    fn apply_log(&mut self) -> Result<()> {
        match self.wanted_log().is_some() || self.map.is_logged() {
            true => self.replace_map(self.map.regions()),
            false => Ok(()),
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
        let setup = QueueSetup { queue, map: self.map.clone(), kick, call, ledger, resubmit };
        // A hypervisor that connects again may know an old size. QEMU reads the configuration again
        // only if a ring has started.
        if !self.runs() {
            self.guest.config_channels.notify(self.id);
        }
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

    /// Replaces the guest's memory while nothing is in flight. No ring sees a map without the dirty
    /// log that is wanted: a page that changes unlogged is lost in the migration.
    fn replace_map(&mut self, regions: Vec<Region>) -> Result<()> {
        let map = GuestMap::new(regions, self.wanted_log()).map_err(failed)?;
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
        Ok(())
    }
}
