//! The merged lists against the questions that they replace, on random worlds.

use std::sync::{Arc, Mutex};

use seeded_rng::Rng;
use tokio::sync::Notify;

use super::world::World;
use super::{BLOBS, Memory, number};
use crate::cluster::repair::listings::Listings;
use crate::cluster::repair::members::{PeerState, RepairMembers};
use crate::cluster::repair::peers::Peers;
use crate::cluster::repair::plan::{Findings, Holding, Wanted, plan};
use crate::id::{BlobId, PeerId};

/// The fragments of a blob that the peers report when they are asked, sorted as repair sorts them.
async fn asked(memory: &Memory, peers: &[PeerId], blob: BlobId) -> Vec<Holding> {
    let mut all = Vec::new();
    for peer in peers {
        if let Ok(held) = memory.have(*peer, &[blob]).await {
            let seals = memory.seals();
            all.extend(held[0].iter().map(|held| Holding::new(*peer, &blob, held, seals)));
        }
    }
    all.sort_unstable_by_key(Holding::order);
    all
}

/// Compares both ways for each blob of a world, and the plans that follow. Returns the number of
/// holdings.
async fn compare(seed: u64) -> usize {
    let mut world = World::new(Rng::new(seed), None);
    if world.rng.chance(50) {
        world.scatter();
    }
    (0..world.rng.below(3 * BLOBS)).for_each(|_| world.event());
    let blobs: Vec<Wanted> =
        world.blobs.iter().map(|(blob, one)| Wanted::content(*blob, one.wanted)).collect();
    let nodes: Vec<_> = world.peers.values().map(|peer| peer.node.clone()).collect();
    let live = nodes.iter().filter(|node| node.state != PeerState::Lost);
    let live: Vec<PeerId> = live.map(|node| node.id).collect();
    let silent = live.iter().filter(|peer| !world.peers[*peer].answers).count();
    let members = RepairMembers::new(nodes);
    let memory = Arc::new(Memory { world: Mutex::new(world), killed_notice: Notify::new() });
    let mut listings = Listings::new(memory.clone(), &live, BlobId::from_bytes([0; 32]));
    let (mut holdings, none) = (0, Findings::default());
    for wanted in blobs {
        let listed = listings.holdings(&wanted.blob).await;
        let asked = asked(&memory, &live, wanted.blob).await;
        assert_eq!(listed, asked, "blob {}", wanted.blob);
        let plans = [listed, asked].map(|found| plan(&wanted, &members, &found, &none));
        assert_eq!(plans[0], plans[1], "blob {}", wanted.blob);
        // It may be wanted a second time, as a record or with another code.
        let again = listings.holdings(&wanted.blob).await;
        holdings += again.len();
    }
    assert_eq!(listings.take_failures().len(), silent, "peers that do not answer");
    holdings
}

#[test]
fn the_merged_lists_say_the_same_as_the_peers_do_about_each_blob() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut holdings = 0;
    for seed in number("CAIRN_SEED").map_or(0..300, |seed| seed..seed + 1) {
        println!("CAIRN_SEED={seed}");
        holdings += runtime.block_on(compare(seed));
    }
    println!("{holdings} holdings");
}
