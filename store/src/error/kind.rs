//! What a caller can do about an error.

use super::Error;

/// What a caller can do about an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is wrong in itself: change it.
    Invalid,
    /// The named object does not exist.
    NotFound,
    /// Another process holds the object, or its state forbids the operation: wait or choose
    /// another.
    Conflict,
    /// Stored bytes are wrong: restore them from a copy.
    Corrupt,
    /// The repository cannot do it at the moment: make space, repair the disk, try again.
    Unavailable,
}

impl Error {
    /// What the caller can do about the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::BadUrl { .. }
            | Error::BadName { .. }
            | Error::InvalidId(_)
            | Error::BadGeometry { .. }
            | Error::BadArgument(_)
            | Error::CannotShrink { .. }
            | Error::BadCatalogAddress { .. }
            | Error::BadKeys(_)
            | Error::TooLarge { .. }
            | Error::NotEmpty { .. }
            | Error::NotPermitted { .. }
            | Error::NotFromGuest { .. }
            | Error::OtherPeer { .. }
            | Error::NoCluster
            | Error::NotARepository { .. }
            | Error::NewerFormat { .. }
            | Error::OlderFormat { .. }
            | Error::NetworkFileSystem { .. } => ErrorKind::Invalid,
            Error::NoRepository { .. }
            | Error::NoImage { .. }
            | Error::NoSnapshot { .. }
            | Error::UnknownParent { .. }
            | Error::NoPeer { .. }
            | Error::EmptyFolder { .. }
            | Error::NoLabel { .. }
            | Error::NoPolicy { .. }
            | Error::NoMirror { .. } => ErrorKind::NotFound,
            Error::ImageExists { .. }
            | Error::SnapshotExists { .. }
            | Error::BeingRemoved { .. }
            | Error::DraftGivenUp { .. }
            | Error::OlderMirror { .. }
            | Error::ReferenceEnded { .. }
            | Error::Leased { .. }
            | Error::Fenced { .. }
            | Error::Referenced { .. }
            | Error::OnlyStable { .. }
            | Error::Pinned { .. }
            | Error::HasPinned { .. }
            | Error::RepairRuns
            | Error::ClusterChanged
            | Error::OlderCatalog { .. }
            | Error::Unlisted { .. }
            | Error::Revived { .. }
            | Error::DataElsewhere { .. }
            | Error::LateDeletion
            | Error::LeaseLost
            | Error::InUse { .. }
            | Error::WrongState { .. } => ErrorKind::Conflict,
            Error::Peer { kind, .. } | Error::Catalog { kind, .. } => *kind,
            Error::MissingBlob { .. }
            | Error::NoMarker { .. }
            | Error::CannotMark { .. }
            | Error::Corrupt { .. } => ErrorKind::Corrupt,
            Error::Full { .. }
            | Error::TooFewPeers { .. }
            | Error::NoPeerYet
            | Error::PeersMissing { .. }
            | Error::UnsealedRecords { .. }
            | Error::ContentLost { .. }
            | Error::CatalogRebuilt { .. }
            | Error::Unreferenced { .. }
            | Error::ImageGone { .. }
            | Error::LostMeanwhile { .. }
            | Error::NoRoom { .. }
            | Error::NotStored { .. }
            | Error::PeerFull { .. }
            | Error::PeerRefusedFull { .. }
            | Error::Io { .. }
            | Error::TemporaryFiles { .. }
            | Error::Internal { .. }
            | Error::Contended
            | Error::Poisoned { .. } => ErrorKind::Unavailable,
            Error::Database { source } => match source.sqlite_error_code() {
                Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase) => {
                    ErrorKind::Corrupt
                }
                _ => ErrorKind::Unavailable,
            },
        }
    }

    /// Whether this user may not write to a database.
    pub fn is_not_writable(&self) -> bool {
        use rusqlite::ErrorCode;
        match self {
            Error::Database { source } => {
                let code = source.sqlite_error_code();
                matches!(code, Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied))
            }
            _ => false,
        }
    }
}
