//! Where blobs are, and reading segments as they lie on the disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;

use super::DirectoryBlobs;
use super::index::Slot;
use crate::buffers::Buffer;
use crate::durable::segment::{ALIGNMENT, fill_some, path_of};
use crate::error::{Error, Result};
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

    /// Compares a blob with its name, as the disk has it. Returns its length. Fails if the blob is not
    /// where the index says, also after another look at the index.
    pub(crate) fn check_on_disk(&self, id: &BlobId) -> Result<u32> {
        let mut before = None;
        loop {
            let slot = self.index.find(id)?.ok_or(Error::MissingBlob { id: *id })?;
            match self.check_slot(id, slot) {
                Ok(()) => return Ok(slot.len),
                Err(error) if before == Some(slot) => return Err(error),
                // Another process may have stored it again.
                Err(_) => before = Some(slot),
            }
        }
    }

    /// Compares a blob with its name, without the page cache, which may be better than the disk. If it is
    /// damaged, the next put replaces it.
    pub(super) fn check_slot(&self, id: &BlobId, slot: Slot) -> Result<()> {
        let path = path_of(&self.directory, slot.segment);
        let len = slot.len as usize;
        // Direct I/O reads whole blocks.
        let mut buffer = Buffer::new(len.next_multiple_of(ALIGNMENT), 0);
        let mut fill = |file: &io::Result<File>| match file {
            Ok(file) => fill_some(file, &mut buffer, slot.offset),
            Err(_) => (0, None),
        };
        let mut opened = self.open_direct(slot.segment);
        let (mut filled, mut failed) = fill(&opened);
        if failed.as_ref().is_some_and(|error| error.kind() == io::ErrorKind::InvalidInput) {
            // The disk's blocks are larger.
            opened = File::open(&path);
            (filled, failed) = fill(&opened);
        }
        if filled >= len && BlobId::of(&buffer[..len]) == *id {
            return Ok(());
        }
        let reason = match opened.err().or(failed) {
            Some(error) if error.kind() == io::ErrorKind::NotFound => "the file is missing",
            Some(error) => {
                if error.raw_os_error() == Some(libc::EIO) {
                    self.mark_damaged(id);
                }
                return Err(Error::io("reading", &path, error));
            }
            None if filled < len => "the file is too short",
            None => "its content does not match its name",
        };
        self.mark_damaged(id);
        Err(Error::corrupt(format!("blob {id}, at {} of {}", slot.offset, path.display()), reason))
    }

    /// Reads a part of a segment, which begins at a block, into memory that begins at a page. Returns
    /// the number of bytes up to the end of the file, or to the first error.
    pub(crate) fn read_direct(&self, file: &File, offset: u64, buf: &mut [u8]) -> usize {
        fill_some(file, buf, offset).0
    }
}
