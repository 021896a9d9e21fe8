//! Space in reserve for a repository in a directory whose file system is full.
//!
//! SQLite cannot even open a database without space for its log and its shared memory. So nothing could
//! be listed, removed or collected on a full disk. Two rules keep some space for that:
//!
//! - A file without content holds space. It is made while there is plenty, and removed by the process that finds less
//!   than a quarter of its size free.
//! - Nobody stores blobs while less space is free than the file should hold. So no commit takes what the
//!   file has given up, or what a collection needs.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::sys;

/// The name of the file, in the directory of the repository.
pub(crate) const FILE_NAME: &str = "reserve";

/// The most space in reserve, in bytes. SQLite writes its log back after about 4 MiB.
const LARGEST: u64 = 8 << 20;

/// The part of a small file system that is kept in reserve: one of this many.
const PART: u64 = 32;

/// The space in reserve of one repository.
#[derive(Clone, Debug)]
pub(crate) struct Reserve {
    path: PathBuf,
    /// The space that the file should hold, in bytes.
    wanted: u64,
}

impl Reserve {
    /// The reserve of the repository in a directory.
    pub(crate) fn of(directory: &Path) -> Result<Reserve> {
        let size = sys::file_system_size(directory)?;
        Ok(Reserve { path: directory.join(FILE_NAME), wanted: (size / PART).min(LARGEST) })
    }

    /// Makes the file if there is plenty of space, and gives it up if there is almost none. Failures
    /// are only logged: a directory that may not be written can still be read.
    pub(crate) fn adjust(&self) {
        if let Err(error) = self.try_adjust() {
            tracing::debug!(path = %self.path.display(), %error, "cannot keep space in reserve");
        }
    }

    fn try_adjust(&self) -> Result<()> {
        let held = match fs::metadata(&self.path) {
            Ok(metadata) => metadata.blocks() * 512,
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => return Err(Error::io("examining", &self.path, error)),
        };
        let free = self.free()?;
        if free < self.wanted / 4 && held > 0 {
            tracing::warn!(
                path = %self.path.display(),
                bytes = held,
                "the file system is full: using the space in reserve"
            );
            return fs::remove_file(&self.path)
                .map_err(|error| Error::io("giving up", &self.path, error));
        }
        if held < self.wanted && free > 4 * self.wanted {
            let file = File::options().write(true).create(true).truncate(false).open(&self.path);
            let made = file.and_then(|file| sys::allocate_beyond_end(&file, self.wanted));
            return made.map_err(|error| Error::io("making", &self.path, error));
        }
        Ok(())
    }

    /// Fails if blobs of so many bytes must not be stored, because too little space would be left.
    pub(crate) fn check(&self, bytes: u64) -> Result<()> {
        match self.free()? < self.wanted.saturating_add(bytes) {
            true => Err(Error::Full { doing: "storing data beside", path: self.path.clone() }),
            false => Ok(()),
        }
    }

    fn free(&self) -> Result<u64> {
        sys::free_space(self.path.parent().unwrap_or(&self.path))
    }
}
