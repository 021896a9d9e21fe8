//! Deleting blobs from a directory while handles put them and ask for them.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::{fs, thread};

use seeded_rng::Rng;
use tempfile::TempDir;

use super::DirectoryBlobs;
use crate::blobs::{Blobs, NewBlob};
use crate::collection::CollectionNumber;
use crate::encoding::StoragePolicy;
use crate::error::Error;
use crate::id::BlobId;

/// A directory of blobs, and handles on it.
struct Site(TempDir);

impl Site {
    fn new() -> Site {
        let site = Site(TempDir::new().unwrap());
        DirectoryBlobs::create(site.0.path()).unwrap();
        site
    }

    /// A handle, as a process of its own would have it.
    fn open(&self) -> DirectoryBlobs {
        DirectoryBlobs::open(self.0.path()).unwrap()
    }

    /// A handle with this stamp.
    fn open_at(&self, stamp: u64) -> DirectoryBlobs {
        let blobs = self.open();
        blobs.raise_stamp(CollectionNumber(stamp));
        blobs
    }

    /// The bytes that the segments take on the disk.
    fn space(&self) -> u64 {
        let segments = fs::read_dir(self.0.path().join("segments")).unwrap();
        segments.map(|segment| segment.unwrap().metadata().unwrap().blocks() * 512).sum()
    }

    fn segments(&self) -> Vec<String> {
        let segments = fs::read_dir(self.0.path().join("segments")).unwrap();
        let names = segments.map(|segment| segment.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }
}

/// Content of 64 KiB that no other number has.
fn content(number: u64) -> Vec<u8> {
    let mut content = vec![0; 65536];
    blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut content);
    content
}

fn id(number: u64) -> BlobId {
    BlobId::of(&content(number))
}

/// Puts contents, durably. Returns the bytes that were added.
fn put(blobs: &DirectoryBlobs, numbers: &[u64]) -> u64 {
    let contents: Vec<_> = numbers.iter().map(|number| content(*number)).collect();
    let new: Vec<_> = contents.iter().map(|content| NewBlob::new(content)).collect();
    let added = blobs.put(&new, &StoragePolicy::default()).unwrap();
    blobs.flush().unwrap();
    added
}

fn has(blobs: &DirectoryBlobs, number: u64) -> bool {
    let mut buf = vec![0; 65536];
    match blobs.get(&id(number), &mut buf) {
        Ok(_) => true,
        Err(Error::MissingBlob { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

/// Removes blobs with a stamp below a bound, as collection `number`. Returns how many.
fn remove(blobs: &DirectoryBlobs, number: u64, below: u64, which: &[u64]) -> u64 {
    assert!(blobs.begin_collection(CollectionNumber(number)).unwrap());
    let ids: Vec<_> = which.iter().map(|number| id(*number)).collect();
    let removed = blobs.remove(&ids, CollectionNumber(number), CollectionNumber(below)).unwrap();
    assert_eq!(blobs.reclaim().unwrap(), 0);
    removed.blobs
}

#[test]
fn what_is_removed_gives_its_space_back_and_the_rest_can_be_read() {
    let site = Site::new();
    put(&site.open(), &(0..40).collect::<Vec<_>>());
    put(&site.open(), &[40]);
    let blobs = site.open();
    assert_eq!(remove(&blobs, 1, 1, &(1..40).collect::<Vec<_>>()), 39);
    assert_eq!(site.space(), 2 * (65536 + 4096), "two blobs and the records of their groups");
    assert!(has(&blobs, 0) && !has(&site.open(), 1) && has(&site.open(), 40));
    // The record of a group goes with its last blob.
    assert_eq!(remove(&blobs, 2, 2, &[0]), 1);
    assert_eq!(site.space(), 65536 + 4096);
    assert_eq!(remove(&blobs, 3, 3, &[40]), 1);
    assert!(site.segments().is_empty());
}

#[test]
fn a_put_and_a_question_raise_the_stamp_of_what_is_stored() {
    let site = Site::new();
    put(&site.open(), &[1, 2, 3]);
    assert_eq!(put(&site.open_at(7), &[1]), 0);
    assert_eq!(
        site.open_at(7).known(&[id(2), id(9)], &StoragePolicy::default()).unwrap(),
        [true, false]
    );
    assert_eq!(remove(&site.open(), 8, 7, &[1, 2, 3]), 1);
    let blobs = site.open();
    assert!(has(&blobs, 1) && has(&blobs, 2) && !has(&blobs, 3));
    assert_eq!(remove(&blobs, 8, 8, &[1, 2, 3]), 2);
}

#[test]
fn a_blob_that_was_removed_is_stored_again_by_a_handle_that_had_it() {
    let site = Site::new();
    let blobs = site.open();
    assert_eq!(put(&blobs, &[1]), 65536);
    assert!(has(&blobs, 1));
    remove(&site.open(), 1, 1, &[1]);
    assert_eq!(blobs.known(&[id(1)], &StoragePolicy::default()).unwrap(), [false]);
    assert_eq!(put(&blobs, &[1]), 65536);
    assert!(has(&blobs, 1) && has(&site.open(), 1));
}

/// The older put is flushed with the newer stamp, or its row is raised.
#[test]
fn a_blob_that_is_staged_with_an_older_stamp_gets_the_newer_one() {
    let site = Site::new();
    let blobs = site.open_at(1);
    let one = content(1);
    blobs.put(&[NewBlob::new(&one)], &StoragePolicy::default()).unwrap();
    blobs.raise_stamp(CollectionNumber(5));
    assert_eq!(put(&blobs, &[1]), 0);
    assert_eq!(remove(&site.open(), 5, 5, &[1]), 0);
    assert!(has(&blobs, 1));
}

#[test]
fn nothing_is_removed_for_a_lower_number_and_puts_get_at_least_the_highest() {
    let site = Site::new();
    let blobs = site.open();
    put(&blobs, &[1]);
    assert!(blobs.begin_collection(CollectionNumber(5)).unwrap());
    assert!(!blobs.begin_collection(CollectionNumber(4)).unwrap());
    let late = blobs.remove(&[id(1)], CollectionNumber(4), CollectionNumber(4)).unwrap();
    assert_eq!(late.blobs, 0);
    // A catalog that was restored from an older copy.
    put(&site.open_at(2), &[1, 2]);
    assert_eq!(remove(&blobs, 5, 5, &[1, 2]), 0);
    assert_eq!(blobs.highest_collection().unwrap(), CollectionNumber(5));
}

#[test]
fn space_that_a_killed_collection_did_not_give_back_is_given_back_by_the_next() {
    let site = Site::new();
    let blobs = site.open();
    put(&blobs, &(0..20).collect::<Vec<_>>());
    blobs.begin_collection(CollectionNumber(1)).unwrap();
    let ids: Vec<_> = (0..19).map(id).collect();
    blobs.remove(&ids, CollectionNumber(1), CollectionNumber(1)).unwrap();
    let before = site.space();
    drop(blobs);
    site.open().reclaim().unwrap();
    assert!(before - site.space() >= 19 * 65536);
    assert!(has(&site.open(), 19));
}

#[test]
fn a_segment_without_blobs_goes_unless_somebody_appends_to_it() {
    let site = Site::new();
    let (first, second) = (site.open(), site.open());
    put(&first, &[1]);
    put(&second, &[2]);
    assert_eq!(site.segments(), ["00000001", "00000002"]);
    drop(first);
    remove(&second, 1, 1, &[1, 2]);
    assert_eq!(site.segments(), ["00000002"]);
    put(&second, &[3]);
    // The number is not used again.
    put(&site.open(), &[4]);
    assert_eq!(site.segments(), ["00000002", "00000003"]);
    // A process that was killed after it had removed the row of a segment.
    fs::write(site.0.path().join("segments/00000001"), b"left").unwrap();
    second.reclaim().unwrap();
    assert_eq!(site.segments(), ["00000002", "00000003"]);
    assert!(has(&second, 3) && has(&second, 4));
}

/// The handle has seen the segment in the index before it was removed.
#[test]
fn a_segment_that_was_removed_meanwhile_is_not_appended_to() {
    let site = Site::new();
    put(&site.open(), &[1]);
    remove(&site.open(), 1, 1, &[1]);
    assert!(site.segments().is_empty());
    let blobs = site.open();
    assert!(blobs.lock_segment(1).unwrap().is_none());
    assert!(site.segments().is_empty(), "the lock left no file");
    put(&blobs, &[1]);
    assert!(has(&site.open(), 1));
}

#[test]
fn the_stamps_of_a_lost_index_become_those_of_the_next_collection() {
    let site = Site::new();
    put(&site.open(), &[1, 2]);
    remove(&site.open(), 1, 1, &[2]);
    for file in ["index.db", "index.db-wal", "index.db-shm"] {
        let _ = fs::remove_file(site.0.path().join(file));
    }
    let blobs = site.open();
    assert!(has(&blobs, 1) && !has(&blobs, 2), "the content of the other is a hole");
    assert_eq!(remove(&blobs, 2, 2, &[1]), 0);
    assert_eq!(remove(&blobs, 3, 3, &[1]), 1);
    assert_eq!(site.space(), 0);
}

#[test]
fn two_copies_of_a_blob_leave_the_space_of_one() {
    let site = Site::new();
    let (first, second) = (site.open(), site.open());
    let one = content(1);
    first.put(&[NewBlob::new(&one)], &StoragePolicy::default()).unwrap();
    second.put(&[NewBlob::new(&one)], &StoragePolicy::default()).unwrap();
    first.flush().unwrap();
    second.flush().unwrap();
    let before = site.space();
    second.reclaim().unwrap();
    assert!(before - site.space() >= 65536);
    assert!(has(&first, 1) && has(&second, 1));
}

/// Writers put blobs and ask for them with the number that they have read last, as commits do. A
/// collector raises the number, takes the least number that a writer uses as the bound, and removes
/// everything below it. Whatever a writer has stored or found since it read its number is there.
#[test]
fn what_a_writer_has_stored_or_found_is_there_while_it_uses_its_number() {
    const WRITERS: usize = 3;
    const BLOBS: u64 = 24;
    let seed = std::env::var("CAIRN_SEED").map_or(1, |seed| seed.parse().unwrap());
    println!("CAIRN_SEED={seed}");
    let site = Arc::new(Site::new());
    let number = Arc::new(AtomicU64::new(0));
    // The number that each writer uses; the greatest while it uses none.
    let used: Arc<Vec<AtomicU64>> =
        Arc::new((0..WRITERS).map(|_| AtomicU64::new(u64::MAX)).collect());
    let (end, begin) = (Arc::new(AtomicBool::new(false)), Arc::new(Barrier::new(WRITERS + 1)));
    let writers: Vec<_> = (0..WRITERS)
        .map(|at| {
            let (site, number, used) = (site.clone(), number.clone(), used.clone());
            let (end, begin) = (end.clone(), begin.clone());
            thread::spawn(move || {
                let mut rng = Rng::new(seed * 1000 + at as u64);
                let blobs = site.open();
                begin.wait();
                while !end.load(Ordering::SeqCst) {
                    // As the catalog does it: the number is noted before anything is stored, and it
                    // is the current one then.
                    loop {
                        let current = number.load(Ordering::SeqCst);
                        used[at].store(current, Ordering::SeqCst);
                        if number.load(Ordering::SeqCst) == current {
                            blobs.raise_stamp(CollectionNumber(current));
                            break;
                        }
                    }
                    let mut relied_on: HashMap<u64, &str> = HashMap::new();
                    for _ in 0..rng.between(1, 6) {
                        let one = rng.below(BLOBS);
                        if rng.chance(30) {
                            if blobs.known(&[id(one)], &StoragePolicy::default()).unwrap()[0] {
                                relied_on.insert(one, "found");
                            }
                        } else {
                            let bytes = content(one);
                            blobs.put(&[NewBlob::new(&bytes)], &StoragePolicy::default()).unwrap();
                            relied_on.insert(one, "put");
                        }
                    }
                    blobs.flush().unwrap();
                    for (one, how) in relied_on {
                        assert!(has(&blobs, one), "seed {seed}: {one}, which was {how}, is gone");
                    }
                    used[at].store(u64::MAX, Ordering::SeqCst);
                }
            })
        })
        .collect();
    begin.wait();
    let blobs = site.open();
    for _ in 0..60 {
        let collection = number.fetch_add(1, Ordering::SeqCst) + 1;
        let oldest = used.iter().map(|one| one.load(Ordering::SeqCst)).min().unwrap();
        let below = oldest.min(collection);
        remove(&blobs, collection, below, &(0..BLOBS).collect::<Vec<_>>());
        if writers.iter().any(thread::JoinHandle::is_finished) {
            break;
        }
    }
    end.store(true, Ordering::SeqCst);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    // Nobody relies on anything any more.
    let last = number.load(Ordering::SeqCst) + 2;
    remove(&blobs, last, last, &(0..BLOBS).collect::<Vec<_>>());
    assert!(blobs.list(None, 10).unwrap().is_empty());
}

/// Two threads write the same blob, and one copy is not used. It is the last thing in its segment when
/// the process ends, so the next process may write there.
#[test]
fn the_space_of_an_unused_copy_is_not_given_back_after_another_blob_was_written_there() {
    let site = Site::new();
    let blobs = site.open();
    let (one, two) = (content(1), content(2));
    blobs.append_and_stage(&[NewBlob::new(&one)]).unwrap();
    // The other thread has asked for the blob before the first one staged it.
    assert_eq!(blobs.append_and_stage(&[NewBlob::new(&one)]).unwrap(), 0);
    blobs.flush().unwrap();
    drop(blobs);
    let blobs = site.open();
    blobs.put(&[NewBlob::new(&two)], &StoragePolicy::default()).unwrap();
    blobs.flush().unwrap();
    blobs.reclaim().unwrap();
    assert!(has(&blobs, 1) && has(&blobs, 2));
}

/// The catalog was restored from a copy, and a collection of the catalog before that was stopped
/// between its decision and its deletions.
#[test]
fn a_blob_that_is_found_with_an_older_stamp_gets_the_highest_number_that_the_directory_has_seen() {
    let site = Site::new();
    put(&site.open_at(12), &[1]);
    let late = site.open();
    assert!(late.begin_collection(CollectionNumber(50)).unwrap());
    let restored = site.open_at(10);
    assert_eq!(put(&restored, &[1]), 0, "it is found");
    let removed = late.remove(&[id(1)], CollectionNumber(50), CollectionNumber(50)).unwrap();
    assert_eq!(removed.blobs, 0);
    assert!(has(&site.open(), 1));
}
