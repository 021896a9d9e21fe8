//! Errors: what went wrong, and what the caller can do about it.

mod advice;
mod kind;

use std::path::{Path, PathBuf};
use std::{cmp, io};

use self::advice::{database_advice, peers_missing};
pub use self::kind::ErrorKind;
use crate::id::{BlobId, InvalidId};

/// The result of the functions in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on the repository was not carried out.
///
/// The message says what is wrong and, after a semicolon, what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address of a repository has an unknown form.
    #[error(
        "'{url}' is not the address of a repository; write dir:PATH, cairn://HOST:PORT or \
         etcd://HOST:PORT"
    )]
    BadUrl {
        /// The address.
        url: String,
    },
    /// A name breaks the rules for names.
    #[error("'{name}' cannot be {what}: {rule}")]
    BadName {
        /// The kind of object that it was to name, with an article.
        what: &'static str,
        /// The name.
        name: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// A text is not an id.
    #[error(transparent)]
    InvalidId(#[from] InvalidId),
    /// No image can have this size or chunk size.
    #[error("an image cannot have {what} {value}: {rule}")]
    BadGeometry {
        /// `size` or `chunk size`.
        what: &'static str,
        /// The value in bytes.
        value: u64,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// An argument does not fit the object that it is used on.
    #[error("{0}")]
    BadArgument(String),
    /// A disk was to become smaller.
    #[error(
        "image '{name}' has {before} bytes and cannot shrink to {size} bytes; a snapshot from before \
         the disk has grown has the old size: clone it, or create another image and copy the \
         content in a guest"
    )]
    CannotShrink {
        /// The image.
        name: String,
        /// Its size in bytes.
        before: u64,
        /// The size that was asked for, in bytes.
        size: u64,
    },
    /// The address of a catalog has an unknown form.
    #[error(
        "'{address}' is not the address of a catalog; write HOST:PORT, or \
         etcd://HOST:PORT[,HOST:PORT...]"
    )]
    BadCatalogAddress {
        /// The address.
        address: String,
    },
    /// Keys are missing, cannot be used or cannot be created.
    #[error("{0}")]
    BadKeys(String),
    /// A message, a key or a list is longer than its protocol allows.
    #[error("{what} has {actual}, and may have {limit}")]
    TooLarge {
        /// What is too large, and the unit of the two numbers.
        what: &'static str,
        /// Its size.
        actual: usize,
        /// The largest size that is allowed.
        limit: usize,
    },
    /// A directory for a server or for keys holds other files.
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
        /// Which role may not do what.
        what: String,
    },
    /// A data directory belongs to another peer than the certificate.
    #[error(
        "{} holds the data of peer {found}, but the certificate is that of peer {wanted}; use the \
         keys of {found}, which `cairn keys sign --peer {found}` creates again, or name another \
         directory", path.display()
    )]
    OtherPeer {
        /// The data directory.
        path: PathBuf,
        /// The id in the directory.
        found: String,
        /// The id in the certificate.
        wanted: String,
    },
    /// The operation needs peers.
    #[error("a repository in a directory has no peers; name the repository of a cluster")]
    NoCluster,

    /// There is no repository at the address.
    #[error(
        "there is no repository at {}; `cairn create` and `cairn import` create one", path.display()
    )]
    NoRepository {
        /// The directory.
        path: PathBuf,
    },
    /// The directory exists and is not a repository.
    #[error(
        "{} is not a repository: it has no repository.json; name another directory", path.display()
    )]
    NotARepository {
        /// The directory.
        path: PathBuf,
    },
    /// The directory holds the blobs of a repository, but not its marker.
    #[error(
        "{} holds a repository without its repository.json, so its version is unknown; restore that \
         file from a copy, or name another directory", path.display()
    )]
    NoMarker {
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
    #[error("there is no mirror {id}; `cairn mirrors` shows the mirrors")]
    NoMirror {
        /// The mirror's id.
        id: String,
    },

    /// The image's name is in use.
    #[error("an image '{name}' exists already; choose another name or remove it first")]
    ImageExists {
        /// The image's name.
        name: String,
    },
    /// The label or number is in use in this image.
    #[error("image '{image}' has a snapshot @{selector} already; choose another label")]
    SnapshotExists {
        /// The image's name.
        image: String,
        /// The number or label.
        selector: String,
    },
    /// Another writer holds the image.
    #[error(
        "image '{image}' is in use by process {pid} on host {host}, mirror {path}; stop that \
         process, or wait {seconds} s after its host has died, or clone the image"
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
        /// The longest time until the lease of a dead holder expires.
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
         mirrors forget {mirror}` if that mirror is gone, or remove the image with --force"
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
    /// The snapshot is kept from removal.
    #[error("{name} is pinned; to remove it, run `cairn unpin {name}` first")]
    Pinned {
        /// `image@number`.
        name: String,
    },
    /// The image has snapshots that are kept from removal.
    #[error(
        "image '{image}' has pinned snapshots ({pinned}); `cairn ls {image} --pinned` lists them, and \
         `cairn unpin` releases them"
    )]
    HasPinned {
        /// The image's name.
        image: String,
        /// How many there are.
        pinned: u64,
    },
    /// The snapshot does not have the label.
    #[error("{name} has no label '{label}'; `cairn show {name}` shows its labels")]
    NoLabel {
        /// `image@number`.
        name: String,
        /// The label.
        label: String,
    },
    /// A guest may give up only what it has asked for.
    #[error("{name} was not taken from inside the guest, so the guest cannot mark it as obsolete")]
    NotFromGuest {
        /// `image@number`.
        name: String,
    },
    /// No image is in the folder.
    #[error("no image is in '{folder}'; `cairn ls` lists all images")]
    EmptyFolder {
        /// The folder, with a slash at its end.
        folder: String,
    },
    /// The images have no policy of their own.
    #[error("no policy is set on '{scope}'; `cairn policy show` lists all policies")]
    NoPolicy {
        /// An image, a folder with a slash at its end, or `/`.
        scope: String,
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

    /// A blob that a snapshot or a tree refers to is missing.
    #[error("blob {id} is missing; restore it from a copy of the repository")]
    MissingBlob {
        /// Its name.
        id: BlobId,
    },
    /// Stored bytes are wrong.
    #[error("{object} is corrupt: {reason}; restore it from a copy of the repository")]
    Corrupt {
        /// The file or record.
        object: String,
        /// What is wrong with it.
        reason: String,
    },

    /// Blobs of a commit were lost together with peers before the commit was published.
    #[error(
        "{blobs} blobs were lost together with peers before the snapshot was published, and no \
         local copy of them is left; try again"
    )]
    ContentLost {
        /// The number of blobs.
        blobs: usize,
    },
    /// A lost catalog cannot be rebuilt before the peers have joined the empty one.
    #[error(
        "no peer has joined this catalog yet; wait until `cairn peers` shows all peers, and try again"
    )]
    NoPeerYet,
    /// Peers that may have records do not answer.
    #[error("{}", peers_missing(answered, silent, *recorded))]
    PeersMissing {
        /// The short ids of the peers that answered.
        answered: Vec<String>,
        /// The short ids of the members that do not answer, and why.
        silent: Vec<String>,
        /// The number of members when the newest record was written. Their ids are not known.
        recorded: u64,
    },
    /// Records on the peers have no valid seal.
    #[error(
        "{records} records on the peers have no valid seal: they were stored with a mac.key that \
         this one does not include, or a peer made them up; use the newest mac.key, or --force to \
         ignore them: snapshots that only they describe are missed, and removed ones may return"
    )]
    UnsealedRecords {
        /// The number of records.
        records: u64,
    },
    /// The catalog does not have the image of a running mirror.
    #[error(
        "the catalog does not have image '{image}'; if the catalog was lost, `cairn catalog \
         rebuild` restores it"
    )]
    ImageGone {
        /// The image.
        image: String,
    },
    /// The catalog was rebuilt, and a running mirror has not taken its image again.
    #[error(
        "the catalog was rebuilt, and the mirror {mirror} has not taken image '{image}' again; it \
         does so with the next renewal of its lease"
    )]
    CatalogRebuilt {
        /// The image.
        image: String,
        /// The mirror.
        mirror: String,
    },
    /// The parent of a mirror is not in the catalog.
    #[error(
        "the mirror continues {name}, which the catalog does not have with the same content; \
         `cairn catalog rebuild` restores what the peers know"
    )]
    UnknownParent {
        /// The snapshot.
        name: String,
    },
    /// The catalog does not refer to a running ephemeral mirror.
    #[error(
        "the catalog does not refer to mirror {mirror} of image '{image}', because its process did \
         not renew the reference in time; the next renewal takes it again, if the mirror's parent \
         still exists"
    )]
    Unreferenced {
        /// The image.
        image: String,
        /// The mirror.
        mirror: String,
    },
    /// The catalog does not refer to a mirror any more, and its parent was removed.
    #[error(
        "the catalog no longer refers to mirror {mirror}, and {parent}, which it continues, was \
         removed, so content that the mirror has not fetched may be gone; stop the guest, and start \
         cairn-blk in an empty directory from a snapshot that exists"
    )]
    ReferenceEnded {
        /// The mirror.
        mirror: String,
        /// The snapshot.
        parent: String,
    },
    /// The mirror has published a snapshot that its own files do not know.
    #[error(
        "{path} is an older copy of a mirror: it continues {continued}, and the mirror has published \
         {published} since; use its newer directory, or an empty one to start from a snapshot"
    )]
    OlderMirror {
        /// The directory of the copy.
        path: String,
        /// The snapshot that the copy continues.
        continued: String,
        /// The mirror's last snapshot.
        published: String,
    },
    /// The creation of an image took so long that a repair has given it up.
    #[error("the creation of image '{name}' took too long and was given up; try again")]
    DraftGivenUp {
        /// The image.
        name: String,
    },
    /// An image's removal has begun and is not complete.
    #[error("image '{name}' is being removed; `cairn rm {name}` completes that")]
    BeingRemoved {
        /// The image.
        name: String,
    },

    /// The repository was written by a later version of this program.
    #[error("{object} has format {found}, this program reads up to {supported}; use a newer cairn")]
    NewerFormat {
        /// The file.
        object: String,
        /// Its version.
        found: u64,
        /// The newest version that this program can read.
        supported: u64,
    },
    /// The repository was written by a version of this program that was never released.
    #[error(
        "{object} has format {found}, this program reads from {supported}; export the images with \
         the cairn that created it, and import them into a new repository"
    )]
    OlderFormat {
        /// The file.
        object: String,
        /// Its version.
        found: u64,
        /// The oldest version that this program can read.
        supported: u64,
    },
    /// The locks of a catalog do not work on this file system.
    #[error(
        "{} is on {file_system}, whose locks and shared memory are not safe for a catalog; use a \
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
        /// The file.
        path: PathBuf,
    },
    /// Temporary files cannot be written or read.
    #[error(
        "temporary files in {} failed: {source}; nothing is lost: make space there, or set TMPDIR to \
         another directory, and try again", directory.display()
    )]
    TemporaryFiles {
        /// Their directory.
        directory: PathBuf,
        /// Why they failed.
        source: io::Error,
    },
    /// A peer holds as many bytes as it may.
    #[error("the peer in {} is full: it may hold {capacity} bytes", path.display())]
    PeerFull {
        /// The peer's data directory.
        path: PathBuf,
        /// The bytes that it may hold.
        capacity: u64,
    },
    /// A blob's redundancy needs more peers than are up.
    #[error(
        "{needed} peer{} needed, and {peers} {} up; start or add peers, or choose a lower redundancy",
        if *needed == 1 { " is" } else { "s are" }, if *peers == 1 { "is" } else { "are" }
    )]
    TooFewPeers {
        /// The number of peers that the redundancy needs.
        needed: usize,
        /// The number of peers that are up.
        peers: usize,
    },
    /// A snapshot is only *available*.
    #[error(
        "snapshot {name} can be read, but a peer was lost while it was stored, or its parent is \
         not stable; it is stable after the next repair"
    )]
    LostMeanwhile {
        /// `image@number`.
        name: String,
    },
    /// The peers do not have enough free space.
    #[error(
        "the peers lack {lacking} bytes of space for {bytes} bytes with their redundancy; add \
         peers, or remove snapshots"
    )]
    NoRoom {
        /// The bytes to store, with the redundancy.
        bytes: u64,
        /// How many of these, and of the reserve for an uneven distribution, do not fit.
        lacking: u64,
    },
    /// The peer never joined, or was forgotten.
    #[error("there is no peer '{peer}'; `cairn peers` shows the peers")]
    NoPeer {
        /// The peer's id or address.
        peer: String,
    },
    /// Blobs could not be stored with their full redundancy.
    #[error(
        "{blobs} {} not stored with {} full redundancy: {reason}",
        if *blobs == 1 { "blob is" } else { "blobs are" }, if *blobs == 1 { "its" } else { "their" }
    )]
    NotStored {
        /// The number of blobs.
        blobs: usize,
        /// Why one of them is not stored.
        reason: String,
    },
    /// A peer did not carry out a request.
    #[error("peer {peer}: {reason}")]
    Peer {
        /// The peer's address.
        peer: String,
        /// What the caller can do about it.
        kind: ErrorKind,
        /// Why the request failed.
        reason: String,
    },
    /// A peer has no space for a fragment.
    #[error("peer {peer} has no space left: {reason}")]
    PeerRefusedFull {
        /// The peer's address.
        peer: String,
        /// What the peer says.
        reason: String,
    },
    /// A deletion arrived after the time until which it was meant.
    #[error("the deletion came too late and was not carried out; the next repair decides again")]
    LateDeletion,
    /// A repair that does not hold its lease must not delete.
    #[error("this repair no longer holds its lease, so it deletes nothing; repair again")]
    LeaseLost,
    /// The catalog did not carry out a request.
    #[error("catalog {address}: {reason}")]
    Catalog {
        /// The catalog's address.
        address: String,
        /// What the caller can do about it.
        kind: ErrorKind,
        /// Why the request failed.
        reason: String,
    },
    /// The operating system reported an error.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A sync failed. Data in the page cache may be lost, and the kernel reports that only once.
    #[error(
        "an earlier sync of {} failed, so blobs may be lost; check the disk and start again",
        path.display()
    )]
    Poisoned {
        /// The repository's directory.
        path: PathBuf,
    },
    /// Another process uses the server's directory.
    #[error(
        "{} is in use by another process; stop that process, or name another directory",
        path.display()
    )]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// A peer with an empty data directory is a member, so its data is somewhere else.
    #[error(
        "peer {peer} is a member, and its data is not in the data directory, which is empty; mount \
         its disk, or, if the data is gone, run `cairn peers lose {peer}` and start the peer again"
    )]
    DataElsewhere {
        /// The peer's id.
        peer: String,
    },
    /// Another repair or collection of the repository runs.
    #[error(
        "another repair or collection is running, or was killed less than a minute ago; try again when it \
         has ended"
    )]
    RepairRuns,
    /// The cluster has changed during a collection.
    #[error(
        "the catalog was rebuilt, or a peer was lost, while the collection ran, so nothing was deleted; \
         run it again"
    )]
    ClusterChanged,
    /// The catalog is older than the blobs.
    #[error(
        "the catalog has seen {catalog} collections and the blobs have seen {blobs}: the catalog was \
         restored from an older copy. Snapshots that were taken since are not in it, and a collection \
         deletes their data. If that is what you want, run `cairn gc --accept-older-catalog`"
    )]
    OlderCatalog {
        /// The catalog's number.
        catalog: u64,
        /// The highest number that the place of the blobs has seen.
        blobs: u64,
    },
    /// A collection cannot read what it must keep.
    #[error(
        "{nodes} tree nodes cannot be read, so nothing is deleted. Affected: {}. Repair them \
         (`cairn verify` says what is missing), or give the data up that only they refer to: \
         `cairn gc --give-up {}`", names.join(", "), [&given_up[..], names].concat().join(" --give-up ")
    )]
    CannotMark {
        /// The number of tree nodes.
        nodes: u64,
        /// The snapshots that need them and are not given up.
        names: Vec<String>,
        /// The snapshots that are given up.
        given_up: Vec<String>,
    },
    /// The peers have records of snapshots that the catalog does not have.
    #[error(
        "the peers have records of {snapshots} snapshots that the catalog does not have, so nothing is \
         deleted; run `cairn catalog rebuild`, or try again later if an import or a clone was \
         interrupted within the last hour"
    )]
    Unlisted {
        /// The number of snapshots.
        snapshots: u64,
    },
    /// The catalog has snapshots that were removed.
    #[error(
        "the catalog was restored from an older copy: it has {snapshots} snapshots that were removed \
         since; nothing was deleted; run `cairn catalog rebuild`, which removes them again"
    )]
    Revived {
        /// The number of snapshots.
        snapshots: u64,
    },
    /// A task of this process panicked or was cancelled.
    #[error("{doing} failed inside this process: {reason}; try again, and report this as a defect")]
    Internal {
        /// What was being done.
        doing: &'static str,
        /// What is known of the cause.
        reason: String,
    },
    /// Every attempt to change the catalog conflicted with another change.
    #[error("too many processes change the catalog at once; try again")]
    Contended,
    /// The database reported an error.
    #[error("the repository's database failed: {source}{}", database_advice(source))]
    Database {
        /// What SQLite says.
        #[from]
        source: rusqlite::Error,
    },
}

impl Error {
    /// The error of a file operation on `path`. A full disk becomes [`Error::Full`].
    pub(crate) fn io(doing: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Error::Full { doing, path }
            }
            _ => Error::Io { doing, path, source },
        }
    }

    /// Fails unless the format version of `object` is the one that this program supports.
    pub(crate) fn check_format(object: &Path, found: u64, supported: u64) -> Result<()> {
        let object = object.display().to_string();
        match found.cmp(&supported) {
            cmp::Ordering::Less => Err(Error::OlderFormat { object, found, supported }),
            cmp::Ordering::Equal => Ok(()),
            cmp::Ordering::Greater => Err(Error::NewerFormat { object, found, supported }),
        }
    }

    pub(crate) fn corrupt(object: impl Into<String>, reason: impl Into<String>) -> Self {
        Error::Corrupt { object: object.into(), reason: reason.into() }
    }
}
