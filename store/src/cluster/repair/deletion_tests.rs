//! Tests of deletions under the repair lease, with peers that stall.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{ConnectedPeers, DELETION_TIMEOUT, DeletionPermit, Peers};
use crate::cluster::client::Connection;
use crate::cluster::placement::Member;
use crate::cluster::protocol::FragmentId;
use crate::cluster::repair::permit_all;
use crate::cluster::stalling_proxy::{Stall, StallingProxy};
use crate::cluster::tests::{Peer, content};
use crate::collection::CollectionNumber;
use crate::encoding::Redundancy;
use crate::encoding::fragment::{Fragment, encode};
use crate::error::{Error, ErrorKind};
use crate::net::identity::Security;

/// A slow machine needs this much longer than the limit.
const SLACK: Duration = Duration::from_secs(20);

/// A peer with one fragment.
async fn peer_with_fragment() -> (Peer, FragmentId) {
    let peer = Peer::start(None).await;
    let (blob, content) = content(1, 10_000);
    let (description, blocks) = encode(&blob, &content, Redundancy::NONE);
    let id = FragmentId { blob, encoding: description.id(), index: 0 };
    let fragment = Fragment { description, index: 0, block: blocks.share(0) };
    connect(&peer).await.put(fragment, CollectionNumber::FIRST).await.unwrap();
    (peer, id)
}

async fn connect(peer: &Peer) -> Connection {
    Connection::open(&peer.address, &Security::INSECURE).await.unwrap()
}

async fn has(peer: &Peer, id: &FragmentId) -> bool {
    connect(peer).await.fetch_fragment(id).await.unwrap().is_some()
}

fn through(proxy: &StallingProxy, peer: &Peer, permit: DeletionPermit) -> ConnectedPeers {
    let member = Member { address: proxy.address.clone(), ..peer.member() };
    ConnectedPeers::new([member], Security::INSECURE, permit, CollectionNumber::FIRST)
}

#[tokio::test]
async fn a_deletion_that_is_held_up_on_its_way_is_not_carried_out_after_its_time() {
    let (peer, id) = peer_with_fragment().await;
    let proxy = StallingProxy::start(&peer.address, Stall::Deletions);
    let begin = Instant::now();
    let peers = through(&proxy, &peer, permit_all());
    let stalled = async {
        proxy.wait_for_stalled(1).await;
        Instant::now()
    };
    let fragments = [id];
    let (late, stalled) = tokio::join!(peers.delete(peer.id, &fragments, 0), stalled);
    let late = late.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Unavailable, "{late}");
    assert!(begin.elapsed() < DELETION_TIMEOUT + SLACK, "{:?}", begin.elapsed());
    // The peer's clock was read before the request was sent. Its limit has passed at this time.
    tokio::time::sleep_until((stalled + DELETION_TIMEOUT).into()).await;
    // The lease may belong to another repair from here on.
    proxy.release();
    proxy.wait_for_answers(1).await;
    assert!(has(&peer, &id).await, "the deletion was carried out too late");
    // One that arrives in time is carried out. The first connection may be backed off.
    let peers = through(&proxy, &peer, permit_all());
    assert!(peers.delete(peer.id, &[id], 0).await.unwrap() > 0);
    assert!(!has(&peer, &id).await);
}

#[tokio::test]
async fn a_peer_that_accepts_and_stalls_does_not_delay_a_deletion_beyond_its_time() {
    let (peer, id) = peer_with_fragment().await;
    let proxy = StallingProxy::start(&peer.address, Stall::All);
    let begin = Instant::now();
    let peers = through(&proxy, &peer, permit_all());
    let late = peers.delete(peer.id, &[id], 0).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Unavailable, "{late}");
    assert!(begin.elapsed() < DELETION_TIMEOUT + SLACK, "{:?}", begin.elapsed());
    assert!(has(&peer, &id).await);
}

#[tokio::test]
async fn the_lease_is_checked_after_the_connection_was_made() {
    let (peer, id) = peer_with_fragment().await;
    let proxy = StallingProxy::start(&peer.address, Stall::All);
    let is_held = Arc::new(AtomicBool::new(true));
    let held = is_held.clone();
    let permit: DeletionPermit = Arc::new(move || {
        let held = held.clone();
        Box::pin(async move { held.load(Ordering::SeqCst) })
    });
    let peers = through(&proxy, &peer, permit);
    let lose = async {
        proxy.wait_for_stalled(1).await;
        is_held.store(false, Ordering::SeqCst);
        proxy.release();
    };
    let all = [id];
    let (deleted, ()) = tokio::join!(peers.delete(peer.id, &all, 0), lose);
    assert!(matches!(deleted, Err(Error::LeaseLost)), "{deleted:?}");
    assert!(has(&peer, &id).await);
}
