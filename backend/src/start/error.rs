//! Why a disk cannot be served.

use std::io;
use std::path::PathBuf;

use cairn_store::ErrorKind;

use crate::mirror::files::map::MapError;

/// Why a disk cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The repository cannot be opened, or does not have the image.
    #[error("opening image '{image}': {source}")]
    Repository {
        /// The image that was requested.
        image: String,
        /// The repository's error.
        source: cairn_store::Error,
    },
    /// The mirror's directory cannot be used.
    #[error("opening mirror {}: {source}", path.display())]
    Mirror {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The mirror's map cannot be used.
    #[error("opening {}: {source}", path.display())]
    Map {
        /// The map file.
        path: PathBuf,
        /// What is wrong with it.
        source: MapError,
    },
    /// The live directory cannot be used.
    #[error(
        "keeping live state under {}: {source}; choose a directory on a tmpfs with --live",
        path.display()
    )]
    LiveDir {
        /// The directory of live directories.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process serves the mirror.
    #[error(
        "mirror {} is in use by another process; stop that process or choose another directory",
        path.display()
    )]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// The mirror does not fit the image.
    #[error("mirror {} {reason}", path.display())]
    Mismatch {
        /// The directory.
        path: PathBuf,
        /// Why it does not fit, and what to do.
        reason: String,
    },
    /// A socket cannot be opened.
    #[error("listening on {path}: {source}")]
    Socket {
        /// The socket's path or number.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// Serving or stopping failed.
    #[error("{doing}: {source}")]
    Serve {
        /// What was being done.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl StartError {
    /// The exit code. `cairn` uses the same codes; `docs/operations.md` has the table.
    pub fn exit_code(&self) -> u8 {
        const CONFLICT: u8 = 4;
        const CORRUPT: u8 = 5;
        match self {
            StartError::Repository { source, .. } => match source.kind() {
                ErrorKind::Invalid => 2,
                ErrorKind::NotFound => 3,
                ErrorKind::Conflict => CONFLICT,
                ErrorKind::Corrupt => CORRUPT,
                ErrorKind::Unavailable => 6,
            },
            StartError::Map { source: MapError::Io(source), .. }
            | StartError::Mirror { source, .. }
            | StartError::LiveDir { source, .. }
            | StartError::Socket { source, .. }
            | StartError::Serve { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => 3,
                io::ErrorKind::AddrInUse => CONFLICT,
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => 6,
                _ => 1,
            },
            StartError::Map { source: MapError::Damaged(_), .. } => CORRUPT,
            StartError::Map { source: MapError::Older(_) | MapError::Newer(_), .. } => 2,
            StartError::Locked { .. } | StartError::Mismatch { .. } => CONFLICT,
        }
    }
}

/// Wraps an error of something that was being done to serve the disk.
pub(super) fn serving(doing: &'static str) -> impl Fn(io::Error) -> StartError {
    move |source| StartError::Serve { doing, source }
}
