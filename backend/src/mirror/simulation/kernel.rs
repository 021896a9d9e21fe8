//! Operations in flight, and how they end.

use std::fs::File;
use std::io;
use std::sync::Arc;

use cairn_store::{ChunkId, ChunkIndex};

use super::faults::Fault;
use super::ring::Job;
use super::{PER_CHUNK, PlantedBug, World, set_stamp};
use crate::mirror::block_set::BlockSet;
use crate::mirror::cow::buffer_pool::PooledBuffer;
use crate::mirror::epoch::layer::Layer;
use crate::mirror::layout::{BLOCK_BYTES, Blocks, Span};
use crate::mirror::{BlockCopy, Permit, Plan};

/// An operation in flight in the simulated kernel.
pub(super) struct Operation {
    pub(super) kind: OperationKind,
    /// The blocks that the operation has not touched yet.
    pub(super) left: Vec<u64>,
    /// Whether the operation takes much longer than others.
    slow: bool,
}

pub(super) enum OperationKind {
    Write {
        job: Job,
        permit: Permit,
        fails: bool,
    },
    Copy {
        copy: BlockCopy,
        buffer: PooledBuffer,
        fails: bool,
    },
    /// A copy on its way to the spill file.
    Spill {
        copy: BlockCopy,
        buffer: PooledBuffer,
        fails: bool,
    },
    Fill {
        chunk: ChunkIndex,
        runs: Vec<Blocks>,
        landed: usize,
    },
    Persist {
        layer: Arc<Layer>,
        data: Vec<u8>,
        present: BlockSet,
        chunk: ChunkIndex,
    },
}

fn failure() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

impl World {
    pub(super) fn submit(&mut self, kind: OperationKind, left: Vec<u64>) {
        let slow = self.rng.chance(10);
        self.kernel.push(Operation { kind, left, slow });
    }

    pub(super) fn plan(&mut self, job: Job) {
        let (worker, span) = (job.worker, job.write.span);
        let invalidations = self.planted_bug == Some(PlantedBug::Unmarked) && job.is_resubmitted;
        let unmarked = if invalidations { self.unmarked(span) } else { Vec::new() };
        match self.mirror.plan_write(&mut self.epoch_handles[worker], worker, span) {
            Plan::Direct(permit) => {
                if self.planted_bug == Some(PlantedBug::PresentTooEarly) {
                    self.mirror.presence().set(self.layout.covered(span));
                }
                let view = self.epoch_handles[worker].view();
                unmarked.iter().for_each(|chunk| view.dirty().remove(chunk.0));
                self.submit_write(job, permit);
            }
            Plan::Fill(chunks) => {
                for chunk in chunks {
                    self.fill(chunk);
                }
                self.parked[worker].push(job);
            }
            Plan::Copy(copies) => {
                for (copy, buffer) in copies {
                    let (left, fails) = self.copy_blocks(Fault::CopyRead, copy.run.count);
                    self.submit(OperationKind::Copy { copy, buffer, fails }, left);
                }
                self.parked[worker].push(job);
            }
            Plan::RecordIntent(span) => {
                let regions = self.mirror.intent().regions_of(span);
                let bytes = self.mirror.intent().bytes_with(&regions);
                std::fs::write(self.dir.path().join("intent"), bytes).unwrap();
                self.mirror.intent().set(&regions);
                self.parked[worker].push(job);
            }
            Plan::Wait => self.parked[worker].push(job),
        }
    }

    /// The chunks that are not marked as changed.
    fn unmarked(&self, span: Span) -> Vec<ChunkIndex> {
        let view = self.mirror.epoch_view();
        self.layout.chunks(span).filter(|chunk| !view.dirty().contains(chunk.0)).collect()
    }

    fn submit_write(&mut self, job: Job, permit: Permit) {
        let blocks = self.layout.blocks(job.write.span);
        let mut left: Vec<u64> = (blocks.first..blocks.end()).collect();
        let fails = self.goes_wrong(4);
        if fails {
            self.some_of(&mut left);
            let is_short = (1..blocks.count).contains(&(left.len() as u64));
            self.faults.add(if is_short { Fault::ShortWrite } else { Fault::Write }, 1);
        }
        self.submit(OperationKind::Write { job, permit, fails }, left);
    }

    pub(super) fn fill(&mut self, chunk: ChunkIndex) {
        let runs = self.mirror.begin_fill(chunk);
        if runs.is_empty() {
            return;
        }
        let mut landed = runs.len();
        let mut part = Vec::new();
        if self.goes_wrong(15) {
            landed = self.rng.below(landed as u64) as usize;
            part.extend(runs[landed].first..runs[landed].end());
            self.some_of(&mut part);
            self.faults.add(if landed > 0 { Fault::ShortFill } else { Fault::Fill }, 1);
        }
        let whole = runs[..landed].iter().flat_map(|run| run.first..run.end());
        let left = whole.chain(part).collect();
        self.submit(OperationKind::Fill { chunk, runs, landed }, left);
    }

    /// Moves one block of one operation, or all that are left, or ends it.
    pub(super) fn kernel_step(&mut self) {
        if self.kernel.is_empty() {
            return;
        }
        let at = self.rng.below(self.kernel.len() as u64) as usize;
        if self.kernel[at].slow && self.rng.chance(90) {
            return;
        }
        let left = self.kernel[at].left.len();
        if left == 0 {
            let done = self.kernel.swap_remove(at);
            return self.complete(done.kind);
        }
        let count = if self.rng.chance(30) { left } else { 1 };
        (0..count).for_each(|_| self.touch(at));
    }

    /// Moves one block of an operation.
    fn touch(&mut self, at: usize) {
        let Operation { kind, left, .. } = &mut self.kernel[at];
        let pick = self.rng.below(left.len() as u64) as usize;
        let block = left.swap_remove(pick);
        match kind {
            OperationKind::Write { job, .. } => self.disk[block as usize] = job.write.version,
            OperationKind::Fill { .. } => self.disk[block as usize] = self.parent[block as usize],
            OperationKind::Copy { copy, buffer, .. } => {
                let place = copy.chunk.0 * PER_CHUNK + copy.run.first + block;
                set_stamp(buffer, block, self.disk[place as usize]);
            }
            OperationKind::Spill { copy, buffer, .. } => {
                let data = &buffer[(block * BLOCK_BYTES) as usize..][..BLOCK_BYTES as usize];
                let offset = self.mirror.copy_source(copy).offset + block * BLOCK_BYTES;
                self.spilled.insert((copy.layer.epoch, offset), data.to_vec());
                // The next process looks only at its length.
                let spill = format!("layer-{}.spill", copy.layer.epoch.0);
                let spill = File::create(self.dir.path().join(spill)).unwrap();
                spill.set_len(self.layout.file_len()).unwrap();
            }
            OperationKind::Persist { data, chunk, .. } => {
                set_stamp(data, block, self.disk[(chunk.0 * PER_CHUNK + block) as usize]);
            }
        }
    }

    fn complete(&mut self, done: OperationKind) {
        match done {
            OperationKind::Write { job, permit, fails } => self.written(job, permit, fails),
            OperationKind::Copy { copy, buffer, fails } => match copy.is_spilled() && !fails {
                true => {
                    let (left, fails) = self.copy_blocks(Fault::SpillWrite, copy.run.count);
                    self.submit(OperationKind::Spill { copy, buffer, fails }, left);
                }
                false => self.finish_copy(copy, buffer, fails),
            },
            OperationKind::Spill { copy, buffer, fails, .. } => {
                self.finish_copy(copy, buffer, fails)
            }
            OperationKind::Fill { chunk, runs, landed } => {
                let counts = self.planted_bug == Some(PlantedBug::FailedFill);
                self.mirror.end_fill(chunk, &runs, if counts { runs.len() } else { landed });
            }
            OperationKind::Persist { layer, chunk, .. } if self.strikes(Fault::Repository, 5) => {
                layer.cancel_store(chunk);
            }
            OperationKind::Persist { layer, chunk, .. } if self.strikes(Fault::PersistRead, 1) => {
                layer.cancel_store(chunk);
                self.give_up();
            }
            OperationKind::Persist { layer, data, present, chunk } => {
                self.was_read(&layer, chunk, data, present);
            }
        }
    }

    /// The blocks of a copy that land, and whether the copy fails.
    fn copy_blocks(&mut self, fault: Fault, count: u64) -> (Vec<u64>, bool) {
        let mut blocks = (0..count).collect();
        let fails = self.strikes(fault, 2);
        if fails {
            self.some_of(&mut blocks);
        }
        (blocks, fails)
    }

    /// Ends a copy.
    fn finish_copy(&mut self, copy: BlockCopy, buffer: PooledBuffer, fails: bool) {
        let is_told = fails && self.planted_bug != Some(PlantedBug::FailedCopy);
        self.mirror.finish_copy(copy, buffer, if is_told { Err(failure()) } else { Ok(()) });
    }

    /// Ends a write: the request is answered in any case.
    fn written(&mut self, job: Job, permit: Permit, fails: bool) {
        let version = job.write.version;
        let blocks = self.layout.blocks(job.write.span);
        for block in blocks.first..blocks.end() {
            // In a block that was absent, a failed write leaves garbage. The block may have landed
            // when an earlier process tried the write, and may have become part of a snapshot.
            let is_local = self.mirror.presence().get(block);
            let content = if is_local { &self.disk } else { &self.parent };
            let is_there = content[block as usize] == version;
            if !fails || is_there {
                self.history[block as usize].push((permit.epoch, version));
            }
        }
        self.mirror.complete(permit, !fails || self.planted_bug == Some(PlantedBug::FailedWrite));
        self.answer(job);
    }

    /// Stores a chunk that was read for its snapshot.
    fn was_read(
        &mut self,
        layer: &Arc<Layer>,
        chunk: ChunkIndex,
        mut data: Vec<u8>,
        present: BlockSet,
    ) {
        let preserved = layer.preserved(chunk).unwrap();
        let fails = !preserved.spilled.is_empty() && self.strikes(Fault::SpillRead, 3);
        let start = self.layout.span_of(chunk).offset;
        let read = |buffer: &mut [u8], run: Blocks| {
            for (block, data) in (run.first..).zip(buffer.chunks_mut(BLOCK_BYTES as usize)) {
                data.copy_from_slice(&self.spilled[&(layer.epoch, start + block * BLOCK_BYTES)]);
            }
            if fails { Err(failure()) } else { Ok(()) }
        };
        let Ok(present) = preserved.overlay(&mut data, present, read) else {
            layer.cancel_store(chunk);
            return self.give_up();
        };
        let ids = [(chunk, Some(ChunkId::of(&data)))];
        if self.planted_bug == Some(PlantedBug::StoredTooEarly) {
            let _ = layer.mark_stored(&ids, &self.layout);
        }
        if self.crashes_now(20) {
            return;
        }
        self.store(layer.epoch, chunk.0, &data, present);
        if self.crashes_now(20) {
            return;
        }
        if self.planted_bug == Some(PlantedBug::StoredTooEarly) {
            return;
        }
        if layer.mark_stored(&ids, &self.layout).is_err() {
            layer.cancel_store(chunk);
        }
    }
}
