//! Why a peer did not store a fragment, and the number of each reason on the wire.

use crate::error::{Error, ErrorKind, Result};
use crate::net::message::{failure_kind, failure_number};

/// Why a peer refused a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The peer has no space for it.
    Full,
    /// The peer failed, or the fragment is wrong.
    Failed(ErrorKind),
}

impl Refusal {
    /// The refusal because of `error`.
    pub(crate) fn because(error: &Error) -> Refusal {
        match error {
            Error::Full { .. } | Error::PeerFull { .. } => Refusal::Full,
            error => Refusal::Failed(error.kind()),
        }
    }

    /// The number of a refusal on the wire. 0 stands for a fragment that is durable.
    pub(super) fn number(self) -> u8 {
        match self {
            Refusal::Failed(kind) => 1 + failure_number(kind),
            Refusal::Full => FULL,
        }
    }

    pub(super) fn from_number(number: u8) -> Result<Refusal> {
        match number {
            FULL => Ok(Refusal::Full),
            number => failure_kind(number.wrapping_sub(1)).map(Refusal::Failed),
        }
    }
}

/// The number of [`Refusal::Full`] on the wire.
const FULL: u8 = 255;
