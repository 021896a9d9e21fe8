//! Placement, membership and repair under a random schedule, without a network or a clock.
//!
//! Peers join, go down and come back, are lost for good or return after all with what they had, are drained, and
//! fill up. Clients store blobs, some of them with no more fragments than are enough, some a second time in
//! another encoding. Repair looks at one blob after the other and does one half of a step at a time: reading is one
//! half, writing the other, and everything else happens in between. It dies at any of them.
//!
//! A blob that had its full redundancy once has at every moment as many fragments, each on a peer of its own, as it
//! has in full, less one for each of its holders that was lost since it was whole for the last time. So nothing
//! that repair does makes it weaker, not even for a moment, and as long as no more are lost than its
//! redundancy survives, it can be read. When everything has come to rest, all is at its place and nowhere else.

mod memory;
mod repairing;
mod world;

use seeded_rng::Rng;

use self::repairing::{Done, Repairing};
use self::world::World;
use super::members::PeerState;

/// Steps before everything comes to its end.
const STEPS: u64 = 2000;

/// A mistake that is made on purpose: the simulation has to find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plant {
    /// What is copied is dropped before the copy is durable.
    DropTooEarly,
    /// Fragments of two encodings are counted together.
    MixedEncodings,
    /// What is on a peer that is down is rebuilt.
    DownIsLost,
    /// A peer that has a fragment gets another.
    TwoOnOne,
    /// A fragment is dropped because one that is lost has it, too.
    LostIsUp,
}

/// How often each has happened.
#[derive(Debug, Default)]
struct Counts {
    joins: u64,
    flaps: u64,
    losses: u64,
    returns: u64,
    drains: u64,
    full: u64,
    puts: u64,
    reads: u64,
    rebuilt: u64,
    copied: u64,
    dropped: u64,
    deaths: u64,
}

fn run(seed: u64, plant: Option<Plant>) -> Counts {
    let mut world = World::new(Rng::new(seed));
    let mut repairing = Repairing::new(plant);
    for _ in 0..STEPS {
        match world.rng.below(100) {
            0..30 => world.event(),
            30 if world.rng.chance(50) => repairing.die(&mut world),
            _ => repairing.step(&mut world),
        }
    }
    repairing.die(&mut world);
    world.calm_down();
    repairing.come_to_rest(&mut world);
    world.check_places();
    // A peer that joins gets what the ranking gives it, and nothing else moves.
    let before = world.places();
    let were_enough = world.has_enough_peers();
    world.join();
    let expected = world.changed_places(&before);
    let Done { copied, rebuilt, dropped } = repairing.come_to_rest(&mut world);
    match were_enough {
        true => assert_eq!((copied, rebuilt, dropped), (expected, 0, expected), "after a join"),
        false => assert!(copied + rebuilt <= expected, "after a join"),
    }
    world.check_places();
    // Whoever is down, nothing moves.
    world.many_go_down();
    let Done { copied, rebuilt, dropped } = repairing.come_to_rest(&mut world);
    assert_eq!((copied, rebuilt, dropped), (0, 0, 0), "while some are down");
    world.all_come_back();
    // What one held that is lost is rebuilt, and nothing else moves.
    let before = world.places();
    if world.lose_one(PeerState::Up) {
        let expected = world.changed_places(&before);
        let Done { copied, rebuilt, .. } = repairing.come_to_rest(&mut world);
        assert_eq!(copied + rebuilt, expected, "after a loss");
        world.check_places();
    }
    world.counts
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Many schedules; `CAIRN_SEED` repeats one, `CAIRN_SOAK_SECONDS` goes on with others for that long.
#[test]
fn blobs_survive_and_come_to_rest_at_their_places() {
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
        all.reads += counts.reads;
        all.rebuilt += counts.rebuilt;
        all.copied += counts.copied;
        all.dropped += counts.dropped;
        all.deaths += counts.deaths;
        if first.is_some() {
            break;
        }
    }
    println!("{} steps in {:?}, no violation: {all:?}", seeds * STEPS, start.elapsed());
    if first.is_none() {
        let each =
            [all.joins, all.flaps, all.losses, all.returns, all.drains, all.full, all.deaths];
        assert!(each.into_iter().all(|count| count > seeds), "not enough happened");
        let work = [all.rebuilt, all.copied, all.dropped, all.puts, all.reads];
        assert!(work.into_iter().all(|count| count > 10 * seeds), "not enough was done");
    }
}

/// A checker that finds nothing proves nothing: each of these mistakes is found soon.
#[test]
fn planted_mistakes_are_found() {
    let plants = [
        Plant::DropTooEarly,
        Plant::MixedEncodings,
        Plant::DownIsLost,
        Plant::TwoOnOne,
        Plant::LostIsUp,
    ];
    for plant in plants {
        let found = |seed: &u64| std::panic::catch_unwind(|| run(*seed, Some(plant))).is_err();
        let seed = (0..20).find(found).unwrap_or_else(|| panic!("{plant:?} was not found"));
        println!("{plant:?} is found with CAIRN_SEED={seed}");
    }
}
