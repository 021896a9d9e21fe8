//! What is known of the guest and its hypervisors, across connections and across processes.
//!
//! | module | is |
//! |---|---|
//! | [`ledger`] | the requests in flight, in shared memory |
//! | [`config_channels`] | telling hypervisors that the device's configuration has changed |
//! | [`ring_ownership`] | which hypervisor runs the virtqueues |

pub(crate) mod config_channels;
pub(crate) mod ledger;
pub(crate) mod ring_ownership;

use std::sync::atomic::{AtomicUsize, Ordering};

use self::config_channels::ConfigChannels;
use self::ledger::{GuestRingAddresses, Ledger, LedgerFile, RingIndices};
use self::ring_ownership::{ConnectionId, RingOwnership};
use crate::mirror::files::live_dir::GuestFlags;

/// The mode of the guest's write cache. The numbers are those of the live directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum CachingMode {
    /// A write is answered when it has landed.
    WriteBack = 0,
    /// The guest has turned off the cache: a write is answered when it is durable.
    TurnedOff = 1,
    /// The driver cannot flush, so the cache is off.
    CannotFlush = 2,
}

/// The guest's state. Connections and workers share it.
pub(crate) struct GuestState {
    flags: GuestFlags,
    /// The requests in flight, for hypervisors that keep no record of them.
    ledgers: LedgerFile,
    ownership: RingOwnership,
    pub(crate) config_channels: ConfigChannels,
    connections: AtomicUsize,
    running_queues: AtomicUsize,
}

impl GuestState {
    pub(crate) fn new(flags: GuestFlags, ledgers: LedgerFile) -> GuestState {
        GuestState {
            flags,
            ledgers,
            ownership: RingOwnership::default(),
            config_channels: ConfigChannels::default(),
            connections: AtomicUsize::new(0),
            running_queues: AtomicUsize::new(0),
        }
    }

    /// Whether a write is answered only when it is durable.
    pub(crate) fn is_write_through(&self) -> bool {
        self.flags.write_through().load(Ordering::Relaxed) != 0
    }

    /// The mode of the guest's write cache.
    pub(crate) fn caching(&self) -> CachingMode {
        match self.flags.write_through().load(Ordering::Relaxed) {
            0 => CachingMode::WriteBack,
            2 => CachingMode::CannotFlush,
            _ => CachingMode::TurnedOff,
        }
    }

    pub(crate) fn set_caching(&self, mode: CachingMode) {
        self.flags.write_through().store(mode as u64, Ordering::Relaxed);
    }

    /// Whether the ring with this index may be in use when it starts.
    pub(crate) fn knows_ring(&self, index: usize) -> bool {
        self.flags.known_rings().load(Ordering::SeqCst) & (1 << index) != 0
    }

    pub(crate) fn add_known_ring(&self, index: usize) {
        self.flags.known_rings().fetch_or(1 << index, Ordering::SeqCst);
    }

    /// Whether a guest that ran before may go on.
    pub(crate) fn knows_any_ring(&self) -> bool {
        self.flags.known_rings().load(Ordering::SeqCst) != 0
    }

    /// Whether the next process needs the live directory for the guest's sake: requests are in
    /// flight for a hypervisor that is away, or the guest has turned off the write cache.
    pub(crate) fn needs_live_dir(&self) -> bool {
        self.ledgers.is_in_use() || self.is_write_through()
    }

    /// This process's own ledger of a ring. See [`LedgerFile::resume`].
    pub(crate) fn resume_ledger(
        &self,
        queue: usize,
        size: u16,
        addresses: GuestRingAddresses,
        ring: RingIndices,
    ) -> Option<(Ledger, Option<Vec<u16>>)> {
        self.ledgers.resume(queue, size, addresses, ring)
    }

    /// Waits until no other connection runs a ring. Returns whether that happened in time.
    pub(crate) fn acquire_rings(&self, id: ConnectionId) -> bool {
        self.ownership.acquire(id)
    }

    /// Lets another connection run rings, if this one did.
    pub(crate) fn release_rings(&self, id: ConnectionId) {
        self.ownership.release(id);
    }

    pub(crate) fn queue_started(&self) {
        self.running_queues.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn queue_stopped(&self) {
        self.running_queues.fetch_sub(1, Ordering::Relaxed);
    }

    /// The number of virtqueues that run.
    pub(crate) fn running_queues(&self) -> usize {
        self.running_queues.load(Ordering::Relaxed)
    }

    pub(crate) fn connection_opened(&self) {
        self.connections.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn connection_closed(&self) {
        self.connections.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether a hypervisor is connected.
    pub(crate) fn is_connected(&self) -> bool {
        self.connections.load(Ordering::SeqCst) > 0
    }
}
