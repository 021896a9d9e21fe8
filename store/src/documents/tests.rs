//! The promises of [`Documents`]. Each test runs with each implementation.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;

use super::{Change, Documents, Query, SqliteDocuments, View, try_lock, unlock};
use crate::documents::etcd::tests::Process;
use crate::documents::remote::tests::Catalog;
use crate::error::Error;

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
                the_last_documents_of_a_folder_are_read_without_the_others,
                only_documents_that_were_written_later_count_as_changed,
                a_heartbeat_wakes_no_client_that_waits_for_members,
                a_scan_passes_each_document_once_in_the_order_of_the_keys,
                a_scan_shows_one_moment_while_documents_change,
                more_documents_than_any_message_holds_are_scanned_and_read,
                a_scan_ends_with_the_error_of_its_caller,
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
    assert!(!documents.wait("a", revision, Duration::from_millis(200)).unwrap(), "no change");
    assert!(begin.elapsed() < Duration::from_secs(10), "it returns when the time is over");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let begin = Instant::now();
            assert!(documents.wait("a", revision, Duration::from_secs(60)).unwrap());
            begin.elapsed()
        });
        thread::sleep(Duration::from_millis(100));
        put(&*store.open(), "a/y", 1);
        assert!(waiting.join().unwrap() < Duration::from_secs(30), "it returns after the change");
    });
    let begin = Instant::now();
    assert!(documents.wait("a", revision, Duration::from_secs(60)).unwrap());
    assert!(begin.elapsed() < Duration::from_secs(30), "a change before the wait counts, too");
}

fn the_last_documents_of_a_folder_are_read_without_the_others(store: &dyn DocumentStore) {
    let documents = store.open();
    for key in ["a", "a/1", "a/2", "a/3", "a/4", "a0", "b/1"] {
        put(&*documents, key, 1);
    }
    let last = |prefix: &str, before: &str, limit| {
        let view = documents.last(prefix, before, limit).unwrap();
        assert!(view.documents.is_empty() || view.version("a/4").max(1) <= view.revision);
        view.documents.into_keys().collect::<Vec<_>>()
    };
    assert_eq!(last("a/", "b", 2), ["a/3", "a/4"]);
    assert_eq!(last("a/", "a/3", 10), ["a/1", "a/2"]);
    assert_eq!(last("a/", "a/3", 1), ["a/2"]);
    assert_eq!(last("a/", "a/1", 1), Vec::<String>::new());
    assert_eq!(last("c/", "z", 9), Vec::<String>::new());
}

fn only_documents_that_were_written_later_count_as_changed(store: &dyn DocumentStore) {
    let documents = store.open();
    for key in ["a/1", "a/2", "a/3", "a", "b/1"] {
        put(&*documents, key, 1);
    }
    let revision = read(&*documents, "a/1").revision;
    let changed = |revision| {
        let found = documents.changed("a/", revision).unwrap();
        (found.view.documents.into_keys().collect::<Vec<_>>(), found.total, found.view.revision)
    };
    assert_eq!(changed(revision), (vec![], 3, revision));
    assert_eq!(changed(0), (vec!["a/1".into(), "a/2".into(), "a/3".into()], 3, revision));
    put(&*documents, "a/2", 2);
    put(&*documents, "a/4", 1);
    assert!(documents.commit(&Change::default().remove(Query::key("a/1"))).unwrap());
    let (keys, total, now) = changed(revision);
    assert_eq!((keys, total), (vec!["a/2".into(), "a/4".into()], 3));
    assert_eq!(changed(now), (vec![], 3, now));
}

/// Every client waits for changes of the members. If each heartbeat woke all of them, their reads
/// would grow with the square of the cluster's size.
fn a_heartbeat_wakes_no_client_that_waits_for_members(store: &dyn DocumentStore) {
    let (documents, peer) = (store.open(), store.open());
    put(&*documents, "members/x", 1);
    let revision = read(&*documents, "members/x").revision;
    let limit = Duration::from_secs(2);
    let (waited, beats) = thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let begin = Instant::now();
            documents.wait("members", revision, limit).unwrap();
            begin.elapsed()
        });
        let mut beats = 0;
        while !waiting.is_finished() {
            let beat = Change { relaxed: true, ..Change::default() };
            assert!(peer.commit(&beat.put_for(7, "alive/x", &beats)).unwrap());
            beats += 1;
        }
        (waiting.join().unwrap(), beats)
    });
    assert!(beats > 1 && waited >= limit, "{beats} heartbeats, woken after {waited:?}");
}

/// The keys and contents that a scan passes, and its revision.
fn scan(documents: &dyn Documents, prefixes: &[&str]) -> (Vec<(String, Vec<u8>)>, u64) {
    let mut found = Vec::new();
    let revision = documents.scan(prefixes, &mut |key, document| {
        found.push((key.to_owned(), document.value));
        Ok(())
    });
    (found, revision.unwrap())
}

fn a_scan_passes_each_document_once_in_the_order_of_the_keys(store: &dyn DocumentStore) {
    let documents = store.open();
    for key in ["b/2", "a/x", "c", "b/1/y", "a", "b0", "b/ä", "b/1"] {
        put(&*documents, key, 1);
    }
    let keys = |prefixes: &[&str]| -> Vec<String> {
        scan(&*documents, prefixes).0.into_iter().map(|(key, _)| key).collect()
    };
    assert_eq!(keys(&["b/"]), ["b/1", "b/1/y", "b/2", "b/ä"]);
    assert_eq!(keys(&["c", "b/1", "b/", "a/", "b/1/"]), keys(&["a/", "b/", "c"]));
    assert_eq!(keys(&["c", "b/", "a/"]), ["a/x", "b/1", "b/1/y", "b/2", "b/ä", "c"]);
    assert_eq!(keys(&[""]).len(), 8);
    assert_eq!(keys(&["d"]).len(), 0);
    assert_eq!(keys(&[]).len(), 0);
    let view = documents.read(&[Query::prefix("b/")]).unwrap();
    let read: Vec<_> = view.documents.into_iter().map(|(key, one)| (key, one.value)).collect();
    for prefixes in [&["b/"][..], &[]] {
        let (found, revision) = scan(&*documents, prefixes);
        assert_eq!(revision, view.revision);
        assert!(prefixes.is_empty() || found == read);
    }
}

/// The documents come in several messages, and others are written between them.
fn a_scan_shows_one_moment_while_documents_change(store: &dyn DocumentStore) {
    const COUNT: u64 = 3000;
    let (documents, writer) = (store.open(), store.open());
    let key = |number: u64| format!("x/{number:04}");
    let filler = "y".repeat(300);
    let write = |documents: &dyn Documents, round: u64, numbers: &[u64]| {
        let change = Change { relaxed: true, ..Change::default() };
        let change =
            numbers.iter().fold(change, |change, n| change.put(key(*n), &(round, &filler)));
        assert!(documents.commit(&change).unwrap());
    };
    let all: Vec<u64> = (0..COUNT).collect();
    all.chunks(100).for_each(|numbers| write(&*documents, 0, numbers));
    let before = documents.read(&[]).unwrap().revision;
    let mut seen = 0;
    let revision = documents.scan(&["x/"], &mut |found, document| {
        assert_eq!(found, key(seen));
        let (round, _): (u64, String) = serde_json::from_slice(&document.value).unwrap();
        assert_eq!(round, 0, "{found} was written after the scan began");
        assert!(document.version <= before);
        if seen % 500 == 0 {
            // Every document that is yet to come changes, some are removed, others are added. The
            // scan may use the same connection.
            let client = if seen % 1000 == 0 { &documents } else { &writer };
            let later: Vec<u64> = (seen + 1..COUNT).step_by(50).collect();
            write(&**client, seen + 1, &later);
            let change = Change::default().remove(Query::key(key(seen + 60)));
            assert!(client.commit(&change.put(format!("x/{:04}a", seen + 70), &1)).unwrap());
        }
        seen += 1;
        Ok(())
    });
    assert_eq!((seen, revision.unwrap()), (COUNT, before));
    assert!(scan(&*documents, &["x/"]).1 > before);
}

fn more_documents_than_any_message_holds_are_scanned_and_read(store: &dyn DocumentStore) {
    let documents = store.open();
    let text = "z".repeat(900 << 10);
    let all: Vec<String> = (0..75).map(|number| format!("large/{number:02}")).collect();
    for key in &all {
        let change = Change { relaxed: true, ..Change::default() };
        assert!(documents.commit(&change.put(key, &text)).unwrap());
    }
    put(&*documents, "small/1", 1);
    let (mut keys, mut bytes) = (Vec::new(), 0);
    let scanned = documents.scan(&["large/"], &mut |key, document| {
        keys.push(key.to_owned());
        bytes += document.value.len();
        Ok(())
    });
    assert_eq!((&keys, bytes), (&all, 75 * ((900 << 10) + 2)));
    let view = documents.read(&[Query::prefix("large/"), Query::key("small/1")]).unwrap();
    assert_eq!((view.documents.len(), view.revision), (76, scanned.unwrap()));
    assert_eq!(view.get::<u64>("small/1").unwrap(), Some(1));
    assert_eq!(view.get::<String>("large/74").unwrap(), Some(text));
}

fn a_scan_ends_with_the_error_of_its_caller(store: &dyn DocumentStore) {
    let documents = store.open();
    (0..5).for_each(|number| put(&*documents, &format!("a/{number}"), number));
    let mut seen = 0;
    let scanned = documents.scan(&["a/"], &mut |_, _| {
        seen += 1;
        if seen == 3 { Err(Error::BadArgument("enough".into())) } else { Ok(()) }
    });
    assert!(matches!(scanned, Err(Error::BadArgument(reason)) if reason == "enough"));
    assert_eq!(seen, 3);
    assert_eq!(scan(&*documents, &["a/"]).0.len(), 5);
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
