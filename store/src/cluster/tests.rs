//! Clients and peers in one process, with something between them that lies.

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

/// A peer behind a socket.
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

    /// Starts it again with what it had, at the same address.
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

    /// All that it has becomes older by so many seconds.
    pub(crate) fn age(&self, seconds: u32) {
        self.store.upgrade().expect("it runs").settle(false).unwrap();
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

pub(crate) fn content(number: u64, len: usize) -> (BlobId, Vec<u8>) {
    let mut content = vec![0; len];
    blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut content);
    (BlobId::of(&content), content)
}

pub(crate) fn policy(text: &str) -> StoragePolicy {
    text.parse::<crate::encoding::Redundancy>().unwrap().into()
}

/// What lies between a client and a peer: flips a bit in the last byte of answers with blocks while it is told to.
struct Liar {
    address: String,
    lies: Arc<AtomicBool>,
    told: Arc<AtomicUsize>,
    /// Fragments that it was given.
    puts: Arc<AtomicUsize>,
}

impl Liar {
    async fn before(peer: &Peer) -> Liar {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let lies = Arc::new(AtomicBool::new(true));
        let (told, puts) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let honest = peer.address.clone();
        let (flag, count, given) = (lies.clone(), told.clone(), puts.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let peer = TcpStream::connect(&honest).await.unwrap();
                // A client does not wait for a peer that is slower than the others, and never sees
                // its lies. With Nagle's algorithm, a small message waits for the acknowledgement
                // of the one before it, which the kernel delays by 40 ms.
                client.set_nodelay(true).unwrap();
                peer.set_nodelay(true).unwrap();
                let (from_client, to_client) = client.into_split();
                let (from_peer, to_peer) = peer.into_split();
                let given = given.clone();
                tokio::spawn(pass_on(from_client, to_peer, move |header, _| {
                    given.fetch_add(usize::from(header.kind == PUT), Ordering::SeqCst);
                }));
                let (flag, count) = (flag.clone(), count.clone());
                tokio::spawn(pass_on(from_peer, to_client, move |header, body| {
                    // One without fragments has only their number.
                    if header.kind == 103 && body.len() > 2 && flag.load(Ordering::SeqCst) {
                        *body.last_mut().unwrap() ^= 1;
                        count.fetch_add(1, Ordering::SeqCst);
                    }
                }));
            }
        });
        Liar { address, lies, told, puts }
    }
}

async fn pass_on(
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
        let liar = Liar::before(&peers[0]).await;
        let mut all = members(&peers);
        all[0].address = liar.address.clone();
        let cluster = Cluster::new(all, Security::INSECURE);
        let mut blobs = Vec::new();
        // So many that the liar comes first for some of them, wherever chance has put it.
        for number in 0..150 {
            let (blob, content) = content(number, 8 << 10);
            cluster.put(&blob, &content, &policy(text)).await.unwrap();
            blobs.push((blob, content));
        }
        let mut buf = vec![0; 8 << 10];
        // A lie that comes late is not seen: others were asked meanwhile, and were faster.
        let begin = std::time::Instant::now();
        while cluster.suspects().is_empty() && begin.elapsed() < Duration::from_secs(30) {
            for (blob, content) in &blobs {
                assert_eq!(cluster.get(blob, &mut buf).await.unwrap(), content.len());
                assert!(&buf == content, "{text}");
            }
        }
        let told = liar.told.load(Ordering::SeqCst);
        assert!(told > 0, "{text}: nobody has lied");
        let suspects = cluster.suspects();
        let is_liar = |(id, lies): &(_, u64)| *id == peers[0].id && *lies as usize <= told;
        assert!(
            suspects.len() == 1 && suspects.iter().all(is_liar),
            "{text}: {suspects:?}; {} has lied {told} times",
            peers[0].id
        );
        liar.lies.store(false, Ordering::SeqCst);
        for (blob, _) in &blobs {
            cluster.get(blob, &mut buf).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_wrong_block_is_put_again() {
    let peers = start(3).await;
    let liar = Liar::before(&peers[0]).await;
    let mut all = members(&peers);
    all[0].address = liar.address.clone();
    let cluster = Cluster::new(all, Security::INSECURE);
    let mut buf = vec![0; 64 << 10];
    // Two of the three are asked for each blob. No more lies than are replaced at a time.
    let (mut stored, mut suspected) = (0, 0);
    while suspected < 4 && stored < 60 {
        let (blob, content) = content(stored as u64, 64 << 10);
        cluster.put(&blob, &content, &policy("rs=2+1")).await.unwrap();
        cluster.get(&blob, &mut buf).await.unwrap();
        stored += 1;
        suspected = cluster.suspects().first().map_or(0, |(_, lies)| *lies as usize);
    }
    assert!(suspected > 0);
    let put_again = async {
        while liar.puts.load(Ordering::SeqCst) < stored + suspected {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(Duration::from_secs(20), put_again).await.expect("the right blocks go to the liar");
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

    // One of them is gone, and said to be down: nobody waits for it.
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
        assert!(cluster.put(&blob, &content, &policy("rs=2+2")).await.is_err(), "one too few");
    }
    // It returns, and is used at once.
    peers[0].restart().await;
    all[0].state = MemberState::Up;
    cluster.set_members(all.clone());
    let (blob, last) = content(99, 10_000);
    cluster.put(&blob, &last, &policy("rs=2+2")).await.unwrap();

    // One that is drained gets nothing new.
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
