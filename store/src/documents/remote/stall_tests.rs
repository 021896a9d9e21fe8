//! Clients that take a catalog's memory and do not move. They must not delay the others.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};

use super::RemoteDocuments;
use super::tests::{Catalog, frame};
use super::wire::{MAX_REQUEST, Request};
use crate::documents::{Change, Documents, Query};
use crate::net::frame::Header;
use crate::net::handshake::{CATALOG_PROTOCOL, introduce};
use crate::net::identity::{Role, Secured, Security, init, sign_new_peer};

/// How long a client may wait beside clients that do not move. Half a second is usual.
const PATIENCE: Duration = Duration::from_secs(3);

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Opens this many authenticated connections, each of which sends these bytes and nothing more.
async fn stall(to: SocketAddr, security: &Security, count: usize, bytes: &[u8]) -> Vec<Secured> {
    let mut all = Vec::new();
    for _ in 0..count {
        let stream = TcpStream::connect(to).await.unwrap();
        let mut secured = security.connect(stream, Role::Catalog).await.unwrap();
        let Secured { reader, writer, .. } = &mut secured;
        introduce(reader, writer, &CATALOG_PROTOCOL).await.unwrap();
        // The catalog may have ended the connection already.
        let _ = writer.write_all(bytes).await;
        let _ = writer.flush().await;
        all.push(secured);
    }
    all
}

/// The header of a commit that is as long as possible.
fn longest_header() -> [u8; 16] {
    Header { kind: 203, number: 1, len: MAX_REQUEST }.to_bytes()
}

fn assert_answers_soon(documents: &dyn Documents) {
    let begin = Instant::now();
    documents.read(&[Query::key("count")]).unwrap();
    assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
}

#[test]
fn peers_that_announce_long_requests_and_send_nothing_delay_nobody() {
    let keys = TempDir::new().unwrap();
    let of = |name: &str| keys.path().join(name);
    init(&of("keys")).unwrap();
    sign_new_peer(&of("keys"), &of("peer")).unwrap();
    let load = |name: &str, role| Security::load(&of(name), role).unwrap();
    let catalog = Catalog::start_with(load("keys", Role::Catalog));
    let peer = load("peer", Role::Peer);
    let runtime = runtime();
    let _stalled = runtime.block_on(stall(catalog.address, &peer, 300, &longest_header()));
    let client = load("keys", Role::Client);
    assert_answers_soon(&RemoteDocuments::new(&catalog.address(), &client).unwrap());
}

#[test]
fn clients_that_announce_long_requests_and_send_nothing_delay_nobody() {
    let catalog = Catalog::start();
    let runtime = runtime();
    let plain = Security::INSECURE;
    let _stalled = runtime.block_on(stall(catalog.address, &plain, 300, &longest_header()));
    assert_answers_soon(&catalog.client());
}

#[test]
fn clients_that_take_no_answers_delay_nobody() {
    let catalog = Catalog::start();
    let documents = catalog.client();
    let text = "t".repeat(900 << 10);
    for number in 0..8 {
        let change = Change { relaxed: true, ..Change::default() };
        assert!(documents.commit(&change.put(format!("large/{number}"), &text)).unwrap());
    }
    let (header, body) = frame(&Request::Read(vec![Query::prefix("large/")]));
    let reads = [&header.to_bytes()[..], &body].concat().repeat(30);
    let runtime = runtime();
    let _stalled = runtime.block_on(stall(catalog.address, &Security::INSECURE, 10, &reads));
    // The answers take a while to fill the memory.
    for _ in 0..5 {
        assert_answers_soon(&documents);
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_answers_soon(&catalog.client());
}
