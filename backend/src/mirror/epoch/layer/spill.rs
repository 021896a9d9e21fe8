//! The spill file of a layer: old blocks for which there was no memory, each at the offset that it has
//! on the disk.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, MutexGuard};

use cairn_store::ChunkIndex;

use super::Layer;
use crate::mirror::cow::spill_space::SpillReservation;
use crate::mirror::files::disk_file::DiskFile;
use crate::mirror::layout::{BLOCK_BYTES, Layout};

/// The most chunks with spilled copies that are remembered, so that they are stored first.
const MAX_RECENTLY_SPILLED: usize = 1024;

/// The spill file of a layer.
#[derive(Default)]
pub(super) struct Spill {
    /// Set when the layer needs no copies any more. Then there is no file.
    pub(super) has_ended: bool,
    pub(super) file: Option<Arc<DiskFile>>,
    /// The space of the copies in it.
    pub(super) used: Option<SpillReservation>,
    /// Some of the chunks that have copies in it, the latest last.
    pub(super) recent: VecDeque<ChunkIndex>,
}

impl Spill {
    /// Adds a copy of a chunk.
    pub(super) fn add(&mut self, chunk: ChunkIndex, reservation: SpillReservation) {
        match &mut self.used {
            Some(used) => used.merge(reservation),
            None => self.used = Some(reservation),
        }
        if self.recent.back() != Some(&chunk) {
            if self.recent.len() == MAX_RECENTLY_SPILLED {
                self.recent.pop_front();
            }
            self.recent.push_back(chunk);
        }
    }
}

impl Layer {
    pub(super) fn spill(&self) -> MutexGuard<'_, Spill> {
        self.spill.lock().expect("no code panics with a layer locked")
    }

    /// The spill file, which is created if there is none. `None` if the layer needs no copies any
    /// more.
    pub(crate) fn spill_file(&self) -> io::Result<Option<Arc<DiskFile>>> {
        let mut spill = self.spill();
        if spill.file.is_none() && !spill.has_ended {
            spill.file = Some(Arc::new(self.dir.open_spill(self.epoch)?));
        }
        Ok(spill.file.clone())
    }

    /// Reads blocks of a chunk, at this offset of the disk, from the spill file.
    pub(crate) fn read_spilled(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let ended = || io::Error::other("the checkpoint has ended");
        self.spill_file()?.ok_or_else(ended)?.read_any(buffer, offset)
    }

    /// Frees the space of the copies of an Idle chunk in the spill file.
    pub(super) fn free_spilled(&self, chunk: ChunkIndex, layout: &Layout) {
        let Some(file) = self.spill().file.clone() else { return };
        // Without the lock: nobody changes the entry of an Idle chunk.
        let freed = self.entry(chunk).and_then(|entry| {
            if !entry.spilled.is_empty() {
                file.punch(layout.span_of(chunk))?;
            }
            Ok(entry.spilled.len() * BLOCK_BYTES)
        });
        match (freed, &mut self.spill().used) {
            (Ok(bytes), Some(used)) => used.release(bytes),
            (Ok(_), None) => {}
            // It is free when the layer ends.
            (Err(error), _) => {
                tracing::warn!(%error, "cannot free the space of old blocks in a spill file");
            }
        }
    }
}
