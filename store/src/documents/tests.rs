//! The promises of [`Documents`]. Each test runs with each implementation.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;

use super::{Change, Documents, Query, SqliteDocuments, View, try_lock, unlock};
use crate::documents::etcd::tests::Process;
use crate::documents::remote::tests::Catalog;

/// A document store that is empty at first.
trait DocumentStore {
    /// Opens the store once more, as another process would.
    fn open(&self) -> Arc<dyn Documents>;
}

impl DocumentStore for TempDir {
    fn open(&self) -> Arc<dyn Documents> {
        let path = self.path().join("catalog.db");
        SqliteDocuments::create(&path).unwrap();
        Arc::new(SqliteDocuments::open(&path).unwrap())
    }
}

impl DocumentStore for Catalog {
    fn open(&self) -> Arc<dyn Documents> {
        Arc::new(self.client())
    }
}

impl DocumentStore for Process {
    fn open(&self) -> Arc<dyn Documents> {
        Arc::new(self.client())
    }
}

/// Declares a module with all tests for one kind of store.
macro_rules! conformance {
    ($kind:ident, $store:expr) => {
        mod $kind {
            conformance!(
                $store,
                a_read_shows_what_was_written,
                a_change_that_relies_on_another_version_is_not_carried_out,
                a_change_is_carried_out_as_a_whole_or_not_at_all,
                no_version_comes_twice,
                a_prefix_matches_only_keys_that_begin_with_it,
                a_document_with_a_time_to_live_expires,
                one_process_at_a_time_holds_a_lock,
                a_wait_returns_after_a_change,
                concurrent_increments_are_not_lost
            );
        }
    };
    ($store:expr, $($test:ident),+) => {
        $(
            #[test]
            fn $test() {
                super::$test(&$store);
            }
        )+
    };
}

conformance!(sqlite, tempfile::TempDir::new().unwrap());
conformance!(remote, crate::documents::remote::tests::Catalog::start());
conformance!(etcd, crate::documents::etcd::tests::Process::start());

fn read(documents: &dyn Documents, key: &str) -> View {
    documents.read(&[Query::key(key)]).unwrap()
}

fn number(documents: &dyn Documents, key: &str) -> Option<u64> {
    read(documents, key).get(key).unwrap()
}

fn put(documents: &dyn Documents, key: &str, value: u64) {
    assert!(documents.commit(&Change::default().put(key, &value)).unwrap());
}

fn a_read_shows_what_was_written(store: &dyn DocumentStore) {
    let (one, other) = (store.open(), store.open());
    assert_eq!(number(&*one, "a/x"), None);
    put(&*one, "a/x", 7);
    assert_eq!(number(&*other, "a/x"), Some(7), "every client sees it at once");
    put(&*other, "a/y", 8);
    let view = one.read(&[Query::prefix("a/"), Query::key("b")]).unwrap();
    let found: Vec<(String, u64)> = view.under("a/").unwrap();
    assert_eq!(found, [("x".into(), 7), ("y".into(), 8)]);
    assert_eq!(view.documents.len(), 2);
    assert!(other.commit(&Change::default().remove(Query::key("a/x"))).unwrap());
    assert_eq!(number(&*one, "a/x"), None);
    assert_eq!(number(&*one, "a/y"), Some(8));
}

fn a_change_that_relies_on_another_version_is_not_carried_out(store: &dyn DocumentStore) {
    let documents = store.open();
    let rely = |key: &str, version| {
        let change = Change { relies_on: vec![(key.into(), version)], ..Change::default() };
        documents.commit(&change.put("result", &1)).unwrap()
    };
    assert!(!rely("x", 1), "it does not exist");
    assert_eq!(number(&*documents, "result"), None);
    assert!(rely("x", 0), "it does not exist, as expected");
    put(&*documents, "x", 1);
    assert!(!rely("x", 0), "it exists");
    let version = read(&*documents, "x").version("x");
    assert!(version > 0 && rely("x", version));
    put(&*documents, "x", 1);
    assert!(!rely("x", version), "the same content, written again");
    assert!(documents.commit(&Change::default().remove(Query::key("x"))).unwrap());
    assert!(!rely("x", version) && rely("x", 0), "it was removed");
}

fn a_change_is_carried_out_as_a_whole_or_not_at_all(store: &dyn DocumentStore) {
    let documents = store.open();
    for n in 0..5 {
        put(&*documents, &format!("old/{n}"), n);
    }
    let change = Change::default().remove(Query::prefix("old/")).put("old/3", &30).put("new", &1);
    let failing = Change { relies_on: vec![("new".into(), 5)], ..change.clone() };
    assert!(!documents.commit(&failing).unwrap());
    let before = documents.read(&[Query::prefix("")]).unwrap();
    assert_eq!(before.documents.len(), 5);
    assert!(documents.commit(&change).unwrap());
    let after = documents.read(&[Query::prefix("")]).unwrap();
    let keys: Vec<_> = after.documents.keys().collect();
    assert_eq!(keys, ["new", "old/3"], "removals come before writes");
    assert_eq!(after.get::<u64>("old/3").unwrap(), Some(30));
    assert_eq!(after.version("new"), after.version("old/3"), "one change, one revision");
    assert!(after.revision > before.revision);
}

fn no_version_comes_twice(store: &dyn DocumentStore) {
    let documents = store.open();
    let mut last = 0;
    for round in 0..5 {
        put(&*documents, "x", 1);
        let view = read(&*documents, "x");
        assert!(view.version("x") > last && view.revision >= view.version("x"), "round {round}");
        last = view.version("x");
        assert!(documents.commit(&Change::default().remove(Query::key("x"))).unwrap());
    }
}

fn a_prefix_matches_only_keys_that_begin_with_it(store: &dyn DocumentStore) {
    let documents = store.open();
    for key in ["a", "a/", "a/b", "a0", "ab", "b", "a/\u{ff}", "a/ä"] {
        put(&*documents, key, 1);
    }
    let keys = |prefix: &str| {
        let view = documents.read(&[Query::prefix(prefix)]).unwrap();
        view.documents.into_keys().collect::<Vec<_>>()
    };
    assert_eq!(keys("a/"), ["a/", "a/b", "a/ä", "a/\u{ff}"]);
    assert_eq!(keys("a").len(), 7);
    assert_eq!(keys("").len(), 8);
    assert_eq!(keys("c").len(), 0);
}

fn a_document_with_a_time_to_live_expires(store: &dyn DocumentStore) {
    let documents = store.open();
    let beat = || Change { relaxed: true, ..Change::default() }.put_for(3, "alive/x", &json!({}));
    assert!(documents.commit(&beat()).unwrap());
    let first = Instant::now();
    put(&*documents, "alive/y", 1);
    let count = || documents.read(&[Query::prefix("alive/")]).unwrap().documents.len();
    let mut last = Instant::now();
    while first.elapsed() < Duration::from_secs(4) {
        // It does not expire while it is written.
        last = Instant::now();
        assert!(documents.commit(&beat()).unwrap());
        let found = count();
        assert!(found == 2 || last.elapsed() > Duration::from_secs(2), "{:?}", first.elapsed());
        thread::sleep(Duration::from_millis(100));
    }
    let end = last + Duration::from_secs(60);
    while count() == 2 {
        assert!(Instant::now() < end, "it does not expire");
        thread::sleep(Duration::from_millis(50));
    }
    assert!(last.elapsed() > Duration::from_secs(1), "it expires too early");
    let change = Change { relies_on: vec![("alive/x".into(), 0)], ..Change::default() };
    assert!(documents.commit(&change.put("alive/x", &1)).unwrap(), "it has no version");
    assert_eq!(count(), 2, "a document without a time to live does not expire");
}

fn one_process_at_a_time_holds_a_lock(store: &dyn DocumentStore) {
    let [one, other] = [store.open(), store.open()];
    let locks = |documents: &Arc<dyn Documents>, holder: &str| {
        try_lock(&**documents, "leader/x", holder, 60).unwrap()
    };
    assert!(locks(&one, "one"));
    assert!(!locks(&other, "other"));
    assert!(locks(&one, "one"), "the holder can renew the lock");
    unlock(&*other, "leader/x", "other").unwrap();
    assert!(!locks(&other, "other"), "only the holder can unlock");
    unlock(&*one, "leader/x", "one").unwrap();
    unlock(&*one, "leader/x", "one").unwrap();
    assert!(locks(&other, "other"));
    assert!(!locks(&one, "one"));
}

fn a_wait_returns_after_a_change(store: &dyn DocumentStore) {
    let documents = store.open();
    put(&*documents, "a/x", 1);
    let revision = read(&*documents, "a/x").revision;
    let begin = Instant::now();
    documents.wait("a", revision, Duration::from_millis(200)).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(10), "it returns when the time is over");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let begin = Instant::now();
            documents.wait("a", revision, Duration::from_secs(60)).unwrap();
            begin.elapsed()
        });
        thread::sleep(Duration::from_millis(100));
        put(&*store.open(), "a/y", 1);
        assert!(waiting.join().unwrap() < Duration::from_secs(30), "it returns after the change");
    });
    let begin = Instant::now();
    documents.wait("a", revision, Duration::from_secs(60)).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(30), "a change before the wait counts, too");
}

fn concurrent_increments_are_not_lost(store: &dyn DocumentStore) {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 25;
    thread::scope(|scope| {
        for _ in 0..THREADS {
            let documents = store.open();
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    loop {
                        let view = read(&*documents, "count");
                        let count: u64 = view.get("count").unwrap().unwrap_or(0);
                        let relies_on = vec![("count".into(), view.version("count"))];
                        let change = Change { relies_on, ..Change::default() };
                        if documents.commit(&change.put("count", &(count + 1))).unwrap() {
                            break;
                        }
                    }
                }
            });
        }
    });
    assert_eq!(number(&*store.open(), "count"), Some(THREADS * ROUNDS));
}
