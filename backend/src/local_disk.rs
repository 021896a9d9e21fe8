//! The local half of a disk: the mirror and the data file that it describes.

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
    pub(crate) read_only: bool,
}

impl LocalDisk {
    /// Gives memory back that no copy of old blocks uses. Call this when a layer has ended.
    pub(crate) fn trim_copies(&self) {
        if let Err(error) = self.mirror.trim_copies() {
            tracing::warn!(%error, "cannot give back the memory of old blocks");
        }
    }
}
