//! The lifetimes of documents, with a clock that the tests set.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{SqliteDocuments, Users};
use crate::clock::BootClock;
use crate::documents::{Change, Documents, Query, try_lock};

/// A database, and a clock in milliseconds.
struct Host {
    dir: TempDir,
    now: Arc<AtomicI64>,
}

impl Host {
    fn new() -> Host {
        let host = Host { dir: TempDir::new().unwrap(), now: Arc::new(AtomicI64::new(1_000_000)) };
        SqliteDocuments::create(&host.path()).unwrap();
        host
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("catalog.db")
    }

    /// Opens the database in this boot of the host.
    fn open(&self, boot: &str, users: Users) -> SqliteDocuments {
        let now = self.now.clone();
        let clock = BootClock::of_test(boot, move || now.load(Ordering::SeqCst));
        SqliteDocuments::open_with(&self.path(), clock, users).unwrap()
    }

    fn pass(&self, seconds: i64) {
        self.now.fetch_add(seconds * 1000, Ordering::SeqCst);
    }
}

fn put_for(documents: &SqliteDocuments, seconds: u32, key: &str) {
    assert!(documents.commit(&Change::default().put_for(seconds, key, &"somebody")).unwrap());
}

fn keys(documents: &SqliteDocuments) -> Vec<String> {
    documents.read(&[Query::prefix("")]).unwrap().documents.into_keys().collect()
}

#[test]
fn a_document_lives_as_long_as_it_was_written_for_and_no_longer() {
    let host = Host::new();
    let one = host.open("first", Users::ThisHost);
    put_for(&one, 60, "leases/a");
    put_for(&one, 7, "alive/b");
    host.pass(6);
    assert_eq!(keys(&one), ["alive/b", "leases/a"]);
    host.pass(1);
    let other = host.open("first", Users::ThisHost);
    for documents in [&one, &other] {
        assert_eq!(keys(documents), ["leases/a"], "every process of the host sees the same");
    }
    put_for(&other, 60, "leases/a");
    host.pass(59);
    assert_eq!(keys(&one), ["leases/a"], "a document that is written again lives on");
    host.pass(1);
    assert_eq!(keys(&one).len(), 0);
    assert!(try_lock(&one, "leases/a", "me", 60).unwrap());
}

/// A served catalog restarts after its host has booted: its clients may be alive.
#[test]
fn after_a_boot_the_documents_of_a_servers_clients_get_their_full_time() {
    let host = Host::new();
    let before = host.open("first", Users::AnyHost);
    put_for(&before, 60, "leases/a");
    put_for(&before, 7, "alive/b");
    assert!(before.commit(&Change::default().put("images/c", &1)).unwrap());
    let token = [3; 16];
    assert!(before.commit_once(&token, &Change::default().put("images/d", &1)).unwrap());
    drop(before);
    // The clock of another boot begins anew: most times of the first lie in its future.
    for (boot, start) in [("second", 5_000), ("third", 900_000_000)] {
        host.now.store(start, Ordering::SeqCst);
        let documents = host.open(boot, Users::AnyHost);
        assert_eq!(keys(&documents), ["alive/b", "images/c", "images/d", "leases/a"]);
        host.pass(3);
        drop(documents);
        // A restart without a boot in between gives no more time.
        let documents = host.open(boot, Users::AnyHost);
        host.pass(4);
        assert_eq!(keys(&documents), ["images/c", "images/d", "leases/a"], "{boot}");
        put_for(&documents, 7, "alive/b");
        let again = Change { relies_on: vec![("images/d".into(), 0)], ..Change::default() };
        assert!(documents.commit_once(&token, &again).unwrap(), "the token is known");
    }
    let documents = host.open("third", Users::AnyHost);
    host.pass(60);
    assert_eq!(keys(&documents), ["images/c", "images/d"]);
}

/// Only processes of the host use the database, and none of them outlives a boot.
#[test]
fn after_a_boot_the_documents_of_the_hosts_processes_have_expired() {
    let host = Host::new();
    let before = host.open("first", Users::ThisHost);
    put_for(&before, 60, "leases/a");
    assert!(before.commit(&Change::default().put("images/c", &1)).unwrap());
    // A container may pretend that it has booted by itself. Its clock is that of the host.
    let contained = host.open("container", Users::ThisHost);
    assert_eq!(keys(&contained), ["images/c", "leases/a"]);
    assert!(!try_lock(&contained, "leases/a", "other", 60).unwrap());
    drop((before, contained));
    host.now.store(5_000, Ordering::SeqCst);
    let documents = host.open("second", Users::ThisHost);
    assert_eq!(keys(&documents), ["images/c"]);
    assert!(try_lock(&documents, "leases/a", "me", 60).unwrap());
    let other = host.open("second", Users::ThisHost);
    assert!(!try_lock(&other, "leases/a", "other", 60).unwrap(), "a lease of this boot counts");
}

/// No clock of this host can have written such a time. Whatever did: the document must not stay for
/// ever.
#[test]
fn a_document_does_not_outlive_its_own_time_to_live() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("catalog.db");
    SqliteDocuments::create(&path).unwrap();
    let first = SqliteDocuments::open(&path).unwrap();
    put_for(&first, 1, "leases/a");
    let database = rusqlite::Connection::open(&path).unwrap();
    database.execute("UPDATE documents SET expires = expires + 3600000", []).unwrap();
    let documents = SqliteDocuments::open(&path).unwrap();
    let begin = Instant::now();
    while !keys(&documents).is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(30), "it does not expire");
        thread::sleep(Duration::from_millis(50));
    }
    assert!(try_lock(&documents, "leases/a", "me", 60).unwrap());
}
