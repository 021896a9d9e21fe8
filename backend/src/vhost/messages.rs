//! The handlers of the hypervisor's messages.

use std::fs::File;
use std::io;
use std::sync::Arc;

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_bindings::bindings::virtio_blk::VIRTIO_BLK_F_CONFIG_WCE;

use super::rings::{Ring, RingState, UserRingAddresses};
use super::{Caching, Handler, MAX_MEMORY_SLOTS, config, failed, refused, skip_drain};
use crate::guest::ledger::LedgerRegion;
use crate::memory::{DirtyLog, UserRange, check_total, map_region};
use crate::sys;
use crate::worker::{Command, ParkedRequests};

fn unsupported<T>(what: &'static str) -> Result<T> {
    Err(Error::InvalidOperation(what))
}

impl Handler {
    /// Returns a descriptor for a kick or an interrupt. It must be an event descriptor: others are
    /// always ready, take as long to close as the hypervisor likes, or keep the connection open.
    fn event(&self, file: Option<File>) -> Result<Option<File>> {
        let Some(file) = file else { return Ok(None) };
        let refusal = match sys::is_event(&file) {
            Ok(true) => return Ok(Some(file)),
            Ok(false) => failed("kicks and interrupts need event descriptors"),
            Err(error) => failed(error),
        };
        self.closer.close(file);
        Err(refusal)
    }

    /// Checks that ledgers are for queues that this device can have.
    fn check_ledgers(&self, ledgers: &VhostUserInflight) -> Result<()> {
        let has_queues = usize::from(ledgers.num_queues) <= self.rings.len();
        match has_queues && ledgers.queue_size <= self.queue_size {
            true => Ok(()),
            false => Err(Error::InvalidParam),
        }
    }

    /// Calls `use_it` with a file of the hypervisor, and closes the file.
    fn with_file<T>(&mut self, file: File, use_it: impl FnOnce(&mut Self, &File) -> T) -> T {
        let result = use_it(self, &file);
        self.closer.close(file);
        result
    }
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
        self.log = None;
        self.ledgers = None;
        self.apply_log()
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
            self.apply_log()?;
        }
        if self.runs() {
            self.apply_caching();
        }
        // Without the protocol features no message enables a ring.
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
        let map = |(region, file): (&VhostUserMemoryRegion, &File)| {
            let range = UserRange {
                user: region.user_addr,
                guest: region.guest_phys_addr,
                len: region.memory_size,
            };
            map_region(range, file, region.mmap_offset)
        };
        let mapped = check_total(regions.iter().map(|region| region.memory_size))
            .and_then(|()| regions.iter().zip(&files).map(map).collect::<io::Result<_>>());
        files.into_iter().for_each(|file| self.closer.close(file));
        self.replace_map(mapped.map_err(failed)?).map(|()| None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let max = u32::from(self.queue_size);
        let ring = self.ring(index)?;
        if ring.state == RingState::Running || num == 0 || num > max || !num.is_power_of_two() {
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
        match self.rings[index].state {
            // QEMU repeats the addresses when a guest begins to migrate.
            RingState::Running if self.rings[index].addresses == Some(addresses) => Ok(()),
            RingState::Running => self.around_stop(index, change),
            RingState::Suspended | RingState::Stopped => change(self),
        }
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let ring = self.ring(index)?;
        if ring.state == RingState::Running {
            return Err(Error::InvalidOperation("the ring is running"));
        }
        ring.next_avail = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        // A hypervisor that wants requests to stay in flight has a message of its own for that, if
        // it knows of it.
        let parked = match self.protocol_features.contains(skip_drain::FEATURE) {
            true => ParkedRequests::Finish,
            false => self.parked_requests(index),
        };
        let base = self.stop(index, parked)?;
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let file = self.event(file)?;
        self.ring(u32::from(index))?;
        let index = usize::from(index);
        self.around_stop(index, |handler| {
            handler.rings[index].kick = file;
            Ok(())
        })
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let file = self.event(file)?;
        if self.ring(u32::from(index))?.state == RingState::Running {
            let copy = file.as_ref().map(File::try_clone).transpose().map_err(failed)?;
            self.workers[usize::from(index)].send(Command::SetCall(copy));
        }
        self.ring(u32::from(index))?.call = file;
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        // Errors are not reported in this way.
        if let Some(file) = file {
            self.closer.close(file);
        }
        self.ring(u32::from(index)).map(drop)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        let mut features = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE
            // The channel is kept in `ConfigChannels`.
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::GET_VRING_BASE_INFLIGHT
            | skip_drain::FEATURE;
        features.set(VhostUserProtocolFeatures::LOG_SHMFD, self.migratable);
        Ok(features)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.protocol_features = VhostUserProtocolFeatures::from_bits_retain(features);
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
            self.disable(index as usize, self.parked_requests(index));
            Ok(())
        }
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        // QEMU answers a message of the device with a read, and takes over only the capacity.
        self.caching.is_known |= !self.guest.config_channels.was_notified(self.id);
        let queues = self.rings.len() as u16;
        let layout = self.disk.mirror.layout();
        let config = config::space(&layout, queues, self.queue_size, self.shows_cache());
        let end = offset.checked_add(size).ok_or(Error::InvalidParam)? as usize;
        config.get(offset as usize..end).map(<[u8]>::to_vec).ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        // While no ring runs, the features may be those of an earlier driver.
        let features = if self.runs() { self.features } else { self.offered() };
        match (offset, bytes) {
            (config::WRITEBACK_OFFSET, [cached @ (0 | 1)])
                if features & 1 << VIRTIO_BLK_F_CONFIG_WCE != 0 =>
            {
                let turned_off = *cached == 0;
                self.caching = Caching { turned_off, was_turned_off: false, is_known: true };
                if self.runs() {
                    self.apply_caching();
                }
                Ok(())
            }
            // The guest chooses the bytes, and must not lose its disk.
            _ => Err(refused("only the caching mode can be written, as 0 or 1")),
        }
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_MEMORY_SLOTS as u64)
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
        let region = self.with_file(file, |handler, file| {
            check_total([handler.map.len(), range.len])?;
            map_region(range, file, region.mmap_offset)
        });
        self.replace_map(self.map.regions_with(region.map_err(failed)?)).map(|()| None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let (guest, len) = (region.guest_phys_addr, region.memory_size);
        self.replace_map(self.map.regions_without(guest, len).map_err(failed)?)
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        self.check_ledgers(wanted)?;
        let (queues, entries) = (wanted.num_queues, wanted.queue_size);
        let len = LedgerRegion::len(usize::from(queues), entries);
        let file = sys::shared_memory(len).map_err(failed)?;
        Ok((VhostUserInflight::new(len, 0, queues, entries), file))
    }

    fn set_inflight_fd(&mut self, kept: &VhostUserInflight, file: File) -> Result<()> {
        self.with_file(file, |handler, file| {
            if handler.runs() {
                return Err(Error::InvalidOperation("a ring is running"));
            }
            handler.check_ledgers(kept)?;
            let (queues, entries) = (usize::from(kept.num_queues), kept.queue_size);
            let region = LedgerRegion::map_shared(file, kept.mmap_offset, queues, entries);
            handler.ledgers = Some(region.map_err(failed)?);
            Ok(())
        })
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let log = self
            .with_file(file, |_, file| DirtyLog::new(file, log.mmap_offset, log.mmap_size))
            .map_err(failed)?;
        self.log = Some(Arc::new(log));
        self.apply_log()
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
        file: File,
    ) -> Result<Option<File>> {
        self.closer.close(file);
        unsupported("device state was not offered")
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported("device state was not offered")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported("shared memory regions were not offered")
    }
}
