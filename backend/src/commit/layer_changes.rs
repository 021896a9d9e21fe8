//! The chunks that a checkpoint changes, as its layers have them.

use std::io;
use std::sync::Arc;

use cairn_store::{Changes, ChunkId, ChunkIndex, Error, Result};

use crate::mirror::epoch::layer::Layer;

/// The changes of several layers. All chunks must be durable. They are read from the layers' tables,
/// because a disk can have more of them than fit into memory. Layers that have been closed will do.
pub(super) struct LayerChanges {
    /// The newest layer first. Its chunks hide those of the others.
    layers: Vec<Arc<Layer>>,
}

impl LayerChanges {
    pub(super) fn new(layers: Vec<Arc<Layer>>) -> LayerChanges {
        LayerChanges { layers }
    }

    /// The first changed chunk at `from` or behind it, and the newest layer that has it.
    fn first_from(&self, from: u64) -> Option<(u64, &Layer)> {
        let first = |layer: &Arc<Layer>| layer.dirty().first_from(from);
        let chunk = self.layers.iter().filter_map(first).min()?;
        let layer = self.layers.iter().find(|layer| layer.dirty().contains(chunk))?;
        Some((chunk, layer))
    }
}

impl Changes for LayerChanges {
    fn next(&self, from: ChunkIndex) -> Result<Option<(ChunkIndex, Option<ChunkId>)>> {
        let Some((chunk, layer)) = self.first_from(from.0) else { return Ok(None) };
        let chunk = ChunkIndex(chunk);
        let missing = || io::Error::other(format!("chunk {} is not stored", chunk.0));
        let stored = layer.stored(chunk).and_then(|stored| stored.ok_or_else(missing));
        match stored {
            Ok(id) => Ok(Some((chunk, id))),
            Err(source) => {
                let (doing, path) =
                    ("reading the names of a checkpoint's chunks", layer.table_path());
                Err(Error::Io { doing, path, source })
            }
        }
    }

    fn count(&self) -> u64 {
        let next = |from| self.first_from(from).map(|(chunk, _)| chunk + 1);
        match &self.layers[..] {
            [one] => one.dirty().len(),
            _ => std::iter::successors(next(0), |from| next(*from)).count() as u64,
        }
    }
}
