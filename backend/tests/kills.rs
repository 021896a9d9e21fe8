//! The backend is killed again and again under a guest that goes on. No request is lost or served
//! twice, no answered write is lost, and every accepted checkpoint becomes stable with exactly the
//! content that it had.
//!
//! `CAIRN_SEED` repeats a run, and `CAIRN_SOAK_SECONDS` runs further ones for that long.

mod support;
mod survivor;

use std::time::{Duration, Instant};

use support::backend::{Backend, IMAGE, Options, Site};
use support::control::Control;
use support::device::{Io, Layout, Shape};
use support::repository;
use support::rng::{Repeat, Rng, number_from_env};
use survivor::{BLOCK, Manner, SECTOR, Survivor, holds};

const CHUNK: u32 = 64 << 10;
const SIZE: u64 = 8 << 20;
const BLOCKS: usize = SIZE as usize / BLOCK;

/// How long the guest may wait for anything.
const HANG: Duration = Duration::from_secs(10);

/// A checkpoint that was accepted, and the versions that it may hold.
struct Taken {
    number: u64,
    least: Vec<u32>,
    most: Vec<u32>,
}

#[derive(Default)]
struct Tally {
    kills: u64,
    requests: u64,
    checkpoints: u64,
    /// The longest time that the guest waited for one request.
    slowest: Duration,
}

/// One guest, whose backend is killed this many times.
fn run(seed: u64, manner: Manner, kills: u64, tally: &mut Tally) {
    let _repeat = Repeat(seed);
    let mut rng = Rng::new(seed);
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, SIZE);
    // Little copy-on-write memory, so that copies go to the disk too.
    let memory = if rng.chance(50) { "1" } else { "64" };
    let options = Options::new(&site).with(&["--cow-memory", memory]);
    let mut guest = Survivor::new(manner, BLOCKS, Rng::new(rng.next_u64()));
    let mut backend = Backend::start(&options);
    guest.connect(&options.socket).expect("connect");
    let mut taken = Vec::new();
    for _ in 0..kills {
        guest.run(Duration::from_millis(rng.below(40)));
        for _ in 0..rng.below(4) {
            taken.extend(checkpoint(&mut guest, &options));
            guest.run(Duration::from_micros(rng.below(3000)));
        }
        // An operator who replaces the program by a newer one stops it cleanly.
        match rng.below(10) {
            0..2 => backend.terminate(),
            2..4 => backend.kill_while_it_stops(Duration::from_micros(rng.below(30_000))),
            _ => backend.kill(),
        }
        tally.kills += 1;
        // A process may be killed before it has finished its start.
        while rng.chance(20) {
            let early = Backend::spawn(&options, |_| {});
            guest.run(Duration::from_micros(rng.below(20_000)));
            early.kill();
            tally.kills += 1;
        }
        backend = Backend::spawn(&options, |_| {});
        if rng.chance(50) {
            backend.wait_until_ready();
        }
        guest.connect(&options.socket).expect("connect again");
    }
    guest.run(Duration::from_millis(20));
    guest.finish(HANG);
    guest.check_all();
    assert!(guest.slowest < HANG, "a request took {:?}", guest.slowest);
    backend.control().wait_until_quiet();
    taken.iter().for_each(|taken| check(&site, taken));
    backend.terminate();
    tally.requests += guest.completed;
    tally.checkpoints += taken.len() as u64;
    tally.slowest = tally.slowest.max(guest.slowest);
}

/// Takes a checkpoint while the guest goes on.
fn checkpoint(guest: &mut Survivor, options: &Options) -> Option<Taken> {
    let mut control = Control::connect(&options.control).ok()?;
    guest.turn();
    let least = guest.acked.clone();
    let accepted = control.checkpoint().ok()?;
    Some(Taken { number: accepted.number, least, most: guest.sent.clone() })
}

/// Compares the snapshot with the versions that it may hold.
fn check(site: &Site, taken: &Taken) {
    let Taken { number, least, most } = taken;
    let disk = repository::export(&site.store(), IMAGE, *number);
    for (sector, bytes) in disk.chunks(SECTOR).enumerate() {
        let (least, most, found) = (least[sector], most[sector], &bytes[..8]);
        let right = holds(sector, bytes, least..=most);
        assert!(right, "sector {sector} of @{number}: {found:?}, not {least} to {most}");
    }
}

#[test]
fn nothing_is_lost_however_often_the_backend_is_killed() {
    let start = Instant::now();
    let soak = Duration::from_secs(number_from_env("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let first = number_from_env("CAIRN_SEED").unwrap_or(1);
    let mut tally = Tally::default();
    for round in 0.. {
        if round >= 1 && start.elapsed() >= soak {
            break;
        }
        for manner in [Manner::UsedIndex, Manner::AvailableIndex, Manner::NoLedger] {
            run(first + round, manner, 12, &mut tally);
        }
    }
    let Tally { kills, requests, checkpoints, slowest } = tally;
    println!("{kills} kills, {requests} requests, {checkpoints} checkpoints, slowest {slowest:?}");
    assert!(kills >= 36 && checkpoints > 0 && requests > 1000, "too little was tested");
}

/// A guest that has run for a while, and its backend.
fn running(site: &Site, manner: Manner, seed: u64) -> (Survivor, Backend) {
    repository::create(&site.store(), IMAGE, CHUNK, SIZE);
    let options = Options::new(site);
    let backend = Backend::start(&options);
    let mut guest = Survivor::new(manner, BLOCKS, Rng::new(seed));
    guest.connect(&options.socket).expect("connect");
    guest.run(Duration::from_millis(100));
    (guest, backend)
}

/// Data that the guest wrote may be lost, and no restart repairs that.
#[test]
fn a_guest_that_was_refused_once_is_refused_by_every_process_after_that() {
    for in_good_order in [false, true] {
        let site = Site::new();
        let (mut guest, backend) = running(&site, Manner::UsedIndex, 1);
        backend.kill_with_host();
        let options = Options::new(&site);
        let backend = Backend::start(&options);
        guest.connect(&options.socket).expect_err("the live state is gone");
        match in_good_order {
            true => backend.terminate(),
            false => backend.kill(),
        }
        let backend = Backend::start(&options);
        guest.connect(&options.socket).expect_err("the live state is still gone");
        // A guest that starts from the beginning is accepted, and known from then on.
        let mut guest = Survivor::new(Manner::UsedIndex, BLOCKS, Rng::new(2));
        guest.connect(&options.socket).expect("connect a new guest");
        guest.is_busy = false;
        backend.kill();
        let _backend = Backend::start(&options);
        guest.connect(&options.socket).expect("connect it again");
    }
}

#[test]
fn requests_outlive_a_stop_in_good_order_before_the_hypervisor_is_back() {
    for seed in 0..5 {
        let site = Site::new();
        let (mut guest, backend) = running(&site, Manner::NoLedger, seed);
        let _ = backend.control().checkpoint();
        guest.run(Duration::from_millis(3 + seed));
        backend.kill();
        let options = Options::new(&site);
        Backend::start(&options).terminate();
        let _backend = Backend::start(&options);
        guest.connect(&options.socket).expect("connect");
        guest.finish(HANG);
        guest.check_all();
    }
}

#[test]
fn the_live_state_is_found_whatever_the_arguments_of_the_next_process() {
    let site = Site::new();
    let (mut guest, backend) = running(&site, Manner::UsedIndex, 3);
    let options = Options::new(&site);
    let taken = checkpoint(&mut guest, &options).expect("it is accepted");
    guest.run(Duration::from_millis(5));
    backend.kill();
    let options = Options { live: site.path("elsewhere"), ..options };
    let backend = Backend::start(&options);
    guest.connect(&options.socket).expect("connect");
    guest.finish(HANG);
    guest.check_all();
    backend.control().wait_until_quiet();
    check(&site, &taken);
}

/// The kernel finishes the writes of a dead process. It keeps the lock on their file until the last
/// one has landed, and the next process waits for that.
#[test]
fn nothing_lands_in_the_mirror_once_its_lock_is_free() {
    const LEN: usize = 1 << 20;
    const DEPTH: usize = 64;
    let mut held = Vec::new();
    for round in 0..4 {
        let site = Site::new();
        repository::create(&site.store(), IMAGE, CHUNK, (DEPTH * LEN) as u64);
        let options = Options::new(&site);
        let backend = Backend::start(&options);
        let mut device = backend.device(Shape { depth: DEPTH, ..Shape::default() });
        let queue = &mut device.queues[0];
        queue.write(0, &[1; 4096]).expect("write");
        for at in 0..DEPTH {
            let slot = queue.take_slot().expect("all are free");
            queue.fill(slot, Layout::PLAIN, &[2; LEN]);
            queue.submit(slot, Io::Write { offset: (at * LEN) as u64, len: LEN }, Layout::PLAIN);
        }
        queue.reap(usize::from(round % 2 == 1));
        backend.kill();
        let path = options.mirror.join("disk");
        let disk = std::fs::File::open(&path).expect("the data file");
        let start = Instant::now();
        while disk.try_lock().is_err() {
            assert!(start.elapsed() < HANG, "the lock is never free");
            std::thread::sleep(Duration::from_micros(200));
        }
        held.push(start.elapsed());
        let before = std::fs::read(&path).expect("read the data file");
        std::thread::sleep(Duration::from_millis(200));
        let after = std::fs::read(&path).expect("read the data file");
        assert!(before == after, "a write landed after the lock was free");
    }
    println!("after the death of the process the lock was held for {held:?}");
}
