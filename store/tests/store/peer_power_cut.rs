//! The power is cut while a peer stores and deletes fragments, and the peer is opened again.
//!
//! `power_cut` has the words: a workload is recorded, and from each point on what a power cut could leave is
//! checked. What a peer has said to be stored is there, what it has said to be deleted is not, and what it says to
//! have can be read.

use std::collections::BTreeMap;
use std::env;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use cairn_store::cluster::peer::PeerStore;
use cairn_store::cluster::protocol::FragmentId;
use cairn_store::encoding::Redundancy;
use cairn_store::encoding::fragment::{Fragment, encode};
use cairn_store::{BlobId, Error};
use crash_images::{Draw, cut_the_power, leave_out_syncs, mark, record, recorded_root};

const PEER: &str = "peer";
/// A sector of a disk.
const ATOM: usize = 512;

const FRAGMENTS: u64 = 12;

/// A fragment of a blob. Every two of them have equal blocks.
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

/// Opens the peer. A process that another test has just forked has its lock, too, until it becomes another program.
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

fn tell(word: &str, numbers: &[u64]) {
    numbers.iter().for_each(|number| mark(&format!("{word} {number}")));
}

fn put(store: &PeerStore, numbers: &[u64]) {
    tell("storing", numbers);
    let all: Vec<_> = numbers.iter().map(|number| fragment(*number)).collect();
    store.put(&all).unwrap().into_iter().for_each(Result::unwrap);
    store.flush().unwrap();
    tell("stored", numbers);
}

fn delete(store: &PeerStore, numbers: &[u64]) {
    tell("deleting", numbers);
    let id = |number: &u64| {
        let Fragment { description, index, .. } = fragment(*number);
        FragmentId { blob: description.blob, encoding: description.id(), index }
    };
    store.delete(&numbers.iter().map(id).collect::<Vec<_>>(), 0).unwrap();
    tell("deleted", numbers);
}

/// What is recorded; when it is not, it does nothing.
#[test]
fn workload() {
    let Some(root) = recorded_root() else { return };
    {
        let store = open(&root);
        mark("created");
        put(&store, &[0, 1, 2]);
        put(&store, &[3, 4, 5, 6]);
        // Where the peer appends.
        delete(&store, &[1, 2, 3]);
        put(&store, &[7, 2]);
    }
    {
        let store = open(&root);
        delete(&store, &[4, 5]);
        put(&store, &[8, 9, 4]);
        delete(&store, &[0, 2, 4, 6, 7, 8, 9]);
        put(&store, &[10, 0]);
    }
    {
        let store = open(&root);
        delete(&store, &[10]);
        put(&store, &[11]);
        // Nothing is left.
        delete(&store, &[11, 0]);
    }
    put(&open(&root), &[0, 5]);
    mark("done");
}

fn command() -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "peer_power_cut::workload", "--test-threads=1"]);
    command
}

/// Which fragments must be there, and which must not. In between, either is right.
fn told(marks: &[String]) -> BTreeMap<u64, Option<bool>> {
    let mut told: BTreeMap<_, _> = (0..FRAGMENTS).map(|number| (number, Some(false))).collect();
    for mark in marks {
        let Some((word, number)) = mark.split_once(' ') else { continue };
        let state = match word {
            "stored" => Some(true),
            "deleted" => Some(false),
            _ => None,
        };
        told.insert(number.parse().unwrap(), state);
    }
    told
}

fn check(root: &Path, marks: &[String]) {
    let store = open(root);
    for (number, told) in told(marks) {
        let wanted = fragment(number);
        let found = store.get(&wanted.description.blob).unwrap();
        let held = store.have(&[wanted.description.blob], false).unwrap().remove(0);
        assert_eq!(held.len(), found.len(), "fragment {number} is known and cannot be read");
        assert!(found.is_empty() || found == [wanted], "fragment {number} is something else");
        if let Some(told) = told {
            assert_eq!(!found.is_empty(), told, "whether fragment {number} is there");
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
}

#[test]
fn a_power_cut_at_any_point_leaves_what_was_told() {
    cut_the_power(&record(&command()), 4, ATOM, check);
}

#[test]
fn a_sync_that_is_left_out_is_found() {
    let recording = record(&command());
    for name in ["peer/segments", "peer/segments/00000001", "peer/fragments.db-wal"] {
        leave_out_syncs(&recording, name, Draw { seed: 1, images: 4, atom: ATOM }, check);
    }
}
