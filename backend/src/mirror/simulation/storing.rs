//! Checkpoints are taken, stored and judged.

use std::collections::BTreeMap;
use std::sync::Arc;

use cairn_store::{ChunkIndex, Consistency, NewSnapshot, SnapshotState};

use super::{CHUNK, Kernel, PER_CHUNK, Plant, World, stamp};
use crate::mirror::blockset::BlockSet;
use crate::mirror::layer::{Epoch, Layer};

impl World {
    pub(super) fn freeze(&mut self) {
        let Some(layer) = self.mirror.cut.freeze().unwrap() else { return };
        if self.plant == Some(Plant::Unsettled) {
            layer.set_settled();
        }
        // It may end before the checkpoint is answered: then there was none.
        if self.rng.chance(5) {
            return self.die();
        }
        layer.accept(&NewSnapshot {
            number: layer.epoch.0,
            label: None,
            consistency: Consistency::Crash,
            time: 0,
            dirty_bytes: 0,
            pause_us: 0,
        });
        self.commits.push(layer);
    }

    /// One step of persisting the oldest layer.
    pub(super) fn persist(&mut self) {
        let Some(layer) = self.commits.first().cloned() else { return };
        if !self.mirror.cut.settle(&layer) {
            return;
        }
        if self.rng.chance(2) && !self.persisting() {
            // The catalog may be away: then the failure cannot be recorded there.
            if self.rng.chance(50) {
                self.states.insert(layer.epoch.0, SnapshotState::Failed);
                if self.rng.chance(20) {
                    return self.die();
                }
            }
            self.commits.remove(0);
            self.mirror.cut.give_up(&layer);
            return;
        }
        let sources = self.sources(&layer);
        for (at, source) in sources.iter().enumerate() {
            for chunk in source.dirty().iter() {
                let newer = sources[at + 1..].iter().any(|newer| newer.dirty().contains(chunk));
                if newer || source.is_stored(ChunkIndex(chunk)) {
                    continue;
                }
                if source.take(ChunkIndex(chunk)) {
                    let present = self.mirror.presence.of(self.layout.blocks_of(ChunkIndex(chunk)));
                    let (layer, chunk) = (source.clone(), ChunkIndex(chunk));
                    let (data, left) = (vec![0; CHUNK as usize], (0..PER_CHUNK).collect());
                    self.kernel.push(Kernel::Persist { layer, data, present, chunk, left });
                    return;
                }
            }
        }
        self.publish(&layer);
    }

    fn persisting(&self) -> bool {
        self.kernel.iter().any(|operation| matches!(operation, Kernel::Persist { .. }))
    }

    /// The layer and the failed ones that it absorbs, oldest first.
    fn sources(&self, layer: &Layer) -> Vec<Arc<Layer>> {
        let layers = self.mirror.cut.view().layers.clone();
        layers.into_iter().filter(|other| other.epoch <= layer.epoch).collect()
    }

    /// Keeps a chunk of a layer; absent blocks come from the parent.
    pub(super) fn store(&mut self, epoch: Epoch, chunk: u64, data: &[u8], present: BlockSet) {
        let content = (0..PER_CHUNK)
            .map(|block| match present.contains(block) {
                true => stamp(data, block),
                false => self.parent[(chunk * PER_CHUNK + block) as usize],
            })
            .collect();
        self.stored.insert((epoch, chunk), content);
    }

    /// Publishes the layer if all that it needs is stored, and judges the snapshot.
    fn publish(&mut self, layer: &Arc<Layer>) {
        let sources = self.sources(layer);
        let mut changes = BTreeMap::new();
        for source in &sources {
            for chunk in source.dirty().iter() {
                let hides = |one: &&Arc<Layer>| one.epoch > source.epoch;
                let newer = sources.iter().filter(hides).any(|one| one.dirty().contains(chunk));
                match source.is_stored(ChunkIndex(chunk)) {
                    true => {
                        let content = self.stored.get(&(source.epoch, chunk));
                        let content = content.expect("what counts as stored is");
                        changes.insert(chunk, content.clone());
                    }
                    false if newer => {}
                    false => return,
                }
            }
        }
        let mut snapshot = self.parent.clone();
        for (chunk, content) in changes {
            let from = (chunk * PER_CHUNK) as usize;
            snapshot[from..from + PER_CHUNK as usize].copy_from_slice(&content);
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
        if self.rng.chance(10) {
            self.published += 1;
            return self.die();
        }
        self.mirror.cut.publish(layer);
        self.commits.remove(0);
        self.published += 1;
    }
}
