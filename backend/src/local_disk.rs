//! The local half of a disk: the mirror and the two files that it describes.

use std::sync::Arc;

use crate::mirror::Mirror;
use crate::mirror::files::data_sync::DataSync;
use crate::mirror::files::disk_file::DiskFile;

/// The local half of a disk. All threads share it.
pub(crate) struct LocalDisk {
    pub(crate) mirror: Mirror,
    /// The guest's data.
    pub(crate) data: DiskFile,
    /// The syncs of `data`.
    pub(crate) data_sync: Arc<DataSync>,
    /// Old blocks for which there was no memory.
    pub(crate) spill: DiskFile,
    pub(crate) read_only: bool,
}

impl LocalDisk {
    /// Gives space back that no copy of old blocks uses. Call this when a layer has ended.
    pub(crate) fn trim_copies(&self) {
        let shorten = |len| match self.spill.len()? > len {
            true => self.spill.set_len(len),
            false => Ok(()),
        };
        if let Err(error) = self.mirror.trim_copies(shorten) {
            tracing::warn!(%error, "cannot give back the space of old blocks");
        }
    }
}
