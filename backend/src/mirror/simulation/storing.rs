//! Checkpoints are taken, stored and checked.

use std::collections::BTreeMap;
use std::sync::Arc;

use cairn_store::{ChunkIndex, Consistency, NewSnapshot, SnapshotState};

use super::faults::Fault;
use super::kernel::{Operation, OperationKind};
use super::{CHUNK, PER_CHUNK, PlantedBug, World, stamp};
use crate::mirror::block_set::BlockSet;
use crate::mirror::epoch::Epoch;
use crate::mirror::epoch::layer::Layer;

/// Records the checkpoint that has frozen a layer.
pub(super) fn accept(layer: &Layer, number: u64) {
    layer.accept(&NewSnapshot {
        number,
        label: None,
        metadata: cairn_store::Metadata::default(),
        is_from_guest: false,
        size: 1 << 20,
        consistency: Consistency::Crash,
        time: 0,
        dirty_bytes: 0,
        pause_us: 0,
    });
}

impl World {
    pub(super) fn freeze(&mut self) {
        // The record for the next epoch may be created ahead of time, if there is space.
        if self.rng.chance(30) && self.mirror.prepare_freeze().is_err() {
            self.faults.add(Fault::NoEpoch, 1);
        }
        let layer = match self.mirror.freeze() {
            Ok(Some(layer)) => layer,
            Ok(None) => return,
            Err(_) => return self.faults.add(Fault::NoEpoch, 1),
        };
        if self.planted_bug == Some(PlantedBug::Unsettled) {
            layer.settle();
        }
        // If the process crashes before the checkpoint is answered, there is no checkpoint.
        if self.crashes_now(50) {
            return;
        }
        accept(&layer, layer.epoch.0);
        self.commits.push(layer);
    }

    /// One step of persisting the oldest layer.
    pub(super) fn persist(&mut self) {
        let Some(layer) = self.commits.first().cloned() else { return };
        if !self.mirror.settle(&layer) {
            return;
        }
        let sources = self.sources(&layer);
        let lost = sources.iter().any(|source| source.failure().is_some());
        if lost || self.strikes(Fault::Commit, 1) {
            return self.give_up();
        }
        for (source, chunk) in needed(&sources) {
            if !source.is_stored(chunk) && source.begin_store(chunk) {
                let present = self.mirror.presence().in_chunk(self.layout.blocks_of(chunk));
                let (layer, data) = (source.clone(), vec![0; CHUNK as usize]);
                let kind = OperationKind::Persist { layer, data, present, chunk };
                return self.submit(kind, (0..PER_CHUNK).collect());
            }
        }
        self.publish(&layer, &sources);
    }

    /// Fails the checkpoint that is being stored.
    pub(super) fn give_up(&mut self) {
        let layer = self.commits[0].clone();
        self.kernel.retain(|operation| {
            let OperationKind::Persist { layer, chunk, .. } = &operation.kind else { return true };
            layer.cancel_store(*chunk);
            false
        });
        // If the catalog is unavailable, the failure is not recorded there.
        if self.rng.chance(50) {
            self.states.insert(layer.epoch.0, SnapshotState::Failed);
            if self.crashes_now(200) {
                return;
            }
        }
        self.commits.remove(0);
        self.mirror.give_up(&layer);
        self.mirror.trim_copies().unwrap();
    }

    /// The layer and the failed layers that it absorbs, newest first. Layers whose chunks are all
    /// in newer ones are left out.
    fn sources(&self, layer: &Layer) -> Vec<Arc<Layer>> {
        let mut sources: Vec<Arc<Layer>> = Vec::new();
        let layers = self.mirror.epoch_view().layers.clone();
        for source in layers.into_iter().rev().filter(|other| other.epoch <= layer.epoch) {
            let hidden = |chunk| sources.iter().any(|newer| newer.dirty().contains(chunk));
            if !source.dirty().iter().all(hidden) {
                sources.push(source);
            }
        }
        sources
    }

    /// Stores a chunk of a layer. Absent blocks come from the parent.
    pub(super) fn store(&mut self, epoch: Epoch, chunk: u64, data: &[u8], present: BlockSet) {
        let content = (0..PER_CHUNK)
            .map(|block| match present.contains(block) {
                true => stamp(data, block),
                false => self.parent[(chunk * PER_CHUNK + block) as usize],
            })
            .collect();
        self.stored.insert((epoch, chunk), content);
    }

    /// Publishes the layer if everything that it needs is stored, and checks the snapshot.
    fn publish(&mut self, layer: &Arc<Layer>, sources: &[Arc<Layer>]) {
        if !needed(sources).iter().all(|(source, chunk)| source.is_stored(*chunk)) {
            let is_read = |one: &Operation| matches!(one.kind, OperationKind::Persist { .. });
            assert!(self.kernel.iter().any(is_read), "a chunk was left out");
            return;
        }
        let mut snapshot = self.parent.clone();
        for (source, chunk) in needed(sources) {
            let content = self.stored.get(&(source.epoch, chunk.0));
            let content = content.expect("what counts as stored is");
            let from = (chunk.0 * PER_CHUNK) as usize;
            snapshot[from..from + PER_CHUNK as usize].copy_from_slice(content);
        }
        for (block, found) in snapshot.iter().enumerate() {
            let expected =
                self.history[block].iter().rev().find(|(epoch, _)| *epoch <= layer.epoch);
            let expected = expected.expect("the parent is older than all").1;
            let torn = |(epoch, version): &(Epoch, u64)| {
                *epoch <= layer.epoch && version == found && *version > expected
            };
            let is_right = *found == expected || self.torn[block].iter().any(torn);
            assert!(is_right, "block {block} of the snapshot of {:?}: {found}", layer.epoch);
        }
        self.parent = snapshot;
        self.states.insert(layer.epoch.0, SnapshotState::Stable);
        self.published += 1;
        if self.crashes_now(100) {
            return;
        }
        self.mirror.publish(layer);
        self.mirror.trim_copies().unwrap();
        self.commits.remove(0);
    }
}

/// The chunks of a snapshot, and the layers that they come from. `sources` has the newest layer
/// first.
fn needed(sources: &[Arc<Layer>]) -> Vec<(&Arc<Layer>, ChunkIndex)> {
    let mut chunks = BTreeMap::new();
    for source in sources {
        for chunk in source.dirty().iter() {
            chunks.entry(chunk).or_insert(source);
        }
    }
    chunks.into_iter().map(|(chunk, source)| (source, ChunkIndex(chunk))).collect()
}
