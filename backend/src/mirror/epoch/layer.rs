//! A frozen epoch and its selective copy-on-write (BlobCR, algorithms 2 to 4).
//!
//! Each chunk of the epoch's dirty set is stored in the repository by persist. Until the chunk is
//! durable, the layer guards it (see [`chunk_state`](super::chunk_state) for the states).
//!
//! Copies are made by blocks, not by chunks. A write to a guarded chunk first preserves the old
//! content of the blocks that it changes. These blocks are then *decided* for this epoch, and later
//! writes to them need no copy. In the paper, a write waits for a Pending chunk. Here it does not
//! wait: after persist has read the chunk, persist overlays the preserved blocks. So it does not
//! matter whether the read saw a block before the write, after it, or torn.
//!
//! The dirty set is final, and its chunks may be stored and copied, only when the layer is
//! *settled*: no write of the epoch is in flight.
//!
//! A layer outlives the process. Its states are in shared memory ([`EpochRecord`]). A copy is in the
//! copy-on-write memory, where its slots name their owner, or in the layer's spill file, and then the
//! [`LayerTable`] says so. Both is written before the write that depends on the copy is submitted.
//! Because a chunk is guarded until its content is durable, nothing that persist has in its own
//! memory is needed for recovery.
//!
//! The memory of a layer is bounded, however many chunks it has: besides the bits of its record, it
//! has only the chunks that have copies in memory, or that are being copied or stored at the moment.

mod adoption;
mod spill;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use cairn_store::{ChunkId, ChunkIndex, NewSnapshot};

use self::spill::Spill;
use super::Epoch;
use super::chunk_state::ChunkState;
use super::layer_state::LayerState;
use super::record::EpochRecord;
use crate::mirror::bits::DirtySet;
use crate::mirror::block_set::BlockSet;
use crate::mirror::cow::buffer_pool::PooledBuffer;
use crate::mirror::cow::spill_space::SpillReservation;
use crate::mirror::cow::{PreservedBlocks, PreservedRun};
use crate::mirror::files::layer_table::{ChunkEntry, LayerDir, LayerTable};
use crate::mirror::layout::{Blocks, Layout};

/// Locks over which the chunks are spread.
const SHARDS: usize = 32;

/// What a write has to do before it may change blocks of a chunk.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CowAction {
    /// Nothing: the write may go on.
    None,
    /// Wait for an event: another write is copying these blocks.
    Wait,
    /// Copy these runs, and report each with [`Layer::record_copy`] or [`Layer::cancel_copy`].
    Copy(Vec<Blocks>),
}

/// Where the copy of a run is.
pub(crate) enum CopyData {
    /// In the copy-on-write memory.
    Memory(PooledBuffer),
    /// In the layer's spill file.
    Spilled(SpillReservation),
}

/// The state of a guarded chunk that only this process knows. A chunk that needs none of it is not
/// tracked.
#[derive(Default)]
struct TrackedChunk {
    /// Copies in memory.
    runs: Vec<Arc<PreservedRun>>,
    /// Blocks that a write is copying at the moment.
    copying: BlockSet,
    /// Whether persist is storing the chunk: the bit that tells Pending from Scheduled.
    is_taken: bool,
}

impl TrackedChunk {
    fn is_needed(&self) -> bool {
        self.is_taken || !self.runs.is_empty() || !self.copying.is_empty()
    }

    fn in_memory(&self) -> BlockSet {
        let union = |set: BlockSet, one: &Arc<PreservedRun>| set.union(&BlockSet::run(one.run));
        self.runs.iter().fold(BlockSet::default(), union)
    }
}

type Shard = HashMap<u64, TrackedChunk>;

/// Changes what is known of a chunk, and forgets it if nothing is left.
fn track<T>(
    shard: &mut Shard,
    chunk: ChunkIndex,
    change: impl FnOnce(&mut TrackedChunk) -> T,
) -> T {
    let entry = shard.entry(chunk.0).or_default();
    let result = change(entry);
    if !entry.is_needed() {
        shard.remove(&chunk.0);
    }
    result
}

/// One frozen epoch on its way into the repository.
pub(crate) struct Layer {
    pub(crate) epoch: Epoch,
    record: Arc<EpochRecord>,
    dir: Arc<LayerDir>,
    tracked: Vec<Mutex<Shard>>,
    /// The number of chunks that have become Idle in this process.
    done: AtomicU64,
    /// The number of chunks that were Idle when this process began.
    done_before: u64,
    table: OnceLock<LayerTable>,
    spill: Mutex<Spill>,
}

impl Layer {
    /// The layer of the epoch of `record`, which is frozen.
    pub(crate) fn new(record: Arc<EpochRecord>, dir: Arc<LayerDir>) -> Layer {
        Layer {
            epoch: record.epoch(),
            record,
            dir,
            tracked: (0..SHARDS).map(|_| Mutex::default()).collect(),
            done: AtomicU64::new(0),
            done_before: 0,
            table: OnceLock::new(),
            spill: Mutex::default(),
        }
    }

    /// The table, which is created if there is none.
    fn table(&self) -> io::Result<&LayerTable> {
        if let Some(table) = self.table.get() {
            return Ok(table);
        }
        // One thread creates it.
        let _spill = self.spill();
        if let Some(table) = self.table.get() {
            return Ok(table);
        }
        let table = self.dir.create_table(self.epoch)?;
        // Before the first entry is written: a process that does not find the table knows that
        // something is missing.
        self.record.set_has_table();
        Ok(self.table.get_or_init(|| table))
    }

    /// What the table has of a chunk.
    fn entry(&self, chunk: ChunkIndex) -> io::Result<ChunkEntry> {
        self.table.get().map_or(Ok(ChunkEntry::default()), |table| table.read(chunk))
    }

    /// The path of the table.
    pub(crate) fn table_path(&self) -> PathBuf {
        self.dir.table_path(self.epoch)
    }

    /// Fails if entries of the table are lost, because the kernel could not write them: then what
    /// was read for this layer may be wrong.
    pub(crate) fn check_table(&self) -> io::Result<()> {
        self.table.get().map_or(Ok(()), LayerTable::sync)
    }

    /// The chunks that the epoch changed.
    pub(crate) fn dirty(&self) -> &DirtySet {
        self.record.chunks.dirty()
    }

    /// Records the checkpoint that froze the epoch. From here on the checkpoint survives the
    /// process.
    pub(crate) fn accept(&self, new: &NewSnapshot) {
        self.record.accept(new);
    }

    /// The checkpoint that froze the epoch, if it was recorded.
    pub(crate) fn accepted(&self) -> Option<NewSnapshot> {
        self.record.accepted()
    }

    /// The size of the disk when the epoch was frozen.
    pub(crate) fn size(&self) -> u64 {
        self.record.size()
    }

    pub(crate) fn state(&self) -> LayerState {
        self.record.state()
    }

    /// No write of the epoch is in flight.
    pub(crate) fn settle(&self) {
        self.record.settle();
    }

    /// The checkpoint ended without a snapshot. Its changes are left to later checkpoints.
    pub(crate) fn abandon(&self) {
        self.record.abandon();
    }

    fn shard(&self, chunk: ChunkIndex) -> MutexGuard<'_, Shard> {
        let shard = &self.tracked[chunk.0 as usize % SHARDS];
        shard.lock().expect("no code panics with a layer locked")
    }

    /// Whether writes have to preserve blocks of `chunk`. This is a few loads.
    pub(crate) fn is_guarding(&self, chunk: ChunkIndex) -> bool {
        self.state().is_guarding() && self.record.chunks.get(chunk, false).is_guarded()
    }

    /// The state of a chunk, with its shard locked. `None` if the layer guards nothing any more:
    /// then nobody may change the state.
    fn chunk_state(&self, chunk: ChunkIndex, shard: &Shard) -> Option<ChunkState> {
        let is_taken = shard.get(&chunk.0).is_some_and(|entry| entry.is_taken);
        self.state().is_guarding().then(|| self.record.chunks.get(chunk, is_taken))
    }

    /// What a write to `blocks` of `chunk` has to do first. `present` are the chunk's blocks that
    /// are present. An undecided block that is absent has the parent's content and needs no copy.
    pub(crate) fn cow_action(
        &self,
        chunk: ChunkIndex,
        blocks: Blocks,
        present: BlockSet,
    ) -> io::Result<CowAction> {
        debug_assert!(self.state().is_settled(), "the dirty set may still grow");
        let mut shard = self.shard(chunk);
        // A chunk becomes Idle under this lock, so this check is final.
        if !self.is_guarding(chunk) {
            return Ok(CowAction::None);
        }
        let mut entry = self.entry(chunk)?;
        let tracked = shard.get(&chunk.0);
        let in_memory = tracked.map(TrackedChunk::in_memory).unwrap_or_default();
        let copying = tracked.map(|tracked| tracked.copying).unwrap_or_default();
        let undecided = BlockSet::run(blocks).without(&entry.decided).without(&in_memory);
        if undecided.is_empty() {
            return Ok(CowAction::None);
        }
        let absent = undecided.without(&present);
        if !absent.is_empty() {
            entry.decided = entry.decided.union(&absent);
            self.table()?.write_blocks(chunk, &entry)?;
        }
        let wanted = undecided.intersection(&present);
        let copies = wanted.without(&copying);
        if copies.is_empty() {
            return Ok(if wanted.is_empty() { CowAction::None } else { CowAction::Wait });
        }
        track(&mut shard, chunk, |tracked| tracked.copying = tracked.copying.union(&copies));
        Ok(CowAction::Copy(copies.runs()))
    }

    /// Records the copy of a run, whose first block is `disk_block` of the disk: its blocks are
    /// decided.
    pub(crate) fn record_copy(
        &self,
        chunk: ChunkIndex,
        run: Blocks,
        disk_block: u64,
        data: CopyData,
    ) -> io::Result<()> {
        let mut shard = self.shard(chunk);
        // A chunk that has become Idle, or a layer that has ended, needs no copy.
        if !self.is_guarding(chunk) {
            return Ok(());
        }
        let set = BlockSet::run(run);
        let kept = match data {
            CopyData::Memory(data) => {
                data.set_owner(self.epoch, Blocks { first: disk_block, ..run });
                Some(Arc::new(PreservedRun { run, data }))
            }
            CopyData::Spilled(reservation) => {
                let mut entry = self.entry(chunk)?;
                entry.decided = entry.decided.union(&set);
                entry.spilled = entry.spilled.union(&set);
                self.table()?.write_blocks(chunk, &entry)?;
                self.spill().add(chunk, reservation);
                None
            }
        };
        track(&mut shard, chunk, |tracked| {
            tracked.copying = tracked.copying.without(&set);
            tracked.runs.extend(kept);
        });
        Ok(())
    }

    /// Takes back the order to copy a run.
    pub(crate) fn cancel_copy(&self, chunk: ChunkIndex, run: Blocks) {
        let mut shard = self.shard(chunk);
        track(&mut shard, chunk, |tracked| {
            tracked.copying = tracked.copying.without(&BlockSet::run(run));
        });
    }

    /// Scheduled → Pending: the caller stores the chunk. Returns `false`, without a change, if the
    /// chunk is in another state.
    pub(crate) fn begin_store(&self, chunk: ChunkIndex) -> bool {
        debug_assert!(self.state().is_settled(), "the dirty set may still grow");
        let mut shard = self.shard(chunk);
        let is_scheduled = self.chunk_state(chunk, &shard) == Some(ChunkState::Scheduled);
        if is_scheduled {
            track(&mut shard, chunk, |tracked| {
                self.record.chunks.set(chunk, &mut tracked.is_taken, ChunkState::Pending);
            });
        }
        is_scheduled
    }

    /// Pending → Scheduled: the caller could not store the chunk.
    pub(crate) fn cancel_store(&self, chunk: ChunkIndex) {
        let mut shard = self.shard(chunk);
        if self.chunk_state(chunk, &shard).is_some() {
            track(&mut shard, chunk, |tracked| {
                self.record.chunks.set(chunk, &mut tracked.is_taken, ChunkState::Scheduled);
            });
        }
    }

    /// The blocks of a Pending chunk that writes have preserved. They take precedence over what was
    /// read from the mirror before this call.
    pub(crate) fn preserved(&self, chunk: ChunkIndex) -> io::Result<PreservedBlocks> {
        let shard = self.shard(chunk);
        let ChunkEntry { decided, spilled, .. } = self.entry(chunk)?;
        let tracked = shard.get(&chunk.0);
        let in_memory = tracked.map(TrackedChunk::in_memory).unwrap_or_default();
        let runs = tracked.map(|tracked| tracked.runs.clone()).unwrap_or_default();
        Ok(PreservedBlocks { decided: decided.union(&in_memory), spilled, runs })
    }

    /// Pending → Idle, for chunks whose content is durable.
    pub(crate) fn mark_stored(
        &self,
        ids: &[(ChunkIndex, Option<ChunkId>)],
        layout: &Layout,
    ) -> io::Result<()> {
        let table = self.table()?;
        for (chunk, id) in ids {
            table.write_stored(*chunk, *id)?;
        }
        ids.iter().for_each(|(chunk, _)| self.finish_store(*chunk, layout));
        Ok(())
    }

    /// Pending → Idle. A chunk that an earlier process made Idle stays so.
    fn finish_store(&self, chunk: ChunkIndex, layout: &Layout) {
        let mut shard = self.shard(chunk);
        match self.chunk_state(chunk, &shard) {
            None | Some(ChunkState::Idle) => return,
            Some(_) => {}
        }
        let entry = shard.entry(chunk.0).or_default();
        // Before the copies are dropped: other copies may use their space after that.
        self.record.chunks.set(chunk, &mut entry.is_taken, ChunkState::Idle);
        shard.remove(&chunk.0);
        self.done.fetch_add(1, Ordering::Relaxed);
        drop(shard);
        self.free_spilled(chunk, layout);
    }

    /// The number of chunks that have become Idle in this process.
    pub(crate) fn done_count(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Whether there are copies for the layer.
    pub(crate) fn has_copies(&self) -> bool {
        let in_memory = self.tracked.iter().any(|shard| {
            let shard = shard.lock().expect("no code panics with a layer locked");
            shard.values().any(|one| !one.runs.is_empty())
        });
        in_memory || self.spill().used.as_ref().is_some_and(|used| !used.is_empty())
    }

    /// At most `limit` Scheduled chunks that have copies. Storing these first frees space soonest.
    pub(crate) fn chunks_with_copies(&self, limit: usize) -> Vec<ChunkIndex> {
        let mut chunks = Vec::new();
        for shard in &self.tracked {
            let shard = shard.lock().expect("no code panics with a layer locked");
            let found = shard.iter().filter(|(_, one)| !one.is_taken && !one.runs.is_empty());
            chunks.extend(found.map(|(chunk, _)| ChunkIndex(*chunk)));
            if chunks.len() >= limit {
                break;
            }
        }
        chunks.truncate(limit);
        let mut spill = self.spill();
        while chunks.len() < limit
            && let Some(chunk) = spill.recent.pop_back()
        {
            chunks.push(chunk);
        }
        chunks
    }

    /// The number of chunks that are durable.
    pub(crate) fn stored_count(&self) -> u64 {
        self.done_before + self.done_count()
    }

    /// Whether a chunk is durable.
    pub(crate) fn is_stored(&self, chunk: ChunkIndex) -> bool {
        self.record.chunks.get(chunk, false) == ChunkState::Idle
    }

    /// The name of a chunk that is durable; the inner `None` is a hole.
    pub(crate) fn stored(&self, chunk: ChunkIndex) -> io::Result<Option<Option<ChunkId>>> {
        match self.is_stored(chunk) {
            true => Ok(self.entry(chunk)?.stored),
            false => Ok(None),
        }
    }

    /// Records that old content was lost. The first reason stays. From here on no write has to
    /// preserve blocks for this layer, and its copies are dropped. What is read for it from the
    /// mirror may be newer than the epoch, so the caller that publishes a snapshot checks
    /// [`Layer::failure`] after all reading.
    pub(crate) fn fail(&self, reason: &str) {
        self.record.fail(reason);
        self.drop_copies();
    }

    fn drop_copies(&self) {
        for shard in &self.tracked {
            shard.lock().expect("no code panics with a layer locked").clear();
        }
        let ended = Spill { has_ended: true, ..Spill::default() };
        // The space counts as free from here on, although the file system frees it a little later.
        let Spill { file, .. } = std::mem::replace(&mut *self.spill(), ended);
        if let Some(file) = file {
            self.dir.discard_content(file);
        }
    }

    /// Why the snapshot cannot be completed, if so.
    pub(crate) fn failure(&self) -> Option<String> {
        self.record.failure()
    }

    /// Ends the layer: it guards nothing and has no copies any more, and the next process does not
    /// find it. The names of its chunks can still be read.
    pub(crate) fn close(&self) {
        // Before the copies are dropped: other copies may use their space after that.
        self.record.close();
        self.drop_copies();
        self.dir.remove(self.epoch);
    }
}

#[cfg(test)]
mod tests;
