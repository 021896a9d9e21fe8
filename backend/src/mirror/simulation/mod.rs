//! The mirror's protocol under a random schedule, without a kernel, a network or a clock.
//!
//! The guest, workers, fetches, persist and the client that requests checkpoints take turns, one
//! small step at a time, in an order drawn from a seed. An operation in flight touches the
//! simulated disk block by block, in steps of its own. So everything that overlaps in reality
//! overlaps here, and reads see half-written data.
//!
//! Each write stamps its blocks with a version. A snapshot of epoch e must hold, for every block,
//! the newest write with a ticket of an epoch up to e. The live disk must hold the newest write of
//! all. Each request is answered once.
//!
//! The process crashes at any step. Operations in flight land, in part or in whole. The next
//! process has the live directory, the tables and spill files of the layers, the repository, and the
//! guest's rings with their ledger. A write that was in flight at the crash may or may not be in a snapshot
//! that was frozen meanwhile.
//!
//! Disks fail, in whole and in part, and their space runs out and comes back ([`faults`]). That may
//! cost snapshots, which then fail, but nothing else. At the end nothing fails any more, and a last
//! snapshot has to be complete and correct.

mod crash;
mod faults;
mod invalidation;
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

use self::crash::CowBlocks;
use self::faults::Faults;
use self::kernel::Operation;
use self::ring::{Job, Queue, Ring, Write};
use super::Mirror;
use super::epoch::Epoch;
use super::epoch::layer::Layer;
use super::epoch::manager::EpochHandle;
use super::layout::{BLOCK_BYTES, Blocks, Layout, Span};

const CHUNK: u64 = 64 * 1024;
const CHUNKS: u64 = 8;
const PER_CHUNK: u64 = CHUNK / BLOCK_BYTES;
const WORKERS: usize = 2;
/// The number of steps before everything comes to its end.
const STEPS: u64 = 2000;
/// The version of everything in the parent snapshot.
const PARENT: u64 = 1;
/// What the space of an absent block holds until something is written there.
const GARBAGE: u64 = 999_999;

/// A bug that is made on purpose: the simulation has to find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlantedBug {
    /// The owners of copies in memory are lost with the process.
    LostOwners,
    /// The blocks in the tables of layers are lost with the process.
    LostTables,
    /// A request in flight is missing from the ledger.
    LostLedgerEntry,
    /// Writes do not wait for the writes of the epoch before.
    Unsettled,
    /// A chunk counts as stored before its content is stored.
    StoredTooEarly,
    /// Blocks count as present when their write is submitted.
    PresentTooEarly,
    /// A write that is served again, maybe after a freeze, does not mark its chunks again.
    Unmarked,
    /// A failed write counts as done.
    FailedWrite,
    /// A failed fill counts as done.
    FailedFill,
    /// A failed copy counts as done.
    FailedCopy,
}

struct World {
    rng: Rng,
    planted_bug: Option<PlantedBug>,
    /// The directory of what outlives the process.
    dir: TempDir,
    layout: Layout,
    cow: CowBlocks,
    mirror: Mirror,
    epoch_handles: Vec<EpochHandle>,
    /// The guest's memory.
    rings: Vec<Ring>,
    /// The hypervisor's memory for ledgers.
    ledgers: File,
    queues: Vec<Queue>,
    /// Requests that wait, by worker.
    parked: Vec<Vec<Job>>,
    kernel: Vec<Operation>,
    disk: Vec<u64>,
    parent: Vec<u64>,
    /// For each block, its writes in order: epoch and version.
    history: Vec<Vec<(Epoch, u64)>>,
    /// For each block, writes that were in flight when the process crashed: snapshots from this
    /// epoch on may have them before they are served again.
    torn: Vec<Vec<(Epoch, u64)>>,
    /// Blocks of requests that are not answered.
    in_flight: Vec<bool>,
    next_version: u64,
    commits: Vec<Arc<Layer>>,
    /// The repository.
    stored: HashMap<(Epoch, u64), Vec<u64>>,
    /// The catalog.
    states: HashMap<u64, SnapshotState>,
    /// The blocks in spill files, by epoch and offset.
    spilled: HashMap<(Epoch, u64), Vec<u8>>,
    published: u64,
    crashes: u64,
    faults: Faults,
    /// Steps until there is space again.
    full_for: u64,
    /// Set when nothing may fail any more.
    calm: bool,
}

impl World {
    fn new(seed: u64, cow_blocks: u64, planted_bug: Option<PlantedBug>) -> World {
        space::begin();
        let layout = Layout::new(Geometry::new(CHUNKS * CHUNK, CHUNK as u32).unwrap());
        // In memory if possible, like the live directory.
        let dir = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let spill = if seed.is_multiple_of(2) { 200 } else { 20 };
        let cow = CowBlocks { memory: cow_blocks, spill_buffers: 4, spill };
        let (mirror, _) = crash::open(&dir, layout, cow, &HashMap::new());
        let blocks = layout.block_count() as usize;
        let rings: Vec<Ring> = (0..WORKERS).map(|_| Ring::new()).collect();
        let ledgers = ring::ledgers();
        World {
            rng: Rng::new(seed),
            planted_bug,
            dir,
            layout,
            cow,
            epoch_handles: (0..WORKERS).map(|worker| mirror.epoch_handle(worker)).collect(),
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
            crashes: 0,
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
            31 => drop(self.crashes_now(400)),
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
        // Overlapping writes have no order that a test could know.
        if self.in_flight[blocks.clone()].contains(&true) {
            return;
        }
        let Some(head) = self.rings[worker].free_head(&mut self.rng) else { return };
        let span = match self.rng.chance(25) {
            // Sectors within blocks: the block still gets the version of the write.
            true => Span { offset: first * BLOCK_BYTES + 512, len: len * BLOCK_BYTES - 1024 },
            false => Span { offset: first * BLOCK_BYTES, len: len * BLOCK_BYTES },
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

    /// Lets everything in progress end, and takes a last snapshot.
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

    /// The live disk has the newest write of all.
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
    u64::from_le_bytes(data[(block * BLOCK_BYTES) as usize..][..8].try_into().unwrap())
}

fn set_stamp(data: &mut [u8], block: u64, version: u64) {
    data[(block * BLOCK_BYTES) as usize..][..8].copy_from_slice(&version.to_le_bytes());
}

fn run(seed: u64, planted_bug: Option<PlantedBug>) -> World {
    let mut world = World::new(seed, 1 + seed % 40, planted_bug);
    for _ in 0..STEPS {
        world.step();
    }
    world.finish();
    world
}

/// Runs many schedules. `CAIRN_SEED` repeats one, and `CAIRN_SOAK_SECONDS` runs further ones for
/// that long.
#[test]
fn snapshots_and_the_live_disk_are_exact_whatever_the_order_of_steps() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    let start = std::time::Instant::now();
    let soak = std::time::Duration::from_secs(number("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let first = number("CAIRN_SEED");
    let (mut seeds, mut crashes, mut published) = (0, 0, 0);
    let mut faults = Faults::default();
    while seeds < 250 || start.elapsed() < soak {
        let seed = first.unwrap_or(seeds);
        println!("CAIRN_SEED={seed}");
        let world = run(seed, None);
        (seeds, crashes, published) =
            (seeds + 1, crashes + world.crashes, published + world.published);
        faults.add_all(&world.faults);
        if first.is_some() {
            break;
        }
    }
    let steps = seeds * STEPS;
    println!("{steps} steps, {crashes} crashes, {published} snapshots, {faults}, no violation");
    if first.is_none() {
        assert!(crashes > seeds && published > 5 * seeds, "not enough happened");
        let missing = Faults::ALL.into_iter().find(|fault| faults.of(*fault) == 0);
        assert_eq!(missing, None, "it did not happen");
    }
}

/// A checker that finds nothing proves nothing: each of these bugs is found soon.
#[test]
fn planted_mistakes_are_found() {
    let plants = [
        PlantedBug::LostOwners,
        PlantedBug::LostTables,
        PlantedBug::LostLedgerEntry,
        PlantedBug::Unsettled,
        PlantedBug::StoredTooEarly,
        PlantedBug::PresentTooEarly,
        PlantedBug::Unmarked,
        PlantedBug::FailedWrite,
        PlantedBug::FailedFill,
        PlantedBug::FailedCopy,
    ];
    for planted_bug in plants {
        let found =
            |seed: &u64| std::panic::catch_unwind(|| run(*seed, Some(planted_bug))).is_err();
        let seed = (0..20).find(found).unwrap_or_else(|| panic!("{planted_bug:?} was not found"));
        println!("{planted_bug:?} is found with CAIRN_SEED={seed}");
    }
}
