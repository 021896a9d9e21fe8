//! One operation of a workload on its files.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// One operation of a workload. Paths are relative to the recorded directory.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Create(PathBuf),
    MakeDirectory(PathBuf),
    /// Creates a symbolic link.
    Link {
        path: PathBuf,
        target: PathBuf,
    },
    Rename {
        from: PathBuf,
        to: PathBuf,
    },
    Remove(PathBuf),
    Write {
        path: PathBuf,
        offset: usize,
        data: Arc<[u8]>,
    },
    SetLen {
        path: PathBuf,
        len: usize,
    },
    /// Extends the file to at least this length.
    Extend {
        path: PathBuf,
        len: usize,
    },
    /// Replaces a range by zeros. The length does not change.
    Punch {
        path: PathBuf,
        offset: usize,
        len: usize,
    },
    /// Syncs a file or a directory.
    Sync(PathBuf),
    /// A sync of a file that fails: changes since the last sync never become durable.
    FailedSync(PathBuf),
    /// Makes the last write to the file durable.
    SyncWrite(PathBuf),
    /// Marks a point that the workload has reached.
    Mark(String),
}

impl Operation {
    pub(crate) fn is_mark(&self) -> bool {
        matches!(self, Operation::Mark(_))
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::Create(path) => write!(f, "creating {}", path.display()),
            Operation::MakeDirectory(path) => write!(f, "creating directory {}", path.display()),
            Operation::Link { path, target } => {
                write!(f, "linking {} to {}", path.display(), target.display())
            }
            Operation::Rename { from, to } => {
                write!(f, "renaming {} to {}", from.display(), to.display())
            }
            Operation::Remove(path) => write!(f, "removing {}", path.display()),
            Operation::Write { path, offset, data } => {
                write!(f, "writing {} bytes at {offset} of {}", data.len(), path.display())
            }
            Operation::SetLen { path, len } | Operation::Extend { path, len } => {
                write!(f, "setting the length of {} to {len}", path.display())
            }
            Operation::Punch { path, offset, len } => {
                write!(f, "punching {len} bytes at {offset} of {}", path.display())
            }
            Operation::Sync(path) => write!(f, "syncing '{}'", path.display()),
            Operation::FailedSync(path) => write!(f, "a failed sync of '{}'", path.display()),
            Operation::SyncWrite(path) => write!(f, "a durable write to {}", path.display()),
            Operation::Mark(text) => write!(f, "'{text}'"),
        }
    }
}
