//! Reads while one peer answers with what no honest peer sends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;

use super::{Cluster, Connection};
use crate::cluster::placement::{Member, MemberState};
use crate::cluster::protocol::{Answer, Held, MAX_BODY, MAX_FETCHED, Request};
use crate::cluster::tests::{Peer, content, policy};
use crate::collection::CollectionNumber;
use crate::encoding::Seal;
use crate::encoding::compression::Compression;
use crate::encoding::fragment::{Fragment, Kind, encode};
use crate::encoding::redundancy::{Redundancy, StoragePolicy};
use crate::error::ErrorKind;
use crate::id::{BlobId, PeerId};
use crate::net::frame::{OutgoingFrames, read_body, read_header};
use crate::net::handshake::{PEER_PROTOCOL, greet};
use crate::net::identity::Security;

const CHUNK: usize = 256 << 10;

/// Starts a peer that answers each request as `answer` says.
async fn hostile_peer(answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Member {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (id, answer) = ([7; 16], Arc::new(answer));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            stream.set_nodelay(true).unwrap();
            let answer = answer.clone();
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.into_split();
                assert!(greet(&mut reader, &mut writer, &PEER_PROTOCOL, &id).await.unwrap());
                let hour = Duration::from_secs(3600);
                while let Ok(Some(Ok(header))) = read_header(&mut reader, hour, MAX_BODY).await {
                    let body = read_body(&mut reader, &header).await.unwrap();
                    let request = Request::from_bytes(header.kind, &body).unwrap();
                    let mut frames = OutgoingFrames::default();
                    frames.push(header.number, answer(&request).to_parts());
                    if frames.send(&mut writer).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    let (id, state) = (PeerId::from_bytes(id), MemberState::Up);
    Member { id, address, weight: 1, domain: "hostile".into(), state }
}

/// Starts an honest peer that has the blob, and a client that asks the hostile peer first.
async fn honest_and(hostile: Member, blob: &BlobId, bytes: &[u8]) -> (Peer, Cluster) {
    let honest = Peer::start(None).await;
    let writer = Cluster::new(vec![honest.member()], Security::INSECURE);
    writer.put(blob, bytes, &policy("none")).await.unwrap();
    // A peer that is down is asked last.
    let last = Member { state: MemberState::Down, ..honest.member() };
    (honest, Cluster::new(vec![hostile, last], Security::INSECURE))
}

/// Fragments of `blob` whose blocks match their descriptions, and decode to something else. Each
/// inflates to a chunk. There are `count` encodings.
fn forgeries(blob: &BlobId, redundancy: &str, count: u64) -> Vec<Fragment> {
    let redundancy: Redundancy = redundancy.parse().unwrap();
    let policy = StoragePolicy { redundancy, compression: Compression::Zstd };
    let one = |number: u64| {
        let mut other = vec![0; CHUNK];
        other[..8].copy_from_slice(&number.to_le_bytes());
        let (description, blocks) = encode(blob, &other, policy);
        let fragment = move |index: usize| Fragment {
            description: description.clone(),
            index: index as u8,
            block: blocks.share(index),
        };
        (0..redundancy.width()).map(fragment).collect::<Vec<_>>()
    };
    (0..count).flat_map(one).collect()
}

/// Reads the blob until a peer is named. An answer that comes later than that of another peer is
/// not examined, so one read may not be enough.
async fn read_until_named(cluster: &Cluster, blob: &BlobId, expected: &[u8]) -> Vec<PeerId> {
    let mut buf = vec![0; CHUNK];
    let begin = Instant::now();
    while cluster.suspects().is_empty() && begin.elapsed() < Duration::from_secs(30) {
        let start = Instant::now();
        assert_eq!(cluster.get(blob, &mut buf).await.unwrap(), CHUNK);
        assert!(buf == expected);
        println!("a read took {:?}", start.elapsed());
    }
    cluster.suspects().into_iter().map(|(peer, _)| peer).collect()
}

#[tokio::test]
async fn a_peer_that_sends_too_many_fragments_is_named_and_its_answer_is_not_decoded() {
    let (blob, bytes) = content(1, CHUNK);
    let all = forgeries(&blob, "none", 3000);
    for count in [MAX_FETCHED + 1, 1000, 3000] {
        let answer = Answer::Fragments(all[..count].to_vec());
        let hostile = hostile_peer(move |_| answer.clone()).await;
        let id = hostile.id;
        let (_honest, cluster) = honest_and(hostile, &blob, &bytes).await;
        let named = read_until_named(&cluster, &blob, &bytes).await;
        assert_eq!(named, [id], "{count} fragments");
    }
}

#[tokio::test]
async fn a_peer_that_forges_whole_encodings_is_named() {
    let (blob, bytes) = content(2, CHUNK);
    for (redundancy, count) in [("none", 1), ("none", 6), ("rs=2+1", 2), ("rs=3+3", 1)] {
        let answer = Answer::Fragments(forgeries(&blob, redundancy, count));
        let hostile = hostile_peer(move |_| answer.clone()).await;
        let id = hostile.id;
        let (_honest, cluster) = honest_and(hostile, &blob, &bytes).await;
        let named = read_until_named(&cluster, &blob, &bytes).await;
        assert_eq!(named, [id], "{count} of {redundancy}");
    }
}

#[tokio::test]
async fn a_peer_that_forges_a_blob_that_no_peer_has_is_named() {
    let (blob, _) = content(3, CHUNK);
    let answer = Answer::Fragments(forgeries(&blob, "none", 6));
    let hostile = hostile_peer(move |_| answer.clone()).await;
    let id = hostile.id;
    let cluster = Cluster::new(vec![hostile], Security::INSECURE);
    let error = cluster.get(&blob, &mut vec![0; CHUNK]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(cluster.suspects(), [(id, 1)]);
}

#[tokio::test]
async fn a_peer_that_claims_more_fragments_of_a_blob_than_a_peer_stores_is_named() {
    let held = Held {
        encoding: BlobId::of(b"x"),
        data: 1,
        parity: 0,
        index: 0,
        kind: Kind::Content,
        len: 1,
        seal: Seal::NONE,
    };
    let hostile = hostile_peer(move |_| Answer::Held(vec![vec![held; 200]])).await;
    let id = hostile.id;
    let cluster = Cluster::new(vec![hostile], Security::INSECURE);
    let (blob, _) = content(4, 100);
    assert_eq!(cluster.known(&[blob], &policy("none")).await, [false]);
    assert_eq!(cluster.suspects(), [(id, 1)]);
}

/// An honest peer sends no more than a reader accepts, however many encodings it has.
#[tokio::test]
async fn an_honest_peer_with_many_encodings_of_a_blob_is_not_a_suspect() {
    let (blob, bytes) = content(5, CHUNK);
    let peer = Peer::start(None).await;
    let cluster = Cluster::new(vec![peer.member()], Security::INSECURE);
    cluster.put(&blob, &bytes, &policy("none")).await.unwrap();
    let connection = Connection::open(&peer.address, &Security::INSECURE).await.unwrap();
    for data in 2..12 {
        let (description, blocks) =
            encode(&blob, &bytes, Redundancy::ReedSolomon { data, parity: 2 });
        let block = blocks.share(0);
        connection
            .put(Fragment { description, index: 0, block }, CollectionNumber::FIRST)
            .await
            .unwrap();
    }
    assert_eq!(connection.have(&[blob], None).await.unwrap()[0].len(), 11);
    assert_eq!(connection.fetch(&blob).await.unwrap().len(), MAX_FETCHED);
    // Which encodings are in the answer does not matter here: the peer may leave out the copy.
    let _ = cluster.get(&blob, &mut vec![0; CHUNK]).await;
    assert_eq!(cluster.suspects(), []);
}
