//! Makes accepted checkpoints stable (BlobCR, algorithm 3).
//!
//! One thread takes the checkpoints in order; others help it with each. For every chunk of the frozen
//! dirty set: take it (Pending) → read it from the mirror into memory → lay over it what writes have
//! put aside → complete its absent blocks from the parent → hash and store it, unless it is all zeros →
//! when it is durable, Idle: the guest may write it again. Half of a batch are chunks of which something
//! was put aside, so that this memory is free again soon.
//!
//! Chunks go in batches, and several batches become durable together. If something fails, or the process
//! ends, what is not durable is read again from the mirror. [`Pace`](super::pace::Pace) sees to it that
//! the guest comes first. When all chunks are durable the tree is written and the snapshot published, in
//! one transaction.
//!
//! A process that is killed before that leaves garbage in the repository and a pending name; the next
//! one goes on where it was. A failure leaves a failed name; the changes go into the next checkpoint (see `Cut::give_up`). A failed layer that a later
//! one waits behind is absorbed: the later snapshot takes from it what it does not have itself.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{mem, thread};

use cairn_store::{ChunkId, ChunkIndex, ErrorKind, NewSnapshot, is_zero};

use super::{Commit, CommitState, Next};
use crate::device::Device;
use crate::fetch::is_lost;
use crate::mirror::blockset::BlockSet;
use crate::mirror::copies::{Arena, Copy};
use crate::mirror::layer::Layer;
use crate::mirror::layout::BLOCK;
use crate::sys;

/// Threads that read, hash and store.
const THREADS: usize = 3;

/// Bytes of a batch.
const BATCH: usize = 4 << 20;

/// Bytes that become durable together, at least: a sync for each batch would hold up the others.
const GROUP: usize = 32 << 20;

/// How often an idle thread sees to it that there are snapshot numbers.
const REFILL: Duration = Duration::from_secs(2);

/// How long to wait before the second try; then twice as long each time,
const FIRST_DELAY: Duration = Duration::from_millis(100);

/// up to this.
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// How often a waiting thread looks whether it has to stop.
const LOOK: Duration = Duration::from_millis(100);

/// Why a snapshot did not become stable.
#[derive(Debug, thiserror::Error)]
enum PersistError {
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
    fn may_pass(&self) -> bool {
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

    fn check(&self) -> Result<(), PersistError> {
        if self.0.load(Ordering::SeqCst) { Err(PersistError::Stopped) } else { Ok(()) }
    }
}

/// Starts the thread, which tries again for as long as `patience` says while the repository fails. It
/// ends when the commits are closed and done.
pub(crate) fn spawn(
    device: Arc<Device>,
    abort: Abort,
    patience: Duration,
) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name("persist".into()).spawn(move || {
        // The guest comes first.
        sys::yield_to_others();
        loop {
            match device.commits.next(REFILL) {
                Next::Commit(commit) => {
                    if !run(&device, &commit, &abort, patience) {
                        return;
                    }
                    if let Err(error) = device.flusher.tidy(&device.mirror, &device.disk) {
                        tracing::warn!(%error, "the map knows more regions than it has to");
                    }
                }
                Next::Nothing => {}
                Next::Closed => return,
            }
            // Also when nothing happens: numbers that ran out while the catalog was away must not
            // stay out.
            refill(&device);
        }
    })
}

/// Takes one checkpoint to its end. Returns whether it has one: when the process stops, the checkpoint is
/// left to the next.
fn run(device: &Device, commit: &Commit, abort: &Abort, patience: Duration) -> bool {
    let name = device.snapshot_name(commit.new.number);
    // Whatever becomes of it: only then is the dirty set complete.
    settle(device, &commit.layer);
    let result = keep_trying(device, commit, abort, patience);
    let mut is_recorded = true;
    let state = match result {
        Ok(stored_bytes) => {
            device.mirror.cut.publish(&commit.layer);
            device.stats.stable(1);
            let elapsed = commit.asked.elapsed();
            tracing::info!(%name, stored_bytes, ms = elapsed.as_millis() as u64, "stable");
            CommitState::Stable { stored_bytes, elapsed }
        }
        Err(PersistError::Stopped) => return false,
        Err(error) => {
            let reason = error.to_string();
            if let PersistError::Repository(cairn_store::Error::Poisoned { .. }) = &error {
                device.poison(reason.clone());
            }
            tracing::error!(%name, %reason, "a checkpoint failed");
            is_recorded = record_failure(device, &commit.new, &reason);
            device.mirror.cut.give_up(&commit.layer);
            device.stats.failed(1);
            CommitState::Failed(reason)
        }
    };
    device.mirror.events.notify();
    device.commits.ended(commit, state, is_recorded);
    true
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
fn keep_trying(
    device: &Device,
    commit: &Commit,
    abort: &Abort,
    patience: Duration,
) -> Result<u64, PersistError> {
    let mut delay = FIRST_DELAY;
    let mut since: Option<Instant> = None;
    let mut durable = 0;
    loop {
        let error = match persist(device, commit, abort) {
            Err(error) if error.may_pass() => error,
            result => return result,
        };
        // Patience begins anew with whatever was achieved.
        let stored = commit.layer.stored_count();
        if mem::replace(&mut durable, stored) != stored {
            since = None;
        }
        let start = *since.get_or_insert_with(Instant::now);
        if start.elapsed() + delay > patience {
            return Err(error);
        }
        let name = device.snapshot_name(commit.new.number);
        tracing::warn!(%name, %error, "storing a checkpoint is tried again");
        commit.set_trouble(error.to_string());
        let until = Instant::now() + delay;
        while Instant::now() < until {
            abort.check()?;
            if let Some(reason) = commit.layer.failure() {
                return Err(PersistError::Layer(reason));
            }
            thread::sleep(LOOK.min(until.saturating_duration_since(Instant::now())));
        }
        delay = (delay * 2).min(LONGEST_DELAY);
    }
}

/// Waits until no write of the layer's epoch is submitted any more. That takes as long as the local
/// disk, nothing else.
fn settle(device: &Device, layer: &Layer) {
    let events = &device.mirror.events;
    loop {
        let seen = events.count();
        if device.mirror.cut.settle(layer) {
            // Writes may wait for just that.
            return events.notify();
        }
        events.wait(seen, LOOK);
    }
}

/// Makes ready what the checkpoints to come need.
fn refill(device: &Device) {
    if let Err(error) = device.mirror.cut.prepare() {
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

fn persist(device: &Device, commit: &Commit, abort: &Abort) -> Result<u64, PersistError> {
    device.attachment.begin(&commit.new)?;
    let layers = device.mirror.cut.view().layers.clone();
    let mut sources: Vec<_> =
        layers.into_iter().filter(|layer| layer.epoch <= commit.layer.epoch).collect();
    let stored = AtomicU64::new(0);
    // A batch for each thread, a group that is written and a group that is being made durable.
    let batch = BATCH.max(device.mirror.layout().chunk_size());
    let arena = Arena::new(THREADS * batch + 2 * (GROUP + THREADS * batch));
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
    device.attachment.publish(commit.new.number, &update.root, stored_bytes, dirty_bytes)?;
    Ok(stored_bytes)
}

/// Makes every chunk of `source` durable that no layer of `newer` has.
fn store_layer(
    device: &Device,
    source: &Layer,
    newer: &[Arc<Layer>],
    arena: &Arc<Arena>,
    stored: &AtomicU64,
    abort: &Abort,
) -> Result<(), PersistError> {
    let needed = |chunk: u64| !newer.iter().any(|layer| layer.dirty().contains(chunk));
    let work = Work {
        device,
        source,
        arena,
        stored,
        abort,
        chunks: Mutex::new(Box::new(
            source
                .dirty()
                .iter()
                .filter(move |chunk| needed(*chunk))
                .map(ChunkIndex)
                .filter(|chunk| !source.is_stored(*chunk)),
        )),
        failed: AtomicBool::new(false),
        written: Mutex::default(),
        durable: Mutex::default(),
    };
    let mut results: Vec<_> = thread::scope(|scope| {
        let spawn = |_| {
            let builder = thread::Builder::new().name("store".into());
            builder.spawn_scoped(scope, || work.run())
        };
        // Where no thread can be had, this one does it alone.
        let threads: Vec<_> = (1..THREADS).map(spawn).collect();
        let own = work.run();
        let threads = threads.into_iter().flatten();
        let others = threads.map(|thread| thread.join().expect("store threads do not panic"));
        std::iter::once(own).chain(others).collect()
    });
    results.push(work.end());
    results.into_iter().collect::<Result<(), _>>()?;
    match source
        .dirty()
        .iter()
        .find(|chunk| needed(*chunk) && !source.is_stored(ChunkIndex(*chunk)))
    {
        Some(chunk) => Err(PersistError::Incomplete(chunk)),
        None => Ok(()),
    }
}

/// A chunk on its way to being durable.
struct Item {
    chunk: ChunkIndex,
    copy: Copy,
}

struct Work<'a> {
    device: &'a Device,
    source: &'a Layer,
    arena: &'a Arc<Arena>,
    stored: &'a AtomicU64,
    abort: &'a Abort,
    chunks: Mutex<Box<dyn Iterator<Item = ChunkIndex> + Send + 'a>>,
    failed: AtomicBool,
    /// What was given to the repository and may not be durable.
    written: Mutex<Vec<Written>>,
    /// Held by the thread that makes a group durable.
    durable: Mutex<()>,
}

/// An [`Item`] and its name, or nothing for a hole.
type Written = (Item, Option<ChunkId>);

impl Work<'_> {
    /// Stores batches until there is nothing left.
    fn run(&self) -> Result<(), PersistError> {
        // The thread that failed tells why; the others just stop.
        let mut more = true;
        while more && !self.failed.load(Ordering::SeqCst) {
            let mut batch = Vec::new();
            let result = self.gather(&mut batch).and_then(|left| {
                more = left;
                self.store(&mut batch)
            });
            let result = match result {
                Ok(ids) => self.add_written(batch.drain(..).zip(ids)),
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                self.failed.store(true, Ordering::SeqCst);
                self.untake(batch);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Adds a batch to what is written, and makes that durable if it is enough.
    fn add_written(&self, batch: impl Iterator<Item = Written>) -> Result<(), PersistError> {
        let mut written = self.written();
        written.extend(batch);
        if self.is_group(&written) {
            drop(written);
            // One at a time, which bounds the memory in use.
            let _durable = self.durable.lock().expect("no code panics while it waits for a sync");
            let mut written = self.written();
            let group = if self.is_group(&written) { mem::take(&mut *written) } else { Vec::new() };
            drop(written);
            self.make_durable(group)?;
        }
        Ok(())
    }

    fn is_group(&self, written: &[Written]) -> bool {
        written.len() * self.device.mirror.layout().chunk_size() >= GROUP
    }

    fn make_durable(&self, group: Vec<Written>) -> Result<(), PersistError> {
        if group.is_empty() {
            return Ok(());
        }
        let ids: Vec<_> = group.iter().map(|(item, id)| (item.chunk, *id)).collect();
        let flushed = self.device.repository.flush().map_err(PersistError::from);
        let stored = flushed.and_then(|()| self.source.store(&ids).map_err(PersistError::Journal));
        if let Err(error) = stored {
            self.failed.store(true, Ordering::SeqCst);
            self.untake(group.into_iter().map(|(item, _)| item));
            return Err(error);
        }
        drop(group);
        // Memory that writes wait for may be free again.
        self.device.mirror.events.notify();
        Ok(())
    }

    /// Makes the rest durable, unless something failed.
    fn end(&self) -> Result<(), PersistError> {
        let group = mem::take(&mut *self.written());
        if self.failed.load(Ordering::SeqCst) {
            self.untake(group.into_iter().map(|(item, _)| item));
            return Ok(());
        }
        self.make_durable(group)
    }

    fn untake(&self, items: impl IntoIterator<Item = Item>) {
        items.into_iter().for_each(|item| self.source.untake(item.chunk));
    }

    fn written(&self) -> MutexGuard<'_, Vec<Written>> {
        self.written.lock().expect("no code panics with the written chunks locked")
    }

    /// Waits until the rate allows this many more bytes.
    fn await_rate(&self, bytes: usize) -> Result<(), PersistError> {
        let until = Instant::now() + self.device.pace.delay(bytes as u64);
        loop {
            self.abort.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.failed.load(Ordering::SeqCst) {
                return Ok(());
            }
            thread::sleep(left.min(LOOK));
        }
    }

    /// Collects a batch: first chunks that hold memory, then the next ones. Those that another thread has
    /// or had are left out, so it may be empty though there is more; that is told.
    fn gather(&self, batch: &mut Vec<Item>) -> Result<bool, PersistError> {
        let chunk_size = self.device.mirror.layout().chunk_size();
        let limit = (BATCH / chunk_size).max(1);
        self.abort.check()?;
        if let Some(reason) = self.source.failure() {
            return Err(PersistError::Layer(reason));
        }
        let mut chunks = self.source.costly(limit.div_ceil(2));
        let mut more = !chunks.is_empty();
        while chunks.len() < limit {
            let Some(chunk) = self.next_chunk() else { break };
            chunks.push(chunk);
            more = true;
        }
        chunks.sort_unstable();
        chunks.dedup();
        for run in chunks.chunk_by(|one, next| one.0 + 1 == next.0) {
            self.gather_run(run, batch)?;
        }
        self.await_rate(batch.len() * chunk_size)?;
        Ok(more)
    }

    fn next_chunk(&self) -> Option<ChunkIndex> {
        self.chunks.lock().expect("no code panics with the iterator locked").next()
    }

    /// Scheduled → Pending, with the chunks' bytes in memory, for neighbours. Those that somebody else has
    /// or had are left out.
    fn gather_run(&self, run: &[ChunkIndex], batch: &mut Vec<Item>) -> Result<(), PersistError> {
        let taken: Vec<_> = run.iter().copied().filter(|chunk| self.source.take(*chunk)).collect();
        let mut left = &taken[..];
        let mut result = Ok(());
        let busy = self.device.pace.is_guest_busy(&self.device.stats);
        let step = if busy { 1 } else { taken.len().max(1) };
        let parts = taken.chunk_by(|one, next| one.0 + 1 == next.0);
        for part in parts.flat_map(|part| part.chunks(step)) {
            result = self.read(part, batch);
            if result.is_err() {
                break;
            }
            left = &left[part.len()..];
        }
        left.iter().for_each(|chunk| self.source.untake(*chunk));
        self.device.mirror.events.notify();
        result
    }

    /// Reads neighbours that are Pending. Their presence is looked at first: a block that is filled
    /// meanwhile has the parent's content, wherever it is read from.
    fn read(&self, chunks: &[ChunkIndex], batch: &mut Vec<Item>) -> Result<(), PersistError> {
        let layout = self.device.mirror.layout();
        let room = |_| self.arena.take(layout.chunk_size());
        let buffers: Option<Vec<_>> = chunks.iter().map(room).collect();
        let no_room = || io::Error::other("the memory of this commit is used up");
        let mut buffers = buffers.ok_or_else(no_room)?;
        let present: Vec<_> = chunks
            .iter()
            .map(|chunk| self.device.mirror.presence.of(layout.blocks_of(*chunk)))
            .collect();
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(|buffer| &mut buffer[..]).collect();
        let offset = layout.span_of(chunks[0]).offset;
        let read = || self.device.disk.read_vectored(&mut slices, offset);
        match self.device.pace.run(&self.device.stats, read) {
            Err(error) if is_lost(&error) => self.read_needed(chunks, &present, &mut slices)?,
            result => result?,
        }
        let preserve = &self.device.preserve;
        let back = |buffer: &mut [u8], offset: u64| preserve.read_any(buffer, offset);
        let mut items = Vec::with_capacity(chunks.len());
        for ((chunk, mut data), present) in chunks.iter().zip(buffers).zip(present) {
            let aside = self.source.aside(*chunk);
            let present = aside.lay_over(&mut data, present, back).map_err(PersistError::Spill)?;
            items.push(Item { chunk: *chunk, copy: Copy { data, present } });
        }
        // All or none: what is not in the batch is put back.
        batch.append(&mut items);
        Ok(())
    }

    /// As the read above, where something cannot be read: that may be nothing that is needed.
    fn read_needed(
        &self,
        chunks: &[ChunkIndex],
        present: &[BlockSet],
        buffers: &mut [&mut [u8]],
    ) -> io::Result<()> {
        for ((chunk, present), buffer) in chunks.iter().zip(present).zip(buffers) {
            let offset = self.device.mirror.layout().span_of(*chunk).offset;
            for run in present.without(&self.source.aside(*chunk).decided).runs() {
                let span = run.span();
                let part = &mut buffer[span.offset as usize..span.end() as usize];
                self.device.disk.read(part, offset + span.offset)?;
            }
        }
        Ok(())
    }

    /// Gives a batch to the repository, and returns the chunks' names.
    fn store(&self, batch: &mut [Item]) -> Result<Vec<Option<ChunkId>>, PersistError> {
        for item in batch.iter_mut() {
            self.complete(item)?;
        }
        let name = |item: &Item| {
            let content = &item.copy.data;
            (!is_zero(content)).then(|| ChunkId::of(content))
        };
        let ids: Vec<Option<ChunkId>> = batch.iter().map(name).collect();
        let full = batch.iter().zip(&ids).filter_map(|(item, id)| Some(((*id)?, &*item.copy.data)));
        let full: Vec<(ChunkId, &[u8])> = full.collect();
        let pace = &self.device.pace;
        let step = if pace.is_guest_busy(&self.device.stats) { 1 } else { full.len().max(1) };
        for part in full.chunks(step) {
            let put = || self.device.repository.put_chunks(part);
            let new_bytes = pace.run(&self.device.stats, put)?;
            self.stored.fetch_add(new_bytes, Ordering::Relaxed);
        }
        Ok(ids)
    }

    /// Brings the blocks that were absent from the parent.
    fn complete(&self, item: &mut Item) -> Result<(), PersistError> {
        let Copy { data, present } = &mut item.copy;
        if present.len() == self.device.mirror.layout().blocks_per_chunk() {
            return Ok(());
        }
        let mut parent = vec![0; data.len()];
        self.device.read_parent(item.chunk, &mut parent)?;
        for (block, (to, from)) in data
            .chunks_exact_mut(BLOCK as usize)
            .zip(parent.chunks_exact(BLOCK as usize))
            .enumerate()
        {
            if !present.contains(block as u64) {
                to.copy_from_slice(from);
            }
        }
        Ok(())
    }
}
