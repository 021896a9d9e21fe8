//! A frozen epoch and selective copy-on-write (BlobCR, algorithms 2 to 4).
//!
//! ```text
//!                    persist takes it          its blob is durable
//!   Scheduled ──────────────────────► Pending ──────────────────────► Idle
//!       ▲                                │
//!       └────────────────────────────────┘ something failed
//! ```
//!
//! A chunk of the epoch's dirty set is *Scheduled* until persist takes it, and *Pending* until its content
//! is durable in the repository. *Idle* is forever: the epoch has event it needs, the mirror is free to
//! change. A chunk outside the dirty set is Idle from the start.
//!
//! Copies are made by blocks, not by chunks: a write to a chunk that is not Idle first puts aside the old
//! content of just the blocks that it hits. These are then *decided* for this epoch, and later writes to
//! them owe nothing. In the paper a write waits for a Pending chunk. Here it need not: when persist has
//! read the chunk, it lays event was put aside over it, so it does not matter whether its read saw
//! the block before the write, after it, or torn.
//!
//! The dirty set is complete, and its chunks may be entry, only when the layer is *settled*: no write
//! of the epoch is submitted any more.
//!
//! A layer outlives the process: its sets are in shared memory ([`EpochRecord`]), copies lie on the memory
//! or in the spill file, and the [`Journal`] has a record of each before the write that it allows. Because
//! a chunk is guarded until its blob is durable, nothing that persist has in memory is needed for that.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cairn_store::{ChunkId, ChunkIndex, NewSnapshot};

use super::Epoch;
use super::record::EpochRecord;
use crate::mirror::bits::DirtySet;
use crate::mirror::block_set::BlockSet;
use crate::mirror::cow::{CopyData, CowMemory, PreservedBlocks, PreservedRun, RangeAllocator};
use crate::mirror::files::journal::{ChunkEvent, CopyLocation, Journal, Record};
use crate::mirror::layout::{BLOCK_BYTES, Blocks, Layout};

/// Locks over which the chunks are spread.
const SHARDS: usize = 32;

/// ChunkEvent a write has to do before it may touch blocks of a chunk.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CowAction {
    /// Nothing.
    None,
    /// Wait for an event: somebody else is copying these blocks.
    Wait,
    /// Copy these runs aside and report each with [`Layer::record_copy`] or [`Layer::cancel_copy`].
    Copy(Vec<Blocks>),
}

/// One chunk between Scheduled and Idle.
#[derive(Default)]
struct TrackedChunk {
    preserved: PreservedBlocks,
    /// Blocks that a write is copying at the moment.
    copying: BlockSet,
    pending: bool,
}

/// One frozen epoch on its way into the repository.
pub(crate) struct Layer {
    pub(crate) epoch: Epoch,
    state: Arc<EpochRecord>,
    journal: Arc<Journal>,
    settled: AtomicBool,
    /// Set once no write has to look at this layer any more: it is published, given up or lost.
    closed: AtomicBool,
    tracked: Vec<Mutex<HashMap<u64, TrackedChunk>>>,
    /// Chunks that have turned Idle.
    done: AtomicU64,
    /// Chunks whose blob is durable (`None`: the chunk is a hole).
    stored: Mutex<BTreeMap<ChunkIndex, Option<ChunkId>>>,
    /// Those of them that a process stored which is gone, perhaps with less than their full redundancy.
    inherited: Mutex<Vec<(ChunkIndex, ChunkId)>>,
}

impl Layer {
    /// The epoch of `state` has ended.
    pub(crate) fn new(state: Arc<EpochRecord>, journal: Arc<Journal>) -> Layer {
        Layer {
            epoch: state.epoch(),
            state,
            journal,
            settled: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            tracked: (0..SHARDS).map(|_| Mutex::default()).collect(),
            done: AtomicU64::new(0),
            stored: Mutex::default(),
            inherited: Mutex::default(),
        }
    }

    /// Takes up a layer of a process that is gone, with event the journal has of it. No write of its epoch
    /// is submitted any more. If the journal does not fit, its snapshot cannot be had.
    pub(crate) fn recover(
        state: EpochRecord,
        journal: &Arc<Journal>,
        records: Option<&[Record]>,
        layout: &Layout,
        (memory, spill): (&CowMemory, &Arc<RangeAllocator>),
    ) -> Layer {
        let layer = Layer::new(Arc::new(state), journal.clone());
        layer.set_settled();
        if layer.failure().is_some() {
            layer.closed.store(true, Ordering::Release);
        } else if records.and_then(|all| layer.replay(all, layout, (memory, spill))).is_none() {
            layer.set_failure(
                "the mirror's journal was damaged when the disk's process was restarted",
            );
        }
        layer
    }

    /// Does again event the journal says. `None` if that cannot be.
    fn replay(
        &self,
        records: &[Record],
        layout: &Layout,
        (memory, spill): (&CowMemory, &Arc<RangeAllocator>),
    ) -> Option<()> {
        let own = || records.iter().filter(|record| record.epoch == self.epoch);
        // Nothing happens to a chunk that the epoch did not change.
        let is_changed =
            |chunk: ChunkIndex| chunk.0 < layout.chunk_count() && self.dirty().contains(chunk.0);
        if !own().all(|record| is_changed(record.chunk)) {
            return None;
        }
        for Record { chunk, event, .. } in own() {
            if let ChunkEvent::Stored(id) = event {
                self.stored().insert(*chunk, *id);
                self.inherited().extend(id.map(|id| (*chunk, id)));
                self.finish(*chunk);
            }
        }
        for Record { chunk, event, .. } in own() {
            let (ChunkEvent::Copied(run, _) | ChunkEvent::Absent(run)) = event else { continue };
            if run.count == 0 || run.end() > layout.blocks_per_chunk() {
                return None;
            }
            // ChunkEvent an idle chunk had put aside is gone.
            if !self.guards(*chunk) {
                continue;
            }
            let len = run.span().len;
            let old = match event {
                ChunkEvent::Copied(_, CopyLocation::Memory(at)) => {
                    Some(CopyData::Memory(memory.take_at(*at, len)?))
                }
                // Direct I/O needs whole blocks, and so do the places between those that are taken.
                ChunkEvent::Copied(_, CopyLocation::File(at))
                    if !at.is_multiple_of(BLOCK_BYTES) =>
                {
                    return None;
                }
                ChunkEvent::Copied(_, CopyLocation::File(at)) => {
                    Some(CopyData::File(spill.take_at(*at, len)?))
                }
                _ => None,
            };
            let mut shard = self.shard(*chunk);
            let preserved = &mut shard.entry(chunk.0).or_default().preserved;
            preserved.decided = preserved.decided.union(&BlockSet::run(*run));
            preserved.runs.extend(old.map(|old| Arc::new(PreservedRun { run: *run, data: old })));
        }
        Some(())
    }

    /// The chunks that the epoch changed.
    pub(crate) fn dirty(&self) -> &DirtySet {
        &self.state.dirty
    }

    /// Records the checkpoint that froze the epoch: from here on it survives the process.
    pub(crate) fn accept(&self, new: &NewSnapshot) {
        self.state.accept(new);
    }

    /// The checkpoint that froze the epoch.
    pub(crate) fn accepted(&self) -> Option<NewSnapshot> {
        self.state.accepted()
    }

    /// The checkpoint has ended without a snapshot. ChunkEvent it changed is for later ones.
    pub(crate) fn end(&self) {
        self.state.end();
    }

    /// Whether the checkpoint has ended without a snapshot.
    pub(crate) fn has_ended(&self) -> bool {
        self.state.has_ended()
    }

    fn shard(&self, chunk: ChunkIndex) -> MutexGuard<'_, HashMap<u64, TrackedChunk>> {
        let shard = &self.tracked[chunk.0 as usize % SHARDS];
        shard.lock().expect("no code panics with a layer locked")
    }

    /// The durable chunks so far.
    pub(crate) fn stored(&self) -> MutexGuard<'_, BTreeMap<ChunkIndex, Option<ChunkId>>> {
        self.stored.lock().expect("no code panics with a layer locked")
    }

    /// The chunks that a process stored which is gone, until somebody has seen to it that they have their full
    /// redundancy.
    pub(crate) fn inherited(&self) -> MutexGuard<'_, Vec<(ChunkIndex, ChunkId)>> {
        self.inherited.lock().expect("no code panics with a layer locked")
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Acquire)
    }

    pub(crate) fn set_settled(&self) {
        self.settled.store(true, Ordering::Release);
    }

    /// Whether `chunk` is Scheduled or Pending. A few loads.
    pub(crate) fn guards(&self, chunk: ChunkIndex) -> bool {
        !self.closed.load(Ordering::Acquire)
            && self.dirty().contains(chunk.0)
            && !self.state.idle.get(chunk.0)
    }

    /// ChunkEvent a write to `blocks` of `chunk` owes. `present` are the chunk's blocks that are present:
    /// an undecided one that is absent has the parent's content, and needs no copy.
    pub(crate) fn cow_action(
        &self,
        chunk: ChunkIndex,
        blocks: Blocks,
        present: BlockSet,
    ) -> io::Result<CowAction> {
        debug_assert!(self.is_settled(), "the dirty set may still grow");
        let mut shard = self.shard(chunk);
        // Idle is set under this lock, so this look is final.
        if !self.guards(chunk) {
            return Ok(CowAction::None);
        }
        let entry = shard.entry(chunk.0).or_default();
        let undecided = BlockSet::run(blocks).without(&entry.preserved.decided);
        if undecided.is_empty() {
            return Ok(CowAction::None);
        }
        let absent = undecided.without(&present);
        if !absent.is_empty() {
            self.record(chunk, absent.runs().into_iter().map(ChunkEvent::Absent))?;
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

    fn record(
        &self,
        chunk: ChunkIndex,
        events: impl Iterator<Item = ChunkEvent>,
    ) -> io::Result<()> {
        self.journal.write(events.map(|event| Record { epoch: self.epoch, chunk, event }))
    }

    /// A run was copied aside: its blocks are decided.
    pub(crate) fn record_copy(&self, chunk: ChunkIndex, piece: PreservedRun) -> io::Result<()> {
        let mut shard = self.shard(chunk);
        // A chunk that turned Idle meanwhile, or a layer that ended, needs no copy.
        if !self.guards(chunk) {
            return Ok(());
        }
        let event = ChunkEvent::Copied(piece.run, piece.data.location());
        self.record(chunk, std::iter::once(event))?;
        let entry = shard.entry(chunk.0).or_default();
        let run = BlockSet::run(piece.run);
        entry.copying = entry.copying.without(&run);
        entry.preserved.decided = entry.preserved.decided.union(&run);
        entry.preserved.runs.push(Arc::new(piece));
        Ok(())
    }

    /// A run could not be copied: it is as before.
    pub(crate) fn cancel_copy(&self, chunk: ChunkIndex, run: Blocks) {
        if let Some(entry) = self.shard(chunk).get_mut(&chunk.0) {
            entry.copying = entry.copying.without(&BlockSet::run(run));
        }
    }

    /// Scheduled → Pending, for persist. `false` if the chunk is Idle, or Pending with somebody else.
    pub(crate) fn begin_store(&self, chunk: ChunkIndex) -> bool {
        debug_assert!(self.is_settled(), "the dirty set may still grow");
        let mut shard = self.shard(chunk);
        if !self.guards(chunk) {
            return false;
        }
        let entry = shard.entry(chunk.0).or_default();
        !std::mem::replace(&mut entry.pending, true)
    }

    /// ChunkEvent writes have put aside of a Pending chunk. It counts more than event was read from the mirror
    /// before this call.
    pub(crate) fn preserved(&self, chunk: ChunkIndex) -> PreservedBlocks {
        self.shard(chunk).get(&chunk.0).map(|entry| entry.preserved.clone()).unwrap_or_default()
    }

    /// Pending → Idle: the chunks' blobs are durable.
    pub(crate) fn mark_stored(&self, ids: &[(ChunkIndex, Option<ChunkId>)]) -> io::Result<()> {
        let record = |(chunk, id): &_| Record {
            epoch: self.epoch,
            chunk: *chunk,
            event: ChunkEvent::Stored(*id),
        };
        self.journal.write(ids.iter().map(record))?;
        self.stored().extend(ids.iter().copied());
        ids.iter().for_each(|(chunk, _)| self.finish(*chunk));
        Ok(())
    }

    fn finish(&self, chunk: ChunkIndex) {
        let mut shard = self.shard(chunk);
        // Before event was put aside is gone: its place may be used again.
        self.state.idle.set(chunk.0);
        shard.remove(&chunk.0);
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// How many chunks have turned Idle.
    pub(crate) fn done_count(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Pending → Scheduled, after a failure.
    pub(crate) fn cancel_store(&self, chunk: ChunkIndex) {
        if let Some(entry) = self.shard(chunk).get_mut(&chunk.0) {
            entry.pending = false;
        }
    }

    /// At most `limit` Scheduled chunks of which something was put aside: to take them first frees
    /// memory soonest.
    pub(crate) fn chunks_with_copies(&self, limit: usize) -> Vec<ChunkIndex> {
        let mut chunks = Vec::new();
        for shard in &self.tracked {
            let shard = shard.lock().expect("no code panics with a layer locked");
            let chunks_with_copies =
                shard.iter().filter(|(_, one)| !one.pending && !one.preserved.runs.is_empty());
            chunks.extend(chunks_with_copies.map(|(chunk, _)| ChunkIndex(*chunk)));
            if chunks.len() >= limit {
                break;
            }
        }
        chunks.truncate(limit);
        chunks
    }

    /// How many chunks are durable.
    pub(crate) fn stored_count(&self) -> u64 {
        self.stored().len() as u64
    }

    /// Whether a chunk is durable.
    pub(crate) fn is_stored(&self, chunk: ChunkIndex) -> bool {
        self.stored().contains_key(&chunk)
    }

    /// Notes that the snapshot cannot be completed. The first reason stays. From here on no write
    /// has to wait for this layer, and event was put aside for it is gone. ChunkEvent is read for it from the
    /// mirror may be newer than it: so whoever publishes looks at [`Layer::failure`] after all reading.
    pub(crate) fn set_failure(&self, reason: &str) {
        self.state.fail(reason);
        self.closed.store(true, Ordering::Release);
        self.clear_tracked();
    }

    fn clear_tracked(&self) {
        for shard in &self.tracked {
            shard.lock().expect("no code panics with a layer locked").clear();
        }
    }

    /// Why the snapshot cannot be completed, if so.
    pub(crate) fn failure(&self) -> Option<String> {
        self.state.failure()
    }

    /// Ends the layer: it guards nothing and holds nothing any more, and the next process does not find it.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // Before event was put aside is gone: its places may be used again.
        self.state.remove();
        self.clear_tracked();
        self.stored().clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cairn_store::{ChunkId, ChunkIndex, Geometry};

    use super::{BlockSet, Blocks, CowAction, Epoch, Layer};
    use crate::mirror::cow::{CopyData, CowMemory, PreservedRun, RangeAllocator};
    use crate::mirror::epoch::record::EpochFiles;
    use crate::mirror::files::journal::{ChunkEvent, CopyLocation, Journal, Record};
    use crate::mirror::layout::Layout;

    const CHUNK: ChunkIndex = ChunkIndex(3);

    /// A layer of ten chunks and event it leaves behind.
    struct Bench {
        dir: tempfile::TempDir,
        memory: CowMemory,
        journal: Arc<Journal>,
        layer: Layer,
    }

    impl Bench {
        fn new() -> Bench {
            let dir = tempfile::tempdir().unwrap();
            let (epochs, _) = EpochFiles::open(dir.path(), 10).unwrap();
            let state = epochs.allocate().unwrap();
            state.begin(Epoch(1));
            state.dirty.insert(CHUNK.0);
            let journal = Arc::new(Journal::open(&dir.path().join("journal")).unwrap());
            let layer = Layer::new(Arc::new(state), journal.clone());
            layer.set_settled();
            let memory = CowMemory::new(tempfile::tempfile().unwrap(), 1 << 20).unwrap();
            Bench { dir, memory, journal, layer }
        }

        fn cow_action(&self, run: Blocks, present: BlockSet) -> CowAction {
            self.layer.cow_action(CHUNK, run, present).unwrap()
        }

        fn copy(&self, run: Blocks, fill: u8) {
            let mut buffer = self.memory.take(run.span().len).unwrap();
            buffer.fill(fill);
            self.layer
                .record_copy(CHUNK, PreservedRun { run, data: CopyData::Memory(buffer) })
                .unwrap();
        }

        /// The layer as the next process has it.
        fn recover(&self) -> Layer {
            let (_, mut found) = EpochFiles::open(self.dir.path(), 10).unwrap();
            let records = self.journal.read().unwrap().unwrap();
            let layout = Layout::new(Geometry::new(10 * 256 * 1024, 256 * 1024).unwrap());
            let places = (&self.memory, &RangeAllocator::new(1 << 20));
            Layer::recover(found.pop().unwrap(), &self.journal, Some(&records), &layout, places)
        }
    }

    fn all() -> BlockSet {
        BlockSet::run(run(0, 64))
    }

    fn run(first: u64, count: u64) -> Blocks {
        Blocks { first, count }
    }

    #[test]
    fn many_small_writes_to_one_block_cause_one_copy() {
        let bench = Bench::new();
        assert_eq!(bench.cow_action(run(5, 1), all()), CowAction::Copy(vec![run(5, 1)]));
        assert_eq!(
            bench.cow_action(run(5, 1), all()),
            CowAction::Wait,
            "another queue is copying it"
        );
        bench.copy(run(5, 1), 0);
        assert_eq!(bench.cow_action(run(5, 1), all()), CowAction::None);
        assert_eq!(bench.cow_action(run(4, 3), all()), CowAction::Copy(vec![run(4, 1), run(6, 1)]));
    }

    #[test]
    fn an_absent_block_is_decided_without_a_copy() {
        let bench = Bench::new();
        let present = BlockSet::run(run(0, 8));
        assert_eq!(bench.cow_action(run(6, 4), present), CowAction::Copy(vec![run(6, 2)]));
        assert_eq!(bench.cow_action(run(8, 2), all()), CowAction::None);
        assert!(bench.layer.begin_store(CHUNK));
        let preserved = bench.layer.preserved(CHUNK);
        assert!(preserved.decided.contains(8) && !preserved.decided.contains(6));
    }

    #[test]
    fn what_is_put_aside_while_persist_reads_counts_more_than_what_it_read() {
        let bench = Bench::new();
        assert!(bench.layer.begin_store(CHUNK));
        assert!(!bench.layer.begin_store(CHUNK), "a chunk is taken by one");
        assert_eq!(bench.cow_action(run(1, 1), all()), CowAction::Copy(vec![run(1, 1)]));
        bench.copy(run(1, 1), 0);
        let mut read = vec![0xff; 64 * 4096];
        let preserved = bench.layer.preserved(CHUNK);
        assert_eq!(preserved.overlay(&mut read, all(), |_, _| Ok(())).unwrap(), all());
        assert!(read[4096..8192].iter().all(|byte| *byte == 0) && read[8192] == 0xff);
        assert_eq!(
            bench.cow_action(run(2, 1), all()),
            CowAction::Copy(vec![run(2, 1)]),
            "not durable yet"
        );
        bench.layer.mark_stored(&[(CHUNK, Some(ChunkId::of(&read)))]).unwrap();
        assert_eq!(bench.cow_action(run(3, 1), all()), CowAction::None);
        assert!(!bench.layer.begin_store(CHUNK), "idle is forever");
    }

    #[test]
    fn a_chunk_that_was_not_changed_is_idle() {
        let bench = Bench::new();
        assert_eq!(
            bench.layer.cow_action(ChunkIndex(4), run(0, 64), all()).unwrap(),
            CowAction::None
        );
        assert!(!bench.layer.begin_store(ChunkIndex(4)));
    }

    #[test]
    fn a_failed_read_puts_the_chunk_back() {
        let bench = Bench::new();
        assert!(bench.layer.begin_store(CHUNK));
        bench.layer.cancel_store(CHUNK);
        assert_eq!(bench.cow_action(run(1, 1), all()), CowAction::Copy(vec![run(1, 1)]));
        bench.layer.cancel_copy(CHUNK, run(1, 1));
        assert_eq!(bench.cow_action(run(1, 1), all()), CowAction::Copy(vec![run(1, 1)]));
    }

    #[test]
    fn the_next_process_finds_copies_and_absent_blocks_but_nothing_half_done() {
        let bench = Bench::new();
        bench.cow_action(run(1, 2), all());
        bench.copy(run(1, 2), 0x11);
        bench.cow_action(run(10, 1), all());
        bench.cow_action(run(20, 1), BlockSet::default());
        // In truth the places are free because the process is gone.
        bench.layer.clear_tracked();
        let again = bench.recover();
        let preserved = again.preserved(CHUNK);
        assert!(preserved.decided.contains(1) && preserved.decided.contains(2));
        assert!(preserved.decided.contains(20) && !preserved.decided.contains(10));
        let mut read = vec![0xff; 64 * 4096];
        preserved.overlay(&mut read, all(), |_, _| Ok(())).unwrap();
        assert!(read[4096..3 * 4096].iter().all(|byte| *byte == 0x11));
        assert!(bench.memory.take_at(0, 8192).is_none(), "the copy's place is in use");
        assert_eq!(
            again.cow_action(CHUNK, run(10, 1), all()).unwrap(),
            CowAction::Copy(vec![run(10, 1)])
        );
    }

    #[test]
    fn the_next_process_owes_nothing_for_what_is_durable_or_lost() {
        let bench = Bench::new();
        bench.cow_action(run(1, 1), all());
        bench.copy(run(1, 1), 0x11);
        bench.layer.mark_stored(&[(CHUNK, None)]).unwrap();
        let again = bench.recover();
        assert!(again.is_stored(CHUNK) && !again.guards(CHUNK));
        assert!(bench.memory.take_at(0, 4096).is_some(), "the copy is not needed");
        assert!(again.inherited().is_empty(), "a hole is nowhere");

        let bench = Bench::new();
        let id = ChunkId::of(b"stored");
        bench.layer.mark_stored(&[(CHUNK, Some(id))]).unwrap();
        assert!(bench.layer.inherited().is_empty(), "it is its own");
        assert_eq!(*bench.recover().inherited(), [(CHUNK, id)]);

        let bench = Bench::new();
        bench.layer.set_failure("no room");
        let again = bench.recover();
        assert_eq!(again.failure().as_deref(), Some("no room"));
        assert!(!again.guards(CHUNK));
    }

    #[test]
    fn a_journal_that_cannot_be_right_is_refused() {
        let bench = Bench::new();
        bench.cow_action(run(1, 1), all());
        bench.copy(run(1, 1), 0x11);
        assert!(bench.recover().failure().is_some(), "two copies at one place");

        let copied = |at| ChunkEvent::Copied(run(1, 1), CopyLocation::File(at));
        for (chunk, event) in [
            (ChunkIndex(4), ChunkEvent::Stored(None)),
            (ChunkIndex(4), ChunkEvent::Absent(run(1, 1))),
            (ChunkIndex(10), ChunkEvent::Stored(None)),
            (CHUNK, copied(512)),
            (CHUNK, copied(1 << 20)),
            (CHUNK, ChunkEvent::Absent(run(60, 5))),
        ] {
            let bench = Bench::new();
            bench.journal.write([Record { epoch: Epoch(1), chunk, event }]).unwrap();
            let again = bench.recover();
            assert!(again.failure().is_some() && !again.guards(CHUNK), "{chunk:?} {event:?}");
        }
        let bench = Bench::new();
        let event = copied(4096);
        bench.journal.write([Record { epoch: Epoch(1), chunk: CHUNK, event }]).unwrap();
        assert!(bench.recover().failure().is_none(), "a whole block inside of the spill file");
    }
}
