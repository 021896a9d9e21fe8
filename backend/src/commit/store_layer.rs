//! Makes the chunks of a frozen epoch durable.
//!
//! For every chunk of the dirty set:
//!
//! 1. Take the chunk (Scheduled → Pending).
//! 2. Read it from the mirror into memory.
//! 3. Overlay the blocks that writes have preserved.
//! 4. Fill absent blocks with the content of the parent snapshot.
//! 5. Hash the chunk and store it, unless it is all zeros.
//! 6. When it is durable, it becomes Idle, and the guest may write it without a copy.
//!
//! Up to half of a batch are chunks with preserved blocks, so that their memory is free again soon.
//! Several threads store batches, and several batches become durable together. If something fails,
//! or the process ends, chunks that are not durable are read from the mirror again.
//! [`CommitThrottle`](super::throttle::CommitThrottle) ensures that the guest comes first.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;
use std::{mem, thread};

use cairn_store::{ChunkId, ChunkIndex, NewBlob, is_zero};

use super::persist::{POLL_INTERVAL, PersistError, Persister};
use crate::mirror::block_set::BlockSet;
use crate::mirror::cow::buffer_pool::{BufferPool, PooledBuffer};
use crate::mirror::epoch::layer::Layer;
use crate::mirror::files::disk_file::is_medium_error;
use crate::mirror::layout::{BLOCK_BYTES, Blocks};

/// The number of threads that read, hash and store.
const STORE_THREADS: usize = 3;

/// The size of a batch.
const BATCH_BYTES: usize = 4 << 20;

/// How much becomes durable together, at least: a sync for each batch would delay the other
/// threads.
const GROUP_COMMIT_BYTES: usize = 32 << 20;

/// The memory for storing a layer.
pub(super) fn buffer_pool(chunk_size: usize) -> Arc<BufferPool> {
    // A batch for each thread, a group that is written, and a group that becomes durable.
    let batch = BATCH_BYTES.max(chunk_size);
    BufferPool::new(STORE_THREADS * batch + 2 * (GROUP_COMMIT_BYTES + STORE_THREADS * batch))
}

/// Makes every chunk of `source` durable that is in no layer of `newer`.
pub(super) fn store_layer(
    persister: &Persister,
    source: &Layer,
    newer: &[Arc<Layer>],
    buffers: &Arc<BufferPool>,
    stored_bytes: &AtomicU64,
) -> Result<(), PersistError> {
    let needed = |chunk: u64| !newer.iter().any(|layer| layer.dirty().contains(chunk));
    let writer = LayerWriter {
        persister,
        source,
        buffers,
        stored_bytes,
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
            builder.spawn_scoped(scope, || writer.run())
        };
        // If no thread can be started, this one does everything.
        let threads: Vec<_> = (1..STORE_THREADS).map(spawn).collect();
        let own = writer.run();
        let threads = threads.into_iter().flatten();
        let others = threads.map(|thread| thread.join().expect("store threads do not panic"));
        std::iter::once(own).chain(others).collect()
    });
    results.push(writer.end());
    results.into_iter().collect::<Result<(), _>>()?;
    match source
        .dirty()
        .iter()
        .find(|chunk| needed(*chunk) && !source.is_stored(ChunkIndex(*chunk)))
    {
        // A layer that has failed meanwhile marks nothing as stored.
        Some(chunk) => {
            Err(source.failure().map_or(PersistError::Incomplete(chunk), PersistError::Layer))
        }
        None => Ok(()),
    }
}

/// A chunk on its way to being durable.
struct StoreItem {
    chunk: ChunkIndex,
    /// The bytes of the chunk. Blocks that are not in `present` hold arbitrary bytes.
    data: PooledBuffer,
    /// The blocks of `data` that are valid. All others have the parent's content.
    present: BlockSet,
}

struct LayerWriter<'a> {
    persister: &'a Persister,
    source: &'a Layer,
    buffers: &'a Arc<BufferPool>,
    stored_bytes: &'a AtomicU64,
    chunks: Mutex<Box<dyn Iterator<Item = ChunkIndex> + Send + 'a>>,
    failed: AtomicBool,
    /// Chunks that the repository has, and that may not be durable yet.
    written: Mutex<Vec<Written>>,
    /// Held by the thread that makes a group durable.
    durable: Mutex<()>,
}

/// A [`StoreItem`] and its id; `None` for a hole.
type Written = (StoreItem, Option<ChunkId>);

impl LayerWriter<'_> {
    /// Stores batches until no chunk is left.
    fn run(&self) -> Result<(), PersistError> {
        // The thread that failed returns the error; the others stop without one.
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
                self.cancel_store(batch);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Adds a batch to the written chunks, and makes them durable if there are enough.
    fn add_written(&self, batch: impl Iterator<Item = Written>) -> Result<(), PersistError> {
        let mut written = self.written();
        written.extend(batch);
        if self.is_group(&written) {
            drop(written);
            // One thread at a time, which bounds the memory in use.
            let _durable = self.durable.lock().expect("no code panics while it waits for a sync");
            let mut written = self.written();
            let group = if self.is_group(&written) { mem::take(&mut *written) } else { Vec::new() };
            drop(written);
            self.make_durable(group)?;
        }
        Ok(())
    }

    fn is_group(&self, written: &[Written]) -> bool {
        written.len() * self.persister.disk.mirror.layout().chunk_size() >= GROUP_COMMIT_BYTES
    }

    fn make_durable(&self, group: Vec<Written>) -> Result<(), PersistError> {
        if group.is_empty() {
            return Ok(());
        }
        let ids: Vec<_> = group.iter().map(|(item, id)| (item.chunk, *id)).collect();
        let layout = self.persister.disk.mirror.layout();
        let flushed = self.persister.image.repository.flush().map_err(PersistError::from);
        let stored = flushed
            .and_then(|()| self.source.mark_stored(&ids, &layout).map_err(PersistError::Table));
        if let Err(error) = stored {
            self.failed.store(true, Ordering::SeqCst);
            self.cancel_store(group.into_iter().map(|(item, _)| item));
            return Err(error);
        }
        drop(group);
        // Memory that writes wait for may be free now.
        self.persister.disk.mirror.notify();
        Ok(())
    }

    /// Makes the remaining chunks durable, unless a thread failed.
    fn end(&self) -> Result<(), PersistError> {
        let group = mem::take(&mut *self.written());
        if self.failed.load(Ordering::SeqCst) {
            self.cancel_store(group.into_iter().map(|(item, _)| item));
            return Ok(());
        }
        self.make_durable(group)
    }

    fn cancel_store(&self, items: impl IntoIterator<Item = StoreItem>) {
        items.into_iter().for_each(|item| self.source.cancel_store(item.chunk));
    }

    fn written(&self) -> MutexGuard<'_, Vec<Written>> {
        self.written.lock().expect("no code panics with the written chunks locked")
    }

    /// Waits until the rate allows `bytes` more bytes.
    fn await_rate(&self, bytes: usize) -> Result<(), PersistError> {
        let until = Instant::now() + self.persister.throttle.delay(bytes as u64);
        loop {
            self.persister.abort.check()?;
            self.persister.check_sync()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.failed.load(Ordering::SeqCst) {
                return Ok(());
            }
            thread::sleep(left.min(POLL_INTERVAL));
        }
    }

    /// Collects a batch: first chunks that have copies, then the next chunks in order. Chunks that
    /// another thread has taken are left out, so the batch may be empty. Returns whether there are
    /// more chunks.
    fn gather(&self, batch: &mut Vec<StoreItem>) -> Result<bool, PersistError> {
        let chunk_size = self.persister.disk.mirror.layout().chunk_size();
        let limit = (BATCH_BYTES / chunk_size).max(1);
        self.persister.abort.check()?;
        self.persister.check_sync()?;
        if let Some(reason) = self.source.failure() {
            return Err(PersistError::Layer(reason));
        }
        let mut chunks = self.source.chunks_with_copies(limit.div_ceil(2));
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

    /// Takes adjacent chunks (Scheduled → Pending) and reads them. Chunks that another thread has
    /// taken are left out.
    fn gather_run(
        &self,
        run: &[ChunkIndex],
        batch: &mut Vec<StoreItem>,
    ) -> Result<(), PersistError> {
        let taken: Vec<_> =
            run.iter().copied().filter(|chunk| self.source.begin_store(*chunk)).collect();
        let mut left = &taken[..];
        let mut result = Ok(());
        let busy = self.persister.throttle.is_guest_busy(&self.persister.counters);
        let step = if busy { 1 } else { taken.len().max(1) };
        let parts = taken.chunk_by(|one, next| one.0 + 1 == next.0);
        for part in parts.flat_map(|part| part.chunks(step)) {
            result = self.read(part, batch);
            if result.is_err() {
                break;
            }
            left = &left[part.len()..];
        }
        left.iter().for_each(|chunk| self.source.cancel_store(*chunk));
        self.persister.disk.mirror.notify();
        result
    }

    /// Reads adjacent chunks that are Pending. Their presence is read first: a block that is filled
    /// in between has the parent's content, from either source.
    fn read(&self, chunks: &[ChunkIndex], batch: &mut Vec<StoreItem>) -> Result<(), PersistError> {
        let layout = self.persister.disk.mirror.layout();
        let take = |_| self.buffers.take(layout.chunk_size());
        let buffers: Option<Vec<_>> = chunks.iter().map(take).collect();
        let exhausted = || io::Error::other("the memory of this commit is used up");
        let mut buffers = buffers.ok_or_else(exhausted)?;
        let present: Vec<_> = chunks
            .iter()
            .map(|chunk| self.persister.disk.mirror.presence().in_chunk(layout.blocks_of(*chunk)))
            .collect();
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(|buffer| &mut buffer[..]).collect();
        let offset = layout.span_of(chunks[0]).offset;
        let read = || self.persister.disk.data.read_vectored(&mut slices, offset);
        match self.persister.throttle.run(&self.persister.counters, read) {
            Err(error) if is_medium_error(&error) => {
                self.read_needed(chunks, &present, &mut slices)?
            }
            result => result?,
        }
        let mut items = Vec::with_capacity(chunks.len());
        for ((chunk, mut data), present) in chunks.iter().zip(buffers).zip(present) {
            let start = layout.span_of(*chunk).offset;
            let read_spilled = |buffer: &mut [u8], run: Blocks| {
                self.source.read_spilled(buffer, start + run.span().offset)
            };
            let preserved = self.source.preserved(*chunk).map_err(PersistError::Spill)?;
            let present =
                preserved.overlay(&mut data, present, read_spilled).map_err(PersistError::Spill)?;
            items.push(StoreItem { chunk: *chunk, data, present });
        }
        // All or none: the caller cancels the chunks that are not in the batch.
        batch.append(&mut items);
        Ok(())
    }

    /// Reads only the blocks that are needed, after the read of whole chunks failed: the blocks
    /// that cannot be read may not be needed.
    fn read_needed(
        &self,
        chunks: &[ChunkIndex],
        present: &[BlockSet],
        buffers: &mut [&mut [u8]],
    ) -> io::Result<()> {
        for ((chunk, present), buffer) in chunks.iter().zip(present).zip(buffers) {
            let offset = self.persister.disk.mirror.layout().span_of(*chunk).offset;
            for run in present.without(&self.source.preserved(*chunk)?.decided).runs() {
                let span = run.span();
                let part = &mut buffer[span.offset as usize..span.end() as usize];
                self.persister.disk.data.read(part, offset + span.offset)?;
            }
        }
        Ok(())
    }

    /// Puts a batch into the repository. Returns the ids of the chunks.
    fn store(&self, batch: &mut [StoreItem]) -> Result<Vec<Option<ChunkId>>, PersistError> {
        for item in batch.iter_mut() {
            self.complete(item)?;
        }
        let contents = batch.iter().map(|item| &*item.data);
        let hash = |content| (!is_zero(content)).then(|| NewBlob::new(content));
        let hashed: Vec<Option<NewBlob<'_>>> = contents.map(hash).collect();
        let ids = hashed.iter().map(|one| one.as_ref().map(NewBlob::chunk_id)).collect();
        let full: Vec<_> = hashed.into_iter().flatten().collect();
        let throttle = &self.persister.throttle;
        let step =
            if throttle.is_guest_busy(&self.persister.counters) { 1 } else { full.len().max(1) };
        for part in full.chunks(step) {
            let put = || self.persister.image.repository.put_chunks(part);
            let new_bytes = throttle.run(&self.persister.counters, put)?;
            self.stored_bytes.fetch_add(new_bytes, Ordering::Relaxed);
        }
        Ok(ids)
    }

    /// Fills the blocks that were absent with the content of the parent snapshot.
    fn complete(&self, item: &mut StoreItem) -> Result<(), PersistError> {
        let StoreItem { chunk, data, present } = item;
        if present.len() == self.persister.disk.mirror.layout().blocks_per_chunk() {
            return Ok(());
        }
        let mut parent = vec![0; data.len()];
        self.persister.image.read_parent(*chunk, &mut parent)?;
        for (block, (to, from)) in data
            .chunks_exact_mut(BLOCK_BYTES as usize)
            .zip(parent.chunks_exact(BLOCK_BYTES as usize))
            .enumerate()
        {
            if !present.contains(block as u64) {
                to.copy_from_slice(from);
            }
        }
        Ok(())
    }
}
