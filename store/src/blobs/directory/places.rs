//! Where blobs are, and reading segments as they lie on the disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;

use super::DirectoryBlobs;
use super::index::Slot;
use crate::durable::segment::{fill_some, path_of};
use crate::error::Result;
use crate::id::BlobId;

/// The place of a blob, which may change at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobPlace {
    pub(crate) segment: u64,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

impl BlobPlace {
    /// The end of the blob's last block.
    pub(crate) fn end(&self) -> u64 {
        self.slot().end()
    }

    /// The space that the blob takes, in bytes.
    pub(crate) fn space(&self) -> u64 {
        self.end() - self.offset
    }

    fn slot(&self) -> Slot {
        Slot { segment: self.segment, offset: self.offset, len: self.len }
    }
}

impl DirectoryBlobs {
    /// The places of blobs; `None` for a blob that is not in the index.
    pub(crate) fn places(&self, ids: &[BlobId]) -> Result<Vec<Option<BlobPlace>>> {
        let found = self.index.find_all(ids)?.into_iter();
        let place = |Slot { segment, offset, len }| BlobPlace { segment, offset, len };
        Ok(found.map(|one| one.map(|stored| place(stored.slot))).collect())
    }

    /// Opens a segment for [`DirectoryBlobs::read_direct`].
    pub(crate) fn open_direct(&self, segment: u64) -> io::Result<File> {
        let path = path_of(&self.directory, segment);
        let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&path);
        match direct {
            // The file system has no direct I/O.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => File::open(&path),
            opened => opened,
        }
    }

    /// Reads a part of a segment, which begins at a block, into memory that begins at a page. Returns
    /// the number of bytes up to the end of the file, or to the first error.
    pub(crate) fn read_direct(&self, file: &File, offset: u64, buf: &mut [u8]) -> usize {
        fill_some(file, buf, offset).0
    }
}
