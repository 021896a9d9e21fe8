//! A power cut while a peer stores, deletes and scrubs fragments. The peer is then opened again.
//!
//! `power_cut` describes the method: a workload is recorded, and for each of its points, the states
//! that a power cut could leave are checked. Fragments that the peer reported as stored are there,
//! those that it reported as deleted or found bad are not, and every fragment that it reports can be
//! read, unless its block was damaged and not scrubbed since.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs};

use cairn_store::cluster::peer::PeerStore;
use cairn_store::cluster::protocol::FragmentId;
use cairn_store::encoding::Redundancy;
use cairn_store::encoding::fragment::{Fragment, encode};
use cairn_store::{BlobId, Error};
use crash_images::{Draw, cut_the_power, leave_out_syncs, mark, record, recorded_root};

const PEER: &str = "peer";
/// Bytes of a sector, which a disk writes as a whole or not at all.
const ATOM: usize = 512;

const FRAGMENTS: u64 = 12;

/// The fragment with this number. Fragments 2n and 2n + 1 have equal blocks.
fn fragment(number: u64) -> Fragment {
    let random = |seed: u64| {
        let mut bytes = vec![0; 6000];
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
        bytes
    };
    let content = [random(number / 2), random(1000 + number)].concat();
    let code = Redundancy::ReedSolomon { data: 2, parity: 1 };
    let (description, blocks) = encode(&BlobId::of(&content), &content, code);
    let block = blocks.share(0);
    Fragment { description, index: 0, block }
}

/// Opens the peer, with retries: a child process that another test has just forked holds a copy of
/// the lock until it executes its program.
fn open(root: &Path) -> PeerStore {
    let start = Instant::now();
    loop {
        match PeerStore::open(&root.join(PEER), None) {
            Err(Error::InUse { .. }) if start.elapsed() < Duration::from_secs(20) => {
                thread::sleep(Duration::from_millis(1));
            }
            opened => return opened.unwrap(),
        }
    }
}

fn mark_all(word: &str, numbers: &[u64]) {
    numbers.iter().for_each(|number| mark(&format!("{word} {number}")));
}

fn put(store: &PeerStore, numbers: &[u64]) {
    mark_all("storing", numbers);
    let all: Vec<_> = numbers.iter().map(|number| fragment(*number)).collect();
    store.put(&all).unwrap().into_iter().for_each(Result::unwrap);
    store.flush().unwrap();
    mark_all("stored", numbers);
}

fn delete(store: &PeerStore, numbers: &[u64]) {
    mark_all("deleting", numbers);
    let id = |number: &u64| {
        let Fragment { description, index, .. } = fragment(*number);
        FragmentId { blob: description.blob, encoding: description.id(), index }
    };
    store.delete(&numbers.iter().map(id).collect::<Vec<_>>(), 0).unwrap();
    mark_all("deleted", numbers);
}

/// Flips a bit of the blocks of fragments, and scrubs all fragments.
fn damage_and_scrub(root: &Path, store: &PeerStore, numbers: &[u64]) {
    mark_all("damaging", numbers);
    let segment = root.join(PEER).join("segments/00000001");
    let bytes = fs::read(&segment).unwrap();
    let file = fs::File::options().write(true).open(&segment).unwrap();
    for number in numbers {
        let block = fragment(*number).block;
        for at in (0..bytes.len()).step_by(4096).filter(|at| bytes[*at..].starts_with(&block)) {
            file.write_all_at(&[block[5] ^ 1], at as u64 + 5).unwrap();
        }
    }
    assert_eq!(scrub(store), numbers.len() as u64);
    mark_all("deleted", numbers);
}

/// Scrubs all fragments that the table has. Returns how many bad ones were found.
fn scrub(store: &PeerStore) -> u64 {
    let before = store.scrub_status().bad;
    store.settle(false).unwrap();
    store.begin_scrub(1).unwrap();
    while store.scrub_round().is_some_and(|round| !round.is_over) {
        store.scrub_step(1, Duration::ZERO, &|_| true).unwrap();
    }
    store.scrub_status().bad - before
}

/// The recorded workload. It does nothing if it is not recorded.
#[test]
fn workload() {
    let Some(root) = recorded_root() else { return };
    {
        let store = open(&root);
        mark("created");
        put(&store, &[0, 1, 2]);
        put(&store, &[3, 4, 5, 6]);
        // These are in the segment that the peer appends to.
        delete(&store, &[1, 2, 3]);
        put(&store, &[7, 2]);
        damage_and_scrub(&root, &store, &[6, 7]);
        put(&store, &[6, 7]);
    }
    {
        let store = open(&root);
        delete(&store, &[4, 5]);
        damage_and_scrub(&root, &store, &[0, 2]);
        put(&store, &[8, 9, 4, 0]);
        // Fragment 2 is bad.
        delete(&store, &[0, 2, 4, 6, 7, 8, 9]);
        put(&store, &[10, 0]);
    }
    {
        let store = open(&root);
        delete(&store, &[10]);
        put(&store, &[11]);
        // This deletes the last fragments.
        delete(&store, &[11, 0]);
    }
    put(&open(&root), &[0, 5]);
    // The peer appends to the last segment. So the first one is removed with its last fragment.
    fs::write(root.join(PEER).join("segments/00000002"), []).unwrap();
    {
        let store = open(&root);
        put(&store, &[3]);
        delete(&store, &[0, 5]);
        assert!(!root.join(PEER).join("segments/00000001").exists());
    }
    mark("done");
}

fn command() -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "peer_power_cut::workload", "--test-threads=1"]);
    command
}

#[derive(Clone, Copy, PartialEq)]
enum Expected {
    Present,
    Absent,
    /// An operation has begun and has not ended.
    Either,
    /// The block may be damaged.
    Damaged,
}

fn expected(marks: &[String]) -> BTreeMap<u64, Expected> {
    let mut expected: BTreeMap<_, _> =
        (0..FRAGMENTS).map(|number| (number, Expected::Absent)).collect();
    for mark in marks {
        let Some((word, number)) = mark.split_once(' ') else { continue };
        let state = match word {
            "stored" => Expected::Present,
            "deleted" => Expected::Absent,
            "damaging" => Expected::Damaged,
            _ => Expected::Either,
        };
        expected.insert(number.parse().unwrap(), state);
    }
    expected
}

fn check(root: &Path, marks: &[String]) {
    let store = open(root);
    for (number, expected) in expected(marks) {
        let wanted = fragment(number);
        let found = store.get(&wanted.description.blob).unwrap();
        let held = store.have(&[wanted.description.blob], None).unwrap().remove(0);
        assert_eq!(held.len(), found.len(), "fragment {number} is reported and cannot be read");
        if expected != Expected::Damaged {
            assert!(found.is_empty() || found == [wanted], "fragment {number} has other content");
        }
        if matches!(expected, Expected::Present | Expected::Absent) {
            let is_expected = expected == Expected::Present;
            assert_eq!(!found.is_empty(), is_expected, "whether fragment {number} exists");
        }
    }
    let all: Vec<_> = (0..FRAGMENTS).map(fragment).collect();
    store.put(&all).unwrap().into_iter().for_each(Result::unwrap);
    store.flush().unwrap();
    drop(store);
    let store = open(root);
    for one in &all {
        assert_eq!(store.get(&one.description.blob).unwrap(), std::slice::from_ref(one));
    }
    assert_eq!(store.usage().unwrap().fragments, FRAGMENTS);
    assert_eq!(scrub(&store), 0, "a good fragment counts as bad");
    assert_eq!(store.usage().unwrap().fragments, FRAGMENTS);
}

#[test]
fn a_power_cut_at_any_point_leaves_what_the_peer_reported() {
    cut_the_power(&record(&command()), 4, ATOM, check);
}

#[test]
fn the_test_detects_a_missing_sync() {
    let recording = record(&command());
    for name in ["peer/segments", "peer/segments/00000001", "peer/fragments.db-wal"] {
        leave_out_syncs(&recording, name, Draw { seed: 1, images: 4, atom: ATOM }, check);
    }
}
