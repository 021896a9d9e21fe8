//! The process crashes, and the next one takes over.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::sync::Arc;

use cairn_store::SnapshotState;
use tempfile::TempDir;

use super::kernel::{Operation, OperationKind};
use super::ring::Write;
use super::{PlantedBug, WORKERS, World, ring};
use crate::mirror::Mirror;
use crate::mirror::cow::CowSpace;
use crate::mirror::cow::buffer_pool::BufferPool;
use crate::mirror::cow::memory::CowMemory;
use crate::mirror::cow::spill_space::SpillSpace;
use crate::mirror::epoch::Epoch;
use crate::mirror::epoch::layer::Layer;
use crate::mirror::epoch::manager::EpochManager;
use crate::mirror::epoch::record::{ChunkCounts, EpochFiles};
use crate::mirror::epoch::recovery::{Recovered, recover};
use crate::mirror::events::Events;
use crate::mirror::files::layer_table::LayerDir;
use crate::mirror::intent::WriteIntent;
use crate::mirror::layout::{BLOCK_BYTES, Layout};
use crate::mirror::presence::Presence;

/// The space for copies of old blocks, in blocks.
#[derive(Clone, Copy)]
pub(super) struct CowBlocks {
    pub(super) memory: u64,
    pub(super) spill_buffers: u64,
    pub(super) spill: u64,
}

/// The mirror that a process finds in `dir`, and the checkpoints that it resumes.
pub(super) fn open(
    dir: &TempDir,
    layout: Layout,
    cow: CowBlocks,
    states: &HashMap<u64, SnapshotState>,
) -> (Mirror, Vec<Arc<Layer>>) {
    let file = |name: &str| {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        options.open(dir.path().join(name)).unwrap()
    };
    let presence = file("presence");
    presence.set_len(Presence::shared_len(&layout)).unwrap();
    let presence = Presence::shared(&presence, 0, &layout).unwrap();
    presence.recount();
    let (files, mut found) = EpochFiles::open(dir.path(), ChunkCounts::of(&layout)).unwrap();
    if found.is_empty() {
        found.push(files.allocate().unwrap());
        found[0].begin(Epoch(1));
    }
    let space = CowSpace {
        memory: CowMemory::new(file("cow-memory"), &file("cow-owners"), cow.memory * BLOCK_BYTES)
            .unwrap(),
        spill_buffers: BufferPool::new((cow.spill_buffers * BLOCK_BYTES) as usize),
        spill: SpillSpace::new(cow.spill * BLOCK_BYTES),
    };
    let layer_dir = Arc::new(LayerDir::new(dir.path(), &layout));
    let Recovered { current, layers, resumed } =
        recover(found, &layer_dir, &layout, &space, |number| states.get(&number).copied()).unwrap();
    let epochs = EpochManager::new(files, layer_dir, WORKERS, current, layers);
    let intent = std::fs::read(dir.path().join("intent")).unwrap_or(vec![0; 8]);
    let (intent, events) = (WriteIntent::new(&layout, &intent), Events::new(Vec::new()));
    (Mirror::new(layout, presence, intent, epochs, space, events), resumed)
}

impl World {
    /// Ends the process. Operations in flight land or do not land; everything else of the process
    /// is gone.
    fn crash(&mut self) {
        self.crashes += 1;
        for Operation { kind, left, .. } in std::mem::take(&mut self.kernel) {
            match kind {
                OperationKind::Write { job, mut permit, .. } => {
                    permit.returned = true;
                    let Write { span, version } = job.write;
                    for block in left {
                        if self.rng.chance(50) {
                            self.disk[block as usize] = version;
                        }
                    }
                    let blocks = self.layout.blocks(span);
                    for block in blocks.first..blocks.end() {
                        self.torn[block as usize].push((permit.epoch, version));
                    }
                }
                OperationKind::Fill { .. } => {
                    for block in left {
                        if self.rng.chance(50) {
                            self.disk[block as usize] = self.parent[block as usize];
                        }
                    }
                }
                OperationKind::Copy { .. }
                | OperationKind::Spill { .. }
                | OperationKind::Persist { .. } => {}
            }
        }
        self.parked.iter_mut().for_each(Vec::clear);
        match self.planted_bug {
            Some(PlantedBug::LostOwners) => self.erase_files("cow-owners", 0, 8, 8),
            Some(PlantedBug::LostTables) => self.erase_files(".table", 4096 + 40, 64, 16),
            _ => {}
        }
        self.commits.clear();
        let (mirror, resumed) = open(&self.dir, self.layout, self.cow, &self.states);
        self.mirror = mirror;
        self.commits = resumed;
        let epoch_handle = |worker| self.mirror.epoch_handle(worker);
        self.epoch_handles = (0..WORKERS).map(epoch_handle).collect();
        self.queues = ring::open(&self.ledgers, &self.rings);
        if self.planted_bug == Some(PlantedBug::LostLedgerEntry) {
            self.queues[0].lose_one(&self.rings[0]);
            self.queues = ring::open(&self.ledgers, &self.rings);
        }
    }

    /// Erases `len` bytes at `first`, and at each `step` after that, in the files with such a name.
    fn erase_files(&self, name: &str, first: usize, step: usize, len: usize) {
        for entry in std::fs::read_dir(self.dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.to_str().unwrap().ends_with(name) {
                let mut bytes = std::fs::read(&path).unwrap();
                let parts =
                    bytes.get_mut(first..).into_iter().flat_map(|rest| rest.chunks_mut(step));
                parts.for_each(|part| part.iter_mut().take(len).for_each(|byte| *byte = 0));
                std::fs::write(&path, bytes).unwrap();
            }
        }
    }

    /// Crashes in `per_mille` of a thousand calls. Returns whether it did: then the next process
    /// has taken over.
    pub(super) fn crashes_now(&mut self, per_mille: u64) -> bool {
        let crashes = !self.calm && self.rng.below(1000) < per_mille;
        if crashes {
            self.crash();
        }
        crashes
    }
}
