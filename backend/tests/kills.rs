//! The backend is killed again and again under a guest that goes on. No request is lost or served
//! twice, no answered write is lost, and every accepted checkpoint becomes stable with exactly the
//! content that it had.
//!
//! `CAIRN_SEED` repeats a run, and `CAIRN_SOAK_SECONDS` runs further ones for that long.

mod support;
mod survivor;

use std::collections::HashSet;
use std::ops::Range;
use std::time::{Duration, Instant};

use cairn_agent::{Checkpoint, Event, Request};
use cairn_store::SnapshotRef;
use seeded_rng::Rng;
use support::backend::{Backend, IMAGE, Options, Site, run as run_to_its_end};
use support::control::Control;
use support::device::{Io, Layout, Shape};
use support::repository;
use support::rng::{Repeat, number_from_env};
use survivor::{BLOCK, Manner, SECTOR, Survivor, holds};

const CHUNK: u32 = 64 << 10;
const SIZE: u64 = 8 << 20;
const BLOCKS: usize = SIZE as usize / BLOCK;

/// How long the guest may wait for anything, through all kills, on a machine that does much else.
const HANG: Duration = Duration::from_secs(60);

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
    // Each number that was given out was seen here.
    let numbers: Vec<_> = taken.iter().map(|taken| taken.number).collect();
    assert!(numbers.iter().copied().eq((2..).take(taken.len())), "{numbers:?}");
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

/// The most numbers that a process has in hand: `RESERVED_NUMBERS` in `commit`.
const RESERVED: u64 = 25;

/// Takes checkpoints, and returns the last one's number. They have the numbers behind `last`.
fn take(backend: &Backend, last: u64, count: u64, wait: bool) -> u64 {
    let mut control = backend.control();
    for number in (last + 1..).take(count as usize) {
        let taken = match wait {
            true => control.stable_checkpoint(),
            false => control.checkpoint().expect("a checkpoint").number,
        };
        assert_eq!(taken, number);
    }
    last + count
}

#[test]
fn snapshot_numbers_go_on_without_a_gap_after_a_kill() {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, SIZE);
    let options = Options::new(&site);
    let mut last = 1;
    for round in 0..24 {
        let backend = Backend::start(&options);
        last = take(&backend, last, round % 5, round % 2 == 0);
        match round % 6 {
            // The stop may be complete, or may be killed before or after it gives the numbers back.
            4 => backend.terminate(),
            5 => backend.kill_while_it_stops(Duration::from_millis(round)),
            _ => backend.kill(),
        }
    }
    assert!(last > 1 + RESERVED, "numbers were reserved more than once");
    let backend = Backend::start(&options);
    backend.control().wait_until_quiet();
    let names: HashSet<_> = backend.control().list().into_iter().map(|one| one.snapshot).collect();
    assert_eq!(names, (1..=last).map(|number| format!("{IMAGE}@{number}")).collect());
}

#[test]
fn no_snapshot_number_is_given_out_twice_wherever_the_kill_falls() {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, SIZE);
    let options = Options::new(&site);
    let mut rng = Rng::new(7);
    let (mut last, mut kills) = (1, 0);
    let begin = Instant::now();
    // As many as make it necessary to reserve numbers again.
    while kills < 12 || last <= 1 + RESERVED {
        assert!(begin.elapsed() < Duration::from_secs(120), "{kills} kills, {last} is the last");
        kills += 1;
        let backend = Backend::start(&options);
        let mut control = backend.control();
        let asking = std::thread::spawn(move || {
            let mut given = Vec::new();
            while let Ok(event) = control.ask(&Request::Checkpoint(Checkpoint::default())) {
                match event {
                    Event::Accepted(accepted) => given.push(accepted.number),
                    // Too many wait to become stable.
                    _ => std::thread::sleep(Duration::from_micros(300)),
                }
            }
            given
        });
        std::thread::sleep(Duration::from_micros(rng.below(60_000)));
        backend.kill();
        for (at, number) in asking.join().expect("ask").into_iter().enumerate() {
            // The answer to the last request before the kill may be lost.
            let most = if at == 0 { last + 2 } else { last + 1 };
            assert!((last + 1..=most).contains(&number), "{number} after {last}");
            last = number;
        }
    }
    Backend::start(&options).control().wait_until_quiet();
}

/// Without the live directory, nobody knows which of the reserved numbers an agent was told.
#[test]
fn a_lost_live_directory_skips_the_reserved_numbers_and_no_more() {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, SIZE);
    let options = Options::new(&site);
    let mut last = 1;
    for round in 0..4 {
        let backend = Backend::start(&options);
        // The last ones are accepted, and perhaps not known to the catalog.
        last = take(&backend, last, 1, true);
        last = take(&backend, last, round, false);
        backend.kill_with_host();
        let backend = Backend::start(&options);
        let next = backend.control().stable_checkpoint();
        assert!((last + 1..=last + 1 + RESERVED).contains(&next), "{next} after {last}");
        last = next;
        backend.kill();
    }
}

/// A copy of the mirror that no process uses, and a live directory of its own for the copy.
fn copy_mirror(site: &Site, from: &Options, name: &str) -> Options {
    let live = site.path(&format!("live-of-{name}"));
    let to = Options { mirror: site.path(name), live, ..from.clone() };
    std::fs::create_dir(&to.mirror).expect("make the copy's directory");
    for name in ["disk", "map"] {
        std::fs::copy(from.mirror.join(name), to.mirror.join(name)).expect("copy the mirror");
    }
    to
}

/// The mirror is used on another host for a while, from a copy that was made when its process was
/// dead. The copy publishes nothing. Then the first host goes on with what it has.
#[test]
fn a_mirror_that_goes_back_to_an_older_copy_uses_no_number_again() {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, SIZE);
    let here = Options::new(&site);
    let backend = Backend::start(&here);
    let first = take(&backend, 1, 2, true);
    backend.kill();
    // Two minutes for the whole disk.
    let there = copy_mirror(&site, &here, "copy").with(&["--commit-rate", "65536"]);
    let backend = Backend::start(&there);
    write(&backend, 0..SIZE, 1);
    let second = backend.control().checkpoint().expect("a checkpoint").number;
    assert!((first + 1..=first + 1 + RESERVED).contains(&second), "{second} after {first}");
    backend.kill();
    let backend = Backend::start(&Options { image: format!("{IMAGE}@{first}"), ..here });
    let third = backend.control().checkpoint().expect("a checkpoint").number;
    assert!((second + 1..=second + 1 + RESERVED).contains(&third), "{third} after {second}");
}

/// Writes bytes of this value to a part of the disk.
fn write(backend: &Backend, part: Range<u64>, value: u8) {
    let mut device = backend.device(Shape::default());
    for at in part.step_by(1 << 20) {
        device.queues[0].write(at, &[value; 1 << 20]).expect("write");
    }
    device.queues[0].flush().expect("flush");
}

/// Checks that the start is refused because the mirror is an older copy.
fn refused_as_older(options: &Options) {
    let ended = run_to_its_end(&options.arguments());
    assert_eq!(ended.status.code(), Some(4), "{}", ended.message);
    assert!(ended.message.contains("is an older copy"), "{}", ended.message);
}

/// Local data that is older than the parent would hide the parent's content.
#[test]
fn a_mirror_is_refused_after_a_copy_of_it_has_published_a_snapshot() {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, SIZE);
    let here = Options::new(&site);
    let backend = Backend::start(&here);
    write(&backend, 0..2 << 20, 1);
    backend.control().stable_checkpoint();
    backend.kill();
    let there = copy_mirror(&site, &here, "copy");
    let backend = Backend::start(&there);
    write(&backend, 0..1 << 20, 2);
    backend.control().stable_checkpoint();
    backend.terminate();
    refused_as_older(&here);
    std::fs::remove_dir_all(&here.live).expect("remove the live directory");
    refused_as_older(&here);

    // The map of a stopped mirror is exact. So is that of an older copy, for its time.
    let before = copy_mirror(&site, &there, "before");
    let backend = Backend::start(&there);
    write(&backend, 0..1 << 20, 3);
    let last = backend.control().stable_checkpoint();
    backend.terminate();
    refused_as_older(&before);
    let backend = Backend::start(&there);
    let disk = backend.device(Shape::default()).read_all();
    assert!(disk[..1 << 20].iter().all(|byte| *byte == 3), "the refused copies changed nothing");
    assert!(disk == repository::export(&site.store(), IMAGE, last));
    let next = backend.control().stable_checkpoint();
    assert!(disk == repository::export(&site.store(), IMAGE, next));
}

/// The map of a moment between a publication and its record. The process may be killed then, or the
/// host may die.
#[test]
fn a_mirror_goes_on_after_a_kill_between_a_publication_and_its_record() {
    for host_dies in [false, true] {
        let site = Site::new();
        repository::create(&site.store(), IMAGE, CHUNK, SIZE);
        let options = Options::new(&site);
        // Some seconds for the part that is written.
        let backend = Backend::start(&options.clone().with(&["--commit-rate", "2000000"]));
        write(&backend, 0..SIZE, 1);
        let mut control = backend.control();
        let number = control.checkpoint().expect("it is accepted").number;
        let store = repository::open(&site.store());
        let name = SnapshotRef::number(&repository::image(IMAGE), number);
        while store.catalog().resolve(&name).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let map = std::fs::read(options.mirror.join("map")).expect("read the map");
        assert_eq!(control.status().pending.len(), 1, "it is not published yet");
        write(&backend, 0..1 << 20, 2);
        control.wait_until_quiet();
        match host_dies {
            true => backend.kill_with_host(),
            false => backend.kill(),
        }
        std::fs::write(options.mirror.join("map"), map).expect("write the map");
        let backend = Backend::start(&options);
        let disk = backend.device(Shape::default()).read_all();
        let (new, old) = disk.split_at(1 << 20);
        assert!(new.iter().all(|byte| *byte == 2) && old.iter().all(|byte| *byte == 1));
        let next = backend.control().stable_checkpoint();
        assert!(disk == repository::export(&site.store(), IMAGE, next));
    }
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
