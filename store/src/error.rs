//! What can go wrong, and what the caller can do about it.

use std::io;
use std::path::{Path, PathBuf};

use crate::id::{BlobId, InvalidId};

/// The result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a caller can do about an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is wrong in itself: change it.
    Invalid,
    /// The named thing does not exist.
    NotFound,
    /// Somebody else holds it, or its state forbids the operation: wait or choose another.
    Conflict,
    /// Stored bytes are not what they must be: restore them from elsewhere.
    Corrupt,
    /// The repository cannot do it at the moment: make space, repair the disk, try again.
    Unavailable,
}

/// Why an operation on the repository was not carried out.
///
/// The message says what is wrong and, after a semicolon, what to do where there is something to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A repository's address of unknown form.
    #[error(
        "'{url}' is not the address of a repository; write dir:PATH, cairn://HOST:PORT or \
         etcd://HOST:PORT"
    )]
    BadUrl {
        /// The address.
        url: String,
    },
    /// A name that breaks the rules for names.
    #[error("'{name}' cannot be {what}: {rule}")]
    BadName {
        /// What it was to name, with its article.
        what: &'static str,
        /// The name.
        name: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// A text that is not an id.
    #[error(transparent)]
    InvalidId(#[from] InvalidId),
    /// A size or chunk size that no image can have.
    #[error("an image cannot have {what} {value}: {rule}")]
    BadGeometry {
        /// `size` or `chunk size`.
        what: &'static str,
        /// The value in bytes.
        value: u64,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// An argument that does not fit the object it is used on.
    #[error("{0}")]
    BadArgument(String),
    /// The address of a catalog of unknown form.
    #[error(
        "'{address}' is not the address of a catalog; write HOST:PORT, or \
         etcd://HOST:PORT[,HOST:PORT...]"
    )]
    BadCatalogAddress {
        /// The address.
        address: String,
    },
    /// Keys that are missing, cannot be used or cannot be made.
    #[error("{0}")]
    BadKeys(String),
    /// A message, a key or a list that is longer than its protocol allows.
    #[error("{what} has {actual}, and may have {limit}")]
    TooLarge {
        /// What is too large, and the unit of the two numbers.
        what: &'static str,
        /// Its size.
        actual: usize,
        /// The largest size that is allowed.
        limit: usize,
    },
    /// A directory for a server or for keys that holds something else.
    #[error("{} is not empty and {reason}; name another directory", path.display())]
    NotEmpty {
        /// The directory.
        path: PathBuf,
        /// Why it cannot be used.
        reason: String,
    },
    /// The caller's role forbids the operation.
    #[error("{what}; use the keys of a client")]
    NotPermitted {
        /// What is forbidden to whom.
        what: String,
    },
    /// The operation needs peers.
    #[error("a repository in a directory has no peers; name one of a cluster")]
    NoCluster,

    /// Nothing is at the repository's address.
    #[error(
        "there is no repository at {}; `cairn create` and `cairn import` make one", path.display()
    )]
    NoRepository {
        /// The directory.
        path: PathBuf,
    },
    /// The directory exists and holds something else.
    #[error(
        "{} is not a repository: it has no repository.json; name another directory", path.display()
    )]
    NotARepository {
        /// The directory.
        path: PathBuf,
    },
    /// The image does not exist.
    #[error("there is no image '{name}'; `cairn ls` shows the images")]
    NoImage {
        /// The image's name.
        name: String,
    },
    /// The image exists, the snapshot does not.
    #[error("there is no snapshot {name}; `cairn ls IMAGE` shows the snapshots of an image")]
    NoSnapshot {
        /// `image@selector`.
        name: String,
    },
    /// The catalog does not know the mirror.
    #[error("no mirror {id} is recorded; `cairn mirrors` shows them")]
    NoMirror {
        /// The mirror's id.
        id: String,
    },

    /// The image's name is taken.
    #[error("an image '{name}' exists already; choose another name or remove it first")]
    ImageExists {
        /// The image's name.
        name: String,
    },
    /// The label or number is taken in this image.
    #[error("image '{image}' has a snapshot @{selector} already; choose another label")]
    SnapshotExists {
        /// The image's name.
        image: String,
        /// The number or label.
        selector: String,
    },
    /// Another writer holds the image.
    #[error(
        "image '{image}' is in use by process {pid} on host {host}, mirror {path}; stop that process, \
         or wait {seconds} s after its host has died, or clone the image"
    )]
    Leased {
        /// The image's name.
        image: String,
        /// The holder's host.
        host: String,
        /// The holder's mirror directory.
        path: String,
        /// The holder's process.
        pid: u32,
        /// The longest time until a dead holder's lease ends.
        seconds: u64,
    },
    /// Another writer took the image over, or the mirror was forgotten.
    #[error("mirror {mirror} no longer holds image '{image}'; stop writing and attach again")]
    Fenced {
        /// The image's name.
        image: String,
        /// The mirror that lost its lease.
        mirror: String,
    },
    /// Mirrors still refer to the image.
    #[error(
        "image '{image}' is used by mirror {mirror} on host {host}, directory {path}; run `cairn \
         mirrors --forget {mirror}` if that mirror is gone, or remove the image with --force"
    )]
    Referenced {
        /// The image's name.
        image: String,
        /// One of the mirrors.
        mirror: String,
        /// Its host.
        host: String,
        /// Its directory.
        path: String,
    },
    /// The image would be left without content.
    #[error("{name} is the only stable snapshot of its image; remove the image instead")]
    OnlyStable {
        /// `image@number`.
        name: String,
    },
    /// The snapshot's state does not allow the operation.
    #[error("snapshot {name} is {state}{}", reason.as_ref().map(|r| format!(": {r}")).unwrap_or_default())]
    WrongState {
        /// `image@number`.
        name: String,
        /// Its state.
        state: &'static str,
        /// Why it failed, if it did.
        reason: Option<String>,
    },

    /// A blob that something refers to is not there.
    #[error("blob {id} is missing; restore it from a copy of the repository")]
    MissingBlob {
        /// Its name.
        id: BlobId,
    },
    /// Stored bytes are not what they must be.
    #[error("{object} is corrupt: {reason}; restore it from a copy of the repository")]
    Corrupt {
        /// The file or record.
        object: String,
        /// What is wrong with it.
        reason: String,
    },

    /// The repository was written by a later version of this program.
    #[error("{object} has format {found}, this program reads up to {supported}; use a newer cairn")]
    NewerFormat {
        /// The file.
        object: String,
        /// Its version.
        found: u64,
        /// The newest version that is understood.
        supported: u64,
    },
    /// The repository was written by a version of this program that was never released.
    #[error(
        "{object} has format {found}, this program reads from {supported}; export the images with the \
         cairn that made it, and import them into a new repository"
    )]
    OlderFormat {
        /// The file.
        object: String,
        /// Its version.
        found: u64,
        /// The oldest version that is understood.
        supported: u64,
    },
    /// The catalog's locks do not work there.
    #[error(
        "{} is on {file_system}: its locks and shared memory cannot keep a catalog safe; use a \
         local file system", path.display()
    )]
    NetworkFileSystem {
        /// The directory.
        path: PathBuf,
        /// The file system's name.
        file_system: &'static str,
    },
    /// The disk or the quota is used up.
    #[error("no space left {doing} {}; free some space and try again", path.display())]
    Full {
        /// What was being done.
        doing: &'static str,
        /// To which file.
        path: PathBuf,
    },
    /// A peer holds all that it may.
    #[error("the peer in {} is full: it may hold {capacity} bytes", path.display())]
    PeerFull {
        /// Its data directory.
        path: PathBuf,
        /// What it may hold.
        capacity: u64,
    },
    /// A blob's redundancy needs more peers than there are.
    #[error("{peers} peers are not enough for this redundancy; add some, or choose a lesser one")]
    TooFewPeers {
        /// How many there are.
        peers: usize,
    },
    /// A snapshot that nobody can vouch for.
    #[error(
        "snapshot {name} can be read, but a peer was lost while it was stored, or its parent is not stable; it is \
         stable after the next repair"
    )]
    LostMeanwhile {
        /// `image@number`.
        name: String,
    },
    /// What is to be stored does not fit.
    #[error(
        "the peers lack {lacking} bytes of room for {bytes} bytes with their redundancy; add peers, or remove snapshots"
    )]
    NoRoom {
        /// How much it takes, with the redundancy.
        bytes: u64,
        /// How much of that, and of what is kept beside it for the spread, they do not have.
        lacking: u64,
    },
    /// No such peer ever joined.
    #[error("there is no peer '{peer}'; `cairn peers` shows them")]
    NoPeer {
        /// Its name.
        peer: String,
    },
    /// Blobs that were taken could not be made durable.
    #[error(
        "{blobs} blobs are not stored as they should be: {reason}; they are kept, and tried again with the next flush"
    )]
    NotStored {
        /// How many.
        blobs: usize,
        /// Why one of them is not.
        reason: String,
    },
    /// A peer did not do what it was asked for.
    #[error("peer {peer}: {reason}")]
    Peer {
        /// Its address.
        peer: String,
        /// What the caller can do about it.
        kind: ErrorKind,
        /// Why.
        reason: String,
    },
    /// The catalog did not do what it was asked for.
    #[error("catalog {address}: {reason}")]
    Catalog {
        /// Where it is.
        address: String,
        /// What the caller can do about it.
        kind: ErrorKind,
        /// Why.
        reason: String,
    },
    /// The operating system refused.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A sync failed: what the kernel held for it may be lost, and it reports that only once.
    #[error(
        "an earlier sync of {} failed, so blobs may be lost; check the disk and start again", path.display()
    )]
    Poisoned {
        /// The repository's directory.
        path: PathBuf,
    },
    /// One process at a time uses a server's directory.
    #[error(
        "{} is in use by another process; stop that one, or name another directory", path.display()
    )]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// One at a time repairs a cluster.
    #[error("another repair is under way; `cairn peers` shows what it has done when it has ended")]
    RepairRuns,
    /// A task of this process has panicked, or was cancelled.
    #[error("{doing} failed inside this process: {reason}; try again, and report this as a defect")]
    Internal {
        /// What was being done.
        doing: &'static str,
        /// What is known of the cause.
        reason: String,
    },
    /// Others were faster, again and again.
    #[error("the catalog is changed by many others at once; try again")]
    Contended,
    /// The database refused.
    #[error("the repository's database failed: {0}")]
    Database(#[from] rusqlite::Error),
}

impl Error {
    /// What the caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::BadUrl { .. }
            | Error::BadName { .. }
            | Error::InvalidId(_)
            | Error::BadGeometry { .. }
            | Error::BadArgument(_)
            | Error::BadCatalogAddress { .. }
            | Error::BadKeys(_)
            | Error::TooLarge { .. }
            | Error::NotEmpty { .. }
            | Error::NotPermitted { .. }
            | Error::NoCluster
            | Error::NotARepository { .. }
            | Error::NewerFormat { .. }
            | Error::OlderFormat { .. }
            | Error::NetworkFileSystem { .. } => ErrorKind::Invalid,
            Error::NoRepository { .. }
            | Error::NoImage { .. }
            | Error::NoSnapshot { .. }
            | Error::NoPeer { .. }
            | Error::NoMirror { .. } => ErrorKind::NotFound,
            Error::ImageExists { .. }
            | Error::SnapshotExists { .. }
            | Error::Leased { .. }
            | Error::Fenced { .. }
            | Error::Referenced { .. }
            | Error::OnlyStable { .. }
            | Error::RepairRuns
            | Error::InUse { .. }
            | Error::WrongState { .. } => ErrorKind::Conflict,
            Error::Peer { kind, .. } | Error::Catalog { kind, .. } => *kind,
            Error::MissingBlob { .. } | Error::Corrupt { .. } => ErrorKind::Corrupt,
            Error::Full { .. }
            | Error::TooFewPeers { .. }
            | Error::LostMeanwhile { .. }
            | Error::NoRoom { .. }
            | Error::NotStored { .. }
            | Error::PeerFull { .. }
            | Error::Io { .. }
            | Error::Internal { .. }
            | Error::Contended
            | Error::Poisoned { .. } => ErrorKind::Unavailable,
            Error::Database(source) => match source.sqlite_error_code() {
                Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase) => {
                    ErrorKind::Corrupt
                }
                _ => ErrorKind::Unavailable,
            },
        }
    }

    /// An error of the file system on `path`, with disk-full told apart.
    pub(crate) fn io(doing: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Error::Full { doing, path }
            }
            _ => Error::Io { doing, path, source },
        }
    }

    pub(crate) fn corrupt(object: impl Into<String>, reason: impl Into<String>) -> Self {
        Error::Corrupt { object: object.into(), reason: reason.into() }
    }
}
