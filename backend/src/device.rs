//! One disk: everything that its threads share.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use cairn_store::{Attachment, ChunkIndex, Geometry, ImageName, Repository};

use crate::commit::Commits;
use crate::commit::pace::Pace;
use crate::counters::Counters;
use crate::fetch::Fetcher;
use crate::flush::Flusher;
use crate::mirror::Mirror;
use crate::mirror::copies::Arena;
use crate::mirror::disk::DiskFile;
use crate::mirror::live::Flags;
use crate::vhost::owner::Ownership;
use crate::worker::ledger::OwnLedgers;

/// Bytes of the serial number that a guest can ask for.
const SERIAL: usize = 20;

/// The serial number of an image's disk: its name, as far as it fits.
pub(crate) fn serial(image: &ImageName) -> [u8; SERIAL] {
    let mut serial = [0; SERIAL];
    for (to, from) in serial.iter_mut().zip(format!("cairn-{image}").bytes()) {
        *to = from;
    }
    serial
}

/// Bytes of bounce buffers at the same time.
pub(crate) const BOUNCE: usize = 64 << 20;

/// A disk in operation.
pub(crate) struct Device {
    pub(crate) mirror: Mirror,
    pub(crate) disk: DiskFile,
    /// Takes copies when memory is short.
    pub(crate) preserve: DiskFile,
    pub(crate) repository: Repository,
    pub(crate) attachment: Attachment,
    pub(crate) geometry: Geometry,
    pub(crate) read_only: bool,
    pub(crate) serial: [u8; SERIAL],
    /// Memory between unaligned requests and the disk.
    pub(crate) bounce: Arc<Arena>,
    pub(crate) fetcher: Fetcher,
    pub(crate) flusher: Flusher,
    pub(crate) commits: Commits,
    pub(crate) pace: Pace,
    pub(crate) stats: Counters,
    /// Hypervisors that are connected.
    pub(crate) connected: AtomicUsize,
    /// Which of them runs the virtqueues.
    pub(crate) owner: Ownership,
    /// Virtqueues that run.
    pub(crate) running: AtomicUsize,
    /// What is known of the guest.
    pub(crate) flags: Flags,
    /// Requests in flight, for hypervisors that keep no record of them.
    pub(crate) ledgers: OwnLedgers,
    /// Why no checkpoint can be taken any more, if so.
    pub(crate) trouble: Mutex<Option<String>>,
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
        self.trouble.lock().expect("no code panics with this lock held").get_or_insert(reason);
    }

    /// Why no checkpoint can be taken, if so.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.trouble.lock().expect("no code panics with this lock held").clone()
    }

    /// `image@number`.
    pub(crate) fn snapshot_name(&self, number: u64) -> String {
        format!("{}@{number}", self.attachment.image())
    }
}
