//! The vhost-user side: turns the hypervisor's messages into commands for the queue workers.
//!
//! A ring runs while it has memory, addresses and a kick descriptor, and is enabled. A message that
//! takes one of these away stops the ring first. A stop ends when every request that was popped is
//! completed, or is left in flight as was negotiated: [`rings`] has the rules. A change of memory
//! only pauses the rings: requests that wait for a fetch go on waiting, so an unavailable
//! repository never blocks the hypervisor.
//!
//! The ring of a guest that another process served starts with the requests that were in flight
//! there. See [`ledger`](crate::guest::ledger).

mod config;
mod file_closer;
mod messages;
mod rings;
pub(crate) mod server;
mod skip_drain;

use std::io;
use std::sync::{Arc, mpsc};

use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::vhost_user::{Error, Result};
use virtio_bindings::bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use vm_memory::{Address, Bytes};

use self::file_closer::FileCloser;
use self::rings::{Ring, RingState, UserRingAddresses};
use crate::guest::ledger::LedgerRegion;
use crate::guest::ring_ownership::ConnectionId;
use crate::guest::{CachingMode, GuestState};
use crate::local_disk::LocalDisk;
use crate::memory::{DirtyLog, GuestMap, Region};
use crate::worker::{Command, Mailbox};

/// The number of memory slots, which is as many as KVM guests use.
const MAX_MEMORY_SLOTS: usize = 509;

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
/// - The next driver after a reboot finds the mode that its hypervisor shows. Hypervisors read it
///   when they make the device, and not when they connect again. So on a connection on which the
///   mode was neither read nor written, the cache stays off, too. A read after the device has sent
///   the message that its configuration has changed does not count: the hypervisor reads the whole
///   configuration then, and shows the guest only the new capacity.
/// - QEMU and Cloud Hypervisor describe all rings before they enable the first one, so all rings
///   are asked when the first one starts. For others, a ring that starts later and was used turns
///   the cache off again.
/// - A guest of another hypervisor process begins with unused rings, and with a write cache, which
///   its hypervisor has read from the configuration.
///
/// A guest without a ledger that turned off the cache and has never sent a request looks like a
/// new one.
#[derive(Default)]
struct Caching {
    /// Whether the guest has turned off the write cache, on this connection or before.
    turned_off: bool,
    /// Whether the cache was off before the first ring of this connection started.
    was_turned_off: bool,
    /// Whether the hypervisor has read or written the mode on this connection. A read that the device
    /// has asked for does not count.
    is_known: bool,
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
    protocol_features: VhostUserProtocolFeatures,
    caching: Caching,
    /// The hypervisor's dirty log. It is used while its feature is set.
    log: Option<Arc<DirtyLog>>,
    /// The ledgers that the hypervisor keeps.
    ledgers: Option<LedgerRegion>,
    map: Arc<GuestMap>,
    rings: Vec<Ring>,
    closer: FileCloser,
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::ReqHandlerError(io::Error::other(error.to_string()))
}

/// A message that is refused, and after which the connection goes on.
fn refused(reason: &str) -> Error {
    Error::ReqHandlerError(io::Error::new(io::ErrorKind::InvalidInput, reason))
}

/// Whether `error` is one of [`refused`].
fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::ReqHandlerError(error) if error.kind() == io::ErrorKind::InvalidInput)
}

impl Handler {
    fn new(
        id: ConnectionId,
        migratable: bool,
        (disk, guest): (Arc<LocalDisk>, Arc<GuestState>),
        workers: Vec<Mailbox>,
        queue_size: u16,
        closer: FileCloser,
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
            protocol_features: VhostUserProtocolFeatures::empty(),
            caching: Caching::default(),
            log: None,
            ledgers: None,
            map: Arc::default(),
            rings,
            closer,
        }
    }

    fn offered(&self) -> u64 {
        config::features(self.disk.read_only, self.migratable)
    }

    fn runs(&self) -> bool {
        self.rings.iter().any(|ring| ring.state == RingState::Running)
    }

    fn can_flush(&self) -> bool {
        self.features & 1 << VIRTIO_BLK_F_FLUSH != 0
    }

    /// The mode in the configuration: whether writes are cached until the guest flushes them.
    /// Before the driver has negotiated features this is what it will find if it can flush.
    fn shows_cache(&self) -> bool {
        !self.caching.turned_off && (self.can_flush() || self.features == 0)
    }

    /// Tells the workers whether writes are cached. The hypervisor whose rings run decides that.
    fn apply_caching(&self) {
        self.guest.set_caching(match (self.caching.turned_off, self.can_flush()) {
            (true, _) => CachingMode::TurnedOff,
            (false, true) => CachingMode::WriteBack,
            (false, false) => CachingMode::CannotFlush,
        });
    }

    /// Keeps the write cache off for a guest that has turned it off and goes on. See [`Caching`].
    fn inherit_caching(&mut self) {
        if !self.runs() {
            self.caching.was_turned_off = self.guest.caching() == CachingMode::TurnedOff;
        }
        let Caching { was_turned_off, is_known, .. } = self.caching;
        let goes_on = || (0..self.rings.len()).any(|index| self.goes_on(index));
        if was_turned_off && (!is_known || goes_on()) {
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

    /// Replaces the guest's memory while nothing is in flight. No ring sees a map without the dirty
    /// log that is wanted: a page that changes unlogged is lost in the migration.
    fn replace_map(&mut self, regions: Vec<Region>) -> Result<()> {
        if regions.len() > MAX_MEMORY_SLOTS {
            return Err(failed("there are more memory regions than slots"));
        }
        let map = GuestMap::new(regions, self.wanted_log()).map_err(failed)?;
        // Other workers may serve another hypervisor.
        let own = self
            .workers
            .iter()
            .zip(&self.rings)
            .filter(|(_, ring)| ring.state == RingState::Running);
        let own: Vec<_> = own.map(|(worker, _)| worker).collect();
        let pause = |worker: &&Mailbox| {
            let (reply, answer) = mpsc::channel();
            worker.send(Command::Pause(reply));
            answer
        };
        for answer in own.iter().map(pause).collect::<Vec<_>>() {
            // As in `halt`.
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
