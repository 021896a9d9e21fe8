//! The catalog's documents and their keys. `docs/formats.md` explains every field.

use std::ops::Range;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::index::SnapshotIndex;
use crate::collection::CollectionNumber;
use crate::documents::{Change, View};
use crate::encoding::{Compression, Redundancy, StoragePolicy};
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::id::{BlobId, ImageId, MirrorId, NodeId};
use crate::metadata::Metadata;
use crate::name::{ImageName, Scope};
use crate::process::{LockedFile, Process};
use crate::snapshot::{
    Consistency, Image, MirrorOwner, MirrorRecord, Mode, Snapshot, SnapshotState,
};
use crate::tree::Root;

/// The key of the version of all other documents.
pub(super) const SCHEMA: &str = "schema";

/// The version of the documents that this program reads and writes.
pub(super) const SCHEMA_VERSION: u64 = 4;

pub(super) const IMAGES: &str = "images/";
pub(super) const SNAPSHOTS: &str = "snapshots/";
pub(super) const AVAILABLE: &str = "available/";
pub(super) const MIRRORS: &str = "mirrors/";
pub(super) const LEASES: &str = "leases/";
pub(super) const DRAFTS: &str = "drafts/";
pub(super) const POLICIES: &str = "policies/";

/// The key of an image. All other keys have the image's id: one image's name may begin with the
/// name of another, and a name may be used again.
pub(super) fn image_key(image: &ImageName) -> String {
    format!("{IMAGES}{image}")
}

/// The prefix of the keys of an image's snapshots.
pub(super) fn snapshots_of(image: &ImageId) -> String {
    format!("{SNAPSHOTS}{image}/")
}

/// The key of a snapshot. Keys sort by number.
pub(super) fn snapshot_key(image: &ImageId, number: u64) -> String {
    format!("{SNAPSHOTS}{image}/{number:016x}")
}

/// The prefix of the keys of an image's [`AvailableDocument`]s.
pub(super) fn available_of(image: &ImageId) -> String {
    format!("{AVAILABLE}{image}/")
}

/// The key of the [`AvailableDocument`] of a snapshot.
pub(super) fn available_key(image: &ImageId, number: u64) -> String {
    format!("{AVAILABLE}{image}/{number:016x}")
}

/// The prefix of the keys of an image's labels.
pub(super) fn labels_of(image: &ImageId) -> String {
    format!("labels/{image}/")
}

pub(super) fn label_key(image: &ImageId, label: &str) -> String {
    format!("labels/{image}/{label}")
}

/// The key of the policy of some images.
pub(super) fn policy_key(scope: &Scope) -> String {
    format!("{POLICIES}{scope}")
}

/// The key of the mark of an image whose snapshots a rebuild is restoring. Every change that
/// restores some of them writes it, until the image's document exists.
pub(super) fn restoring_key(image: &ImageId) -> String {
    format!("restoring/{image}")
}

/// The key of the [`DraftDocument`] of an image that is being created.
pub(super) fn draft_key(image: &ImageId) -> String {
    format!("{DRAFTS}{image}")
}

pub(super) fn mirror_key(mirror: &MirrorId) -> String {
    format!("{MIRRORS}{mirror}")
}

pub(super) fn lease_key(image: &ImageId) -> String {
    format!("{LEASES}{image}")
}

/// An image that is being created, and whose record may be on the peers.
#[derive(Serialize, Deserialize)]
pub(super) struct DraftDocument {
    #[serde(with = "text")]
    pub(super) name: ImageName,
    pub(super) image: ImageDocument,
    /// Whether the image cannot be created any more, because its tombstone may be stored.
    #[serde(default)]
    pub(super) given_up: bool,
}

/// Serialises a value as its text (`ToString` and `FromStr`).
pub(super) mod text {
    use super::{Deserialize, Deserializer, Serializer};

    pub(in super::super) fn serialize<T: ToString, S: Serializer>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_str(&value.to_string())
    }

    pub(in super::super) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: std::str::FromStr<Err: std::fmt::Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Serialises an optional value as its text, like [`text`].
pub(super) mod optional_text {
    use super::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in super::super) fn serialize<T: ToString, S: Serializer>(
        value: &Option<T>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        value.as_ref().map(ToString::to_string).serialize(to)
    }

    pub(in super::super) fn deserialize<'de, T, D>(from: D) -> Result<Option<T>, D::Error>
    where
        T: std::str::FromStr<Err: std::fmt::Display>,
        D: Deserializer<'de>,
    {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(serde::de::Error::custom)).transpose()
    }
}

/// An image.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct ImageDocument {
    #[serde(with = "text")]
    pub(super) id: ImageId,
    /// The size of the disk of the image's writer. It only grows.
    pub(super) size: u64,
    pub(super) chunk_size: u32,
    pub(super) created: u64,
    pub(super) origin: Option<String>,
    #[serde(with = "text")]
    pub(super) redundancy: Redundancy,
    #[serde(with = "text")]
    pub(super) compression: Compression,
    pub(super) next_number: u64,
    /// Raised by every acquisition of the lease.
    pub(super) fence: u64,
    /// The mirror that acquired the lease with this fence, until it releases the lease.
    #[serde(with = "optional_text")]
    pub(super) writer: Option<MirrorId>,
    /// Whether the image is being removed.
    pub(super) removing: bool,
    /// When a rebuild of the catalog last restored the image: seconds since 1970, and higher than
    /// before. 0 if none did.
    pub(super) restored: u64,
    /// The counts of the image's snapshots. They are all 0 in a record.
    #[serde(default)]
    pub(super) index: SnapshotIndex,
    /// The summary of removals that was stored last; `None` in a record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) summary: Option<StoredSummary>,
}

/// A summary of removals that the peers have with its full redundancy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredSummary {
    /// The collection that was current when this was noted.
    pub(crate) collection: CollectionNumber,
    /// The name of its record.
    #[serde(with = "text")]
    pub(crate) record: BlobId,
}

impl ImageDocument {
    pub(super) fn geometry(&self) -> Result<Geometry> {
        geometry(self.size, self.chunk_size)
    }

    pub(super) fn policy(&self) -> StoragePolicy {
        StoragePolicy { redundancy: self.redundancy, compression: self.compression }
    }

    /// The image, with the number of its snapshots and the newest of them.
    pub(super) fn image(&self, name: &ImageName) -> Result<Image> {
        Ok(Image {
            name: name.clone(),
            geometry: self.geometry()?,
            created: self.created,
            snapshots: self.index.snapshots,
            pinned: self.index.pinned,
            obsolete: self.index.obsolete,
            newest: self.index.newest,
            origin: self.origin.clone(),
            policy: self.policy(),
        })
    }
}

fn geometry(size: u64, chunk_size: u32) -> Result<Geometry> {
    Geometry::new(size, chunk_size)
        .map_err(|error| Error::corrupt("an image in the catalog", error.to_string()))
}

/// A snapshot.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct SnapshotDocument {
    pub(super) parent: Option<u64>,
    /// The size of the disk when the snapshot was taken.
    pub(super) size: u64,
    #[serde(with = "optional_text")]
    pub(super) root: Option<NodeId>,
    pub(super) time: u64,
    pub(super) labels: Vec<String>,
    pub(super) is_pinned: bool,
    pub(super) metadata: Metadata,
    /// Whether it was requested from inside the guest.
    pub(super) is_from_guest: bool,
    /// Whether its guest does not need it any more.
    pub(super) is_obsolete: bool,
    /// The number of changes of the five fields above. Of the snapshot's records, the one with the
    /// highest number counts.
    pub(super) edits: u64,
    #[serde(with = "text")]
    pub(super) state: SnapshotState,
    #[serde(with = "text")]
    pub(super) consistency: Consistency,
    pub(super) dirty_bytes: u64,
    pub(super) stored_bytes: u64,
    pub(super) sent_bytes: u64,
    pub(super) saved_bytes: u64,
    pub(super) pause_us: u64,
    pub(super) reason: Option<String>,
    #[serde(with = "optional_text")]
    pub(super) mirror: Option<MirrorId>,
    /// Whether its parent was only *available* when this snapshot was published.
    pub(super) is_parent_available: bool,
    /// The name of the snapshot's record, in a cluster.
    #[serde(with = "optional_text")]
    pub(super) record: Option<BlobId>,
}

impl SnapshotDocument {
    /// The shape of the snapshot of an image with this chunk size.
    pub(super) fn geometry(&self, chunk_size: u32) -> Result<Geometry> {
        geometry(self.size, chunk_size)
    }

    pub(super) fn snapshot(
        self,
        image: &ImageName,
        document: &ImageDocument,
        number: u64,
    ) -> Result<Snapshot> {
        Ok(Snapshot {
            image: image.clone(),
            image_id: document.id,
            number,
            parent: self.parent,
            root: Root(self.root),
            time: self.time,
            geometry: self.geometry(document.chunk_size)?,
            policy: document.policy(),
            labels: self.labels,
            is_pinned: self.is_pinned,
            metadata: self.metadata,
            is_from_guest: self.is_from_guest,
            is_obsolete: self.is_obsolete,
            state: self.state,
            consistency: self.consistency,
            dirty_bytes: self.dirty_bytes,
            stored_bytes: self.stored_bytes,
            sent_bytes: self.sent_bytes,
            saved_bytes: self.saved_bytes,
            pause_us: self.pause_us,
            reason: self.reason,
            mirror: self.mirror,
        })
    }
}

/// An entry of the index of *available* snapshots. It exists exactly as long as its snapshot is
/// *available*.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct AvailableDocument {
    #[serde(with = "text")]
    pub(super) image: ImageName,
}

/// A mirror, which refers to an image.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct MirrorDocument {
    #[serde(with = "text")]
    pub(super) image: ImageName,
    #[serde(with = "text")]
    pub(super) image_id: ImageId,
    pub(super) host: String,
    pub(super) path: String,
    #[serde(with = "text")]
    pub(super) mode: Mode,
    pub(super) parent: u64,
    #[serde(with = "optional_text")]
    pub(super) root: Option<NodeId>,
    /// Whether the parent was only *available* when it became the parent.
    pub(super) is_parent_available: bool,
    /// Whether the document did not refer to the parent all the time, so that a collection may have
    /// deleted the parent's content, and nobody has verified the content since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_parent_unverified: bool,
    pub(super) attached: u64,
    /// The highest number that the mirror has announced in this catalog. Snapshots up to it that
    /// have no document were removed.
    pub(super) announced: u64,
    /// Snapshot numbers that only this mirror may use. It has used some of them.
    pub(super) reserved: Range<u64>,
    /// Identifies the reservation: the fence of the writer that began it.
    #[serde(default)]
    pub(super) reservation: u64,
    /// The number of the collection that was current when the mirror began to store what it has not
    /// published; `None` if it has published everything.
    #[serde(default)]
    pub(super) storing_since: Option<CollectionNumber>,
    /// Whether the document, and with it the reference to the parent, expires unless a process of the
    /// mirror renews it.
    #[serde(default)]
    pub(super) is_ephemeral: bool,
    /// When a process last used the mirror, at most [`SEEN_INTERVAL`] too early: seconds since 1970, by
    /// the clock of its host.
    #[serde(default)]
    pub(super) seen: u64,
}

/// How long the document of an ephemeral mirror lasts without a renewal, in seconds. A catalog may be
/// unreachable for that long.
pub(super) const EPHEMERAL_SECONDS: u32 = 600;

/// How far the time at which a mirror was seen may be off before it is written again, in seconds.
pub(super) const SEEN_INTERVAL: u64 = 3600;

/// Adds a mirror's document to a change. Every change of the document uses this: that of an ephemeral
/// mirror must always expire.
pub(super) fn put_mirror(change: Change, id: &MirrorId, mirror: &MirrorDocument) -> Change {
    match mirror.is_ephemeral {
        true => change.put_for(EPHEMERAL_SECONDS, mirror_key(id), mirror),
        false => change.put(mirror_key(id), mirror),
    }
}

impl MirrorDocument {
    /// Notes that a process uses the mirror at this time. Returns whether the document must be written
    /// for it. The clock may have been set back since the last time.
    pub(super) fn note_use(&mut self, now: u64) -> bool {
        let is_due = self.is_ephemeral || self.seen.abs_diff(now) > SEEN_INTERVAL;
        if is_due {
            self.seen = now;
        }
        is_due
    }

    /// Makes the mirror refer to a later parent that it has itself. Returns whether it did not. A
    /// catalog that was restored from an older copy does not know the parent.
    pub(super) fn move_to(&mut self, (number, root): (u64, Root)) -> bool {
        let is_later = self.parent < number;
        if is_later {
            (self.parent, self.root, self.is_parent_available) = (number, root.0, true);
            self.is_parent_unverified = true;
        }
        is_later
    }

    /// Makes the mirror refer to the parent that its only writer has, whatever the catalog says: the
    /// catalog may be an older copy, or may have published a snapshot although the answer was lost.
    pub(super) fn refer_to(&mut self, (number, root): (u64, Root)) {
        if (self.parent, self.root) != (number, root.0) {
            (self.parent, self.root, self.is_parent_available) = (number, root.0, true);
            self.is_parent_unverified = true;
        }
    }

    /// The mirror, with its writer if `observer` does not see that the writer is dead.
    pub(super) fn record(
        self,
        id: MirrorId,
        lease: Option<LeaseDocument>,
        observer: &Process,
    ) -> MirrorRecord {
        let lease = lease.filter(|lease| lease.mirror == id && lease.is_live(observer));
        MirrorRecord {
            id,
            image: self.image,
            host: self.host,
            path: self.path,
            mode: self.mode,
            parent: self.parent,
            root: Root(self.root),
            attached: self.attached,
            // Documents of earlier versions have no time of use.
            seen: self.seen.max(self.attached),
            is_ephemeral: self.is_ephemeral,
            writer: lease.map(|lease| lease.process.pid),
        }
    }
}

/// The lease of an image's live writer. Without a renewal it expires after
/// [`LEASE_SECONDS`](super::LEASE_SECONDS).
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct LeaseDocument {
    #[serde(with = "text")]
    pub(super) mirror: MirrorId,
    host: String,
    path: String,
    pub(super) process: Process,
    /// The file that the process keeps locked.
    #[serde(default)]
    lock: Option<LockedFile>,
}

impl LeaseDocument {
    pub(super) fn new(owner: &MirrorOwner, process: Process) -> LeaseDocument {
        let (mirror, host, path) = (owner.id, owner.host.clone(), owner.path.clone());
        LeaseDocument { mirror, host, path, process, lock: owner.lock }
    }

    /// Whether the lease passes to `owner` without waiting for its end: it is the owner's own, or
    /// the owner's lock proves that the holder has ended (see [`LockedFile`]).
    pub(super) fn passes_to(&self, owner: &MirrorOwner, process: &Process) -> bool {
        let has_lock = self.lock.is_some()
            && self.lock == owner.lock
            && self.process.boot_id == process.boot_id;
        self.mirror == owner.id && (self.process == *process || has_lock)
    }

    /// Whether the holder may still write, as `observer` sees it.
    pub(super) fn is_live(&self, observer: &Process) -> bool {
        !self.process.is_dead(observer)
    }

    /// The error for every other process that wants the lease.
    pub(super) fn conflict(&self, image: &ImageName) -> Error {
        Error::Leased {
            image: image.to_string(),
            host: self.host.clone(),
            path: self.path.clone(),
            pid: self.process.pid,
            seconds: super::LEASE_SECONDS,
        }
    }
}

/// The image's document. Fails if there is none, or if the image is being removed.
pub(super) fn image(view: &View, name: &ImageName) -> Result<ImageDocument> {
    match view.get::<ImageDocument>(&image_key(name))? {
        None => Err(Error::NoImage { name: name.to_string() }),
        Some(image) if image.removing => Err(Error::BeingRemoved { name: name.to_string() }),
        Some(image) => Ok(image),
    }
}

/// The snapshots of an image with their numbers, in order.
pub(super) fn snapshots(view: &View, image: &ImageId) -> Result<Vec<(u64, SnapshotDocument)>> {
    let all = view.under::<SnapshotDocument>(&snapshots_of(image))?;
    all.into_iter().map(|(key, one)| Ok((number_of(&key)?, one))).collect()
}

pub(super) fn number_of(key: &str) -> Result<u64> {
    u64::from_str_radix(key, 16)
        .map_err(|_| Error::corrupt("the catalog", format!("'{key}' is not a snapshot number")))
}

/// The lease of an image, unless `observer` sees that its holder is dead.
pub(super) fn live_lease(
    view: &View,
    image: &ImageId,
    observer: &Process,
) -> Result<Option<LeaseDocument>> {
    let lease = view.get::<LeaseDocument>(&lease_key(image))?;
    Ok(lease.filter(|lease| lease.is_live(observer)))
}
