//! Makes accepted checkpoints stable (BlobCR, algorithm 3).
//!
//! One thread takes the checkpoints in order. First the chunks of a layer become durable
//! ([`store_layer`]). Then the tree is written and the snapshot is published, in one transaction.
//!
//! A process that is killed before the publication leaves garbage in the repository and a pending
//! snapshot in the catalog. The next process resumes the checkpoint. A checkpoint that fails leaves
//! a failed snapshot, and its changes go into the next checkpoint (see `EpochManager::give_up`). If
//! a later layer waits behind a failed one, the later one absorbs it: the later snapshot adds the
//! failed layer's chunks that it did not change itself.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{mem, thread};

use cairn_store::{ChunkIndex, ErrorKind, NewSnapshot, Snapshot, SnapshotCommit, SnapshotState};

use super::layer_changes::LayerChanges;
use super::store_layer::{buffer_pool, store_layer};
use super::throttle::CommitThrottle;
use super::{Commit, CommitState, Commits, Ending, NextCommit};
use crate::counters::Counters;
use crate::flush::Flusher;
use crate::image::Image;
use crate::local_disk::LocalDisk;
use crate::mirror::cow::buffer_pool::BufferPool;
use crate::mirror::epoch::layer::Layer;
use crate::mirror::files::data_sync::SYNC_FAILED;
use crate::sys;

/// How often an idle thread checks that snapshot numbers are reserved.
const REFILL_INTERVAL: Duration = Duration::from_secs(2);

/// The delay before the first retry. Each further delay is twice as long.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(100);

/// The longest delay between two tries.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);

/// How often a waiting thread checks whether it has to stop.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Why a snapshot did not become stable.
#[derive(Debug, thiserror::Error)]
pub(super) enum PersistError {
    #[error(transparent)]
    Repository(#[from] cairn_store::Error),
    #[error("reading the mirror: {0}")]
    Mirror(#[from] io::Error),
    #[error("reading copies back: {0}")]
    Spill(io::Error),
    #[error("{SYNC_FAILED}")]
    SyncFailed,
    #[error("recording what is stored: {0}")]
    Table(io::Error),
    #[error("recording in the map that a snapshot may be published: {0}")]
    Map(io::Error),
    #[error("{0}")]
    Layer(String),
    #[error(
        "the disk's process stopped before the snapshot was stable; its changes are kept and go \
         into the next one"
    )]
    Stopped,
    #[error("chunk {0} was left out, which is a defect of this program")]
    Incomplete(u64),
}

impl PersistError {
    /// Whether a retry may succeed.
    fn is_transient(&self) -> bool {
        match self {
            // A failed sync is reported only once, and it is unknown what was lost.
            PersistError::Repository(cairn_store::Error::Poisoned { .. }) => false,
            // The guest has changed these chunks since.
            PersistError::Repository(cairn_store::Error::ContentLost { .. }) => false,
            PersistError::Repository(error) => error.kind() == ErrorKind::Unavailable,
            PersistError::Table(_) | PersistError::Map(_) => true,
            _ => false,
        }
    }
}

/// A flag that ends persisting between two batches, and between two requests of the catalog.
#[derive(Clone, Default)]
pub(crate) struct Abort(Arc<AtomicBool>);

impl Abort {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    pub(super) fn check(&self) -> Result<(), PersistError> {
        if self.is_set() { Err(PersistError::Stopped) } else { Ok(()) }
    }
}

/// Makes checkpoints stable in a background thread.
pub(crate) struct Persister {
    pub(crate) commits: Arc<Commits>,
    pub(crate) disk: Arc<LocalDisk>,
    pub(crate) image: Arc<Image>,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) throttle: CommitThrottle,
    pub(crate) abort: Abort,
    /// How long storing a checkpoint is retried while the repository fails.
    pub(crate) retry_timeout: Duration,
}

impl Persister {
    /// Starts the thread. It ends when the commits are closed and done.
    pub(crate) fn spawn(self) -> io::Result<thread::JoinHandle<()>> {
        thread::Builder::new().name("persist".into()).spawn(move || self.run())
    }

    fn run(&self) {
        // The guest comes first.
        sys::yield_to_others();
        loop {
            match self.commits.next(REFILL_INTERVAL) {
                NextCommit::Commit(commit) => {
                    if !self.finish(&commit) {
                        return;
                    }
                    if let Err(error) = self.flusher.clear_unchanged_intent() {
                        tracing::warn!(%error, "cannot clear write intent that is not needed");
                    }
                }
                NextCommit::Nothing => {}
                NextCommit::Closed => return,
            }
            // Also when there is no checkpoint: numbers that ran out while the catalog was
            // unavailable have to be reserved.
            self.refill();
        }
    }

    /// Brings one checkpoint to its end. Returns `false` if the process stops first: then the
    /// checkpoint is left to the next process.
    fn finish(&self, commit: &Commit) -> bool {
        let mirror = &self.disk.mirror;
        let name = self.image.snapshot_name(commit.new.number);
        // In any case: only then is the dirty set complete.
        self.await_settled(&commit.layer);
        let (state, ending) = match self.persist_with_retries(commit) {
            Ok(published) => {
                // Before the layer is gone: with the layer, a newer parent does no harm.
                self.record_parent();
                mirror.publish(&commit.layer);
                // Writes do not wait for the snapshot's redundancy.
                mirror.notify();
                self.disk.trim_copies();
                let state = match self.complete(&published) {
                    Ok(()) => {
                        self.counters.stable(1);
                        let stored_bytes = published.snapshot.stored_bytes;
                        let elapsed = commit.asked.elapsed();
                        let ms = elapsed.as_millis() as u64;
                        tracing::info!(%name, stored_bytes, ms, "stable");
                        CommitState::Stable { stored_bytes, elapsed }
                    }
                    Err(error) => {
                        let reason = format!(
                            "it can be read, but is not yet stored with its full redundancy: \
                             {error}; `cairn repair` completes it"
                        );
                        tracing::error!(%name, %reason, "a checkpoint is not stable");
                        CommitState::Failed(reason)
                    }
                };
                (state, Ending::Published)
            }
            Err(PersistError::Stopped) => return false,
            // The next process tries again. The error may even come from the stop, which gives the
            // lease back.
            Err(_) if self.abort.is_set() => return false,
            Err(error) => {
                let reason = error.to_string();
                if let PersistError::Repository(cairn_store::Error::Poisoned { .. }) = &error {
                    self.image.poison(reason.clone());
                }
                tracing::error!(%name, %reason, "a checkpoint failed");
                let ending = self.record_failure(&commit.new, &reason);
                mirror.give_up(&commit.layer);
                self.disk.trim_copies();
                self.counters.failed(1);
                (CommitState::Failed(reason), ending)
            }
        };
        mirror.notify();
        self.commits.ended(commit, state, ending);
        true
    }

    /// Makes a published snapshot stable that is only available. If the process stops first, repair
    /// does the rest.
    fn complete(&self, published: &Published<'_>) -> Result<(), PersistError> {
        let Published { snapshot, commit, changes } = published;
        if snapshot.state == SnapshotState::Stable {
            return Ok(());
        }
        let begin = Instant::now();
        let mut delay = FIRST_RETRY_DELAY;
        loop {
            let completed = commit.complete(snapshot, changes, &|at, buf| self.read_local(at, buf));
            match completed.map_err(PersistError::from) {
                Ok(_) => return Ok(()),
                Err(error) if error.is_transient() && begin.elapsed() < self.retry_timeout => {
                    let name = snapshot.name();
                    tracing::warn!(%name, %error, "a snapshot is not stable yet; retrying");
                }
                Err(error) => return Err(error),
            }
            back_off(&mut delay, || self.abort.check())?;
        }
    }

    /// Records a failure in the catalog. Returns what the catalog has then.
    fn record_failure(&self, new: &NewSnapshot, reason: &str) -> Ending {
        let told = self.image.attachment.fail(new.number, reason);
        if let Err(error) = &told {
            let name = self.image.snapshot_name(new.number);
            tracing::error!(%name, %error, "cannot record the failure in the catalog");
        }
        Ending::of_failure(&told)
    }

    /// Persists a checkpoint, and retries while the repository fails in a transient way. Chunks
    /// that are durable stay so, and all others are guarded as before.
    fn persist_with_retries(&self, commit: &Commit) -> Result<Published<'_>, PersistError> {
        let mut announced = None;
        let mut delay = FIRST_RETRY_DELAY;
        let mut since: Option<Instant> = None;
        let mut durable = 0;
        loop {
            let error = match self.persist(commit, &mut announced) {
                Err(error) if error.is_transient() => {
                    if let PersistError::Repository(cairn_store::Error::CatalogRebuilt { .. }) =
                        &error
                    {
                        // The new catalog does not know the announcement.
                        announced = None;
                    }
                    error
                }
                result => {
                    let (snapshot, changes) = result?;
                    let commit = announced.expect("a published snapshot was announced");
                    return Ok(Published { snapshot, commit, changes });
                }
            };
            // Any progress restarts the retry timeout.
            let stored = commit.layer.stored_count();
            if mem::replace(&mut durable, stored) != stored {
                since = None;
            }
            let start = *since.get_or_insert_with(Instant::now);
            if start.elapsed() + delay > self.retry_timeout {
                return Err(error);
            }
            let name = self.image.snapshot_name(commit.new.number);
            tracing::warn!(%name, %error, "cannot store a checkpoint; retrying");
            commit.set_last_error(error.to_string());
            back_off(&mut delay, || {
                self.abort.check()?;
                self.check_sync()?;
                commit.layer.failure().map_or(Ok(()), |reason| Err(PersistError::Layer(reason)))
            })?;
        }
    }

    /// Waits until no write of the layer's epoch is in flight. That takes as long as the local disk
    /// takes for them.
    fn await_settled(&self, layer: &Layer) {
        let mirror = &self.disk.mirror;
        loop {
            let seen = mirror.events().count();
            if mirror.settle(layer) {
                // Writes may wait for exactly that.
                return mirror.notify();
            }
            mirror.events().wait(seen, POLL_INTERVAL);
        }
    }

    /// Records the mirror's parent in the map. A failure is tried again later: see `refill`.
    fn record_parent(&self) {
        let (number, root) = self.image.attachment.parent();
        if let Err(error) = self.flusher.record_parent(number, root) {
            tracing::warn!(%error, "cannot record the parent in the map");
        }
    }

    /// Prepares what later checkpoints need.
    fn refill(&self) {
        if self.check_sync().is_ok() {
            // The last time may have failed.
            self.record_parent();
        }
        if let Err(error) = self.disk.mirror.prepare_freeze() {
            tracing::warn!(%error, "cannot prepare the next checkpoint");
        }
        // Each request of a catalog that does not answer takes seconds, and a stop waits for it.
        let record = |new: &_, reason: &_| self.record_failure(new, reason);
        self.commits.record_failures(record, || self.abort.is_set());
        if self.abort.is_set() {
            return;
        }
        if let Err(error) = self.commits.reserve_numbers() {
            tracing::error!(%error, "cannot reserve snapshot numbers");
        }
    }

    /// Stores a checkpoint's layers and publishes the snapshot. `announced` is the commit of an
    /// earlier try, or gets a new one.
    fn persist<'a>(
        &'a self,
        commit: &Commit,
        announced: &mut Option<SnapshotCommit<'a>>,
    ) -> Result<(Snapshot, LayerChanges), PersistError> {
        let Image { repository, attachment, .. } = &*self.image;
        let mirror = &self.disk.mirror;
        let layers = mirror.epoch_view().layers.clone();
        let mut sources: Vec<_> =
            layers.into_iter().filter(|layer| layer.epoch <= commit.layer.epoch).collect();
        if announced.is_none() {
            // Before the catalog may have the snapshot: without this record, the next process would
            // be refused as an older copy of the mirror. After a failed sync the map is not written,
            // and nothing is published.
            let recorded = self.flusher.announce(commit.new.number);
            if self.check_sync().is_ok() {
                recorded.map_err(PersistError::Map)?;
            }
            let begun = attachment.begin(&commit.new)?;
            // A previous process, or a commit that failed, may have stored chunks. Peers may have
            // been lost since.
            if sources.iter().any(|layer| layer.stored_count() > 0) {
                begun.mark_unverified();
            }
            *announced = Some(begun);
        }
        let announced = announced.as_ref().expect("the snapshot is announced");
        // Before anything is stored: without space this fails at once, and not near the end.
        let _space = repository.reserve_space(commit.new.dirty_bytes)?;
        let stored = AtomicU64::new(0);
        let buffers = buffer_pool(mirror.layout().chunk_size());
        // Chunks of a newer layer hide those of the older layers that it absorbs.
        sources.reverse();
        let mut used = Vec::new();
        for (at, source) in sources.iter().enumerate() {
            let newer = &sources[..at];
            let hidden = |chunk| newer.iter().any(|layer| layer.dirty().contains(chunk));
            if source.dirty().iter().all(hidden) {
                // This holds for a layer that had failed before the newer one was frozen.
                continue;
            }
            used.push(source.clone());
            store_layer(self, source, newer, &buffers, &stored)?;
        }
        self.abort.check()?;
        // After all reading, too: the table says which blocks were read from where.
        for source in &used {
            if let Err(error) = source.check_table() {
                mirror.fail(source, &format!("the record of its old blocks is lost: {error}"));
            }
        }
        // After all reading: a layer that has failed meanwhile did not guard its chunks against
        // newer writes any more.
        if let Some(reason) = used.iter().find_map(|source| source.failure()) {
            return Err(PersistError::Layer(reason));
        }
        // After all reading, too: until here the data file may have returned old data.
        self.check_sync()?;
        let changes = LayerChanges::new(used);
        let local = |at: ChunkIndex, buf: &mut [u8]| self.read_local(at, buf);
        let snapshot = announced.publish(&changes, stored.load(Ordering::Relaxed), &local)?;
        Ok((snapshot, changes))
    }

    /// Returns an error if a sync of the data file has failed.
    pub(super) fn check_sync(&self) -> Result<(), PersistError> {
        self.disk.data_sync.check().map_err(|_| PersistError::SyncFailed)
    }

    /// Reads a chunk as the mirror has it now, for a commit whose blobs were lost with their peers.
    /// The guest may have changed the chunk, or may be changing it: the commit compares hashes.
    fn read_local(&self, chunk: ChunkIndex, buf: &mut [u8]) -> bool {
        let layout = self.disk.mirror.layout();
        let len = layout.chunk_size();
        let Some(mut data) = BufferPool::new(len).take(len) else { return false };
        let present = self.disk.mirror.presence().in_chunk(layout.blocks_of(chunk));
        let read = self.disk.data.read(&mut data, layout.span_of(chunk).offset);
        // Blocks that are not present have the parent's content.
        let is_complete = present.len() == layout.blocks_per_chunk();
        if read.is_err() || !(is_complete || self.read_parent(chunk, buf)) {
            return false;
        }
        for run in present.runs() {
            let span = run.span();
            let range = span.offset as usize..span.end() as usize;
            buf[range.clone()].copy_from_slice(&data[range]);
        }
        true
    }

    fn read_parent(&self, chunk: ChunkIndex, buf: &mut [u8]) -> bool {
        buf.fill(0);
        self.image.read_parent(chunk, buf).is_ok()
    }
}

/// A published snapshot, and the commit that published it.
struct Published<'a> {
    snapshot: Snapshot,
    commit: SnapshotCommit<'a>,
    changes: LayerChanges,
}

/// Waits before a retry, and doubles the delay. Ends early with the error of `check`, if it has
/// one.
fn back_off(
    delay: &mut Duration,
    check: impl Fn() -> Result<(), PersistError>,
) -> Result<(), PersistError> {
    let until = Instant::now() + *delay;
    while Instant::now() < until {
        check()?;
        thread::sleep(POLL_INTERVAL.min(until.saturating_duration_since(Instant::now())));
    }
    *delay = (*delay * 2).min(MAX_RETRY_DELAY);
    Ok(())
}
