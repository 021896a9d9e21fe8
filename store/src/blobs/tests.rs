use std::fs;
use std::path::PathBuf;
use std::sync::Barrier;
use std::thread;

use tempfile::TempDir;

use super::stage::path_of;
use super::{Blobs, DirBlobs};
use crate::error::{Error, ErrorKind, Result};
use crate::id::BlobId;

struct Place {
    dir: TempDir,
    blobs: DirBlobs,
}

impl Place {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        DirBlobs::create(dir.path()).unwrap();
        let blobs = DirBlobs::open(dir.path()).unwrap();
        Self { dir, blobs }
    }

    fn put(&self, content: &[u8]) -> (BlobId, u64) {
        let id = BlobId::of(content);
        (id, self.blobs.put(&id, content).unwrap())
    }

    fn get(&self, id: &BlobId) -> Result<Vec<u8>> {
        let mut buf = [0; 4096];
        let len = self.blobs.get(id, &mut buf)?;
        Ok(buf[..len].to_vec())
    }

    fn file(&self, id: &BlobId) -> PathBuf {
        path_of(&self.dir.path().join("blobs"), id)
    }

    fn temporary_files(&self) -> usize {
        fs::read_dir(self.dir.path().join("tmp")).unwrap().count()
    }
}

#[test]
fn a_blob_is_readable_at_once_and_named_after_a_flush() {
    let place = Place::new();
    let (id, new_bytes) = place.put(b"granite");
    assert_eq!(new_bytes, 7);
    assert_eq!(place.get(&id).unwrap(), b"granite");
    assert!(!place.file(&id).exists(), "a name implies durable content");

    place.blobs.flush().unwrap();
    assert_eq!(fs::read(place.file(&id)).unwrap(), b"granite");
    assert_eq!(place.get(&id).unwrap(), b"granite");
    assert_eq!(place.temporary_files(), 0);
}

#[test]
fn content_of_any_alignment_reads_back_before_and_after_it_is_named() {
    let place = Place::new();
    let memory = (0..5 * 4096).map(|n| (n % 251) as u8).collect::<Vec<_>>();
    let aligned = memory.as_ptr().align_offset(4096);
    for (start, len) in [(aligned, 8192), (aligned, 4096), (aligned, 4095), (aligned + 1, 8192)] {
        let content = &memory[start..start + len];
        let (id, new_bytes) = place.put(content);
        assert_eq!(new_bytes, len as u64);
        let mut buf = vec![0; 8192];
        for _ in 0..2 {
            assert_eq!(place.blobs.get(&id, &mut buf).unwrap(), len);
            assert!(buf[..len] == *content);
            place.blobs.flush().unwrap();
        }
    }
}

#[test]
fn a_full_group_is_named_without_a_flush() {
    let place = Place::new();
    let ids = (0..64_u8).map(|n| place.put(&[n; 100]).0).collect::<Vec<_>>();
    assert!(ids.iter().all(|id| place.file(id).exists()));
}

#[test]
fn equal_content_is_stored_once() {
    let place = Place::new();
    let (id, _) = place.put(b"slate");
    assert_eq!(place.put(b"slate").1, 0, "while it is staged");
    place.blobs.flush().unwrap();
    assert_eq!(place.put(b"slate").1, 0, "when it has its name");
    assert!(place.blobs.contains(&id).unwrap());
    assert!(!place.blobs.contains(&BlobId::of(b"chalk")).unwrap());

    let other = DirBlobs::open(place.dir.path()).unwrap();
    assert_eq!(other.put(&id, b"slate").unwrap(), 0, "through another handle");
    other.flush().unwrap();
}

#[test]
fn a_flipped_bit_is_corrupt_and_the_message_names_the_file() {
    let place = Place::new();
    let (id, _) = place.put(b"marble");
    place.blobs.flush().unwrap();
    fs::write(place.file(&id), b"marblf").unwrap();
    let error = place.get(&id).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains(place.file(&id).to_str().unwrap()), "{error}");
}

#[test]
fn a_truncated_blob_is_corrupt_not_data() {
    let place = Place::new();
    let (id, _) = place.put(b"marble");
    place.blobs.flush().unwrap();
    for len in 0..6 {
        fs::write(place.file(&id), &b"marble"[..len]).unwrap();
        assert_eq!(place.get(&id).unwrap_err().kind(), ErrorKind::Corrupt, "{len}");
    }
    fs::remove_file(place.file(&id)).unwrap();
    let error = place.get(&id).unwrap_err();
    assert!(matches!(error, Error::MissingBlob { .. }) && error.kind() == ErrorKind::Corrupt);
}

#[test]
fn a_blob_longer_than_expected_is_corrupt() {
    let place = Place::new();
    let (id, _) = place.put(b"marble");
    let error = place.blobs.get(&id, &mut [0; 5]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[test]
fn putting_the_content_again_heals_a_truncated_blob() {
    let place = Place::new();
    let (id, _) = place.put(b"marble");
    place.blobs.flush().unwrap();
    fs::write(place.file(&id), b"mar").unwrap();
    assert_eq!(place.put(b"marble").1, 6);
    assert_eq!(place.get(&id).unwrap(), b"marble");
    place.blobs.flush().unwrap();
    assert_eq!(fs::read(place.file(&id)).unwrap(), b"marble");
}

#[test]
fn a_failed_naming_is_tried_again_by_the_next_flush() {
    let place = Place::new();
    let (id, _) = place.put(b"basalt");
    let parent = place.file(&id).parent().unwrap().to_owned();
    fs::remove_dir(&parent).unwrap();
    assert_eq!(place.blobs.flush().unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(place.get(&id).unwrap(), b"basalt");

    fs::create_dir(&parent).unwrap();
    place.blobs.flush().unwrap();
    assert_eq!(fs::read(place.file(&id)).unwrap(), b"basalt");
}

#[test]
fn a_failed_sync_of_a_directory_poisons_the_handle() {
    let place = Place::new();
    let (id, _) = place.put(b"basalt");
    place.blobs.flush().unwrap();
    assert_eq!(place.put(b"basalt").1, 0);
    fs::remove_dir_all(place.file(&id).parent().unwrap()).unwrap();
    place.blobs.flush().unwrap_err();

    let poisoned = |error: Error| assert!(matches!(error, Error::Poisoned { .. }), "{error}");
    poisoned(place.blobs.flush().unwrap_err());
    poisoned(place.blobs.put(&BlobId::of(b"tuff"), b"tuff").unwrap_err());
}

#[test]
fn files_of_dead_processes_are_removed_and_those_of_the_living_stay() {
    let place = Place::new();
    let (id, _) = place.put(b"gneiss");
    let temp = place.dir.path().join("tmp");
    let mine = fs::read_dir(&temp).unwrap().next().unwrap().unwrap().file_name();
    let mut parts = mine.to_str().unwrap().split('-').map(str::to_owned).collect::<Vec<_>>();
    parts[2] = "1".into();
    let dead = temp.join(parts.join("-"));
    parts[0] = "1".into();
    let unseen = temp.join(parts.join("-"));
    let unknown = temp.join("notes.txt");
    for path in [&dead, &unseen, &unknown] {
        fs::write(path, "").unwrap();
    }

    DirBlobs::open(place.dir.path()).unwrap();
    assert!(!dead.exists());
    assert!(unseen.exists() && unknown.exists());
    place.blobs.flush().unwrap();
    assert_eq!(place.get(&id).unwrap(), b"gneiss");
}

#[test]
fn a_handle_that_is_dropped_leaves_no_temporary_files() {
    let Place { dir, blobs } = Place::new();
    blobs.put(&BlobId::of(b"flint"), b"flint").unwrap();
    drop(blobs);
    assert_eq!(fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
}

#[test]
fn many_threads_put_the_same_and_different_blobs() {
    const THREADS: u32 = 4;
    const BLOBS: u32 = 100;
    let place = Place::new();
    let start = Barrier::new(THREADS as usize);
    let content = |n: u32| n.to_le_bytes().repeat(50);
    let new_bytes = thread::scope(|scope| {
        let threads = (0..THREADS).map(|thread| {
            let (place, start) = (&place, &start);
            scope.spawn(move || {
                start.wait();
                let mut new_bytes = 0;
                for n in 0..BLOBS {
                    new_bytes += place.put(&content(n)).1;
                    new_bytes += place.put(&content(1000 * (thread + 1) + n)).1;
                    if n == 10 * thread {
                        place.blobs.flush().unwrap();
                    }
                }
                place.blobs.flush().unwrap();
                for n in 0..BLOBS {
                    assert!(place.file(&BlobId::of(&content(n))).exists());
                }
                new_bytes
            })
        });
        let threads = threads.collect::<Vec<_>>();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>()
    });
    assert!(new_bytes >= u64::from((THREADS + 1) * BLOBS * 200));
    assert_eq!(place.temporary_files(), 0);
    for n in 0..BLOBS {
        assert_eq!(place.get(&BlobId::of(&content(n))).unwrap(), content(n));
    }
}
