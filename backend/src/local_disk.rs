//! The local half of a disk: the mirror and the two files that it describes.

use crate::mirror::Mirror;
use crate::mirror::files::disk_file::DiskFile;

/// The local half of a disk. All threads share it.
pub(crate) struct LocalDisk {
    pub(crate) mirror: Mirror,
    /// The guest's data.
    pub(crate) data: DiskFile,
    /// Old blocks for which there was no memory.
    pub(crate) spill: DiskFile,
    pub(crate) read_only: bool,
}
