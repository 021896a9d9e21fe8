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
//! A layer outlives the process. Its states are in shared memory ([`EpochRecord`]), its copies are
//! in the copy-on-write memory or in the spill file, and the [`Journal`] has a record of each copy
//! before the write that depends on it is submitted. Because a chunk is guarded until its content
//! is durable, nothing that persist has in its own memory is needed for recovery.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cairn_store::{ChunkId, ChunkIndex, NewSnapshot};

use super::Epoch;
use super::chunk_state::ChunkState;
use super::layer_state::LayerState;
use super::record::EpochRecord;
use crate::mirror::bits::DirtySet;
use crate::mirror::block_set::BlockSet;
use crate::mirror::cow::{CopyData, CowSpace, PreservedBlocks, PreservedRun};
use crate::mirror::files::journal::{ChunkEvent, CopyLocation, Journal, Record};
use crate::mirror::layout::{BLOCK_BYTES, Blocks, Layout};

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

/// The state of a guarded chunk that only this process knows.
#[derive(Default)]
struct TrackedChunk {
    preserved: PreservedBlocks,
    /// Blocks that a write is copying at the moment.
    copying: BlockSet,
    /// Whether persist is storing the chunk: the bit that tells Pending from Scheduled.
    is_taken: bool,
}

type Shard = HashMap<u64, TrackedChunk>;

/// One frozen epoch on its way into the repository.
pub(crate) struct Layer {
    pub(crate) epoch: Epoch,
    record: Arc<EpochRecord>,
    journal: Arc<Journal>,
    tracked: Vec<Mutex<Shard>>,
    /// The number of chunks that have become Idle in this process.
    done: AtomicU64,
    /// Chunks whose content is durable (`None`: the chunk is a hole).
    stored: Mutex<BTreeMap<ChunkIndex, Option<ChunkId>>>,
}

impl Layer {
    /// The layer of the epoch of `record`, which is frozen.
    pub(crate) fn new(record: Arc<EpochRecord>, journal: Arc<Journal>) -> Layer {
        Layer {
            epoch: record.epoch(),
            record,
            journal,
            tracked: (0..SHARDS).map(|_| Mutex::default()).collect(),
            done: AtomicU64::new(0),
            stored: Mutex::default(),
        }
    }

    /// Recovers a layer of a process that is gone, with the records that the journal has of it. No
    /// write of its epoch is in flight any more. If the journal does not fit, the layer fails.
    pub(crate) fn recover(
        record: EpochRecord,
        journal: &Arc<Journal>,
        records: Option<&[Record]>,
        layout: &Layout,
        space: &CowSpace,
    ) -> Layer {
        if record.state() == LayerState::Open {
            record.freeze(record.size());
        }
        record.settle();
        let layer = Layer::new(Arc::new(record), journal.clone());
        if layer.failure().is_none()
            && records.and_then(|all| layer.replay(all, layout, space)).is_none()
        {
            layer.fail("the mirror's journal was damaged when the disk's process was restarted");
        }
        layer
    }

    /// Applies the journal's records again. `None` if they contradict the layer.
    fn replay(&self, records: &[Record], layout: &Layout, space: &CowSpace) -> Option<()> {
        let own = || records.iter().filter(|record| record.epoch == self.epoch);
        // Only chunks that the epoch changed have records.
        let is_changed =
            |chunk: ChunkIndex| chunk.0 < layout.chunk_count() && self.dirty().contains(chunk.0);
        if !own().all(|record| is_changed(record.chunk)) {
            return None;
        }
        for Record { chunk, event, .. } in own() {
            if let ChunkEvent::Stored(id) = event {
                self.stored().insert(*chunk, *id);
                // The process may have ended before it set the chunk's state.
                self.begin_store(*chunk);
                self.finish_store(*chunk);
            }
        }
        for Record { chunk, event, .. } in own() {
            let (ChunkEvent::Copied(run, _) | ChunkEvent::Absent(run)) = event else { continue };
            if run.count == 0 || run.end() > layout.blocks_per_chunk() {
                return None;
            }
            // The copies of a chunk that is Idle are gone.
            if !self.is_guarding(*chunk) {
                continue;
            }
            let len = run.span().len;
            let data = match event {
                ChunkEvent::Copied(_, CopyLocation::Memory(at)) => {
                    Some(CopyData::Memory(space.memory.take_at(*at, len)?))
                }
                // Direct I/O needs whole blocks, and so do the free ranges between the copies.
                ChunkEvent::Copied(_, CopyLocation::File(at))
                    if !at.is_multiple_of(BLOCK_BYTES) =>
                {
                    return None;
                }
                ChunkEvent::Copied(_, CopyLocation::File(at)) => {
                    Some(CopyData::File(space.spill.take_at(*at, len)?))
                }
                _ => None,
            };
            let mut shard = self.shard(*chunk);
            let preserved = &mut shard.entry(chunk.0).or_default().preserved;
            preserved.decided = preserved.decided.union(&BlockSet::run(*run));
            preserved.runs.extend(data.map(|data| Arc::new(PreservedRun { run: *run, data })));
        }
        Some(())
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

    /// The chunks that are durable so far.
    pub(crate) fn stored(&self) -> MutexGuard<'_, BTreeMap<ChunkIndex, Option<ChunkId>>> {
        self.stored.lock().expect("no code panics with a layer locked")
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
        let entry = shard.entry(chunk.0).or_default();
        let undecided = BlockSet::run(blocks).without(&entry.preserved.decided);
        if undecided.is_empty() {
            return Ok(CowAction::None);
        }
        let absent = undecided.without(&present);
        if !absent.is_empty() {
            self.write_journal(chunk, absent.runs().into_iter().map(ChunkEvent::Absent))?;
            entry.preserved.decided = entry.preserved.decided.union(&absent);
        }
        let wanted = undecided.intersection(&present);
        let copies = wanted.without(&entry.copying);
        entry.copying = entry.copying.union(&copies);
        Ok(match (wanted.is_empty(), copies.is_empty()) {
            (true, _) => CowAction::None,
            (false, true) => CowAction::Wait,
            (false, false) => CowAction::Copy(copies.runs()),
        })
    }

    fn write_journal(
        &self,
        chunk: ChunkIndex,
        events: impl Iterator<Item = ChunkEvent>,
    ) -> io::Result<()> {
        self.journal.write(events.map(|event| Record { epoch: self.epoch, chunk, event }))
    }

    /// Records the copy of a run: its blocks are decided.
    pub(crate) fn record_copy(&self, chunk: ChunkIndex, copy: PreservedRun) -> io::Result<()> {
        let mut shard = self.shard(chunk);
        // A chunk that has become Idle, or a layer that has ended, needs no copy.
        if !self.is_guarding(chunk) {
            return Ok(());
        }
        let event = ChunkEvent::Copied(copy.run, copy.data.location());
        self.write_journal(chunk, std::iter::once(event))?;
        let entry = shard.entry(chunk.0).or_default();
        let run = BlockSet::run(copy.run);
        entry.copying = entry.copying.without(&run);
        entry.preserved.decided = entry.preserved.decided.union(&run);
        entry.preserved.runs.push(Arc::new(copy));
        Ok(())
    }

    /// Takes back the order to copy a run.
    pub(crate) fn cancel_copy(&self, chunk: ChunkIndex, run: Blocks) {
        if let Some(entry) = self.shard(chunk).get_mut(&chunk.0) {
            entry.copying = entry.copying.without(&BlockSet::run(run));
        }
    }

    /// Scheduled → Pending: the caller stores the chunk. Returns `false`, without a change, if the
    /// chunk is in another state.
    pub(crate) fn begin_store(&self, chunk: ChunkIndex) -> bool {
        debug_assert!(self.state().is_settled(), "the dirty set may still grow");
        let mut shard = self.shard(chunk);
        let is_scheduled = self.chunk_state(chunk, &shard) == Some(ChunkState::Scheduled);
        if is_scheduled {
            let entry = shard.entry(chunk.0).or_default();
            self.record.chunks.set(chunk, &mut entry.is_taken, ChunkState::Pending);
        }
        is_scheduled
    }

    /// Pending → Scheduled: the caller could not store the chunk.
    pub(crate) fn cancel_store(&self, chunk: ChunkIndex) {
        let mut shard = self.shard(chunk);
        if self.chunk_state(chunk, &shard).is_some() {
            let entry = shard.entry(chunk.0).or_default();
            self.record.chunks.set(chunk, &mut entry.is_taken, ChunkState::Scheduled);
        }
    }

    /// The blocks of a Pending chunk that writes have preserved. They take precedence over what was
    /// read from the mirror before this call.
    pub(crate) fn preserved(&self, chunk: ChunkIndex) -> PreservedBlocks {
        self.shard(chunk).get(&chunk.0).map(|entry| entry.preserved.clone()).unwrap_or_default()
    }

    /// Pending → Idle, for chunks whose content is durable.
    pub(crate) fn mark_stored(&self, ids: &[(ChunkIndex, Option<ChunkId>)]) -> io::Result<()> {
        let record = |(chunk, id): &_| Record {
            epoch: self.epoch,
            chunk: *chunk,
            event: ChunkEvent::Stored(*id),
        };
        self.journal.write(ids.iter().map(record))?;
        self.stored().extend(ids.iter().copied());
        ids.iter().for_each(|(chunk, _)| self.finish_store(*chunk));
        Ok(())
    }

    /// Pending → Idle. A chunk that an earlier process made Idle stays so.
    fn finish_store(&self, chunk: ChunkIndex) {
        let mut shard = self.shard(chunk);
        match self.chunk_state(chunk, &shard) {
            None | Some(ChunkState::Idle) => return,
            Some(_) => {}
        }
        let entry = shard.entry(chunk.0).or_default();
        // Before the copies are dropped: other copies may use their ranges after that.
        self.record.chunks.set(chunk, &mut entry.is_taken, ChunkState::Idle);
        shard.remove(&chunk.0);
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of chunks that have become Idle in this process.
    pub(crate) fn done_count(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// At most `limit` Scheduled chunks that have copies. Storing these first frees memory soonest.
    pub(crate) fn chunks_with_copies(&self, limit: usize) -> Vec<ChunkIndex> {
        let mut chunks = Vec::new();
        for shard in &self.tracked {
            let shard = shard.lock().expect("no code panics with a layer locked");
            let found =
                shard.iter().filter(|(_, one)| !one.is_taken && !one.preserved.runs.is_empty());
            chunks.extend(found.map(|(chunk, _)| ChunkIndex(*chunk)));
            if chunks.len() >= limit {
                break;
            }
        }
        chunks.truncate(limit);
        chunks
    }

    /// The number of chunks that are durable.
    pub(crate) fn stored_count(&self) -> u64 {
        self.stored().len() as u64
    }

    /// Whether a chunk is durable.
    pub(crate) fn is_stored(&self, chunk: ChunkIndex) -> bool {
        self.stored().contains_key(&chunk)
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
    }

    /// Why the snapshot cannot be completed, if so.
    pub(crate) fn failure(&self) -> Option<String> {
        self.record.failure()
    }

    /// Ends the layer: it guards nothing and holds nothing any more, and the next process does not
    /// find it.
    pub(crate) fn close(&self) {
        // Before the copies are dropped: other copies may use their ranges after that.
        self.record.close();
        self.drop_copies();
        self.stored().clear();
    }
}

#[cfg(test)]
mod tests;
