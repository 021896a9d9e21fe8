//! Tests of repair with real peers that hold another content under the name of a blob, with right
//! checksums.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::mpsc;

use super::verify::tests::{fragments, inconsistent};
use super::{
    ConnectedPeers, PeerState, RepairLimits, RepairMembers, RepairPeer, Report, Wanted, repair,
};
use crate::cluster::client::{Cluster, Connection};
use crate::cluster::placement::Member;
use crate::cluster::repair::permit_all;
use crate::cluster::tests::{Peer, content, members, start};
use crate::collection::CollectionNumber;
use crate::encoding::Redundancy;
use crate::encoding::fragment::Fragment;
use crate::id::{BlobId, PeerId};
use crate::net::identity::Security;

const LEN: usize = 10_000;

/// A blob on some peers.
struct Site {
    peers: Vec<Peer>,
    wanted: Redundancy,
    blob: BlobId,
    content: Vec<u8>,
}

impl Site {
    /// As many peers as a blob needs, and one more.
    async fn new(text: &str, number: u64) -> Site {
        let wanted: Redundancy = text.parse().unwrap();
        let (blob, content) = content(number, LEN);
        Site { peers: start(wanted.width() + 1).await, wanted, blob, content }
    }

    /// The fragments, or copies, of the blob.
    fn good(&self) -> Vec<Fragment> {
        self.all(fragments(&self.blob, &self.content, self.wanted))
    }

    /// The fragments of another content under the blob's name. The number tells forgeries apart.
    fn forged(&self, number: u8) -> Vec<Fragment> {
        let other: Vec<u8> = self.content.iter().map(|byte| byte ^ number).collect();
        self.all(fragments(&self.blob, &other, self.wanted))
    }

    fn all(&self, fragments: Vec<Fragment>) -> Vec<Fragment> {
        (0..self.wanted.width()).map(|at| fragments[at % fragments.len()].clone()).collect()
    }

    /// Stores fragments: the first on the peer `first`, the others on the `spread` peers from there
    /// on.
    async fn store(&self, fragments: &[Fragment], first: usize, spread: usize) {
        for (at, fragment) in fragments.iter().enumerate() {
            let peer = &self.peers[(first + at % spread) % self.peers.len()];
            connect(peer).await.put(fragment.clone(), CollectionNumber::FIRST).await.unwrap();
        }
    }

    /// Repairs when no client may rely on a surplus copy any more.
    async fn repair(&self, lost: &[PeerId]) -> Report {
        self.peers.iter().for_each(|peer| peer.age(25 * 3600));
        let nodes = self.peers.iter().map(|peer| {
            let node = RepairPeer::from(&peer.member());
            let state = if lost.contains(&peer.id) { PeerState::Lost } else { node.state };
            RepairPeer { state, ..node }
        });
        let (sender, receiver) = mpsc::channel(1);
        sender.try_send(Wanted::content(self.blob, self.wanted)).unwrap();
        drop(sender);
        let peers = members(&self.peers);
        let peers =
            ConnectedPeers::new(peers, Security::INSECURE, permit_all(), CollectionNumber::FIRST);
        let (members, limits) = (RepairMembers::new(nodes), RepairLimits::default());
        repair(Arc::new(peers), members, receiver, limits, &|| true, &|_| ()).await
    }

    /// Asserts that the blob has its full redundancy and that nothing else is left of it.
    async fn check(&self, lost: &[PeerId], what: &str) {
        let again = self.repair(lost).await;
        assert_eq!((again.bytes, again.dropped, again.left), (0, 0, 0), "{what}: {again:?}");
        let left: Vec<&Peer> = self.peers.iter().filter(|peer| !lost.contains(&peer.id)).collect();
        let mut holders = Vec::new();
        for peer in &left {
            let found = connect(peer).await.fetch(&self.blob).await.unwrap();
            assert!(found.len() <= 1, "{what}: {} fragments on one peer", found.len());
            if !found.is_empty() {
                holders.push(peer.member());
            }
        }
        assert_eq!(holders.len(), self.wanted.width(), "{what}");
        // Any holders that are enough give the blob.
        for first in 0..holders.len() {
            let some: Vec<Member> = (0..self.wanted.needed())
                .map(|at| holders[(first + at) % holders.len()].clone())
                .collect();
            let cluster = Cluster::new(some, Security::INSECURE);
            let mut found = vec![0; LEN];
            assert_eq!(cluster.get(&self.blob, &mut found).await.unwrap(), LEN, "{what}");
            assert!(found == self.content, "{what}");
        }
    }

    fn named(&self, report: &Report) -> BTreeSet<PeerId> {
        assert!(report.wrong.iter().all(|one| one.blob == self.blob));
        report.suspects().into_keys().collect()
    }
}

async fn connect(peer: &Peer) -> Connection {
    Connection::open(&peer.address, &Security::INSECURE).await.unwrap()
}

const CODES: [&str; 3] = ["rs=2+2", "rs=4+3", "replicas=3"];

/// Different blobs, so that the hashes of the two encodings come in both orders.
const BLOBS: u64 = 4;

#[tokio::test]
async fn a_forged_encoding_that_is_stronger_than_the_good_one_does_not_replace_it() {
    for (text, number) in CODES.into_iter().flat_map(|text| (0..BLOBS).map(move |n| (text, n))) {
        let site = Site::new(text, number).await;
        let (good, forged, width) = (site.good(), site.forged(1), site.wanted.width());
        // Only enough fragments of the good one are there.
        site.store(&good[..site.wanted.needed()], 1, width).await;
        site.store(&forged, 0, width).await;
        let report = site.repair(&[]).await;
        assert!(!report.is_incomplete(), "{text}: {report:?}");
        let holders: BTreeSet<_> = site.peers[..width].iter().map(|peer| peer.id).collect();
        assert!(site.named(&report).is_superset(&holders), "{text}: the holders are named");
        site.check(&[], text).await;
    }
}

#[tokio::test]
async fn of_two_complete_encodings_the_one_that_gives_the_blob_is_kept() {
    for (text, number) in CODES.into_iter().flat_map(|text| (0..BLOBS).map(move |n| (text, n))) {
        let site = Site::new(text, number).await;
        site.store(&site.forged(1), 0, site.wanted.width()).await;
        site.store(&site.good(), 0, site.wanted.width()).await;
        let report = site.repair(&[]).await;
        assert!(!report.is_incomplete() && report.dropped > 0, "{text}: {report:?}");
        site.check(&[], text).await;
    }
}

/// Without the rejection each repair would choose it again and fail.
#[tokio::test]
async fn a_forged_encoding_that_is_incomplete_and_stronger_does_not_stop_the_repair() {
    for (text, number) in ["rs=2+2", "rs=4+3"].into_iter().flat_map(|text| [(text, 0), (text, 1)]) {
        let site = Site::new(text, number).await;
        let (good, forged, width) = (site.good(), site.forged(1), site.wanted.width());
        site.store(&good[..site.wanted.needed()], 0, width).await;
        site.store(&forged[1..], 1, width).await;
        let report = site.repair(&[]).await;
        assert!(!report.is_incomplete() && report.rebuilt > 0, "{text}: {report:?}");
        site.check(&[], text).await;
    }
}

#[tokio::test]
async fn a_blob_whose_good_fragments_are_on_few_peers_is_spread_and_not_deleted() {
    for (text, few) in [("rs=2+2", 1), ("rs=4+3", 1), ("rs=4+3", 2), ("replicas=3", 1)] {
        for number in 0..BLOBS {
            let site = Site::new(text, number).await;
            site.store(&site.good(), 1, few).await;
            site.store(&site.forged(1), 0, site.wanted.width()).await;
            let report = site.repair(&[]).await;
            assert!(!report.is_incomplete(), "{text}: {report:?}");
            site.check(&[], text).await;
        }
    }
}

#[tokio::test]
async fn a_hostile_peer_that_holds_a_complete_forged_encoding_harms_nothing() {
    for text in CODES {
        let site = Site::new(text, 0).await;
        let width = site.wanted.width();
        site.store(&site.good(), 0, width).await;
        site.store(&site.forged(1), 0, 1).await;
        // The good encoding is the stronger one. It is decoded, and the other one is deleted.
        let report = site.repair(&[]).await;
        assert!(!report.is_incomplete() && report.dropped > 0, "{text}: {report:?}");
        site.check(&[], text).await;
        // The good encoding is the weaker one, and no place is left to complete it.
        let lost: Vec<_> =
            site.peers[1..=site.wanted.survives()].iter().map(|peer| peer.id).collect();
        site.store(&site.forged(2), 0, width + 1).await;
        let report = site.repair(&lost).await;
        assert!(report.left == 1 && report.unreadable.is_empty(), "{text}: {report:?}");
        let mut found = vec![0; LEN];
        let left = site.peers.iter().filter(|peer| !lost.contains(&peer.id));
        let cluster = Cluster::new(left.map(Peer::member).collect(), Security::INSECURE);
        assert_eq!(cluster.get(&site.blob, &mut found).await.unwrap(), LEN, "{text}");
        assert!(found == site.content, "{text}");
    }
}

/// The data blocks are right, so the blob can be read until one of them is lost.
#[tokio::test]
async fn an_encoding_with_the_parity_of_another_content_is_encoded_again() {
    for (text, number) in ["rs=2+2", "rs=4+3"].into_iter().flat_map(|text| [(text, 0), (text, 1)]) {
        let site = Site::new(text, number).await;
        let (width, needed) = (site.wanted.width(), site.wanted.needed());
        let forged = inconsistent(&site.blob, &site.content, site.wanted);
        // A parity block is missing, so the others are read.
        site.store(&forged[..width - 1], 0, width).await;
        let report = site.repair(&[]).await;
        assert!(!report.is_incomplete(), "{text}: {report:?}");
        site.check(&[], text).await;
        // The same beside a good encoding that lacks fragments.
        let site = Site::new(text, number).await;
        site.store(&forged, 0, width).await;
        site.store(&site.good()[..needed], 1, width).await;
        let report = site.repair(&[]).await;
        assert!(!report.is_incomplete(), "{text}: {report:?}");
        site.check(&[], text).await;
    }
}

/// As many as a peer takes, and more than a repair has rounds.
#[tokio::test]
async fn many_forged_encodings_do_not_use_up_the_rounds_of_a_repair() {
    let site = Site::new("rs=2+1", 0).await;
    site.store(&site.good()[..2], 0, 3).await;
    for number in 1..=12 {
        site.store(&site.forged(number), 0, 4).await;
    }
    let report = site.repair(&[]).await;
    assert!(!report.is_incomplete(), "{report:?}");
    site.check(&[], "rs=2+1").await;
}

/// The peer refuses a further fragment of this blob, and takes those of others.
#[tokio::test]
async fn a_peer_with_too_many_fragments_of_a_blob_is_passed_over_until_they_are_gone() {
    let site = Site::new("rs=2+2", 0).await;
    site.store(&site.good()[..3], 1, 3).await;
    for number in 1..=16 {
        site.store(&site.forged(number), 0, 1).await;
    }
    let refused =
        connect(&site.peers[0]).await.put(site.good()[3].clone(), CollectionNumber::FIRST).await;
    assert!(refused.is_err(), "it has 64 fragments of the blob");
    for _ in 0..2 {
        let report = site.repair(&[]).await;
        assert!(!report.is_incomplete(), "{report:?}");
    }
    site.check(&[], "rs=2+2").await;
}

#[tokio::test]
async fn nothing_is_deleted_if_no_encoding_gives_the_blob() {
    for text in CODES {
        let site = Site::new(text, 0).await;
        let (width, needed) = (site.wanted.width(), site.wanted.needed());
        site.store(&site.forged(1), 0, width).await;
        site.store(&site.forged(2), 0, width).await;
        site.store(&site.good()[..needed - 1], 0, width).await;
        let before = total(&site).await;
        let report = site.repair(&[]).await;
        assert!(report.dropped == 0 && total(&site).await >= before, "{text}: {report:?}");
        assert_eq!(report.unreadable, [site.blob], "{text}");
        assert!(report.is_incomplete() && report.left == 1, "{text}: {report:?}");
    }
}

async fn total(site: &Site) -> u64 {
    let mut total = 0;
    for peer in &site.peers {
        total += connect(peer).await.usage().await.unwrap().fragments;
    }
    total
}

/// Bytes of a block that can be exchanged without a change of its checksum. XXH3 multiplies the two
/// halves of a word after it has combined them with a known secret. If one half becomes 0 by that,
/// the other one counts only in a sum with the word 64 bytes further on.
fn collide(block: &mut [u8], first: u32, second: u32) {
    // The lower halves of the secret's first two words.
    block[..4].copy_from_slice(&[0xb8, 0xfe, 0x6c, 0x39]);
    block[64..68].copy_from_slice(&[0x7c, 0x01, 0x81, 0x2c]);
    block[4..8].copy_from_slice(&first.to_le_bytes());
    block[68..72].copy_from_slice(&second.to_le_bytes());
}

#[tokio::test]
async fn a_forged_fragment_with_the_checksum_of_the_right_one_is_replaced() {
    // The forged fragment is at its place, or outside of it and is copied there.
    for (text, is_alone) in CODES.into_iter().flat_map(|text| [(text, false), (text, true)]) {
        let mut site = Site::new(text, 0).await;
        collide(&mut site.content, 3, 5);
        site.blob = BlobId::of(&site.content);
        let (good, width) = (site.good(), site.wanted.width());
        let mut forged = good[0].clone();
        let mut block = forged.block.to_vec();
        collide(&mut block, 5, 3);
        forged.block = block.into();
        assert!(forged.block != good[0].block && forged.is_of(&site.blob), "its checksum is right");
        site.store(&[forged], 0, 1).await;
        site.store(&good[1..], 1, width).await;
        // A further fragment of another peer, which is surplus.
        let last = if is_alone { &good[width - 1] } else { &good[0] };
        site.store(std::slice::from_ref(last), width, 1).await;
        let report = site.repair(&[]).await;
        assert!(!report.is_incomplete(), "{text}: {report:?}");
        site.check(&[], text).await;
    }
}
