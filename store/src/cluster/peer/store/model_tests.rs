//! Model tests: after any sequence of puts, flushes, deletions, damage, scrubs and kills, what was
//! flushed is there, and what was deleted or found bad is not.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::{
    Just, ProptestConfig, Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use tempfile::TempDir;

use crate::cluster::peer::PeerStore;
use crate::cluster::protocol::FragmentId;
use crate::encoding::Redundancy;
use crate::encoding::fragment::{Fragment, encode, encode_record};
use crate::id::BlobId;

/// Fragments of blobs of different lengths. Some blobs have several, and some are records.
fn fragment(number: u8) -> Fragment {
    let len = [40, 5000, 4096 * 4, 70_000][usize::from(number / 2 % 4)];
    let mut content = vec![0; len];
    blake3::Hasher::new().update(&[number / 2]).finalize_xof().fill(&mut content);
    let code = Redundancy::ReedSolomon { data: 2, parity: 2 };
    let blob = BlobId::of(&content);
    let (description, blocks) = match number / 8 % 2 {
        0 => encode(&blob, &content, code),
        _ => encode_record(&blob, &content, code),
    };
    let index = number % 2;
    Fragment { description, index, block: blocks.share(index.into()) }
}

fn id(number: u8) -> FragmentId {
    let Fragment { description, index, .. } = fragment(number);
    FragmentId { blob: description.blob, encoding: description.id(), index }
}

#[derive(Clone, Debug)]
enum Step {
    Put(Vec<u8>),
    Flush,
    Settle,
    Delete(Vec<u8>),
    Close,
    /// The process is killed.
    Kill,
    /// The process is killed, and the table is lost.
    LoseTable,
    /// A bit of a block is flipped.
    Damage(u8),
    /// A bit of a block is flipped, and its fragment is put.
    DamageAndPut(u8),
    /// A round of the scrub begins, and continues up to this many steps.
    Scrub(u8),
    /// The round continues until it is over.
    EndScrub,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => vec(0u8..24, 1..8).prop_map(Step::Put),
        4 => Just(Step::Flush),
        1 => Just(Step::Settle),
        4 => vec(0u8..24, 1..6).prop_map(Step::Delete),
        1 => Just(Step::Close),
        2 => Just(Step::Kill),
        1 => Just(Step::LoseTable),
        3 => (0u8..24).prop_map(Step::Damage),
        2 => (0u8..24).prop_map(Step::DamageAndPut),
        2 => (0u8..6).prop_map(Step::Scrub),
        2 => Just(Step::EndScrub),
    ]
}

/// A copy of what another process finds after a kill.
fn copy(from: &Path) -> TempDir {
    let to = TempDir::new().unwrap();
    fs::create_dir(to.path().join("segments")).unwrap();
    for part in ["", "segments"] {
        for entry in fs::read_dir(from.join(part)).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_file() && entry.file_name() != "fragments.db-shm" {
                fs::copy(entry.path(), to.path().join(part).join(entry.file_name())).unwrap();
            }
        }
    }
    to
}

fn lose_table(dir: &Path) {
    for file in ["fragments.db", "fragments.db-wal"] {
        let _ = fs::remove_file(dir.join(file));
    }
}

/// The record of a group whose last blocks were deleted still says what was there. If a later group
/// were written there, with the same block at the same position, its record would be taken for a
/// part of that block.
#[test]
fn a_group_is_not_written_where_an_older_one_was() {
    let dir = TempDir::new().unwrap();
    let put = |store: &PeerStore, numbers: &[u8]| {
        let all: Vec<_> = numbers.iter().map(|number| fragment(*number)).collect();
        store.put(&all).unwrap().into_iter().for_each(Result::unwrap);
        store.flush().unwrap();
    };
    let again = |store: PeerStore| {
        drop(store);
        lose_table(dir.path());
        PeerStore::open(dir.path(), None).unwrap()
    };
    let store = PeerStore::open(dir.path(), None).unwrap();
    put(&store, &[0, 1, 8]);
    store.delete(&[id(1), id(8)], 0).unwrap();
    let store = again(store);
    put(&store, &[8, 9]);
    let store = again(store);
    let model = [0, 8, 9].map(|number| (number, Expected::Stored));
    check(&store, &BTreeMap::from(model)).unwrap();
}

/// Flips a bit of a fragment's block, wherever it is.
fn damage(dir: &Path, number: u8) {
    let block = fragment(number).block;
    for entry in fs::read_dir(dir.join("segments")).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        for at in (0..bytes.len()).step_by(4096) {
            if bytes[at..].starts_with(&block) {
                let file = fs::File::options().write(true).open(&path).unwrap();
                file.write_all_at(&[block[3] ^ 1], at as u64 + 3).unwrap();
            }
        }
    }
}

/// Continues a round of the scrub up to this many steps.
fn scrub(store: &PeerStore, steps: usize) {
    for _ in 0..steps {
        if store.scrub_round().is_none_or(|round| round.is_over) {
            return;
        }
        store.scrub_step(1, Duration::ZERO, &|_| true).unwrap();
    }
}

/// A fragment as the peer has it: `None` if it has none, and whether it is whole.
fn found(store: &PeerStore, number: u8) -> Option<bool> {
    let wanted = fragment(number);
    let is_it = |one: &Fragment| one.index == wanted.index && one.description == wanted.description;
    let all = store.get(&wanted.description.blob).unwrap();
    all.into_iter().find(is_it).map(|one| one == wanted)
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Expected {
    /// It was put and not flushed.
    Staged,
    Stored,
    Damaged,
    /// It was stored and damaged, and was put again.
    Replacing,
}

/// Marks what was put as stored.
fn flushed(model: &mut BTreeMap<u8, Expected>) {
    for expected in model.values_mut() {
        if matches!(expected, Expected::Staged | Expected::Replacing) {
            *expected = Expected::Stored;
        }
    }
}

fn check(
    store: &PeerStore,
    model: &BTreeMap<u8, Expected>,
) -> Result<(), proptest::test_runner::TestCaseError> {
    let mut known = 0;
    for number in 0..24 {
        let wanted = fragment(number);
        let found = store.get(&wanted.description.blob).unwrap();
        let found = found
            .into_iter()
            .find(|one| one.index == wanted.index && one.description == wanted.description);
        let expected = model.get(&number).copied();
        known += usize::from(matches!(
            expected,
            Some(Expected::Stored | Expected::Damaged | Expected::Replacing)
        ));
        match expected {
            None | Some(Expected::Staged) => {
                prop_assert!(found.is_none(), "fragment {number} is present")
            }
            Some(Expected::Stored) => {
                prop_assert_eq!(found, Some(wanted), "fragment {} is not present", number)
            }
            Some(Expected::Damaged | Expected::Replacing) => {
                prop_assert!(
                    found.is_some_and(|one| one != wanted),
                    "fragment {number} is not damaged"
                );
            }
        }
    }
    let (mut after, mut listed) = (BlobId::from_bytes([0; 32]), 0);
    loop {
        let page = store.list(&after, 0).unwrap();
        let Some((last, _)) = page.last() else { break };
        (after, listed) = (*last, listed + page.len());
    }
    prop_assert_eq!(listed, known, "the number of listed fragments");
    prop_assert_eq!(
        store.usage().unwrap().fragments,
        known as u64,
        "the number of counted fragments"
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn only_deleted_fragments_are_gone(steps in vec(step(), 1..60)) {
        let mut dir = TempDir::new().unwrap();
        let mut store = Some(PeerStore::open(dir.path(), None).unwrap());
        let mut model = BTreeMap::<u8, Expected>::new();
        // The damaged fragments that were found bad.
        let mut bad = 0;
        for step in steps {
            let open = store.as_ref().unwrap();
            match step {
                Step::Put(numbers) => {
                    let all: Vec<_> = numbers.iter().map(|number| fragment(*number)).collect();
                    open.put(&all).unwrap().into_iter().for_each(Result::unwrap);
                    for number in numbers {
                        let expected = model.entry(number).or_insert(Expected::Staged);
                        if *expected == Expected::Damaged {
                            *expected = Expected::Replacing;
                        }
                    }
                }
                Step::Flush => {
                    open.flush().unwrap();
                    flushed(&mut model);
                }
                Step::Settle => open.settle(false).unwrap(),
                Step::Delete(numbers) => {
                    // The model does not know whether a put relies on a fragment, so it flushes
                    // first.
                    open.flush().unwrap();
                    flushed(&mut model);
                    let ids: Vec<_> = numbers.iter().map(|number| id(*number)).collect();
                    open.delete(&ids, 0).unwrap();
                    model.retain(|number, _| !numbers.contains(number));
                }
                Step::Damage(number) | Step::DamageAndPut(number) => {
                    if model.get(&number) == Some(&Expected::Stored) {
                        // A put that relies on the fragment may have verified it before.
                        open.flush().unwrap();
                        flushed(&mut model);
                        damage(dir.path(), number);
                        model.insert(number, Expected::Damaged);
                    }
                    let is_damaged = model.get(&number) == Some(&Expected::Damaged);
                    if is_damaged && matches!(step, Step::DamageAndPut(_)) {
                        open.put(&[fragment(number)]).unwrap().remove(0).unwrap();
                        model.insert(number, Expected::Replacing);
                    }
                }
                Step::Scrub(steps) => {
                    open.begin_scrub(1).unwrap();
                    scrub(open, steps.into());
                    model.retain(|number, expected| {
                        let stays = *expected != Expected::Damaged || found(open, *number).is_some();
                        bad += u64::from(!stays);
                        stays
                    });
                }
                Step::EndScrub => {
                    scrub(open, usize::MAX);
                    open.settle(false).unwrap();
                    open.begin_scrub(1).unwrap();
                    scrub(open, usize::MAX);
                    // A put has not ended that replaces a damaged fragment, so that one stays.
                    let before = model.len();
                    model.retain(|_, expected| *expected != Expected::Damaged);
                    bad += (before - model.len()) as u64;
                }
                Step::Close | Step::Kill | Step::LoseTable => {
                    // After a kill, what was not flushed may be present or not. From here on the
                    // model knows.
                    let killed = !matches!(step, Step::Close);
                    let next = match killed {
                        true => copy(dir.path()),
                        false => std::mem::replace(&mut dir, TempDir::new().unwrap()),
                    };
                    drop(store.take());
                    dir = next;
                    if matches!(step, Step::LoseTable) {
                        lose_table(dir.path());
                    }
                    let open = store.insert(PeerStore::open(dir.path(), None).unwrap());
                    let found = |number: u8| found(open, number);
                    let lost = matches!(step, Step::LoseTable);
                    model.retain(|number, expected| match expected {
                        Expected::Staged => {
                            *expected = Expected::Stored;
                            found(*number) == Some(true)
                        }
                        // A damaged fragment is not found again, unless the table knows it.
                        Expected::Damaged => !lost && found(*number).is_some(),
                        Expected::Replacing => {
                            let found = found(*number);
                            *expected = match found {
                                Some(true) => Expected::Stored,
                                _ => Expected::Damaged,
                            };
                            found == Some(true) || !lost && found.is_some()
                        }
                        _ => true,
                    });
                    if lost {
                        bad = 0;
                    }
                }
            }
            check(store.as_ref().unwrap(), &model)?;
            let found_bad = store.as_ref().unwrap().scrub_status().bad;
            prop_assert_eq!(found_bad, bad, "the number of bad fragments");
        }
        // An empty store takes no space except where the next group goes.
        let store = store.unwrap();
        store.flush().unwrap();
        store.delete(&(0..24).map(id).collect::<Vec<_>>(), 0).unwrap();
        prop_assert_eq!(store.usage().unwrap().used, 0);
        let taken: u64 = fs::read_dir(dir.path().join("segments"))
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512)
            .sum();
        prop_assert!(taken <= 4 << 20, "{taken}");
    }
}
