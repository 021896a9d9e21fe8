//! Space in reserve for a repository in a directory, or a peer, whose file system is full.
//!
//! SQLite cannot even open a database without space for its log and its shared memory. So nothing could
//! be listed, removed or collected on a full disk. Two rules keep some space for that:
//!
//! - A file without content holds space. A process that stores blobs makes it while there is plenty. A
//!   process that opens the repository, or a peer that deletes, removes it if it finds less than a quarter of
//!   its size free.
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

/// The most space in reserve for a repository, in bytes. SQLite writes its log back after about 4 MiB.
const LARGEST: u64 = 8 << 20;

/// The most space in reserve for a peer, in bytes. It deletes few fragments in a transaction.
const LARGEST_OF_PEER: u64 = 2 << 20;

/// The part of a small file system that is kept in reserve: one of this many.
const PART: u64 = 32;

/// The space in reserve of one repository or peer.
#[derive(Clone, Debug)]
pub(crate) struct Reserve {
    path: PathBuf,
    /// The space that the file should hold, in bytes.
    wanted: u64,
}

impl Reserve {
    /// The reserve of the repository in a directory.
    pub(crate) fn of(directory: &Path) -> Result<Reserve> {
        Reserve::with_limit(directory, LARGEST)
    }

    /// The reserve of the peer in a directory.
    pub(crate) fn of_peer(directory: &Path) -> Result<Reserve> {
        Reserve::with_limit(directory, LARGEST_OF_PEER)
    }

    fn with_limit(directory: &Path, limit: u64) -> Result<Reserve> {
        let size = sys::file_system_size(directory)?;
        Ok(Reserve { path: directory.join(FILE_NAME), wanted: (size / PART).min(limit) })
    }

    /// Gives the space up if there is almost none. A failure is only logged: a directory that may not
    /// be written can still be read.
    pub(crate) fn release(&self) {
        self.log(self.held().and_then(|held| match held > 0 && self.free()? < self.wanted / 4 {
            true => {
                tracing::warn!(
                    path = %self.path.display(),
                    bytes = held,
                    "the file system is full: using the space in reserve"
                );
                fs::remove_file(&self.path)
                    .map_err(|error| Error::io("removing", &self.path, error))
            }
            false => Ok(()),
        }));
    }

    /// Makes the file if there is plenty of space. A failure is only logged: nothing depends on it now.
    pub(crate) fn keep(&self) {
        let make = || {
            let file = File::options().write(true).create(true).truncate(false).open(&self.path)?;
            sys::allocate_beyond_end(&file, self.wanted)
        };
        self.log(self.held().and_then(|held| {
            match held < self.wanted && self.free()? > 4 * self.wanted {
                true => make().map_err(|error| Error::io("making", &self.path, error)),
                false => Ok(()),
            }
        }));
    }

    /// The space that the file holds, in bytes.
    fn held(&self) -> Result<u64> {
        match fs::metadata(&self.path) {
            Ok(metadata) => Ok(metadata.blocks() * 512),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(Error::io("examining", &self.path, error)),
        }
    }

    fn log(&self, done: Result<()>) {
        if let Err(error) = done {
            tracing::debug!(path = %self.path.display(), %error, "cannot keep space in reserve");
        }
    }

    /// Fails if blobs of so many bytes must not be stored, because too little space would be left.
    pub(crate) fn check(&self, bytes: u64) -> Result<()> {
        match self.free()? < self.wanted.saturating_add(bytes) {
            true => {
                let path = self.path.parent().unwrap_or(&self.path).to_owned();
                Err(Error::Full { doing: "for data in", path })
            }
            false => Ok(()),
        }
    }

    /// The space in reserve, in bytes.
    pub(crate) fn wanted(&self) -> u64 {
        self.wanted
    }

    /// The space that may be filled with blobs.
    pub(crate) fn free_for_blobs(&self) -> Result<u64> {
        Ok(self.free()?.saturating_sub(self.wanted))
    }

    fn free(&self) -> Result<u64> {
        sys::free_space(self.path.parent().unwrap_or(&self.path))
    }
}
