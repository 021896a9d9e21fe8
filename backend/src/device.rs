//! One disk: everything that its threads share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cairn_agent::Stats;
use cairn_store::{Attachment, ChunkIndex, Geometry, Repository};

use crate::commit::Commits;
use crate::fetch::Fetcher;
use crate::flush::Flusher;
use crate::mirror::Mirror;
use crate::mirror::copies::Arena;
use crate::mirror::disk::DiskFile;

/// Bytes of the serial number that a guest can ask for.
pub(crate) const SERIAL: usize = 20;

/// Bytes of bounce buffers at the same time.
const BOUNCE: usize = 64 << 20;

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
    pub(crate) stats: Counters,
    pub(crate) connected: AtomicBool,
    /// The virtqueues, a bit each, that may be in use when they are started: those that this process
    /// has started before, or all if the mirror was stopped cleanly.
    pub(crate) known_rings: AtomicU64,
    trouble: Mutex<Option<String>>,
}

/// The parts that [`Device::new`] puts together.
pub(crate) struct Parts {
    pub(crate) mirror: Mirror,
    pub(crate) disk: DiskFile,
    pub(crate) preserve: DiskFile,
    pub(crate) repository: Repository,
    pub(crate) attachment: Attachment,
    pub(crate) geometry: Geometry,
    pub(crate) read_only: bool,
    pub(crate) flusher: Flusher,
    pub(crate) commits: Commits,
    /// Whether a guest that was running before this process started may go on.
    pub(crate) resumable: bool,
}

impl Device {
    pub(crate) fn new(parts: Parts) -> Device {
        let mut serial = [0; SERIAL];
        let name = format!("cairn-{}", parts.attachment.image());
        let len = name.len().min(SERIAL);
        serial[..len].copy_from_slice(&name.as_bytes()[..len]);
        Device {
            mirror: parts.mirror,
            disk: parts.disk,
            preserve: parts.preserve,
            repository: parts.repository,
            attachment: parts.attachment,
            geometry: parts.geometry,
            read_only: parts.read_only,
            serial,
            bounce: Arena::new(BOUNCE),
            fetcher: Fetcher::default(),
            flusher: parts.flusher,
            commits: parts.commits,
            stats: Counters::default(),
            connected: AtomicBool::new(false),
            known_rings: AtomicU64::new(if parts.resumable { u64::MAX } else { 0 }),
            trouble: Mutex::new(None),
        }
    }

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

macro_rules! counters {
    ($($name:ident),+ $(,)?) => {
        /// Counters since the start.
        #[derive(Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64),+
        }

        impl Counters {
            /// Their values at about the same moment.
            pub(crate) fn read(&self) -> Stats {
                Stats { $($name: self.$name.load(Ordering::Relaxed)),+ }
            }
        }
    };
}

counters!(
    reads,
    writes,
    flushes,
    discards,
    errors,
    read_bytes,
    written_bytes,
    fetched_chunks,
    fetched_bytes,
    fetch_errors,
    copies,
    copied_bytes,
    spilled,
    parked,
    checkpoints,
    stable,
    failed,
);
