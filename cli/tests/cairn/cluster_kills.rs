//! No stable snapshot is lost while clients commit, read and export, and peers and the catalog are
//! killed at any moment. Peers return with their disks or with empty ones.
//!
//! At any time, at most as many peers are down as the redundancy allows. A peer that returns with
//! an empty disk counts as lost until a repair has ended; no other peer is killed until then. At
//! the end as many peers are killed as the redundancy allows, and every snapshot that was ever
//! stable is read.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cairn_store::encoding::{Redundancy, StoragePolicy};
use cairn_store::maintenance;
use cairn_store::net::identity::Security;
use cairn_store::{
    Attachment, ChunkId, ChunkIndex, Consistency, Error, ErrorKind, Geometry, MIN_CHUNK_SIZE,
    MirrorId, MirrorOwner, Mode, NewBlob, NewSnapshot, Repository, Result, Snapshot, SnapshotState,
};

use crate::lab::{Dice, Lab, Operator, TIMEOUT, random, wait_for_repair, with_seeds};

const CHUNK: usize = MIN_CHUNK_SIZE as usize;
const CHUNKS: u64 = 300;
const WRITERS: u8 = 3;

/// The steps that a client may take while the test waits for a repair. Clients that never pause
/// would take the processor from the repair, and each of their snapshots would have to be verified.
const STEPS_BESIDE_REPAIR: u32 = 8;

/// A cluster, and the faults that the test injects into it.
#[derive(Clone, Copy)]
struct FaultTest {
    redundancy: Redundancy,
    peers: usize,
    /// How many peers may be down at a time.
    losses: usize,
    time: Duration,
}

/// The seeds of a disk's chunks.
type Disk = BTreeMap<u64, u64>;

/// The state that all clients share.
struct World {
    operator: Operator,
    url: String,
    /// The address of the catalog, as error messages name it.
    catalog: String,
    policy: StoragePolicy,
    stable: Mutex<Vec<(Snapshot, Disk)>>,
    imported: Mutex<Vec<(String, u64)>>,
    stop: AtomicBool,
    /// The number of times that the test has begun or ended to wait for a repair. It waits while
    /// this is odd.
    repair: AtomicU64,
    retries: AtomicU64,
    reads: AtomicU64,
}

impl World {
    fn connect(&self) -> Repository {
        // The catalog may be down.
        retry(|| Repository::connect(&self.url, &Security::INSECURE)).with_policy(self.policy)
    }

    fn is_running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// A random snapshot that must be readable.
    fn any_stable(&self, dice: &mut Dice) -> Option<(Snapshot, Disk)> {
        let all = self.stable.lock().unwrap();
        (!all.is_empty()).then(|| all[dice.below(all.len() as u64) as usize].clone())
    }
}

/// The steps that a client takes: without a limit, but only some beside each repair.
struct Steps<'a> {
    world: &'a World,
    /// The value of [`World::repair`] at the last step, and the steps since it changed.
    repair: u64,
    taken: u32,
}

impl<'a> Steps<'a> {
    fn new(world: &'a World) -> Steps<'a> {
        Steps { world, repair: 0, taken: 0 }
    }

    /// Waits until the client may take another step. Returns `false` if the client has to stop.
    fn next(&mut self) -> bool {
        while self.world.is_running() {
            let repair = self.world.repair.load(Ordering::Relaxed);
            if repair != self.repair {
                (self.repair, self.taken) = (repair, 0);
            }
            if repair.is_multiple_of(2) || self.taken < STEPS_BESIDE_REPAIR {
                self.taken += 1;
                return true;
            }
            thread::sleep(Duration::from_millis(20));
        }
        false
    }
}

/// Retries an operation while it fails with `Unavailable`, which may last until a repair has ended.
/// Any other error fails the test.
fn retry<T>(operation: impl Fn() -> Result<T>) -> T {
    let begin = Instant::now();
    loop {
        match operation() {
            Ok(done) => return done,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
                assert!(begin.elapsed() < 3 * TIMEOUT, "{error}");
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn content(seed: u64) -> Vec<u8> {
    random(seed, CHUNK)
}

/// A client that takes checkpoints of its own image, as a backend does.
struct Writer<'a> {
    world: &'a World,
    me: u8,
    dice: Dice,
    repository: Repository,
    attachment: Attachment,
    first: Snapshot,
    disk: Disk,
}

impl<'a> Writer<'a> {
    fn new(world: &'a World, me: u8, seed: u64) -> Writer<'a> {
        let repository = world.connect();
        let geometry = Geometry::new(CHUNKS * CHUNK as u64, MIN_CHUNK_SIZE).unwrap();
        let name = format!("vm{me}").parse().unwrap();
        let first = repository.create_image(&name, geometry).unwrap();
        let attachment = attach(&repository, me, &first).unwrap();
        let dice = Dice::new(seed + u64::from(me));
        Writer { world, me, dice, repository, attachment, first, disk: Disk::new() }
    }

    fn run(mut self) {
        let mut steps = Steps::new(self.world);
        while steps.next() {
            if self.dice.below(4) == 0 {
                // A new client without any cached state.
                self.repository = self.world.connect();
                self.attachment = retry(|| attach(&self.repository, self.me, &self.first));
            }
            self.commit();
        }
    }

    /// Takes one checkpoint. Retries until it is published or given up.
    fn commit(&mut self) {
        let mut disk = self.disk.clone();
        let mut changes = BTreeMap::new();
        for _ in 0..=self.dice.below(8) {
            let (at, seed) = (self.dice.below(CHUNKS), self.dice.below(u64::MAX));
            let seed = if self.dice.below(8) == 0 { at } else { seed };
            disk.insert(at, seed);
            changes.insert(at, seed);
        }
        let number = retry(|| self.attachment.reserve(1)).start;
        let begin = Instant::now();
        loop {
            let error = match self.publish(number, &changes) {
                Ok(snapshot) => return self.record(snapshot, disk),
                Err(error) => error,
            };
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(begin.elapsed() < TIMEOUT * 2, "vm{} cannot commit: {error}", self.me);
            self.world.retries.fetch_add(1, Ordering::Relaxed);
            if self.dice.below(6) == 0 {
                match self.give_up(number) {
                    None => return,
                    // It was published, and only the answer was lost.
                    Some(snapshot) => {
                        self.attachment = retry(|| attach(&self.repository, self.me, &self.first));
                        return self.record(snapshot, disk);
                    }
                }
            }
            thread::sleep(Duration::from_millis(200));
        }
    }

    fn publish(&self, number: u64, changes: &Disk) -> Result<Snapshot> {
        self.attachment.renew()?;
        let commit = match self.attachment.begin(&new_snapshot(number, &self.attachment)) {
            Ok(commit) => commit,
            // It was published before, and only the answer was lost.
            Err(Error::WrongState { state: "stable" | "available", .. }) => {
                self.attachment.announced(number)
            }
            Err(error) => return Err(error),
        };
        let chunks: Vec<_> = changes.values().map(|seed| content(*seed)).collect();
        let chunks: Vec<_> = chunks.iter().map(|one| NewBlob::new(one)).collect();
        let stored = self.repository.put_chunks(&chunks)?;
        let tree = changes.keys().zip(&chunks);
        let tree: BTreeMap<_, _> =
            tree.map(|(at, one)| (ChunkIndex(*at), Some(one.chunk_id()))).collect();
        commit.publish(&tree, stored, &|at, buf| {
            buf.copy_from_slice(&content(changes[&at.0]));
            true
        })
    }

    /// Marks a checkpoint as failed. Returns the snapshot if it was published after all.
    fn give_up(&self, number: u64) -> Option<Snapshot> {
        let is_published = || match self.attachment.fail(number, "too many peers are down") {
            Err(Error::WrongState { state: "stable" | "available", .. }) => Ok(true),
            Err(Error::NoSnapshot { .. }) => Ok(false),
            other => other.map(|()| false),
        };
        retry(is_published).then(|| {
            let all = retry(|| self.repository.catalog().snapshots(&self.first.image));
            all.into_iter().find(|one| one.number == number).unwrap()
        })
    }

    /// Remembers a published snapshot.
    fn record(&mut self, snapshot: Snapshot, disk: Disk) {
        assert_eq!(snapshot.state, SnapshotState::Stable);
        self.disk = disk.clone();
        self.world.stable.lock().unwrap().push((snapshot, disk));
    }
}

fn attach(repository: &Repository, me: u8, first: &Snapshot) -> Result<Attachment> {
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([me; 16]), format!("/mirrors/{me}"));
    repository.attach(&owner?, first, Mode::ReadWrite)
}

fn new_snapshot(number: u64, attachment: &Attachment) -> NewSnapshot {
    NewSnapshot {
        number,
        label: None,
        metadata: cairn_store::Metadata::default(),
        is_from_guest: false,
        size: attachment.geometry().size(),
        consistency: Consistency::Crash,
        time: 0,
        dirty_bytes: 0,
        pause_us: 0,
    }
}

/// Imports disks with the program, one after the other.
fn import(world: &World, seed: u64) {
    let redundancy = world.policy.redundancy.to_string();
    let mut steps = Steps::new(world);
    for n in (0..).take_while(|_| steps.next()) {
        let (name, seed) = (format!("imported{n}"), seed + n);
        std::fs::write(world.operator.directory.join("in.raw"), imported(seed)).unwrap();
        let begin = Instant::now();
        loop {
            if !world.is_running() && begin.elapsed() > TIMEOUT {
                panic!("{name} cannot be imported");
            }
            let run = world.operator.run(&["import", "in.raw", &name, "--redundancy", &redundancy]);
            match run.code {
                0 => break,
                6 => world.retries.fetch_add(1, Ordering::Relaxed),
                // An earlier attempt succeeded, and only its answer was lost.
                4 if run.stderr.contains("exists already") => break,
                _ => panic!("{}", run.stderr),
            };
        }
        world.imported.lock().unwrap().push((name, seed));
    }
}

fn imported(seed: u64) -> Vec<u8> {
    random(seed, (1 << 20) + 4096)
}

/// Reads stable snapshots. This must never fail.
fn read(world: &World, mut dice: Dice) {
    let mut repository = world.connect();
    let mut steps = Steps::new(world);
    while steps.next() {
        if let Some((snapshot, disk)) = world.any_stable(&mut dice) {
            assert_holds(&repository, &snapshot, &disk);
            world.reads.fetch_add(1, Ordering::Relaxed);
        }
        if dice.below(20) == 0 {
            repository = world.connect();
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn assert_holds(repository: &Repository, snapshot: &Snapshot, disk: &Disk) {
    assert_holds_except(repository, snapshot, disk, &mut HashMap::new());
}

/// Checks the content of a snapshot. Does not read chunks in `known` again, and adds those that it
/// reads.
fn assert_holds_except(
    repository: &Repository,
    snapshot: &Snapshot,
    disk: &Disk,
    known: &mut HashMap<ChunkId, u64>,
) {
    let mut found = Vec::new();
    let mut buf = vec![0; CHUNK];
    for chunk in repository.chunks(&snapshot.root, snapshot.geometry) {
        let (at, id) = chunk.unwrap_or_else(|error| panic!("{}: {error}", snapshot.name()));
        let seed = disk.get(&at.0).copied().unwrap_or_default();
        found.push(at.0);
        if known.get(&id) == Some(&seed) {
            continue;
        }
        let result = repository.read_chunk(&id, &mut buf);
        result.unwrap_or_else(|error| panic!("chunk {} of {}: {error}", at.0, snapshot.name()));
        assert!(
            buf == content(seed),
            "chunk {} of {} has the wrong content",
            at.0,
            snapshot.name()
        );
        known.insert(id, seed);
    }
    assert!(found.iter().eq(disk.keys()), "{} has other chunks", snapshot.name());
}

/// The content of the whole disk.
fn whole(disk: &Disk) -> Vec<u8> {
    let mut all = vec![0; CHUNKS as usize * CHUNK];
    for (at, seed) in disk {
        all[*at as usize * CHUNK..][..CHUNK].copy_from_slice(&content(*seed));
    }
    all
}

/// Exports stable snapshots with the program. This may fail only if the catalog is down.
fn export(world: &World, mut dice: Dice) {
    let mut steps = Steps::new(world);
    while steps.next() {
        let Some((snapshot, disk)) = world.any_stable(&mut dice) else { continue };
        let run =
            world.operator.run(&["export", &snapshot.name().to_string(), "out.raw", "--force"]);
        match run.code {
            0 => assert_file(&world.operator.directory.join("out.raw"), &whole(&disk), &snapshot),
            _ => {
                assert_eq!(run.code, 6, "{}", run.stderr);
                assert!(
                    run.stderr.contains(&world.catalog),
                    "the error does not name the catalog: {}",
                    run.stderr
                );
            }
        }
    }
}

fn assert_file(path: &Path, expected: &[u8], snapshot: &Snapshot) {
    assert!(std::fs::read(path).unwrap() == expected, "{} has the wrong content", snapshot.name());
}

impl FaultTest {
    fn run(self, seed: u64) {
        let mut lab = Lab::new(self.peers);
        let world = World {
            operator: lab.operator(),
            url: lab.url(),
            catalog: lab.address().to_owned(),
            policy: self.redundancy.into(),
            stable: Mutex::default(),
            imported: Mutex::default(),
            stop: AtomicBool::new(false),
            repair: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            reads: AtomicU64::new(0),
        };
        let world = &world;
        let writers: Vec<_> = (0..WRITERS).map(|me| Writer::new(world, me, seed)).collect();
        thread::scope(|scope| {
            for writer in writers {
                scope.spawn(move || stop_on_panic(world, || writer.run()));
            }
            scope.spawn(|| stop_on_panic(world, || import(world, seed)));
            scope.spawn(|| stop_on_panic(world, || read(world, Dice::new(seed + 100))));
            scope.spawn(|| stop_on_panic(world, || export(world, Dice::new(seed + 101))));
            stop_on_panic(world, || self.inject_faults(&mut lab, world, Dice::new(seed + 102)));
            world.stop.store(true, Ordering::Relaxed);
        });
        self.verify(&mut lab, world, Dice::new(seed + 103));
    }

    /// Kills and restarts peers and the catalog.
    fn inject_faults(self, lab: &mut Lab, world: &World, mut dice: Dice) {
        let begin = Instant::now();
        let (mut kills, mut wipes, mut catalogs) = (0, 0, 0);
        while begin.elapsed() < self.time && world.is_running() {
            let (up, down): (Vec<_>, Vec<_>) =
                (0..self.peers).partition(|at| lab.peers[*at].is_some());
            match (dice.below(11), dice.choose(&up), dice.choose(&down)) {
                (0..5, Some(one), _) if down.len() < self.losses => {
                    lab.kill(one);
                    kills += 1;
                }
                (5..9, _, Some(one)) => lab.start_peer(one, &[]),
                (9, ..) => {
                    drop(lab.catalog.take());
                    thread::sleep(Duration::from_millis(dice.below(1500)));
                    lab.start_catalog();
                    catalogs += 1;
                }
                (10, _, Some(one)) if wipes < 1 + begin.elapsed().as_secs() / 10 => {
                    self.replace(lab, world, one, &down);
                    wipes += 1;
                }
                _ => {}
            }
            thread::sleep(Duration::from_millis(dice.below(300)));
        }
        // At least one peer returns with an empty disk, whatever the random choices were.
        if wipes == 0 && world.is_running() {
            let down: Vec<_> = (0..self.peers).filter(|at| lab.peers[*at].is_none()).collect();
            let one = down.first().copied().unwrap_or(0);
            lab.kill(one);
            self.replace(lab, world, one, &down);
            wipes += 1;
        }
        start_all(lab);
        let (reads, retries) = (&world.reads, &world.retries);
        println!(
            "{}: {kills} kills of peers, {catalogs} of the catalog, {wipes} empty disks; {} snapshots, {} imports, \
             {reads:?} reads, {retries:?} retries",
            self.redundancy,
            world.stable.lock().unwrap().len(),
            world.imported.lock().unwrap().len(),
        );
    }

    /// Starts a peer with an empty disk, starts all others, and waits until the lost fragments are
    /// rebuilt.
    fn replace(self, lab: &mut Lab, world: &World, one: usize, down: &[usize]) {
        let id = std::fs::read_to_string(lab.data(one).join("peer.json")).unwrap();
        let id: serde_json::Value = serde_json::from_str(&id).unwrap();
        lab.wipe(one);
        for at in down.iter().filter(|at| **at != one) {
            lab.start_peer(*at, &[]);
        }
        lab.start_peer(one, &[]);
        lab.ok(&["peers", "lose", id["id"].as_str().unwrap()]);
        lab.wait_for_peers(self.peers);
        world.repair.fetch_add(1, Ordering::Relaxed);
        wait_for_repair("the lost fragments are rebuilt", || lab.is_repaired());
        world.repair.fetch_add(1, Ordering::Relaxed);
    }

    /// Reads every stable snapshot while as many peers are down as the redundancy allows.
    fn verify(self, lab: &mut Lab, world: &World, mut dice: Dice) {
        lab.wait_for_peers(self.peers);
        let repository = world.connect();
        wait_for_repair("all snapshots are stable", || {
            !maintenance::has_available(&repository).unwrap()
        });
        let stable = world.stable.lock().unwrap();
        assert!(stable.len() > 5, "{} snapshots", stable.len());
        for _ in 0..2 {
            for _ in 0..self.losses {
                let up: Vec<_> = (0..self.peers).filter(|at| lab.peers[*at].is_some()).collect();
                lab.kill(dice.choose(&up).unwrap());
            }
            let repository = world.connect();
            let mut known = HashMap::new();
            for (snapshot, disk) in &*stable {
                assert_holds_except(&repository, snapshot, disk, &mut known);
            }
            for (name, seed) in &*world.imported.lock().unwrap() {
                lab.assert_exports(name, &imported(*seed));
            }
            for me in 0..WRITERS {
                let of_it =
                    |(one, _): &&(Snapshot, Disk)| one.image.to_string() == format!("vm{me}");
                if let Some((last, disk)) = stable.iter().rfind(of_it) {
                    lab.assert_exports(&last.name().to_string(), &whole(disk));
                }
            }
            start_all(lab);
            lab.wait_for_peers(self.peers);
        }
        // No other snapshot has content.
        let repository = world.connect();
        for image in repository.catalog().images().unwrap() {
            for one in repository.catalog().snapshots(&image.name).unwrap() {
                let known = one.number == 1 || stable.iter().any(|(other, _)| *other == one);
                assert!(known || !one.state.has_content(), "{} was never published", one.name());
            }
        }
    }
}

fn start_all(lab: &mut Lab) {
    for at in 0..lab.peers.len() {
        if lab.peers[at].is_none() {
            lab.start_peer(at, &[]);
        }
    }
}

/// Runs a part of the test. If it panics, the other parts stop, so that the test fails with its
/// panic.
fn stop_on_panic(world: &World, part: impl FnOnce()) {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            if thread::panicking() {
                self.0.store(true, Ordering::Relaxed);
            }
        }
    }
    let _stop = Stop(&world.stop);
    part();
}

#[test]
fn no_stable_snapshot_is_lost_while_four_of_twelve_peers_die_at_any_moment() {
    let redundancy = Redundancy::ReedSolomon { data: 4, parity: 4 };
    let time = Duration::from_secs(10);
    with_seeds(|seed| FaultTest { redundancy, peers: 12, losses: 4, time }.run(seed));
}

#[test]
fn no_stable_snapshot_is_lost_while_two_of_five_peers_die_at_any_moment() {
    let redundancy = Redundancy::Replicas(3);
    let time = Duration::from_secs(10);
    with_seeds(|seed| FaultTest { redundancy, peers: 5, losses: 2, time }.run(seed));
}
