//! What happens to a mirror's image and repository while the mirror is in use.

mod support;

use std::fs;
use std::time::{Duration, Instant};

use cairn_agent::Event;
use cairn_store::{ErrorKind, SnapshotRef};
use seeded_rng::Rng;
use support::backend::{Backend, IMAGE, Options, Site, run};
use support::device::Shape;
use support::repository;
use support::sys;

const CHUNK: u32 = 64 << 10;

fn random_disk(seed: u64, len: usize) -> Vec<u8> {
    let mut disk = vec![0; len];
    Rng::new(seed).fill(&mut disk);
    disk
}

#[test]
fn a_full_repository_fails_the_checkpoint_and_not_the_guest() {
    let site = Site::new();
    let small = site.path("small");
    fs::create_dir(&small).expect("a place to mount");
    let _mounted = match sys::mount_tmpfs(&small, 40 << 20) {
        Ok(mounted) => mounted,
        Err(error) => {
            eprintln!("skipped: a small file system cannot be mounted here: {error}");
            return;
        }
    };
    let store = format!("dir:{}", small.join("repository").display());
    repository::create(&store, IMAGE, CHUNK, 16 << 20);
    let options = Options::new(&site).with(&["--commit-retry", "1"]);
    let backend = Backend::start(&Options { store: store.clone(), ..options });
    let mut device = backend.device(Shape::default());
    let mut disk = random_disk(3, 16 << 20);
    let mut control = backend.control();
    for (at, part) in (0..).step_by(1 << 20).zip(disk.chunks(1 << 20)) {
        device.queues[0].write(at, part).expect("write");
        if at == 1 << 20 {
            control.stable_checkpoint();
        }
    }
    let ballast = small.join("ballast");
    fs::write(&ballast, vec![1; 30 << 20]).expect("fill the file system");
    let failed = match control.checkpoint_to_the_end() {
        Event::Failed(failed) => failed,
        other => panic!("14 MiB went into less than 10: {other:?}"),
    };
    assert!(!failed.reason.is_empty(), "{failed:?}");
    let listed = control.list();
    let line = listed.iter().find(|line| line.snapshot == failed.snapshot);
    assert!(line.is_none_or(|line| line.state == "failed"), "{line:?}");
    // The guest notices nothing.
    assert!(device.read_all() == disk, "the disk after a failed checkpoint");
    device.queues[0].write(8192, &[1; 4096]).expect("write");
    device.queues[0].flush().expect("flush");
    disk[8192..][..4096].fill(1);

    // The changes of the failed checkpoint come with the next one.
    fs::remove_file(ballast).expect("make space");
    let number = control.stable_checkpoint();
    assert!(repository::export(&store, IMAGE, number) == disk, "the next checkpoint");
    drop(device);
    backend.terminate();
}

#[test]
fn an_image_in_use_can_be_cloned_and_keeps_what_it_needs() {
    let site = Site::new();
    let disk = random_disk(5, 4 << 20);
    repository::import(&site.store(), IMAGE, CHUNK, &disk);
    let backend = Backend::start(&Options::new(&site));
    let mut device = backend.device(Shape::default());
    device.queues[0].write(0, &[7; 65536]).expect("write");
    let number = backend.control().stable_checkpoint();

    let store = repository::open(&site.store());
    let name = repository::image(IMAGE);
    store
        .clone_snapshot(&SnapshotRef::number(&name, number), &repository::image("twin"))
        .expect("clone");
    let refusal = store.remove_image(&name, true).expect_err("the image has a live writer");
    assert_eq!(refusal.kind(), ErrorKind::Conflict, "{refusal}");
    store.remove_snapshot(&SnapshotRef::number(&name, 1)).expect("an old snapshot can go");

    // The clone is another disk, which is served next to the first one.
    let twin = Options { image: "twin".into(), ..Options::named(&site, "twin") };
    let twin = Backend::start(&twin);
    let mut other = twin.device(Shape::default());
    other.queues[0].write(1 << 20, &[9; 4096]).expect("write the clone");
    let mut expected = disk.clone();
    expected[..65536].fill(7);
    assert!(device.read_all() == expected, "the first disk");
    expected[1 << 20..][..4096].fill(9);
    assert!(other.read_all() == expected, "its clone");
    let number = twin.control().stable_checkpoint();
    assert!(repository::export(&site.store(), "twin", number) == expected, "the clone's snapshot");
    drop((device, other));
    backend.terminate();
    twin.terminate();
}

#[test]
fn a_snapshot_can_be_served_again_elsewhere() {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, 4 << 20);
    let first = Backend::start(&Options::new(&site));
    let mut device = first.device(Shape::default());
    device.queues[0].write(12345 * 512, &[3; 512]).expect_err("beyond the end");
    device.queues[0].write(1000 * 512, &[3; 512]).expect("write");
    let number = first.control().stable_checkpoint();
    device.queues[0].write(1000 * 512, &[4; 512]).expect("write after the checkpoint");
    drop(device);
    first.terminate();
    let image = format!("{IMAGE}@{number}");
    let second = Backend::start(&Options { image, ..Options::named(&site, "elsewhere") });
    let mut device = second.device(Shape::default());
    assert_eq!(device.queues[0].read(1000 * 512, 512).expect("read"), [3; 512]);
    assert_eq!(device.queues[0].read(0, 512).expect("read"), [0; 512]);
    drop(device);
    second.terminate();
}

#[test]
fn a_disk_says_which_other_mirror_may_have_writes_that_it_lacks() {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, 4 << 20);
    let start = |name: &str, extra: &[&str]| {
        let backend = Backend::start(&Options::named(&site, name).with(extra));
        let log = backend.log();
        let mut warnings =
            log.lines().filter(|line| line.contains("written before through another mirror"));
        let warning = warnings.next().map(str::to_owned);
        assert!(warnings.next().is_none(), "more than one line: {log}");
        (backend, warning)
    };
    let (first, warning) = start("first", &[]);
    assert_eq!(warning, None, "there is no other mirror");
    let mut device = first.device(Shape::default());
    let number = first.control().stable_checkpoint();
    device.queues[0].write(0, &[7; 4096]).expect("write after the checkpoint");
    drop(device);
    first.terminate();
    let (first, warning) = start("first", &[]);
    assert_eq!(warning, None, "the same mirror goes on");
    first.terminate();
    let (reader, warning) = start("reader", &["--read-only"]);
    assert_eq!(warning, None, "a reader has a snapshot, and wants no more");
    reader.terminate();

    let (second, warning) = start("second", &[]);
    let warning = warning.expect("the first mirror has a write that is in no snapshot");
    let path = fs::canonicalize(site.path("first")).expect("a path");
    let parts = [format!("path=\"{}\"", path.display()), format!("after {IMAGE}@{number} ")];
    assert!(parts.iter().all(|part| warning.contains(part)), "{parts:?}: {warning}");
    second.terminate();
    let (second, warning) = start("second", &[]);
    assert_eq!(warning, None, "it was said when the mirror was new");
    second.terminate();
}

#[test]
fn checkpoints_of_an_unchanged_disk_cost_nothing() {
    let site = Site::new();
    repository::import(&site.store(), IMAGE, CHUNK, &random_disk(6, 1 << 20));
    let backend = Backend::start(&Options::new(&site));
    let mut control = backend.control();
    let mut last = 1;
    for _ in 0..3 {
        match control.checkpoint_to_the_end() {
            Event::Stable(stable) => {
                assert_eq!((stable.dirty_bytes, stable.stored_bytes), (0, 0));
                assert!(stable.number > last, "numbers ascend");
                last = stable.number;
            }
            other => panic!("a checkpoint ended with {other:?}"),
        }
    }
    let first = repository::snapshot(&site.store(), IMAGE, 1);
    let same = repository::snapshot(&site.store(), IMAGE, last);
    assert_eq!(first.root, same.root, "equal content, equal root");
    backend.terminate();
}

/// While the checkpoint is stored, more is overwritten than the copy-on-write memory holds.
#[test]
fn copies_that_find_no_memory_go_to_the_disk() {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, 64 << 20);
    let backend = Backend::start(&Options::new(&site).with(&["--cow-memory", "1"]));
    let mut device = backend.device(Shape::default());
    let disk = random_disk(5, 64 << 20);
    let parts = || (0..).step_by(1 << 20).zip(disk.chunks(1 << 20));
    for (at, part) in parts() {
        device.queues[0].write(at, part).expect("write");
    }
    let mut control = backend.control();
    let accepted = control.checkpoint().expect("a checkpoint");
    // From the end, so that persist is not there first.
    for (at, part) in parts().collect::<Vec<_>>().into_iter().rev() {
        let inverted: Vec<u8> = part.iter().map(|byte| !byte).collect();
        device.queues[0].write(at, &inverted).expect("overwrite");
    }
    control.wait_until_quiet();
    let stats = control.stats();
    assert!(stats.spilled > 0, "{stats:?}");
    let mirror = site.path("disk");
    let memory = std::fs::metadata(mirror.join("live-state/cow-memory")).expect("a file");
    assert_eq!(memory.len(), 0, "memory has no copy any more");
    let has_layers = || {
        let mut files = std::fs::read_dir(&mirror).expect("the mirror");
        files.any(|file| file.expect("a file").file_name().to_string_lossy().contains("layer-"))
    };
    let begin = Instant::now();
    while has_layers() {
        assert!(begin.elapsed() < Duration::from_secs(20), "a spill file is left");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(repository::export(&site.store(), IMAGE, accepted.number) == disk, "the snapshot");
    let inverted: Vec<u8> = disk.iter().map(|byte| !byte).collect();
    assert!(device.read_all() == inverted, "the disk");
}

/// A process of another container cannot be seen, so its lease tells nothing about its end. The
/// lock on the mirror's data file does.
#[test]
fn a_mirror_goes_on_at_once_after_its_process_has_died_in_another_container() {
    let site = Site::new();
    let image = repository::create(&site.store(), IMAGE, CHUNK, 4 << 20);
    let options = Options::new(&site);
    let backend = Backend::start(&options);
    backend.device(Shape::default()).queues[0].write(0, &[7; 4096]).expect("write");
    backend.kill();
    repository::edit_lease_process(&site, &image, "pid_namespace", 1.into());
    let backend = Backend::start(&options);
    let mut control = backend.control();
    control.stable_checkpoint();
    backend.terminate();
}

#[test]
fn a_lease_that_cannot_be_seen_is_not_taken_over_with_a_copy_or_from_another_host() {
    let site = Site::new();
    let image = repository::create(&site.store(), IMAGE, CHUNK, 4 << 20);
    let options = Options::new(&site);
    let backend = Backend::start(&options);
    repository::edit_lease_process(&site, &image, "pid_namespace", 1.into());
    let refused = |options: &Options| {
        let ended = run(&options.arguments());
        assert_eq!(ended.status.code(), Some(4), "{}", ended.message);
        assert!(ended.message.contains("is in use by"), "{}", ended.message);
    };
    let copy = Options { live: site.path("live-of-copy"), ..Options::named(&site, "copy") };
    fs::create_dir(&copy.mirror).expect("a directory for the copy");
    for entry in fs::read_dir(&options.mirror).expect("list the mirror") {
        let from = entry.expect("list the mirror").path();
        if from.is_file() {
            let to = copy.mirror.join(from.file_name().expect("a name"));
            fs::copy(&from, to).expect("copy the mirror");
        }
    }
    // The copy has the id of the mirror, and a data file with a lock of its own.
    refused(&copy);
    backend.kill();
    refused(&copy);
    // What the host's name for the file says is nothing on another host.
    repository::edit_lease_process(&site, &image, "boot_id", "elsewhere".into());
    refused(&options);
}

/// Ends the reference of all mirrors, as its expiry does.
fn expire_mirrors(site: &Site) {
    let path = site.repository().join("catalog.db");
    let catalog = rusqlite::Connection::open(path).expect("the catalog");
    catalog.execute("DELETE FROM documents WHERE key LIKE 'mirrors/%'", []).expect("expire");
}

fn has_mirror(site: &Site) -> bool {
    !repository::open(&site.store()).catalog().mirrors().expect("list").is_empty()
}

/// The process was suspended for so long that its reference ended, its parent was removed, and a
/// collection ran. It must serve nothing wrong, and publish nothing.
#[test]
fn an_ephemeral_disk_that_was_away_for_too_long_fails_and_is_never_wrong() {
    let site = Site::new();
    let disk = random_disk(7, 4 << 20);
    let parent = repository::import(&site.store(), IMAGE, CHUNK, &disk);
    let other = repository::publish_empty(&site.store(), IMAGE);
    let options = Options { image: format!("{IMAGE}@1"), ..Options::new(&site) };
    let options = options.with(&["--ephemeral", "--fetch-retry", "1", "--commit-retry", "1"]);
    let backend = Backend::start(&options);
    let mut device = backend.device(Shape::default());
    device.queues[0].write(0, &[7; 65536]).expect("write");
    assert!(device.queues[0].read(1 << 20, 4096).expect("read") == disk[1 << 20..][..4096]);
    assert!(has_mirror(&site));
    backend.while_stopped(|| {
        expire_mirrors(&site);
        let store = repository::open(&site.store());
        store.remove_snapshot(&parent.name()).expect("nothing refers to it");
        let options = cairn_store::maintenance::collection::CollectionOptions::default();
        let report =
            cairn_store::maintenance::collection::collect(&store, &options, &|_| ()).expect("gc");
        assert!(report.freed.bytes >= 4 << 20, "{report:?}");
    });
    // What is local is right, and the rest is an error.
    assert!(device.queues[0].read(0, 65536).expect("a local read") == [7; 65536]);
    assert!(device.queues[0].read(1 << 20, 4096).expect("a local read") == disk[1 << 20..][..4096]);
    device.queues[0].read(2 << 20, 4096).expect_err("its content is gone");
    match backend.control().checkpoint_to_the_end() {
        Event::Failed(failed) => assert!(failed.reason.contains("does not refer"), "{failed:?}"),
        other => panic!("a checkpoint without its parent: {other:?}"),
    }
    drop(device);
    backend.terminate();
    assert!(!has_mirror(&site));
    // Nor does the next process go on. The newest snapshot is not what the mirror continues.
    let ended = run(&Options { image: IMAGE.into(), ..options }.arguments());
    assert_eq!(ended.status.code(), Some(4), "{}", ended.message);
    assert!(ended.message.contains(&parent.name().to_string()), "{}", ended.message);
    assert!(repository::export(&site.store(), IMAGE, other).iter().all(|byte| *byte == 0));
}

#[test]
fn an_ephemeral_disk_is_forgotten_at_a_stop_and_goes_on_while_its_parent_exists() {
    let site = Site::new();
    let mut disk = random_disk(8, 4 << 20);
    repository::import(&site.store(), IMAGE, CHUNK, &disk);
    let options = Options::new(&site).with(&["--ephemeral"]);
    let mut write = |backend: &Backend, at: usize, fill: u8| {
        let mut device = backend.device(Shape::default());
        device.queues[0].write(at as u64, &[fill; 65536]).expect("write");
        disk[at..][..65536].fill(fill);
        assert!(device.read_all() == disk, "the disk after write {fill}");
        disk.clone()
    };
    let backend = Backend::start(&options);
    write(&backend, 0, 1);
    backend.control().stable_checkpoint();
    write(&backend, 1 << 20, 2);
    assert!(has_mirror(&site));
    backend.terminate();
    assert!(!has_mirror(&site), "it is forgotten at once");

    let backend = Backend::start(&options);
    write(&backend, 2 << 20, 3);
    backend.kill();
    assert!(has_mirror(&site), "the same mirror may go on");
    expire_mirrors(&site);
    let backend = Backend::start(&options);
    let expected = write(&backend, 3 << 20, 4);
    let number = backend.control().stable_checkpoint();
    assert!(repository::export(&site.store(), IMAGE, number) == expected);
    backend.kill();
    // Another mirror has taken the image since: this one does not roll it back.
    expire_mirrors(&site);
    repository::publish_empty(&site.store(), IMAGE);
    let ended = run(&options.arguments());
    assert_eq!(ended.status.code(), Some(4), "{}", ended.message);
    assert!(ended.message.contains(&format!("{IMAGE}@{number}")), "{}", ended.message);
}

#[test]
fn an_ephemeral_reader_is_forgotten_when_it_stops() {
    let site = Site::new();
    let disk = random_disk(9, 1 << 20);
    repository::import(&site.store(), IMAGE, CHUNK, &disk);
    let backend = Backend::start(&Options::new(&site).with(&["--ephemeral", "--read-only"]));
    let mut device = backend.device(Shape { read_only: true, ..Shape::default() });
    assert!(device.read_all() == disk);
    assert!(has_mirror(&site));
    drop(device);
    backend.terminate();
    assert!(!has_mirror(&site));
}
