//! One disk: everything that its threads share.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use cairn_store::{Attachment, ChunkIndex, Geometry, ImageName, Repository};

use crate::commit::Commits;
use crate::commit::throttle::CommitThrottle;
use crate::counters::Counters;
use crate::fetch::Fetcher;
use crate::flush::Flusher;
use crate::mirror::Mirror;
use crate::mirror::cow::buffer_pool::BufferPool;
use crate::mirror::files::disk_file::DiskFile;
use crate::mirror::files::live_dir::GuestFlags;
use crate::vhost::ring_ownership::RingOwnership;
use crate::worker::ledger::LedgerFile;

/// Bytes of the serial number that a guest can ask for.
const SERIAL_BYTES: usize = 20;

/// The serial number of an image's disk: its name, as far as it fits.
pub(crate) fn serial(image: &ImageName) -> [u8; SERIAL_BYTES] {
    let mut serial = [0; SERIAL_BYTES];
    for (to, from) in serial.iter_mut().zip(format!("cairn-{image}").bytes()) {
        *to = from;
    }
    serial
}

/// Bytes of bounce buffers at the same time.
pub(crate) const BOUNCE_BYTES: usize = 64 << 20;

/// A disk in operation.
pub(crate) struct Device {
    pub(crate) mirror: Mirror,
    pub(crate) disk: DiskFile,
    /// Takes copies when memory is short.
    pub(crate) spill: DiskFile,
    pub(crate) repository: Repository,
    pub(crate) attachment: Attachment,
    pub(crate) geometry: Geometry,
    pub(crate) read_only: bool,
    pub(crate) serial: [u8; SERIAL_BYTES],
    /// Memory between unaligned requests and the disk.
    pub(crate) bounce: Arc<BufferPool>,
    pub(crate) fetcher: Fetcher,
    pub(crate) flusher: Flusher,
    pub(crate) commits: Commits,
    pub(crate) throttle: CommitThrottle,
    pub(crate) stats: Counters,
    /// Hypervisors that are connected.
    pub(crate) connected: AtomicUsize,
    /// Which of them runs the virtqueues.
    pub(crate) owner: RingOwnership,
    /// Virtqueues that run.
    pub(crate) running: AtomicUsize,
    /// What is known of the guest.
    pub(crate) flags: GuestFlags,
    /// Requests in flight, for hypervisors that keep no record of them.
    pub(crate) ledgers: LedgerFile,
    /// Why no checkpoint can be taken any more, if so.
    pub(crate) poison: Mutex<Option<String>>,
}

impl Device {
    /// Reads a chunk of the parent snapshot; `false` if it is a hole.
    pub(crate) fn read_parent(
        &self,
        chunk: ChunkIndex,
        buffer: &mut [u8],
    ) -> cairn_store::Result<bool> {
        let (_, root) = self.attachment.parent();
        match self.repository.chunk_at(&root, self.geometry, chunk)? {
            Some(id) => self.repository.read_chunk(&id, buffer).map(|()| true),
            None => Ok(false),
        }
    }

    /// Notes that no checkpoint can be taken any more, and why. The first reason stays.
    pub(crate) fn poison(&self, reason: String) {
        self.poison.lock().expect("no code panics with this lock held").get_or_insert(reason);
    }

    /// Why no checkpoint can be taken, if so.
    pub(crate) fn poison_reason(&self) -> Option<String> {
        self.poison.lock().expect("no code panics with this lock held").clone()
    }

    /// `image@number`.
    pub(crate) fn snapshot_name(&self, number: u64) -> String {
        format!("{}@{number}", self.attachment.image())
    }
}
