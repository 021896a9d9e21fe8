//! A frozen epoch and selective copy-on-write (BlobCR, algorithms 2 to 4).
//!
//! ```text
//!                    persist takes it        persist has it in memory
//!   Scheduled ──────────────────────► Pending ──────────────────────► Idle
//!       ▲                                │
//!       └────────────────────────────────┘ the read failed
//! ```
//!
//! A chunk of the epoch's dirty set is *Scheduled* until persist takes it. *Pending* lasts for one local
//! read into memory. *Idle* is forever: the epoch has what it needs, the mirror is free to change. A
//! chunk outside the dirty set is Idle from the start.
//!
//! Copies are made by blocks, not by chunks: a write to a chunk that is not Idle first puts aside the old
//! content of just the blocks that it hits. These are then *decided* for this epoch, and later writes to
//! them owe nothing. In the paper a write waits for a Pending chunk. Here it need not: when persist has
//! read the chunk, it lays what was put aside over it, so it does not matter whether its read saw
//! the block before the write, after it, or torn.
//!
//! The dirty set is complete, and its chunks may be touched, only when the layer is *settled*: no write
//! of the epoch is submitted any more.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cairn_store::{ChunkId, ChunkIndex};

use super::bits::{Bits, DirtySet};
use super::blockset::BlockSet;
use super::copies::{Aside, Copy, Piece};
use super::layout::Blocks;

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
    pub(crate) dirty: Arc<DirtySet>,
    settled: AtomicBool,
    /// Set once no write has to look at this layer any more: it is published, given up or lost.
    closed: AtomicBool,
    idle: Bits,
    touched: Vec<Mutex<HashMap<u64, Touched>>>,
    /// Chunks that have turned Idle.
    taken: AtomicU64,
    results: Mutex<Results>,
}

/// What persist has come to.
#[derive(Default)]
struct Results {
    /// Chunks whose bytes exist nowhere else, because storing them failed.
    kept: HashMap<u64, Copy>,
    stored: BTreeMap<ChunkIndex, Option<ChunkId>>,
    /// Why this epoch's snapshot cannot be had, as soon as that is known.
    failure: Option<String>,
}

impl Layer {
    pub(crate) fn new(epoch: Epoch, dirty: Arc<DirtySet>, chunks: u64) -> io::Result<Layer> {
        Ok(Layer {
            epoch,
            dirty,
            settled: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            idle: Bits::zeroed(chunks)?,
            touched: (0..SHARDS).map(|_| Mutex::default()).collect(),
            taken: AtomicU64::new(0),
            results: Mutex::default(),
        })
    }

    fn shard(&self, chunk: ChunkIndex) -> MutexGuard<'_, HashMap<u64, Touched>> {
        let shard = &self.touched[chunk.0 as usize % SHARDS];
        shard.lock().expect("no code panics with a layer locked")
    }

    fn results(&self) -> MutexGuard<'_, Results> {
        self.results.lock().expect("no code panics with a layer locked")
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
            && self.dirty.contains(chunk.0)
            && !self.idle.get(chunk.0)
    }

    /// What a write to `blocks` of `chunk` owes. `present` are the chunk's blocks that are present:
    /// an undecided one that is absent has the parent's content, and needs no copy.
    pub(crate) fn owed(&self, chunk: ChunkIndex, blocks: Blocks, present: BlockSet) -> Owed {
        debug_assert!(self.is_settled(), "the dirty set may still grow");
        let mut shard = self.shard(chunk);
        // Idle is set under this lock, so this look is final.
        if !self.guards(chunk) {
            return Owed::Nothing;
        }
        let touched = shard.entry(chunk.0).or_default();
        let undecided = BlockSet::run(blocks).without(&touched.aside.decided);
        if undecided.is_empty() {
            return Owed::Nothing;
        }
        touched.aside.decided = touched.aside.decided.union(&undecided.without(&present));
        let wanted = undecided.intersection(&present);
        let copies = wanted.without(&touched.copying);
        touched.copying = touched.copying.union(&copies);
        match (wanted.is_empty(), copies.is_empty()) {
            (true, _) => Owed::Nothing,
            (false, true) => Owed::Wait,
            (false, false) => Owed::Copies(copies.runs()),
        }
    }

    /// A run was copied aside: its blocks are decided.
    pub(crate) fn copied(&self, chunk: ChunkIndex, piece: Piece) {
        let mut shard = self.shard(chunk);
        // A chunk that turned Idle meanwhile, or a layer that ended, needs no copy.
        if !self.guards(chunk) {
            return;
        }
        let touched = shard.entry(chunk.0).or_default();
        let run = BlockSet::run(piece.run);
        touched.copying = touched.copying.without(&run);
        touched.aside.decided = touched.aside.decided.union(&run);
        touched.aside.pieces.push(piece);
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

    /// Pending → Idle. What writes have put aside counts more than what the caller read.
    pub(crate) fn taken(&self, chunk: ChunkIndex) -> Aside {
        let mut shard = self.shard(chunk);
        self.idle.set(chunk.0);
        self.taken.fetch_add(1, Ordering::Relaxed);
        shard.remove(&chunk.0).map(|touched| touched.aside).unwrap_or_default()
    }

    /// How many chunks have turned Idle.
    pub(crate) fn taken_count(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Pending → Scheduled, after a failed read.
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

    /// Keeps the only bytes that exist of a chunk that is Idle but not stored.
    pub(crate) fn keep(&self, chunk: ChunkIndex, copy: Copy) {
        self.results().kept.insert(chunk.0, copy);
    }

    /// Takes back what was given to [`Layer::keep`].
    pub(crate) fn take_kept(&self, chunk: ChunkIndex) -> Option<Copy> {
        self.results().kept.remove(&chunk.0)
    }

    /// Records that a chunk's blob is durable (`None`: the chunk is a hole).
    pub(crate) fn store(&self, ids: impl IntoIterator<Item = (ChunkIndex, Option<ChunkId>)>) {
        self.results().stored.extend(ids);
    }

    /// The durable chunks so far.
    pub(crate) fn stored(&self) -> BTreeMap<ChunkIndex, Option<ChunkId>> {
        self.results().stored.clone()
    }

    /// How many chunks are durable.
    pub(crate) fn stored_count(&self) -> u64 {
        self.results().stored.len() as u64
    }

    /// Whether a chunk is durable.
    pub(crate) fn is_stored(&self, chunk: ChunkIndex) -> bool {
        self.results().stored.contains_key(&chunk)
    }

    /// Notes that the snapshot cannot be completed. The first reason stays. From here on no write
    /// has to wait for this layer, and what was put aside for it is gone. What is read for it from the
    /// mirror may be newer than it: so whoever publishes looks at [`Layer::failure`] after all reading.
    pub(crate) fn set_failure(&self, reason: String) {
        self.results().failure.get_or_insert(reason);
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
        self.results().failure.clone()
    }

    /// Ends the layer: it guards nothing and holds nothing any more.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.clear_touched();
        let mut results = self.results();
        results.kept.clear();
        results.stored.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cairn_store::ChunkIndex;

    use super::{BlockSet, Blocks, DirtySet, Epoch, Layer, Owed};
    use crate::mirror::copies::{Arena, Old, Piece};

    const CHUNK: ChunkIndex = ChunkIndex(3);

    fn layer() -> Layer {
        let dirty = DirtySet::new(10).unwrap();
        dirty.insert(CHUNK.0);
        let layer = Layer::new(Epoch(1), Arc::new(dirty), 10).unwrap();
        layer.set_settled();
        layer
    }

    fn all() -> BlockSet {
        BlockSet::run(run(0, 64))
    }

    fn run(first: u64, count: u64) -> Blocks {
        Blocks { first, count }
    }

    fn piece(run: Blocks) -> Piece {
        let buffer = Arena::new(1 << 20).take(run.count as usize * 4096).unwrap();
        Piece { run, old: Old::Memory(buffer) }
    }

    #[test]
    fn many_small_writes_to_one_block_cause_one_copy() {
        let layer = layer();
        assert_eq!(layer.owed(CHUNK, run(5, 1), all()), Owed::Copies(vec![run(5, 1)]));
        assert_eq!(layer.owed(CHUNK, run(5, 1), all()), Owed::Wait, "another queue is copying it");
        layer.copied(CHUNK, piece(run(5, 1)));
        assert_eq!(layer.owed(CHUNK, run(5, 1), all()), Owed::Nothing);
        assert_eq!(layer.owed(CHUNK, run(4, 3), all()), Owed::Copies(vec![run(4, 1), run(6, 1)]));
    }

    #[test]
    fn an_absent_block_is_decided_without_a_copy() {
        let layer = layer();
        let present = BlockSet::run(run(0, 8));
        assert_eq!(layer.owed(CHUNK, run(6, 4), present), Owed::Copies(vec![run(6, 2)]));
        assert_eq!(layer.owed(CHUNK, run(8, 2), all()), Owed::Nothing);
        assert!(layer.take(CHUNK));
        let aside = layer.taken(CHUNK);
        assert!(aside.decided.contains(8) && !aside.decided.contains(6));
    }

    #[test]
    fn what_is_put_aside_while_persist_reads_counts_more_than_what_it_read() {
        let layer = layer();
        assert!(layer.take(CHUNK));
        assert!(!layer.take(CHUNK), "a chunk is taken by one");
        assert_eq!(layer.owed(CHUNK, run(1, 1), all()), Owed::Copies(vec![run(1, 1)]));
        layer.copied(CHUNK, piece(run(1, 1)));
        let mut read = vec![0xff; 64 * 4096];
        let valid = layer.taken(CHUNK).lay_over(&mut read, all(), |_, _| Ok(())).unwrap();
        assert_eq!(valid, all());
        assert!(read[4096..8192].iter().all(|byte| *byte == 0) && read[8192] == 0xff);
        assert_eq!(layer.owed(CHUNK, run(1, 1), all()), Owed::Nothing);
        assert!(!layer.take(CHUNK), "idle is forever");
    }

    #[test]
    fn a_chunk_that_was_not_changed_is_idle() {
        assert_eq!(layer().owed(ChunkIndex(4), run(0, 64), all()), Owed::Nothing);
        assert!(!layer().take(ChunkIndex(4)));
    }

    #[test]
    fn a_failed_read_puts_the_chunk_back() {
        let layer = layer();
        assert!(layer.take(CHUNK));
        layer.untake(CHUNK);
        assert_eq!(layer.owed(CHUNK, run(1, 1), all()), Owed::Copies(vec![run(1, 1)]));
        layer.not_copied(CHUNK, run(1, 1));
        assert_eq!(layer.owed(CHUNK, run(1, 1), all()), Owed::Copies(vec![run(1, 1)]));
    }
}
