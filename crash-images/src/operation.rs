//! One operation of a workload on its files.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// One step of a workload. Paths are below the recorded directory.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Create(PathBuf),
    MakeDirectory(PathBuf),
    /// A symbolic one.
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
    /// To at least this length.
    Extend {
        path: PathBuf,
        len: usize,
    },
    /// Zeros instead of what is there; the length stays.
    Punch {
        path: PathBuf,
        offset: usize,
        len: usize,
    },
    /// Of a file or a directory.
    Sync(PathBuf),
    /// The last write to the file is durable.
    SyncWrite(PathBuf),
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
            Operation::MakeDirectory(path) => write!(f, "making directory {}", path.display()),
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
                write!(f, "giving {} a length of {len}", path.display())
            }
            Operation::Punch { path, offset, len } => {
                write!(f, "punching {len} bytes at {offset} of {}", path.display())
            }
            Operation::Sync(path) => write!(f, "syncing '{}'", path.display()),
            Operation::SyncWrite(path) => write!(f, "a durable write to {}", path.display()),
            Operation::Mark(text) => write!(f, "'{text}'"),
        }
    }
}
