//! Tests of checks with real peers, over sockets.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::mpsc;

use super::verify::tests::fragments;
use super::{
    CheckedBlob, ConnectedPeers, FragmentProblem, FragmentState, Peers, RepairLimits,
    RepairMembers, RepairPeer, Wanted, check_fragments, permit_all, repair_found,
};
use crate::cluster::client::{Cluster, Connection};
use crate::cluster::protocol::FragmentId;
use crate::cluster::tests::{Peer, content, members, policy, start};
use crate::collection::CollectionNumber;
use crate::encoding::Redundancy;
use crate::id::{BlobId, PeerId};
use crate::net::identity::Security;

const LEN: usize = 40_000;

/// Blobs on peers.
struct Site {
    peers: Vec<Peer>,
    redundancy: Redundancy,
    blobs: BTreeSet<BlobId>,
}

impl Site {
    async fn new(text: &str, peers: usize, count: u64) -> Site {
        let peers = start(peers).await;
        let cluster = Cluster::new(members(&peers), Security::INSECURE);
        let mut blobs = BTreeSet::new();
        for number in 0..count {
            let (blob, content) = content(number, LEN);
            cluster.put(&blob, &content, &policy(text)).await.unwrap();
            blobs.insert(blob);
        }
        Site { peers, redundancy: text.parse().unwrap(), blobs }
    }

    fn connected(&self) -> Arc<ConnectedPeers> {
        let (all, stamp) = (members(&self.peers), CollectionNumber::FIRST);
        Arc::new(ConnectedPeers::new(all, Security::INSECURE, permit_all(), stamp))
    }

    fn members(&self) -> RepairMembers {
        RepairMembers::new(members(&self.peers).iter().map(RepairPeer::from))
    }

    /// Checks all blobs. Returns those that are not as they should be, and the silent peers.
    async fn check(&self) -> (BTreeMap<BlobId, CheckedBlob>, Vec<PeerId>) {
        let (sender, receiver) = mpsc::channel(self.blobs.len());
        for blob in &self.blobs {
            sender.try_send(Wanted::content(*blob, self.redundancy)).unwrap();
        }
        drop(sender);
        let (mut found, mut checked) = (BTreeMap::new(), 0);
        let mut each = |one: CheckedBlob| {
            checked += 1;
            assert_eq!(one.len, Some(LEN as u32), "{one:?}");
            assert_eq!(one.is_weak, !one.problems.is_empty(), "{one:?}");
            if one.is_weak {
                found.insert(one.found.wanted.blob, one);
            }
        };
        let limits = RepairLimits::default();
        let silent =
            check_fragments(self.connected(), self.members(), receiver, limits, &mut each).await;
        assert_eq!(checked, self.blobs.len());
        (found, silent.into_keys().collect())
    }

    /// Deletes what a peer has of a blob. Returns the index of the fragment.
    async fn delete(&self, peer: &Peer, blob: BlobId) -> u8 {
        let connected = self.connected();
        let held = connected.have(peer.id, &[blob]).await.unwrap()[0][0];
        let id = FragmentId { blob, encoding: held.encoding, index: held.index };
        assert!(connected.delete(peer.id, &[id], 0).await.unwrap() > 0);
        held.index
    }

    async fn repair(&self, found: &BTreeMap<BlobId, CheckedBlob>) -> u64 {
        let all: Vec<_> = found.values().map(|one| one.found.clone()).collect();
        let (connected, members) = (self.connected(), self.members());
        let limits = RepairLimits::default();
        let report = repair_found(connected, members, &all, limits, &|| true, &|_| ()).await;
        assert_eq!((report.left, report.blobs), (0, all.len() as u64), "{report:?}");
        report.rebuilt + report.moved
    }
}

#[tokio::test]
async fn a_missing_fragment_is_named_with_the_peer_that_should_have_it() {
    for text in ["rs=2+2", "replicas=4"] {
        let site = Site::new(text, 4, 30).await;
        assert!(site.check().await.0.is_empty());
        let some: Vec<BlobId> = site.blobs.iter().copied().step_by(7).collect();
        for (at, blob) in some.iter().enumerate() {
            let peer = &site.peers[at % 4];
            let index = site.delete(peer, *blob).await;
            let (found, silent) = site.check().await;
            assert_eq!((found.len(), silent.len()), (at + 1, 0), "{text}");
            let missing = FragmentProblem { peer: peer.id, index, state: FragmentState::Missing };
            assert_eq!(found[blob].problems, [missing], "{text}");
        }
        let (found, _) = site.check().await;
        assert_eq!(site.repair(&found).await, some.len() as u64);
        assert!(site.check().await.0.is_empty(), "{text}");
    }
}

#[tokio::test]
async fn a_forged_encoding_is_found_although_its_checksums_are_right() {
    let site = Site::new("rs=2+2", 4, 10).await;
    let blob = *site.blobs.first().unwrap();
    let forged = fragments(&blob, &[9; LEN], site.redundancy);
    let connection = Connection::open(&site.peers[1].address, &Security::INSECURE).await.unwrap();
    for fragment in &forged {
        connection.put(fragment.clone(), CollectionNumber::FIRST).await.unwrap();
    }
    let (found, _) = site.check().await;
    assert_eq!(found.len(), 1);
    let wrong = |index| {
        let (peer, state) = (site.peers[1].id, FragmentState::Wrong);
        FragmentProblem { peer, index, state }
    };
    assert_eq!(found[&blob].problems, [0, 1, 2, 3].map(wrong));
}

#[tokio::test]
async fn what_a_peer_that_is_down_has_is_not_missing() {
    let mut site = Site::new("rs=2+2", 5, 20).await;
    site.peers[2].stop().await;
    let (found, silent) = site.check().await;
    assert!(found.is_empty(), "{found:?}");
    assert_eq!(silent, [site.peers[2].id]);
}
