//! Tests with clients and peers in one process, and a proxy between them that corrupts answers.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::client::{Cluster, Connection};
use super::peer::{PeerStore, serve};
use super::placement::{Member, MemberState};
use super::protocol::PUT;
use crate::encoding::StoragePolicy;
use crate::error::ErrorKind;
use crate::id::{BlobId, PeerId};
use crate::net::frame::{HEADER, Header};
use crate::net::identity::Security;
use crate::testing::own_port;

/// A peer that serves a TCP socket.
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(crate) address: String,
    stop: Option<oneshot::Sender<()>>,
    served: Option<JoinHandle<std::io::Result<()>>>,
    dir: TempDir,
    capacity: Option<u64>,
    store: Weak<PeerStore>,
}

impl Peer {
    pub(crate) async fn start(capacity: Option<u64>) -> Peer {
        let dir = TempDir::new().unwrap();
        let (stop, served, address) = (None, None, String::new());
        let mut peer = Peer {
            id: PeerId::from_bytes([0; 16]),
            address,
            stop,
            served,
            dir,
            capacity,
            store: Weak::new(),
        };
        peer.restart().await;
        peer
    }

    /// Starts the peer again, with the same data directory and the same address.
    pub(crate) async fn restart(&mut self) {
        let store = Arc::new(PeerStore::open(self.dir.path(), self.capacity).unwrap());
        self.id = store.id();
        self.store = Arc::downgrade(&store);
        let listener = match self.address.is_empty() {
            true => own_port(),
            false => std::net::TcpListener::bind(&self.address).unwrap(),
        };
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        self.address = listener.local_addr().unwrap().to_string();
        let (stop, stopped) = oneshot::channel();
        let stopped = async { drop(stopped.await) };
        self.served = Some(tokio::spawn(serve(listener, store, Security::INSECURE, stopped)));
        self.stop = Some(stop);
    }

    pub(crate) async fn stop(&mut self) {
        if let (Some(stop), Some(served)) = (self.stop.take(), self.served.take()) {
            stop.send(()).unwrap();
            served.await.unwrap().unwrap();
        }
    }

    /// The data directory.
    pub(crate) fn directory(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// Makes all fragments of the peer `seconds` older.
    pub(crate) fn age(&self, seconds: u32) {
        self.store.upgrade().expect("the peer is running").settle(false).unwrap();
        let path = self.dir.path().join("fragments.db");
        let database = rusqlite::Connection::open(path).unwrap();
        database.busy_timeout(Duration::from_secs(10)).unwrap();
        database.execute("UPDATE fragments SET touched = touched - ?", [seconds]).unwrap();
    }

    pub(crate) fn member(&self) -> Member {
        Member {
            id: self.id,
            address: self.address.clone(),
            weight: 1,
            domain: self.id.to_string(),
            state: MemberState::Up,
        }
    }
}

/// Starts `count` peers without a capacity.
pub(crate) async fn start(count: usize) -> Vec<Peer> {
    let mut peers = Vec::new();
    for _ in 0..count {
        peers.push(Peer::start(None).await);
    }
    peers
}

pub(crate) fn members(peers: &[Peer]) -> Vec<Member> {
    peers.iter().map(Peer::member).collect()
}

/// Returns a blob of `len` pseudo-random bytes that depend on `number`.
pub(crate) fn content(number: u64, len: usize) -> (BlobId, Vec<u8>) {
    let mut content = vec![0; len];
    blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut content);
    (BlobId::of(&content), content)
}

pub(crate) fn policy(text: &str) -> StoragePolicy {
    text.parse::<crate::encoding::Redundancy>().unwrap().into()
}

/// A proxy between a client and a peer. While `corrupts` is set, it flips a bit in the last byte of
/// each answer that has blocks.
struct CorruptingProxy {
    address: String,
    corrupts: Arc<AtomicBool>,
    /// Answers that it has corrupted.
    corrupted: Arc<AtomicUsize>,
    /// `put` requests that it has forwarded.
    puts: Arc<AtomicUsize>,
}

impl CorruptingProxy {
    async fn start(peer: &Peer) -> CorruptingProxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let corrupts = Arc::new(AtomicBool::new(true));
        let (corrupted, puts) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let peer_address = peer.address.clone();
        let (flag, count, put_count) = (corrupts.clone(), corrupted.clone(), puts.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let peer = TcpStream::connect(&peer_address).await.unwrap();
                // A client does not wait for a peer that is slower than the others, and would never
                // see the corrupted answers. With Nagle's algorithm, a small message waits for the
                // acknowledgement of the one before it, which the kernel delays by 40 ms.
                client.set_nodelay(true).unwrap();
                peer.set_nodelay(true).unwrap();
                let (from_client, to_client) = client.into_split();
                let (from_peer, to_peer) = peer.into_split();
                let put_count = put_count.clone();
                tokio::spawn(forward(from_client, to_peer, move |header, _| {
                    put_count.fetch_add(usize::from(header.kind == PUT), Ordering::SeqCst);
                }));
                let (flag, count) = (flag.clone(), count.clone());
                tokio::spawn(forward(from_peer, to_client, move |header, body| {
                    // An answer without fragments has only their number, in two bytes.
                    if header.kind == 103 && body.len() > 2 && flag.load(Ordering::SeqCst) {
                        *body.last_mut().unwrap() ^= 1;
                        count.fetch_add(1, Ordering::SeqCst);
                    }
                }));
            }
        });
        CorruptingProxy { address, corrupts, corrupted, puts }
    }
}

async fn forward(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut change: impl FnMut(Header, &mut Vec<u8>),
) -> std::io::Result<()> {
    loop {
        let mut head = [0; HEADER];
        from.read_exact(&mut head).await?;
        let header = Header::from_bytes(&head, crate::cluster::protocol::MAX_BODY).unwrap();
        let mut body = vec![0; header.len];
        from.read_exact(&mut body).await?;
        change(header, &mut body);
        to.write_all(&[&head[..], &body].concat()).await?;
    }
}

#[tokio::test]
async fn a_peer_that_sends_wrong_blocks_is_named_and_every_read_is_right() {
    for text in ["rs=4+4", "replicas=2"] {
        let peers = start(8).await;
        let proxy = CorruptingProxy::start(&peers[0]).await;
        let mut all = members(&peers);
        all[0].address = proxy.address.clone();
        let cluster = Cluster::new(all, Security::INSECURE);
        let mut blobs = Vec::new();
        // Enough blobs that the proxied peer ranks first for some of them, whatever its random id
        // is.
        for number in 0..150 {
            let (blob, content) = content(number, 8 << 10);
            cluster.put(&blob, &content, &policy(text)).await.unwrap();
            blobs.push((blob, content));
        }
        let mut buf = vec![0; 8 << 10];
        // A corrupted answer that comes late is not seen: other peers were asked in the meantime
        // and answered first.
        let begin = std::time::Instant::now();
        while cluster.suspects().is_empty() && begin.elapsed() < Duration::from_secs(30) {
            for (blob, content) in &blobs {
                assert_eq!(cluster.get(blob, &mut buf).await.unwrap(), content.len());
                assert!(&buf == content, "{text}");
            }
        }
        let corrupted = proxy.corrupted.load(Ordering::SeqCst);
        assert!(corrupted > 0, "{text}: no answer was corrupted");
        let suspects = cluster.suspects();
        let is_proxied =
            |(id, count): &(_, u64)| *id == peers[0].id && *count as usize <= corrupted;
        assert!(
            suspects.len() == 1 && suspects.iter().all(is_proxied),
            "{text}: {suspects:?}; {corrupted} answers of {} were corrupted",
            peers[0].id
        );
        proxy.corrupts.store(false, Ordering::SeqCst);
        for (blob, _) in &blobs {
            cluster.get(blob, &mut buf).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_wrong_block_is_put_again() {
    let peers = start(3).await;
    let proxy = CorruptingProxy::start(&peers[0]).await;
    let mut all = members(&peers);
    all[0].address = proxy.address.clone();
    let cluster = Cluster::new(all, Security::INSECURE);
    let mut buf = vec![0; 64 << 10];
    // Two of the three peers are asked for each blob. The client replaces at most 8 wrong blocks at
    // a time, so the test stops before it has more of them.
    let (mut stored, mut suspected) = (0, 0);
    while suspected < 4 && stored < 60 {
        let (blob, content) = content(stored as u64, 64 << 10);
        cluster.put(&blob, &content, &policy("rs=2+1")).await.unwrap();
        cluster.get(&blob, &mut buf).await.unwrap();
        stored += 1;
        suspected = cluster.suspects().first().map_or(0, |(_, count)| *count as usize);
    }
    assert!(suspected > 0);
    let put_again = async {
        while proxy.puts.load(Ordering::SeqCst) < stored + suspected {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(Duration::from_secs(20), put_again)
        .await
        .expect("the right blocks are sent to the proxied peer");
}

#[tokio::test]
async fn members_come_and_go_and_what_is_down_is_passed_over() {
    let mut peers = start(4).await;
    let cluster = Cluster::new(members(&peers[..3]), Security::INSECURE);
    let (blob, first) = content(1, 10_000);
    let too_few = cluster.put(&blob, &first, &policy("replicas=4")).await.unwrap_err();
    assert_eq!(too_few.kind(), ErrorKind::Unavailable, "{too_few}");
    cluster.set_members(members(&peers));
    let stored = cluster.put(&blob, &first, &policy("replicas=4")).await.unwrap();
    assert_eq!((stored.sent, stored.durable), (40_000, 4));

    // A peer stops and is marked as down: no request waits for it.
    peers[0].stop().await;
    let mut all = members(&peers);
    all[0].state = MemberState::Down;
    cluster.set_members(all.clone());
    let mut buf = vec![0; 10_000];
    for number in 2..20 {
        let (blob, content) = content(number, 10_000);
        cluster.put(&blob, &content, &policy("replicas=3")).await.unwrap();
        assert_eq!(cluster.get(&blob, &mut buf).await.unwrap(), 10_000);
        assert_eq!(buf, content);
        assert!(
            cluster.put(&blob, &content, &policy("rs=2+2")).await.is_err(),
            "there is one peer too few"
        );
    }
    // The peer comes back and is used at once.
    peers[0].restart().await;
    all[0].state = MemberState::Up;
    cluster.set_members(all.clone());
    let (blob, last) = content(99, 10_000);
    cluster.put(&blob, &last, &policy("rs=2+2")).await.unwrap();

    // A draining peer gets no fragments.
    all[1].state = MemberState::Draining;
    cluster.set_members(all);
    let drained = Connection::open(&peers[1].address, &Security::INSECURE).await.unwrap();
    let before = drained.usage().await.unwrap().fragments;
    for number in 100..120 {
        let (blob, content) = content(number, 1000);
        cluster.put(&blob, &content, &policy("replicas=3")).await.unwrap();
    }
    assert_eq!(drained.usage().await.unwrap().fragments, before);
    assert_eq!(cluster.suspects(), []);
}
