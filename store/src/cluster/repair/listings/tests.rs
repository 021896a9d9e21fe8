//! Tests of the merged lists, with peers that list what they should not.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use tokio::runtime::Builder;
use tokio::sync::{Mutex, mpsc};

use super::{ListCheck, Listings, MAX_FRAGMENTS, Page, page_entries, predecessor};
use crate::cluster::client::Cluster;
use crate::cluster::list_check::UNEVEN_FRAGMENTS;
use crate::cluster::protocol::{FragmentId, Held};
use crate::cluster::repair::job::SCAN_BATCH;
use crate::cluster::repair::permit_all;
use crate::cluster::repair::{
    ConnectedPeers, Peers, RepairLimits, RepairMembers, RepairPeer, Report, Wanted, repair,
};
use crate::cluster::tests::{Peer, content, members, policy, start};
use crate::collection::CollectionNumber;
use crate::encoding::fragment::{Fragment, Kind};
use crate::encoding::{Seal, SealKeys};
use crate::error::{ErrorKind, Result};
use crate::id::{BlobId, PeerId};
use crate::net::identity::Security;

const NO_BLOB: BlobId = BlobId::from_bytes([0; 32]);

fn name(number: u64) -> BlobId {
    let mut bytes = [0; 32];
    bytes[24..].copy_from_slice(&number.to_be_bytes());
    BlobId::from_bytes(bytes)
}

fn peer(number: u8) -> PeerId {
    PeerId::from_bytes([number; 16])
}

fn held(index: u8) -> Held {
    let encoding = BlobId::of(b"an encoding");
    let seal = Seal::NONE;
    Held { encoding, data: 2, parity: 2, index, kind: Kind::Content, len: 100, seal }
}

#[test]
fn pages_of_many_peers_are_small() {
    assert_eq!((page_entries(0), page_entries(12)), (4096, 4096));
    let all = 1000 * page_entries(1000);
    assert!(all >= 100_000 && 2 * all * super::ENTRY_BYTES <= super::PAGES_BYTES, "{all}");
    assert_eq!(page_entries(100_000), MAX_FRAGMENTS, "all fragments of a blob must fit");
}

#[test]
fn nothing_is_between_a_name_and_its_predecessor() {
    assert_eq!(predecessor(&NO_BLOB), NO_BLOB);
    assert_eq!(predecessor(&name(7)), name(6));
    assert_eq!(predecessor(&name(1)), NO_BLOB);
    let mut bytes = [0; 32];
    bytes[4] = 3;
    let before = predecessor(&BlobId::from_bytes(bytes));
    assert_eq!((before.as_bytes()[4], &before.as_bytes()[5..]), (2, &[255; 27][..]));
}

#[test]
fn a_list_that_no_honest_peer_sends_is_refused() {
    let accept = |pages: &[&[u64]]| {
        let mut check = ListCheck::new(name(10));
        pages.iter().try_for_each(|page| {
            let page: Vec<BlobId> = page.iter().map(|number| name(*number)).collect();
            assert!(check.accept(&peer(1), page.iter())?);
            Ok(())
        })
    };
    let is_refused = |pages: &[&[u64]]| {
        let refused: Result<()> = accept(pages);
        let error = refused.expect_err("the list is wrong");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains(&peer(1).to_string()), "{error}");
    };
    accept(&[&[11, 11, 11, 12], &[13, 20], &[21]]).unwrap();
    is_refused(&[&[10]]);
    is_refused(&[&[11, 13, 12]]);
    is_refused(&[&[11, 12, 11]]);
    is_refused(&[&[11, 12], &[12]]);
    is_refused(&[&[11, 12], &[11]]);
    accept(&[&[11; MAX_FRAGMENTS]]).unwrap();
    is_refused(&[&[11; MAX_FRAGMENTS + 1]]);
    // The list does not end, and does not advance.
    let mut check = ListCheck::new(NO_BLOB);
    let endless = (0..).map(|page: u64| {
        let page: Vec<BlobId> = (1..1001).map(|at| name(page * 1000 + at)).collect();
        check.accept(&peer(1), page.iter())
    });
    let accepted = endless.take_while(Result::is_ok).count() as u64;
    assert_eq!(accepted, UNEVEN_FRAGMENTS / 1000);
    // A list of hashes may be long.
    let mut hashes: Vec<BlobId> =
        (0..4 * UNEVEN_FRAGMENTS).map(|number| BlobId::of(&number.to_le_bytes())).collect();
    hashes.sort_unstable();
    let mut check = ListCheck::new(NO_BLOB);
    for page in hashes.chunks(4096) {
        assert!(check.accept(&peer(1), page.iter()).unwrap());
    }
    assert!(!check.accept(&peer(1), [].iter()).unwrap(), "an empty page is the end");
}

/// Peers that only list.
struct Lists {
    /// For each peer, its blobs and the number of their fragments, or an error at some page.
    peers: Vec<std::collections::BTreeMap<u64, u8>>,
    page: usize,
}

impl Peers for Lists {
    fn seals(&self) -> &SealKeys {
        &SealKeys::OFF
    }

    async fn have(&self, _: PeerId, _: &[BlobId]) -> Result<Vec<Vec<Held>>> {
        unreachable!("nobody asks")
    }

    async fn list(&self, peer: PeerId, after: BlobId, _: usize) -> Result<Page> {
        let own = &self.peers[usize::from(peer.as_bytes()[0])];
        let after = own.iter().filter(|(blob, _)| name(**blob) > after).take(self.page);
        let of_blob = |(blob, count): (&u64, &u8)| {
            let blob = name(*blob);
            (0..*count).map(move |index| (blob, held(index)))
        };
        Ok(after.flat_map(of_blob).collect())
    }

    async fn get(&self, _: PeerId, _: FragmentId) -> Result<Option<Fragment>> {
        unreachable!("nobody reads")
    }

    async fn put(&self, _: PeerId, _: Fragment) -> Result<()> {
        unreachable!("nobody writes")
    }

    async fn delete(&self, _: PeerId, _: &[FragmentId], _: u32) -> Result<u64> {
        unreachable!("nobody deletes")
    }
}

proptest! {
    #[test]
    fn merged_lists_have_all_holdings_of_each_wanted_blob(
        peers in vec(btree_map(0u64..60, 1u8..4, 0..40), 0..6),
        wanted in vec(0u64..60, 0..60),
        page in 1usize..10,
        after in 0u64..20,
    ) {
        let mut wanted = wanted;
        wanted.sort_unstable();
        wanted.retain(|blob| *blob > after);
        let expected = |blob: u64| {
            let mut all: Vec<(PeerId, u8)> = Vec::new();
            for (at, own) in peers.iter().enumerate() {
                let count = own.get(&blob).copied().unwrap_or(0);
                all.extend((0..count).map(|index| (peer(at as u8), index)));
            }
            all.sort_unstable_by_key(|(peer, index)| (*index, *peer));
            all
        };
        let ids: Vec<PeerId> = (0..peers.len()).map(|at| peer(at as u8)).collect();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let lists = Arc::new(Lists { peers: peers.clone(), page });
            let mut listings = Listings::new(lists, &ids, name(after));
            for blob in wanted {
                let found = listings.holdings(&name(blob)).await;
                let found: Vec<_> = found.iter().map(|one| (one.peer, one.index)).collect();
                prop_assert_eq!(found, expected(blob), "blob {}", blob);
            }
            prop_assert!(listings.take_failures().is_empty());
            Ok(())
        })?;
    }
}

/// How one of the peers lists.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Its pages are turned around.
    Backwards,
    /// It sends its first page for ever.
    Repeats,
    /// It invents one blob after the other.
    Endless,
    /// It lists each blob of the others as its own, too.
    Claims,
}

/// Real peers, one of which lists something else than it has.
struct Lying {
    peers: ConnectedPeers,
    liar: PeerId,
    lie: Lie,
    /// The blobs that are wanted, for a peer that claims to have them.
    all: Vec<BlobId>,
    pages: AtomicU64,
}

impl Peers for Lying {
    fn seals(&self) -> &SealKeys {
        self.peers.seals()
    }

    async fn have(&self, peer: PeerId, blobs: &[BlobId]) -> Result<Vec<Vec<Held>>> {
        self.peers.have(peer, blobs).await
    }

    async fn list(&self, peer: PeerId, after: BlobId, most: usize) -> Result<Page> {
        if peer != self.liar {
            return self.peers.list(peer, after, most).await;
        }
        self.pages.fetch_add(1, Ordering::Relaxed);
        Ok(match self.lie {
            Lie::Backwards => self.peers.list(peer, after, most).await?.into_iter().rev().collect(),
            Lie::Repeats => self.peers.list(peer, NO_BLOB, 10).await?,
            Lie::Endless => {
                let next = after.as_bytes().last_chunk().expect("an id has 32 bytes");
                let next = u64::from_be_bytes(*next);
                (1..=most as u64).map(|more| (name(next + more), held(0))).collect()
            }
            Lie::Claims => {
                let all = self.all.iter().filter(|blob| **blob > after).take(most);
                all.map(|blob| (*blob, held(0))).collect()
            }
        })
    }

    async fn get(&self, peer: PeerId, fragment: FragmentId) -> Result<Option<Fragment>> {
        self.peers.get(peer, fragment).await
    }

    async fn put(&self, peer: PeerId, fragment: Fragment) -> Result<()> {
        self.peers.put(peer, fragment).await
    }

    async fn delete(&self, peer: PeerId, fragments: &[FragmentId], idle: u32) -> Result<u64> {
        self.peers.delete(peer, fragments, idle).await
    }
}

/// Stores blobs on peers. Returns their names, sorted.
async fn store(peers: &[Peer], count: u64) -> Vec<BlobId> {
    let cluster = Cluster::new(members(peers), Security::INSECURE);
    let mut blobs = Vec::new();
    for number in 0..count {
        let (blob, content) = content(number, 1000);
        cluster.put(&blob, &content, &policy("replicas=3")).await.unwrap();
        blobs.push(blob);
    }
    blobs.sort_unstable();
    blobs
}

async fn repair_with<P: Peers>(peers: &Arc<P>, all: &[Peer], blobs: &[BlobId]) -> Report {
    let (sender, receiver) = mpsc::channel(blobs.len());
    let three = "replicas=3".parse().unwrap();
    blobs.iter().for_each(|blob| sender.try_send(Wanted::content(*blob, three)).unwrap());
    drop(sender);
    let nodes = RepairMembers::new(members(all).iter().map(RepairPeer::from));
    repair(peers.clone(), nodes, receiver, RepairLimits::default(), &|| true, &|_| ()).await
}

async fn fragments(peer: &Peer) -> u64 {
    let connection =
        crate::cluster::client::Connection::open(&peer.address, &Security::INSECURE).await;
    connection.unwrap().usage().await.unwrap().fragments
}

fn connected(all: &[Peer]) -> ConnectedPeers {
    ConnectedPeers::new(members(all), Security::INSECURE, permit_all(), CollectionNumber::FIRST)
}

#[tokio::test]
async fn a_peer_whose_list_is_refused_counts_as_down_and_is_named() {
    let peers = start(5).await;
    let blobs = store(&peers, 40).await;
    let (liar, on_liar) = (peers[1].id, fragments(&peers[1]).await);
    assert!(on_liar > 10, "{on_liar} of 40 blobs with three copies on five peers");
    for lie in [Lie::Backwards, Lie::Repeats, Lie::Endless] {
        let (all, pages) = (blobs.clone(), AtomicU64::new(0));
        let lying = Arc::new(Lying { peers: connected(&peers), liar, lie, all, pages });
        let report = repair_with(&lying, &peers, &blobs).await;
        let named = report.failures.iter().filter(|reason| reason.contains(&liar.to_string()));
        assert_eq!(named.count(), 1, "{lie:?}: {:?}", report.failures);
        let pages = lying.pages.load(Ordering::Relaxed);
        assert!(pages <= 3 + UNEVEN_FRAGMENTS / 4096, "{lie:?}: {pages} pages");
        // As of any peer that is down, its copies are awaited, and nothing moves. The first page of a
        // list that repeats itself is right.
        assert_eq!((report.waiting, report.bytes), (report.left, 0), "{lie:?}");
        let counted = if matches!(lie, Lie::Repeats) { on_liar } else { 0 };
        assert!((on_liar - counted..=on_liar).contains(&report.left), "{lie:?}: {report:?}");
    }
}

/// A group asks again before it acts.
#[tokio::test]
async fn a_peer_that_lists_what_it_does_not_have_makes_repair_delete_nothing() {
    let peers = start(5).await;
    let blobs = store(&peers, 40).await;
    let liar = peers[1].id;
    let (all, pages) = (blobs.clone(), AtomicU64::new(0));
    let lying = Lying { peers: connected(&peers), liar, lie: Lie::Claims, all, pages };
    let report = repair_with(&Arc::new(lying), &peers, &blobs).await;
    assert_eq!((report.left, report.dropped, report.bytes), (0, 0, 0), "{report:?}");
    let honest = repair_with(&Arc::new(connected(&peers)), &peers, &blobs).await;
    assert_eq!((honest.under, honest.survives), (0, Some(2)), "{honest:?}");
}

/// Real peers, one of which dies after it has sent some pages of its list.
struct Dying {
    peers: ConnectedPeers,
    dying: PeerId,
    peer: Mutex<Peer>,
    pages: AtomicU64,
}

impl Peers for Dying {
    fn seals(&self) -> &SealKeys {
        self.peers.seals()
    }

    async fn have(&self, peer: PeerId, blobs: &[BlobId]) -> Result<Vec<Vec<Held>>> {
        self.peers.have(peer, blobs).await
    }

    async fn list(&self, peer: PeerId, after: BlobId, _: usize) -> Result<Page> {
        if peer == self.dying && self.pages.fetch_add(1, Ordering::Relaxed) == 1 {
            self.peer.lock().await.stop().await;
        }
        self.peers.list(peer, after, MAX_FRAGMENTS).await
    }

    async fn get(&self, peer: PeerId, fragment: FragmentId) -> Result<Option<Fragment>> {
        self.peers.get(peer, fragment).await
    }

    async fn put(&self, peer: PeerId, fragment: Fragment) -> Result<()> {
        self.peers.put(peer, fragment).await
    }

    async fn delete(&self, peer: PeerId, fragments: &[FragmentId], idle: u32) -> Result<u64> {
        self.peers.delete(peer, fragments, idle).await
    }
}

#[tokio::test]
async fn a_peer_that_dies_in_the_middle_of_its_list_counts_as_down_from_there_on() {
    let mut peers = start(4).await;
    let blobs = store(&peers, 200).await;
    let on_dying = fragments(&peers[2]).await;
    assert!(on_dying > 2 * MAX_FRAGMENTS as u64, "{on_dying} of 200 blobs, each on three of four");
    // A group that asks would find the peer, so every blob is whole at first.
    let all = connected(&peers);
    let before = repair_with(&Arc::new(connected(&peers)), &peers, &blobs).await;
    assert_eq!((before.under, before.left), (0, 0), "{before:?}");
    let placeholder = Peer::start(None).await;
    let (dying, peer) = (peers[2].id, std::mem::replace(&mut peers[2], placeholder));
    let listed = members(&peers[..2]).into_iter().chain([peer.member(), peers[3].member()]);
    let nodes: Vec<RepairPeer> = listed.map(|member| RepairPeer::from(&member)).collect();
    let dying = Dying { peers: all, dying, peer: Mutex::new(peer), pages: AtomicU64::new(0) };
    let dying = Arc::new(dying);
    let (sender, receiver) = mpsc::channel(blobs.len());
    let three = "replicas=3".parse().unwrap();
    blobs.iter().for_each(|blob| sender.try_send(Wanted::content(*blob, three)).unwrap());
    drop(sender);
    let members = RepairMembers::new(nodes);
    let report = repair(dying, members, receiver, RepairLimits::default(), &|| true, &|_| ()).await;
    // What it listed before counts; what it would have listed is awaited.
    let late = on_dying - MAX_FRAGMENTS as u64;
    assert_eq!((report.blobs, report.bytes, report.dropped), (200, 0, 0), "{report:?}");
    // Nothing of it counts in the batch in which its death is noticed.
    let most = late + SCAN_BATCH as u64;
    assert!((late..=most).contains(&report.left), "{late} of {on_dying}: {report:?}");
    assert_eq!(report.waiting, report.left);
    assert!(report.is_settled());
}
