//! The vhost-user side: what the hypervisor says, turned into commands for the queue workers.
//!
//! A ring runs while it has memory, addresses and a kick descriptor and is enabled. Any message that
//! takes one of these away stops it first; a stop answers when every request that was popped is
//! completed. Memory changes only pause the rings: what waits for a fetch goes on waiting, so a
//! dead repository never blocks the hypervisor.
//!
//! A ring of a guest that another process served begins with the requests that were in flight there; see
//! `worker::ledger`.

mod config;
pub(crate) mod server;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH};
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};

use crate::guest::GuestState;
use crate::guest::ledger::{GuestRingAddresses, Ledger, LedgerRegion, RingIndices};
use crate::guest::ring_ownership::ConnectionId;
use crate::local_disk::LocalDisk;
use crate::memory::{DirtyLog, GuestMap, UserRange, map_region};
use crate::sys;
use crate::worker::queue::{QueueSetup, chains};
use crate::worker::{Command, Mailbox, ParkedRequests};

/// Memory slots, as many as KVM guests use.
const MAX_MEMORY_SLOTS: u64 = 509;

/// Where a ring lies, in the hypervisor's addresses.
#[derive(Clone, Copy)]
struct UserRingAddresses {
    descriptors: u64,
    available: u64,
    used: u64,
}

/// One virtqueue as the messages describe it.
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
    /// Whether another hypervisor can connect, to take the guest over.
    migratable: bool,
    disk: Arc<LocalDisk>,
    guest: Arc<GuestState>,
    workers: Vec<Mailbox>,
    queue_size: u16,
    features: u64,
    /// Whether writes are cached until the guest flushes them.
    cached: bool,
    /// The hypervisor's record of changed pages, used while the feature for it is set.
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

    /// Lets the workers know whether writes are cached. That is for the hypervisor to say whose rings
    /// run.
    fn apply_caching(&self) {
        self.guest.set_write_through(!self.cached);
    }

    /// A guest that turned the cache off does not say so again when its hypervisor connects anew.
    fn inherit_caching(&mut self, used: u16) {
        if used != 0 && !self.runs() && self.guest.is_write_through() {
            self.cached = false;
        }
    }

    /// Uses the record of changed pages while there is one and it is wanted.
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

    /// Starts the ring if it has all it needs.
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
            tracing::info!(index, requests = resubmit.len(), "finishing what was in flight");
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

    /// Checks everything that a ring says about itself.
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

    /// The ring's ledger, and the chains that a process before this one had popped and not returned. The
    /// next chain to pop is behind those, whatever the hypervisor says: it cannot know them.
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

    /// Refuses a guest that was running before this process started, if the mirror was left uncleanly:
    /// it would read old data as if nothing had happened. A ring that this process sees for the first
    /// time must be unused then.
    fn check_known(&self, index: usize, used: u16) -> Result<()> {
        if self.guest.knows_ring(index) || (used == 0 && self.rings[index].next_avail == 0) {
            return Ok(());
        }
        let reason = "the guest was running before this process started, but the mirror was not \
                      stopped cleanly and may lack what that guest wrote; restart the guest, or start \
                      it from a snapshot";
        tracing::error!(index, used, "{reason}");
        Err(failed(reason))
    }

    /// Stops a ring after the last request that was popped is completed.
    fn stop(&mut self, index: usize) {
        self.halt(index..index + 1, ParkedRequests::Finish);
        self.release_if_idle();
    }

    /// Stops all rings. If the connection has ended, requests that wait are left to the next one.
    pub(crate) fn stop_all(&mut self, waiting: ParkedRequests) {
        self.halt(0..self.rings.len(), waiting);
        self.release_if_idle();
    }

    /// Lets another hypervisor run the disk when no ring of this one does.
    fn release_if_idle(&self) {
        if !self.runs() {
            self.guest.release_rings(self.id);
        }
    }

    /// Stops a ring, lets `change` happen, and starts it again if it ran and still can.
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

    /// Stops rings, all at the same time.
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
            // A worker that is gone answers nothing; then nothing is in flight either.
            if let Ok(next_avail) = answer.recv() {
                self.rings[index].next_avail = next_avail;
            }
        }
    }

    /// Exchanges the guest's memory while nothing is submitted.
    fn replace_map(&mut self, map: GuestMap) {
        // The other workers may serve another hypervisor.
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

fn unsupported<T>(what: &'static str) -> Result<T> {
    Err(Error::InvalidOperation(what))
}

impl VhostUserBackendReqHandlerMut for Handler {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all(ParkedRequests::Finish);
        for ring in &mut self.rings {
            *ring = Ring { size: self.queue_size, ..Ring::default() };
        }
        self.features = 0;
        self.cached = true;
        self.log = None;
        self.ledgers = None;
        self.apply_log();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.offered() != 0 {
            return Err(Error::InvalidParam);
        }
        let before = std::mem::replace(&mut self.features, features);
        let changed = |bit: u64| (before ^ features) & bit != 0;
        if changed(VhostUserVirtioFeatures::LOG_ALL.bits()) {
            self.apply_log();
        }
        // A driver that never flushes relies on what it wrote.
        let flushes = 1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_CONFIG_WCE;
        if features & flushes == 0 {
            self.cached = false;
        } else if changed(flushes) {
            self.cached = true;
        }
        // Without the protocol features there is no message that enables a ring.
        if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            for index in 0..self.rings.len() {
                self.rings[index].enabled = true;
                self.update(index)?;
            }
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let regions = regions
            .iter()
            .zip(files)
            .map(|(region, file)| {
                let range = UserRange {
                    user: region.user_addr,
                    guest: region.guest_phys_addr,
                    len: region.memory_size,
                };
                map_region(range, file, region.mmap_offset)
            })
            .collect::<io::Result<_>>()
            .map_err(failed)?;
        self.replace_map(GuestMap::new(regions).map_err(failed)?);
        self.apply_log();
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let max = u32::from(self.queue_size);
        let ring = self.ring(index)?;
        if ring.running || num == 0 || num > max || !num.is_power_of_two() {
            return Err(Error::InvalidParam);
        }
        ring.size = num as u16;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.ring(index)?;
        let index = index as usize;
        let addresses = UserRingAddresses { descriptors: descriptor, available, used };
        let change = |handler: &mut Self| {
            handler.queue(index, addresses)?;
            handler.rings[index].addresses = Some(addresses);
            Ok(())
        };
        // A ring that waited only for its addresses starts with the next kick descriptor.
        match self.rings[index].running {
            true => self.around_stop(index, change),
            false => change(self),
        }
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let ring = self.ring(index)?;
        if ring.running {
            return Err(Error::InvalidOperation("the ring is running"));
        }
        ring.next_avail = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.ring(index)?;
        self.stop(index as usize);
        let ring = self.ring(index)?;
        // A stopped ring starts again with the next kick descriptor.
        ring.kick = None;
        ring.call = None;
        Ok(VhostUserVringState::new(index, u32::from(ring.next_avail)))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.ring(u32::from(index))?;
        let index = usize::from(index);
        self.around_stop(index, |handler| {
            handler.rings[index].kick = file;
            Ok(())
        })
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let running = self.ring(u32::from(index))?.running;
        if running {
            let copy = file.as_ref().map(File::try_clone).transpose().map_err(failed)?;
            self.workers[usize::from(index)].send(Command::SetCall(copy));
        }
        self.ring(u32::from(index))?.call = file;
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, _file: Option<File>) -> Result<()> {
        self.ring(u32::from(index)).map(drop)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        let mut features = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        features.set(VhostUserProtocolFeatures::LOG_SHMFD, self.migratable);
        Ok(features)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.ring(index)?.enabled = enable;
        if enable {
            self.update(index as usize)
        } else {
            self.stop(index as usize);
            Ok(())
        }
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let queues = self.rings.len() as u16;
        let layout = self.disk.mirror.layout();
        let config = config::space(layout, queues, self.queue_size, self.cached);
        let end = offset.checked_add(size).ok_or(Error::InvalidParam)? as usize;
        config.get(offset as usize..end).map(<[u8]>::to_vec).ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        match (offset, bytes) {
            (config::WRITEBACK_OFFSET, [cached @ (0 | 1)])
                if self.features & 1 << VIRTIO_BLK_F_CONFIG_WCE != 0 =>
            {
                self.cached = *cached == 1;
                if self.runs() {
                    self.apply_caching();
                }
                Ok(())
            }
            _ => unsupported("only the caching mode can be written, as 0 or 1"),
        }
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_MEMORY_SLOTS)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        let range = UserRange {
            user: region.user_addr,
            guest: region.guest_phys_addr,
            len: region.memory_size,
        };
        let region = map_region(range, file, region.mmap_offset).map_err(failed)?;
        self.replace_map(self.map.with(region).map_err(failed)?);
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let map = self.map.without(region.guest_phys_addr, region.memory_size).map_err(failed)?;
        self.replace_map(map);
        Ok(())
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, entries) = (wanted.num_queues, wanted.queue_size);
        if usize::from(queues) > self.rings.len() || entries > self.queue_size {
            return Err(Error::InvalidParam);
        }
        let len = LedgerRegion::len(usize::from(queues), entries);
        let file = sys::shared_memory(len).map_err(failed)?;
        Ok((VhostUserInflight::new(len, 0, queues, entries), file))
    }

    fn set_inflight_fd(&mut self, kept: &VhostUserInflight, file: File) -> Result<()> {
        if self.runs() {
            return Err(Error::InvalidOperation("a ring is running"));
        }
        let (queues, entries) = (usize::from(kept.num_queues), kept.queue_size);
        let region = LedgerRegion::map(&file, kept.mmap_offset, queues, entries).map_err(failed)?;
        self.ledgers = Some(region);
        Ok(())
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let log = DirtyLog::new(file, log.mmap_offset, log.mmap_size).map_err(failed)?;
        self.log = Some(Arc::new(log));
        self.apply_log();
        Ok(())
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        unsupported("not a display")
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        unsupported("shared objects were not offered")
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        unsupported("device state was not offered")
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported("device state was not offered")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported("shared memory regions were not offered")
    }
}
