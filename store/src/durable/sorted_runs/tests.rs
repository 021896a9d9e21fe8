//! Tests of the external sort, with buffers and blocks so small that there are many runs.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use tempfile::TempDir;

use super::{RunSorter, SortedRuns};
use crate::error::{Error, ErrorKind};

const N: usize = 6;
const KEY: usize = 4;

fn sorted(directory: &Path, entries: &[[u8; N]], most: usize) -> SortedRuns<N> {
    let mut sorter = RunSorter::new(directory, KEY, most);
    entries.iter().for_each(|entry| sorter.push(*entry));
    sorter.finish().unwrap()
}

fn read(runs: &SortedRuns<N>) -> Vec<[u8; N]> {
    runs.read().unwrap().map(Result::unwrap).collect()
}

/// Different entries in no order.
fn many(count: u32) -> Vec<[u8; N]> {
    let entry = |number: u32| {
        let [a, b, c, d] = number.wrapping_mul(0x9e37_79b9).to_be_bytes();
        [a, b, c, d, 1, 2]
    };
    (0..count).map(entry).collect()
}

proptest! {
    /// Few different keys, so that equal ones meet in the buffer, in a merge of runs, and in the last
    /// merge.
    #[test]
    fn entries_come_in_order_and_the_greatest_of_each_key_counts(
        entries in vec((0u16..200, any::<[u8; 2]>()), 0..500),
        most in 3usize..60,
        sought in vec(0u16..220, 0..30),
    ) {
        let directory = TempDir::new().unwrap();
        let entry = |(key, rest): &(u16, [u8; 2])| -> [u8; N] {
            let [high, low] = key.to_be_bytes();
            [0, high, low, 7, rest[0], rest[1]]
        };
        let entries: Vec<[u8; N]> = entries.iter().map(entry).collect();
        let mut model: BTreeMap<[u8; KEY], [u8; N]> = BTreeMap::new();
        for entry in &entries {
            let kept = model.entry(entry[..KEY].try_into().unwrap()).or_insert(*entry);
            *kept = (*kept).max(*entry);
        }
        let runs = sorted(directory.path(), &entries, most);
        let expected: Vec<_> = model.values().copied().collect();
        prop_assert_eq!(&read(&runs), &expected);
        prop_assert_eq!(&read(&runs), &expected, "a second time");
        prop_assert_eq!(runs.is_empty(), entries.is_empty());
        let mut sought: Vec<[u8; KEY]> = sought
            .iter()
            .map(|key| entry(&(*key, [0; 2]))[..KEY].try_into().unwrap())
            .collect();
        sought.sort_unstable();
        let mut reading = runs.read().unwrap();
        for key in sought {
            let found = model.range(key..).next().map(|(_, entry)| *entry);
            prop_assert_eq!(reading.seek(&key).unwrap(), found);
        }
        prop_assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "files with names");
    }
}

#[test]
fn runs_are_merged_so_that_few_files_are_open() {
    let directory = TempDir::new().unwrap();
    let entries = many(2000);
    let runs = sorted(directory.path(), &entries, 10);
    // 199 runs of 10 entries: 2 * 81 + 1 * 27 + 1 * 9 + 0 * 3 + 1.
    assert_eq!(runs.runs.iter().map(|run| run.level).collect::<Vec<_>>(), [4, 4, 3, 2, 0]);
    let mut expected = entries;
    expected.sort_unstable();
    assert_eq!(read(&runs), expected);
}

#[test]
fn few_entries_need_no_file() {
    let nowhere = Path::new("/nonexistent");
    let entries = many(100);
    assert_eq!(read(&sorted(nowhere, &entries, 100)).len(), 100);
    // Duplicates do not count.
    let twice: Vec<_> = entries[..50].iter().chain(&entries[..50]).copied().collect();
    assert_eq!(read(&sorted(nowhere, &twice, 100)).len(), 50);
}

#[test]
fn a_directory_that_takes_no_file_is_an_error_that_says_what_to_do() {
    let mut sorter = RunSorter::<N>::new(Path::new("/nonexistent"), KEY, 10);
    many(100).into_iter().for_each(|entry| sorter.push(entry));
    assert!(sorter.buffer.is_empty(), "nothing is kept after a failure");
    let Err(error) = sorter.finish() else { panic!("the entries are nowhere") };
    assert!(
        matches!(&error, Error::TemporaryFiles { directory, .. } if directory.ends_with("nonexistent"))
    );
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("TMPDIR"), "{error}");
}

#[test]
fn a_block_that_changed_is_an_error_and_never_another_entry() {
    let directory = TempDir::new().unwrap();
    let runs = sorted(directory.path(), &many(500), 100);
    let run = &runs.runs[0];
    let mut byte = [0];
    run.file.read_exact_at(&mut byte, 1000).unwrap();
    run.file.write_all_at(&[byte[0] ^ 4], 1000).unwrap();
    let all: Vec<_> = runs.read().unwrap().collect();
    let (last, before) = all.split_last().unwrap();
    assert!(before.iter().all(Result::is_ok) && last.is_err(), "it ends with the error");
    // A file that became shorter.
    run.file.set_len(700).unwrap();
    assert!(runs.read().and_then(|all| all.collect::<Result<Vec<_>, _>>()).is_err());
}
