//! Grows the disk while it runs.
//!
//! The catalog says how large an image is. A writer learns of that when it renews its lease, and when
//! an operator asks for it on the control socket. The disk then grows in these steps:
//!
//! | step | if the step fails, or the process or the host dies after it |
//! |---|---|
//! | the last block becomes present, if the old end is inside of it | it is an ordinary block |
//! | the live directory, the map and the data file get room | the room is not used; the next try finds it |
//! | the map says durably that the disk has the new size | the next process starts with the new size |
//! | the workers learn of the new size | the guest may use it; writes and flushes are as before |
//! | the hypervisors learn of it | a hypervisor is told when its first ring starts |
//!
//! Blocks behind the old end are absent, or present as zeros. The parent snapshot has no content
//! there: a chunk that a smaller tree does not cover is a hole, and the part of a chunk behind the
//! end of a disk is zeros.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use crate::fetch::Fetcher;
use crate::flush::Flusher;
use crate::guest::GuestState;
use crate::image::Image;
use crate::local_disk::LocalDisk;
use crate::mirror::files::live_dir::LiveState;
use crate::mirror::layout::{BLOCK_BYTES, Layout};

/// How long the last block may take to become present.
const LAST_BLOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is checked.
const LAST_BLOCK_POLL: Duration = Duration::from_millis(10);

/// Why a disk did not grow. It goes on with the size that it has.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GrowError {
    #[error("the disk is read-only, so it keeps the size of its snapshot")]
    ReadOnly,
    #[error("the disk's process is stopping; try again later")]
    Stopping,
    #[error(
        "the mirror was made for a disk of at most {capacity} bytes, and the image has {size}; take \
         a checkpoint, stop the guest, and start the disk in another directory"
    )]
    Capacity { size: u64, capacity: u64 },
    #[error(
        "the last block of the disk cannot be fetched; try again when the repository can be read"
    )]
    LastBlock,
    #[error("{doing}: {source}")]
    Mirror { doing: &'static str, source: io::Error },
    #[error(transparent)]
    Catalog(#[from] cairn_store::Error),
}

/// Grows the disk to the size of its image.
pub(crate) struct Grower {
    disk: Arc<LocalDisk>,
    image: Arc<Image>,
    flusher: Arc<Flusher>,
    fetcher: Arc<Fetcher>,
    guest: Arc<GuestState>,
    live: LiveState,
    /// Held while the disk grows. Whether the map is about to be closed, so that nothing may grow.
    is_closed: Mutex<bool>,
}

impl Grower {
    pub(crate) fn new(
        (disk, image, guest): (Arc<LocalDisk>, Arc<Image>, Arc<GuestState>),
        (flusher, fetcher): (Arc<Flusher>, Arc<Fetcher>),
        live: LiveState,
    ) -> Grower {
        let is_closed = Mutex::new(false);
        Grower { disk, image, flusher, fetcher, guest, live, is_closed }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_closed.lock().expect("no code panics while the disk grows")
    }

    /// Renews the lease, and grows the disk to the size of the image. Returns the size.
    pub(crate) fn follow_image(&self) -> Result<u64, GrowError> {
        if self.disk.read_only {
            return Err(GrowError::ReadOnly);
        }
        self.grow(self.image.attachment.renew()?)
    }

    /// Grows the disk to `size` bytes, unless it is as large already. Returns the size that it has.
    pub(crate) fn grow(&self, size: u64) -> Result<u64, GrowError> {
        let is_closed = self.lock();
        let before = self.disk.mirror.layout();
        if size <= before.size() {
            return Ok(before.size());
        }
        if *is_closed {
            return Err(GrowError::Stopping);
        }
        let capacity = before.capacity();
        if size > capacity {
            return Err(GrowError::Capacity { size, capacity });
        }
        let after = before.with_size(size);
        self.fetch_last_block(&before)?;
        let failed = |doing| move |source| GrowError::Mirror { doing, source };
        self.live.make_room(&after).map_err(failed("making room in the live directory"))?;
        self.disk.mirror.make_room(&after).map_err(failed("making room in the live directory"))?;
        self.flusher.record_growth(&after).map_err(failed("growing the mirror's files"))?;
        // Before the workers: a fetch may be behind the old end.
        self.image.attachment.grow(size)?;
        self.disk.mirror.grow(&after);
        tracing::info!(before = before.size(), size, "the disk has grown");
        self.guest.config_channels.notify_all();
        Ok(size)
    }

    /// Lets nothing grow any more.
    pub(crate) fn close(&self) {
        *self.lock() = true;
    }

    /// Makes the block present that the end of the disk cuts off. A write up to the old end counts as
    /// a write of the whole block; behind the new end it does not.
    fn fetch_last_block(&self, layout: &Layout) -> Result<(), GrowError> {
        let block = layout.size() / BLOCK_BYTES;
        if layout.size().is_multiple_of(BLOCK_BYTES) {
            return Ok(());
        }
        let deadline = Instant::now() + LAST_BLOCK_TIMEOUT;
        while !self.disk.mirror.presence().get(block) {
            let is_requested = self.fetcher.request(layout.chunk_of(block));
            if !is_requested || Instant::now() > deadline {
                return Err(GrowError::LastBlock);
            }
            thread::sleep(LAST_BLOCK_POLL);
        }
        Ok(())
    }
}
