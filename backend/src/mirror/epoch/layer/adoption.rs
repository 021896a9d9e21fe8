//! Recovers a layer that an earlier process left.

use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use cairn_store::ChunkIndex;

use super::Layer;
use super::spill::Spill;
use crate::mirror::block_set::BlockSet;
use crate::mirror::cow::memory::OwnedSlot;
use crate::mirror::cow::{CowSpace, PreservedRun};
use crate::mirror::epoch::layer_state::LayerState;
use crate::mirror::epoch::record::EpochRecord;
use crate::mirror::files::layer_table::{ChunkEntry, LayerDir};
use crate::mirror::layout::{BLOCK_BYTES, Blocks, Layout};

impl Layer {
    /// Recovers a layer of a process that is gone, with its table and the copies that it may have
    /// left in memory. No write of its epoch is in flight any more. If what was left does not fit,
    /// the layer fails.
    pub(crate) fn recover(
        record: EpochRecord,
        dir: &Arc<LayerDir>,
        owned: &[OwnedSlot],
        layout: &Layout,
        space: &CowSpace,
    ) -> Layer {
        if record.state() == LayerState::Open {
            record.freeze(record.size());
        }
        record.settle();
        let mut layer = Layer::new(Arc::new(record), dir.clone());
        if layer.failure().is_some() {
            return layer;
        }
        let adopted = layer
            .adopt_table(layout, space)
            .and_then(|()| layer.adopt_memory(owned, layout, space));
        if let Err(error) = adopted {
            tracing::error!(%error, epoch = layer.epoch.0, "cannot recover a checkpoint");
            layer.fail(
                "the record of its old blocks was damaged when the disk's process was restarted",
            );
        }
        layer
    }

    /// Checks the table, and counts what it has.
    fn adopt_table(&mut self, layout: &Layout, space: &CowSpace) -> io::Result<()> {
        let inconsistent = |chunk: ChunkIndex, what: &str| {
            io::Error::new(io::ErrorKind::InvalidData, format!("chunk {}: {what}", chunk.0))
        };
        let blocks = BlockSet::run(Blocks { first: 0, count: layout.blocks_per_chunk() });
        let (mut idle, mut spilled, mut spill_len) = (0, 0, 0);
        let mut each = |chunk, entry: ChunkEntry| {
            let is_idle = self.is_stored(chunk);
            if is_idle && entry.stored.is_none() {
                return Err(inconsistent(chunk, "it is durable under an unknown name"));
            }
            if !entry.decided.without(&blocks).is_empty() {
                return Err(inconsistent(chunk, "it has copies of blocks that it does not have"));
            }
            if is_idle {
                idle += 1;
            } else if let Some(last) = entry.spilled.runs().last() {
                spilled += entry.spilled.len() * BLOCK_BYTES;
                spill_len = layout.span_of(chunk).offset + last.span().end();
            }
            Ok(())
        };
        let mut chunks = self.dirty().iter().map(ChunkIndex);
        if !self.record.has_table() {
            chunks.try_for_each(|chunk| each(chunk, ChunkEntry::default()))?;
            return Ok(());
        }
        let table = self.dir.open_table(self.epoch)?;
        table.read_all(chunks, each)?;
        self.table = OnceLock::from(table);
        self.done_before = idle;
        if spilled > 0 {
            let file = Some(Arc::new(self.dir.reopen_spill(self.epoch, spill_len)?));
            let used = Some(space.spill.adopt(spilled));
            self.spill = Mutex::new(Spill { file, used, ..Spill::default() });
        }
        Ok(())
    }

    /// Takes over the copies in memory. A slot whose chunk is not guarded is free.
    fn adopt_memory(
        &self,
        owned: &[OwnedSlot],
        layout: &Layout,
        space: &CowSpace,
    ) -> io::Result<()> {
        let damaged =
            |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("a copy {what}"));
        for slot in owned.iter().filter(|slot| slot.is_of(self.epoch)) {
            if slot.block >= layout.block_count() {
                return Err(damaged("of a block behind the disk's end"));
            }
            let chunk = layout.chunk_of(slot.block);
            if !self.is_guarding(chunk) {
                continue;
            }
            let run = Blocks { first: slot.block - layout.blocks_of(chunk).first, count: 1 };
            let entry = self.entry(chunk)?;
            let mut shard = self.shard(chunk);
            let tracked = shard.entry(chunk.0).or_default();
            let decided = entry.decided.union(&tracked.in_memory());
            if decided.contains(run.first) {
                return Err(damaged("of a block that has another one"));
            }
            let data = space.memory.take_at(slot.offset, BLOCK_BYTES);
            let data = data.ok_or_else(|| damaged("outside of the memory"))?;
            tracked.runs.push(Arc::new(PreservedRun { run, data }));
        }
        Ok(())
    }
}
