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
//! is durable in the repository. *Idle* is forever: the epoch has what it needs, the mirror is free to
//! change. A chunk outside the dirty set is Idle from the start.
//!
//! Copies are made by blocks, not by chunks: a write to a chunk that is not Idle first puts aside the old
//! content of just the blocks that it hits. These are then *decided* for this epoch, and later writes to
//! them owe nothing. In the paper a write waits for a Pending chunk. Here it need not: when persist has
//! read the chunk, it lays what was put aside over it, so it does not matter whether its read saw
//! the block before the write, after it, or torn.
//!
//! The dirty set is complete, and its chunks may be touched, only when the layer is *settled*: no write
//! of the epoch is submitted any more.
//!
//! A layer outlives the process: its sets are in shared memory ([`EpochState`]), copies lie on the shelf
//! or in the spill file, and the [`Journal`] has a record of each before the write that it allows. Because
//! a chunk is guarded until its blob is durable, nothing that persist has in memory is needed for that.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cairn_store::{ChunkId, ChunkIndex, NewSnapshot};

use super::bits::DirtySet;
use super::blockset::BlockSet;
use super::copies::{Aside, Old, Piece, Places, Shelf};
use super::epoch::EpochState;
use super::journal::{Journal, Record, What, Where};
use super::layout::{BLOCK, Blocks, Layout};

/// Locks over which the chunks are spread.
const SHARDS: usize = 32;

/// The time between two checkpoints, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Epoch(pub(crate) u64);

/// What a write has to do before it may touch blocks of a chunk.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Owed {
    /// Nothing.
    Nothing,
    /// Wait for an event: somebody else is copying these blocks.
    Wait,
    /// Copy these runs aside and report each with [`Layer::copied`] or [`Layer::not_copied`].
    Copies(Vec<Blocks>),
}

/// One chunk between Scheduled and Idle.
#[derive(Default)]
struct Touched {
    aside: Aside,
    /// Blocks that a write is copying at the moment.
    copying: BlockSet,
    pending: bool,
}

/// One frozen epoch on its way into the repository.
pub(crate) struct Layer {
    pub(crate) epoch: Epoch,
    state: Arc<EpochState>,
    journal: Arc<Journal>,
    settled: AtomicBool,
    /// Set once no write has to look at this layer any more: it is published, given up or lost.
    closed: AtomicBool,
    touched: Vec<Mutex<HashMap<u64, Touched>>>,
    /// Chunks that have turned Idle.
    done: AtomicU64,
    /// Chunks whose blob is durable (`None`: the chunk is a hole).
    stored: Mutex<BTreeMap<ChunkIndex, Option<ChunkId>>>,
    /// Those of them that a process stored which is gone, perhaps with less than their full redundancy.
    inherited: Mutex<Vec<(ChunkIndex, ChunkId)>>,
}

impl Layer {
    /// The epoch of `state` has ended.
    pub(crate) fn new(state: Arc<EpochState>, journal: Arc<Journal>) -> Layer {
        Layer {
            epoch: state.epoch(),
            state,
            journal,
            settled: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            touched: (0..SHARDS).map(|_| Mutex::default()).collect(),
            done: AtomicU64::new(0),
            stored: Mutex::default(),
            inherited: Mutex::default(),
        }
    }

    /// Takes up a layer of a process that is gone, with what the journal has of it. No write of its epoch
    /// is submitted any more. If the journal does not fit, its snapshot cannot be had.
    pub(crate) fn recover(
        state: EpochState,
        journal: &Arc<Journal>,
        records: Option<&[Record]>,
        layout: &Layout,
        (shelf, spill): (&Shelf, &Arc<Places>),
    ) -> Layer {
        let layer = Layer::new(Arc::new(state), journal.clone());
        layer.set_settled();
        if layer.failure().is_some() {
            layer.closed.store(true, Ordering::Release);
        } else if records.and_then(|all| layer.replay(all, layout, (shelf, spill))).is_none() {
            layer.set_failure(
                "the mirror's journal was damaged when the disk's process was restarted",
            );
        }
        layer
    }

    /// Does again what the journal says. `None` if that cannot be.
    fn replay(
        &self,
        records: &[Record],
        layout: &Layout,
        (shelf, spill): (&Shelf, &Arc<Places>),
    ) -> Option<()> {
        let own = || records.iter().filter(|record| record.epoch == self.epoch);
        // Nothing happens to a chunk that the epoch did not change.
        let is_changed =
            |chunk: ChunkIndex| chunk.0 < layout.chunk_count() && self.dirty().contains(chunk.0);
        if !own().all(|record| is_changed(record.chunk)) {
            return None;
        }
        for Record { chunk, what, .. } in own() {
            if let What::Stored(id) = what {
                self.stored().insert(*chunk, *id);
                self.inherited().extend(id.map(|id| (*chunk, id)));
                self.finish(*chunk);
            }
        }
        for Record { chunk, what, .. } in own() {
            let (What::Copied(run, _) | What::Absent(run)) = what else { continue };
            if run.count == 0 || run.end() > layout.blocks_per_chunk() {
                return None;
            }
            // What an idle chunk had put aside is gone.
            if !self.guards(*chunk) {
                continue;
            }
            let len = run.span().len;
            let old = match what {
                What::Copied(_, Where::Memory(at)) => Some(Old::Memory(shelf.take_at(*at, len)?)),
                // Direct I/O needs whole blocks, and so do the places between those that are taken.
                What::Copied(_, Where::File(at)) if !at.is_multiple_of(BLOCK) => return None,
                What::Copied(_, Where::File(at)) => Some(Old::File(spill.take_at(*at, len)?)),
                _ => None,
            };
            let mut shard = self.shard(*chunk);
            let aside = &mut shard.entry(chunk.0).or_default().aside;
            aside.decided = aside.decided.union(&BlockSet::run(*run));
            aside.pieces.extend(old.map(|old| Arc::new(Piece { run: *run, old })));
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

    /// The checkpoint has ended without a snapshot. What it changed is for later ones.
    pub(crate) fn end(&self) {
        self.state.end();
    }

    /// Whether the checkpoint has ended without a snapshot.
    pub(crate) fn has_ended(&self) -> bool {
        self.state.has_ended()
    }

    fn shard(&self, chunk: ChunkIndex) -> MutexGuard<'_, HashMap<u64, Touched>> {
        let shard = &self.touched[chunk.0 as usize % SHARDS];
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

    /// What a write to `blocks` of `chunk` owes. `present` are the chunk's blocks that are present:
    /// an undecided one that is absent has the parent's content, and needs no copy.
    pub(crate) fn owed(
        &self,
        chunk: ChunkIndex,
        blocks: Blocks,
        present: BlockSet,
    ) -> io::Result<Owed> {
        debug_assert!(self.is_settled(), "the dirty set may still grow");
        let mut shard = self.shard(chunk);
        // Idle is set under this lock, so this look is final.
        if !self.guards(chunk) {
            return Ok(Owed::Nothing);
        }
        let touched = shard.entry(chunk.0).or_default();
        let undecided = BlockSet::run(blocks).without(&touched.aside.decided);
        if undecided.is_empty() {
            return Ok(Owed::Nothing);
        }
        let absent = undecided.without(&present);
        if !absent.is_empty() {
            self.record(chunk, absent.runs().into_iter().map(What::Absent))?;
            touched.aside.decided = touched.aside.decided.union(&absent);
        }
        let wanted = undecided.intersection(&present);
        let copies = wanted.without(&touched.copying);
        touched.copying = touched.copying.union(&copies);
        Ok(match (wanted.is_empty(), copies.is_empty()) {
            (true, _) => Owed::Nothing,
            (false, true) => Owed::Wait,
            (false, false) => Owed::Copies(copies.runs()),
        })
    }

    fn record(&self, chunk: ChunkIndex, whats: impl Iterator<Item = What>) -> io::Result<()> {
        self.journal.write(whats.map(|what| Record { epoch: self.epoch, chunk, what }))
    }

    /// A run was copied aside: its blocks are decided.
    pub(crate) fn copied(&self, chunk: ChunkIndex, piece: Piece) -> io::Result<()> {
        let mut shard = self.shard(chunk);
        // A chunk that turned Idle meanwhile, or a layer that ended, needs no copy.
        if !self.guards(chunk) {
            return Ok(());
        }
        let what = What::Copied(piece.run, piece.old.place());
        self.record(chunk, std::iter::once(what))?;
        let touched = shard.entry(chunk.0).or_default();
        let run = BlockSet::run(piece.run);
        touched.copying = touched.copying.without(&run);
        touched.aside.decided = touched.aside.decided.union(&run);
        touched.aside.pieces.push(Arc::new(piece));
        Ok(())
    }

    /// A run could not be copied: it is as before.
    pub(crate) fn not_copied(&self, chunk: ChunkIndex, run: Blocks) {
        if let Some(touched) = self.shard(chunk).get_mut(&chunk.0) {
            touched.copying = touched.copying.without(&BlockSet::run(run));
        }
    }

    /// Scheduled → Pending, for persist. `false` if the chunk is Idle, or Pending with somebody else.
    pub(crate) fn take(&self, chunk: ChunkIndex) -> bool {
        debug_assert!(self.is_settled(), "the dirty set may still grow");
        let mut shard = self.shard(chunk);
        if !self.guards(chunk) {
            return false;
        }
        let touched = shard.entry(chunk.0).or_default();
        !std::mem::replace(&mut touched.pending, true)
    }

    /// What writes have put aside of a Pending chunk. It counts more than what was read from the mirror
    /// before this call.
    pub(crate) fn aside(&self, chunk: ChunkIndex) -> Aside {
        self.shard(chunk).get(&chunk.0).map(|touched| touched.aside.clone()).unwrap_or_default()
    }

    /// Pending → Idle: the chunks' blobs are durable.
    pub(crate) fn store(&self, ids: &[(ChunkIndex, Option<ChunkId>)]) -> io::Result<()> {
        let record =
            |(chunk, id): &_| Record { epoch: self.epoch, chunk: *chunk, what: What::Stored(*id) };
        self.journal.write(ids.iter().map(record))?;
        self.stored().extend(ids.iter().copied());
        ids.iter().for_each(|(chunk, _)| self.finish(*chunk));
        Ok(())
    }

    fn finish(&self, chunk: ChunkIndex) {
        let mut shard = self.shard(chunk);
        // Before what was put aside is gone: its place may be used again.
        self.state.idle.set(chunk.0);
        shard.remove(&chunk.0);
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// How many chunks have turned Idle.
    pub(crate) fn done_count(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Pending → Scheduled, after a failure.
    pub(crate) fn untake(&self, chunk: ChunkIndex) {
        if let Some(touched) = self.shard(chunk).get_mut(&chunk.0) {
            touched.pending = false;
        }
    }

    /// At most `limit` Scheduled chunks of which something was put aside: to take them first frees
    /// memory soonest.
    pub(crate) fn costly(&self, limit: usize) -> Vec<ChunkIndex> {
        let mut chunks = Vec::new();
        for shard in &self.touched {
            let shard = shard.lock().expect("no code panics with a layer locked");
            let costly =
                shard.iter().filter(|(_, one)| !one.pending && !one.aside.pieces.is_empty());
            chunks.extend(costly.map(|(chunk, _)| ChunkIndex(*chunk)));
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
    /// has to wait for this layer, and what was put aside for it is gone. What is read for it from the
    /// mirror may be newer than it: so whoever publishes looks at [`Layer::failure`] after all reading.
    pub(crate) fn set_failure(&self, reason: &str) {
        self.state.fail(reason);
        self.closed.store(true, Ordering::Release);
        self.clear_touched();
    }

    fn clear_touched(&self) {
        for shard in &self.touched {
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
        // Before what was put aside is gone: its places may be used again.
        self.state.remove();
        self.clear_touched();
        self.stored().clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cairn_store::{ChunkId, ChunkIndex, Geometry};

    use super::{BlockSet, Blocks, Epoch, Layer, Owed};
    use crate::mirror::copies::{Old, Piece, Places, Shelf};
    use crate::mirror::epoch::Epochs;
    use crate::mirror::journal::{Journal, Record, What, Where};
    use crate::mirror::layout::Layout;

    const CHUNK: ChunkIndex = ChunkIndex(3);

    /// A layer of ten chunks and what it leaves behind.
    struct Bench {
        dir: tempfile::TempDir,
        shelf: Shelf,
        journal: Arc<Journal>,
        layer: Layer,
    }

    impl Bench {
        fn new() -> Bench {
            let dir = tempfile::tempdir().unwrap();
            let (epochs, _) = Epochs::open(dir.path(), 10).unwrap();
            let state = epochs.take().unwrap();
            state.begin(Epoch(1));
            state.dirty.insert(CHUNK.0);
            let journal = Arc::new(Journal::open(&dir.path().join("journal")).unwrap());
            let layer = Layer::new(Arc::new(state), journal.clone());
            layer.set_settled();
            let shelf = Shelf::new(tempfile::tempfile().unwrap(), 1 << 20).unwrap();
            Bench { dir, shelf, journal, layer }
        }

        fn owed(&self, run: Blocks, present: BlockSet) -> Owed {
            self.layer.owed(CHUNK, run, present).unwrap()
        }

        fn copy(&self, run: Blocks, fill: u8) {
            let mut buffer = self.shelf.take(run.span().len).unwrap();
            buffer.fill(fill);
            self.layer.copied(CHUNK, Piece { run, old: Old::Memory(buffer) }).unwrap();
        }

        /// The layer as the next process has it.
        fn recover(&self) -> Layer {
            let (_, mut found) = Epochs::open(self.dir.path(), 10).unwrap();
            let records = self.journal.read().unwrap().unwrap();
            let layout = Layout::new(Geometry::new(10 * 256 * 1024, 256 * 1024).unwrap());
            let places = (&self.shelf, &Places::new(1 << 20));
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
        assert_eq!(bench.owed(run(5, 1), all()), Owed::Copies(vec![run(5, 1)]));
        assert_eq!(bench.owed(run(5, 1), all()), Owed::Wait, "another queue is copying it");
        bench.copy(run(5, 1), 0);
        assert_eq!(bench.owed(run(5, 1), all()), Owed::Nothing);
        assert_eq!(bench.owed(run(4, 3), all()), Owed::Copies(vec![run(4, 1), run(6, 1)]));
    }

    #[test]
    fn an_absent_block_is_decided_without_a_copy() {
        let bench = Bench::new();
        let present = BlockSet::run(run(0, 8));
        assert_eq!(bench.owed(run(6, 4), present), Owed::Copies(vec![run(6, 2)]));
        assert_eq!(bench.owed(run(8, 2), all()), Owed::Nothing);
        assert!(bench.layer.take(CHUNK));
        let aside = bench.layer.aside(CHUNK);
        assert!(aside.decided.contains(8) && !aside.decided.contains(6));
    }

    #[test]
    fn what_is_put_aside_while_persist_reads_counts_more_than_what_it_read() {
        let bench = Bench::new();
        assert!(bench.layer.take(CHUNK));
        assert!(!bench.layer.take(CHUNK), "a chunk is taken by one");
        assert_eq!(bench.owed(run(1, 1), all()), Owed::Copies(vec![run(1, 1)]));
        bench.copy(run(1, 1), 0);
        let mut read = vec![0xff; 64 * 4096];
        let aside = bench.layer.aside(CHUNK);
        assert_eq!(aside.lay_over(&mut read, all(), |_, _| Ok(())).unwrap(), all());
        assert!(read[4096..8192].iter().all(|byte| *byte == 0) && read[8192] == 0xff);
        assert_eq!(bench.owed(run(2, 1), all()), Owed::Copies(vec![run(2, 1)]), "not durable yet");
        bench.layer.store(&[(CHUNK, Some(ChunkId::of(&read)))]).unwrap();
        assert_eq!(bench.owed(run(3, 1), all()), Owed::Nothing);
        assert!(!bench.layer.take(CHUNK), "idle is forever");
    }

    #[test]
    fn a_chunk_that_was_not_changed_is_idle() {
        let bench = Bench::new();
        assert_eq!(bench.layer.owed(ChunkIndex(4), run(0, 64), all()).unwrap(), Owed::Nothing);
        assert!(!bench.layer.take(ChunkIndex(4)));
    }

    #[test]
    fn a_failed_read_puts_the_chunk_back() {
        let bench = Bench::new();
        assert!(bench.layer.take(CHUNK));
        bench.layer.untake(CHUNK);
        assert_eq!(bench.owed(run(1, 1), all()), Owed::Copies(vec![run(1, 1)]));
        bench.layer.not_copied(CHUNK, run(1, 1));
        assert_eq!(bench.owed(run(1, 1), all()), Owed::Copies(vec![run(1, 1)]));
    }

    #[test]
    fn the_next_process_finds_copies_and_absent_blocks_but_nothing_half_done() {
        let bench = Bench::new();
        bench.owed(run(1, 2), all());
        bench.copy(run(1, 2), 0x11);
        bench.owed(run(10, 1), all());
        bench.owed(run(20, 1), BlockSet::default());
        // In truth the places are free because the process is gone.
        bench.layer.clear_touched();
        let again = bench.recover();
        let aside = again.aside(CHUNK);
        assert!(aside.decided.contains(1) && aside.decided.contains(2));
        assert!(aside.decided.contains(20) && !aside.decided.contains(10));
        let mut read = vec![0xff; 64 * 4096];
        aside.lay_over(&mut read, all(), |_, _| Ok(())).unwrap();
        assert!(read[4096..3 * 4096].iter().all(|byte| *byte == 0x11));
        assert!(bench.shelf.take_at(0, 8192).is_none(), "the copy's place is in use");
        assert_eq!(again.owed(CHUNK, run(10, 1), all()).unwrap(), Owed::Copies(vec![run(10, 1)]));
    }

    #[test]
    fn the_next_process_owes_nothing_for_what_is_durable_or_lost() {
        let bench = Bench::new();
        bench.owed(run(1, 1), all());
        bench.copy(run(1, 1), 0x11);
        bench.layer.store(&[(CHUNK, None)]).unwrap();
        let again = bench.recover();
        assert!(again.is_stored(CHUNK) && !again.guards(CHUNK));
        assert!(bench.shelf.take_at(0, 4096).is_some(), "the copy is not needed");
        assert!(again.inherited().is_empty(), "a hole is nowhere");

        let bench = Bench::new();
        let id = ChunkId::of(b"stored");
        bench.layer.store(&[(CHUNK, Some(id))]).unwrap();
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
        bench.owed(run(1, 1), all());
        bench.copy(run(1, 1), 0x11);
        assert!(bench.recover().failure().is_some(), "two copies at one place");

        let copied = |at| What::Copied(run(1, 1), Where::File(at));
        for (chunk, what) in [
            (ChunkIndex(4), What::Stored(None)),
            (ChunkIndex(4), What::Absent(run(1, 1))),
            (ChunkIndex(10), What::Stored(None)),
            (CHUNK, copied(512)),
            (CHUNK, copied(1 << 20)),
            (CHUNK, What::Absent(run(60, 5))),
        ] {
            let bench = Bench::new();
            bench.journal.write([Record { epoch: Epoch(1), chunk, what }]).unwrap();
            let again = bench.recover();
            assert!(again.failure().is_some() && !again.guards(CHUNK), "{chunk:?} {what:?}");
        }
        let bench = Bench::new();
        let what = copied(4096);
        bench.journal.write([Record { epoch: Epoch(1), chunk: CHUNK, what }]).unwrap();
        assert!(bench.recover().failure().is_none(), "a whole block inside of the spill file");
    }
}
