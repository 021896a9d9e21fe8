//! The record of a snapshot: a blob with the catalog's documents of the snapshot and its image.
//!
//! Records are immutable. A record is stored before its snapshot is published. Another one is
//! stored when a snapshot fails, or when a snapshot or its image is removed. If the catalog is
//! lost, it is rebuilt from the newest record of each snapshot.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use super::Catalog;
use super::documents::{ImageDocument, SnapshotDocument, image_key, label_key, snapshot_key, text};
use crate::clock::now;
use crate::documents::{Change, Query};
use crate::encoding::StoragePolicy;
use crate::error::{Error, Result};
use crate::id::{BlobId, MirrorId};
use crate::name::ImageName;
use crate::snapshot::SnapshotState;

/// The format name in every record.
const FORMAT: &str = "cairn-snapshot-record";
const VERSION: u32 = 1;

/// The most snapshots that a rebuild restores with one change, so that no document store refuses
/// the change as too large.
const SNAPSHOTS_IN_CHANGE: usize = 50;

/// A record of a snapshot, of its failure or removal, or of the removal of an image.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    format: String,
    version: u32,
    #[serde(with = "text")]
    image_name: ImageName,
    image: ImageDocument,
    number: u64,
    /// `None` if the snapshot failed or was removed; with number 0, if the whole image was removed.
    snapshot: Option<SnapshotDocument>,
    /// When this was recorded: seconds since 1970.
    recorded: u64,
}

impl Record {
    pub(super) fn new(
        image_name: &ImageName,
        image: &ImageDocument,
        number: u64,
        snapshot: Option<SnapshotDocument>,
    ) -> Record {
        let (format, version, recorded) = (FORMAT.to_owned(), VERSION, now());
        let (image_name, image) = (image_name.clone(), image.clone());
        Record { format, version, image_name, image, number, snapshot, recorded }
    }

    /// The storage policy of the image.
    pub(crate) fn policy(&self) -> StoragePolicy {
        self.image.policy()
    }

    /// The snapshot's state; `None` if this is the record of a removal or a failure.
    pub(crate) fn state(&self) -> Option<SnapshotState> {
        self.snapshot.as_ref().map(|snapshot| snapshot.state)
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("records are plain data")
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Record> {
        let record: Record = serde_json::from_slice(bytes)
            .map_err(|error| Error::corrupt("a snapshot's record", error.to_string()))?;
        if record.format != FORMAT || record.version != VERSION {
            let (object, found) = ("a snapshot's record".into(), record.version.into());
            return Err(Error::NewerFormat { object, found, supported: VERSION.into() });
        }
        Ok(record)
    }
}

/// The result of a rebuild of the catalog.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rebuilt {
    /// The number of restored images.
    pub images: u64,
    /// The number of their snapshots.
    pub snapshots: u64,
    /// The names of images that were left alone, because the catalog has an image of that name.
    pub left: Vec<String>,
}

impl Catalog {
    /// Restores the images of these records, except those whose names are in the catalog.
    pub(crate) fn rebuild(&self, records: Vec<(BlobId, Record)>) -> Result<Rebuilt> {
        let mut images: BTreeMap<MirrorId, Vec<Record>> = BTreeMap::new();
        for (id, mut record) in records {
            // A record cannot contain its own hash, so the document gets it here.
            record.snapshot.iter_mut().for_each(|snapshot| snapshot.record = Some(id));
            images.entry(record.image.id).or_default().push(record);
        }
        let mut rebuilt = Rebuilt::default();
        // Of two images that had one name at different times, the image that was created later gets
        // it.
        let mut images: Vec<_> = images.into_values().collect();
        images
            .sort_by_key(|records| std::cmp::Reverse(records.first().map(|one| one.image.created)));
        images.iter_mut().for_each(|records| {
            // The record that counts for a number comes last: the newest, or a removal whatever its
            // time is. Clocks of two hosts differ, and no number is used twice.
            records.sort_by_key(|one| (one.snapshot.is_none(), one.recorded));
        });
        let mut taken = HashSet::new();
        for records in &images {
            let newest = records.iter().map(|record| (record.number, record));
            let newest: BTreeMap<u64, &Record> = newest.collect();
            let Some(last) = records.last() else { continue };
            let stored =
                newest.iter().filter_map(|(number, one)| Some((*number, one.snapshot.clone()?)));
            let stored: Vec<_> = stored.filter(|(_, one)| one.state.has_content()).collect();
            if newest.contains_key(&0) || stored.is_empty() || !taken.insert(&last.image_name) {
                continue;
            }
            let next = records.iter().map(|one| one.image.next_number).max().unwrap_or(0);
            match self.restore(last, next, &stored)? {
                true => {
                    rebuilt.images += 1;
                    rebuilt.snapshots += stored.len() as u64;
                }
                false => rebuilt.left.push(last.image_name.to_string()),
            }
        }
        rebuilt.left.sort_unstable();
        Ok(rebuilt)
    }

    /// Restores an image. Returns `false` if the catalog has an image of that name.
    fn restore(
        &self,
        record: &Record,
        next: u64,
        stored: &[(u64, SnapshotDocument)],
    ) -> Result<bool> {
        let name = &record.image_name;
        let key = image_key(name);
        if self.read(&[Query::key(&key)])?.version(&key) != 0 {
            return Ok(false);
        }
        // Snapshots come first, so that a visible image is complete.
        for part in stored.chunks(SNAPSHOTS_IN_CHANGE) {
            let change = part.iter().fold(Change::default(), |change, (number, one)| {
                let change = change.put(snapshot_key(name, *number), one);
                match &one.label {
                    Some(label) => change.put(label_key(name, label), number),
                    None => change,
                }
            });
            self.documents.commit(&change)?;
        }
        let last = stored.iter().map(|(number, _)| *number).max().unwrap_or(0);
        let image =
            ImageDocument { next_number: next.max(last + 1), writer: None, ..record.image.clone() };
        let change = Change { relies_on: vec![(key.clone(), 0)], ..Change::default() };
        self.documents.commit(&change.put(&key, &image))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tempfile::TempDir;

    use super::{BlobId, Catalog, Record, SnapshotState, StoragePolicy};
    use crate::catalog::{Draft, FirstSnapshot};
    use crate::documents::SqliteDocuments;
    use crate::geometry::Geometry;
    use crate::snapshot::Consistency;
    use crate::tree::Root;

    #[test]
    fn a_rebuild_restores_no_removed_snapshot_and_reuses_no_number_whatever_the_clocks_say() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("catalog.db");
        SqliteDocuments::create(&path).unwrap();
        let catalog = Catalog::new(Arc::new(SqliteDocuments::open(&path).unwrap()));
        let first = FirstSnapshot {
            root: Root(None),
            state: SnapshotState::Stable,
            consistency: Consistency::Crash,
            dirty_bytes: 0,
            stored_bytes: 0,
            sent_bytes: 0,
            saved_bytes: 0,
        };
        let geometry = Geometry::new(1 << 20, 65536).unwrap();
        let name = "a".parse().unwrap();
        let draft = Draft::new(&name, geometry, StoragePolicy::default(), &first).unwrap();
        let of = |number: u64, recorded: u64, is_removal: bool, next_number: u64| {
            let mut record = draft.record();
            (record.number, record.recorded) = (number, recorded);
            record.image.next_number = next_number;
            record.snapshot = record.snapshot.filter(|_| !is_removal);
            (BlobId::of(&record.to_bytes()), record)
        };
        let records: Vec<(BlobId, Record)> = vec![
            of(1, 100, false, 2),
            of(2, 200, false, 70),
            // Recorded by a host whose clock is late.
            of(2, 150, true, 70),
            of(3, 300, false, 4),
        ];
        let rebuilt = catalog.rebuild(records).unwrap();
        assert_eq!((rebuilt.images, rebuilt.snapshots), (1, 2));
        let all = catalog.snapshots(&name).unwrap();
        assert_eq!(all.iter().map(|one| one.number).collect::<Vec<_>>(), [1, 3]);
        let owner = crate::snapshot::MirrorOwner::this_process(
            crate::id::MirrorId::from_bytes([7; 16]),
            "/m",
        );
        let mode = crate::snapshot::Mode::ReadWrite;
        let (holder, ..) = catalog.attach(&owner.unwrap(), &all[0], mode).unwrap();
        assert_eq!(catalog.reserve(&holder, 1).unwrap().start, 70);
    }
}
