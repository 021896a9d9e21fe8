//! Tests of a peer over a socket, with clients that behave and clients that do not.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::store::tests::{CODE, flip, fragment};
use super::{PeerStore, serve};
use crate::cluster::client::Connection;
use crate::cluster::protocol::{
    DeletedFragments, FragmentId, HAVE, Held, MAX_ASKED, MAX_BODY, MAX_HAVE_BODY, MAX_PUT, Request,
    StampBound,
};
use crate::collection::CollectionNumber;
use crate::encoding::fragment::{Fragment, encode};
use crate::encoding::{FRAME_BYTES, Redundancy, StoragePolicy};
use crate::error::{Error, ErrorKind};
use crate::id::BlobId;
use crate::net::frame::Header;
use crate::net::handshake::PEER_PROTOCOL;
use crate::net::handshake::testing::{Heard, frames_in, hello_frame};
use crate::net::identity::Security;

const VERSION: u16 = PEER_PROTOCOL.newest;

struct Peer {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    served: JoinHandle<std::io::Result<()>>,
}

impl Peer {
    async fn start(dir: &TempDir, capacity: Option<u64>) -> Peer {
        let store = Arc::new(PeerStore::open(dir.path(), capacity).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let stopped = async { drop(stopped.await) };
        let served = tokio::spawn(serve(listener, store, Security::INSECURE, stopped));
        Peer { address, stop, served }
    }

    async fn connect(&self) -> Connection {
        Connection::open(&self.address.to_string(), &Security::INSECURE).await.unwrap()
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.served.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn stored_fragments_can_be_read_after_a_restart() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, None).await;
    let connection = Arc::new(peer.connect().await);
    let all: Vec<Fragment> = (0..200).map(|number| fragment(number, CODE, 3)).collect();
    let puts: Vec<_> = all
        .iter()
        .cloned()
        .map(|one| {
            let connection = connection.clone();
            tokio::spawn(async move { connection.put(one, CollectionNumber::FIRST).await })
        })
        .collect();
    for put in puts {
        put.await.unwrap().unwrap();
    }
    let id = connection.peer();
    peer.stop().await;
    assert!(connection.usage().await.is_err(), "the peer has stopped");
    assert!(connection.is_lost());

    let peer = Peer::start(&dir, None).await;
    let connection = peer.connect().await;
    assert_eq!(connection.peer(), id);
    for one in &all {
        assert_eq!(
            get(&connection, &one.description.blob).await.unwrap(),
            std::slice::from_ref(one)
        );
    }
    let asked = [all[5].description.blob, BlobId::of(b"another")];
    let held = connection.have(&asked, Some(CollectionNumber::FIRST)).await.unwrap();
    assert_eq!((held[0].len(), held[1].len()), (1, 0));
    assert_eq!(connection.usage().await.unwrap().fragments, 200);
    peer.stop().await;
}

#[tokio::test]
async fn a_failure_is_reported_with_its_kind_and_affects_no_other_request() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, Some(40 << 10)).await;
    let connection = peer.connect().await;
    let mut wrong = fragment(1, CODE, 0);
    wrong.block = flip(&wrong.block, 0);
    assert_eq!(
        connection.put(wrong, CollectionNumber::FIRST).await.unwrap_err().kind(),
        ErrorKind::Corrupt
    );
    connection.put(fragment(1, CODE, 0), CollectionNumber::FIRST).await.unwrap();
    connection.put(fragment(2, CODE, 0), CollectionNumber::FIRST).await.unwrap();
    let refused = connection.put(fragment(3, CODE, 0), CollectionNumber::FIRST).await.unwrap_err();
    assert!(matches!(refused, Error::PeerRefusedFull { .. }), "{refused}");
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert_eq!(connection.usage().await.unwrap().fragments, 2);
    peer.stop().await;
}

#[tokio::test]
async fn a_put_of_many_fragments_reports_the_result_of_each() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, Some(48 << 10)).await;
    let connection = peer.connect().await;
    let mut all: Vec<_> = (1..5).map(|number| fragment(number, CODE, 0)).collect();
    all[1].block = flip(&all[1].block, 100);
    let kinds = |results: Vec<Result<(), Error>>| -> Vec<_> {
        results.into_iter().map(|result| result.err().map(|error| error.kind())).collect()
    };
    let outcome = kinds(connection.put_all(all.clone(), CollectionNumber::FIRST).await.unwrap());
    let [corrupt, full] = [Some(ErrorKind::Corrupt), Some(ErrorKind::Unavailable)];
    assert_eq!(outcome, [None, corrupt, None, None]);
    let outcome = kinds(
        connection
            .put_all(vec![all[0].clone(), fragment(9, CODE, 0)], CollectionNumber::FIRST)
            .await
            .unwrap(),
    );
    assert_eq!(outcome, [None, full]);
    let outcome = kinds(
        connection.put_all(vec![fragment(9, CODE, 0); 2], CollectionNumber::FIRST).await.unwrap(),
    );
    assert_eq!(outcome, [full, full]);
    for (at, one) in all.iter().enumerate() {
        let found = get(&connection, &one.description.blob).await.unwrap();
        assert_eq!(found, if at == 1 { &[] } else { std::slice::from_ref(one) });
    }
    let small = |number: u8| {
        let content = [number; 100];
        let (description, blocks) = encode(&BlobId::of(&content), &content, Redundancy::NONE);
        Fragment { description, index: 0, block: blocks.share(0) }
    };
    let many: Vec<_> = (0..MAX_PUT + 1).map(|number| small(number as u8)).collect();
    let hello = hello_frame(&PEER_PROTOCOL, VERSION, VERSION);
    let too_many = exchange(&peer, &[hello, frame(&put_of(many))]).await;
    assert!(matches!(too_many[..], [Heard::Welcome(_), Heard::Failed(ErrorKind::Corrupt, _)]));
    assert_eq!(connection.usage().await.unwrap().fragments, 3);
    peer.stop().await;
}

/// Fetches a peer's fragments of a blob and verifies each.
async fn get(connection: &Connection, blob: &BlobId) -> Result<Vec<Fragment>, Error> {
    let found = connection.fetch(blob).await?;
    assert!(found.iter().all(|one| one.is_of(blob)));
    Ok(found)
}

/// Sends frames, and returns all answers until the peer closes the connection.
async fn exchange(peer: &Peer, frames: &[(Header, Vec<u8>)]) -> Vec<Heard> {
    let mut stream = TcpStream::connect(peer.address).await.unwrap();
    for (header, body) in frames {
        stream.write_all(&header.to_bytes()).await.unwrap();
        stream.write_all(body).await.unwrap();
    }
    stream.shutdown().await.unwrap();
    let mut bytes = Vec::new();
    let read = timeout(Duration::from_secs(20), stream.read_to_end(&mut bytes)).await;
    // A reset counts as a close.
    let _ = read.expect("the peer closes");
    frames_in(&bytes)
}

fn frame(request: &Request) -> (Header, Vec<u8>) {
    let (kind, body) = request.to_body();
    (Header { kind, number: 7, len: body.len() }, body)
}

#[tokio::test]
async fn a_client_that_violates_the_protocol_gets_an_error_or_is_disconnected() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, None).await;
    let hello = |oldest, newest| hello_frame(&PEER_PROTOCOL, oldest, newest);
    let future = exchange(&peer, &[hello(VERSION + 1, 9)]).await;
    let past = exchange(&peer, &[hello(0, PEER_PROTOCOL.oldest - 1)]).await;
    for answer in [future, past] {
        assert!(
            matches!(&answer[..], [Heard::Failed(ErrorKind::Invalid, text)] if text.contains("update"))
        );
    }
    assert!(matches!(exchange(&peer, &[hello(0, 9)]).await[..], [Heard::Welcome(VERSION)]));
    let without_hello = exchange(&peer, &[frame(&Request::Usage)]).await;
    assert!(matches!(without_hello[..], [Heard::Failed(ErrorKind::Invalid, _)]));
    let twice = exchange(&peer, &[hello(VERSION, VERSION), hello(VERSION, VERSION)]).await;
    assert!(matches!(twice[..], [Heard::Welcome(_), Heard::Failed(..)]), "{twice:?}");
    let unknown = (Header { kind: 77, number: 1, len: 3 }, vec![1, 2, 3]);
    let answer_to_unknown = exchange(&peer, &[hello(VERSION, VERSION), unknown]).await;
    assert!(matches!(
        answer_to_unknown[..],
        [Heard::Welcome(_), Heard::Failed(ErrorKind::Corrupt, _)]
    ));
    let long = (Header { kind: 2, number: 1, len: MAX_BODY + 1 }, vec![0; 100]);
    assert!(matches!(
        exchange(&peer, &[hello(VERSION, VERSION), long]).await[..],
        [Heard::Welcome(_)]
    ));
    let cut = (Header { kind: 2, number: 1, len: 5000 }, vec![0; 100]);
    assert!(matches!(
        exchange(&peer, &[hello(VERSION, VERSION), cut]).await[..],
        [Heard::Welcome(_)]
    ));
    assert_eq!(peer.connect().await.usage().await.unwrap().fragments, 0, "the peer still serves");
    peer.stop().await;
}

/// Such a request would wait for more memory than a connection may hold, which is for ever.
#[tokio::test]
async fn a_have_request_that_is_longer_than_any_legal_one_ends_its_connection() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, None).await;
    let hello = hello_frame(&PEER_PROTOCOL, VERSION, VERSION);
    for len in [MAX_HAVE_BODY + 1, MAX_BODY] {
        let long = (Header { kind: HAVE, number: 1, len }, Vec::new());
        let heard = exchange(&peer, &[hello.clone(), long]).await;
        assert!(matches!(heard[..], [Heard::Welcome(_)]), "{len}: {heard:?}");
    }
    let blobs = vec![BlobId::of(b"absent"); MAX_ASKED];
    let (header, body) = frame(&Request::Have { renew: None, blobs });
    assert_eq!(header.len, MAX_HAVE_BODY, "the longest legal request");
    let answer = exchange(&peer, &[hello, (header, body)]).await;
    assert!(matches!(answer[..], [Heard::Welcome(_), Heard::Answer]), "{answer:?}");
    peer.stop().await;
}

/// A copy of a blob of 4 MiB, the greatest length.
fn put_of(fragments: Vec<Fragment>) -> Request {
    Request::Put { stamp: CollectionNumber::FIRST, fragments }
}

fn large(number: u8) -> Fragment {
    let content = vec![number; 4 << 20];
    let (description, blocks) = encode(&BlobId::of(&content), &content, Redundancy::NONE);
    let block = blocks.share(0);
    Fragment { description, index: 0, block }
}

/// A client that sends hello and these frames, then nothing more, and takes no answers.
async fn silent(peer: &Peer, frames: &[(Header, Vec<u8>)]) -> TcpStream {
    let mut stream = TcpStream::connect(peer.address).await.unwrap();
    let hello = hello_frame(&PEER_PROTOCOL, VERSION, VERSION);
    for (header, body) in std::iter::once(&hello).chain(frames) {
        // The peer may have ended the connection.
        let _ = stream.write_all(&[&header.to_bytes()[..], body].concat()).await;
    }
    stream
}

/// Asserts that a client that behaves waits hardly at all most of the time, and never long.
async fn assert_served(peer: &Peer, known: &Connection, one: &Fragment) {
    let mut times = Vec::new();
    let mut ask = async |connection: &Connection| {
        let start = Instant::now();
        let asked = timeout(Duration::from_secs(20), get(connection, &one.description.blob)).await;
        assert_eq!(asked.expect("in time").unwrap().len(), 1);
        times.push(start.elapsed());
    };
    for _ in 0..5 {
        ask(known).await;
    }
    // A new connection is served, too.
    let other = peer.connect().await;
    timeout(Duration::from_secs(20), other.usage()).await.expect("in time").unwrap();
    for _ in 0..4 {
        ask(&other).await;
    }
    times.sort();
    println!("{times:?}");
    assert!(times[4] < Duration::from_secs(1), "{times:?}");
}

/// Memory for requests is shared: clients that ask and take no answers must not keep it.
#[tokio::test]
async fn clients_that_take_no_answers_do_not_stop_the_others() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, None).await;
    let good = peer.connect().await;
    let one = large(1);
    good.put(one.clone(), CollectionNumber::FIRST).await.unwrap();
    let gets = vec![frame(&Request::Get(one.description.blob)); 20];
    let mut clients = Vec::new();
    for _ in 0..50 {
        clients.push(silent(&peer, &gets).await);
    }
    assert_served(&peer, &good, &one).await;
    // They ask for more than all memory and do not take the answers, so some are ended.
    let is_ended = |client: &TcpStream| match client.try_write(&[0]) {
        Ok(_) => false,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    };
    let start = Instant::now();
    while !clients.iter().any(is_ended) {
        assert!(start.elapsed() < Duration::from_secs(20), "no connection was ended");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    peer.stop().await;
}

#[tokio::test]
async fn clients_that_do_not_complete_their_requests_do_not_stop_the_others() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, None).await;
    let good = peer.connect().await;
    let one = large(1);
    good.put(one.clone(), CollectionNumber::FIRST).await.unwrap();
    // The start of a put of 4 MiB.
    let (header, mut body) = frame(&put_of(vec![large(2)]));
    body.truncate(1000);
    let mut clients = Vec::new();
    for _ in 0..50 {
        clients.push(silent(&peer, &[(header, body.clone())]).await);
    }
    assert_served(&peer, &good, &one).await;
    let start = Instant::now();
    timeout(Duration::from_secs(20), good.put(large(3), CollectionNumber::FIRST))
        .await
        .expect("in time")
        .unwrap();
    println!("a put: {:?}", start.elapsed());
    drop(clients);
    peer.stop().await;
}

#[tokio::test]
async fn silent_connections_do_not_keep_others_out() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, None).await;
    let mut unauthenticated = Vec::new();
    for _ in 0..200 {
        unauthenticated.push(TcpStream::connect(peer.address).await.unwrap());
    }
    let good = peer.connect().await;
    assert_eq!(good.usage().await.unwrap().fragments, 0);
    // The oldest connections were ended in favour of the newest, long before their timeout.
    let mut byte = [0];
    let ended = timeout(Duration::from_secs(5), unauthenticated[0].read(&mut byte)).await;
    assert!(matches!(ended.expect("the oldest connection was ended"), Ok(0) | Err(_)));
    let alive = timeout(Duration::from_millis(1), unauthenticated[199].read(&mut byte)).await;
    assert!(alive.is_err(), "the newest connection is still open");
    peer.stop().await;
}

#[tokio::test]
async fn fragments_are_listed_and_deleted_and_space_is_reserved() {
    let dir = TempDir::new().unwrap();
    let peer = Peer::start(&dir, Some(64 << 10)).await;
    let (one, other) = (peer.connect().await, peer.connect().await);
    one.reserve(48 << 10).await.unwrap();
    let refused = other.reserve(32 << 10).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    other.put(fragment(1, CODE, 0), CollectionNumber::FIRST).await.unwrap();
    other.put(fragment(2, CODE, 0), CollectionNumber::FIRST).await.unwrap_err();
    one.put(fragment(2, CODE, 0), CollectionNumber::FIRST).await.unwrap();
    let usage = one.usage().await.unwrap();
    assert_eq!((usage.used, usage.reserved), (32 << 10, 32 << 10));
    drop(one);
    // The reservation ends with the connection, as soon as the peer notices.
    let start = Instant::now();
    while other.usage().await.unwrap().reserved > 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "the reservation stays");
    }
    let none = BlobId::from_bytes([0; 32]);
    let page = other.list(&none, 4096).await.unwrap();
    assert_eq!(page.len(), 2);
    assert_eq!(other.list(&page[1].0, 4096).await.unwrap(), []);
    assert_eq!(other.records(&none).await.unwrap(), []);
    let id = |(blob, held): &(BlobId, Held)| FragmentId {
        blob: *blob,
        encoding: held.encoding,
        index: held.index,
    };
    let all: Vec<_> = page.iter().map(id).collect();
    let now = other.clock().await.unwrap();
    let until = now.after(Duration::from_secs(60));
    let deleted = |fragments, bytes| DeletedFragments { fragments, bytes };
    let young = other.delete(&all, 60, StampBound::ANY, until).await.unwrap();
    assert_eq!(young, deleted(0, 0), "the fragments are new");
    // A request that is late is refused.
    let late = other.delete(&all, 0, StampBound::ANY, now).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Conflict, "{late}");
    assert_eq!(other.usage().await.unwrap().fragments, 2);
    assert_eq!(other.deletable(&all, 0, StampBound::ANY).await.unwrap(), deleted(2, 32 << 10));
    let gone = other.delete(&all, 0, StampBound::ANY, until).await.unwrap();
    assert_eq!(gone, deleted(2, 32 << 10));
    assert_eq!(other.usage().await.unwrap().fragments, 0);
    peer.stop().await;
}

/// A chunk of 256 KiB on peers that hold one block each. A reader wants 4 KiB of it.
#[tokio::test]
async fn a_part_of_a_chunk_is_read_without_the_rest() {
    let mut content = vec![0; 256 << 10];
    blake3::Hasher::new().update(b"chunk").finalize_xof().fill(&mut content);
    content[64 << 10..192 << 10].fill(5);
    let blob = BlobId::of(&content);
    for compression in ["none", "zstd"] {
        let policy = StoragePolicy { redundancy: CODE, compression: compression.parse().unwrap() };
        let (description, blocks) = encode(&blob, &content, policy);
        let mut peers = Vec::new();
        for index in 0..description.width() {
            let dir = TempDir::new().unwrap();
            let peer = Peer::start(&dir, None).await;
            let connection = peer.connect().await;
            let block = blocks.share(index);
            let fragment = Fragment { description: description.clone(), index: index as u8, block };
            connection.put(fragment, CollectionNumber::FIRST).await.unwrap();
            peers.push((dir, peer, connection));
        }
        for offset in [0, 70_000, 200_000, (256 << 10) - 4096] {
            let (mut stored, mut sent) = (Vec::new(), 0);
            for (_, _, connection) in &peers {
                let mut parts = connection.fetch_range(&blob, offset..offset + 4096).await.unwrap();
                let part = parts.pop().unwrap();
                assert!(parts.is_empty() && part.description == description);
                sent += part.bytes.len();
                stored.extend_from_slice(&part.bytes);
            }
            let frame = offset as usize / FRAME_BYTES;
            assert!(sent <= FRAME_BYTES, "{sent} bytes for one frame");
            let found = description.open(frame, &stored).unwrap();
            assert!(found == content[frame * FRAME_BYTES..(frame + 1) * FRAME_BYTES]);
        }
        let (_, _, connection) = &peers[0];
        assert!(connection.fetch_range(&BlobId::of(b"x"), 0..1).await.unwrap().is_empty());
        let beyond = connection.fetch_range(&blob, 1 << 20..u32::MAX).await.unwrap();
        assert!(beyond[0].bytes.is_empty(), "there is nothing, and the description says so");
        for (_, peer, connection) in peers {
            drop(connection);
            peer.stop().await;
        }
    }
}
