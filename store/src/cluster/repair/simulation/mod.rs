//! Simulation of placement, membership and repair under a random schedule, without a network or a
//! clock.
//!
//! **Events.** Peers join, go down and come back, are lost for good or return with what they had,
//! are drained, and fill up. Clients store blobs, some with no more fragments than are enough, some
//! a second time in another encoding. Somebody stores another content under the name of a blob, with
//! right checksums, completely or in part. Repair works on one blob after the other and does half a step
//! at a time: it reads in one half and writes in the other, and events happen in between. It is
//! killed between any two halves.
//!
//! **Invariant.** Consider a blob that once had its full redundancy. At every moment it has at
//! least its full number of fragments, each on a peer of its own, minus one for each holder that
//! was lost since the blob was last whole. So no action of repair makes a blob weaker, not even for
//! a moment, and the blob can be read as long as no more holders are lost than its redundancy
//! survives. When the events end, all fragments are at their places and nowhere else.

mod memory;
mod repairing;
mod world;

use seeded_rng::Rng;

use self::repairing::{Done, Repairing};
use self::world::World;
use super::members::PeerState;

/// The steps before the events end.
const STEPS: u64 = 2000;

/// A deliberate defect, which the simulation has to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlantedBug {
    /// The source of a copy is dropped before the copy is durable.
    DropTooEarly,
    /// Fragments of two encodings are counted together.
    MixedEncodings,
    /// The fragments of a peer that is down are rebuilt.
    DownIsLost,
    /// A peer that has a fragment gets another one.
    TwoOnOne,
    /// A fragment is dropped because a lost peer has it, too.
    LostIsUp,
    /// Fragments are dropped although nobody has decoded what is kept.
    DropWithoutDecode,
}

/// How often each event and each step happened.
#[derive(Debug, Default)]
struct Counts {
    joins: u64,
    flaps: u64,
    losses: u64,
    returns: u64,
    drains: u64,
    full: u64,
    puts: u64,
    forged: u64,
    rejected: u64,
    reads: u64,
    rebuilt: u64,
    copied: u64,
    dropped: u64,
    kills: u64,
}

fn run(seed: u64, defect: Option<PlantedBug>) -> Counts {
    let mut world = World::new(Rng::new(seed));
    let mut repairing = Repairing::new(defect);
    for _ in 0..STEPS {
        match world.rng.below(100) {
            0..30 => world.event(),
            30 if world.rng.chance(50) => repairing.kill(&mut world),
            _ => repairing.step(&mut world),
        }
    }
    repairing.kill(&mut world);
    world.end_events();
    repairing.run_to_completion(&mut world);
    world.check_places();
    // A peer that joins gets what the ranking gives it, and nothing else moves.
    let before = world.places();
    let were_enough = world.has_enough_peers();
    assert!(!were_enough || !world.has_forged(), "forged fragments are left");
    world.join();
    let expected = world.changed_places(&before);
    let was_clean = !world.has_forged();
    let Done { copied, rebuilt, dropped } = repairing.run_to_completion(&mut world);
    match were_enough {
        true => assert_eq!((copied, rebuilt, dropped), (expected, 0, expected), "after a join"),
        false => assert!(!was_clean || copied + rebuilt <= expected, "after a join"),
    }
    world.check_places();
    // Where there are not enough peers, forged fragments stay. What they do not disturb is checked
    // without them.
    if world.has_forged() {
        return world.counts;
    }
    // While peers are down, nothing moves.
    world.many_go_down();
    let Done { copied, rebuilt, dropped } = repairing.run_to_completion(&mut world);
    assert_eq!((copied, rebuilt, dropped), (0, 0, 0), "while peers are down");
    world.all_come_back();
    // What a lost peer held is rebuilt, and nothing else moves.
    let before = world.places();
    if world.lose_one(PeerState::Up) {
        let expected = world.changed_places(&before);
        let Done { copied, rebuilt, .. } = repairing.run_to_completion(&mut world);
        assert_eq!(copied + rebuilt, expected, "after a loss");
        world.check_places();
    }
    world.counts
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Runs many schedules. `CAIRN_SEED` repeats one; `CAIRN_SOAK_SECONDS` continues with others for
/// that long.
#[test]
fn blobs_survive_and_end_at_their_places() {
    let start = std::time::Instant::now();
    let soak = std::time::Duration::from_secs(number("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let first = number("CAIRN_SEED");
    let mut seeds = 0;
    let mut all = Counts::default();
    while seeds < 100 || start.elapsed() < soak {
        let seed = first.unwrap_or(seeds);
        println!("CAIRN_SEED={seed}");
        let counts = run(seed, None);
        seeds += 1;
        all.joins += counts.joins;
        all.flaps += counts.flaps;
        all.losses += counts.losses;
        all.returns += counts.returns;
        all.drains += counts.drains;
        all.full += counts.full;
        all.puts += counts.puts;
        all.forged += counts.forged;
        all.rejected += counts.rejected;
        all.reads += counts.reads;
        all.rebuilt += counts.rebuilt;
        all.copied += counts.copied;
        all.dropped += counts.dropped;
        all.kills += counts.kills;
        if first.is_some() {
            break;
        }
    }
    println!("{} steps in {:?}, no violation: {all:?}", seeds * STEPS, start.elapsed());
    if first.is_none() {
        let each = [all.joins, all.flaps, all.losses, all.returns, all.drains, all.full, all.kills];
        assert!(each.into_iter().all(|count| count > seeds), "too few events happened");
        assert!(all.forged > seeds && all.rejected > seeds, "too few encodings were forged");
        let work = [all.rebuilt, all.copied, all.dropped, all.puts, all.reads];
        assert!(work.into_iter().all(|count| count > 10 * seeds), "too few steps were carried out");
    }
}

/// A checker that finds nothing proves nothing, so each of these defects must be found within a few
/// seeds.
#[test]
fn deliberate_defects_are_found() {
    let defects = [
        PlantedBug::DropTooEarly,
        PlantedBug::MixedEncodings,
        PlantedBug::DownIsLost,
        PlantedBug::TwoOnOne,
        PlantedBug::LostIsUp,
        PlantedBug::DropWithoutDecode,
    ];
    for defect in defects {
        let found = |seed: &u64| std::panic::catch_unwind(|| run(*seed, Some(defect))).is_err();
        let seed = (0..20).find(found).unwrap_or_else(|| panic!("{defect:?} was not found"));
        println!("found {defect:?} with CAIRN_SEED={seed}");
    }
}
