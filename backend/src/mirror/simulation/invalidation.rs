//! Real threads invalidate and fetch blocks while others write them and take checkpoints. This
//! tests the order in which the threads see each other's marks.

use std::collections::HashMap;
use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use cairn_store::{ChunkId, ChunkIndex, Geometry};
use seeded_rng::Rng;

use super::crash::CowBlocks;
use super::storing::accept;
use super::{CHUNK, CHUNKS, PARENT, PER_CHUNK, WORKERS, crash, set_stamp, stamp};
use crate::mirror::layout::{BLOCK_BYTES, Layout, Span};
use crate::mirror::{Mirror, Plan};

/// How often blocks must have been invalidated.
const INVALIDATIONS: u64 = 20_000;

struct Shared {
    mirror: Mirror,
    disk: Vec<AtomicU64>,
    parent: RwLock<Vec<u64>>,
    /// For each block, the version of its last write that was completed.
    written: Vec<AtomicU64>,
    invalidated: AtomicU64,
}

impl Shared {
    fn goes_on(&self) -> bool {
        self.invalidated.load(Ordering::SeqCst) < INVALIDATIONS
    }

    fn fill(&self, chunk: ChunkIndex) {
        loop {
            let invalidations = self.mirror.invalidations();
            let parent = self.parent.read().unwrap().clone();
            // The content comes over a network.
            thread::yield_now();
            let runs = self.mirror.begin_fill(chunk);
            if self.mirror.invalidations() != invalidations {
                self.mirror.end_fill(chunk, &runs, 0);
                continue;
            }
            for block in runs.iter().flat_map(|run| run.first..run.end()) {
                self.disk[block as usize].store(parent[block as usize], Ordering::SeqCst);
            }
            return self.mirror.end_fill(chunk, &runs, runs.len());
        }
    }

    /// One writer has the even blocks, the other one the odd blocks. Both stay in one chunk for a
    /// while, so that other chunks have not changed.
    fn write(&self, worker: usize, mut rng: Rng) {
        let mut epoch_handle = self.mirror.epoch_handle(worker);
        for version in (PARENT + 1..).take_while(|_| self.goes_on()) {
            let chunk = version / 64 % CHUNKS;
            let block = chunk * PER_CHUNK + rng.below(PER_CHUNK / 2) * 2 + worker as u64;
            let span = match rng.chance(30) {
                true => Span { offset: block * BLOCK_BYTES + 512, len: 512 },
                false => Span { offset: block * BLOCK_BYTES, len: BLOCK_BYTES },
            };
            let permit = loop {
                match self.mirror.plan_write(&mut epoch_handle, worker, span) {
                    Plan::Direct(permit) => break permit,
                    Plan::Fill(chunks) => chunks.into_iter().for_each(|chunk| self.fill(chunk)),
                    Plan::RecordIntent(span) => {
                        let intent = self.mirror.intent();
                        intent.set(&intent.regions_of(span));
                    }
                    Plan::Wait => thread::yield_now(),
                    Plan::Copy(jobs) => {
                        for (job, mut buffer) in jobs {
                            let first = job.chunk.0 * PER_CHUNK + job.run.first;
                            for at in 0..job.run.count {
                                let version = &self.disk[(first + at) as usize];
                                set_stamp(&mut buffer, at, version.load(Ordering::SeqCst));
                            }
                            self.mirror.finish_copy(job, buffer, Ok(()));
                        }
                    }
                }
            };
            self.disk[block as usize].store(version, Ordering::SeqCst);
            self.mirror.complete(permit, true);
            self.written[block as usize].store(version, Ordering::SeqCst);
        }
    }

    /// A snapshot has what the guest wrote before it, or something newer.
    fn checkpoint(&self, number: u64) {
        let before: Vec<_> = self.written.iter().map(|one| one.load(Ordering::SeqCst)).collect();
        let Some(layer) = self.mirror.freeze().unwrap() else { return };
        accept(&layer, number);
        while !self.mirror.settle(&layer) {
            thread::yield_now();
        }
        let mut snapshot = self.parent.read().unwrap().clone();
        for chunk in layer.dirty().iter() {
            assert!(layer.begin_store(ChunkIndex(chunk)));
            let own = self.mirror.layout().blocks_of(ChunkIndex(chunk));
            let present = self.mirror.presence().in_chunk(own);
            let mut data = vec![0; CHUNK as usize];
            for at in 0..PER_CHUNK {
                let version = &self.disk[(own.first + at) as usize];
                set_stamp(&mut data, at, version.load(Ordering::SeqCst));
            }
            let spilled = |_: &mut [u8], _| unreachable!("there is enough memory");
            let preserved = layer.preserved(ChunkIndex(chunk)).unwrap();
            let present = preserved.overlay(&mut data, present, spilled).unwrap();
            for at in (0..PER_CHUNK).filter(|at| present.contains(*at)) {
                snapshot[(own.first + at) as usize] = stamp(&data, at);
            }
            let ids = [(ChunkIndex(chunk), Some(ChunkId::of(&data)))];
            layer.mark_stored(&ids, &self.mirror.layout()).unwrap();
        }
        for (block, (found, before)) in snapshot.iter().zip(&before).enumerate() {
            assert!(found >= before, "block {block} of snapshot {number}: {found}, not {before}");
        }
        *self.parent.write().unwrap() = snapshot;
        self.mirror.publish(&layer);
    }
}

/// Ends the other threads when this one ends, even if it panics.
struct Last<'a>(&'a Shared);

impl Drop for Last<'_> {
    fn drop(&mut self) {
        self.0.invalidated.store(INVALIDATIONS, Ordering::SeqCst);
    }
}

#[test]
fn a_block_is_not_invalidated_once_somebody_may_have_written_it() {
    for seed in 0..3 {
        println!("seed {seed}");
        let layout = Layout::new(Geometry::new(CHUNKS * CHUNK, CHUNK as u32).unwrap());
        let dir = tempfile::tempdir().unwrap();
        let blocks = layout.block_count();
        let cow = CowBlocks { memory: blocks * 16, spill_buffers: 4, spill: 200 };
        let (mirror, _) = crash::open(&dir, layout, cow, &HashMap::new());
        let shared = Shared {
            mirror,
            disk: (0..blocks).map(|_| AtomicU64::new(0)).collect(),
            parent: RwLock::new(vec![PARENT; blocks as usize]),
            written: (0..blocks).map(|_| AtomicU64::new(PARENT)).collect(),
            invalidated: AtomicU64::new(0),
        };
        thread::scope(|scope| {
            for worker in 0..WORKERS {
                let shared = &shared;
                scope.spawn(move || shared.write(worker, Rng::new(seed * 10 + worker as u64)));
            }
            scope.spawn(|| {
                let mut rng = Rng::new(seed * 10 + 8);
                while shared.goes_on() {
                    let block = rng.below(blocks);
                    let was_present = shared.mirror.presence().get(block);
                    if shared.mirror.invalidate(block) && was_present {
                        shared.invalidated.fetch_add(1, Ordering::SeqCst);
                    }
                    if rng.chance(50) {
                        shared.fill(layout.chunk_of(block));
                    }
                }
            });
            let _last = Last(&shared);
            (1..).take_while(|_| shared.goes_on()).for_each(|number| shared.checkpoint(number));
        });
        for block in 0..blocks as usize {
            let found = match shared.mirror.presence().get(block as u64) {
                true => shared.disk[block].load(Ordering::SeqCst),
                false => shared.parent.read().unwrap()[block],
            };
            let expected = shared.written[block].load(Ordering::SeqCst);
            assert_eq!(found, expected, "block {block}");
        }
    }
}
