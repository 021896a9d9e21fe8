//! Errors of the agent: messages for people, exit codes for scripts.

use std::io;
use std::path::PathBuf;

use crate::{Refusal, RefusalKind};

use crate::program::endpoint::Endpoint;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(
        "cannot connect to {endpoint}: {source}; is cairn-blk running with --vsock on the host?"
    )]
    Connect { endpoint: Endpoint, source: io::Error },

    #[error("lost the connection to {endpoint} while {doing}: {source}")]
    Transport { endpoint: Endpoint, doing: &'static str, source: io::Error },

    #[error(
        "{0} closed the connection before it answered; try again in a moment. A checkpoint that was \
         accepted is still stored: see `cairn-agent list`"
    )]
    Closed(Endpoint),

    #[error("no answer from {0} within the time limit; see the log of cairn-blk on the host")]
    Timeout(Endpoint),

    #[error("{endpoint} does not speak this protocol: {reason}")]
    Protocol { endpoint: Endpoint, reason: String },

    #[error("{endpoint} refused: {}", refusal.message)]
    Refused { endpoint: Endpoint, refusal: Refusal },

    #[error("{snapshot} was not stored: {reason}")]
    NotStored { snapshot: String, reason: String },

    #[error("cannot open {} to freeze it: {source}", mount.display())]
    OpenMount { mount: PathBuf, source: io::Error },

    #[error("{} and {} are on the same file system: name it once", first.display(), second.display())]
    SameFilesystem { first: PathBuf, second: PathBuf },

    #[error("{} is already frozen by another program: try again when it is thawed", .0.display())]
    AlreadyFrozen(PathBuf),

    #[error("cannot freeze {}: {source}", mount.display())]
    Freeze { mount: PathBuf, source: io::Error },

    #[error("cannot thaw {}: {source}; try `fsfreeze --unfreeze`", mount.display())]
    Thaw { mount: PathBuf, source: io::Error },

    #[error("{} was thawed by another program before the checkpoint was accepted: \
             treat the snapshot as crash-consistent", .0.display())]
    ThawedEarly(PathBuf),

    #[error("cannot start the watchdog that ends the freeze: {0}; nothing was frozen")]
    Watchdog(io::Error),

    #[error("cannot write the answer: {0}")]
    Output(#[from] io::Error),
}

impl Error {
    /// The exit code. `cairn` and `cairn-blk` use the same codes; `docs/operations.md` has the table.
    pub(crate) fn exit_code(&self) -> u8 {
        const FAILED: u8 = 1;
        const USAGE: u8 = 2;
        const BUSY: u8 = 4;
        const UNAVAILABLE: u8 = 6;
        match self {
            Error::Connect { .. }
            | Error::Transport { .. }
            | Error::Closed(_)
            | Error::Timeout(_) => UNAVAILABLE,
            Error::Refused { refusal, .. } => match refusal.kind {
                RefusalKind::Invalid => USAGE,
                RefusalKind::Conflict | RefusalKind::Busy => BUSY,
                RefusalKind::Denied => FAILED,
                RefusalKind::Unavailable => UNAVAILABLE,
            },
            Error::AlreadyFrozen(_) => BUSY,
            Error::SameFilesystem { .. } => USAGE,
            Error::Protocol { .. }
            | Error::NotStored { .. }
            | Error::OpenMount { .. }
            | Error::Freeze { .. }
            | Error::Thaw { .. }
            | Error::ThawedEarly(_)
            | Error::Watchdog(_)
            | Error::Output(_) => FAILED,
        }
    }
}
