//! A disk grows while its guest runs.
//!
//! `CAIRN_SEED` repeats a run.

mod frontend;
mod support;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use cairn_agent::{Event, RefusalKind, Request};
use frontend::{DATA, Guest, OK, OUT, await_change};
use seeded_rng::Rng;
use support::backend::{Backend, IMAGE, Options, Site};
use support::control::Control;
use support::device::Shape;
use support::repository;
use support::rng::{Repeat, number_from_env};
use support::sys;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

const CHUNK: u32 = 64 << 10;
const BLOCK: u64 = 4096;
/// The size before the growth. Its end is inside of a block, and of a chunk.
const SMALL: u64 = (4 << 20) + 512;
const LARGE: u64 = 40 << 20;

fn grow_image(site: &Site, size: u64) {
    let store = repository::open(&site.store());
    store.catalog().resize(&repository::image(IMAGE), size).expect("the image grows");
}

fn grow_disk(control: &mut Control) -> u64 {
    match control.ask(&Request::Resize).expect("ask the disk to grow") {
        Event::Resized(resized) => resized.size,
        other => panic!("the growth was answered with {other:?}"),
    }
}

/// The size that the hypervisor reads.
fn configured_size(guest: &mut Guest) -> u64 {
    let flags = VhostUserConfigFlags::empty();
    let (_, bytes) = guest.frontend.get_config(0, 8, flags, &[0; 8]).unwrap();
    u64::from_le_bytes(bytes.try_into().unwrap()) * 512
}

fn write(guest: &mut Guest, offset: u64, fill: u8) -> u8 {
    guest.put(DATA, &[fill; 512]);
    guest.request(OUT, offset / 512, &[(DATA, 512, 0)])
}

/// The space that the files of a directory take.
fn space(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let files = files.filter(|file| file.file_name() != "cow-memory");
    files.map(|file| file.metadata().unwrap().blocks() * 512).sum()
}

#[test]
fn a_disk_grows_under_a_running_guest_and_its_snapshots_keep_their_sizes() {
    let site = Site::new();
    let mut small: Vec<u8> = vec![9; SMALL as usize];
    repository::import(&site.store(), IMAGE, CHUNK, &small);
    let backend = Backend::start(&Options::new(&site));
    let mut control = backend.control();
    let mut guest = Guest::connect(&backend.options.socket);
    let mut channel = guest.open_channel();
    assert_eq!(grow_disk(&mut control), SMALL, "it has that size already");
    assert_eq!(configured_size(&mut guest), SMALL);
    assert_ne!(write(&mut guest, SMALL, 1), OK, "behind the end");
    let live = fs::read_link(backend.options.mirror.join("live-state")).unwrap();
    let (live_space, map_space) = (space(&live), space(&backend.options.mirror));

    // Accepted before the growth, and perhaps stored after it.
    assert_eq!(write(&mut guest, SMALL - 512, 1), OK);
    small[SMALL as usize - 512..].fill(1);
    let before = control.checkpoint().unwrap().number;
    grow_image(&site, LARGE);
    assert_eq!(grow_disk(&mut control), LARGE);
    await_change(&mut channel);
    assert_eq!(configured_size(&mut guest), LARGE);
    assert_eq!(control.status().size, LARGE);
    let untouched = control.stable_checkpoint();

    // In the block that the old end cut off, in its chunk, and at the new end.
    let mut large = small.clone();
    large.resize(LARGE as usize, 0);
    for (offset, fill) in [(SMALL, 2), (SMALL + 2 * BLOCK, 3), (LARGE - 512, 4)] {
        assert_eq!(write(&mut guest, offset, fill), OK);
        large[offset as usize..][..512].fill(fill);
    }
    assert_ne!(write(&mut guest, LARGE, 1), OK, "behind the new end");
    let after = control.stable_checkpoint();
    let growth = (LARGE / BLOCK / 8).max(4096) * 4;
    assert!(space(&live) <= live_space + growth, "{} -> {}", live_space, space(&live));
    assert!(live_space < 256 << 10 && map_space < SMALL + (256 << 10), "not for the capacity");
    let denied = backend.guest().ask(&Request::Resize).unwrap();
    assert!(matches!(&denied, Event::Error(refusal) if refusal.kind == RefusalKind::Denied));
    drop(guest);
    backend.terminate();

    let export = |number| repository::export(&site.store(), IMAGE, number);
    assert!(export(1) == vec![9; SMALL as usize], "the first snapshot");
    assert!(export(before) == small, "the snapshot from before the growth");
    let mut holes = small.clone();
    holes.resize(LARGE as usize, 0);
    assert!(export(untouched) == holes, "the snapshot from after the growth");
    assert!(export(after) == large, "the last snapshot");

    // The mirror goes on, and other mirrors have the sizes of image and snapshot.
    let read = |options: &Options, shape: Shape| {
        let backend = Backend::start(options);
        let mut device = backend.device(shape);
        let disk = device.read_all();
        drop(device);
        backend.terminate();
        disk
    };
    let reader = Shape { read_only: true, ..Shape::default() };
    assert!(read(&Options::new(&site), Shape::default()) == large, "the same mirror");
    let old = Options { image: format!("{IMAGE}@{before}"), ..Options::named(&site, "old") };
    assert!(read(&old.clone().with(&["--read-only"]), reader) == small, "an old snapshot");
    let old = Options { image: format!("{IMAGE}@{before}"), ..Options::named(&site, "back") };
    assert!(read(&old, Shape::default()) == holes, "a writer of an old snapshot");
}

/// A write up to the old end counts as a write of the whole last block, and one that ends a moment
/// later does not.
#[test]
fn writes_up_to_the_end_are_kept_while_the_end_moves() {
    let seed = number_from_env("CAIRN_SEED").unwrap_or(1);
    let _repeat = Repeat(seed);
    let (site, mut rng) = (Site::new(), Rng::new(seed));
    let mut disk = vec![9; SMALL as usize];
    repository::import(&site.store(), IMAGE, CHUNK, &disk);
    let backend = Backend::start(&Options::new(&site));
    let mut guest = Guest::connect(&backend.options.socket);
    let mut snapshots = Vec::new();
    for round in 1..=60u8 {
        let size = disk.len() as u64;
        // Often within the same block, and sometimes in another chunk.
        let more = if rng.chance(70) { rng.between(1, 6) } else { rng.between(1, 300) } * 512;
        grow_image(&site, size + more);
        let control = backend.options.control.clone();
        let asked = thread::spawn(move || Control::connect(&control)?.ask(&Request::Resize));
        thread::sleep(Duration::from_micros(rng.below(1500)));
        for _ in 0..rng.below(4) {
            let offset = size - 512 * rng.between(1, 3);
            assert_eq!(write(&mut guest, offset, round), OK);
            disk[offset as usize..][..512].fill(round);
        }
        asked.join().unwrap().expect("the disk grows");
        disk.resize((size + more) as usize, 0);
        if rng.chance(10) {
            snapshots.push((backend.control().stable_checkpoint(), disk.clone()));
        }
    }
    snapshots.push((backend.control().stable_checkpoint(), disk));
    drop(guest);
    backend.terminate();
    for (number, disk) in snapshots {
        assert!(repository::export(&site.store(), IMAGE, number) == disk, "snapshot {number}");
    }
}

/// Otherwise a write up to the old end, which did not fetch the block, would count as a part of it.
#[test]
fn a_disk_whose_last_block_cannot_be_fetched_does_not_grow() {
    let site = Site::new();
    repository::import(&site.store(), IMAGE, CHUNK, &vec![9; SMALL as usize]);
    let backend = Backend::start(&Options::new(&site).with(&["--fetch-retry", "1"]));
    let (segments, away) = (site.repository().join("segments"), site.path("away"));
    fs::rename(&segments, &away).expect("take the data away");
    grow_image(&site, LARGE);
    match backend.control().ask(&Request::Resize).unwrap() {
        Event::Error(refusal) => assert!(refusal.message.contains("last block"), "{refusal:?}"),
        other => panic!("the growth was answered with {other:?}"),
    }
    assert_eq!(backend.control().status().size, SMALL);
    fs::remove_dir_all(&segments).ok();
    fs::rename(&away, &segments).expect("bring the data back");
    thread::sleep(Duration::from_secs(1));
    assert_eq!(grow_disk(&mut backend.control()), LARGE);
    backend.terminate();
}

#[test]
fn a_hypervisor_that_connects_after_a_growth_is_told_of_it() {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, SMALL);
    let backend = Backend::start(&Options::new(&site));
    let mut guest = Guest::connect(&backend.options.socket);
    assert!(guest.works(0, 7));
    backend.kill();
    grow_image(&site, LARGE);
    // The next process grows before it serves.
    let backend = Backend::start(&Options::new(&site));
    guest.introduce_again(&backend.options.socket).unwrap();
    let mut channel = guest.open_channel();
    let base = guest.used;
    guest.set_up_queue(frontend::Setup { base, ..guest.setup }).unwrap();
    await_change(&mut channel);
    assert_eq!(configured_size(&mut guest), LARGE);
    assert_eq!(write(&mut guest, LARGE - 512, 1), OK);
    drop(guest);
    backend.terminate();
}

#[test]
fn a_disk_does_not_grow_beyond_what_its_mirror_was_made_for_and_goes_on() {
    const TOO_LARGE: u64 = 2 << 40;
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, SMALL);
    let options = Options::new(&site);
    for _ in 0..2 {
        let backend = Backend::start(&options);
        grow_image(&site, TOO_LARGE);
        match backend.control().ask(&Request::Resize).unwrap() {
            Event::Error(refusal) if refusal.kind == RefusalKind::Unavailable => {
                assert!(refusal.message.contains("another directory"), "{}", refusal.message);
            }
            other => panic!("a growth beyond the capacity was answered with {other:?}"),
        }
        let mut guest = Guest::connect(&backend.options.socket);
        assert_eq!(configured_size(&mut guest), SMALL);
        assert!(guest.works(0, 7));
        drop(guest);
        backend.terminate();
    }
}

#[test]
fn a_disk_for_whose_growth_there_is_no_space_goes_on_as_it_is() {
    let site = Site::new();
    let live = site.path("live-memory");
    fs::create_dir(&live).expect("a place to mount");
    let _mounted = match sys::mount_tmpfs(&live, 12 << 20) {
        Ok(mounted) => mounted,
        Err(error) => {
            eprintln!("skipped: a small file system cannot be mounted here: {error}");
            return;
        }
    };
    repository::create(&site.store(), IMAGE, CHUNK, SMALL);
    let options = Options { live, ..Options::new(&site) };
    for round in 0..2 {
        let backend = Backend::start(&options);
        // The presence of such a disk takes 16 MiB.
        grow_image(&site, 512 << 30);
        match backend.control().ask(&Request::Resize).unwrap() {
            Event::Error(refusal) => assert!(refusal.message.contains("room"), "{refusal:?}"),
            other => panic!("a growth without space was answered with {other:?}"),
        }
        let mut device = backend.device(Shape::default());
        assert_eq!(device.capacity, SMALL);
        device.queues[0].write(SMALL - 512, &[round + 1; 512]).expect("write");
        device.queues[0].flush().expect("flush");
        let number = backend.control().stable_checkpoint();
        let snapshot = repository::export(&site.store(), IMAGE, number);
        assert_eq!(snapshot.len() as u64, SMALL);
        assert_eq!(snapshot[SMALL as usize - 512..], [round + 1; 512]);
        drop(device);
        if round == 0 { backend.kill() } else { backend.terminate() }
    }
}

#[test]
fn a_backend_that_is_killed_while_its_disk_grows_loses_nothing() {
    let seed = number_from_env("CAIRN_SEED").unwrap_or(1);
    let _repeat = Repeat(seed);
    let (site, mut rng) = (Site::new(), Rng::new(seed));
    repository::create(&site.store(), IMAGE, CHUNK, SMALL);
    let options = Options::new(&site);
    let (mut size, mut written) = (SMALL, Vec::new());
    let (mut backend, mut before, mut after) = (Backend::start(&options), 0, 0);
    for round in 1..=24u8 {
        size += rng.between(1, 40) * 512 * 37;
        grow_image(&site, size);
        let (control, delay) = (options.control.clone(), Duration::from_micros(rng.below(6000)));
        let asked = thread::spawn(move || Control::connect(&control)?.ask(&Request::Resize));
        thread::sleep(delay);
        backend.kill();
        match asked.join().unwrap() {
            Ok(_) => after += 1,
            Err(_) => before += 1,
        }
        backend = Backend::start(&options);
        assert_eq!(backend.control().status().size, size, "it grows before it serves");
        let mut device = backend.device(Shape::default());
        assert_eq!(device.capacity, size);
        let queue = &mut device.queues[0];
        for (offset, fill) in &written {
            let found = queue.read(*offset, 512).expect("read");
            assert!(found == [*fill; 512], "round {round}, offset {offset}: {:?}", &found[..4]);
        }
        let zeros = queue.read(size - 512, 512).expect("read the new end");
        assert!(zeros == [0; 512], "round {round}");
        queue.write(size - 512, &[round; 512]).expect("write the new end");
        written.push((size - 512, round));
        if rng.chance(30) {
            backend.control().checkpoint().expect("a checkpoint");
        }
    }
    println!("{before} kills before the answer, {after} after it");
    let number = backend.control().stable_checkpoint();
    backend.control().wait_until_quiet();
    let mut disk = vec![0; size as usize];
    for (offset, fill) in &written {
        disk[*offset as usize..][..512].fill(*fill);
    }
    assert!(repository::export(&site.store(), IMAGE, number) == disk);
    // Every checkpoint has the disk as it was then.
    for number in 2..number {
        let snapshot = repository::export(&site.store(), IMAGE, number);
        let last = (snapshot.len() - 512) as u64;
        let known = written.iter().filter(|(offset, _)| *offset <= last);
        let mut disk = vec![0; snapshot.len()];
        known.for_each(|(offset, fill)| disk[*offset as usize..][..512].fill(*fill));
        assert!(snapshot == disk, "snapshot {number}");
    }
    backend.terminate();
}
