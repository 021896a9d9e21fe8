//! The blobs that repair must find, sorted by name: see `durable::sorted_runs`.
//!
//! An entry has 36 bytes:
//!
//! | bytes | are |
//! |---|---|
//! | 0 to 31 | the blob's name |
//! | 32 | 1 for a record, else 0 |
//! | 33, 34 | the numbers of data and parity blocks; 1 and 0 for copies |
//! | 35 | the number of copies, else 0 |
//!
//! The last byte is not part of the key: of several numbers of copies, the largest counts.

use std::path::Path;

use crate::cluster::repair::Wanted;
use crate::durable::sorted_runs::{RunSorter, SortedEntries, SortedRuns, temporary_directory};
use crate::encoding::Redundancy;
use crate::encoding::fragment::Kind;
use crate::error::Result;
use crate::id::BlobId;

/// The most entries in memory: 36 MiB.
const MAX_ENTRIES: usize = if cfg!(test) { 8 } else { 1 << 20 };

/// The length of an entry.
const ENTRY: usize = KEY + 1;

/// The length of an entry's key: the name, the kind and the numbers of blocks.
pub(super) const KEY: usize = 35;

/// The most names in memory: 32 MiB.
const MAX_NAMES: usize = if cfg!(test) { 8 } else { 1 << 20 };

/// Blobs that are wanted, in any order.
pub struct WantedBlobs(RunSorter<ENTRY>);

impl WantedBlobs {
    /// No blobs. Temporary files are created in the directory `TMPDIR`, or else in `/var/tmp`.
    #[expect(clippy::new_without_default, reason = "it depends on the environment")]
    pub fn new() -> WantedBlobs {
        WantedBlobs::within(&temporary_directory())
    }

    /// No blobs. Temporary files are created in this directory.
    pub fn within(directory: &Path) -> WantedBlobs {
        WantedBlobs(RunSorter::new(directory, KEY, MAX_ENTRIES))
    }

    /// Adds a blob. It counts once for each kind and number of blocks. Of several numbers of copies,
    /// the largest counts.
    pub fn add(&mut self, wanted: &Wanted) {
        self.0.push(entry(wanted));
    }

    /// Ends the blobs. Fails if temporary files could not be written.
    pub fn finish(self) -> Result<SortedWanted> {
        self.0.finish().map(SortedWanted)
    }
}

/// Blobs that are wanted, in the order of their names.
pub struct SortedWanted(SortedRuns<ENTRY>);

impl SortedWanted {
    /// Reads the blobs.
    pub fn read(&self) -> Result<impl Iterator<Item = Result<Wanted>>> {
        Ok(self.0.read()?.map(|entry| entry.map(|entry| wanted(&entry))))
    }

    /// The blobs as [`Lookup`] compares them.
    pub(super) fn lookup(&self) -> Result<Lookup<'_>> {
        self.0.read().map(Lookup)
    }
}

/// Looks blobs up in ascending order.
pub(super) struct Lookup<'a>(SortedEntries<'a, ENTRY>);

impl Lookup<'_> {
    /// Whether a blob is wanted with this key, and with at least this many copies.
    pub(super) fn has(&mut self, key: &[u8; KEY], copies: u8) -> Result<bool> {
        let found = self.0.seek(key)?;
        Ok(found.is_some_and(|entry| entry[..KEY] == *key && entry[KEY] >= copies))
    }
}

/// A wanted blob as the bytes of its entry: the key, and the number of copies.
pub(super) fn key(wanted: &Wanted) -> ([u8; KEY], u8) {
    let (data, parity, copies) = match wanted.redundancy {
        Redundancy::Replicas(copies) => (1, 0, copies),
        Redundancy::ReedSolomon { data, parity } => (data, parity, 0),
    };
    let mut key = [0; KEY];
    key[..32].copy_from_slice(wanted.blob.as_bytes());
    key[32..].copy_from_slice(&[u8::from(wanted.kind == Kind::Record), data, parity]);
    (key, copies)
}

fn entry(wanted: &Wanted) -> [u8; ENTRY] {
    let (key, copies) = key(wanted);
    let mut entry = [copies; ENTRY];
    entry[..KEY].copy_from_slice(&key);
    entry
}

fn wanted(entry: &[u8; ENTRY]) -> Wanted {
    let (name, [is_record, data, parity, copies]) = entry
        .split_first_chunk::<32>()
        .and_then(|(name, rest)| Some((name, rest.first_chunk()?)))
        .expect("36 bytes");
    Wanted {
        blob: BlobId::from_bytes(*name),
        kind: if *is_record == 1 { Kind::Record } else { Kind::Content },
        redundancy: match *copies {
            0 => Redundancy::ReedSolomon { data: *data, parity: *parity },
            copies => Redundancy::Replicas(copies),
        },
    }
}

/// Names of blobs, in any order.
pub(super) fn names() -> RunSorter<32> {
    RunSorter::new(&temporary_directory(), 32, MAX_NAMES)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::collection::vec;
    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::{Redundancy, Wanted, WantedBlobs, key};
    use crate::encoding::fragment::Kind;
    use crate::id::BlobId;

    /// The blobs as repair gets them.
    fn sorted(all: &[Wanted]) -> Vec<Wanted> {
        let directory = TempDir::new().unwrap();
        let mut wanted = WantedBlobs::within(directory.path());
        all.iter().for_each(|one| wanted.add(one));
        wanted.finish().unwrap().read().unwrap().map(Result::unwrap).collect()
    }

    #[test]
    fn a_blob_is_wanted_once_for_each_kind_and_each_way_to_cut_it() {
        let blob = BlobId::of(b"one");
        let content = ["replicas=2", "rs=4+4", "replicas=3", "none", "rs=2+2", "rs=4+4"];
        let content = content.map(|text| Wanted::content(blob, text.parse().unwrap()));
        let record = [Wanted::record(blob, "replicas=5".parse().unwrap())];
        let found = sorted(&[&content[..], &record].concat());
        let mut all: Vec<String> = found.iter().map(|one| one.redundancy.to_string()).collect();
        all.sort();
        assert_eq!(all, ["replicas=3", "replicas=5", "rs=2+2", "rs=4+4"]);
    }

    fn redundancy() -> impl Strategy<Value = Redundancy> {
        prop_oneof![
            (1u8..=32).prop_map(Redundancy::Replicas),
            (1u8..=16, 1u8..=16)
                .prop_map(|(data, parity)| Redundancy::ReedSolomon { data, parity }),
        ]
    }

    proptest! {
        #[test]
        fn wanted_blobs_are_the_same_as_in_a_map(
            all in vec((0u8..40, any::<bool>(), redundancy()), 0..300),
        ) {
            let wanted = |(blob, is_record, redundancy): &(u8, bool, Redundancy)| Wanted {
                blob: BlobId::of(&[*blob]),
                kind: if *is_record { Kind::Record } else { Kind::Content },
                redundancy: *redundancy,
            };
            let all: Vec<Wanted> = all.iter().map(wanted).collect();
            // As repair wants them: by name, kind, and numbers of data and parity blocks.
            let mut model: BTreeMap<(BlobId, bool, usize, usize), Wanted> = BTreeMap::new();
            for one in &all {
                let (data, parity) = match one.redundancy {
                    Redundancy::Replicas(_) => (1, 0),
                    code => (code.needed(), code.survives()),
                };
                let is_record = one.kind == Kind::Record;
                let kept = model.entry((one.blob, is_record, data, parity)).or_insert(*one);
                if one.redundancy.width() > kept.redundancy.width() {
                    *kept = *one;
                }
            }
            let expected: Vec<Wanted> = model.into_values().collect();
            prop_assert_eq!(sorted(&all), expected);
        }

        #[test]
        fn a_lookup_finds_exactly_what_is_wanted_with_enough_copies(
            all in vec((0u8..20, 1u8..6), 0..60),
            asked in vec((0u8..20, 1u8..6), 0..60),
        ) {
            let wanted = |(blob, copies): &(u8, u8)| {
                Wanted::content(BlobId::of(&[*blob]), Redundancy::Replicas(*copies))
            };
            let directory = TempDir::new().unwrap();
            let mut sorter = WantedBlobs::within(directory.path());
            all.iter().for_each(|one| sorter.add(&wanted(one)));
            let sorted = sorter.finish().unwrap();
            let mut asked: Vec<_> = asked.iter().map(|one| (key(&wanted(one)), *one)).collect();
            asked.sort_unstable();
            let mut lookup = sorted.lookup().unwrap();
            for ((key, copies), (blob, _)) in asked {
                let most = all.iter().filter(|one| one.0 == blob).map(|one| one.1).max();
                prop_assert_eq!(lookup.has(&key, copies).unwrap(), most.unwrap_or(0) >= copies);
            }
        }
    }
}
