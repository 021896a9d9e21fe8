//! Blobs are deleted: their space comes back, and nothing else changes.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_assert, prop_oneof, proptest};
use tempfile::TempDir;

use super::segment::SEGMENT_SIZE;
use super::{Blobs, LocalBlobs};
use crate::cluster::Keep;
use crate::error::Error;
use crate::id::BlobId;

fn content(seed: u32, len: usize) -> Vec<u8> {
    let mut content = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut content);
    content
}

fn put(blobs: &LocalBlobs, contents: &[Vec<u8>]) -> Vec<BlobId> {
    let all: Vec<_> = contents.iter().map(|one| (BlobId::of(one), &one[..])).collect();
    blobs.put(&all, &Keep::default()).unwrap();
    all.into_iter().map(|(id, _)| id).collect()
}

fn delete(blobs: &LocalBlobs, ids: &[BlobId]) -> u64 {
    blobs.reclaim(blobs.forget(ids).unwrap())
}

fn open(dir: &Path) -> LocalBlobs {
    LocalBlobs::open(dir).unwrap()
}

fn create(dir: &TempDir) -> LocalBlobs {
    LocalBlobs::create(dir.path()).unwrap();
    open(dir.path())
}

fn has(blobs: &LocalBlobs, content: &[u8]) -> bool {
    let mut buf = vec![0; 1 << 20];
    match blobs.get(&BlobId::of(content), &mut buf) {
        Ok(len) => {
            assert!(buf[..len] == *content);
            true
        }
        Err(Error::MissingBlob { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

/// The bytes that the segments take on the disk.
fn taken(dir: &Path) -> u64 {
    let segments = fs::read_dir(dir.join("segments")).unwrap();
    segments.map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512).sum()
}

/// The file system may need blocks of its own for a file of many parts.
const PARTS: u64 = 8192;

fn lose_index(dir: &Path) {
    for file in ["index.db", "index.db-wal", "index.db-shm"] {
        let _ = fs::remove_file(dir.join(file));
    }
}

#[test]
fn the_space_of_deleted_blobs_comes_back() {
    let dir = TempDir::new().unwrap();
    let blobs = create(&dir);
    let all: Vec<_> = (0..40).map(|seed| content(seed, 100_000)).collect();
    let ids: Vec<_> = all.chunks(8).flat_map(|group| put(&blobs, group)).collect();
    blobs.flush().unwrap();
    let space = 40 * (100 << 10);
    assert_eq!((blobs.space().unwrap(), blobs.balance()), (space, space as i64));
    let before = taken(dir.path());
    // While this handle appends to the segment.
    assert_eq!(delete(&blobs, &ids[..20]), space / 2);
    assert_eq!((blobs.space().unwrap(), blobs.balance()), (space / 2, space as i64 / 2));
    assert!(taken(dir.path()) <= before - space / 2 + PARTS, "{before}");
    assert_eq!(delete(&blobs, &ids[..20]), 0, "they are gone");
    for (at, one) in all.iter().enumerate() {
        assert_eq!(has(&blobs, one), at >= 20);
    }
    drop(blobs);
    // When nobody does, nothing stays.
    let blobs = open(dir.path());
    assert_eq!(delete(&blobs, &ids[20..]), space / 2);
    assert_eq!(taken(dir.path()), 0);
    put(&blobs, &all[..1]);
    blobs.flush().unwrap();
    drop(blobs);
    assert!(has(&open(dir.path()), &all[0]), "the segment is continued");
    assert!(taken(dir.path()) <= 100 << 11);
}

#[test]
fn records_go_with_the_last_of_their_blobs_when_nobody_appends() {
    let dir = TempDir::new().unwrap();
    let blobs = create(&dir);
    // Groups of one: a record for each blob.
    let all: Vec<_> = (0..20).map(|seed| content(seed, 4096)).collect();
    let ids: Vec<_> = all.iter().flat_map(|one| put(&blobs, std::slice::from_ref(one))).collect();
    blobs.flush().unwrap();
    drop(blobs);
    let blobs = open(dir.path());
    let before = taken(dir.path());
    assert_eq!(before, 20 * 8192);
    assert_eq!(delete(&blobs, &ids[4..14]), 10 * 4096);
    let after = taken(dir.path());
    assert!(after <= 10 * 8192 + PARTS, "ten blobs, each with its record: {after}");
    drop(blobs);
    lose_index(dir.path());
    let blobs = open(dir.path());
    for (at, one) in all.iter().enumerate() {
        assert_eq!(has(&blobs, one), !(4..14).contains(&at), "{at}");
    }
}

#[test]
fn a_full_segment_that_holds_nothing_is_removed() {
    let dir = TempDir::new().unwrap();
    let blobs = create(&dir);
    let ids = put(&blobs, &[content(1, 5000)]);
    blobs.flush().unwrap();
    drop(blobs);
    let index = rusqlite::Connection::open(dir.path().join("index.db")).unwrap();
    index.execute("UPDATE segments SET length = ?", [SEGMENT_SIZE]).unwrap();
    let blobs = open(dir.path());
    delete(&blobs, &ids);
    let segments = || fs::read_dir(dir.path().join("segments")).unwrap().count();
    assert_eq!(segments(), 0);
    put(&blobs, &[content(1, 5000)]);
    blobs.flush().unwrap();
    assert!(has(&open(dir.path()), &content(1, 5000)));
    let number: u64 = index.query_row("SELECT number FROM segments", [], |row| row.get(0)).unwrap();
    assert_eq!(number, 2, "a number is not used again");
}

#[test]
fn what_is_not_flushed_is_not_deleted() {
    let dir = TempDir::new().unwrap();
    let blobs = create(&dir);
    let ids = put(&blobs, &[content(1, 5000)]);
    assert_eq!(delete(&blobs, &ids), 0);
    blobs.flush().unwrap();
    assert!(has(&blobs, &content(1, 5000)));
    assert_eq!(delete(&blobs, &ids), 8192);
    assert!(!has(&blobs, &content(1, 5000)));
    put(&blobs, &[content(1, 5000)]);
    assert!(has(&blobs, &content(1, 5000)), "it can be put again");
}

#[test]
fn an_index_that_keeps_failing_does_not_let_more_and_more_be_written() {
    let dir = TempDir::new().unwrap();
    let blobs = create(&dir);
    let database = rusqlite::Connection::open(dir.path().join("index.db")).unwrap();
    put(&blobs, &[content(0, 4096)]);
    database.execute_batch("ALTER TABLE blobs RENAME TO away").unwrap();
    let all: Vec<_> = (1..18).map(|seed| content(seed, 4 << 20)).collect();
    // What asks the index fails before it writes, so what is full is made so here.
    database.execute_batch("ALTER TABLE away RENAME TO blobs; PRAGMA user_version = 1").unwrap();
    database
        .execute_batch(
            "CREATE TRIGGER full BEFORE INSERT ON blobs BEGIN SELECT RAISE(FAIL, 'no'); END",
        )
        .unwrap();
    let refused =
        all.iter().position(|one| blobs.put(&[(BlobId::of(one), one)], &Keep::default()).is_err());
    assert_eq!(refused, Some(15), "when 64 MiB wait");
    let written = fs::metadata(dir.path().join("segments/00000001")).unwrap().len();
    for _ in 0..3 {
        let last = &all[16];
        blobs.put(&[(BlobId::of(last), last)], &Keep::default()).unwrap_err();
    }
    assert_eq!(fs::metadata(dir.path().join("segments/00000001")).unwrap().len(), written);
    database.execute_batch("DROP TRIGGER full").unwrap();
    put(&blobs, &all[16..]);
    blobs.flush().unwrap();
    drop(blobs);
    let blobs = open(dir.path());
    assert_eq!(blobs.space().unwrap(), 17 * (4 << 20) + 4096);
}

#[derive(Clone, Debug)]
enum Step {
    Put(Vec<(u32, usize)>),
    Flush,
    Delete(Vec<u32>),
    /// Deleted from the index alone, as a crash leaves it.
    Forget(Vec<u32>),
    Reopen,
    LoseIndex,
}

fn step() -> impl Strategy<Value = Step> {
    // One is empty.
    let lens = [64, 33, 100, 4096, 5000, 20_000];
    let len = move |seed: u32| if seed == 0 { 0 } else { lens[seed as usize % 6] };
    let blob = (0u32..24).prop_map(move |seed| (seed, len(seed)));
    prop_oneof![
        4 => vec(blob, 1..6).prop_map(Step::Put),
        3 => Just(Step::Flush),
        4 => vec(0u32..24, 1..6).prop_map(Step::Delete),
        1 => vec(0u32..24, 1..3).prop_map(Step::Forget),
        1 => Just(Step::Reopen),
        1 => Just(Step::LoseIndex),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is put, deleted, closed and lost: what was flushed and not deleted is there, and what was
    /// deleted is not, unless the index was made again from the segments.
    #[test]
    fn only_what_was_deleted_is_gone(steps in vec(step(), 1..40), two in any::<bool>()) {
        let dir = TempDir::new().unwrap();
        let mut blobs = create(&dir);
        // Another handle that appends to a segment of its own.
        let other = two.then(|| open(dir.path()));
        let other = other.inspect(|other| drop(put(other, &[content(1000, 9000)])));
        // What is known: flushed, or not yet.
        let mut model = BTreeMap::<u32, (usize, bool)>::new();
        let mut deleted = BTreeMap::<u32, usize>::new();
        for step in steps {
            match step {
                Step::Put(all) => {
                    let contents: Vec<_> = all.iter().map(|(seed, len)| content(*seed, *len)).collect();
                    put(&blobs, &contents);
                    for (seed, len) in all {
                        model.entry(seed).or_insert((len, false));
                        deleted.remove(&seed);
                    }
                }
                Step::Flush => {
                    blobs.flush().unwrap();
                    model.values_mut().for_each(|(_, flushed)| *flushed = true);
                }
                Step::Delete(seeds) | Step::Forget(seeds) if seeds.is_empty() => {}
                Step::Delete(ref seeds) | Step::Forget(ref seeds) => {
                    let mut ids = Vec::new();
                    for seed in seeds {
                        if let Some((len, true)) = model.get(seed).copied() {
                            ids.push(BlobId::of(&content(*seed, len)));
                            model.remove(seed);
                            deleted.insert(*seed, len);
                        }
                    }
                    let forgotten = blobs.forget(&ids).unwrap();
                    if matches!(step, Step::Delete(_)) {
                        blobs.reclaim(forgotten);
                    }
                }
                Step::Reopen | Step::LoseIndex => {
                    drop(blobs);
                    model.retain(|_, (_, flushed)| *flushed);
                    if matches!(step, Step::LoseIndex) && !two {
                        lose_index(dir.path());
                        // What was deleted and not overwritten may be back.
                        deleted.clear();
                    }
                    blobs = open(dir.path());
                }
            }
            for (seed, (len, _)) in &model {
                prop_assert!(has(&blobs, &content(*seed, *len)), "{seed} is gone");
            }
            for (seed, len) in &deleted {
                prop_assert!(!has(&blobs, &content(*seed, *len)), "{seed} is still there");
            }
        }
        if let Some(other) = other {
            other.flush().unwrap();
            prop_assert!(has(&blobs, &content(1000, 9000)));
        }
    }
}
