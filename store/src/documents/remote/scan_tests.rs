//! Scans over a socket: connections that break, clients that do not read.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::serve_scan::{MAX_SCANS, PAGES_IN_FLIGHT, ScanLimits};
use super::server::Server;
use super::tests::{Catalog, frame, relay, try_increment};
use super::wire::Request;
use super::{CatalogStore, RemoteDocuments};
use crate::documents::{Change, Documents, Query};
use crate::error::{Error, ErrorKind};
use crate::net::admission::Admission;
use crate::net::handshake::CATALOG_PROTOCOL;
use crate::net::handshake::testing::hello_frame;
use crate::net::identity::Security;

/// Writes this many documents of 64 KiB.
fn fill(documents: &dyn Documents, count: usize) {
    let text = "t".repeat(64 << 10);
    let all: Vec<usize> = (0..count).collect();
    for numbers in all.chunks(12) {
        let change = Change { relaxed: true, ..Change::default() };
        let put = |change: Change, number: &usize| change.put(format!("big/{number:05}"), &text);
        assert!(documents.commit(&numbers.iter().fold(change, put)).unwrap());
    }
}

/// Starts a proxy that closes each connection when it has passed `count` answers. Returns its
/// address, and the number of answers that it has passed on the last connection.
fn cutting_proxy(to: SocketAddr, count: usize) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let passed = Arc::new(AtomicUsize::new(0));
    let own = passed.clone();
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(to).unwrap());
            let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || relay(&mut from, &mut into, |_| true));
            let (mut from, mut into) = (server, client);
            own.store(0, Ordering::SeqCst);
            relay(&mut from, &mut into, |_| own.fetch_add(1, Ordering::SeqCst) < count);
        }
    });
    (address, passed)
}

#[test]
fn a_scan_whose_connection_breaks_is_an_error_and_never_a_short_listing() {
    let catalog = Catalog::start();
    const COUNT: usize = 30;
    fill(&catalog.client(), COUNT);
    let scan = |passed: usize| {
        let (address, frames) = cutting_proxy(catalog.address, passed);
        let retry_timeout = Duration::from_secs(2);
        let documents =
            RemoteDocuments::with_retry_timeout(&address, &Security::INSECURE, retry_timeout);
        let mut seen = 0;
        let scanned = documents.unwrap().scan(&["big/"], &mut |_, _| {
            seen += 1;
            Ok(())
        });
        (scanned, seen, frames.load(Ordering::SeqCst))
    };
    // The welcome, some pages, and the end.
    let (scanned, seen, frames) = scan(usize::MAX);
    assert!(scanned.is_ok() && seen == COUNT && frames > 4, "{scanned:?}, {seen}, {frames}");
    for passed in 0..frames {
        let (scanned, seen, _) = scan(passed);
        let error = scanned.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(passed < 2 || error.to_string().contains("broke off"), "{error}");
        assert!(seen < COUNT || passed == frames - 1, "only the end was missing");
    }
}

#[test]
fn a_scan_that_its_client_slows_down_is_ended() {
    let scan = Duration::from_secs(1);
    let limits = ScanLimits { scan, ..ScanLimits::default() };
    let catalog = Catalog::start_within(Security::INSECURE, (Admission::new(64), limits));
    let documents = catalog.client();
    fill(&documents, 800);
    let mut seen = 0;
    let scanned = documents.scan(&["big/"], &mut |_, _| {
        seen += 1;
        thread::sleep(Duration::from_millis(20));
        Ok(())
    });
    let error = scanned.unwrap_err();
    assert!(matches!(&error, Error::Catalog { kind: ErrorKind::Unavailable, .. }), "{error:?}");
    let reason = error.to_string();
    assert!(reason.contains("takes too long") || reason.contains("too slowly"), "{reason}");
    assert!(seen > 0 && seen < 800);
    assert!(try_increment(&documents), "other requests have a connection of their own");
    assert_eq!(documents.read(&[Query::prefix("big/")]).unwrap().documents.len(), 800);
}

/// A read transaction keeps the database's log from being reset, and the log grows.
#[test]
fn clients_that_do_not_read_their_scans_pin_no_log_and_delay_nobody() {
    let page = Duration::from_millis(300);
    let limits = ScanLimits { page, ..ScanLimits::default() };
    let catalog = Catalog::start_within(Security::INSECURE, (Admission::new(64), limits));
    let documents = catalog.client();
    fill(&documents, 400);
    let version = CATALOG_PROTOCOL.newest;
    let frames = [
        hello_frame(&CATALOG_PROTOCOL, version, version),
        frame(&Request::Scan(vec![Query::prefix("big/")])),
    ];
    let stalled: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = TcpStream::connect(catalog.address).unwrap();
            for (header, body) in &frames {
                stream.write_all(&[&header.to_bytes()[..], body].concat()).unwrap();
            }
            stream
        })
        .collect();
    // Some scans have begun: a page arrives behind the welcome.
    let mut first = stalled[0].try_clone().unwrap();
    first.read_exact(&mut [0; 100]).unwrap();
    for _ in 0..5 {
        assert!(try_increment(&documents), "scans do not occupy the threads of other requests");
    }
    let path = catalog.dir.path().join("catalog.db");
    let database = rusqlite::Connection::open(&path).unwrap();
    let begin = Instant::now();
    let is_reset = || {
        let busy: i64 =
            database.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0)).unwrap();
        busy == 0
    };
    while !is_reset() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the scans pin the log");
        thread::sleep(Duration::from_millis(20));
    }
    let log = fs::metadata(path.with_extension("db-wal")).unwrap();
    assert!(log.len() < 1 << 20, "{} bytes", log.len());
    stalled.iter().for_each(|stream| stream.shutdown(Shutdown::Both).unwrap());
    assert_eq!(documents.read(&[Query::prefix("big/")]).unwrap().documents.len(), 400);
}

/// The number of scans bounds the memory of their pages.
#[tokio::test]
async fn a_scan_counts_until_its_pages_are_sent() {
    const SCANS: usize = 3 * MAX_SCANS;
    let dir = TempDir::new().unwrap();
    let store = Arc::new(CatalogStore::open(dir.path()).unwrap());
    fill(&**store.documents(), 8);
    let server = Arc::new(Server::new(store, Security::INSECURE, ScanLimits::default()));
    let client = server.limits().slot();
    let slots = Arc::new(Semaphore::new(SCANS));
    let (answers, mut outgoing) = mpsc::unbounded_channel();
    let mut scans = JoinSet::new();
    for number in 0..SCANS as u64 {
        let memory = client.take(1).await.unwrap();
        let slot = slots.clone().acquire_owned().await.unwrap();
        let (server, answers) = (server.clone(), answers.clone());
        scans.spawn(async move {
            let queries = vec![Query::prefix("big/")];
            server.scan(queries, number, memory, slot, &answers).await;
        });
    }
    // No answer is sent: all are kept here.
    let mut kept = Vec::new();
    while let Ok(answer) = timeout(Duration::from_secs(2), outgoing.recv()).await {
        kept.push(answer.unwrap());
    }
    assert_eq!(kept.len(), MAX_SCANS * PAGES_IN_FLIGHT);
    kept.clear();
    drop(answers);
    let mut sent = 0;
    while outgoing.recv().await.is_some() {
        sent += 1;
    }
    assert_eq!(sent, SCANS * (PAGES_IN_FLIGHT + 1) - MAX_SCANS * PAGES_IN_FLIGHT, "all others");
}
