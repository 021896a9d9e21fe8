//! The disk does what a disk does: random requests against a model in memory.
//!
//! Requests of all kinds and sizes run at depth on one or two queues over an imported image that is
//! partly holes. A sector has one request in flight at most; neighbours in one block may have their
//! own. Checkpoints are taken during the bursts and between them; between bursts the backend is
//! also stopped and started again. Every read is compared with the model, and so is every snapshot
//! taken between bursts.
//!
//! `CAIRN_SEED=n` repeats a run of the random configurations.

mod support;

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use seeded_rng::Rng;
use support::backend::{Backend, IMAGE, Options, Site};
use support::device::{Device, Io, Layout, Queue, Shape};
use support::repository;
use support::rng::{Repeat, number_from_env};

const SECTOR: usize = 512;
const BLOCK: usize = 8;
const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// What happens to the process between two bursts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Between {
    Nothing,
    /// The hypervisor reconnects.
    Reconnect,
    /// SIGTERM and a start on the same mirror.
    Restart,
    /// The process is killed after a flush and starts again on the same mirror.
    Kill,
}

#[derive(Clone, Copy, Debug)]
struct Config {
    seed: u64,
    size: usize,
    chunk: usize,
    queues: usize,
    depth: usize,
    bursts: usize,
    /// The number of requests of each queue in a burst.
    requests: usize,
    between: &'static [Between],
}

impl Config {
    fn plain(seed: u64) -> Config {
        Config {
            seed,
            size: 8 * MIB,
            chunk: 256 * KIB,
            queues: 1,
            depth: 8,
            bursts: 4,
            requests: 400,
            between: &[Between::Nothing],
        }
    }
}

/// The content that the disk must have, and the sectors that have a request in flight.
struct Model {
    disk: Vec<u8>,
    busy: Vec<bool>,
}

impl Model {
    fn claim(&mut self, sectors: Range<usize>) -> bool {
        if self.busy[sectors.clone()].contains(&true) {
            return false;
        }
        self.busy[sectors].fill(true);
        true
    }

    fn bytes(&mut self, sectors: &Range<usize>) -> &mut [u8] {
        &mut self.disk[sectors.start * SECTOR..sectors.end * SECTOR]
    }
}

/// The whole blocks within `sectors`, which a discard turns into zeros. The disk's last block
/// counts as whole even if the disk ends within it.
fn whole_blocks(sectors: &Range<usize>, disk: usize) -> Range<usize> {
    let start = sectors.start.next_multiple_of(BLOCK);
    let end = if sectors.end == disk { disk } else { sectors.end / BLOCK * BLOCK };
    if start < end { start..end } else { 0..0 }
}

/// A request in flight.
struct Pending {
    io: Io,
    sectors: Range<usize>,
    data: Vec<u8>,
}

fn draw(rng: &mut Rng, model: &Mutex<Model>) -> Option<Pending> {
    let mut model = model.lock().expect("no other thread failed");
    let sectors = model.busy.len();
    let longest = rng.pick(&[1, 7, 8, 9, 64, 130, 700, 2048]).min(sectors as u64);
    let len = rng.between(1, longest) as usize;
    let mut start = rng.below((sectors - len + 1) as u64) as usize;
    match rng.below(20) {
        0 => start = sectors - len,
        1..8 => start = start / BLOCK * BLOCK,
        _ => {}
    }
    let sectors = start..start + len;
    let (offset, bytes) = ((start * SECTOR) as u64, len * SECTOR);
    let kind = rng.below(100);
    if kind >= 96 {
        return Some(Pending { io: Io::Flush, sectors: 0..0, data: Vec::new() });
    }
    if !model.claim(sectors.clone()) {
        return None;
    }
    let (io, data) = match kind {
        0..30 => (Io::Read { offset, len: bytes }, Vec::new()),
        30..72 => {
            let mut data = vec![0; bytes];
            // Pages of zeros are written too, as file systems do.
            if rng.chance(85) {
                rng.fill(&mut data);
            }
            (Io::Write { offset, len: bytes }, data)
        }
        72..84 => {
            (Io::WriteZeroes { offset, len: bytes as u64, unmap: rng.chance(50) }, Vec::new())
        }
        _ => (Io::Discard { offset, len: bytes as u64 }, Vec::new()),
    };
    Some(Pending { io, sectors, data })
}

fn settle(queue: &Queue, slot: usize, done: Pending, model: &Mutex<Model>) {
    let mut model = model.lock().expect("no other thread failed");
    match done.io {
        Io::Read { len, .. } => {
            let found = queue.fetch(slot, len);
            let expected = model.bytes(&done.sectors);
            if let Some(at) = found.iter().zip(&*expected).position(|(a, b)| a != b) {
                let sector = done.sectors.start + at / SECTOR;
                panic!("{:?}: the first wrong byte is in sector {sector}", done.io);
            }
        }
        Io::Write { .. } => model.bytes(&done.sectors).copy_from_slice(&done.data),
        Io::WriteZeroes { .. } => model.bytes(&done.sectors).fill(0),
        Io::Discard { .. } => {
            let blocks = whole_blocks(&done.sectors, model.busy.len());
            model.bytes(&blocks).fill(0);
        }
        Io::Flush => {}
    }
    model.busy[done.sectors].fill(false);
}

/// Runs random requests on one queue, with `depth` of them in flight.
fn burst(queue: &mut Queue, config: &Config, mut rng: Rng, model: &Mutex<Model>) {
    let mut pending: Vec<Option<Pending>> = (0..config.depth).map(|_| None).collect();
    let mut left = config.requests;
    while left > 0 || queue.in_flight() > 0 {
        while left > 0 && queue.in_flight() < config.depth {
            let Some(request) = draw(&mut rng, model) else { break };
            let slot = queue.take_slot().expect("fewer in flight than slots");
            let layout = match rng.chance(40) {
                true => Layout {
                    skew: rng.pick(&[1, 8, 512, 1536, 4095]),
                    segments: rng.between(1, 5) as usize,
                },
                false => Layout::PLAIN,
            };
            if let Io::Write { .. } = request.io {
                queue.fill(slot, layout, &request.data);
            }
            queue.submit(slot, request.io, layout);
            pending[slot] = Some(request);
            left -= 1;
        }
        if queue.in_flight() == 0 {
            std::thread::yield_now();
            continue;
        }
        for done in queue.reap(1) {
            let request = pending[done.slot].take().expect("a request was in the slot");
            done.result.unwrap_or_else(|e| panic!("{:?}: {e}", request.io));
            settle(queue, done.slot, request, model);
        }
    }
}

/// An image of random chunks, holes, and chunks that are partly zeros.
fn base_image(config: &Config, rng: &mut Rng) -> Vec<u8> {
    let mut disk = vec![0; config.size];
    for chunk in disk.chunks_mut(config.chunk) {
        match rng.below(4) {
            0 => {}
            1 => {
                let half = chunk.len() / 2;
                rng.fill(&mut chunk[half..]);
            }
            _ => rng.fill(chunk),
        }
    }
    disk
}

fn same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "the size of {what}");
    let wrong = found.chunks(SECTOR).zip(expected.chunks(SECTOR)).position(|(a, b)| a != b);
    if let Some(sector) = wrong {
        panic!("{what} differs from the model in sector {sector}");
    }
}

fn run(config: Config) {
    let mut rng = Rng::new(config.seed);
    let site = Site::new();
    let disk = base_image(&config, &mut rng);
    repository::import(&site.store(), IMAGE, config.chunk as u32, &disk);
    let model = Mutex::new(Model { busy: vec![false; disk.len() / SECTOR], disk });
    let options = Options { queues: config.queues, ..Options::new(&site) };
    let shape = Shape { queues: config.queues, depth: config.depth, ..Shape::default() };
    let mut backend = Backend::start(&options);
    let mut device = backend.device(shape);
    assert_eq!(device.capacity, config.size as u64);
    let mut snapshots = Vec::new();
    for round in 0..config.bursts {
        burst_with_checkpoints(&backend, &mut device, &config, &mut rng, &model);
        let state = || model.lock().expect("no other thread failed").disk.clone();
        if rng.chance(60) {
            snapshots.push((backend.control().stable_checkpoint(), state()));
        }
        match config.between[round % config.between.len()] {
            Between::Nothing => {}
            Between::Reconnect => {
                drop(device);
                device = backend.device(shape);
            }
            how @ (Between::Restart | Between::Kill) => {
                // A host that dies keeps what was flushed. A backend that ends in any way keeps
                // everything.
                let with_host = matches!(how, Between::Kill) && rng.chance(50);
                if with_host {
                    device.queues[0].flush().expect("flush");
                }
                drop(device);
                match how {
                    Between::Restart => backend.terminate(),
                    _ if with_host => backend.kill_with_host(),
                    _ => backend.kill(),
                }
                backend = Backend::start(&options);
                device = backend.device(shape);
                if rng.chance(50) {
                    same(&device.read_all(), &state(), "the disk after a restart");
                }
            }
        }
    }
    let model = model.into_inner().expect("no other thread failed").disk;
    same(&device.read_all(), &model, "the disk");
    let number = backend.control().stable_checkpoint();
    same(&device.read_all(), &model, "the disk after the last checkpoint");
    snapshots.push((number, model));
    drop(device);
    backend.terminate();
    for (number, model) in snapshots {
        let found = repository::export(&site.store(), IMAGE, number);
        same(&found, &model, &format!("{IMAGE}@{number}"));
    }
}

/// One burst on all queues, while checkpoints are taken.
fn burst_with_checkpoints(
    backend: &Backend,
    device: &mut Device,
    config: &Config,
    rng: &mut Rng,
    model: &Mutex<Model>,
) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut control = backend.control();
        let over = &over;
        scope.spawn(move || {
            while !over.load(Ordering::SeqCst) {
                let _ = control.checkpoint();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let queues: Vec<_> = device
            .queues
            .iter_mut()
            .map(|queue| {
                let rng = Rng::new(rng.next_u64());
                scope.spawn(move || burst(queue, config, rng, model))
            })
            .collect();
        let results: Vec<_> = queues.into_iter().map(|queue| queue.join()).collect();
        over.store(true, Ordering::SeqCst);
        for result in results {
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
}

#[test]
fn one_queue_behaves_as_the_model() {
    run(Config { depth: 1, ..Config::plain(1) });
    run(Config::plain(2));
}

#[test]
fn two_queues_behave_as_the_model() {
    run(Config { queues: 2, depth: 16, ..Config::plain(3) });
}

#[test]
fn a_disk_that_ends_within_a_block_behaves_as_the_model() {
    let size = 4 * MIB + 13 * SECTOR;
    run(Config { size, chunk: 64 * KIB, queues: 2, ..Config::plain(4) });
}

#[test]
fn a_disk_smaller_than_a_chunk_behaves_as_the_model() {
    run(Config { size: 700 * KIB, chunk: MIB, ..Config::plain(5) });
}

#[test]
fn large_chunks_behave_as_the_model() {
    run(Config { size: 24 * MIB, chunk: 4 * MIB, queues: 2, ..Config::plain(6) });
}

#[test]
fn a_hypervisor_that_connects_again_finds_the_same_disk() {
    run(Config { between: &[Between::Reconnect], ..Config::plain(7) });
}

#[test]
fn a_restarted_backend_serves_the_same_disk() {
    run(Config { queues: 2, between: &[Between::Restart], ..Config::plain(8) });
}

#[test]
fn a_killed_backend_loses_nothing_that_was_flushed() {
    run(Config { queues: 2, between: &[Between::Kill], ..Config::plain(9) });
}

#[test]
fn random_configurations_behave_as_the_model() {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    let seed = number_from_env("CAIRN_SEED").unwrap_or(time.as_nanos() as u64 >> 16);
    let _repeat = Repeat(seed);
    let mut rng = Rng::new(seed);
    let ends: &[&'static [Between]] = &[&[Between::Nothing, Between::Restart], &[Between::Kill]];
    let config = Config {
        seed,
        size: rng.between(1, 48) as usize * 256 * KIB + rng.pick(&[0, 1, 8, 21]) * SECTOR,
        chunk: rng.pick(&[64, 128, 256, 512, 1024]) * KIB,
        queues: rng.between(1, 2) as usize,
        depth: rng.pick(&[1, 4, 16, 32]),
        bursts: 3,
        requests: 300,
        between: rng.pick(ends),
    };
    println!("{config:?}");
    run(config);
}
