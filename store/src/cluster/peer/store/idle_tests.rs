//! Tests of the idle time, with a clock that the tests set.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tempfile::TempDir;

use super::PeerStore;
use super::storing::id;
use super::tests::RENEW;
use super::tests::{CODE, fragment};
use crate::encoding::fragment::Fragment;

/// A day, which is the idle time of every deletion of these tests.
const DAY: u32 = 24 * 3600;

/// The seconds by which an age may be too old, in `table`.
const RENEWAL: u64 = 300;

/// A clock that a test sets.
#[derive(Clone, Default)]
struct Clock(Arc<AtomicU64>);

impl Clock {
    fn open(&self, dir: &Path) -> PeerStore {
        let clock = self.0.clone();
        let elapsed = move || Duration::from_secs(clock.load(Ordering::SeqCst));
        PeerStore::open_with_clock(dir, None, None, Box::new(elapsed)).unwrap()
    }

    fn advance(&self, seconds: u64) {
        self.0.fetch_add(seconds, Ordering::SeqCst);
    }
}

fn put(store: &PeerStore, one: &Fragment) {
    store.put(std::slice::from_ref(one)).unwrap().remove(0).unwrap();
    store.flush().unwrap();
    store.settle(false).unwrap();
}

/// Deletes a fragment if it is idle. Returns whether it was.
fn is_idle(store: &PeerStore, one: &Fragment) -> bool {
    store.delete(&[id(one)], DAY).unwrap() > 0
}

#[test]
fn a_fragment_is_idle_after_the_time_for_which_the_peer_has_run() {
    let dir = TempDir::new().unwrap();
    let one = fragment(1, CODE, 0);
    // A peer that is restarted every six hours.
    let clock = Clock::default();
    put(&clock.open(dir.path()), &one);
    for _ in 0..4 {
        // Each process has a clock of its own, and nobody knows how much time lies between them.
        let clock = Clock::default();
        let store = clock.open(dir.path());
        clock.advance(u64::from(DAY) / 4);
        assert!(!is_idle(&store, &one));
    }
    let clock = Clock::default();
    let store = clock.open(dir.path());
    clock.advance(RENEWAL - 1);
    assert!(!is_idle(&store, &one));
    clock.advance(1);
    assert!(is_idle(&store, &one));
}

#[test]
fn a_fragment_of_an_earlier_process_is_fresh_when_the_peer_starts() {
    let dir = TempDir::new().unwrap();
    let clock = Clock::default();
    let (one, other) = (fragment(1, CODE, 0), fragment(2, CODE, 0));
    let store = clock.open(dir.path());
    // Years after the directory was created.
    clock.advance(20 * 365 * u64::from(DAY));
    put(&store, &one);
    drop(store);
    let store = Clock::default().open(dir.path());
    assert!(!is_idle(&store, &one));
    put(&store, &other);
    drop(store);
    // The table is lost, and with it the clock.
    for file in ["fragments.db", "fragments.db-wal", "fragments.db-shm"] {
        let _ = fs::remove_file(dir.path().join(file));
    }
    let clock = Clock::default();
    let store = clock.open(dir.path());
    assert!(!is_idle(&store, &one) && !is_idle(&store, &other));
    clock.advance(u64::from(DAY) + RENEWAL);
    assert!(is_idle(&store, &one) && is_idle(&store, &other));
}

/// After a kill the clock may be behind the stamps.
#[test]
fn a_stamp_in_the_future_is_fresh() {
    let dir = TempDir::new().unwrap();
    let clock = Clock::default();
    let one = fragment(1, CODE, 0);
    let store = clock.open(dir.path());
    clock.advance(u64::from(DAY));
    put(&store, &one);
    drop(store);
    let database = rusqlite::Connection::open(dir.path().join("fragments.db")).unwrap();
    database.execute("UPDATE clock SET running = running - 50", []).unwrap();
    drop(database);
    let clock = Clock::default();
    let store = clock.open(dir.path());
    assert!(!is_idle(&store, &one));
    assert_eq!(store.have(&[one.description.blob], RENEW).unwrap()[0].len(), 1);
    clock.advance(u64::from(DAY) + RENEWAL);
    assert!(!is_idle(&store, &one), "it is younger than the clock says");
    clock.advance(50);
    assert!(is_idle(&store, &one));
}

#[test]
fn a_kill_sets_the_clock_back_by_a_minute_at_most() {
    let dir = TempDir::new().unwrap();
    let clock = Clock::default();
    let store = clock.open(dir.path());
    for number in 0..20 {
        clock.advance(7 * 3600 + 13 * number);
        put(&store, &fragment(number, CODE, 0));
        let database = rusqlite::Connection::open(dir.path().join("fragments.db")).unwrap();
        let query = "SELECT max(touched) - (SELECT running FROM clock) FROM fragments";
        let behind: i64 = database.query_row(query, [], |row| row.get(0)).unwrap();
        assert!((0..60).contains(&behind), "{behind}");
    }
}
