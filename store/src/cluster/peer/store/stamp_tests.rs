//! Tests of stamps: which fragments a collection may delete.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use tempfile::TempDir;

use super::storing::{PutOrder, id};
use super::tests::{CODE, fragment};
use crate::cluster::peer::PeerStore;
use crate::cluster::protocol::{PeerTime, StampBound};
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
    collect_as(store, one, below, below)
}

/// Deletes as collection `number` what is stamped below `below`. Returns whether that was all.
fn collect_as(store: &PeerStore, one: &Fragment, number: u64, below: u64) -> bool {
    let [number, below] = [number, below].map(CollectionNumber);
    let bound = StampBound { below, number };
    let planned = store.deletable(&[id(one)], 0, bound).unwrap();
    assert_eq!(store.delete_before(LATER, &[id(one)], 0, bound).unwrap(), planned);
    store.get(&one.description.blob).unwrap().is_empty()
}

/// Opens what a killed peer would leave.
fn copy_of(from: &Path, to: &TempDir) -> PeerStore {
    fs::create_dir(to.path().join("segments")).unwrap();
    for file in ["peer.json", "fragments.db", "fragments.db-wal", "segments/00000001"] {
        fs::copy(from.join(file), to.path().join(file)).unwrap();
    }
    PeerStore::open(to.path(), None).unwrap()
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
fn without_its_table_a_peer_keeps_everything_from_the_next_collection() {
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
    // The question may have come from a commit with any number up to that of the collection.
    assert!(!collect_as(&store, &one, 60, 50) && !collect_as(&store, &one, 60, 60));
    assert!(collect_as(&store, &one, 61, 61));
    put(&store, std::slice::from_ref(&one), 70);
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
    let store = copy_of(dir.path(), &killed);
    assert!(!collect(&store, &one, 7));
    assert!(collect(&store, &one, 8));
}

/// Two clients put the same fragment before it is durable, and in one group.
#[test]
fn the_higher_stamp_of_two_puts_at_the_same_time_counts() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let one = fragment(1, CODE, 0);
    let order = |stamp| move |_| PutOrder { stamp: CollectionNumber(stamp), room: None };
    for stamp in [5, 9, 7] {
        store.put_in(std::slice::from_ref(&one), order(stamp)).unwrap().remove(0).unwrap();
    }
    store.flush().unwrap();
    assert!(!collect(&store, &one, 9));
    assert!(collect(&store, &one, 10));
    let stamps = [5, 9].map(CollectionNumber);
    let order = |at: usize| PutOrder { stamp: stamps[at], room: None };
    let both = [fragment(2, CODE, 0), fragment(2, CODE, 0)];
    store.put_in(&both, order).unwrap().into_iter().for_each(Result::unwrap);
    store.flush().unwrap();
    assert_eq!(store.usage().unwrap().fragments, 1);
    assert!(!collect(&store, &both[0], 9));
}

/// A question raises the stamp of a fragment whose replacement is on its way.
#[test]
fn a_replacement_keeps_the_stamp_of_the_fragment_that_it_replaces() {
    for killed in [false, true] {
        let dir = TempDir::new().unwrap();
        let store = PeerStore::open(dir.path(), None).unwrap();
        let one = fragment(1, CODE, 0);
        put(&store, std::slice::from_ref(&one), 3);
        store.settle(false).unwrap();
        // The record takes a page, and the block follows.
        let segment = File::options().write(true).open(dir.path().join("segments/00000001"));
        segment.unwrap().write_all_at(&[one.block[0] ^ 1], 4096).unwrap();
        let order = |_| PutOrder { stamp: CollectionNumber(5), room: None };
        store.put_in(std::slice::from_ref(&one), order).unwrap().remove(0).unwrap();
        let stamp = Some(CollectionNumber(9));
        assert_eq!(store.have(&[one.description.blob], stamp).unwrap()[0].len(), 1);
        store.flush().unwrap();
        let copy = TempDir::new().unwrap();
        let store = match killed {
            true => copy_of(dir.path(), &copy),
            false => store,
        };
        store.settle(false).unwrap();
        assert_eq!(store.get(&one.description.blob).unwrap(), std::slice::from_ref(&one));
        assert!(!collect(&store, &one, 9), "killed: {killed}");
        assert!(collect(&store, &one, 10));
    }
}

/// The peer is killed between the segments when it makes its table again.
#[test]
fn a_segment_that_the_table_does_not_know_has_lost_its_stamps() {
    let dir = TempDir::new().unwrap();
    let store = PeerStore::open(dir.path(), None).unwrap();
    let one = fragment(1, CODE, 0);
    put(&store, std::slice::from_ref(&one), 3);
    drop(store);
    let database = rusqlite::Connection::open(dir.path().join("fragments.db")).unwrap();
    database.execute_batch("DELETE FROM fragments; DELETE FROM segments").unwrap();
    drop(database);
    let store = PeerStore::open(dir.path(), None).unwrap();
    assert_eq!(store.get(&one.description.blob).unwrap(), std::slice::from_ref(&one));
    assert!(!collect_as(&store, &one, 1 << 40, 1 << 40));
}
