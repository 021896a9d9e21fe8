//! Tests of stamps: which fragments a collection may delete.

use std::fs;

use tempfile::TempDir;

use super::tests::{CODE, fragment};
use super::{PutOrder, id};
use crate::cluster::peer::PeerStore;
use crate::cluster::protocol::PeerTime;
use crate::collection::CollectionNumber;
use crate::encoding::Seal;
use crate::encoding::fragment::Fragment;

const LATER: PeerTime = PeerTime(u64::MAX);

fn put(store: &PeerStore, fragments: &[Fragment], stamp: u64) {
    let order = |_| PutOrder { stamp: CollectionNumber(stamp), room: None };
    store.put_in(fragments, order).unwrap().into_iter().for_each(Result::unwrap);
    store.flush().unwrap();
}

/// Deletes what is stamped below `below`. Returns whether that was all.
fn collect(store: &PeerStore, one: &Fragment, below: u64) -> bool {
    let below = CollectionNumber(below);
    store.delete_before(LATER, &[id(one)], 0, below).unwrap();
    store.get(&one.description.blob).unwrap().is_empty()
}

#[test]
fn a_fragment_is_deleted_only_below_the_bound() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let one = fragment(1, CODE, 0);
    put(&store, std::slice::from_ref(&one), 7);
    for settled in [false, true] {
        assert!(!collect(&store, &one, 0) && !collect(&store, &one, 7), "{settled}");
        store.settle(false).unwrap();
    }
    assert!(collect(&store, &one, 8));
}

#[test]
fn a_question_with_renewal_raises_the_stamp_and_never_lowers_it() {
    for settled in [false, true] {
        let dir = TempDir::new().unwrap();
        let store = PeerStore::open(dir.path(), None).unwrap();
        let one = fragment(1, CODE, 0);
        put(&store, std::slice::from_ref(&one), 3);
        if settled {
            store.settle(false).unwrap();
        }
        let ask = |stamp: Option<u64>| {
            store.have(&[one.description.blob], stamp.map(CollectionNumber)).unwrap()[0].len()
        };
        assert_eq!((ask(None), ask(Some(9)), ask(Some(4))), (1, 1, 1));
        assert!(!collect(&store, &one, 9), "settled: {settled}");
        drop(store);
        let store = PeerStore::open(dir.path(), None).unwrap();
        assert!(!collect(&store, &one, 9), "after a restart");
        assert!(collect(&store, &one, 10));
    }
}

#[test]
fn a_put_of_a_stored_fragment_raises_its_stamp_and_replaces_its_seal() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let mut one = fragment(1, CODE, 0);
    put(&store, std::slice::from_ref(&one), 3);
    put(&store, std::slice::from_ref(&one), 5);
    put(&store, std::slice::from_ref(&one), 4);
    assert_eq!(store.usage().unwrap().fragments, 1);
    assert!(!collect(&store, &one, 5));
    one.description.seal = Seal::from_bytes([8; 20]);
    put(&store, std::slice::from_ref(&one), 1);
    let seal = |store: &PeerStore| store.get(&one.description.blob).unwrap()[0].description.seal;
    assert_eq!(seal(&store), one.description.seal);
    assert_eq!(store.usage().unwrap().fragments, 1);
    assert!(!collect(&store, &one, 5), "a lower stamp changes nothing");
    drop(store);
    let store = PeerStore::open(dir.path(), None).unwrap();
    assert_eq!(seal(&store), one.description.seal);
    assert!(collect(&store, &one, 6));
}

/// The log has the stamps of the puts. Questions raise stamps in the table only.
#[test]
fn without_its_table_a_peer_keeps_everything_from_collections() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let one = fragment(1, CODE, 0);
    put(&store, std::slice::from_ref(&one), 3);
    store.have(&[one.description.blob], Some(CollectionNumber(50))).unwrap();
    drop(store);
    for file in ["fragments.db", "fragments.db-wal", "fragments.db-shm"] {
        let _ = fs::remove_file(dir.path().join(file));
    }
    let store = PeerStore::open(dir.path(), None).unwrap();
    assert!(!collect(&store, &one, 50) && !collect(&store, &one, 1 << 40));
    store.delete(&[id(&one)], 0).unwrap();
    assert!(store.get(&one.description.blob).unwrap().is_empty(), "a repair may delete it");
}

/// The peer is killed before the table has the fragment.
#[test]
fn a_stamp_is_as_durable_as_its_fragment() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let one = fragment(1, CODE, 0);
    put(&store, std::slice::from_ref(&one), 7);
    let killed = TempDir::new().unwrap();
    fs::create_dir(killed.path().join("segments")).unwrap();
    for file in ["peer.json", "fragments.db", "fragments.db-wal", "segments/00000001"] {
        fs::copy(dir.path().join(file), killed.path().join(file)).unwrap();
    }
    let store = PeerStore::open(killed.path(), None).unwrap();
    assert!(!collect(&store, &one, 7));
    assert!(collect(&store, &one, 8));
}
