//! The whole repair job on simulated peers in memory that fail in every way.
//!
//! Events happen between any two requests: peers go away and come back, are lost, fill up, their
//! blocks turn bad, an answer does not come, another content is stored under a blob's name. The
//! repair is killed at any request, and another one starts. While it runs, a blob is as strong as it
//! was, less one for each fragment that turned bad or was lost with its holder.

mod listing_tests;
mod world;

use std::sync::{Arc, Mutex, MutexGuard};

use seeded_rng::Rng;
use tokio::sync::{Notify, mpsc};

use self::world::{Defect, World};
use super::number;
use crate::cluster::protocol::{FragmentId, Held};
use crate::cluster::repair::members::{PeerState, RepairMembers, RepairPeer};
use crate::cluster::repair::peers::Peers;
use crate::cluster::repair::{RepairLimits, Report, Wanted, repair};
use crate::encoding::SealKeys;
use crate::encoding::fragment::Fragment;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, PeerId};

const BLOBS: u64 = 12;
/// The repairs that are run for one seed.
const REPAIRS: u64 = 20;

/// Peers in memory.
struct Memory {
    world: Mutex<World>,
    killed_notice: Notify,
}

fn failed(peer: PeerId, kind: ErrorKind) -> Error {
    Error::Peer { peer: peer.to_string(), kind, reason: "this failure is simulated".into() }
}

impl Memory {
    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Lets time pass before a request is answered. Fails if the peer does not answer.
    async fn before_answer(&self, peer: PeerId) -> Result<MutexGuard<'_, World>> {
        let steps = self.world().rng.below(4);
        for _ in 0..steps {
            tokio::task::yield_now().await;
        }
        if !self.survives_event() {
            self.killed_notice.notify_one();
            std::future::pending::<()>().await;
        }
        let mut world = self.world();
        let fails = world.left.is_some() && world.rng.chance(2);
        match world.peers.get(&peer) {
            Some(peer) if peer.answers && !fails => Ok(world),
            _ => Err(failed(peer, ErrorKind::Unavailable)),
        }
    }

    /// Lets an event happen. Returns whether the repair continues.
    fn survives_event(&self) -> bool {
        let mut world = self.world();
        world.requests += 1;
        let Some(left) = world.left else { return true };
        world.left = Some(left.saturating_sub(1));
        if world.rng.chance(8) {
            world.event();
            world.check();
        }
        left > 0
    }
}

/// A fragment as its holder reports it.
fn held(fragment: &Fragment) -> Held {
    let description = &fragment.description;
    let data = description.needed() as u8;
    Held {
        encoding: description.id(),
        data,
        parity: description.width() as u8 - data,
        index: fragment.index,
        kind: description.kind(),
        len: fragment.block.len() as u32,
        seal: description.seal,
    }
}

impl Peers for Memory {
    fn seals(&self) -> &SealKeys {
        &SealKeys::OFF
    }

    async fn have(&self, peer: PeerId, blobs: &[BlobId]) -> Result<Vec<Vec<Held>>> {
        let world = self.before_answer(peer).await?;
        let fragments = &world.peers[&peer].fragments;
        let of_blob = |blob: &BlobId| {
            let own = fragments.iter().filter(|(key, _)| key.0 == *blob);
            own.map(|(_, fragment)| held(fragment)).collect()
        };
        Ok(blobs.iter().map(of_blob).collect())
    }

    /// The pages have one blob or a few, so that events happen between them.
    async fn list(&self, peer: PeerId, after: BlobId, _: usize) -> Result<Vec<(BlobId, Held)>> {
        let mut world = self.before_answer(peer).await?;
        let most = 1 + world.rng.below(12) as usize;
        let mut page: Vec<(BlobId, Held)> = Vec::new();
        for ((blob, ..), fragment) in &world.peers[&peer].fragments {
            let is_last = |(last, _): &(BlobId, Held)| last == blob;
            if *blob > after && (page.len() < most || page.last().is_some_and(is_last)) {
                page.push((*blob, held(fragment)));
            }
        }
        Ok(page)
    }

    async fn get(&self, peer: PeerId, id: FragmentId) -> Result<Option<Fragment>> {
        let world = self.before_answer(peer).await?;
        let own = &world.peers[&peer];
        let key = (id.blob, id.encoding, id.index);
        let Some(found) = own.fragments.get(&key) else { return Ok(None) };
        let lies = world.defect == Some(Defect::LosesPutsAndLies);
        // A peer leaves out bad fragments with even indices, and sends the others as zeros.
        Ok(match own.bad.contains(&key) && !lies {
            false => Some(found.clone()),
            true if id.index.is_multiple_of(2) => None,
            true => Some(Fragment { block: vec![0; found.block.len()].into(), ..found.clone() }),
        })
    }

    async fn put(&self, peer: PeerId, fragment: Fragment) -> Result<()> {
        let mut world = self.before_answer(peer).await?;
        if !fragment.is_of(&fragment.description.blob) {
            world.violation = Some("repair stored a fragment that it had not verified".into());
        }
        let key = (fragment.description.blob, fragment.description.id(), fragment.index);
        let is_bad = world.defect.is_some() && world.rng.chance(20);
        let own = world.peers.get_mut(&peer).unwrap();
        if own.node.full {
            let reason = "this is simulated".into();
            return Err(Error::PeerRefusedFull { peer: peer.to_string(), reason });
        }
        own.bad.remove(&key);
        own.fragments.insert(key, fragment);
        if is_bad {
            own.bad.insert(key);
        }
        world.check();
        Ok(())
    }

    async fn delete(&self, peer: PeerId, fragments: &[FragmentId], _idle: u32) -> Result<u64> {
        let mut world = self.before_answer(peer).await?;
        let own = world.peers.get_mut(&peer).unwrap();
        for FragmentId { blob, encoding, index } in fragments {
            let key = (*blob, *encoding, *index);
            own.fragments.remove(&key);
            own.bad.remove(&key);
        }
        world.check();
        Ok(1)
    }
}

/// Runs a repair until it is complete; `None` if it was killed.
async fn run_once(memory: &Arc<Memory>) -> Option<Report> {
    let (sender, blobs) = mpsc::channel(BLOBS as usize);
    let members = {
        let mut world = memory.world();
        world.reset_losses();
        let blobs = world.blobs.iter();
        blobs.for_each(|(id, one)| sender.try_send(Wanted::content(*id, one.wanted)).unwrap());
        // The catalog may or may not know which peers are down.
        let knows = world.rng.chance(50);
        RepairMembers::new(world.peers.values().map(|peer| match peer.node.state {
            PeerState::Up if knows && !peer.answers => {
                RepairPeer { state: PeerState::Down, ..peer.node.clone() }
            }
            _ => RepairPeer { full: false, ..peer.node.clone() },
        }))
    };
    drop(sender);
    tokio::select! {
        report = repair(memory.clone(), members, blobs, RepairLimits::default(), &|| true, &|_| ()) => {
            Some(report)
        }
        () = memory.killed_notice.notified() => None,
    }
}

/// Lets the tasks of a killed repair end, as the tasks of a process end with it.
async fn end_tasks(memory: &Memory) {
    memory.world().left = Some(0);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    // Several tasks may have reported the same kill.
    tokio::select! {
        biased;
        () = memory.killed_notice.notified() => {}
        () = std::future::ready(()) => {}
    }
}

async fn run(seed: u64, defect: Option<Defect>) -> (Report, u64, u64) {
    let world = World::new(Rng::new(seed), defect);
    let memory = Arc::new(Memory { world: Mutex::new(world), killed_notice: Notify::new() });
    let (mut all, mut kills) = (Report::default(), 0);
    for _ in 0..REPAIRS {
        {
            let mut world = memory.world();
            world.left = Some(20 + world.rng.below(200));
            world.most_come_back();
            world.reset_losses();
            (0..world.rng.below(8)).for_each(|_| world.event());
        }
        let report = run_once(&memory).await;
        assert_eq!(memory.world().violation, None);
        match report {
            Some(report) => {
                assert_eq!(report.blobs, BLOBS);
                all.add(report);
            }
            None => {
                kills += 1;
                end_tasks(&memory).await;
            }
        }
    }
    memory.world().end_events();
    let report = run_once(&memory).await.expect("no failure happens any more");
    assert_eq!(memory.world().violation, None);
    assert!(!report.is_incomplete(), "{report:?}");
    memory.world().check_places();
    let again = run_once(&memory).await.expect("no failure happens any more");
    assert_eq!((again.bytes, again.dropped, again.under), (0, 0, 0), "{again:?}");
    all.add(report);
    let requests = memory.world().requests;
    (all, kills, requests)
}

fn run_alone(seed: u64, defect: Option<Defect>) -> (Report, u64, u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(run(seed, defect))
}

/// Runs many schedules. `CAIRN_SEED` repeats one; `CAIRN_SOAK_SECONDS` continues with others for
/// that long.
#[test]
fn a_whole_repair_weakens_no_blob_and_completes() {
    let start = std::time::Instant::now();
    let soak = std::time::Duration::from_secs(number("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let first = number("CAIRN_SEED");
    let (mut seeds, mut kills, mut requests) = (0, 0, 0);
    let mut all = Report::default();
    while seeds < 30 || start.elapsed() < soak {
        let seed = first.unwrap_or(seeds);
        println!("CAIRN_SEED={seed}");
        let (report, killed, asked) = run_alone(seed, None);
        all.add(report);
        (seeds, kills, requests) = (seeds + 1, kills + killed, requests + asked);
        if first.is_some() {
            break;
        }
    }
    let Report { rebuilt, moved, dropped, damaged, ref wrong, .. } = all;
    let wrong = wrong.len() as u64;
    println!(
        "{requests} requests in {:?}, {kills} kills, {rebuilt} rebuilt, {moved} moved, {dropped} \
         dropped, {damaged} damaged, {wrong} forged, no violation",
        start.elapsed()
    );
    if first.is_none() {
        let all = [rebuilt, moved, dropped, damaged, wrong, kills];
        assert!(all.iter().all(|count| *count > seeds));
    }
}

/// Every distribution of good and forged fragments over the peers, as long as the good ones give
/// the blob: one repair without failures ends with the good ones at their places, and with nothing
/// else.
#[test]
fn a_repair_completes_the_good_encoding_whatever_forged_ones_there_are() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut rejected = 0;
    for seed in number("CAIRN_SEED").map_or(0..200, |seed| seed..seed + 1) {
        println!("CAIRN_SEED={seed}");
        let mut world = World::new(Rng::new(seed), None);
        world.scatter();
        (0..world.rng.below(3 * BLOBS)).for_each(|_| world.forge());
        let memory = Arc::new(Memory { world: Mutex::new(world), killed_notice: Notify::new() });
        let report = runtime.block_on(run_once(&memory)).expect("nothing fails");
        assert!(!report.is_incomplete(), "{report:?}");
        memory.world().check_places();
        rejected += report.wrong.len();
    }
    println!("{rejected} forged fragments");
}

/// Repair reads what it has stored before it deletes anything.
#[test]
fn a_peer_that_claims_to_have_stored_what_it_has_not_weakens_no_blob() {
    for seed in 0..10 {
        println!("CAIRN_SEED={seed}");
        run_alone(seed, Some(Defect::LosesPuts));
    }
}

/// A checker that finds nothing proves nothing.
#[test]
fn peers_that_lie_whenever_they_are_asked_are_found() {
    let defect = Some(Defect::LosesPutsAndLies);
    let found = |seed: &u64| std::panic::catch_unwind(|| run_alone(*seed, defect)).is_err();
    let seed = (0..20).find(found).expect("the defect was not found");
    println!("found the defect with CAIRN_SEED={seed}");
}
