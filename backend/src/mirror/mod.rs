//! The mirror: the local state of one disk, and the decision what a guest request must wait for.
//!
//! This module decides and remembers; it does no I/O. Workers, fetch and persist move the bytes
//! and report what they did, so the whole runs in tests without a kernel.
//!
//! ```text
//!              ┌─────────────── plan again after an event ───────────────┐
//!              ▼                                                         │
//!   request ─► plan ─► Direct(permit) ─► submit ─► complete(permit)      │
//!                │                                                       │
//!                ├───► Fill(chunks) ──► fetch them, then ────────────────┤
//!                ├───► Announce(span) ► tell the map, then ──────────────┤
//!                ├───► BlockCopy(jobs) ► copy chunks aside, then ─────────┤
//!                └───► Wait ─────────────────────────────────────────────┘
//! ```
//!
//! A request that does not go on holds nothing: no ticket, no claim.

pub(crate) mod bits;
pub(crate) mod block_set;
mod claims;
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

use self::claims::Claims;
use self::cow::{
    BufferPool, CopyData, CowMemory, PooledBuffer, PreservedRun, RangeAllocator, SpillRange,
};
use self::epoch::Epoch;
use self::epoch::layer::{CowAction, Layer};
use self::epoch::manager::{EpochHandle, EpochManager};
use self::events::Events;
use self::intent::WriteIntent;
use self::layout::{Blocks, Layout, Span};
use self::presence::Presence;

/// What has to happen to a request.
pub(crate) enum Plan {
    /// Submit it now, then [`Mirror::complete`] it.
    Direct(Permit),
    /// Fetch these chunks, then plan again.
    Fill(Vec<ChunkIndex>),
    /// Make the map know that this span is going to change, then plan again.
    RecordIntent(Span),
    /// Copy these blocks aside, then plan again.
    Copy(Vec<(BlockCopy, PooledBuffer)>),
    /// Plan again after the next event.
    Wait,
}

/// Leave to submit a write. It must come back, whatever became of the write.
#[must_use]
pub(crate) struct Permit {
    span: Span,
    epoch: Epoch,
    worker: usize,
    /// Whether blocks of `span` are claimed.
    claimed: bool,
    returned: bool,
}

impl Drop for Permit {
    fn drop(&mut self) {
        debug_assert!(
            self.returned || std::thread::panicking(),
            "a permit was lost: {:?}",
            self.span
        );
    }
}

/// The order to copy a run of blocks of a frozen epoch into memory. The holder ends it with
/// [`Mirror::finish_copy`].
#[must_use]
pub(crate) struct BlockCopy {
    chunk: ChunkIndex,
    /// Counted from the chunk's start.
    run: Blocks,
    layer: Arc<Layer>,
    /// Where in the spill file the copy goes, if not into memory for good.
    range: Option<SpillRange>,
}

impl BlockCopy {
    /// The offset in the spill file that the copy has to be written to before it is preserved.
    pub(crate) fn spill_offset(&self) -> Option<u64> {
        self.range.as_ref().map(|range| range.offset)
    }
}

/// The room for copies.
pub(crate) struct CowSpace {
    /// Memory that holds copies.
    pub(crate) memory: CowMemory,
    /// Memory through which copies pass on their way to the spill file.
    pub(crate) spill_buffers: Arc<BufferPool>,
    /// RangeAllocator in the spill file.
    pub(crate) spill: Arc<RangeAllocator>,
}

impl CowSpace {
    /// A buffer for a copy of `len` bytes, and its range in the spill file if memory is short.
    fn take(&self, len: u64) -> Option<(PooledBuffer, Option<SpillRange>)> {
        if let Some(buffer) = self.memory.take(len) {
            return Some((buffer, None));
        }
        let buffer = self.spill_buffers.take(len as usize)?;
        Some((buffer, Some(self.spill.take(len)?)))
    }
}

/// The state of one disk. Shared by all threads.
pub(crate) struct Mirror {
    layout: Layout,
    pub(crate) presence: Presence,
    pub(crate) epochs: EpochManager,
    pub(crate) intent: WriteIntent,
    claims: Claims,
    cow_space: CowSpace,
    /// Whether a write found no room for a copy.
    cow_exhausted: AtomicBool,
    /// Grows before a block is forgotten and after it: odd while that is under way. See [`Mirror::invalidate`].
    invalidations: AtomicU64,
    invalidating: Mutex<()>,
    pub(crate) events: Events,
}

impl Mirror {
    /// A mirror with what is known from its map; `room` bounds the copies.
    pub(crate) fn new(
        layout: Layout,
        presence: Presence,
        intent: WriteIntent,
        epochs: EpochManager,
        cow_space: CowSpace,
        events: Events,
    ) -> Mirror {
        Mirror {
            layout,
            presence,
            epochs,
            intent,
            claims: Claims::new(),
            cow_space,
            cow_exhausted: AtomicBool::new(false),
            invalidations: AtomicU64::new(0),
            invalidating: Mutex::new(()),
            events,
        }
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether a write found no room for a copy since this was last asked.
    pub(crate) fn take_cow_exhausted(&self) -> bool {
        self.cow_exhausted.swap(false, Ordering::Relaxed)
    }

    /// The chunks that a read of `span` has to fetch first; none if it can go on.
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
    pub(crate) fn plan_write(
        &self,
        epoch_handle: &mut EpochHandle,
        worker: usize,
        span: Span,
    ) -> Plan {
        let missing: Vec<ChunkIndex> = self
            .layout
            .edges(span)
            .filter(|block| !self.presence.get(*block))
            .map(|block| self.layout.chunk_of(block))
            .collect();
        if !missing.is_empty() {
            return Plan::Fill(missing);
        }
        let (epoch, stale) = self.epochs.take_ticket(epoch_handle);
        if stale {
            self.events.notify();
        }
        let view = epoch_handle.view();
        if let Some(plan) = self.preserve_before(&view.layers, span) {
            self.leave(worker, epoch);
            return plan;
        }
        let Some(claimed) = self.claim(span) else {
            self.leave(worker, epoch);
            return Plan::Wait;
        };
        for chunk in self.layout.chunks(span) {
            view.dirty().insert(chunk.0);
        }
        // After the marks, which stay: see `intent` and `forget`.
        fence(Ordering::SeqCst);
        let permit = Permit { span, epoch, worker, claimed, returned: false };
        if !self.intent.covers(span) {
            self.give_back(permit);
            return Plan::RecordIntent(span);
        }
        let is_there = match claimed {
            true => self.layout.edges(span).all(|block| self.presence.get(block)),
            false => {
                self.invalidations().is_multiple_of(2)
                    && self.presence.all(self.layout.blocks(span))
            }
        };
        if !is_there {
            self.give_back(permit);
            return Plan::Wait;
        }
        Plan::Direct(permit)
    }

    /// What a write to `span` owes to the frozen epochs, if anything.
    fn preserve_before(&self, layers: &[Arc<Layer>], span: Span) -> Option<Plan> {
        if !layers.iter().all(|layer| self.epochs.settle(layer)) {
            return Some(Plan::Wait);
        }
        let mut jobs = Vec::new();
        let mut blocked = false;
        for chunk in self.layout.chunks(span) {
            for layer in layers.iter().filter(|layer| layer.guards(chunk)) {
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
                    let taken = self.reserve_space_for(layer, chunk, run, &mut jobs);
                    if taken < run.count {
                        let (first, count) = (run.first + taken, run.count - taken);
                        layer.cancel_copy(chunk, Blocks { first, count });
                        self.cow_exhausted.store(true, Ordering::Relaxed);
                        blocked = true;
                    }
                }
            }
        }
        match (jobs.is_empty(), blocked) {
            (false, _) => Some(Plan::Copy(jobs)),
            (true, true) => Some(Plan::Wait),
            (true, false) => None,
        }
    }

    /// Takes room for the copy of a run, in pieces if there is none for the whole. Returns how many blocks
    /// have found room.
    fn reserve_space_for(
        &self,
        layer: &Arc<Layer>,
        chunk: ChunkIndex,
        run: Blocks,
        jobs: &mut Vec<(BlockCopy, PooledBuffer)>,
    ) -> u64 {
        let mut first = run.first;
        let mut count = run.count;
        while first < run.end() && count > 0 {
            let piece = Blocks { first, count: count.min(run.end() - first) };
            match self.cow_space.take(piece.span().len) {
                Some((buffer, range)) => {
                    let layer = layer.clone();
                    jobs.push((BlockCopy { chunk, run: piece, layer, range }, buffer));
                    first += piece.count;
                }
                None => count = piece.count / 2,
            }
        }
        first - run.first
    }

    /// Gives up a frozen epoch whose old content cannot be kept: its snapshot is lost, the guest's write
    /// is not.
    fn fail_layer(&self, layer: &Layer, chunk: ChunkIndex, error: &io::Error) {
        self.epochs.fail(layer, &format!("copying chunk {} of the mirror: {error}", chunk.0));
    }

    /// Claims the blocks of `span` in chunks that are not wholly present. `None` if one of them is
    /// taken; else whether there was anything to claim.
    fn claim(&self, span: Span) -> Option<bool> {
        if self.presence.all(self.layout.blocks(span)) {
            return Some(false);
        }
        for chunk in self.layout.chunks(span) {
            if !self.claims.try_write(chunk, self.layout.blocks_within(span, chunk)) {
                self.unclaim(span, chunk);
                return None;
            }
        }
        Some(true)
    }

    /// Gives up the claims of `span` in the chunks before `end`.
    fn unclaim(&self, span: Span, end: ChunkIndex) {
        for chunk in self.layout.chunks(span).take_while(|chunk| *chunk < end) {
            self.claims.release_write(chunk, self.layout.blocks_within(span, chunk));
        }
    }

    /// Whether a chunk of `span` has changed since the parent snapshot.
    pub(crate) fn is_changed(&self, span: Span) -> bool {
        let view = self.epochs.view();
        let end = span.end().min(self.layout.file_len());
        let span = Span { offset: span.offset, len: end - span.offset };
        let sets = || view.layers.iter().map(|layer| layer.dirty()).chain([view.dirty()]);
        self.layout.chunks(span).any(|chunk| sets().any(|dirty| dirty.contains(chunk.0)))
    }

    fn leave(&self, worker: usize, epoch: Epoch) {
        if self.epochs.return_ticket(worker, epoch) {
            self.events.notify();
        }
    }

    /// Takes a permit back. `landed` tells whether the data is in the mirror file.
    pub(crate) fn complete(&self, permit: Permit, landed: bool) {
        if landed {
            // Blocks covered partly are present already: the plan saw to it.
            self.presence.set(self.layout.covered(permit.span));
        }
        self.give_back(permit);
    }

    fn give_back(&self, mut permit: Permit) {
        permit.returned = true;
        if permit.claimed {
            self.unclaim(permit.span, ChunkIndex(u64::MAX));
            self.events.notify();
        }
        self.leave(permit.worker, permit.epoch);
    }

    /// Where in the mirror's file a run lies that is to be copied.
    pub(crate) fn copy_source(&self, job: &BlockCopy) -> Span {
        let first = self.layout.blocks_of(job.chunk).first + job.run.first;
        Blocks { first, ..job.run }.span()
    }

    /// Ends a copy. On success the frozen epoch has the blocks and the guest may write to them.
    pub(crate) fn finish_copy(&self, job: BlockCopy, data: PooledBuffer, result: io::Result<()>) {
        let BlockCopy { chunk, run, layer, range } = job;
        let old = match range {
            Some(range) => {
                drop(data);
                CopyData::File(range)
            }
            None => CopyData::Memory(data),
        };
        if let Err(error) =
            result.and_then(|()| layer.record_copy(chunk, PreservedRun { run, data: old }))
        {
            self.fail_layer(&layer, chunk, &error);
        }
        self.events.notify();
    }

    /// The runs of `chunk` that a fill may write, claimed for it.
    pub(crate) fn begin_fill(&self, chunk: ChunkIndex) -> Vec<Blocks> {
        self.claims.take_fill(chunk, self.layout.blocks_of(chunk), &self.presence)
    }

    /// Ends a fill: the first `landed` of `runs` are in the mirror file.
    pub(crate) fn end_fill(&self, chunk: ChunkIndex, runs: &[Blocks], landed: usize) {
        for run in &runs[..landed] {
            self.presence.set(*run);
        }
        self.claims.release_fill(chunk, runs);
        self.events.notify();
    }

    /// Makes a block absent that cannot be read from the mirror's file, so that it is fetched again. Returns
    /// whether it is: not if its chunk has changed since the parent snapshot, nor if somebody is about to
    /// write it.
    ///
    /// A write that has no claim marks its chunks as changed and then looks whether a block is being
    /// forgotten; here it is the other way round. So at least one of them sees the other, and between the
    /// look and the bit nobody changes the block.
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

    /// Differs after a block was forgotten. What was read from the parent snapshot before may be too old
    /// for that block.
    pub(crate) fn invalidations(&self) -> u64 {
        self.invalidations.load(Ordering::SeqCst)
    }
}
