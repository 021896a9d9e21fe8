//! Tests of repair with real peers, over sockets.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::{
    ConnectedPeers, PeerState, Peers, RepairLimits, RepairMembers, RepairPeer, Report, Wanted,
    repair,
};
use crate::cluster::client::Cluster;
use crate::cluster::placement::{Member, MemberState};
use crate::cluster::protocol::{FragmentId, Held};
use crate::cluster::repair::permit_all;
use crate::cluster::tests::{Peer, content, members, policy, start};
use crate::collection::CollectionNumber;
use crate::encoding::Redundancy;
use crate::encoding::SealKeys;
use crate::encoding::fragment::Fragment;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, PeerId};
use crate::net::identity::Security;

const LEN: usize = 40_000;

/// Blobs that were stored in a cluster.
struct Stored {
    redundancy: Redundancy,
    blobs: Vec<(BlobId, Vec<u8>)>,
}

impl Stored {
    async fn put(cluster: &Cluster, text: &str, count: u64) -> Stored {
        let blobs: Vec<_> = (0..count).map(|number| content(number, LEN)).collect();
        for (blob, content) in &blobs {
            cluster.put(blob, content, &policy(text)).await.unwrap();
        }
        Stored { redundancy: text.parse().unwrap(), blobs }
    }

    fn feed(&self) -> mpsc::Receiver<Wanted> {
        let (sender, receiver) = mpsc::channel(self.blobs.len());
        let blobs: BTreeSet<BlobId> = self.blobs.iter().map(|(blob, _)| *blob).collect();
        for blob in blobs {
            sender.try_send(Wanted::content(blob, self.redundancy)).unwrap();
        }
        receiver
    }

    /// Reads all blobs from these peers and compares them.
    async fn check(&self, members: Vec<Member>) {
        let cluster = Cluster::new(members, Security::INSECURE);
        let mut buffer = vec![0; LEN];
        for (blob, content) in &self.blobs {
            let len = cluster.get(blob, &mut buffer).await.unwrap();
            assert!(&buffer[..len] == content);
        }
    }

    async fn repair(&self, members: &[Member], lost: &[PeerId]) -> Report {
        self.repair_with(members, lost, RepairLimits::default()).await
    }

    async fn repair_with(
        &self,
        members: &[Member],
        lost: &[PeerId],
        limits: RepairLimits,
    ) -> Report {
        let nodes = members.iter().map(|member| {
            let node = RepairPeer::from(member);
            let state = if lost.contains(&member.id) { PeerState::Lost } else { node.state };
            RepairPeer { state, ..node }
        });
        let peers = Arc::new(connected(members.to_vec()));
        repair(peers, RepairMembers::new(nodes), self.feed(), limits, &|| true, &|_| ()).await
    }
}

/// Peers that may be deleted from.
fn connected(members: Vec<Member>) -> ConnectedPeers {
    ConnectedPeers::new(members, Security::INSECURE, permit_all(), CollectionNumber::FIRST)
}

async fn fragments(peer: &Peer) -> u64 {
    let connection =
        crate::cluster::client::Connection::open(&peer.address, &Security::INSECURE).await;
    connection.unwrap().usage().await.unwrap().fragments
}

#[tokio::test]
async fn after_the_repair_of_two_lost_peers_the_full_number_of_others_may_fail() {
    for (text, spare) in [("rs=4+4", 4), ("replicas=3", 2)] {
        let mut peers = start(10).await;
        let all = members(&peers);
        let cluster = Cluster::new(all.clone(), Security::INSECURE);
        let stored = Stored::put(&cluster, text, 60).await;
        let mut before = 0;
        for peer in &peers[..2] {
            before += fragments(peer).await;
        }
        for peer in &mut peers[..2] {
            peer.stop().await;
        }
        let lost = [peers[0].id, peers[1].id];
        let report = stored.repair(&all, &lost).await;
        assert_eq!((report.blobs, report.left), (60, 0), "{report:?}");
        assert_eq!(report.rebuilt + report.moved, before, "{report:?}");
        assert_eq!(report.survives, Some(spare as i64), "{report:?}");
        assert!(!report.is_incomplete() && report.dropped == 0, "{report:?}");
        // A second repair has nothing to do.
        let again = stored.repair(&all, &lost).await;
        assert_eq!((again.under, again.bytes, again.survives), (0, 0, Some(spare as i64)));
        for rotation in 0..4 {
            let live: Vec<Member> = (2..10)
                .filter(|at| (at + rotation * 3) % 8 >= spare)
                .map(|at| all[at].clone())
                .collect();
            assert_eq!(live.len(), 8 - spare);
            stored.check(live).await;
        }
    }
}

#[tokio::test]
async fn a_peer_that_is_down_moves_nothing_and_is_reported() {
    let mut peers = start(9).await;
    let all = members(&peers);
    let stored = Stored::put(&Cluster::new(all.clone(), Security::INSECURE), "rs=2+2", 20).await;
    let held = fragments(&peers[3]).await;
    peers[3].stop().await;
    // Whether or not the catalog knows that it is down.
    let mut known = all.clone();
    known[3].state = MemberState::Down;
    for members in [all, known] {
        let report = stored.repair(&members, &[]).await;
        assert_eq!((report.rebuilt, report.moved, report.dropped), (0, 0, 0), "{report:?}");
        assert_eq!((report.under, report.left, report.survives), (held, held, Some(1)));
    }
}

#[tokio::test]
async fn a_drained_peer_ends_empty_and_a_peer_that_joins_gets_its_share() {
    let mut peers = start(6).await;
    let all = members(&peers);
    let stored = Stored::put(&Cluster::new(all.clone(), Security::INSECURE), "rs=2+2", 40).await;
    let held = fragments(&peers[2]).await;
    let mut draining = all.clone();
    draining[2].state = MemberState::Draining;
    let report = stored.repair(&draining, &[]).await;
    assert_eq!((report.moved, report.dropped, report.rebuilt), (held, held, 0), "{report:?}");
    assert_eq!(fragments(&peers[2]).await, 0);
    assert!(held > 0 && !report.is_incomplete());
    // The drained peer takes part again, and another peer joins.
    peers.push(Peer::start(None).await);
    let all = members(&peers);
    let report = stored.repair(&all, &[]).await;
    let new = fragments(&peers[2]).await + fragments(&peers[6]).await;
    assert_eq!((report.moved, report.dropped, report.under), (new, new, 0), "{report:?}");
    let mut total = 0;
    for peer in &peers {
        total += fragments(peer).await;
    }
    assert_eq!(total, 40 * 4);
    stored.check(all).await;
}

#[tokio::test]
async fn a_fragment_that_does_not_fit_goes_to_another_peer() {
    let mut peers = start(5).await;
    peers.push(Peer::start(Some(100_000)).await);
    let first = members(&peers[..5]);
    let stored = Stored::put(&Cluster::new(first, Security::INSECURE), "replicas=3", 30).await;
    let all = members(&peers);
    let report = stored.repair(&all, &[]).await;
    assert!(report.moved <= 4 && report.left == 0, "{report:?}");
    peers[0].stop().await;
    let report = stored.repair(&all, &[peers[0].id]).await;
    assert_eq!((report.left, report.survives), (0, Some(2)), "{report:?}");
    assert!(report.moved > 5, "{report:?}");
}

#[tokio::test]
async fn a_blob_that_exists_only_in_another_encoding_is_encoded() {
    let peers = start(5).await;
    let all = members(&peers);
    let mut stored = Stored::put(&Cluster::new(all.clone(), Security::INSECURE), "none", 10).await;
    stored.redundancy = "rs=2+2".parse().unwrap();
    let report = stored.repair(&all, &[]).await;
    assert_eq!((report.under, report.rebuilt, report.left), (10, 40, 0), "{report:?}");
    // The blobs can be read even without the copies.
    stored.check(members(&peers[1..])).await;
}

#[tokio::test]
async fn a_repair_stops_on_request_and_keeps_its_rate() {
    let mut peers = start(6).await;
    let all = members(&peers);
    let stored = Stored::put(&Cluster::new(all.clone(), Security::INSECURE), "rs=2+2", 30).await;
    peers[0].stop().await;
    let (lost, rate) = ([peers[0].id], 2_000_000);
    let nodes = || {
        all.iter().map(|member| RepairPeer {
            state: if member.id == lost[0] { PeerState::Lost } else { PeerState::Up },
            ..RepairPeer::from(member)
        })
    };
    let connected = || Arc::new(connected(all.clone()));
    let reports = AtomicU64::new(0);
    let should_continue = || reports.load(Ordering::SeqCst) == 0;
    let progress = |_: &Report| {
        reports.fetch_add(1, Ordering::SeqCst);
    };
    let members = RepairMembers::new(nodes());
    let report = repair(
        connected(),
        members,
        stored.feed(),
        RepairLimits::default(),
        &should_continue,
        &progress,
    )
    .await;
    assert!(report.is_stopped && report.is_incomplete(), "{report:?}");
    let begin = Instant::now();
    let limits = RepairLimits { rate: Some(rate), memory: 1 };
    let report = stored.repair_with(&all, &lost, limits).await;
    assert!(report.rebuilt > 5 && report.left == 0, "{report:?}");
    let least = Duration::from_secs_f64(report.bytes as f64 / rate as f64 / 2.0);
    assert!(begin.elapsed() > least, "{report:?} in {:?}", begin.elapsed());
}

/// Peers that count the deletions they are asked for, and carry them out or ignore them.
struct Counting {
    peers: ConnectedPeers,
    deletes: bool,
    asked: AtomicU64,
}

impl Peers for Counting {
    fn seals(&self) -> &SealKeys {
        self.peers.seals()
    }

    async fn have(&self, peer: PeerId, blobs: &[BlobId]) -> Result<Vec<Vec<Held>>> {
        self.peers.have(peer, blobs).await
    }

    async fn list(&self, peer: PeerId, after: BlobId, most: usize) -> Result<Vec<(BlobId, Held)>> {
        self.peers.list(peer, after, most).await
    }

    async fn get(&self, peer: PeerId, fragment: FragmentId) -> Result<Option<Fragment>> {
        self.peers.get(peer, fragment).await
    }

    async fn put(&self, peer: PeerId, fragment: Fragment) -> Result<()> {
        self.peers.put(peer, fragment).await
    }

    async fn delete(&self, peer: PeerId, fragments: &[FragmentId], idle: u32) -> Result<u64> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if self.deletes { self.peers.delete(peer, fragments, idle).await } else { Ok(0) }
    }
}

/// Another repair may run by then.
#[tokio::test]
async fn a_repair_that_lost_its_lease_stops_deleting() {
    let peers = start(6).await;
    let mut all = members(&peers);
    let stored = Stored::put(&Cluster::new(all.clone(), Security::INSECURE), "rs=2+2", 60).await;
    let held = fragments(&peers[2]).await;
    assert!(held > 15, "{held} of 60 blobs, each on four of six peers");
    all[2].state = MemberState::Draining;
    let counting = |deletes| {
        let peers = connected(all.clone());
        Arc::new(Counting { peers, deletes, asked: AtomicU64::new(0) })
    };
    let nodes = || RepairMembers::new(all.iter().map(RepairPeer::from));
    // The first repair ends when every fragment to move exists twice. The second one reads what it
    // keeps, which takes a second for each blob, and loses its lease at the first deletion.
    let first = counting(false);
    repair(first, nodes(), stored.feed(), RepairLimits::default(), &|| true, &|_| ()).await;
    let second = counting(true);
    let limits = RepairLimits { rate: Some(2 * LEN as u64), ..RepairLimits::default() };
    let should_continue = || second.asked.load(Ordering::SeqCst) == 0;
    let report =
        repair(second.clone(), nodes(), stored.feed(), limits, &should_continue, &|_| ()).await;
    let deleted = second.asked.load(Ordering::SeqCst);
    println!("{deleted} of {held} fragments were deleted");
    // Some deletions may follow until the repair notices.
    assert!(report.is_stopped && (1..=12).contains(&deleted), "{deleted} of {held}: {report:?}");
    stored.check(all).await;
}

#[tokio::test]
async fn unreadable_blobs_are_listed_in_the_report() {
    let mut peers = start(5).await;
    let all = members(&peers);
    let stored = Stored::put(&Cluster::new(all.clone(), Security::INSECURE), "none", 60).await;
    peers[0].stop().await;
    let report = stored.repair(&all, &[peers[0].id]).await;
    let gone: BTreeSet<BlobId> = report.unreadable.iter().copied().collect();
    assert_eq!((report.survives, gone.len() as u64), (Some(-1), report.left), "{report:?}");
    let cluster = Cluster::new(members(&peers[1..]), Security::INSECURE);
    for (blob, _) in &stored.blobs {
        let read = cluster.get(blob, &mut vec![0; LEN]).await;
        assert_eq!(read.is_err(), gone.contains(blob));
    }
}

#[tokio::test]
async fn a_copy_that_a_client_may_rely_on_stays() {
    let peers = start(5).await;
    let all = members(&peers);
    let cluster = Cluster::new(all.clone(), Security::INSECURE);
    // A client stores three copies of blobs of which the catalog wants two so far.
    let mut stored = Stored::put(&cluster, "replicas=3", 10).await;
    stored.redundancy = "replicas=2".parse().unwrap();
    let report = stored.repair(&all, &[]).await;
    assert_eq!((report.dropped, report.left, report.under), (0, 0, 0), "{report:?}");
    let blobs: Vec<BlobId> = stored.blobs.iter().map(|(blob, _)| *blob).collect();
    let known = cluster.known(&blobs, &policy("replicas=3")).await;
    assert!(known.into_iter().all(|is_known| is_known));
    // Copies that were idle for long enough are dropped.
    for peer in &peers {
        peer.age(25 * 3600);
    }
    let report = stored.repair(&all, &[]).await;
    assert_eq!((report.dropped, report.left, report.under), (10, 0, 0), "{report:?}");
    assert!(!report.is_incomplete(), "{report:?}");
}

#[tokio::test]
async fn a_moved_copy_is_dropped_at_its_old_place() {
    let mut peers = start(4).await;
    let cluster = Cluster::new(members(&peers), Security::INSECURE);
    let stored = Stored::put(&cluster, "replicas=2", 30).await;
    peers.push(Peer::start(None).await);
    let report = stored.repair(&members(&peers), &[]).await;
    let new = fragments(&peers[4]).await;
    assert!(new > 0 && !report.is_incomplete(), "{report:?}");
    assert_eq!((report.moved, report.dropped), (new, new), "{report:?}");
    let mut total = 0;
    for peer in &peers {
        total += fragments(peer).await;
    }
    assert_eq!(total, 60);
}

/// Peers of which one answers otherwise than it should.
struct AlteredPeers {
    peers: ConnectedPeers,
    peer: PeerId,
    /// Turns the fragments of a blob that the peer holds into those that it claims to hold.
    claim: fn(Vec<Held>) -> Vec<Held>,
    /// Whether it claims that in its list, too.
    alters_list: bool,
    /// The error of each get.
    get: Option<fn(String) -> Error>,
    /// The error of each put.
    put: Option<fn(String) -> Error>,
}

impl AlteredPeers {
    fn new(peers: ConnectedPeers, peer: PeerId) -> AlteredPeers {
        let (claim, alters_list): (fn(Vec<Held>) -> _, _) = (|held| held, false);
        AlteredPeers { peers, peer, claim, alters_list, get: None, put: None }
    }

    fn error(&self, peer: PeerId, error: Option<fn(String) -> Error>) -> Result<()> {
        let error = error.filter(|_| peer == self.peer);
        error.map_or(Ok(()), |error| Err(error(peer.to_string())))
    }
}

impl Peers for AlteredPeers {
    fn seals(&self) -> &SealKeys {
        self.peers.seals()
    }

    async fn have(&self, peer: PeerId, blobs: &[BlobId]) -> Result<Vec<Vec<Held>>> {
        let all = self.peers.have(peer, blobs).await?;
        let is_altered = |held: &Vec<Held>| peer == self.peer && !held.is_empty();
        let claim = |held| if is_altered(&held) { (self.claim)(held) } else { held };
        Ok(all.into_iter().map(claim).collect())
    }

    async fn list(&self, peer: PeerId, after: BlobId, most: usize) -> Result<Vec<(BlobId, Held)>> {
        let page = self.peers.list(peer, after, most).await?;
        if peer != self.peer || !self.alters_list {
            return Ok(page);
        }
        let blobs = page.chunk_by(|one, other| one.0 == other.0);
        let claim = |own: &[(BlobId, Held)]| {
            let (blob, held) = (own[0].0, own.iter().map(|one| one.1).collect());
            (self.claim)(held).into_iter().map(move |held| (blob, held)).collect::<Vec<_>>()
        };
        Ok(blobs.flat_map(claim).collect())
    }

    async fn get(&self, peer: PeerId, fragment: FragmentId) -> Result<Option<Fragment>> {
        self.error(peer, self.get)?;
        self.peers.get(peer, fragment).await
    }

    async fn put(&self, peer: PeerId, fragment: Fragment) -> Result<()> {
        self.error(peer, self.put)?;
        self.peers.put(peer, fragment).await
    }

    async fn delete(&self, peer: PeerId, fragments: &[FragmentId], idle: u32) -> Result<u64> {
        self.peers.delete(peer, fragments, idle).await
    }
}

fn failed(peer: String, kind: ErrorKind) -> Error {
    Error::Peer { peer, kind, reason: "this failure is part of the test".into() }
}

#[tokio::test]
async fn only_a_peer_without_space_counts_as_full() {
    let mut peers = start(7).await;
    let all = members(&peers);
    let cluster = Cluster::new(members(&peers[..6]), Security::INSECURE);
    let stored = Stored::put(&cluster, "rs=2+2", 20).await;
    peers[0].stop().await;
    let (lost, failing) = (peers[0].id, peers[6].id);
    let nodes = || {
        RepairMembers::new(all.iter().map(|member| RepairPeer {
            state: if member.id == lost { PeerState::Lost } else { PeerState::Up },
            ..RepairPeer::from(member)
        }))
    };
    let repair_with = |error: fn(String) -> Error| {
        let peers = AlteredPeers::new(connected(all.clone()), failing);
        let peers = AlteredPeers { put: Some(error), ..peers };
        let limits = RepairLimits::default();
        repair(Arc::new(peers), nodes(), stored.feed(), limits, &|| true, &|_| ())
    };
    // The peer may be back soon. It is waited for, and its share is not stored elsewhere.
    let report = repair_with(|peer| failed(peer, ErrorKind::Unavailable)).await;
    assert!(report.left > 0 && report.waiting == report.left, "{report:?}");
    let left = report.left;
    // The peer answers and refuses: other peers take its share.
    let report = repair_with(|peer| failed(peer, ErrorKind::Corrupt)).await;
    assert_eq!((report.under, report.left, report.waiting), (left, 0, 0), "{report:?}");
    let full = |peer| Error::PeerRefusedFull { peer, reason: "its disk is full".into() };
    let report = repair_with(full).await;
    assert_eq!((report.left, report.waiting), (0, 0), "{report:?}");
    stored.check(members(&peers[1..])).await;
}

/// What a peer holds, and before it something else that it claims to hold.
fn with_claim(mut held: Vec<Held>, claim: fn(Held) -> Held) -> Vec<Held> {
    held.insert(0, claim(held[0]));
    held
}

#[tokio::test]
async fn a_peer_that_claims_impossible_fragments_does_not_stop_the_repair() {
    let lies: [fn(Vec<Held>) -> Vec<Held>; 3] = [
        |held| with_claim(held, |held| Held { data: 0, index: 0, ..held }),
        |held| with_claim(held, |held| Held { data: 7, index: 0, ..held }),
        |held| with_claim(held, |held| Held { index: 0, len: u32::MAX, ..held }),
    ];
    for (text, lie) in ["rs=2+2", "replicas=3"].iter().flat_map(|text| lies.map(|lie| (text, lie)))
    {
        let mut peers = start(5).await;
        // The claims of the peer with the lowest id are looked at first.
        peers.sort_unstable_by_key(|peer| peer.id);
        let all = members(&peers);
        let stored = Stored::put(&Cluster::new(all.clone(), Security::INSECURE), text, 30).await;
        peers[4].stop().await;
        let nodes = all.iter().map(|member| {
            let state = if member.id == all[4].id { PeerState::Lost } else { PeerState::Up };
            RepairPeer { state, ..RepairPeer::from(member) }
        });
        let claiming = AlteredPeers::new(connected(all.clone()), all[0].id);
        let claiming = AlteredPeers { claim: lie, ..claiming };
        let (nodes, limits) = (RepairMembers::new(nodes), RepairLimits::default());
        let report =
            repair(Arc::new(claiming), nodes, stored.feed(), limits, &|| true, &|_| ()).await;
        assert_eq!(report.left, 0, "{text}: {report:?}");
        stored.check(all[..4].to_vec()).await;
    }
}

/// A peer claims to have all fragments of each blob and does not send them, whether it is up or
/// draining. What a lost peer had is rebuilt all the same.
#[tokio::test]
async fn a_peer_that_claims_fragments_and_does_not_send_them_does_not_stop_the_repair() {
    let errors: [fn(String) -> Error; 2] =
        [|peer| failed(peer, ErrorKind::Invalid), |peer| failed(peer, ErrorKind::Unavailable)];
    for (state, error) in [(PeerState::Up, errors[0]), (PeerState::Draining, errors[1])] {
        let mut peers = start(7).await;
        peers.sort_unstable_by_key(|peer| peer.id);
        let all = members(&peers);
        let cluster = Cluster::new(all[..5].to_vec(), Security::INSECURE);
        let stored = Stored::put(&cluster, "rs=2+3", 20).await;
        peers[4].stop().await;
        let (liar, lost) = (all[0].id, all[4].id);
        let nodes = all.iter().map(|member| {
            let node = RepairPeer::from(member);
            let state = match member.id {
                id if id == lost => PeerState::Lost,
                id if id == liar => state,
                _ => node.state,
            };
            RepairPeer { state, ..node }
        });
        let claim = |held: Vec<Held>| (0..5).map(|index| Held { index, ..held[0] }).collect();
        let claiming = AlteredPeers::new(connected(all.clone()), liar);
        let claiming = AlteredPeers { claim, alters_list: true, get: Some(error), ..claiming };
        let (nodes, limits) = (RepairMembers::new(nodes), RepairLimits::default());
        repair(Arc::new(claiming), nodes, stored.feed(), limits, &|| true, &|_| ()).await;
        // What any three of the honest peers have is enough to read each blob without any two of them.
        let honest: Vec<_> = all.iter().filter(|one| one.id != lost && one.id != liar).collect();
        for pair in [[0, 1, 2], [1, 2, 3], [0, 2, 4], [2, 3, 4]] {
            stored.check(pair.iter().map(|at| honest[*at].clone()).collect()).await;
        }
    }
}
