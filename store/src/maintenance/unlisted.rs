//! Snapshots that the peers have records of and the catalog does not have, and the other way round.
//!
//! A catalog that was lost, and is not yet rebuilt, refers to nothing or to a part of what there is.
//! Content that it does not refer to is not garbage then. The peers' records show that: a snapshot with
//! a record and without a tombstone exists. And a snapshot that the catalog has with its content although
//! it has a tombstone was removed: the catalog was restored from an older copy.

use std::ops::Range;

use super::records::each_record;
use crate::catalog::{Catalog, RecordSubject};
use crate::cluster::membership::Peer;
use crate::cluster::repair::ConnectedPeers;
use crate::durable::sorted_runs::{RunSorter, SortedRuns, temporary_directory};
use crate::error::Result;
use crate::id::ImageId;

/// The image's id, the snapshot's number, one of the values below, and the number behind the last one
/// that the entry is about. Numbers have their highest byte first.
const ENTRY: usize = 16 + 8 + 1 + 8;

/// The most entries in memory: 33 MiB.
const MAX_ENTRIES: usize = if cfg!(test) { 8 } else { 1 << 20 };

/// The snapshot was removed. With the number 0, the whole image was.
const REMOVED: u8 = 0;
/// The catalog has the snapshot.
const LISTED: u8 = 1;
/// A record describes the snapshot.
const RECORDED: u8 = 2;
/// After the records were read, the catalog had the snapshot with its content.
const PRESENT: u8 = 3;

/// Snapshots of which the catalog and the records on the peers say different things.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Disagreement {
    /// Records describe them, no tombstone removes them, and the catalog does not have them.
    pub(super) unlisted: u64,
    /// The catalog has them, and a tombstone says that they were removed. A removal changes the catalog
    /// before it stores the tombstone, so the catalog was restored from an older copy.
    pub(super) revived: u64,
}

/// Compares the catalog with the records on the peers. Fails if a live peer does not list its records,
/// or has one that cannot be read.
pub(super) async fn compare_with_records(
    catalog: &Catalog,
    connected: &ConnectedPeers,
    peers: &[Peer],
) -> Result<Disagreement> {
    let mut all = RunSorter::new(&temporary_directory(), ENTRY, MAX_ENTRIES);
    // Before and after the records are read: snapshots are announced and removed meanwhile.
    catalog.each_snapshot_id(|image, number, _| all.push(entry(image, number, LISTED)))?;
    each_record(connected, peers, |record| {
        match RecordSubject::of(record)? {
            RecordSubject::Snapshot { image, number, has_content: true } => {
                all.push(entry(&image, number, RECORDED));
            }
            RecordSubject::Removal { image, number, .. } => {
                all.push(entry(&image, number, REMOVED));
            }
            RecordSubject::ImageRemoval(image) => all.push(entry(&image, 0, REMOVED)),
            RecordSubject::Summary(image, summary) => {
                let removed = summary.removed.iter();
                removed.for_each(|range| all.push(range_entry(&image, range, REMOVED)));
            }
            RecordSubject::Snapshot { .. } | RecordSubject::Mirror { .. } => {}
        }
        Ok(())
    })
    .await?;
    catalog.each_snapshot_id(|image, number, is_present| {
        all.push(entry(image, number, LISTED));
        if is_present {
            all.push(entry(image, number, PRESENT));
        }
    })?;
    count(&all.finish()?)
}

fn entry(image: &ImageId, number: u64, what: u8) -> [u8; ENTRY] {
    range_entry(image, number..number + 1, what)
}

fn range_entry(image: &ImageId, numbers: Range<u64>, what: u8) -> [u8; ENTRY] {
    let mut entry = [0; ENTRY];
    entry[..16].copy_from_slice(image.as_bytes());
    entry[16..24].copy_from_slice(&numbers.start.to_be_bytes());
    entry[24] = what;
    entry[25..].copy_from_slice(&numbers.end.to_be_bytes());
    entry
}

/// Counts the snapshots that are only recorded, or present and removed. What removes or lists a
/// snapshot precedes its record, which precedes its presence, and the removal of an image precedes all
/// its snapshots.
fn count(all: &SortedRuns<ENTRY>) -> Result<Disagreement> {
    let number = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().expect("8 bytes"));
    // The image that the entries are about, and the numbers below which its snapshots are removed, and
    // accounted for, since the last entry.
    let (mut image, mut removed, mut accounted) = (None, 0, 0);
    let mut found = Disagreement::default();
    for entry in all.read()? {
        let entry = entry?;
        let (start, what, end) = (number(&entry[16..24]), entry[24], number(&entry[25..]));
        if image != Some(entry[..16].to_vec()) {
            (image, removed, accounted) = (Some(entry[..16].to_vec()), 0, 0);
        }
        match what {
            REMOVED if start == 0 => (removed, accounted) = (u64::MAX, u64::MAX),
            REMOVED => (removed, accounted) = (removed.max(end), accounted.max(end)),
            LISTED => accounted = accounted.max(end),
            PRESENT if start < removed => found.revived += 1,
            RECORDED if start >= accounted => found.unlisted += 1,
            _ => {}
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::{
        Disagreement, ENTRY, LISTED, PRESENT, RECORDED, REMOVED, RunSorter, count, entry,
        range_entry,
    };
    use crate::id::ImageId;

    #[test]
    fn a_recorded_snapshot_counts_unless_it_is_listed_or_removed_or_its_image_is() {
        let directory = TempDir::new().unwrap();
        let [one, other] = [1, 2].map(|byte| ImageId::from_bytes([byte; 16]));
        type Entries<'a> = &'a [(&'a ImageId, u64, u8)];
        let cases: [(Entries<'_>, u64); 6] = [
            (&[], 0),
            (&[(&one, 1, RECORDED), (&one, 2, RECORDED), (&other, 1, LISTED)], 2),
            (&[(&one, 1, RECORDED), (&one, 1, LISTED), (&one, 2, LISTED)], 0),
            (&[(&one, 1, RECORDED), (&one, 1, REMOVED), (&one, 2, RECORDED)], 1),
            (&[(&one, 1, RECORDED), (&one, 2, RECORDED), (&one, 0, REMOVED)], 0),
            (&[(&other, 0, REMOVED), (&one, 256, RECORDED), (&other, 1, RECORDED)], 1),
        ];
        for (entries, expected) in cases {
            let mut all = RunSorter::<ENTRY>::new(directory.path(), ENTRY, 2);
            entries.iter().for_each(|(image, number, what)| all.push(entry(image, *number, *what)));
            let found = count(&all.finish().unwrap()).unwrap();
            assert_eq!(found, Disagreement { unlisted: expected, revived: 0 }, "{entries:?}");
        }
        let mut all = RunSorter::<ENTRY>::new(directory.path(), ENTRY, 2);
        for number in 1..4 {
            for what in [LISTED, RECORDED, PRESENT] {
                all.push(entry(&one, number, what));
                all.push(entry(&other, number, what));
            }
        }
        all.push(entry(&one, 0, REMOVED));
        all.push(entry(&other, 2, REMOVED));
        let found = count(&all.finish().unwrap()).unwrap();
        assert_eq!(found, Disagreement { unlisted: 0, revived: 3 + 1 });
    }

    #[test]
    fn a_range_of_removals_accounts_for_its_numbers_in_its_image_only() {
        let directory = TempDir::new().unwrap();
        let [one, other] = [1, 2].map(|byte| ImageId::from_bytes([byte; 16]));
        let mut all = RunSorter::<ENTRY>::new(directory.path(), ENTRY, 2);
        all.push(range_entry(&one, 3..9, REMOVED));
        all.push(range_entry(&one, 4..5, REMOVED));
        for number in [2, 3, 5, 8, 9, 300] {
            all.push(entry(&one, number, RECORDED));
            all.push(entry(&other, number, RECORDED));
        }
        all.push(entry(&one, 300, LISTED));
        all.push(entry(&one, 5, PRESENT));
        all.push(entry(&other, 5, PRESENT));
        let found = count(&all.finish().unwrap()).unwrap();
        assert_eq!(found, Disagreement { unlisted: 2 + 6, revived: 1 });
    }
}
