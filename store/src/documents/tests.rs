//! What every place for documents promises. Each test runs over each of them.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;

use super::{Change, Documents, Query, SqliteDocuments, View, try_lock, unlock};
use crate::documents::etcd::tests::Process;
use crate::documents::remote::tests::Catalog;

/// A place that is empty, and further ways to it, as other processes have them.
trait Place {
    fn open(&self) -> Arc<dyn Documents>;
}

impl Place for TempDir {
    fn open(&self) -> Arc<dyn Documents> {
        let path = self.path().join("catalog.db");
        SqliteDocuments::create(&path).unwrap();
        Arc::new(SqliteDocuments::open(&path).unwrap())
    }
}

impl Place for Catalog {
    fn open(&self) -> Arc<dyn Documents> {
        Arc::new(self.client())
    }
}

impl Place for Process {
    fn open(&self) -> Arc<dyn Documents> {
        Arc::new(self.client())
    }
}

/// Makes a module of tests for one kind of place.
macro_rules! conformance {
    ($kind:ident, $place:expr) => {
        mod $kind {
            conformance!(
                $place,
                a_read_shows_what_was_written,
                a_change_that_relies_on_something_else_is_not_carried_out,
                a_change_is_whole_or_nothing,
                no_version_comes_twice,
                a_prefix_is_not_a_folder_and_a_folder_is_not_its_neighbour,
                a_document_with_a_time_to_live_ends,
                one_at_a_time_holds_a_document,
                who_waits_is_told,
                counters_of_many_threads_lose_nothing
            );
        }
    };
    ($place:expr, $($test:ident),+) => {
        $(
            #[test]
            fn $test() {
                super::$test(&$place);
            }
        )+
    };
}

conformance!(embedded, tempfile::TempDir::new().unwrap());
conformance!(served, crate::documents::remote::tests::Catalog::start());
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

fn a_read_shows_what_was_written(place: &dyn Place) {
    let (one, other) = (place.open(), place.open());
    assert_eq!(number(&*one, "a/x"), None);
    put(&*one, "a/x", 7);
    assert_eq!(number(&*other, "a/x"), Some(7), "at once, for everybody");
    put(&*other, "a/y", 8);
    let view = one.read(&[Query::prefix("a/"), Query::key("b")]).unwrap();
    let found: Vec<(String, u64)> = view.under("a/").unwrap();
    assert_eq!(found, [("x".into(), 7), ("y".into(), 8)]);
    assert_eq!(view.documents.len(), 2);
    assert!(other.commit(&Change::default().remove(Query::key("a/x"))).unwrap());
    assert_eq!(number(&*one, "a/x"), None);
    assert_eq!(number(&*one, "a/y"), Some(8));
}

fn a_change_that_relies_on_something_else_is_not_carried_out(place: &dyn Place) {
    let documents = place.open();
    let rely = |key: &str, version| {
        let change = Change { relies_on: vec![(key.into(), version)], ..Change::default() };
        documents.commit(&change.put("result", &1)).unwrap()
    };
    assert!(!rely("x", 1), "it is not there");
    assert_eq!(number(&*documents, "result"), None);
    assert!(rely("x", 0), "as it says");
    put(&*documents, "x", 1);
    assert!(!rely("x", 0), "it is there");
    let version = read(&*documents, "x").version("x");
    assert!(version > 0 && rely("x", version));
    put(&*documents, "x", 1);
    assert!(!rely("x", version), "the same content, written again");
    assert!(documents.commit(&Change::default().remove(Query::key("x"))).unwrap());
    assert!(!rely("x", version) && rely("x", 0), "it is gone");
}

fn a_change_is_whole_or_nothing(place: &dyn Place) {
    let documents = place.open();
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
    assert_eq!(keys, ["new", "old/3"], "what it writes is there, what it removes is not");
    assert_eq!(after.get::<u64>("old/3").unwrap(), Some(30));
    assert_eq!(after.version("new"), after.version("old/3"), "one change, one revision");
    assert!(after.revision > before.revision);
}

fn no_version_comes_twice(place: &dyn Place) {
    let documents = place.open();
    let mut last = 0;
    for round in 0..5 {
        put(&*documents, "x", 1);
        let view = read(&*documents, "x");
        assert!(view.version("x") > last && view.revision >= view.version("x"), "round {round}");
        last = view.version("x");
        assert!(documents.commit(&Change::default().remove(Query::key("x"))).unwrap());
    }
}

fn a_prefix_is_not_a_folder_and_a_folder_is_not_its_neighbour(place: &dyn Place) {
    let documents = place.open();
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

fn a_document_with_a_time_to_live_ends(place: &dyn Place) {
    let documents = place.open();
    let beat = || Change { relaxed: true, ..Change::default() }.put_for(3, "alive/x", &json!({}));
    assert!(documents.commit(&beat()).unwrap());
    let first = Instant::now();
    put(&*documents, "alive/y", 1);
    let there = || documents.read(&[Query::prefix("alive/")]).unwrap().documents.len();
    let mut last = Instant::now();
    while first.elapsed() < Duration::from_secs(4) {
        // It stays as long as it is written.
        last = Instant::now();
        assert!(documents.commit(&beat()).unwrap());
        let found = there();
        assert!(found == 2 || last.elapsed() > Duration::from_secs(2), "{:?}", first.elapsed());
        thread::sleep(Duration::from_millis(100));
    }
    let end = last + Duration::from_secs(60);
    while there() == 2 {
        assert!(Instant::now() < end, "it stays");
        thread::sleep(Duration::from_millis(50));
    }
    assert!(last.elapsed() > Duration::from_secs(1), "it ends early");
    let change = Change { relies_on: vec![("alive/x".into(), 0)], ..Change::default() };
    assert!(documents.commit(&change.put("alive/x", &1)).unwrap(), "it is not there for anybody");
    assert_eq!(there(), 2, "and one that is written without a time stays");
}

fn one_at_a_time_holds_a_document(place: &dyn Place) {
    let [one, other] = [place.open(), place.open()];
    let takes = |documents: &Arc<dyn Documents>, who: &str| {
        try_lock(&**documents, "leader/x", who, 60).unwrap()
    };
    assert!(takes(&one, "one"));
    assert!(!takes(&other, "other"));
    assert!(takes(&one, "one"), "it stays");
    unlock(&*other, "leader/x", "other").unwrap();
    assert!(!takes(&other, "other"), "it is not theirs to give up");
    unlock(&*one, "leader/x", "one").unwrap();
    unlock(&*one, "leader/x", "one").unwrap();
    assert!(takes(&other, "other"));
    assert!(!takes(&one, "one"));
}

fn who_waits_is_told(place: &dyn Place) {
    let documents = place.open();
    put(&*documents, "a/x", 1);
    let revision = read(&*documents, "a/x").revision;
    let begin = Instant::now();
    documents.wait("a", revision, Duration::from_millis(200)).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(10), "it comes back when the time is over");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let begin = Instant::now();
            documents.wait("a", revision, Duration::from_secs(60)).unwrap();
            begin.elapsed()
        });
        thread::sleep(Duration::from_millis(100));
        put(&*place.open(), "a/y", 1);
        assert!(waiting.join().unwrap() < Duration::from_secs(30), "it is told");
    });
    let begin = Instant::now();
    documents.wait("a", revision, Duration::from_secs(60)).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(30), "what was before the wait counts, too");
}

fn counters_of_many_threads_lose_nothing(place: &dyn Place) {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 25;
    thread::scope(|scope| {
        for _ in 0..THREADS {
            let documents = place.open();
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
    assert_eq!(number(&*place.open(), "count"), Some(THREADS * ROUNDS));
}
