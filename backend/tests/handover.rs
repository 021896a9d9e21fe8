//! A process that stops cleanly leaves unfinished work to the next one: checkpoints that are not
//! stable, and requests that wait for the repository. A client that requested a checkpoint learns
//! its outcome from the next process.

mod support;
mod survivor;

use std::fs;
use std::time::{Duration, Instant};

use cairn_agent::{Checkpoint, Event, Follow, RefusalKind, Request, Wait};
use cairn_store::SnapshotRef;
use seeded_rng::Rng;
use support::backend::{Backend, IMAGE, Options, Site};
use support::control::Control;
use support::device::Shape;
use support::repository;
use survivor::{BLOCK, Manner, Survivor};

const CHUNK: u32 = 64 << 10;
const SIZE: u64 = 8 << 20;
const BLOCKS: usize = SIZE as usize / BLOCK;

fn follow(control: &mut Control, number: u64) -> Event {
    control.ask(&Request::Follow(Follow { number })).expect("an answer")
}

#[test]
fn a_checkpoint_that_is_not_stable_at_a_stop_becomes_so_after_the_next_start() {
    for in_good_order in [true, false] {
        let site = Site::new();
        repository::create(&site.store(), IMAGE, CHUNK, SIZE);
        let mut disk = vec![0; SIZE as usize];
        Rng::new(4).fill(&mut disk);
        // Two minutes for the whole disk.
        let slow = Options::new(&site).with(&["--commit-rate", "65536"]);
        let backend = Backend::start(&slow);
        let mut device = backend.device(Shape::default());
        for (at, part) in (0..).step_by(1 << 20).zip(disk.chunks(1 << 20)) {
            device.queues[0].write(at, part).expect("write");
        }
        let mut asker = backend.control();
        let wait = Checkpoint { wait: Wait::Stable, ..Checkpoint::default() };
        let number = asker.checkpoint_with(wait).expect("it is accepted").number;
        device.queues[0].write(0, &[7; 1 << 20]).expect("write after the cut");
        drop(device);
        let start = Instant::now();
        match in_good_order {
            true => backend.terminate(),
            false => backend.kill(),
        }
        assert!(start.elapsed() < Duration::from_secs(30), "the stop took {:?}", start.elapsed());
        asker.next_event().expect_err("the connection has ended without an answer");

        let backend = Backend::start(&Options::new(&site));
        let mut control = backend.control();
        for _ in 0..2 {
            // The first time it may be pending; the second time it is not.
            match follow(&mut control, number) {
                Event::Stable(stable) => assert_eq!(stable.number, number),
                other => panic!("{other:?}"),
            }
        }
        match follow(&mut control, number + 1000) {
            Event::Error(refusal) => assert_eq!(refusal.kind, RefusalKind::Invalid),
            other => panic!("{other:?}"),
        }
        assert!(repository::export(&site.store(), IMAGE, number) == disk, "the checkpoint");
        disk[..1 << 20].fill(7);
        assert!(backend.device(Shape::default()).read_all() == disk, "the disk");
        let next = control.stable_checkpoint();
        assert!(repository::export(&site.store(), IMAGE, next) == disk, "the next checkpoint");
        backend.terminate();
    }
}

/// The live directory is gone: only the checkpoint is lost with it.
#[test]
fn a_guest_goes_on_after_a_reboot_that_came_before_its_checkpoint_was_stable() {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, SIZE);
    let options = Options::new(&site);
    let backend = Backend::start(&options.clone().with(&["--commit-rate", "65536"]));
    let mut guest = Survivor::new(Manner::UsedIndex, BLOCKS, Rng::new(7));
    guest.connect(&options.socket).expect("connect");
    // Much more than is stored at once.
    while guest.completed < 2000 {
        guest.run(Duration::from_millis(100));
    }
    let number = backend.control().checkpoint().expect("it is accepted").number;
    guest.run(Duration::from_millis(100));
    backend.terminate();
    fs::remove_dir_all(&options.live).expect("remove the live directory");
    let backend = Backend::start(&options);
    guest.connect(&options.socket).expect("the guest is known");
    guest.run(Duration::from_millis(100));
    guest.finish(Duration::from_secs(20));
    guest.check_all();
    let mut control = backend.control();
    match follow(&mut control, number) {
        Event::Failed(failed) => assert_eq!(failed.number, number),
        other => panic!("{other:?}"),
    }
    let disk = backend.options.mirror.join("disk");
    let number = control.stable_checkpoint();
    let disk = fs::read(disk).expect("read the mirror");
    assert!(repository::export(&site.store(), IMAGE, number) == disk, "the next checkpoint");
}

/// A request that changes the catalog fails after ten seconds.
#[test]
fn a_catalog_that_does_not_answer_delays_no_stop_and_costs_no_checkpoint() {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, SIZE);
    // A second or two for the whole disk.
    let extra = ["--commit-retry", "0", "--commit-rate", "4000000"];
    let options = Options::new(&site).with(&extra);
    let backend = Backend::start(&options);
    let mut device = backend.device(Shape::default());
    for at in (0..SIZE).step_by(1 << 20) {
        device.queues[0].write(at, &[1; 1 << 20]).expect("write");
    }
    let number = backend.control().checkpoint().expect("it is accepted").number;
    let store = repository::open(&site.store());
    let name = SnapshotRef::number(&repository::image(IMAGE), number);
    while store.catalog().resolve(&name).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let silent = repository::silence_catalog(&site);
    device.queues[0].write(0, &[2; 1 << 20]).expect("write after the cut");
    drop(device);
    // Everything is stored, and the publication waits.
    std::thread::sleep(Duration::from_secs(5));
    let start = Instant::now();
    backend.terminate();
    assert!(start.elapsed() < Duration::from_secs(20), "the stop took {:?}", start.elapsed());
    drop(silent);

    let backend = Backend::start(&options);
    assert!(!backend.log().contains("taking over the mirror"), "{}", backend.log());
    match follow(&mut backend.control(), number) {
        Event::Stable(stable) => assert_eq!(stable.number, number),
        other => panic!("{other:?}"),
    }
    assert!(repository::export(&site.store(), IMAGE, number) == vec![1; SIZE as usize]);
    let next = backend.control().stable_checkpoint();
    let disk = backend.device(Shape::default()).read_all();
    assert!(disk[..1 << 20].iter().all(|byte| *byte == 2));
    assert!(repository::export(&site.store(), IMAGE, next) == disk);
    backend.terminate();
}

#[test]
fn requests_that_wait_for_the_repository_outlive_a_stop() {
    for manner in [Manner::UsedIndex, Manner::AvailableIndex, Manner::NoLedger] {
        let site = Site::new();
        repository::create(&site.store(), IMAGE, CHUNK, SIZE);
        let options = Options::new(&site);
        let backend = Backend::start(&options);
        let mut first = Survivor::new(manner, BLOCKS, Rng::new(5));
        first.connect(&options.socket).expect("connect");
        first.run(Duration::from_millis(300));
        first.finish(Duration::from_secs(20));
        backend.control().stable_checkpoint();
        backend.terminate();

        // Another mirror, without local data.
        let options = Options::named(&site, "other");
        let (segments, away) = (site.repository().join("segments"), site.path("away"));
        let backend = Backend::start(&options);
        let mut guest = Survivor::new(manner, BLOCKS, Rng::new(6));
        (guest.acked, guest.sent) = (first.acked, first.sent);
        guest.connect(&options.socket).expect("connect");
        fs::rename(&segments, &away).expect("take the data away");
        guest.run(Duration::from_millis(200));
        let start = Instant::now();
        backend.terminate();
        assert!(start.elapsed() < Duration::from_secs(20), "the stop took {:?}", start.elapsed());
        fs::rename(&away, &segments).expect("bring the data back");
        let backend = Backend::start(&options);
        guest.connect(&options.socket).expect("connect again");
        guest.finish(Duration::from_secs(30));
        assert!(guest.slowest > Duration::from_millis(50), "nothing had to wait");
        guest.check_all();
        backend.terminate();
    }
}
