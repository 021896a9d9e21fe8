//! The mirror's protocol under a random schedule, without a kernel, a network or a clock.
//!
//! The guest, workers, fetches, the persisting of layers and the asker of checkpoints take turns, one small
//! step at a time, in an order drawn from a seed. An operation that is submitted touches the simulated disk
//! block by block at steps of its own, so that everything that overlaps in reality overlaps here, and
//! reads see half of what is being written.
//!
//! Each write stamps its blocks with a version. A snapshot of epoch e must hold, for every block, the
//! newest write with a ticket of an epoch up to e, and the live disk the newest of all. Each request is
//! answered once.
//!
//! The process dies at any step. What the kernel has in its hands lands, in part or in whole; the next
//! process has the live directory, the journal, the spill file and the repository, the guest's rings and
//! their ledger. A write that was in flight at the death may be in a snapshot that was frozen
//! while it was, or not.
//!
//! Disks fail in whole and in part, and their space runs out and comes back ([`faults`]). That may cost
//! snapshots, which fail then, but nothing else: at the end all works again, and a last snapshot has to be
//! complete and right.

mod death;
mod faults;
mod forgetting;
mod kernel;
mod ring;
pub(super) mod space;
mod storing;

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

use cairn_store::{ChunkIndex, Geometry, SnapshotState};
use seeded_rng::Rng;
use tempfile::TempDir;

use self::faults::Faults;
use self::kernel::Operation;
use self::ring::{Job, Queue, Ring, Write};
use super::Mirror;
use super::cut::Entrance;
use super::layer::{Epoch, Layer};
use super::layout::{BLOCK, Blocks, Layout, Span};

const CHUNK: u64 = 64 * 1024;
const CHUNKS: u64 = 8;
const PER_CHUNK: u64 = CHUNK / BLOCK;
const WORKERS: usize = 2;
/// Steps before everything comes to its end.
const STEPS: u64 = 2000;
/// The version of everything in the parent snapshot.
const PARENT: u64 = 1;
/// What an absent block's place holds, until something is written there.
const GARBAGE: u64 = 999_999;

/// A mistake that is made on purpose: the simulation has to find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plant {
    /// The last record of the journal is lost with the process.
    LostRecord,
    /// A request that was in flight is not in the ledger any more.
    LostLedgerEntry,
    /// Writes do not wait for those of the epoch before.
    Unsettled,
    /// A chunk counts as stored before its content is.
    StoredTooEarly,
    /// Blocks count as present when their write is submitted.
    PresentTooEarly,
    /// A write that is done again, maybe on the other side of a freeze, does not mark its chunks again.
    Unmarked,
    /// A write that has failed counts as done,
    FailedWrite,
    /// or a fill,
    FailedFill,
    /// or a copy.
    FailedCopy,
}

struct World {
    rng: Rng,
    plant: Option<Plant>,
    /// What outlives the process.
    dir: TempDir,
    layout: Layout,
    room: (u64, u64),
    mirror: Mirror,
    entrances: Vec<Entrance>,
    /// The guest's memory, and the hypervisor's for ledgers.
    rings: Vec<Ring>,
    ledgers: File,
    queues: Vec<Queue>,
    /// Requests that wait, by worker.
    parked: Vec<Vec<Job>>,
    kernel: Vec<Operation>,
    disk: Vec<u64>,
    parent: Vec<u64>,
    /// For each block, its writes in order: epoch and version.
    history: Vec<Vec<(Epoch, u64)>>,
    /// For each block, writes that were in flight when the process died: a snapshot may have them from
    /// this epoch on, before they were done again.
    torn: Vec<Vec<(Epoch, u64)>>,
    /// Blocks of requests that the guest has no answer for.
    in_flight: Vec<bool>,
    next_version: u64,
    commits: Vec<Arc<Layer>>,
    /// The repository.
    stored: HashMap<(Epoch, u64), Vec<u64>>,
    /// The catalog.
    states: HashMap<u64, SnapshotState>,
    /// The spill file.
    spilled: HashMap<u64, Vec<u8>>,
    published: u64,
    deaths: u64,
    faults: Faults,
    /// Steps until there is space again.
    full_for: u64,
    /// Set when nothing may go wrong any more.
    calm: bool,
}

impl World {
    fn new(seed: u64, shelf: u64, plant: Option<Plant>) -> World {
        space::begin();
        let layout = Layout::new(Geometry::new(CHUNKS * CHUNK, CHUNK as u32).unwrap());
        // In memory where that can be had, as the live directory is.
        let dir = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let room = (shelf, 4);
        let (mirror, _) = death::open(&dir, layout, room, &HashMap::new());
        let blocks = layout.block_count() as usize;
        let rings: Vec<Ring> = (0..WORKERS).map(|_| Ring::new()).collect();
        let ledgers = ring::ledgers();
        World {
            rng: Rng::new(seed),
            plant,
            dir,
            layout,
            room,
            entrances: (0..WORKERS).map(|worker| mirror.cut.entrance(worker)).collect(),
            mirror,
            queues: ring::open(&ledgers, &rings),
            rings,
            ledgers,
            parked: (0..WORKERS).map(|_| Vec::new()).collect(),
            kernel: Vec::new(),
            disk: vec![GARBAGE; blocks],
            parent: vec![PARENT; blocks],
            history: vec![vec![(Epoch(0), PARENT)]; blocks],
            torn: vec![Vec::new(); blocks],
            in_flight: vec![false; blocks],
            next_version: PARENT + 1,
            commits: Vec::new(),
            stored: HashMap::new(),
            states: HashMap::new(),
            spilled: HashMap::new(),
            published: 0,
            deaths: 0,
            faults: Faults::default(),
            full_for: 0,
            calm: false,
        }
    }

    fn step(&mut self) {
        self.space_step();
        self.stall_step();
        let worker = self.rng.below(WORKERS as u64) as usize;
        match self.rng.below(100) {
            0..10 => self.new_write(worker),
            10..18 => self.pop(worker),
            18..24 => self.look(worker),
            24..28 => self.read(),
            28 => self.new_fill(),
            29..31 => self.freeze(),
            31 if self.rng.chance(50) => self.bad_block(),
            31 => drop(self.dies(400)),
            32..38 => self.plan_parked(worker),
            38..48 => self.persist(),
            _ => self.kernel_step(),
        }
    }

    /// The guest sends a write.
    fn new_write(&mut self, worker: usize) {
        let longest = if self.rng.chance(20) { 2 * PER_CHUNK } else { 4 };
        let len = 1 + self.rng.below(longest);
        let first = self.rng.below(self.layout.block_count() - len + 1);
        let blocks = first as usize..(first + len) as usize;
        // Writes that overlap have no order that a test could know.
        if self.in_flight[blocks.clone()].contains(&true) {
            return;
        }
        let Some(head) = self.rings[worker].free_head(&mut self.rng) else { return };
        let span = match self.rng.chance(25) {
            // Sectors within blocks: the block's version is the write's all the same.
            true => Span { offset: first * BLOCK + 512, len: len * BLOCK - 1024 },
            false => Span { offset: first * BLOCK, len: len * BLOCK },
        };
        self.in_flight[blocks].fill(true);
        let version = self.next_version;
        self.next_version += 1;
        self.rings[worker].ask(head, Write { span, version });
    }

    /// The guest reads a block that it is not writing.
    fn read(&mut self) {
        let block = self.rng.below(self.layout.block_count());
        if !self.in_flight[block as usize] {
            self.check(block);
        }
    }

    fn plan_parked(&mut self, worker: usize) {
        for job in std::mem::take(&mut self.parked[worker]) {
            self.plan(job);
        }
    }

    fn new_fill(&mut self) {
        let chunk = ChunkIndex(self.rng.below(CHUNKS));
        self.fill(chunk);
    }

    /// Lets everything that is under way come to its end, and takes a last snapshot.
    fn finish(&mut self) {
        self.calm_down();
        self.rest();
        let published = self.published;
        self.freeze();
        self.rest();
        assert_eq!(self.published, published + 1, "nothing was wrong with the last snapshot");
        assert!(!self.in_flight.contains(&true), "a request was lost");
        for block in 0..self.layout.block_count() {
            self.check(block);
            let found = self.parent[block as usize];
            assert_eq!(found, self.newest(block), "block {block} of the last snapshot");
        }
    }

    fn rest(&mut self) {
        for _ in 0..200_000 {
            let idle = self.rings.iter().all(Ring::is_idle);
            if self.kernel.is_empty() && idle && self.commits.is_empty() {
                return;
            }
            self.kernel_step();
            self.persist();
            for worker in 0..WORKERS {
                self.pop(worker);
                self.plan_parked(worker);
                self.look(worker);
            }
        }
        panic!("a request was lost, or something waits for ever");
    }

    /// The live disk has the newest of all.
    fn check(&self, block: u64) {
        let is_local = self.mirror.plan_read(Blocks { first: block, count: 1 }.span()).is_empty();
        let found = if is_local { &self.disk } else { &self.parent }[block as usize];
        assert_eq!(found, self.newest(block), "block {block} of the live disk");
    }

    fn newest(&self, block: u64) -> u64 {
        self.history[block as usize].last().unwrap().1
    }
}

fn stamp(data: &[u8], block: u64) -> u64 {
    u64::from_le_bytes(data[(block * BLOCK) as usize..][..8].try_into().unwrap())
}

fn set_stamp(data: &mut [u8], block: u64, version: u64) {
    data[(block * BLOCK) as usize..][..8].copy_from_slice(&version.to_le_bytes());
}

fn run(seed: u64, plant: Option<Plant>) -> World {
    let mut world = World::new(seed, 1 + seed % 40, plant);
    for _ in 0..STEPS {
        world.step();
    }
    world.finish();
    world
}

/// Many schedules; `CAIRN_SEED` repeats one, `CAIRN_SOAK_SECONDS` goes on with others for that long.
#[test]
fn snapshots_and_the_live_disk_are_exact_whatever_the_order_of_steps() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    let start = std::time::Instant::now();
    let soak = std::time::Duration::from_secs(number("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let first = number("CAIRN_SEED");
    let (mut seeds, mut deaths, mut published) = (0, 0, 0);
    let mut faults = Faults::default();
    while seeds < 250 || start.elapsed() < soak {
        let seed = first.unwrap_or(seeds);
        println!("CAIRN_SEED={seed}");
        let world = run(seed, None);
        (seeds, deaths, published) =
            (seeds + 1, deaths + world.deaths, published + world.published);
        faults.add_all(&world.faults);
        if first.is_some() {
            break;
        }
    }
    let steps = seeds * STEPS;
    println!("{steps} steps, {deaths} deaths, {published} snapshots, {faults}, no violation");
    if first.is_none() {
        assert!(deaths > seeds && published > 5 * seeds, "not enough happened");
        let missing = Faults::ALL.into_iter().find(|fault| faults.of(*fault) == 0);
        assert_eq!(missing, None, "it did not happen");
    }
}

/// A checker that finds nothing proves nothing: each of these mistakes is found soon.
#[test]
fn planted_mistakes_are_found() {
    let plants = [
        Plant::LostRecord,
        Plant::LostLedgerEntry,
        Plant::Unsettled,
        Plant::StoredTooEarly,
        Plant::PresentTooEarly,
        Plant::Unmarked,
        Plant::FailedWrite,
        Plant::FailedFill,
        Plant::FailedCopy,
    ];
    for plant in plants {
        let found = |seed: &u64| std::panic::catch_unwind(|| run(*seed, Some(plant))).is_err();
        let seed = (0..20).find(found).unwrap_or_else(|| panic!("{plant:?} was not found"));
        println!("{plant:?} is found with CAIRN_SEED={seed}");
    }
}
