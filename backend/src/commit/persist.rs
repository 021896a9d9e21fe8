//! Makes accepted checkpoints stable (BlobCR, algorithm 3).
//!
//! One thread takes the checkpoints in order. The chunks of a layer become durable first ([`store_layer`]),
//! then the tree is written and the snapshot published, in one transaction.
//!
//! A process that is killed before that leaves garbage in the repository and a pending name; the next
//! one goes on where it was. A failure leaves a failed name; the changes go into the next checkpoint (see
//! `EpochManager::give_up`). A failed layer that a later one waits behind is absorbed: the later snapshot takes from it
//! what it does not have itself.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{mem, thread};

use cairn_store::{ErrorKind, NewSnapshot, Snapshot, SnapshotState};

use super::store_layer::{arena, store_layer};
use super::{Commit, CommitState, NextCommit};
use crate::device::Device;
use crate::mirror::epoch::layer::Layer;
use crate::sys;

/// How often an idle thread sees to it that there are snapshot numbers.
const REFILL_INTERVAL: Duration = Duration::from_secs(2);

/// How long to wait before the second try; then twice as long each time,
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(100);

/// up to this.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);

/// How often a waiting thread looks whether it has to stop.
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
    #[error("recording what is stored: {0}")]
    Journal(io::Error),
    #[error("{0}")]
    Layer(String),
    #[error(
        "the disk's process stopped before the snapshot was stable; its changes are kept and go into the next one"
    )]
    Stopped,
    #[error("chunk {0} was left out, which is a defect of this program")]
    Incomplete(u64),
}

impl PersistError {
    /// Whether another try may succeed.
    fn is_transient(&self) -> bool {
        match self {
            // A sync that failed is told once only: what is lost then is not known.
            PersistError::Repository(cairn_store::Error::Poisoned { .. }) => false,
            PersistError::Repository(error) => error.kind() == ErrorKind::Unavailable,
            PersistError::Journal(_) => true,
            _ => false,
        }
    }
}

/// The flag that ends persisting between two batches.
#[derive(Clone, Default)]
pub(crate) struct Abort(Arc<AtomicBool>);

impl Abort {
    /// Ends it.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(super) fn check(&self) -> Result<(), PersistError> {
        if self.0.load(Ordering::SeqCst) { Err(PersistError::Stopped) } else { Ok(()) }
    }
}

/// Starts the thread, which tries again for as long as `retry_timeout` says while the repository fails. It
/// ends when the commits are closed and done.
pub(crate) fn spawn(
    device: Arc<Device>,
    abort: Abort,
    retry_timeout: Duration,
) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name("persist".into()).spawn(move || {
        // The guest comes first.
        sys::yield_to_others();
        loop {
            match device.commits.next(REFILL_INTERVAL) {
                NextCommit::Commit(commit) => {
                    if !run(&device, &commit, &abort, retry_timeout) {
                        return;
                    }
                    if let Err(error) =
                        device.flusher.clear_unchanged_intent(&device.mirror, &device.disk)
                    {
                        tracing::warn!(%error, "the map knows more regions than it has to");
                    }
                }
                NextCommit::Nothing => {}
                NextCommit::Closed => return,
            }
            // Also when nothing happens: numbers that ran out while the catalog was away must not
            // stay out.
            refill(&device);
        }
    })
}

/// Takes one checkpoint to its end. Returns whether it has one: when the process stops, the checkpoint is
/// left to the next.
fn run(device: &Device, commit: &Commit, abort: &Abort, retry_timeout: Duration) -> bool {
    let name = device.snapshot_name(commit.new.number);
    // Whatever becomes of it: only then is the dirty set complete.
    settle(device, &commit.layer);
    let result = persist_with_retries(device, commit, abort, retry_timeout);
    let mut is_recorded = true;
    let state = match result {
        Ok(snapshot) => {
            device.mirror.publish(&commit.layer);
            // Writes need not wait for its redundancy.
            device.mirror.notify();
            match complete(device, &snapshot, abort, retry_timeout) {
                Ok(()) => {
                    device.stats.stable(1);
                    let (stored_bytes, elapsed) = (snapshot.stored_bytes, commit.asked.elapsed());
                    tracing::info!(%name, stored_bytes, ms = elapsed.as_millis() as u64, "stable");
                    CommitState::Stable { stored_bytes, elapsed }
                }
                Err(error) => {
                    let reason = format!(
                        "it can be read, and is not yet stored with its full redundancy: {error}; \
                         `cairn repair` completes it"
                    );
                    tracing::error!(%name, %reason, "a checkpoint is not stable");
                    CommitState::Failed(reason)
                }
            }
        }
        Err(PersistError::Stopped) => return false,
        Err(error) => {
            let reason = error.to_string();
            if let PersistError::Repository(cairn_store::Error::Poisoned { .. }) = &error {
                device.poison(reason.clone());
            }
            tracing::error!(%name, %reason, "a checkpoint failed");
            is_recorded = record_failure(device, &commit.new, &reason);
            device.mirror.give_up(&commit.layer);
            device.stats.failed(1);
            CommitState::Failed(reason)
        }
    };
    device.mirror.notify();
    device.commits.ended(commit, state, is_recorded);
    true
}

/// Makes a snapshot stable that is published and available. What is not done when the process stops is left
/// to repair.
fn complete(
    device: &Device,
    snapshot: &Snapshot,
    abort: &Abort,
    retry_timeout: Duration,
) -> Result<(), PersistError> {
    if snapshot.state == SnapshotState::Stable {
        return Ok(());
    }
    let begin = Instant::now();
    let mut delay = FIRST_RETRY_DELAY;
    loop {
        match device.attachment.complete(snapshot).map_err(PersistError::from) {
            Ok(_) => return Ok(()),
            Err(error) if error.is_transient() && begin.elapsed() < retry_timeout => {
                let name = snapshot.name();
                tracing::warn!(%name, %error, "a snapshot is not stable yet");
            }
            Err(error) => return Err(error),
        }
        pause(&mut delay, || abort.check())?;
    }
}

/// Waits before another try, and longer the next time, unless a reason not to try again comes up.
fn pause(
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

/// Tells the catalog of a failure. Returns whether it knows, or need not: it may never have heard of the
/// snapshot.
fn record_failure(device: &Device, new: &NewSnapshot, reason: &str) -> bool {
    match device.attachment.fail(new.number, reason) {
        Ok(()) => true,
        Err(error) => {
            let name = device.snapshot_name(new.number);
            tracing::error!(%name, %error, "the failure cannot be recorded");
            error.kind() != ErrorKind::Unavailable
        }
    }
}

/// Persists, and does so again while the repository fails in a way that may pass. What is durable stays
/// so; the rest is guarded as before.
fn persist_with_retries(
    device: &Device,
    commit: &Commit,
    abort: &Abort,
    retry_timeout: Duration,
) -> Result<Snapshot, PersistError> {
    let mut delay = FIRST_RETRY_DELAY;
    let mut since: Option<Instant> = None;
    let mut durable = 0;
    loop {
        let error = match persist(device, commit, abort) {
            Err(error) if error.is_transient() => error,
            result => return result,
        };
        // The retry timeout begins anew with whatever was achieved.
        let stored = commit.layer.stored_count();
        if mem::replace(&mut durable, stored) != stored {
            since = None;
        }
        let start = *since.get_or_insert_with(Instant::now);
        if start.elapsed() + delay > retry_timeout {
            return Err(error);
        }
        let name = device.snapshot_name(commit.new.number);
        tracing::warn!(%name, %error, "storing a checkpoint is tried again");
        commit.set_last_error(error.to_string());
        pause(&mut delay, || {
            abort.check()?;
            commit.layer.failure().map_or(Ok(()), |reason| Err(PersistError::Layer(reason)))
        })?;
    }
}

/// Waits until no write of the layer's epoch is submitted any more. That takes as long as the local
/// disk, nothing else.
fn settle(device: &Device, layer: &Layer) {
    let events = &device.mirror.events();
    loop {
        let seen = events.count();
        if device.mirror.settle(layer) {
            // Writes may wait for just that.
            return events.notify();
        }
        events.wait(seen, POLL_INTERVAL);
    }
}

/// Makes ready what the checkpoints to come need.
fn refill(device: &Device) {
    if let Err(error) = device.mirror.prepare_freeze() {
        tracing::warn!(%error, "the next checkpoint cannot be prepared");
    }
    device.commits.record_failures(|new, reason| record_failure(device, new, reason));
    let wanted = device.commits.wanted_numbers();
    if wanted > 0 {
        match device.attachment.reserve(wanted) {
            Ok(numbers) => device.commits.add_numbers(numbers),
            Err(error) => tracing::error!(%error, "no snapshot numbers can be reserved"),
        }
    }
}

fn persist(device: &Device, commit: &Commit, abort: &Abort) -> Result<Snapshot, PersistError> {
    device.attachment.begin(&commit.new)?;
    // Before anything is stored: it fails at once where there is no room for it, and not when it is nearly done.
    let _space = device.repository.reserve_space(commit.new.dirty_bytes)?;
    let layers = device.mirror.epoch_view().layers.clone();
    let mut sources: Vec<_> =
        layers.into_iter().filter(|layer| layer.epoch <= commit.layer.epoch).collect();
    let stored = AtomicU64::new(0);
    let arena = arena(device);
    let mut changes = BTreeMap::new();
    // The newest layer's chunks hide those of the older ones that it absorbs.
    sources.reverse();
    let mut used = Vec::new();
    for (at, source) in sources.iter().enumerate() {
        let newer = &sources[..at];
        let hidden = |chunk| newer.iter().any(|layer| layer.dirty().contains(chunk));
        if source.dirty().iter().all(hidden) {
            // So it is with one that was given up before the newer one was frozen.
            continue;
        }
        used.push(source);
        store_layer(device, source, newer, &arena, &stored, abort)?;
        for (chunk, id) in source.stored().iter() {
            changes.entry(*chunk).or_insert(*id);
        }
    }
    abort.check()?;
    // After all reading: a layer that failed meanwhile was no longer guarded against newer writes.
    if let Some(reason) = used.iter().find_map(|source| source.failure()) {
        return Err(PersistError::Layer(reason));
    }
    let (_, base) = device.attachment.parent();
    let update = device.repository.commit_tree(&base, device.geometry, &changes)?;
    let stored_bytes = stored.load(Ordering::Relaxed) + update.new_bytes;
    let dirty_bytes = changes.len() as u64 * device.mirror.layout().chunk_size() as u64;
    let number = commit.new.number;
    Ok(device.attachment.publish(number, &update.root, stored_bytes, dirty_bytes)?)
}
