//! Random lives of a repository against a model, in a directory and on peers that serve sockets.
//!
//! **Steps.** Imports, clones, checkpoints, attached and killed mirrors, labels, pins, policies and
//! prunes, removals, readers and verifications; collections with and without a grace period, dry ones,
//! and killed ones; a clock that jumps; a catalog that is restored from an older copy. In a directory,
//! a segment that cannot be read for a while, and a collector that is stopped while that happens. On
//! peers, a rebuilt catalog, drained peers, and peers that are down during a mark, are lost and return
//! with their old blobs or empty, or lose their tables. Many steps happen in the middle of others.
//!
//! **Invariant.** After each step, the catalog has exactly the snapshots of the model, with their labels
//! and pins. Each of them can be read, byte for byte, and so can what readers read. A dry run frees what
//! the collection after it frees. At the end, the repository holds exactly the blobs that its snapshots
//! refer to.
//!
//! `CAIRN_SEED` repeats a life, and `CAIRN_SOAK_SECONDS` lives further ones for that long.

mod events;
pub(super) mod place;
mod steps;

use std::time::{Duration, Instant};

use self::place::Place;
use self::steps::Life;
use super::tests::Site;
use crate::planted::{Defect, with_planted};

fn live(place: Place, seed: u64, steps: u64) {
    println!("CAIRN_SEED={seed}");
    let mut life = Life::new(place, seed);
    (0..steps).for_each(|_| life.step());
    life.end();
}

/// Lives at least `lives` lives.
fn live_many(place: impl Fn() -> Place, lives: u64, steps: u64) {
    let number = |name| std::env::var(name).ok().map(|text: String| text.parse().unwrap());
    if let Some(seed) = number("CAIRN_SEED") {
        return live(place(), seed, steps);
    }
    let soak = Duration::from_secs(number("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let (begin, mut seed) = (Instant::now(), 0);
    while seed < lives || begin.elapsed() < soak {
        live(place(), seed, steps);
        seed += 1;
    }
    println!("{seed} lives of {steps} steps in {:?}", begin.elapsed());
}

#[test]
fn a_random_life_in_a_directory_keeps_what_is_needed_and_leaves_nothing_else() {
    live_many(|| Place::Directory(Site::new()), 5, 100);
}

#[test]
fn a_random_life_on_peers_keeps_what_is_needed_and_leaves_nothing_else() {
    live_many(Place::peers, 2, 50);
}

/// A life that finds nothing proves nothing, so each of these defects must be found within a few seeds.
#[test]
fn planted_defects_are_found() {
    let directory = || Place::Directory(Site::new());
    let plants: [(Defect, fn() -> Place); 8] = [
        (Defect::NoCommitDocument, directory),
        (Defect::NoStamp, directory),
        (Defect::IgnoreOldestCommit, directory),
        (Defect::EarlierDeletion, directory),
        (Defect::SkipUnreadable, directory),
        (Defect::AcceptOlderCatalog, directory),
        (Defect::AcceptOlderCatalog, Place::peers),
        (Defect::SweepTombstones, Place::peers),
    ];
    for (defect, place) in plants {
        let begin = Instant::now();
        let found = |seed: &u64| with_planted(defect, || live(place(), *seed, 100));
        let seed = (0..20).find(found).unwrap_or_else(|| panic!("{defect:?} was not found"));
        println!("found {defect:?} with CAIRN_SEED={seed} in {:?}", begin.elapsed());
    }
}
