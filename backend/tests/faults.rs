//! Full disks, an unavailable repository, a host that dies. The guest gets an error only if there
//! is no other way, nothing is lost, and everything goes on when the fault is over.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crash_images::{Draw, Mounted, check_all};
use seeded_rng::Rng;
use support::backend::{Backend, IMAGE, Options, Site};
use support::device::{Device, Io, Layout, Shape};
use support::repository;
use support::sys;

const CHUNK: u32 = 64 << 10;
const MIB: u64 = 1 << 20;

fn random_disk(seed: u64, len: u64) -> Vec<u8> {
    let mut disk = vec![0; len as usize];
    Rng::new(seed).fill(&mut disk);
    disk
}

/// A file system of its own, if the host permits it.
fn small_disk(site: &Site, bytes: u64) -> Option<(PathBuf, sys::Mounted)> {
    let small = site.path("small");
    fs::create_dir(&small).expect("a place to mount");
    match sys::mount_tmpfs(&small, bytes) {
        Ok(mounted) => Some((small, mounted)),
        Err(error) => {
            eprintln!("skipped: a small file system cannot be mounted here: {error}");
            None
        }
    }
}

/// Uses up the free space of a small file system.
fn fill(directory: &Path) -> PathBuf {
    let ballast = directory.join("ballast");
    let mut len = 64 * MIB;
    while len >= 4096 {
        // What is written before an error stays.
        let result = fs::File::options()
            .create(true)
            .append(true)
            .open(&ballast)
            .and_then(|mut file| std::io::Write::write_all(&mut file, &vec![1; len as usize]));
        if result.is_err() {
            len /= 2;
        }
    }
    ballast
}

/// Checks the content of the disk and of a checkpoint of it.
fn check_and_end(site: &Site, backend: Backend, mut device: Device, disk: &[u8]) {
    let number = backend.control().stable_checkpoint();
    assert!(repository::export(&site.store(), IMAGE, number) == disk, "the checkpoint");
    assert!(device.read_all() == disk, "the disk");
    drop(device);
    backend.terminate();
}

#[test]
fn a_checkpoint_waits_for_a_full_repository_and_keeps_its_content() {
    let site = Site::new();
    let Some((small, _mounted)) = small_disk(&site, 40 * MIB) else { return };
    let store = format!("dir:{}", small.join("repository").display());
    repository::create(&store, IMAGE, CHUNK, 16 * MIB);
    let backend = Backend::start(&Options { store: store.clone(), ..Options::new(&site) });
    let mut device = backend.device(Shape::default());
    let mut control = backend.control();
    let disk = random_disk(5, 16 * MIB);
    for (at, part) in (0..).step_by(MIB as usize).zip(disk.chunks(MIB as usize)) {
        device.queues[0].write(at, part).expect("write");
    }
    let ballast = fill(&small);
    let number = control.checkpoint().expect("it is accepted").number;
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let pending = control.status().pending;
        let error = pending.first().expect("it is pending").last_error.clone();
        if error.is_some_and(|error| error.contains("space") || error.contains("full")) {
            break;
        }
        assert!(Instant::now() < deadline, "no error is reported: {pending:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    // The guest goes on, and its writes are not in the checkpoint.
    for at in (0..16 * MIB).step_by(MIB as usize) {
        device.queues[0].write(at, &[7; MIB as usize]).expect("write");
    }
    fs::remove_file(ballast).expect("make space");
    control.wait_until_quiet();
    assert!(repository::export(&store, IMAGE, number) == disk, "the checkpoint's content");
    drop(device);
    backend.terminate();
}

#[test]
fn a_full_mirror_fails_only_writes_that_need_space_and_recovers() {
    let site = Site::new();
    let Some((small, _mounted)) = small_disk(&site, 24 * MIB) else { return };
    repository::create(&site.store(), IMAGE, CHUNK, 16 * MIB);
    let options = Options { mirror: small.join("mirror"), ..Options::new(&site) };
    let backend = Backend::start(&options.with(&["--fetch-retry", "1"]));
    let mut device = backend.device(Shape::default());
    let mut disk = vec![0; 16 * MIB as usize];
    let old = random_disk(6, 4 * MIB);
    for (at, part) in (0..).step_by(MIB as usize).zip(old.chunks(MIB as usize)) {
        device.queues[0].write(at, part).expect("write");
    }
    disk[..old.len()].copy_from_slice(&old);
    device.queues[0].flush().expect("flush");
    let ballast = fill(&small);
    let failed = (8..16).filter(|at| device.queues[0].write(at * MIB, &[9; 65536]).is_err());
    assert!(failed.count() >= 7, "there was space");
    // Local data can be read, written and flushed.
    device.queues[0].write(MIB, &[3; 65536]).expect("write what is there already");
    disk[MIB as usize..][..65536].fill(3);
    device.queues[0].flush().expect("flush");
    for (at, part) in (0..4 * MIB).step_by(MIB as usize).zip(disk.chunks(MIB as usize)) {
        assert!(device.queues[0].read(at, part.len()).expect("read") == part, "at {at}");
    }
    fs::remove_file(ballast).expect("make space");
    for at in 8..16 {
        device.queues[0].write(at * MIB, &[5; 65536]).expect("write after there is space again");
        disk[(at * MIB) as usize..][..65536].fill(5);
    }
    check_and_end(&site, backend, device, &disk);
}

/// Copies then go to the disk. A checkpoint may be refused, with a reason, but it is never taken in
/// part.
#[test]
fn a_full_live_directory_costs_no_data_and_recovers() {
    let site = Site::new();
    let Some((small, _mounted)) = small_disk(&site, 16 * MIB) else { return };
    repository::create(&site.store(), IMAGE, CHUNK, 16 * MIB);
    let options = Options { live: small.join("live"), ..Options::new(&site) };
    // Slow enough that writes hit chunks that are not stored.
    let backend = Backend::start(&options.with(&["--commit-rate", "8388608"]));
    let mut device = backend.device(Shape::default());
    let mut control = backend.control();
    let ballast = fill(&small);
    let mut taken = Vec::new();
    let mut refused = 0;
    let mut disk = random_disk(10, 16 * MIB);
    for round in 0..6 {
        disk[..4 * MIB as usize].fill(round);
        for (at, part) in (0..).step_by(MIB as usize).zip(disk.chunks(MIB as usize)) {
            device.queues[0].write(at, part).expect("write");
        }
        match control.checkpoint() {
            Ok(accepted) => taken.push((accepted.number, disk.clone())),
            Err(refusal) => {
                refused += 1;
                assert!(refusal.message.contains("space"), "{refusal:?}");
            }
        }
    }
    assert!(refused > 0, "the live directory was not full: {taken:?}", taken = taken.len());
    fs::remove_file(ballast).expect("make space");
    let last = Instant::now() + Duration::from_secs(10);
    let number = loop {
        match control.checkpoint() {
            Ok(accepted) => break accepted.number,
            Err(refusal) => assert!(Instant::now() < last, "still refused: {refusal:?}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    taken.push((number, disk.clone()));
    control.wait_until_quiet();
    for (number, disk) in taken {
        assert!(repository::export(&site.store(), IMAGE, number) == disk, "checkpoint {number}");
    }
    assert!(device.read_all() == disk, "the disk");
    assert_eq!(control.stats().errors, 0);
    drop(device);
    backend.terminate();
}

#[test]
fn a_read_waits_for_the_repository_and_then_fails_or_succeeds() {
    let site = Site::new();
    let disk = random_disk(8, 4 * MIB);
    repository::import(&site.store(), IMAGE, CHUNK, &disk);
    let (segments, away) = (site.repository().join("segments"), site.path("away"));
    let backend = Backend::start(&Options::new(&site).with(&["--fetch-retry", "6"]));
    let mut device = backend.device(Shape::default());
    fs::rename(&segments, &away).expect("take the data away");
    let start = Instant::now();
    device.queues[0].read(0, 4096).expect_err("read what is not there");
    let took = start.elapsed();
    assert!((Duration::from_secs(3)..Duration::from_secs(20)).contains(&took), "{took:?}");
    // A write of whole blocks needs nothing from the repository.
    device.queues[0].write(MIB, &[1; 4096]).expect("write");
    assert!(device.queues[0].read(MIB, 4096).expect("read") == [1; 4096]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(700));
            fs::rename(&away, &segments).expect("bring the data back");
        });
        let found = device.queues[0].read(2 * MIB, 65536).expect("read when it is back");
        assert!(found == disk[2 * MIB as usize..][..65536]);
    });
    assert!(backend.control().stats().fetch_errors > 0);
}

/// The positions of a file's blocks on its disk: a pair of offsets for each block.
fn places(file: &Path) -> Vec<(u64, u64)> {
    let output = Command::new("filefrag").args(["-v", "-b4096"]).arg(file).output();
    let output = output.expect("filefrag runs").stdout;
    let text = String::from_utf8(output).expect("text");
    // `0:  0..  15:  34304..  34319:  16:`
    let numbers = |line: &str| -> Vec<u64> {
        let words = line.split(|c: char| !c.is_ascii_digit()).filter(|word| !word.is_empty());
        words.map_while(|word| word.parse().ok()).collect()
    };
    let extents = text.lines().filter(|line| line.contains("..")).map(numbers);
    extents
        .flat_map(|extent| {
            let (logical, physical) = (extent[1]..=extent[2], extent[3]..=extent[4]);
            logical.zip(physical).map(|(at, place)| (at * 4096, place * 4096))
        })
        .collect()
}

/// A disk of its own whose end can be lost, if the host permits it.
struct Fragile {
    image: PathBuf,
    place: PathBuf,
    _mounted: sys::Mounted,
}

impl Fragile {
    fn new(site: &Site) -> Option<Fragile> {
        let (image, place) = (site.path("device"), site.path("mounted"));
        fs::create_dir(&place).expect("a place to mount");
        fs::File::create(&image).and_then(|file| file.set_len(64 * MIB)).expect("a sparse file");
        // Without a journal, so that only data is bad.
        let made = Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-O", "^has_journal"])
            .arg(&image)
            .status();
        assert!(made.expect("mke2fs runs").success());
        match sys::mount_image(&image, &place, 512) {
            Ok(_mounted) => Some(Fragile { image, place, _mounted }),
            Err(error) => {
                eprintln!("skipped: no image can be mounted here: {error}");
                None
            }
        }
    }

    /// A loop device has no data beyond the end of its file. A write there creates some.
    fn lose_from(&self, offset: u64) {
        let file = fs::File::options().write(true).open(&self.image).expect("the device's file");
        file.set_len(offset).expect("lose data");
    }
}

#[test]
fn a_bad_block_is_fetched_again_unless_its_chunk_has_changed() {
    let site = Site::new();
    let Some(fragile) = Fragile::new(&site) else { return };
    let mut disk = random_disk(9, 8 * MIB);
    repository::import(&site.store(), IMAGE, CHUNK, &disk);
    let options = Options { mirror: fragile.place.join("mirror"), ..Options::new(&site) };
    let backend = Backend::start(&options);
    let mut device = backend.device(Shape::default());
    assert!(device.read_all() == disk);
    let mut places = places(&options.mirror.join("disk"));
    assert_eq!(places.len() as u64, 8 * MIB / 4096);
    places.sort_unstable_by_key(|(_, place)| *place);
    // The last chunk changes in its first block.
    let changed = places.last().expect("many").0 / u64::from(CHUNK) * u64::from(CHUNK);
    device.queues[0].write(changed, &[1; 4096]).expect("write");
    disk[changed as usize..][..4096].fill(1);
    device.queues[0].flush().expect("flush");

    fragile.lose_from(places[places.len() * 3 / 4].1);
    for at in (0..8 * MIB).step_by(CHUNK as usize).filter(|at| *at != changed) {
        let found = device.queues[0].read(at, CHUNK as usize).expect("read");
        assert!(found == disk[at as usize..][..CHUNK as usize], "at {at}");
    }
    let stats = backend.control().stats();
    assert!(stats.bad_blocks > 400 && stats.errors == 0, "{stats:?}");
    device.queues[0].read(changed + 4096, 4096).expect_err("read what is nowhere else");
    device.queues[0].write(changed, &[2; CHUNK as usize]).expect("write it again");
    disk[changed as usize..][..CHUNK as usize].fill(2);
    check_and_end(&site, backend, device, &disk);
}

#[test]
fn a_bad_block_that_is_absent_costs_no_checkpoint() {
    let site = Site::new();
    let Some(fragile) = Fragile::new(&site) else { return };
    let mut disk = random_disk(11, 2 * MIB);
    repository::import(&site.store(), IMAGE, CHUNK, &disk);
    let options = Options { mirror: fragile.place.join("mirror"), ..Options::new(&site) };
    let backend = Backend::start(&options);
    assert!(backend.device(Shape::default()).read_all() == disk);
    // The map does not know of fetched blocks.
    backend.kill_with_host();
    let first = places(&options.mirror.join("disk")).into_iter().map(|(_, place)| place).min();
    fragile.lose_from(first.expect("many"));
    let backend = Backend::start(&options);
    let mut device = backend.device(Shape::default());
    for at in (0..2 * MIB).step_by(CHUNK as usize) {
        device.queues[0].write(at, &[3; 4096]).expect("write");
        disk[at as usize..][..4096].fill(3);
    }
    check_and_end(&site, backend, device, &disk);
}

#[test]
fn after_the_hosts_death_only_regions_that_were_written_count_as_changed() {
    const REGION: u64 = 64 * MIB;
    let site = Site::new();
    let mut disk = vec![0; 3 * REGION as usize];
    // Something in each region, so that it is fetched.
    for region in 0..3 {
        disk[(region * REGION) as usize..][..MIB as usize]
            .copy_from_slice(&random_disk(region, MIB));
    }
    repository::import(&site.store(), IMAGE, CHUNK, &disk);
    let options = Options::new(&site);
    let backend = Backend::start(&options);
    let mut device = backend.device(Shape::default());
    for region in 0..3 {
        device.queues[0].read(region * REGION, MIB as usize).expect("read");
    }
    device.queues[0].write(REGION, &[1; 65536]).expect("write");
    disk[REGION as usize..][..65536].fill(1);
    device.queues[0].flush().expect("flush");
    drop(device);
    backend.kill_with_host();

    let backend = Backend::start(&options);
    let changed = backend.control().status().dirty_bytes;
    assert_eq!(changed, MIB, "what is local of the region that was written to");
    let mut device = backend.device(Shape::default());
    assert!(
        device.queues[0].read(REGION, MIB as usize).expect("read")
            == disk[REGION as usize..][..MIB as usize]
    );
    let number = backend.control().stable_checkpoint();
    assert!(repository::export(&site.store(), IMAGE, number) == disk, "the checkpoint");
    // Before the next checkpoint is stored, the map clears the regions in which nothing has
    // changed.
    backend.control().stable_checkpoint();
    drop(device);
    backend.kill_with_host();

    let backend = Backend::start(&options);
    assert_eq!(backend.control().status().dirty_bytes, 0);
    let mut device = backend.device(Shape::default());
    device.queues[0].write(2 * REGION, &[2; 65536]).expect("write");
    disk[2 * REGION as usize..][..65536].fill(2);
    let number = backend.control().stable_checkpoint();
    assert!(repository::export(&site.store(), IMAGE, number) == disk, "the next checkpoint");
    assert!(device.read_all() == disk, "the disk");
    drop(device);
    backend.terminate();
}

/// A mirror on a file system whose operations can fail, and an image of random content.
fn failing_mirror(site: &Site) -> (Mounted, Options, Vec<u8>) {
    let disk = random_disk(12, 2 * MIB);
    repository::import(&site.store(), IMAGE, CHUNK, &disk);
    let mounted = Mounted::new();
    let options = Options { mirror: mounted.root().join("vm1"), ..Options::new(site) };
    (mounted, options, disk)
}

/// A failed sync is like a power cut: the kernel reports it once, and drops what was not durable. So
/// no later sync counts, in this process or in the next.
#[test]
fn flushes_that_fail_for_ever_write_few_log_lines() {
    let site = Site::new();
    let (mounted, options, _) = failing_mirror(&site);
    let backend = Backend::start(&options);
    let mut device = backend.device(Shape::default());
    let queue = &mut device.queues[0];
    queue.write(0, &[1; 4096]).expect("write");
    mounted.fail_syncs("vm1/disk", 1);
    for _ in 0..500 {
        queue.flush().expect_err("the first sync failed");
    }
    drop(device);
    let log = backend.end_with_error();
    let errors = log.lines().filter(|line| line.contains("ERROR")).count();
    assert!((1..20).contains(&errors), "{errors} lines: {log}");
}

#[test]
fn after_a_failed_sync_nothing_counts_but_what_was_durable_before() {
    // The sync of a flush that writes the map, and the sync of a flush that need not.
    for is_map_current in [false, true] {
        for is_killed in [false, true] {
            let site = Site::new();
            let (mounted, options, mut disk) = failing_mirror(&site);
            let backend = Backend::start(&options);
            let mut device = backend.device(Shape::default());
            let queue = &mut device.queues[0];
            queue.write(0, &[1; 4096]).expect("write");
            queue.flush().expect("flush");
            disk[..4096].fill(1);
            if !is_map_current {
                queue.write(8192, &[2; 4096]).expect("write");
            }
            mounted.fail_syncs("vm1/disk", 1);
            queue.flush().expect_err("the sync fails");
            mounted.mark("failed");
            queue.flush().expect_err("nobody knows what is lost");
            queue.write(16384, &[3; 4096]).expect("write");
            queue.flush().expect_err("a flush that has to write the map");
            assert!(queue.read(16384, 4096).expect("read") == [3; 4096]);

            let mut control = backend.control();
            let reason = control.status().checkpoint_error.expect("the status has the reason");
            assert!(reason.contains("sync") && reason.contains("start"), "{reason}");
            let refused = control.checkpoint().expect_err("its content could be wrong");
            assert_eq!(refused.message, reason);
            drop(device);
            match is_killed {
                true => backend.kill(),
                false => {
                    let log = backend.end_with_error();
                    assert!(log.contains("closing the mirror"), "{log}");
                }
            }

            // A power cut leaves the same.
            let recording = mounted.recording().after("failed").sampled(4);
            let draw = Draw { seed: 1, images: 1, atom: 512 };
            let checked = check_all(&recording, draw, |root, _| {
                // Images are checked at the same time, and an image of a disk has one writer.
                let own = Site::new();
                let copied = Command::new("cp")
                    .arg("-r")
                    .args([site.repository(), own.repository()])
                    .status();
                assert!(copied.expect("start cp").success(), "copy the repository");
                let options = Options { mirror: root.join("vm1"), ..Options::new(&own) };
                let backend = Backend::start(&options);
                let found = backend.device(Shape::default()).read_all();
                assert!(found == disk, "only what was durable is there");
            });
            let images = checked.unwrap_or_else(|violation| panic!("{violation}"));
            assert!(images > 0, "no image was checked");

            // The files still show what was written, and none of it is used.
            let backend = Backend::start(&options);
            assert!(backend.log().contains("not stopped cleanly"), "{}", backend.log());
            let mut device = backend.device(Shape::default());
            assert!(device.read_all() == disk, "only what was durable is there");
            device.queues[0].write(8192, &[4; 4096]).expect("write");
            device.queues[0].flush().expect("flush");
            disk[8192..][..4096].fill(4);
            check_and_end(&site, backend, device, &disk);
        }
    }
}

/// A checkpoint that was accepted before a sync fails does not become stable: what it reads from the
/// mirror may be older than what the guest wrote.
#[test]
fn a_checkpoint_that_is_not_stable_fails_with_the_sync() {
    let site = Site::new();
    let (mounted, options, disk) = failing_mirror(&site);
    let backend = Backend::start(&options.clone().with(&["--commit-rate", "65536"]));
    let mut device = backend.device(Shape::default());
    for at in (0..2 * MIB).step_by(CHUNK as usize) {
        device.queues[0].write(at, &[5; 4096]).expect("write");
    }
    let mut control = backend.control();
    let number = control.checkpoint().expect("it is accepted").number;
    mounted.fail_syncs("vm1/disk", 1);
    device.queues[0].flush().expect_err("the sync fails");
    control.wait_until_quiet();
    let snapshot = repository::snapshot(&site.store(), IMAGE, number);
    let reason = snapshot.reason.clone().unwrap_or_default();
    assert!(snapshot.require_content().is_err() && reason.contains("sync"), "{snapshot:?}");
    drop(device);
    backend.kill();
    let backend = Backend::start(&options);
    let device = backend.device(Shape::default());
    check_and_end(&site, backend, device, &disk);
}

/// Linux drops what it cannot write, and a later read returns something else. A layer's table says
/// which old blocks are preserved, so a checkpoint whose table was not written may be wrong.
#[test]
fn a_checkpoint_whose_table_is_lost_fails_and_the_next_one_is_complete() {
    let site = Site::new();
    let (mounted, options, mut disk) = failing_mirror(&site);
    let backend = Backend::start(&options);
    let mut device = backend.device(Shape::default());
    device.queues[0].write(0, &[5; 4096]).expect("write");
    disk[..4096].fill(5);
    // The first epoch of a mirror is 1.
    mounted.fail_syncs("vm1/layer-1.table", 1);
    let mut control = backend.control();
    let number = control.checkpoint().expect("it is accepted").number;
    control.wait_until_quiet();
    let snapshot = repository::snapshot(&site.store(), IMAGE, number);
    let reason = snapshot.reason.clone().unwrap_or_default();
    assert!(snapshot.require_content().is_err() && reason.contains("old blocks"), "{snapshot:?}");
    check_and_end(&site, backend, device, &disk);
}

/// A write to a region that the map does not know waits for the map, and then fails, as on any disk
/// that fails. Flushes do not wait for it.
#[test]
fn a_map_that_cannot_be_written_delays_no_flush_and_fails_only_writes_to_new_regions() {
    let site = Site::new();
    let disk = random_disk(13, MIB);
    repository::create(&site.store(), IMAGE, CHUNK, 192 * MIB);
    let mounted = Mounted::new();
    let options = Options { mirror: mounted.root().join("vm1"), ..Options::new(&site) };
    let backend = Backend::start(&options);
    let mut device = backend.device(Shape { depth: 33, longest: MIB as usize, ..Shape::default() });
    let queue = &mut device.queues[0];
    queue.write(0, &disk).expect("write");
    queue.flush().expect("flush");
    mounted.fail_writes("vm1/map", true);
    let begin = Instant::now();
    let mut parked = Vec::new();
    for at in 0..32 {
        let slot = queue.take_slot().expect("enough slots");
        queue.fill(slot, Layout::PLAIN, &[9; 4096]);
        let offset = 64 * MIB * (1 + at % 2) + at * 4096;
        queue.submit(slot, Io::Write { offset, len: 4096 }, Layout::PLAIN);
        parked.push(slot);
    }
    let mut slowest = Duration::ZERO;
    let mut failed = 0;
    while begin.elapsed() < Duration::from_secs(5) {
        let slot = queue.take_slot().expect("enough slots");
        let since = Instant::now();
        queue.submit(slot, Io::Flush, Layout::PLAIN);
        for done in queue.reap(1) {
            assert_eq!(done.slot, slot, "a write ends early: {done:?}");
            done.result.expect("flush");
        }
        slowest = slowest.max(since.elapsed());
    }
    assert!(slowest < Duration::from_millis(500), "a flush took {slowest:?}");
    while failed < parked.len() {
        for done in queue.reap(1) {
            done.result.expect_err("a write whose region is not recorded");
            failed += 1;
        }
    }
    let took = begin.elapsed();
    assert!((Duration::from_secs(9)..Duration::from_secs(20)).contains(&took), "{took:?}");
    mounted.fail_writes("vm1/map", false);
    std::thread::sleep(Duration::from_secs(1));
    queue.write(64 * MIB, &[7; 4096]).expect("write when the map works again");
    queue.flush().expect("flush");
    let mut control = backend.control();
    let number = control.stable_checkpoint();
    let found = repository::export(&site.store(), IMAGE, number);
    assert!(found[..MIB as usize] == disk && found[64 * MIB as usize..][..4096] == [7; 4096]);
    drop(device);
    backend.terminate();
}
