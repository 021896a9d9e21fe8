use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Barrier;
use std::thread;

use tempfile::TempDir;

use super::DirectoryBlobs;
use crate::blobs::Blobs;
use crate::blobs::NewBlob;
use crate::encoding::StoragePolicy;
use crate::error::{Error, ErrorKind, Result};
use crate::id::BlobId;

/// A repository's blobs in a temporary directory.
struct TestStore {
    dir: TempDir,
    blobs: DirectoryBlobs,
}

impl TestStore {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        DirectoryBlobs::create(dir.path()).unwrap();
        let blobs = DirectoryBlobs::open(dir.path()).unwrap();
        Self { dir, blobs }
    }

    /// Creates a store with one durable blob, and returns the blob's name.
    fn with_blob(content: &[u8]) -> (Self, BlobId) {
        let store = Self::new();
        let (id, _) = store.put(content);
        store.blobs.flush().unwrap();
        (store, id)
    }

    fn put(&self, content: &[u8]) -> (BlobId, u64) {
        put(&self.blobs, content)
    }

    fn get(&self, id: &BlobId) -> Result<Vec<u8>> {
        get(&self.blobs, id)
    }

    /// Opens a second handle on the same directory.
    fn second_handle(&self) -> DirectoryBlobs {
        DirectoryBlobs::open(self.dir.path()).unwrap()
    }

    fn segment(&self, number: u64) -> PathBuf {
        self.dir.path().join(format!("segments/{number:08}"))
    }

    /// Changes a byte of the blob that [`TestStore::with_blob`] stored.
    fn corrupt(&self) {
        let segment = File::options().write(true).open(self.segment(1)).unwrap();
        segment.write_all_at(b"f", 4096 + 5).unwrap();
    }

    fn segment_count(&self) -> usize {
        fs::read_dir(self.dir.path().join("segments")).unwrap().count()
    }
}

fn put(blobs: &DirectoryBlobs, content: &[u8]) -> (BlobId, u64) {
    let blob = NewBlob::new(content);
    (blob.id(), blobs.put(&[blob], &StoragePolicy::default()).unwrap())
}

fn get(blobs: &DirectoryBlobs, id: &BlobId) -> Result<Vec<u8>> {
    let mut buf = vec![0; 4 << 20];
    let len = blobs.get(id, &mut buf)?;
    buf.truncate(len);
    Ok(buf)
}

fn is_missing<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::MissingBlob { .. }))
}

#[test]
fn a_blob_is_readable_at_once_and_by_others_after_a_flush() {
    let store = TestStore::new();
    let (id, new_bytes) = store.put(b"granite");
    assert_eq!(new_bytes, 7);
    assert_eq!(store.get(&id).unwrap(), b"granite");
    let other = store.second_handle();
    assert!(is_missing(get(&other, &id)), "other handles see only durable blobs");

    store.blobs.flush().unwrap();
    assert_eq!(get(&other, &id).unwrap(), b"granite");
    assert_eq!(store.get(&id).unwrap(), b"granite");
}

#[test]
fn content_of_any_length_and_alignment_reads_back() {
    let store = TestStore::new();
    let memory = (0..5 * 4096).map(|n| (n % 251) as u8).collect::<Vec<_>>();
    let aligned = memory.as_ptr().align_offset(4096);
    let parts = [(aligned, 8192), (aligned, 4096), (aligned, 4095), (aligned + 1, 8192), (0, 1)];
    let contents = parts.map(|(start, len)| &memory[start..start + len]);
    let blobs = contents.map(NewBlob::new);
    let total: usize = contents.iter().map(|content| content.len()).sum();
    assert_eq!(store.blobs.put(&blobs, &StoragePolicy::default()).unwrap(), total as u64);
    for _ in 0..2 {
        for blob in &blobs {
            assert!(store.get(&blob.id()).unwrap() == blob.content);
        }
        store.blobs.flush().unwrap();
    }
}

#[test]
fn equal_content_is_stored_once() {
    let store = TestStore::new();
    store.put(b"slate");
    assert_eq!(store.put(b"slate").1, 0, "the blob is staged");
    store.blobs.flush().unwrap();
    assert_eq!(store.put(b"slate").1, 0, "the blob is in the index");
    assert_eq!(put(&store.second_handle(), b"slate").1, 0, "through another handle");
    let twice = [&b"slate"[..], b"chalk", b"chalk"].map(NewBlob::new);
    assert_eq!(store.blobs.put(&twice, &StoragePolicy::default()).unwrap(), 5, "within one call");
}

#[test]
fn two_handles_that_store_equal_content_agree_on_one_copy() {
    let store = TestStore::new();
    let other = store.second_handle();
    let (id, _) = store.put(b"gneiss");
    assert_eq!(put(&other, b"gneiss").1, 6, "neither handle sees what the other has staged");
    store.blobs.flush().unwrap();
    other.flush().unwrap();
    assert_eq!(store.get(&id).unwrap(), b"gneiss");
    assert_eq!(get(&other, &id).unwrap(), b"gneiss");
    assert_eq!(store.segment_count(), 2, "no handle appends to a segment of another one");
}

#[test]
fn a_segment_is_continued_when_its_handle_is_gone() {
    let store = TestStore::new();
    for n in 0..5_u8 {
        let blobs = store.second_handle();
        put(&blobs, &[n; 5000]);
        blobs.flush().unwrap();
    }
    assert_eq!(store.segment_count(), 1);
    for n in 0..5_u8 {
        assert_eq!(store.get(&BlobId::of(&[n; 5000])).unwrap(), [n; 5000]);
    }
    let index = rusqlite::Connection::open(store.dir.path().join("index.db")).unwrap();
    let taken: u64 = index.query_row("SELECT taken FROM segments", [], |row| row.get(0)).unwrap();
    assert_eq!(taken, 5, "each holder commits a change of its own before it appends");
    // Five blobs of two blocks, each with a record of one. No preallocated space is left.
    assert_eq!(fs::metadata(store.segment(1)).unwrap().len(), 5 * 3 * 4096);
}

#[test]
fn unflushed_blobs_are_lost_with_their_handle_and_their_space_is_reused() {
    let store = TestStore::new();
    let blobs = store.second_handle();
    let (kept, _) = put(&blobs, b"kept");
    blobs.flush().unwrap();
    let (lost, _) = put(&blobs, b"lost");
    drop(blobs);
    assert!(is_missing(store.get(&lost)));
    let (next, _) = store.put(b"next");
    store.blobs.flush().unwrap();
    assert_eq!(store.get(&kept).unwrap(), b"kept");
    assert_eq!(store.get(&next).unwrap(), b"next");
    assert_eq!(store.segment_count(), 1);
}

#[test]
fn a_flipped_bit_is_corrupt_and_the_message_names_the_blob_and_the_file() {
    let (store, id) = TestStore::with_blob(b"marble");
    store.corrupt();
    let error = store.get(&id).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let text = error.to_string();
    assert!(text.contains(store.segment(1).to_str().unwrap()), "{error}");
    assert!(text.contains(&id.to_string()), "{error}");
}

#[test]
fn a_truncated_or_missing_segment_is_an_error_and_never_data() {
    for len in 4096..4096 + 6 {
        let (store, id) = TestStore::with_blob(b"marble");
        File::options().write(true).open(store.segment(1)).unwrap().set_len(len).unwrap();
        assert_eq!(store.get(&id).unwrap_err().kind(), ErrorKind::Corrupt, "{len}");
    }
    let (store, id) = TestStore::with_blob(b"marble");
    fs::remove_file(store.segment(1)).unwrap();
    assert_eq!(get(&store.second_handle(), &id).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn a_blob_longer_than_expected_is_corrupt() {
    let store = TestStore::new();
    let (id, _) = store.put(b"marble");
    let error = store.blobs.get(&id, &mut [0; 5]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[test]
fn putting_the_content_again_replaces_a_blob_that_was_found_damaged() {
    let (store, id) = TestStore::with_blob(b"marble");
    store.corrupt();
    store.get(&id).unwrap_err();
    assert_eq!(store.put(b"marble").1, 6);
    assert_eq!(store.get(&id).unwrap(), b"marble");
    store.blobs.flush().unwrap();
    assert_eq!(get(&store.second_handle(), &id).unwrap(), b"marble");
    assert_eq!(store.put(b"marble").1, 0);
}

/// One process verifies, and another one that is open already stores the content again.
#[test]
fn a_blob_that_another_process_found_damaged_is_replaced() {
    let (store, id) = TestStore::with_blob(b"marble");
    let other = store.second_handle();
    store.corrupt();
    store.get(&id).unwrap_err();
    assert_eq!(put(&other, b"marble").1, 6, "it is stored again");
    other.flush().unwrap();
    assert_eq!(store.get(&id).unwrap(), b"marble");
    assert_eq!(put(&store.second_handle(), b"marble").1, 0, "it is not damaged any more");
}

#[test]
fn a_lost_index_is_rebuilt_from_the_segments() {
    let TestStore { dir, blobs } = TestStore::new();
    let content = |n: u32| n.to_le_bytes().repeat(1000 + n as usize);
    for first in (0..200).step_by(50) {
        let contents: Vec<_> = (first..first + 50).map(content).collect();
        let group: Vec<_> = contents.iter().map(|c| NewBlob::new(c)).collect();
        blobs.put(&group, &StoragePolicy::default()).unwrap();
        blobs.flush().unwrap();
    }
    // A record as a guest could write it: it is valid in this segment and names a blob that has
    // other content.
    let forged = {
        let mut record = fs::read(dir.path().join("segments/00000001")).unwrap();
        record.truncate(4096 * 3);
        let end = 24 + 48 * 50;
        record[24..56].copy_from_slice(&[7; 32]);
        let checksum = blake3::hash(&record[..end]);
        record[end..end + 32].copy_from_slice(checksum.as_bytes());
        record
    };
    let (forged_id, _) = put(&blobs, &forged);
    blobs.flush().unwrap();
    drop(blobs);
    for file in ["index.db", "index.db-wal", "index.db-shm"] {
        let _ = fs::remove_file(dir.path().join(file));
    }

    let blobs = DirectoryBlobs::open(dir.path()).unwrap();
    for n in 0..200 {
        assert_eq!(get(&blobs, &BlobId::of(&content(n))).unwrap(), content(n), "{n}");
    }
    assert_eq!(get(&blobs, &forged_id).unwrap(), forged);
    assert!(is_missing(get(&blobs, &BlobId::from_bytes([7; 32]))));
    let (next, _) = put(&blobs, b"next");
    blobs.flush().unwrap();
    assert_eq!(get(&blobs, &next).unwrap(), b"next");
    assert_eq!(get(&blobs, &BlobId::of(&content(199))).unwrap(), content(199));
}

#[test]
fn a_group_that_the_index_rejects_is_kept_for_the_next_flush() {
    let store = TestStore::new();
    let (id, _) = store.put(b"basalt");
    let database = rusqlite::Connection::open(store.dir.path().join("index.db")).unwrap();
    database.execute_batch("ALTER TABLE blobs RENAME TO away").unwrap();
    assert_eq!(store.blobs.flush().unwrap_err().kind(), ErrorKind::Unavailable);
    database.execute_batch("ALTER TABLE away RENAME TO blobs").unwrap();
    assert_eq!(store.get(&id).unwrap(), b"basalt");
    store.blobs.flush().unwrap();
    assert_eq!(get(&store.second_handle(), &id).unwrap(), b"basalt");
}

#[test]
fn a_full_stage_is_flushed_without_a_call_to_flush() {
    let store = TestStore::new();
    let content = |n: u8| vec![n; 4 << 20];
    for n in 0..17 {
        store.put(&content(n));
    }
    let other = store.second_handle();
    assert_eq!(get(&other, &BlobId::of(&content(0))).unwrap(), content(0));
    assert!(is_missing(get(&other, &BlobId::of(&content(16)))));
}

#[test]
fn many_threads_put_the_same_and_different_blobs() {
    const THREADS: u32 = 4;
    const BLOBS: u32 = 100;
    let store = TestStore::new();
    let start = Barrier::new(THREADS as usize);
    let content = |n: u32| n.to_le_bytes().repeat(50);
    let new_bytes = thread::scope(|scope| {
        let threads = (0..THREADS).map(|thread| {
            let (store, start) = (&store, &start);
            scope.spawn(move || {
                let other = store.second_handle();
                start.wait();
                let mut new_bytes = 0;
                for n in 0..BLOBS {
                    new_bytes += store.put(&content(n)).1;
                    new_bytes += store.put(&content(1000 * (thread + 1) + n)).1;
                    if n == 10 * thread {
                        store.blobs.flush().unwrap();
                    }
                }
                store.blobs.flush().unwrap();
                for n in 0..BLOBS {
                    assert_eq!(get(&other, &BlobId::of(&content(n))).unwrap(), content(n));
                }
                new_bytes
            })
        });
        let threads = threads.collect::<Vec<_>>();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>()
    });
    assert!(new_bytes >= u64::from((THREADS + 1) * BLOBS * 200));
    assert_eq!(store.segment_count(), 1);
}

#[test]
fn an_index_that_keeps_failing_bounds_what_is_written() {
    let store = TestStore::new();
    let database = rusqlite::Connection::open(store.dir.path().join("index.db")).unwrap();
    let fail = "CREATE TRIGGER full BEFORE INSERT ON blobs BEGIN SELECT RAISE(FAIL, 'no'); END";
    database.execute_batch(fail).unwrap();
    let all: Vec<_> = (0..18u8).map(|seed| vec![seed; 4 << 20]).collect();
    let put_one = |one: &[u8]| store.blobs.put(&[NewBlob::new(one)], &StoragePolicy::default());
    assert_eq!(
        all.iter().position(|one| put_one(one).is_err()),
        Some(15),
        "puts fail once 64 MiB are staged"
    );
    let written = fs::metadata(store.segment(1)).unwrap().len();
    for _ in 0..3 {
        put_one(&all[17]).unwrap_err();
    }
    assert_eq!(fs::metadata(store.segment(1)).unwrap().len(), written);
    database.execute_batch("DROP TRIGGER full").unwrap();
    put_one(&all[17]).unwrap();
    store.blobs.flush().unwrap();
    let (other, mut buf) = (store.second_handle(), vec![0; 4 << 20]);
    for one in all[..16].iter().chain(&all[17..]) {
        assert_eq!(other.get(&BlobId::of(one), &mut buf).unwrap(), one.len());
    }
}
