//! The mirror: the local state of one disk, and the decision what a guest request must wait for.
//!
//! This module decides and remembers; it does no I/O on the guest's data. Workers, fetch and
//! persist move the bytes and report what they did, so the whole protocol runs in tests without a
//! kernel.
//!
//! ```text
//!              ┌─────────────── plan again after an event ───────────────┐
//!              ▼                                                         │
//!   request ─► plan ─► Direct(permit) ─► submit ─► complete(permit)      │
//!                │                                                       │
//!                ├───► Fill(chunks) ──► fetch them, then ────────────────┤
//!                ├───► RecordIntent ──► write it to the map, then ───────┤
//!                ├───► Copy(copies) ──► preserve old blocks, then ───────┤
//!                └───► Wait ─────────────────────────────────────────────┘
//! ```
//!
//! A request that has to wait holds nothing: no ticket and no claim.
//!
//! | module | is |
//! |---|---|
//! | [`layout`], [`bits`], [`block_set`] | arithmetic and sets |
//! | [`presence`] | which blocks are local |
//! | [`intent`] | which regions may differ from the parent snapshot |
//! | [`claims`] | who is about to change which blocks |
//! | [`epoch`] | epochs, layers and their recovery |
//! | [`cow`] | space for the old content of blocks |
//! | [`events`] | how waiting threads learn of changes |
//! | [`files`] | the files: data, map, files of layers, live directory |

pub(crate) mod bits;
pub(crate) mod block_set;
pub(crate) mod claims;
pub(crate) mod cow;
pub(crate) mod epoch;
pub(crate) mod events;
pub(crate) mod files;
pub(crate) mod intent;
pub(crate) mod layout;
pub(crate) mod presence;
#[cfg(test)]
mod simulation;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};

use cairn_store::ChunkIndex;

use self::claims::{Claims, WriteKind};
use self::cow::buffer_pool::PooledBuffer;
use self::cow::spill_space::SpillReservation;
use self::cow::{CowSpace, NoSpace};
use self::epoch::Epoch;
use self::epoch::layer::{CopyData, CowAction, Layer};
use self::epoch::manager::{EpochHandle, EpochManager, EpochView, StoreProgress};
use self::epoch::record::ChunkCounts;
use self::events::Events;
use self::files::disk_file::DiskFile;
use self::intent::WriteIntent;
use self::layout::{BLOCK_BYTES, Blocks, Layout, Span};
use self::presence::Presence;

/// What has to happen to a request.
pub(crate) enum Plan {
    /// Submit the request now, then [`Mirror::complete`] it.
    Direct(Permit),
    /// Fetch these chunks, then plan again.
    Fill(Vec<ChunkIndex>),
    /// Record in the map that this span is going to change, then plan again.
    RecordIntent(Span),
    /// Make these copies, then plan again.
    Copy(Vec<(BlockCopy, PooledBuffer)>),
    /// Plan again after the next event.
    Wait,
}

/// The permission to submit a write. The holder returns it with [`Mirror::complete`], whatever
/// became of the write.
#[must_use]
pub(crate) struct Permit {
    span: Span,
    epoch: Epoch,
    worker: usize,
    /// The kind of the claims on the blocks of `span`, if they are claimed.
    claimed: Option<WriteKind>,
    returned: bool,
}

impl Drop for Permit {
    fn drop(&mut self) {
        debug_assert!(
            self.returned || std::thread::panicking(),
            "a permit was not returned: {:?}",
            self.span
        );
    }
}

/// The order to copy a run of blocks for a layer. The holder ends it with [`Mirror::finish_copy`].
#[must_use]
pub(crate) struct BlockCopy {
    chunk: ChunkIndex,
    /// The blocks, counted from the start of the chunk.
    run: Blocks,
    layer: Arc<Layer>,
    /// The space in the layer's spill file, if the copy does not stay in memory.
    spill: Option<SpillReservation>,
}

impl BlockCopy {
    /// Whether the copy has to be written to the layer's spill file, at the offset that it has on
    /// the disk.
    pub(crate) fn is_spilled(&self) -> bool {
        self.spill.is_some()
    }

    /// The spill file of the layer; `None` if the layer needs no copies any more.
    pub(crate) fn spill_file(&self) -> io::Result<Option<Arc<DiskFile>>> {
        self.layer.spill_file()
    }
}

/// The local state of one disk. All threads share it.
pub(crate) struct Mirror {
    /// The layout that the disk had when the process started. Its size is not used: see
    /// [`Mirror::layout`].
    layout: Layout,
    presence: Presence,
    epochs: EpochManager,
    intent: WriteIntent,
    claims: Claims,
    /// Whether only whole blocks can be written to the data file.
    whole_blocks: bool,
    cow_space: CowSpace,
    /// Whether a write found no space for a copy.
    cow_exhausted: AtomicBool,
    /// Incremented before a block is invalidated and after it, so it is odd in between. See
    /// [`Mirror::invalidate`].
    invalidations: AtomicU64,
    invalidating: Mutex<()>,
    events: Events,
}

impl Mirror {
    /// A mirror with the state that was read from its files. `cow_space` bounds the copies.
    pub(crate) fn new(
        layout: Layout,
        presence: Presence,
        intent: WriteIntent,
        epochs: EpochManager,
        cow_space: CowSpace,
        events: Events,
    ) -> Mirror {
        epochs.set_size(layout.size());
        Mirror {
            layout,
            presence,
            epochs,
            intent,
            claims: Claims::new(),
            whole_blocks: false,
            cow_space,
            cow_exhausted: AtomicBool::new(false),
            invalidations: AtomicU64::new(0),
            invalidating: Mutex::new(()),
            events,
        }
    }

    /// This mirror, with a data file to which only whole blocks can be written. Then a write to a
    /// part of a block reads the block first.
    pub(crate) fn with_whole_blocks(self, whole_blocks: bool) -> Mirror {
        Mirror { whole_blocks, ..self }
    }

    /// How `span` is written to the data file.
    pub(crate) fn write_kind(&self, span: Span) -> WriteKind {
        match self.io_span(span) == span {
            true => WriteKind::Plain,
            false => WriteKind::ReadModifyWrite,
        }
    }

    /// The span of the data file that has to be read or written for `span`.
    pub(crate) fn io_span(&self, span: Span) -> Span {
        if self.whole_blocks { self.layout.blocks(span).span() } else { span }
    }

    /// The present layout.
    pub(crate) fn layout(&self) -> Layout {
        self.layout.with_size(self.epochs.size())
    }

    /// Makes room in the epochs for a disk that is going to grow. After an error, the disk keeps its
    /// size and everything goes on.
    pub(crate) fn make_room(&self, layout: &Layout) -> io::Result<()> {
        self.epochs.make_room(ChunkCounts::of(layout))
    }

    /// Gives the disk a larger size, from here on. All files have space for it, and the map says
    /// that the disk has it. If the old size is no multiple of the block size, the last block must
    /// be present: a write up to the old end covers it no more.
    pub(crate) fn grow(&self, layout: &Layout) {
        let before = self.layout();
        debug_assert!(before.size() <= layout.size(), "a disk never shrinks");
        debug_assert!(
            before.size().is_multiple_of(BLOCK_BYTES)
                || self.presence.get(before.size() / BLOCK_BYTES),
            "the last block is absent"
        );
        self.presence.grow(layout);
        self.intent.grow(layout);
        // Last: from here on, workers use what has grown.
        self.epochs.set_size(layout.size());
    }

    pub(crate) fn presence(&self) -> &Presence {
        &self.presence
    }

    pub(crate) fn intent(&self) -> &WriteIntent {
        &self.intent
    }

    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Wakes everybody who waits for a change of the mirror.
    pub(crate) fn notify(&self) {
        self.events.notify();
    }

    /// The access to epochs of the worker with this number.
    pub(crate) fn epoch_handle(&self, worker: usize) -> EpochHandle {
        self.epochs.handle(worker)
    }

    /// The current epoch and the layers.
    pub(crate) fn epoch_view(&self) -> Arc<EpochView> {
        self.epochs.view()
    }

    /// Ends the current epoch. Returns `None` if too many layers wait already.
    pub(crate) fn freeze(&self) -> io::Result<Option<Arc<Layer>>> {
        self.epochs.freeze()
    }

    /// Prepares what the next [`Mirror::freeze`] needs.
    pub(crate) fn prepare_freeze(&self) -> io::Result<()> {
        self.epochs.prepare()
    }

    /// Whether no write of the layer's epoch is in flight.
    pub(crate) fn settle(&self, layer: &Layer) -> bool {
        self.epochs.settle(layer)
    }

    /// Closes a layer whose snapshot is published.
    pub(crate) fn publish(&self, layer: &Layer) {
        self.epochs.publish(layer);
    }

    /// Abandons a layer whose checkpoint failed.
    pub(crate) fn give_up(&self, layer: &Layer) {
        self.epochs.give_up(layer);
    }

    /// Fails a layer: see [`EpochManager::fail`].
    pub(crate) fn fail(&self, layer: &Layer, reason: &str) {
        self.epochs.fail(layer, reason);
        self.notify();
    }

    /// Fails a layer, so that writes which wait for space can go on: see
    /// [`EpochManager::fail_newest`].
    pub(crate) fn fail_newest(&self, reason: &str) {
        self.epochs.fail_newest(reason);
        self.notify();
    }

    /// Gives memory back that no copy uses. The space of spill files is given back with each chunk
    /// that is stored, and with each layer that ends.
    pub(crate) fn trim_copies(&self) -> io::Result<()> {
        let result = self.cow_space.memory.trim();
        // While that went on, there was less space than there is.
        self.notify();
        result
    }

    /// How far the layers have been stored.
    pub(crate) fn store_progress(&self) -> StoreProgress {
        self.epochs.progress()
    }

    /// Returns whether a write found no space for a copy since the last call.
    pub(crate) fn take_cow_exhausted(&self) -> bool {
        self.cow_exhausted.swap(false, Ordering::Relaxed)
    }

    /// The chunks that a read of `span` has to fetch first. If there are none, the read can go on.
    pub(crate) fn plan_read(&self, span: Span) -> Vec<ChunkIndex> {
        if self.presence.all(self.layout.blocks(span)) {
            return Vec::new();
        }
        self.layout
            .chunks(span)
            .filter(|chunk| !self.presence.all(self.layout.blocks_within(span, *chunk)))
            .collect()
    }

    /// Plans a write, a discard or a write of zeros (BlobCR, algorithm 4).
    pub(crate) fn plan_write(&self, handle: &mut EpochHandle, worker: usize, span: Span) -> Plan {
        let layout = self.layout();
        let missing: Vec<ChunkIndex> = layout
            .edges(span)
            .filter(|block| !self.presence.get(*block))
            .map(|block| layout.chunk_of(block))
            .collect();
        if !missing.is_empty() {
            return Plan::Fill(missing);
        }
        let (epoch, stale) = self.epochs.take_ticket(handle);
        if stale {
            self.notify();
        }
        let view = handle.view();
        if let Some(plan) = self.plan_copies(&view.layers, span) {
            self.return_ticket(worker, epoch);
            return plan;
        }
        let Some(claimed) = self.claim(span) else {
            self.return_ticket(worker, epoch);
            return Plan::Wait;
        };
        for chunk in self.layout.chunks(span) {
            view.mark_dirty(chunk.0);
        }
        // After the marks, which stay: see `intent` and `invalidate`.
        fence(Ordering::SeqCst);
        let permit = Permit { span, epoch, worker, claimed, returned: false };
        if !self.intent.covers(span) {
            self.return_permit(permit);
            return Plan::RecordIntent(span);
        }
        let is_present = match claimed {
            Some(_) => layout.edges(span).all(|block| self.presence.get(block)),
            None => {
                self.invalidations().is_multiple_of(2)
                    && self.presence.all(self.layout.blocks(span))
            }
        };
        if !is_present {
            self.return_permit(permit);
            return Plan::Wait;
        }
        Plan::Direct(permit)
    }

    /// What a write to `span` has to do for the layers first, if anything.
    fn plan_copies(&self, layers: &[Arc<Layer>], span: Span) -> Option<Plan> {
        if !layers.iter().all(|layer| self.settle(layer)) {
            return Some(Plan::Wait);
        }
        let mut copies = Vec::new();
        let mut blocked = false;
        for chunk in self.layout.chunks(span) {
            for layer in layers.iter().filter(|layer| layer.is_guarding(chunk)) {
                let own = self.layout.blocks_of(chunk);
                let hit = self.layout.blocks_within(span, chunk);
                let hit = Blocks { first: hit.first - own.first, ..hit };
                let runs = match layer.cow_action(chunk, hit, self.presence.in_chunk(own)) {
                    Ok(CowAction::None) => continue,
                    Ok(CowAction::Wait) => Vec::new(),
                    Ok(CowAction::Copy(runs)) => runs,
                    Err(error) => {
                        self.fail_layer(layer, chunk, &error);
                        continue;
                    }
                };
                blocked |= runs.is_empty();
                for run in runs {
                    let Err((rest, reason)) = self.reserve_copies(layer, chunk, run, &mut copies)
                    else {
                        continue;
                    };
                    layer.cancel_copy(chunk, rest);
                    if reason == NoSpace::Full {
                        self.cow_exhausted.store(true, Ordering::Relaxed);
                    }
                    blocked = true;
                }
            }
        }
        match (copies.is_empty(), blocked) {
            (false, _) => Some(Plan::Copy(copies)),
            (true, true) => Some(Plan::Wait),
            (true, false) => None,
        }
    }

    /// Reserves space for the copy of a run, in smaller parts if there is none for the whole run.
    /// The error is the rest of the run, for which there is no space.
    fn reserve_copies(
        &self,
        layer: &Arc<Layer>,
        chunk: ChunkIndex,
        run: Blocks,
        copies: &mut Vec<(BlockCopy, PooledBuffer)>,
    ) -> Result<(), (Blocks, NoSpace)> {
        let mut rest = run;
        let mut count = run.count;
        while rest.count > 0 {
            let part = Blocks { count: count.min(rest.count), ..rest };
            match self.cow_space.take(part.span().len) {
                Ok((buffer, spill)) => {
                    let layer = layer.clone();
                    copies.push((BlockCopy { chunk, run: part, layer, spill }, buffer));
                    rest = Blocks { first: part.end(), count: rest.count - part.count };
                }
                Err(reason) if part.count == 1 => return Err((rest, reason)),
                Err(_) => count = part.count / 2,
            }
        }
        Ok(())
    }

    /// Fails a layer whose old content cannot be kept: the snapshot is lost, but not the guest's
    /// write.
    fn fail_layer(&self, layer: &Layer, chunk: ChunkIndex, error: &io::Error) {
        self.epochs.fail(layer, &format!("copying chunk {} of the mirror: {error}", chunk.0));
    }

    /// Claims the blocks of `span`, unless a plain write finds all of them present. Returns `None` if
    /// the write has to wait for somebody else's claim, and otherwise the kind of its own claims.
    fn claim(&self, span: Span) -> Option<Option<WriteKind>> {
        if !self.whole_blocks && self.presence.all(self.layout.blocks(span)) {
            return Some(None);
        }
        let kind = self.write_kind(span);
        for chunk in self.layout.chunks(span) {
            if !self.claims.try_write(chunk, self.layout.blocks_within(span, chunk), kind) {
                self.release_claims(span, kind, chunk);
                return None;
            }
        }
        Some(Some(kind))
    }

    /// Releases the claims of `span` in the chunks before `end`.
    fn release_claims(&self, span: Span, kind: WriteKind, end: ChunkIndex) {
        for chunk in self.layout.chunks(span).take_while(|chunk| *chunk < end) {
            self.claims.release_write(chunk, self.layout.blocks_within(span, chunk), kind);
        }
    }

    /// Whether a chunk of `span` has changed since the parent snapshot.
    pub(crate) fn is_changed(&self, span: Span) -> bool {
        let view = self.epoch_view();
        let end = span.end().min(self.layout().file_len());
        let span = Span { offset: span.offset, len: end - span.offset };
        let is_dirty = |chunk: ChunkIndex| view.dirty_sets().any(|set| set.contains(chunk.0));
        self.layout.chunks(span).any(is_dirty)
    }

    fn return_ticket(&self, worker: usize, epoch: Epoch) {
        if self.epochs.return_ticket(worker, epoch) {
            self.notify();
        }
    }

    /// Ends a write. `landed` tells whether its data is in the mirror's data file.
    pub(crate) fn complete(&self, permit: Permit, landed: bool) {
        if landed {
            // Blocks that are covered only partly are present already: the plan ensured that.
            self.presence.set(self.layout().covered(permit.span));
        }
        self.return_permit(permit);
    }

    fn return_permit(&self, mut permit: Permit) {
        permit.returned = true;
        if let Some(kind) = permit.claimed {
            self.release_claims(permit.span, kind, ChunkIndex(u64::MAX));
            self.notify();
        }
        self.return_ticket(permit.worker, permit.epoch);
    }

    /// The span of the data file that a copy has to read.
    pub(crate) fn copy_source(&self, copy: &BlockCopy) -> Span {
        let first = self.layout.blocks_of(copy.chunk).first + copy.run.first;
        Blocks { first, ..copy.run }.span()
    }

    /// Ends a copy. On success the layer has the blocks, and the guest may write to them.
    pub(crate) fn finish_copy(
        &self,
        copy: BlockCopy,
        buffer: PooledBuffer,
        result: io::Result<()>,
    ) {
        let BlockCopy { chunk, run, layer, spill } = copy;
        let data = match spill {
            Some(reservation) => {
                drop(buffer);
                CopyData::Spilled(reservation)
            }
            None => CopyData::Memory(buffer),
        };
        let block = self.layout.blocks_of(chunk).first + run.first;
        let recorded = result.and_then(|()| layer.record_copy(chunk, run, block, data));
        if let Err(error) = recorded {
            self.fail_layer(&layer, chunk, &error);
        }
        self.notify();
    }

    /// Claims the runs of `chunk` that a fill may write, and returns them.
    pub(crate) fn begin_fill(&self, chunk: ChunkIndex) -> Vec<Blocks> {
        self.claims.take_fill(chunk, self.layout.blocks_of(chunk), &self.presence)
    }

    /// Ends a fill: the first `landed` of `runs` are in the mirror's data file.
    pub(crate) fn end_fill(&self, chunk: ChunkIndex, runs: &[Blocks], landed: usize) {
        for run in &runs[..landed] {
            self.presence.set(*run);
        }
        self.claims.release_fill(chunk, runs);
        self.notify();
    }

    /// Makes a block absent that cannot be read from the data file, so that it is fetched again.
    /// Returns `false`, without a change, if the block's chunk has changed since the parent
    /// snapshot, or if a write of the block is under way.
    ///
    /// A write without a claim marks its chunks as changed, and then checks whether a block is
    /// being invalidated. Here the order is the opposite. So at least one of them sees the other,
    /// and between the check and the change of the bit nobody changes the block.
    pub(crate) fn invalidate(&self, block: u64) -> bool {
        let (chunk, one) = (self.layout.chunk_of(block), Blocks { first: block, count: 1 });
        if !self.claims.try_fill(chunk, one) {
            return false;
        }
        let alone = self.invalidating.lock().expect("no code panics with this lock held");
        self.invalidations.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let changed = self.is_changed(one.span());
        if !changed {
            self.presence.clear(block);
        }
        self.invalidations.fetch_add(1, Ordering::SeqCst);
        drop(alone);
        self.end_fill(chunk, &[one], 0);
        !changed
    }

    /// A number that changes when a block is invalidated. What was read from the parent snapshot
    /// before the change may be too old for that block.
    pub(crate) fn invalidations(&self) -> u64 {
        self.invalidations.load(Ordering::SeqCst)
    }
}
