//! Prune beside those who begin to use a snapshot that it means to remove.

use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use seeded_rng::Rng;
use tempfile::TempDir;

use super::prune::{PruneOptions, PrunedSnapshot, prune};
use crate::geometry::{Geometry, MIN_CHUNK_SIZE};
use crate::id::MirrorId;
use crate::metadata::Metadata;
use crate::name::Scope;
use crate::repository::Repository;
use crate::retention::RetentionPolicy;
use crate::snapshot::{Consistency, MirrorOwner, Mode, NewSnapshot, Snapshot};
use crate::tree::Root;

struct Place {
    _dir: TempDir,
    url: String,
    repository: Repository,
}

impl Place {
    /// A repository with the snapshots vm1@1 to vm1@4, of which a policy keeps the last one.
    fn new() -> Place {
        let dir = TempDir::new().unwrap();
        let url = format!("dir:{}", dir.path().join("repository").display());
        let repository = Repository::open_or_create(&url).unwrap();
        let geometry = Geometry::new(1 << 20, MIN_CHUNK_SIZE).unwrap();
        repository.create_image(&"vm1".parse().unwrap(), geometry).unwrap();
        let place = Place { _dir: dir, url, repository };
        place.add_snapshots(3);
        let policy = RetentionPolicy { last: Some(1), ..RetentionPolicy::default() };
        place.repository.catalog().set_policy(&Scope::All, &policy).unwrap();
        place
    }

    fn find(&self, number: u64) -> Option<Snapshot> {
        self.repository.catalog().resolve(&format!("vm1@{number}").parse().unwrap()).ok()
    }

    fn snapshot(&self, number: u64) -> Snapshot {
        self.find(number).unwrap()
    }

    fn add_snapshots(&self, count: u64) {
        let newest = self.repository.catalog().resolve(&"vm1".parse().unwrap()).unwrap();
        let writer = self.repository.attach(&owner(1), &newest, Mode::ReadWrite).unwrap();
        for number in writer.reserve(count).unwrap() {
            let new = NewSnapshot {
                number,
                label: None,
                metadata: Metadata::default(),
                is_from_guest: false,
                size: newest.geometry.size(),
                consistency: Consistency::Crash,
                time: 1_700_000_000 + number,
                dirty_bytes: 0,
                pause_us: 0,
            };
            writer.begin(&new).unwrap().publish_tree(&Root::default(), 0, 0).unwrap();
        }
        writer.detach().unwrap();
    }

    /// Prunes. Calls `beside` after the decision and before the first removal. Returns what was done
    /// with each snapshot.
    fn prune(&self, beside: &mut (dyn FnMut() + Send)) -> Vec<PrunedSnapshot> {
        let beside = Mutex::new(Some(beside));
        let options = PruneOptions {
            should_continue: &|| {
                if let Some(beside) = beside.lock().unwrap().take() {
                    beside();
                }
                true
            },
            ..PruneOptions::default()
        };
        let mut all = Vec::new();
        prune(&self.repository, &Scope::All, &options, &mut |one| {
            all.push(one);
            Ok(())
        })
        .unwrap();
        all
    }

    /// The reason for which a prune has kept the snapshot.
    fn kept(&self, pruned: &[PrunedSnapshot], number: u64) -> String {
        let one = &pruned[number as usize - 1];
        assert!(!one.is_removed && self.find(number).is_some(), "{one:?}");
        one.reason.clone()
    }

    /// Waits for the end of a prune. Returns whether the snapshot exists then.
    fn wait_for(
        &self,
        pruning: thread::ScopedJoinHandle<'_, Vec<PrunedSnapshot>>,
        number: u64,
    ) -> bool {
        pruning.join().unwrap();
        self.find(number).is_some()
    }
}

fn owner(id: u8) -> MirrorOwner {
    MirrorOwner::this_process(MirrorId::from_bytes([id; 16]), "/m").unwrap()
}

#[test]
fn a_prune_leaves_what_is_read_while_it_is_read() {
    let place = Place::new();
    let early = place.repository.begin_reading(&place.snapshot(1), "export to a.raw").unwrap();
    let mut late = None;
    // By another process, between the decision and the removal.
    let other = Repository::open(&place.url).unwrap();
    let second = place.snapshot(2);
    let pruned = place.prune(&mut || {
        late = Some(other.begin_reading(&second, "export to b.raw").unwrap());
    });
    for (number, file) in [(1, "a.raw"), (2, "b.raw")] {
        let reason = place.kept(&pruned, number);
        assert!(reason.contains("in use: export to") && reason.contains(file), "{reason}");
    }
    assert!(place.find(3).is_none());
    drop((early, late));
    assert!(place.prune(&mut || ()).iter().filter(|one| one.is_removed).count() == 2);
}

#[test]
fn a_prune_leaves_the_parent_of_a_mirror_that_attaches_after_the_decision() {
    let place = Place::new();
    let other = Repository::open(&place.url).unwrap();
    let second = place.snapshot(2);
    let pruned = place.prune(&mut || {
        drop(other.attach(&owner(7), &second, Mode::ReadOnly).unwrap());
    });
    assert!(place.kept(&pruned, 2).contains("the parent of mirror"));
    assert!(place.find(1).is_none() && place.find(3).is_none());
    // The mirror is stopped, and still continues from the snapshot.
    place.prune(&mut || ());
    assert!(place.find(2).is_some());
}

/// Restarts from snapshots and reads of them race with prunes. Each use either begins, and then its
/// snapshot stays, or fails because the snapshot is gone.
#[test]
fn a_use_that_races_with_a_prune_begins_and_keeps_the_snapshot_or_fails() {
    let seed = std::env::var("CAIRN_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("CAIRN_SEED={seed}");
    let mut rng = Rng::new(seed);
    let place = Place::new();
    let mut outcomes = [0; 2];
    for round in 0..40_u8 {
        let newest = place.repository.catalog().resolve(&"vm1".parse().unwrap()).unwrap();
        let wanted = place.snapshot(newest.number);
        // The one that the race is about is not the last one any more.
        place.add_snapshots(1);
        let other = Repository::open(&place.url).unwrap();
        let pause = Duration::from_micros(rng.below(6000));
        let is_read = rng.chance(50);
        let begun = thread::scope(|scope| {
            let pruning = scope.spawn(|| place.prune(&mut || ()));
            thread::sleep(pause);
            let begun = match is_read {
                true => {
                    let reading = other.begin_reading(&wanted, "export");
                    let is_there = place.wait_for(pruning, wanted.number);
                    reading.map(|reading| (is_there, drop(reading)).0)
                }
                false => {
                    let attached = other.attach(&owner(100 + round), &wanted, Mode::ReadOnly);
                    let is_there = place.wait_for(pruning, wanted.number);
                    attached.map(|mirror| (is_there, mirror.detach().unwrap()).0)
                }
            };
            begun.ok()
        });
        match begun {
            Some(is_there) => assert!(is_there, "{} was removed in use", wanted.name()),
            None => assert!(place.find(wanted.number).is_none(), "{} exists", wanted.name()),
        }
        outcomes[usize::from(begun.is_some())] += 1;
    }
    eprintln!("{} refused, {} begun", outcomes[0], outcomes[1]);
}
