//! Tests of the scrub, with blocks that are really damaged.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use super::PeerStore;
use super::group::KnownFragment;
use super::storing::id;
use super::tests::{CODE, fragment};
use crate::encoding::fragment::Fragment;
use crate::id::BlobId;
use crate::sys;

const NO_BLOB: BlobId = BlobId::from_bytes([0; 32]);
const NOW: u64 = 1_800_000_000;

/// The space of a fragment of these tests, in bytes.
const SPACE: u64 = 16 << 10;

fn open(dir: &Path) -> PeerStore {
    PeerStore::open(dir, None).unwrap()
}

fn put(store: &PeerStore, fragments: &[Fragment]) {
    store.put(fragments).unwrap().into_iter().for_each(Result::unwrap);
    store.flush().unwrap();
}

/// A store whose table has this many fragments.
fn filled(dir: &Path, count: u64) -> (PeerStore, Vec<Fragment>) {
    let store = open(dir);
    let all: Vec<_> = (0..count).map(|number| fragment(number, CODE, 0)).collect();
    put(&store, &all);
    store.settle(false).unwrap();
    (store, all)
}

/// Continues the round, or begins one, until it is over.
fn scrub(store: &PeerStore) {
    if store.scrub_round().is_none_or(|round| round.is_over) {
        store.begin_scrub(NOW).unwrap();
    }
    while !store.scrub_round().unwrap().is_over {
        store.scrub_step(NOW, Duration::ZERO, &|_| true).unwrap();
    }
}

/// Continues the round until it is over, with another way to read blocks.
fn scrub_with(store: &PeerStore, read: &dyn Fn(&KnownFragment, &mut [u8]) -> io::Result<()>) {
    store.begin_scrub(NOW).unwrap();
    while !store.scrub_round().unwrap().is_over {
        store.scrub_step_with(NOW, Duration::ZERO, &|_| true, read).unwrap();
    }
}

/// The file that holds the block of a fragment, and its offset there.
fn place(dir: &Path, one: &Fragment) -> (PathBuf, u64) {
    for entry in fs::read_dir(dir.join("segments")).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        let is_there = |at: &usize| bytes[*at..].starts_with(&one.block);
        if let Some(at) = (0..bytes.len()).step_by(4096).find(is_there) {
            return (path, at as u64);
        }
    }
    panic!("the block is not in the log");
}

fn to_write(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// Flips a bit of a fragment's block.
fn flip(dir: &Path, one: &Fragment) {
    let (path, at) = place(dir, one);
    to_write(&path).write_all_at(&[one.block[77] ^ 8], at + 77).unwrap();
}

fn has(store: &PeerStore, one: &Fragment) -> bool {
    let blob = one.description.blob;
    let found = store.get(&blob).unwrap();
    assert!(found.iter().all(|found| found == one), "a block is damaged or another one");
    let held = store.have(&[blob], None).unwrap().remove(0);
    let listed =
        store.list(&NO_BLOB, 4096).unwrap().iter().filter(|(name, _)| *name == blob).count();
    assert_eq!((found.len(), found.len()), (held.len(), listed), "the answers differ");
    !found.is_empty()
}

#[test]
fn a_damaged_fragment_counts_as_missing_until_it_is_stored_again() {
    let dir = TempDir::new().unwrap();
    let (store, all) = filled(dir.path(), 10);
    flip(dir.path(), &all[2]);
    let (path, at) = place(dir.path(), &all[5]);
    sys::punch(&to_write(&path), at..at + 4096).unwrap();
    assert_eq!(store.have(&[all[5].description.blob], None).unwrap()[0].len(), 1);
    scrub(&store);
    let are_there = |store: &PeerStore, missing: &[usize]| {
        for (at, one) in all.iter().enumerate() {
            assert_eq!(has(store, one), !missing.contains(&at), "fragment {at}");
        }
        let usage = store.usage().unwrap();
        let left = 10 - missing.len() as u64;
        assert_eq!((usage.fragments, usage.used), (left, left * SPACE));
    };
    are_there(&store, &[2, 5]);
    assert_eq!(store.scrub_status().bad, 2);
    assert_eq!(store.scrub_status().scrubbed, Some(NOW));
    drop(store);
    // It is durable.
    let store = open(dir.path());
    are_there(&store, &[2, 5]);
    let takes_space = || {
        let data = sys::next_data(&File::open(&path).unwrap(), at + 4096).unwrap();
        data.is_some_and(|data| data.start == at + 4096)
    };
    assert!(takes_space(), "the bad blocks stay");
    put(&store, &all);
    are_there(&store, &[]);
    store.settle(false).unwrap();
    assert!(!takes_space(), "the bad blocks are given back");
    scrub(&store);
    are_there(&store, &[]);
    assert_eq!(store.scrub_status().bad, 2, "they are counted once");
    drop(store);
    are_there(&open(dir.path()), &[]);
}

#[test]
fn a_bad_fragment_can_be_deleted() {
    let dir = TempDir::new().unwrap();
    let (store, all) = filled(dir.path(), 4);
    flip(dir.path(), &all[1]);
    scrub(&store);
    // Its neighbours go first: its block and its record stay.
    store.delete(&[id(&all[0]), id(&all[2])], 0).unwrap();
    assert!(!has(&store, &all[1]) && has(&store, &all[3]));
    assert_eq!(store.delete(&[id(&all[1])], 0).unwrap(), SPACE);
    assert_eq!(store.delete(&[id(&all[1])], 0).unwrap(), 0);
    let usage = store.usage().unwrap();
    assert_eq!((usage.fragments, usage.used), (1, SPACE));
}

#[test]
fn a_missing_segment_and_a_short_one_are_damage() {
    for is_short in [false, true] {
        let dir = TempDir::new().unwrap();
        let (store, all) = filled(dir.path(), 10);
        let (path, at) = place(dir.path(), &all[6]);
        match is_short {
            true => to_write(&path).set_len(at + 5000).unwrap(),
            false => fs::remove_file(&path).unwrap(),
        }
        scrub(&store);
        let lost = all.iter().filter(|one| !has(&store, one)).count();
        assert_eq!(lost, if is_short { 4 } else { 10 });
        assert_eq!(store.scrub_status().bad, lost as u64);
    }
}

/// A file system that is not mounted for a while has lost nothing.
#[test]
fn a_data_directory_that_is_not_there_is_no_damage() {
    let dir = TempDir::new().unwrap();
    let data = dir.path().join("data");
    let (store, all) = filled(&data, 5);
    let away = dir.path().join("away");
    fs::rename(&data, &away).unwrap();
    scrub(&store);
    fs::create_dir_all(data.join("segments")).unwrap();
    fs::write(data.join("lock"), "").unwrap();
    scrub(&store);
    fs::remove_dir_all(&data).unwrap();
    fs::rename(&away, &data).unwrap();
    assert_eq!(store.scrub_status().bad, 0);
    assert_eq!(store.scrub_status().scrubbed, None, "nothing was examined");
    assert!(all.iter().all(|one| has(&store, one)));
    scrub(&store);
    assert_eq!(store.scrub_status().scrubbed, Some(NOW));
}

#[test]
fn only_damage_that_is_seen_twice_counts() {
    let errors = |number| Err(io::Error::from_raw_os_error(number));
    for error in [libc::ENOMEM, libc::EINTR, libc::EAGAIN, libc::EMFILE, libc::EACCES, libc::ENODEV]
    {
        let dir = TempDir::new().unwrap();
        let (store, all) = filled(dir.path(), 4);
        let reads = Cell::new(0);
        scrub_with(&store, &|_, _| {
            reads.set(reads.get() + 1);
            errors(error)
        });
        assert_eq!(reads.get(), 4 * 3, "the read is tried again");
        assert!(all.iter().all(|one| has(&store, one)), "error {error} may pass");
        let status = store.scrub_status();
        assert_eq!((status.bad, status.scrubbed), (0, None), "the round is not complete");
    }
    for error in [libc::EIO, libc::ENODATA] {
        let dir = TempDir::new().unwrap();
        let (store, all) = filled(dir.path(), 4);
        let seen = RefCell::new(BTreeSet::new());
        // The first read of each block fails, or has wrong bytes.
        scrub_with(&store, &|known, buffer| match seen.borrow_mut().insert(known.place) {
            true if known.place.offset % 8192 == 0 => errors(error),
            true => {
                buffer.fill(9);
                Ok(())
            }
            false => store.read_from_disk(known, buffer),
        });
        let status = store.scrub_status();
        assert_eq!((status.bad, status.scrubbed), (0, Some(NOW)));
        let lost = all[1].description.blob;
        scrub_with(&store, &|known, buffer| match known.description.blob == lost {
            true => errors(error),
            false => store.read_from_disk(known, buffer),
        });
        let left: Vec<_> = all.iter().map(|one| has(&store, one)).collect();
        assert_eq!(left, [true, false, true, true]);
        // The disk is replaced by a good copy, without the table: the block is there after all.
        drop(store);
        for file in ["fragments.db", "fragments.db-wal", "fragments.db-shm"] {
            let _ = fs::remove_file(dir.path().join(file));
        }
        let store = open(dir.path());
        assert!(all.iter().all(|one| has(&store, one)));
    }
}

#[test]
fn a_round_continues_after_a_restart_and_reads_every_fragment_once() {
    let dir = TempDir::new().unwrap();
    let (mut store, all) = filled(dir.path(), 25);
    store.begin_scrub(NOW).unwrap();
    let seen = Mutex::new(Vec::new());
    let mut restarts = 0;
    while !store.scrub_round().unwrap().is_over {
        store
            .scrub_step_with(NOW, Duration::ZERO, &|_| true, &|known, buffer| {
                seen.lock().unwrap().push(known.description.blob);
                store.read_from_disk(known, buffer)
            })
            .unwrap();
        // What is stored meanwhile is left to the next round.
        put(&store, &[fragment(1000 + restarts, CODE, 0)]);
        store.save_scrub().unwrap();
        drop(store);
        store = open(dir.path());
        restarts += 1;
    }
    let mut seen = seen.into_inner().unwrap();
    let mut wanted: Vec<_> = all.iter().map(|one| one.description.blob).collect();
    seen.sort();
    wanted.sort();
    assert!(seen == wanted && restarts > 5, "{} blocks, {restarts} restarts", seen.len());
    let round = store.scrub_round().unwrap();
    assert_eq!((round.total, round.done), (25 * SPACE, 25 * SPACE));
    assert_eq!(store.scrub_status().scrubbed, Some(NOW));
}

#[test]
fn a_step_that_is_stopped_examines_the_rest_later() {
    let dir = TempDir::new().unwrap();
    let (store, all) = filled(dir.path(), 9);
    all.iter().for_each(|one| flip(dir.path(), one));
    store.begin_scrub(NOW).unwrap();
    let left = Cell::new(2);
    let stops = |_| left.replace(left.get() - 1) > 0;
    store.scrub_step(NOW, Duration::ZERO, &stops).unwrap();
    assert_eq!(store.scrub_status().bad, 2);
    scrub(&store);
    assert_eq!(store.scrub_status().bad, 9);
}

#[test]
fn a_fragment_that_a_put_relies_on_stays_until_the_put_has_ended() {
    let dir = TempDir::new().unwrap();
    let (store, all) = filled(dir.path(), 1);
    // The put finds the fragment whole. Then the block is damaged.
    store.put(&all).unwrap().remove(0).unwrap();
    flip(dir.path(), &all[0]);
    store.begin_scrub(NOW).unwrap();
    let pauses = Cell::new(0);
    let ends_after_three = |time: Duration| {
        if !time.is_zero() {
            pauses.set(pauses.get() + 1);
            assert_eq!(store.scrub_status().bad, 0);
        }
        if pauses.get() == 3 {
            store.flush().unwrap();
        }
        true
    };
    store.scrub_step(NOW, Duration::ZERO, &ends_after_three).unwrap();
    assert_eq!((pauses.get(), store.scrub_status().bad), (3, 1));
    assert_eq!(store.get(&all[0].description.blob).unwrap(), []);
    // A put that never ends does not hold up the round.
    put(&store, &all);
    store.settle(false).unwrap();
    store.put(&all).unwrap().remove(0).unwrap();
    flip(dir.path(), &all[0]);
    store.begin_scrub(NOW + 9).unwrap();
    store.scrub_step(NOW + 9, Duration::ZERO, &|_| true).unwrap();
    assert!(store.scrub_round().unwrap().is_over);
    let status = store.scrub_status();
    assert_eq!((status.bad, status.scrubbed), (1, Some(NOW)), "the round is not complete");
}

#[test]
fn a_fragment_that_is_deleted_or_replaced_while_it_is_read_is_not_bad() {
    let dir = TempDir::new().unwrap();
    let (store, all) = filled(dir.path(), 6);
    let (deleted, replaced) = (&all[1], &all[3]);
    scrub_with(&store, &|known, buffer| {
        let blob = known.description.blob;
        if blob == deleted.description.blob {
            store.delete(&[id(deleted)], 0).unwrap();
        }
        if blob == replaced.description.blob {
            // Another thread has read damage, too, and puts the fragment again.
            let (path, at) = (store.files.path(known.place.segment), known.place.offset);
            to_write(&path).write_all_at(&[0; 4096], at).unwrap();
            put(&store, std::slice::from_ref(replaced));
        }
        store.read_from_disk(known, buffer)
    });
    assert_eq!(store.scrub_status().bad, 0);
    for (at, one) in all.iter().enumerate() {
        assert_eq!(has(&store, one), at != 1, "fragment {at}");
    }
    // The whole segment goes.
    let (store, all) = {
        drop(store);
        fs::remove_dir_all(dir.path()).unwrap();
        filled(dir.path(), 3)
    };
    let ids: Vec<_> = all.iter().map(id).collect();
    scrub_with(&store, &|known, buffer| {
        store.delete(&ids, 0).unwrap();
        fs::remove_file(store.files.path(known.place.segment)).ok();
        store.read_from_disk(known, buffer)
    });
    assert_eq!(store.scrub_status().bad, 0);
    assert_eq!(store.usage().unwrap().fragments, 0);
}

#[test]
fn the_scrub_waits_for_requests_within_its_patience() {
    let dir = TempDir::new().unwrap();
    let (store, _) = filled(dir.path(), 3);
    store.begin_scrub(NOW).unwrap();
    let waited = Cell::new(Duration::ZERO);
    let pause = |time| {
        waited.set(waited.get() + time);
        true
    };
    let serving = store.serving();
    let patience = Duration::from_millis(40);
    assert_eq!(store.scrub_step(NOW, patience, &pause).unwrap(), 3 * SPACE);
    assert_eq!(waited.replace(Duration::ZERO), patience);
    drop(serving);
    store.begin_scrub(NOW).unwrap();
    store.scrub_step(NOW, patience, &pause).unwrap();
    assert_eq!(waited.get(), Duration::ZERO);
}

/// Threads put, delete and read while the scrub runs round after round. Some blocks are damaged.
#[test]
fn the_scrub_finds_the_damage_and_nothing_else_beside_puts_and_deletions() {
    const THREADS: u64 = 3;
    const ROUNDS: u64 = 40;
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    let is_done = AtomicBool::new(false);
    let mut damaged = 0;
    thread::scope(|scope| {
        let scrubbing = scope.spawn(|| {
            let mut rounds = 0;
            while !is_done.load(Ordering::SeqCst) {
                store.begin_scrub(NOW).unwrap();
                while !store.scrub_round().unwrap().is_over {
                    let pause = |time: Duration| {
                        thread::sleep(time.min(Duration::from_millis(1)));
                        true
                    };
                    store.scrub_step(NOW, Duration::ZERO, &pause).unwrap();
                }
                rounds += 1;
            }
            rounds
        });
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (store, dir) = (&store, dir.path());
                scope.spawn(move || {
                    let mut damaged = 0;
                    for round in 0..ROUNDS {
                        let [one, other, third] =
                            [0, 1, 2].map(|n| fragment(10_000 * thread + 10 * round + n, CODE, 0));
                        put(store, &[one.clone(), other.clone(), third.clone()]);
                        store.settle(false).unwrap();
                        store.delete(&[id(&other)], 0).unwrap();
                        assert!(has(store, &one) && !has(store, &other) && has(store, &third));
                        if round % 8 == 3 {
                            flip(dir, &one);
                            damaged += 1;
                            let blob = one.description.blob;
                            while !store.have(&[blob], None).unwrap()[0].is_empty() {
                                thread::yield_now();
                            }
                            put(store, std::slice::from_ref(&one));
                            assert!(has(store, &one));
                        }
                        store.delete(&[id(&third)], 0).unwrap();
                    }
                    damaged
                })
            })
            .collect();
        damaged = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
        is_done.store(true, Ordering::SeqCst);
        assert!(scrubbing.join().unwrap() > 1);
    });
    scrub(&store);
    assert_eq!(store.scrub_status().bad, damaged);
    let usage = store.usage().unwrap();
    assert_eq!((usage.fragments, usage.used), (THREADS * ROUNDS, THREADS * ROUNDS * SPACE));
    for thread in 0..THREADS {
        assert!((0..ROUNDS).all(|n| has(&store, &fragment(10_000 * thread + 10 * n, CODE, 0))));
    }
}
