//! The record of a snapshot: a blob with the catalog's documents of the snapshot and its image.
//!
//! Records are immutable. A record is stored before its snapshot is published. A *tombstone* is a
//! record without a snapshot. It is stored when a snapshot fails, and before the removal of a
//! snapshot or an image is complete. A [summary](super::removal_summary) takes the place of many
//! tombstones. If the catalog is lost, it is rebuilt from the records.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::Catalog;
use super::collection::{COLLECTION, raise_after_loss};
use super::documents::{
    AvailableDocument, DRAFTS, DraftDocument, IMAGES, ImageDocument, SNAPSHOTS, SnapshotDocument,
    available_key, image_key, label_key, restoring_key, snapshot_key, text,
};
use super::images::snapshot_of;
use super::index::{LabelDocument, SnapshotIndex};
use super::mirror_records::{self, MirrorReference};
use super::removal_summary::RemovalSummary;
use crate::clock::now;
use crate::cluster::membership::{ClusterEpoch, LOSSES};
use crate::documents::{Change, Query};
use crate::encoding::{Redundancy, StoragePolicy};
use crate::error::{Error, Result};
use crate::id::{BlobId, ImageId, MirrorId};
use crate::name::{ImageName, Scope};
use crate::retention::RetentionPolicy;
use crate::snapshot::SnapshotState;
use crate::tree::Root;

/// The format name in every record.
const FORMAT: &str = "cairn-snapshot-record";
const VERSION: u32 = 4;

/// The most documents of snapshots that a rebuild restores with one change: a snapshot, its entry in
/// the index of available ones, and its labels. etcd refuses changes of more than 128 operations.
const DOCUMENTS_IN_CHANGE: usize = 120;

/// The number of epochs that a rebuild leaves for losses until the next rebuild, and a power of two.
/// Epochs of two rebuilds differ by at least this much for each second between them.
const EPOCHS_OF_A_REBUILD: u64 = 1 << 24;

/// A record of a snapshot, or a tombstone of a snapshot or an image.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    format: String,
    version: u32,
    #[serde(with = "text")]
    image_name: ImageName,
    image: ImageDocument,
    /// The snapshot's number. In a tombstone, 0 stands for the whole image.
    number: u64,
    /// `None` in a tombstone.
    snapshot: Option<SnapshotDocument>,
    /// When this was recorded: seconds since 1970.
    recorded: u64,
    /// The number of peers that the cluster had at that time.
    peers: u64,
    /// The epoch of the cluster in which the snapshot was published; 0 in a tombstone.
    epoch: u64,
    /// Whether this is the tombstone of a snapshot that was never published.
    is_failure: bool,
    /// The removed snapshots of the image, if this is a summary of removals. The number is 0 then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    summary: Option<RemovalSummary>,
}

impl Record {
    pub(super) fn new(
        image_name: &ImageName,
        image: &ImageDocument,
        number: u64,
        snapshot: SnapshotDocument,
        epoch: ClusterEpoch,
    ) -> Record {
        let (snapshot, epoch) = (Some(snapshot), epoch.number());
        Record { snapshot, epoch, ..Record::removal(image_name, image, number) }
    }

    /// The tombstone of a snapshot that was not published.
    pub(super) fn failure(image_name: &ImageName, image: &ImageDocument, number: u64) -> Record {
        Record { is_failure: true, ..Record::removal(image_name, image, number) }
    }

    /// The tombstone of a snapshot, or of the whole image if the number is 0.
    pub(super) fn removal(image_name: &ImageName, image: &ImageDocument, number: u64) -> Record {
        Record {
            format: FORMAT.to_owned(),
            version: VERSION,
            image_name: image_name.clone(),
            image: ImageDocument {
                index: SnapshotIndex::default(),
                summary: None,
                ..image.clone()
            },
            number,
            snapshot: None,
            recorded: now(),
            peers: 0,
            epoch: 0,
            is_failure: false,
            summary: None,
        }
    }

    /// A summary of the image's removed snapshots.
    pub(super) fn summary(
        image_name: &ImageName,
        image: &ImageDocument,
        summary: RemovalSummary,
    ) -> Record {
        Record { summary: Some(summary), ..Record::removal(image_name, image, 0) }
    }

    #[cfg(test)]
    pub(super) fn set_recorded(&mut self, recorded: u64) {
        self.recorded = recorded;
    }

    /// The same record with the number of peers that the cluster has.
    pub(crate) fn with_peers(self, peers: u64) -> Record {
        Record { peers, ..self }
    }

    /// Whether it is a tombstone of what existed, or a summary of such.
    fn is_removal(&self) -> bool {
        self.snapshot.is_none() && !self.is_failure
    }

    /// The numbers of a summary's snapshots that were published and removed; `None` if it is none.
    pub(super) fn is_in_summary(&self) -> Option<impl Fn(u64) -> bool> {
        let summary = self.summary.as_ref()?;
        Some(|number| summary.removed.contains(number) && !summary.failed.contains(number))
    }

    /// When this was recorded: seconds since 1970.
    pub(super) fn recorded(&self) -> u64 {
        self.recorded
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn image_name(&self) -> &ImageName {
        &self.image_name
    }

    pub(super) fn image_id(&self) -> ImageId {
        self.image.id
    }

    /// The largest size that the image is known to have had.
    fn size(&self) -> u64 {
        self.snapshot.as_ref().map_or(0, |snapshot| snapshot.size).max(self.image.size)
    }

    /// A number above all that the image is known to have used.
    fn next_number(&self) -> u64 {
        let removed = self.summary.as_ref().and_then(|summary| summary.removed.iter().last());
        let above_removed = removed.map_or(0, |range| range.end);
        self.image.next_number.max(self.number + 1).max(above_removed)
    }

    /// The storage policy of the image.
    pub(crate) fn policy(&self) -> StoragePolicy {
        self.image.policy()
    }

    /// The snapshot's state; `None` for a tombstone or a summary.
    pub(crate) fn state(&self) -> Option<SnapshotState> {
        self.snapshot.as_ref().map(|snapshot| snapshot.state)
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("records are plain data")
    }

    /// Whether this says that a snapshot of its image was not published.
    pub(super) fn has_failed(&self, number: u64) -> bool {
        let is_listed = self.summary.as_ref().is_some_and(|all| all.failed.contains(number));
        is_listed || (self.is_failure && self.number == number)
    }

    /// Whether this may say that snapshots were not published.
    pub(super) fn has_failures(&self) -> bool {
        self.is_failure || self.summary.is_some()
    }

    /// The image, the mirror, the number and the root, if a mirror may have published the snapshot.
    pub(super) fn published_by(&self) -> Option<((ImageId, MirrorId), u64, Root)> {
        let snapshot = self.snapshot.as_ref().filter(|one| one.state.has_content())?;
        Some(((self.image.id, snapshot.mirror?), self.number, Root(snapshot.root)))
    }
}

/// A record of any kind.
enum AnyRecord {
    Snapshot(Box<Record>),
    Mirror(Box<MirrorReference>),
}

impl AnyRecord {
    fn parse(bytes: &[u8]) -> Result<AnyRecord> {
        /// The fields that every record has.
        #[derive(Deserialize)]
        struct Header {
            format: String,
            version: u32,
        }
        let object = "a record";
        let corrupt = |error: serde_json::Error| Error::corrupt(object, error.to_string());
        let header: Header = serde_json::from_slice(bytes).map_err(corrupt)?;
        let check = |supported: u32| {
            Error::check_format(object.as_ref(), header.version.into(), supported.into())
        };
        match header.format.as_str() {
            FORMAT => {
                check(VERSION)?;
                let record = serde_json::from_slice(bytes).map_err(corrupt)?;
                Ok(AnyRecord::Snapshot(Box::new(record)))
            }
            mirror_records::FORMAT => {
                check(mirror_records::VERSION)?;
                let reference = serde_json::from_slice(bytes).map_err(corrupt)?;
                Ok(AnyRecord::Mirror(Box::new(reference)))
            }
            other => Err(Error::corrupt(object, format!("its format is '{other}'"))),
        }
    }
}

/// What a record is about.
pub(crate) enum RecordSubject {
    /// A snapshot, and whether it has content.
    Snapshot { image: ImageId, number: u64, has_content: bool },
    /// A snapshot that was removed, or that was never published.
    Removal { image: ImageId, number: u64, is_failure: bool },
    /// An image that was removed.
    ImageRemoval(ImageId),
    /// Snapshots of an image that were removed, or that were never published.
    Summary(ImageId, RemovalSummary),
    /// A mirror that was attached or is gone, and when: seconds since 1970.
    Mirror { mirror: MirrorId, is_removal: bool, recorded: u64 },
}

impl RecordSubject {
    pub(crate) fn of(record: &[u8]) -> Result<RecordSubject> {
        let record = match AnyRecord::parse(record)? {
            AnyRecord::Snapshot(record) => record,
            AnyRecord::Mirror(reference) => {
                let (mirror, is_removal, recorded) = reference.subject();
                return Ok(RecordSubject::Mirror { mirror, is_removal, recorded });
            }
        };
        let (image, number, is_failure) = (record.image.id, record.number, record.is_failure);
        Ok(match record.state() {
            Some(state) => {
                RecordSubject::Snapshot { image, number, has_content: state.has_content() }
            }
            None => match record.summary {
                Some(summary) => RecordSubject::Summary(image, summary),
                None if number == 0 => RecordSubject::ImageRemoval(image),
                None => RecordSubject::Removal { image, number, is_failure },
            },
        })
    }
}

/// The redundancy of the image that a record belongs to; `None` if the record cannot be read.
pub(crate) fn recorded_redundancy(record: &[u8]) -> Option<Redundancy> {
    match AnyRecord::parse(record).ok()? {
        AnyRecord::Snapshot(record) => Some(record.policy().redundancy),
        AnyRecord::Mirror(reference) => Some(reference.redundancy),
    }
}

/// The records that a catalog is rebuilt from.
#[derive(Default)]
pub(crate) struct Records {
    pub(crate) snapshots: Vec<(BlobId, Record)>,
    mirrors: Vec<MirrorReference>,
}

impl Records {
    /// Adds the record that these bytes hold.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Result<()> {
        match AnyRecord::parse(bytes)? {
            AnyRecord::Snapshot(record) => self.snapshots.push((BlobId::of(bytes), *record)),
            AnyRecord::Mirror(reference) => self.mirrors.push(*reference),
        }
        Ok(())
    }

    /// The number of peers that the cluster had, according to the newest record.
    pub(crate) fn peers(&self) -> u64 {
        let newest = self.snapshots.iter().max_by_key(|(_, record)| record.recorded);
        newest.map_or(0, |(_, record)| record.peers)
    }
}

/// The result of a rebuild of the catalog.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rebuilt {
    /// The number of images that were restored.
    pub images: u64,
    /// The number of snapshots that were restored, of these images and of others.
    pub snapshots: u64,
    /// The number of mirrors that were restored.
    pub mirrors: u64,
    /// The number of snapshots that the catalog had and that were removed before: it was restored from
    /// an older copy.
    pub removed: u64,
    /// The names of images that were left alone, because another image has the name.
    pub left: Vec<String>,
    /// Whether the catalog had no policy, so that it keeps all snapshots now until somebody sets one.
    pub keeps_all: bool,
}

/// What a catalog had before a rebuild read the records.
///
/// A rebuild that runs beside publications and removals brings nothing back:
///
/// - A snapshot that is missing here was removed before, was lost, or was published later. If it was
///   removed, its tombstone was stored before, so the records that are read later have it.
/// - A snapshot that was published later has a record of the new epoch, which is ignored: whoever
///   publishes relies on the epoch.
/// - An image whose creation has not ended is not restored. Whoever creates it relies on the epoch,
///   so the creation fails, and its tombstone follows.
pub(crate) struct Inventory {
    /// The epoch of the cluster that began before the catalog was listed.
    epoch: u64,
    images: HashMap<String, ImageId>,
    snapshots: HashSet<(ImageId, u64)>,
    drafts: HashSet<ImageId>,
}

impl Catalog {
    /// Lists what the catalog has. A rebuild calls this before it reads the records.
    pub(crate) fn inventory(&self) -> Result<Inventory> {
        let epoch = self.begin_epoch()?;
        let (mut images, mut snapshots) = (HashMap::new(), HashSet::new());
        let mut drafts = HashSet::new();
        self.documents.scan(&[IMAGES, SNAPSHOTS, DRAFTS], &mut |key, document| {
            if let Some(name) = key.strip_prefix(IMAGES) {
                images.insert(name.to_owned(), document.decode::<ImageDocument>(key)?.id);
            } else if key.starts_with(DRAFTS) {
                drafts.insert(document.decode::<DraftDocument>(key)?.image.id);
            } else {
                snapshots.insert(snapshot_of(key)?);
            }
            Ok(())
        })?;
        Ok(Inventory { epoch, images, snapshots, drafts })
    }

    /// Restores the images, snapshots and mirrors of these records that the catalog does not have.
    pub(crate) fn rebuild(&self, inventory: &Inventory, records: Records) -> Result<Rebuilt> {
        let Records { mut snapshots, mirrors } = records;
        // Epochs of different catalogs are far apart.
        let later = inventory.epoch..inventory.epoch.saturating_add(EPOCHS_OF_A_REBUILD);
        snapshots.retain(|(_, record)| !later.contains(&record.epoch));
        snapshots.retain(|(_, record)| !inventory.drafts.contains(&record.image.id));
        let all: Vec<Record> = snapshots.iter().map(|(_, record)| record.clone()).collect();
        let mut images: BTreeMap<ImageId, Vec<Record>> = BTreeMap::new();
        for (id, mut record) in snapshots {
            // A record cannot contain its own hash, so the document gets it here.
            record.snapshot.iter_mut().for_each(|snapshot| snapshot.record = Some(id));
            images.entry(record.image.id).or_default().push(record);
        }
        let images = images.into_values().map(RecordedImage::new).filter(RecordedImage::exists);
        let mut images: Vec<_> = images.collect();
        // Of two images that had one name at different times, the image that was created later gets
        // it, unless the catalog has one of them.
        images.sort_by_key(|image| std::cmp::Reverse(image.last.image.created));
        let mut names = inventory.images.clone();
        let mut rebuilt = Rebuilt::default();
        let is_new = |image: &RecordedImage| {
            !inventory.images.contains_key(&image.last.image_name.to_string())
        };
        if images.iter().any(is_new) {
            let policies = self.policies()?;
            if policies.is_empty() {
                // Policies have no records. Without one, guests could remove what the host's policy has
                // kept.
                self.set_policy(&Scope::All, &RetentionPolicy::default())?;
            }
            // A rebuild that was killed may have set it.
            rebuilt.keeps_all =
                policies.iter().all(|one| one.scope == Scope::All && one.policy.keeps_all());
        }
        for image in &images {
            let (name, id) = (image.last.image_name.to_string(), image.last.image.id);
            if *names.entry(name.clone()).or_insert(id) != id {
                rebuilt.left.push(name);
                continue;
            }
            let is_known = inventory.images.contains_key(&name);
            rebuilt.snapshots += self.restore(image, inventory, is_known)?;
            rebuilt.images += u64::from(!is_known);
        }
        rebuilt.left.sort_unstable();
        rebuilt.left.dedup();
        rebuilt.mirrors = self.rebuild_mirrors(mirrors, &all)?;
        let removals: Vec<_> = all.into_iter().filter(Record::is_removal).collect();
        rebuilt.removed = self.remove_revived(&removals)?;
        Ok(rebuilt)
    }

    /// Begins an epoch of the cluster that no catalog has had. The count of lost peers is not known:
    /// a commit that began before must ask the peers for its blobs. Raises the number of collections,
    /// too.
    fn begin_epoch(&self) -> Result<u64> {
        self.change(&[Query::key(LOSSES), Query::key(COLLECTION)], |view| {
            let next = ClusterEpoch::of(view)?.number() + 1;
            let next = next.max(now().saturating_mul(EPOCHS_OF_A_REBUILD));
            Ok((raise_after_loss(view, Change::default().put(LOSSES, &next))?, next))
        })
    }

    /// Restores an image, or what is missing of an image that the catalog has. Returns the number
    /// of restored snapshots.
    fn restore(&self, image: &RecordedImage, inventory: &Inventory, is_known: bool) -> Result<u64> {
        let RecordedImage { last, next_number, size, snapshots, .. } = image;
        let (name, id) = (&last.image_name, &last.image.id);
        let missing =
            snapshots.iter().filter(|(number, _)| !inventory.snapshots.contains(&(*id, *number)));
        let missing: Vec<_> = missing.collect();
        // Nobody sees the snapshots of an image without its document, which comes last.
        let mut rest = &missing[..];
        while !rest.is_empty() {
            let (part, others) = rest.split_at(restored_together(rest));
            self.restore_snapshots(image, part, is_known)?;
            rest = others;
        }
        let (key, mark) = (image_key(name), restoring_key(id));
        self.change(&[Query::key(&key), Query::key(&mark)], |view| {
            let document = match view.get::<ImageDocument>(&key)? {
                Some(found)
                    if found.id == *id
                        && (found.next_number < *next_number || found.size < *size) =>
                {
                    let next_number = found.next_number.max(*next_number);
                    ImageDocument { next_number, size: found.size.max(*size), ..found }
                }
                None if !is_known => ImageDocument {
                    size: *size,
                    next_number: *next_number,
                    writer: None,
                    fence: image.fence,
                    restored: image.restored.saturating_add(1).max(now()),
                    // Another rebuild that restores snapshots meanwhile writes the mark.
                    index: self.count(id)?,
                    ..last.image.clone()
                },
                _ => return Ok((Change::default(), ())),
            };
            Ok((Change::default().put(&key, &document).remove(Query::key(&mark)), ()))
        })?;
        Ok(missing.len() as u64)
    }

    fn restore_snapshots(
        &self,
        image: &RecordedImage,
        missing: &[&(u64, SnapshotDocument)],
        is_known: bool,
    ) -> Result<()> {
        let (name, id) = (&image.last.image_name, &image.last.image.id);
        let (image_key, mark) = (image_key(name), restoring_key(id));
        let mut queries = vec![Query::key(&image_key)];
        for (number, one) in missing {
            queries.push(Query::Key(snapshot_key(id, *number)));
            queries.extend(one.labels.iter().map(|label| Query::Key(label_key(id, label))));
        }
        self.change(&queries, |view| {
            let mut change = Change::default();
            let mut found = view.get::<ImageDocument>(&image_key)?;
            // A known image may have been removed meanwhile, and its name may be used again. Another
            // rebuild may have restored an unknown one.
            let is_gone = found.as_ref().map_or(is_known, |one| one.id != *id || one.removing);
            if is_gone {
                return Ok((change, ()));
            }
            let mut taken_labels = HashSet::new();
            for (number, one) in missing {
                let key = snapshot_key(id, *number);
                // Another rebuild may have restored it.
                if view.version(&key) != 0 {
                    continue;
                }
                // Two snapshots of one label are possible: the first was recorded, but not published.
                let mut labels = Vec::new();
                for label in &one.labels {
                    let key = label_key(id, label);
                    let is_free = view.get::<LabelDocument>(&key)?.is_none_or(|taken| taken.failed);
                    if is_free && taken_labels.insert(key.clone()) {
                        labels.push(label.clone());
                        let label = LabelDocument { number: *number, failed: false };
                        change = change.put(key, &label);
                    }
                }
                let one = SnapshotDocument { labels, ..one.clone() };
                change = change.put(key, &one);
                if let Some(image) = &mut found {
                    image.index.add(*number, &one);
                }
                if one.state == SnapshotState::Available {
                    let entry = AvailableDocument { image: name.clone() };
                    change = change.put(available_key(id, *number), &entry);
                }
            }
            if !change.puts.is_empty() {
                change = match &found {
                    Some(image) => change.put(&image_key, image),
                    None => change.put(&mark, &now()),
                };
            }
            Ok((change, ()))
        })
    }
}

/// How many of these snapshots are restored with one change: at least one.
fn restored_together(snapshots: &[&(u64, SnapshotDocument)]) -> usize {
    let mut documents = 0;
    let fits = |(_, one): &&&(u64, SnapshotDocument)| {
        documents += 2 + one.labels.len();
        documents <= DOCUMENTS_IN_CHANGE
    };
    snapshots.iter().take_while(fits).count().max(1)
}

/// The records of one image, combined.
struct RecordedImage {
    /// The record that was stored last.
    last: Record,
    /// A number that no snapshot of the image has used, and none above it.
    next_number: u64,
    /// The largest size in any record. A disk only grows.
    size: u64,
    /// The highest fence and count of rebuilds in any record.
    fence: u64,
    restored: u64,
    /// The snapshots with content that were not removed, by number. Empty if the image was removed.
    snapshots: Vec<(u64, SnapshotDocument)>,
}

impl RecordedImage {
    fn new(mut records: Vec<Record>) -> RecordedImage {
        // The record that counts for a number comes last: the one with the most edits, or a tombstone
        // whatever its time is. Clocks of two hosts differ, and no number is used twice.
        let edits = |one: &Record| one.snapshot.as_ref().map_or(0, |snapshot| snapshot.edits);
        records.sort_by_key(|one| (one.snapshot.is_none(), edits(one), one.recorded));
        let last = records.iter().max_by_key(|one| one.recorded);
        let last = last.expect("an image has a record").clone();
        let fence = records.iter().map(|one| one.image.fence).max().unwrap_or(0);
        let restored = records.iter().map(|one| one.image.restored).max().unwrap_or(0);
        let next = records.iter().map(Record::next_number).max();
        let size = records.iter().map(Record::size).max().unwrap_or(0);
        let mut removed = RemovalSummary::default();
        records.iter().filter_map(|one| one.summary.as_ref()).for_each(|one| removed.add_all(one));
        let single = records.into_iter().filter(|record| record.summary.is_none());
        let newest: BTreeMap<u64, Record> = single.map(|one| (one.number, one)).collect();
        let is_removed = newest.contains_key(&0);
        let snapshots =
            newest.into_iter().filter_map(|(number, one)| Some((number, one.snapshot?)));
        let snapshots = snapshots.filter(|(_, one)| one.state.has_content() && !is_removed);
        let snapshots = snapshots.filter(|(number, _)| !removed.removed.contains(*number));
        let (next_number, snapshots) = (next.unwrap_or(0), snapshots.collect());
        RecordedImage { last, next_number, size, fence, restored, snapshots }
    }

    /// Whether the image was not removed.
    fn exists(&self) -> bool {
        !self.snapshots.is_empty()
    }
}

#[cfg(test)]
mod tests;
