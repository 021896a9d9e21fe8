//! Exports that are interrupted, that continue, and that change a file in place.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::lab::{Dice, Lab, TIMEOUT, random, with_seeds};
use crate::support::Place;

const MIB: usize = 1 << 20;
/// The chunk size of the tests' images.
const CHUNK: usize = 64 << 10;

/// Imports a disk with small chunks.
fn import(place: &Place, image: &str, disk: &[u8]) {
    fs::write(place.path("in.raw"), disk).unwrap();
    place.ok(&["import", "in.raw", image, "--chunk-size", "64K"]);
}

/// Inverts the first byte of a stored chunk.
fn flip(place: &Place, chunk: &[u8]) {
    let content = fs::read(place.segment()).unwrap();
    // Blobs begin at multiples of a block.
    let is_there = |at: &usize| content[at + 1..].starts_with(&chunk[1..64]);
    let at = (0..content.len()).step_by(4096).find(is_there).expect("the chunk is stored");
    let segment = OpenOptions::new().write(true).open(place.segment()).unwrap();
    segment.write_all_at(&[!content[at]], at as u64).unwrap();
}

/// The names in the directory that begin with `out.raw`, sorted.
fn files(place: &Place) -> Vec<String> {
    let names = fs::read_dir(place.dir.path()).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name.starts_with("out.raw")).collect();
    names.sort();
    names
}

/// The record of an interrupted export.
fn record(place: &Place) -> Option<Value> {
    serde_json::from_slice(&fs::read(place.path("out.raw.cairn-state")).ok()?).ok()
}

fn blocks(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks()
}

#[test]
fn an_export_continues_where_a_failed_one_ended() {
    let place = Place::new();
    let disk = random(1, 64 * CHUNK);
    import(&place, "vm1", &disk);
    let chunk = |number: usize| &disk[number * CHUNK..][..CHUNK];
    flip(&place, chunk(40));
    let run = place.run(&["export", "vm1", "out.raw"]);
    assert_eq!(run.code, 5, "{}", run.stderr);
    assert!(run.stderr.contains("the same command continues"), "{}", run.stderr);
    assert_eq!(files(&place), ["out.raw.cairn-part", "out.raw.cairn-state"]);
    assert_eq!(record(&place).unwrap()["durable_chunks"], 40);
    // What is durable is not read again.
    flip(&place, chunk(40));
    flip(&place, chunk(3));
    let run = place.run(&["export", "vm1@1", "out.raw"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stderr.contains("continuing an interrupted export"), "{}", run.stderr);
    assert!(fs::read(place.path("out.raw")).unwrap() == disk);
    assert_eq!(files(&place), ["out.raw"]);
}

#[test]
fn a_part_of_another_snapshot_is_not_continued() {
    let place = Place::new();
    let disk = random(1, 64 * CHUNK);
    import(&place, "vm1", &disk);
    place.ok(&["clone", "vm1@1", "clone"]);
    import(&place, "vm2", &random(2, 8 * CHUNK));
    flip(&place, &disk[40 * CHUNK..]);
    assert_eq!(place.run(&["export", "vm1", "out.raw"]).code, 5);
    let left = record(&place).unwrap();
    let run = place.run(&["export", "vm2", "out.raw"]);
    assert_eq!(run.code, 4, "{}", run.stderr);
    assert!(run.stderr.contains("`cairn export vm1@1 "), "{}", run.stderr);
    assert!(run.stderr.contains("--restart"), "{}", run.stderr);
    assert_eq!(record(&place).unwrap(), left);
    // A snapshot of another name with the same content.
    let run = place.run(&["export", "clone", "out.raw"]);
    assert!(run.code == 5 && run.stderr.contains("continuing"), "{}", run.stderr);
    place.ok(&["export", "vm2", "out.raw", "--restart"]);
    assert!(fs::read(place.path("out.raw")).unwrap() == random(2, 8 * CHUNK));
    assert_eq!(files(&place), ["out.raw"]);
}

#[test]
fn a_part_that_is_not_of_an_export_is_not_touched() {
    let place = Place::new();
    import(&place, "vm1", &random(1, CHUNK));
    let part = place.path("out.raw.cairn-part");
    fs::write(&part, "precious").unwrap();
    for state in [None, Some("{"), Some("{\"cairn_export\": 9}")] {
        if let Some(state) = state {
            fs::write(place.path("out.raw.cairn-state"), state).unwrap();
        }
        let run = place.run(&["export", "vm1", "out.raw"]);
        assert_eq!(run.code, 4, "{}", run.stderr);
        assert!(run.stderr.contains("cairn-part: "), "{}", run.stderr);
        assert_eq!(fs::read(&part).unwrap(), b"precious");
    }
    // An export that was killed before it wrote its record.
    fs::write(&part, "").unwrap();
    place.ok(&["export", "vm1", "out.raw"]);
    assert_eq!(files(&place), ["out.raw"]);
}

#[test]
fn one_export_at_a_time_writes_a_file() {
    let place = Place::new();
    import(&place, "vm1", &random(1, CHUNK));
    let part = File::create(place.path("out.raw.cairn-part")).unwrap();
    part.lock().unwrap();
    let run = place.run(&["export", "vm1", "out.raw"]);
    assert_eq!(run.code, 4, "{}", run.stderr);
    assert!(run.stderr.contains("another export is writing"), "{}", run.stderr);
    drop(part);
    place.ok(&["export", "vm1", "out.raw"]);
}

#[test]
fn a_killed_export_never_leaves_an_incomplete_file() {
    with_seeds(|seed| {
        let mut dice = Dice::new(seed);
        let place = Place::new();
        let disk = random(seed, 24 * MIB);
        import(&place, "vm1", &disk);
        for _ in 0..6 {
            let mut export = place.command(&["export", "vm1", "out.raw"]).spawn().unwrap();
            thread::sleep(Duration::from_micros(dice.below(150_000)));
            export.kill().unwrap();
            let status = export.wait().unwrap();
            let is_there = place.path("out.raw").exists();
            assert!(is_there || !status.success());
            if is_there {
                assert!(fs::read(place.path("out.raw")).unwrap() == disk);
                fs::remove_file(place.path("out.raw")).unwrap();
            }
        }
        place.ok(&["export", "vm1", "out.raw"]);
        assert!(fs::read(place.path("out.raw")).unwrap() == disk);
        assert_eq!(files(&place), ["out.raw"]);
    });
}

/// Peers that stop in the middle of an export, so that it can be killed there.
#[test]
fn an_export_continues_after_a_kill() {
    let mut lab = Lab::new(1);
    let disk = lab.random_disk("in.raw", 1, 64 * MIB);
    lab.ok(&["import", "in.raw", "vm1", "--redundancy", "replicas=1", "--chunk-size", "64K"]);
    let begin = Instant::now();
    let part = lab.place.path("out.raw.cairn-part");
    loop {
        assert!(begin.elapsed() < TIMEOUT, "no export was interrupted in the middle");
        let mut export = lab.operator().command(&["export", "vm1", "out.raw"]).spawn().unwrap();
        // A chunk in the middle is written, so that many before it are.
        let is_written = || {
            let mut bytes = [0; 16];
            let file = File::open(&part);
            file.is_ok_and(|file| file.read_at(&mut bytes, 100 * CHUNK as u64).is_ok())
                && bytes != [0; 16]
        };
        while !is_written() && export.try_wait().unwrap().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        lab.peers[0].as_ref().unwrap().signal(19);
        let saved =
            || record(&lab.place).is_some_and(|state| state["durable_chunks"].as_u64() > Some(0));
        let stopped = Instant::now();
        while !saved()
            && export.try_wait().unwrap().is_none()
            && stopped.elapsed() < Duration::from_secs(5)
        {
            thread::sleep(Duration::from_millis(10));
        }
        export.kill().unwrap();
        export.wait().unwrap();
        lab.peers[0].as_ref().unwrap().signal(18);
        if saved() && part.exists() {
            break;
        }
        let _ = fs::remove_file(lab.place.path("out.raw"));
    }
    assert!(!lab.place.path("out.raw").exists());
    let run = lab.run(&["export", "vm1", "out.raw"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stderr.contains("continuing an interrupted export"), "{}", run.stderr);
    assert!(fs::read(lab.place.path("out.raw")).unwrap() == disk);
    assert_eq!(files(&lab.place), ["out.raw"]);
    lab.kill(0);
}

#[test]
fn a_snapshot_that_is_removed_and_collected_meanwhile_is_exported_completely() {
    let place = Place::new();
    let disk = random(1, 40 * MIB);
    fs::write(place.path("in.raw"), &disk).unwrap();
    place.ok(&["import", "in.raw", "vm1"]);
    let mut export = place.command(&["export", "vm1", "-"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut out = export.stdout.take().unwrap();
    let mut found = vec![0; 1000];
    // The export waits here, because nobody reads the rest.
    out.read_exact(&mut found).unwrap();
    place.ok(&["rm", "vm1"]);
    let report = place.json(&["gc", "--grace", "0s"]);
    assert_eq!(report["freed_bytes"], 0, "{report}");
    out.read_to_end(&mut found).unwrap();
    assert!(export.wait().unwrap().success());
    assert!(found == disk);
    let report = place.json(&["gc", "--grace", "0s"]);
    assert!(report["freed_bytes"].as_u64().unwrap() >= disk.len() as u64, "{report}");
}

#[test]
fn a_reader_that_goes_away_ends_the_export() {
    let place = Place::new();
    import(&place, "vm1", &random(1, 8 * MIB));
    let mut export = place.command(&["export", "vm1", "-"]);
    let mut export = export.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(export.stdout.take());
    let output = export.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_replaced_file_is_as_sparse_as_the_snapshot() {
    let place = Place::new();
    let disk = place.disk("in.raw");
    place.ok(&["import", "in.raw", "vm1"]);
    fs::write(place.path("real.raw"), vec![1; 8 * MIB]).unwrap();
    symlink("real.raw", place.path("out.raw")).unwrap();
    place.ok(&["export", "vm1", "out.raw", "--force"]);
    assert!(fs::read(place.path("real.raw")).unwrap() == disk);
    assert!(place.path("out.raw").is_symlink());
    assert!(blocks(&place.path("real.raw")) <= blocks(&place.path("in.raw")));
}

#[test]
fn blocks_of_zeros_between_data_are_holes() {
    let place = Place::new();
    let mut disk = random(1, 64 * CHUNK);
    let mut zeros = 0;
    for (number, chunk) in disk.chunks_mut(CHUNK).enumerate() {
        let len = 4096 * (number % 8);
        chunk[8192..8192 + len].fill(0);
        zeros += len as u64;
    }
    import(&place, "vm1", &disk);
    place.ok(&["export", "vm1", "out.raw"]);
    assert!(fs::read(place.path("out.raw")).unwrap() == disk);
    let most = (disk.len() as u64 - zeros) / 512 + 64;
    assert!(blocks(&place.path("out.raw")) <= most, "{} > {most}", blocks(&place.path("out.raw")));
}

/// Two disks: the second one has other data in some chunks, and zeros in others.
fn versions() -> [Vec<u8>; 2] {
    let old = random(1, 64 * CHUNK);
    let mut new = old.clone();
    new[5 * CHUNK..6 * CHUNK].copy_from_slice(&random(2, CHUNK));
    new[7 * CHUNK..20 * CHUNK].fill(0);
    new[30 * CHUNK + 4096..31 * CHUNK - 4096].fill(0);
    [old, new]
}

#[test]
fn an_update_writes_only_what_differs() {
    let place = Place::new();
    let [old, mut new] = versions();
    import(&place, "old", &old);
    import(&place, "new", &new);
    place.ok(&["export", "old", "out.raw"]);
    let before = blocks(&place.path("out.raw"));
    // A change in a chunk that both snapshots have stays, because the chunk is not written.
    let file = OpenOptions::new().write(true).open(place.path("out.raw")).unwrap();
    file.write_all_at(b"changed", 40 * CHUNK as u64).unwrap();
    new[40 * CHUNK..][..7].copy_from_slice(b"changed");
    let printed = place.json(&["export", "new", "out.raw", "--base", "old@1"]);
    assert_eq!(printed["image"], "new");
    assert!(fs::read(place.path("out.raw")).unwrap() == new);
    assert_eq!(files(&place), ["out.raw"]);
    let holes = (13 * CHUNK + CHUNK - 2 * 4096) as u64 / 512;
    assert!(blocks(&place.path("out.raw")) + holes <= before + 16, "the zeros are holes");
}

#[test]
fn an_update_may_change_the_size() {
    let place = Place::new();
    let [old, mut new] = versions();
    new.extend(random(3, 1000 * CHUNK + 512));
    import(&place, "small", &old);
    import(&place, "large", &new);
    place.ok(&["export", "small", "out.raw"]);
    place.ok(&["export", "large", "out.raw", "--base", "small"]);
    assert!(fs::read(place.path("out.raw")).unwrap() == new);
    place.ok(&["export", "small", "out.raw", "--base", "large"]);
    assert!(fs::read(place.path("out.raw")).unwrap() == old);
}

/// Neither snapshot has content between the end of the first one, in the middle of a chunk, and that of
/// the second one. The device has.
#[test]
fn an_update_of_a_device_to_a_larger_disk_leaves_no_old_bytes() {
    let place = Place::new();
    let small = random(1, 2 * CHUNK - 4096);
    let mut large = small.clone();
    large.resize(20 * CHUNK, 0);
    import(&place, "small", &small);
    import(&place, "large", &large);
    let backing = place.path("backing");
    fs::write(&backing, vec![0xee; large.len() + MIB]).unwrap();
    let device = LoopDevice::of(&backing);
    place.ok(&["export", "small", &device.0, "--force"]);
    place.ok(&["export", "large", &device.0, "--base", "small"]);
    let mut found = vec![0; large.len() + MIB];
    File::open(&device.0).unwrap().read_exact(&mut found).unwrap();
    large.resize(large.len() + MIB, 0xee);
    assert!(found == large);
}

#[test]
fn a_replaced_file_keeps_its_mode_and_is_not_in_use() {
    let place = Place::new();
    let disk = random(1, 3 * CHUNK);
    import(&place, "vm1", &disk);
    place.ok(&["export", "vm1", "out.raw"]);
    let mode = |mode| fs::set_permissions(place.path("out.raw"), PermissionsExt::from_mode(mode));
    mode(0o640).unwrap();
    let before = fs::metadata(place.path("out.raw")).unwrap();
    // As the process of a mirror does with the mirror's data.
    let used = File::open(place.path("out.raw")).unwrap();
    used.lock().unwrap();
    let run = place.run(&["export", "vm1", "out.raw", "--force"]);
    assert!(run.code == 4 && run.stderr.contains("another process uses"), "{}", run.stderr);
    assert_eq!(fs::metadata(place.path("out.raw")).unwrap().ino(), before.ino());
    assert_eq!(files(&place), ["out.raw"]);
    drop(used);
    place.ok(&["export", "vm1", "out.raw", "--force"]);
    let after = fs::metadata(place.path("out.raw")).unwrap();
    assert_ne!(after.ino(), before.ino());
    assert_eq!((after.mode(), after.uid()), (before.mode(), before.uid()));
}

#[test]
fn a_file_with_the_name_of_standard_output_is_not_written() {
    let place = Place::new();
    let disk = random(1, 3 * CHUNK);
    import(&place, "vm1", &disk);
    fs::write(place.path("-"), "a file").unwrap();
    let run = place.command(&["export", "vm1", "-", "--force"]).output().unwrap();
    assert!(run.status.success() && run.stdout == disk);
    assert_eq!(fs::read(place.path("-")).unwrap(), b"a file");
    symlink(place.path("nowhere"), place.path("out.raw")).unwrap();
    for force in [&[][..], &["--force"]] {
        let run = place.run(&[&["export", "vm1", "out.raw"], force].concat());
        assert!(run.code == 4 && run.stderr.contains("remove the link"), "{}", run.stderr);
    }
    assert_eq!(files(&place), ["out.raw"]);
}

#[test]
fn an_interrupted_update_is_completed_by_the_same_command() {
    let place = Place::new();
    let [old, new] = versions();
    import(&place, "old", &old);
    import(&place, "new", &new);
    place.ok(&["export", "old", "out.raw"]);
    flip(&place, &new[5 * CHUNK..]);
    let update = ["export", "new", "out.raw", "--base", "old"];
    let run = place.run(&update);
    assert_eq!(run.code, 5, "{}", run.stderr);
    assert!(run.stderr.contains("part way between old@1 and new@1"), "{}", run.stderr);
    assert_eq!(files(&place), ["out.raw", "out.raw.cairn-update"]);
    let run = place.run(&["export", "old", "out.raw", "--base", "new"]);
    assert_eq!(run.code, 4, "{}", run.stderr);
    assert!(run.stderr.contains("--base old@1`"), "{}", run.stderr);
    assert!(run.stderr.contains("--force"), "{}", run.stderr);
    flip(&place, &new[5 * CHUNK..]);
    place.ok(&update);
    assert!(fs::read(place.path("out.raw")).unwrap() == new);
    assert_eq!(files(&place), ["out.raw"]);
}

#[test]
fn a_file_that_is_part_way_can_be_replaced() {
    let place = Place::new();
    let [old, new] = versions();
    import(&place, "old", &old);
    import(&place, "new", &new);
    place.ok(&["export", "old", "out.raw"]);
    flip(&place, &new[5 * CHUNK..]);
    assert_eq!(place.run(&["export", "new", "out.raw", "--base", "old"]).code, 5);
    place.ok(&["export", "old", "out.raw", "--force"]);
    assert!(fs::read(place.path("out.raw")).unwrap() == old);
    assert_eq!(files(&place), ["out.raw"]);
}

#[test]
fn a_killed_update_is_repaired() {
    with_seeds(|seed| {
        let mut dice = Dice::new(seed);
        let place = Place::new();
        let (old, new) = (random(seed, 16 * MIB), random(seed + 1, 16 * MIB));
        import(&place, "old", &old);
        import(&place, "new", &new);
        place.ok(&["export", "old", "out.raw"]);
        let update = ["export", "new", "out.raw", "--base", "old"];
        for _ in 0..4 {
            let mut export = place.command(&update).spawn().unwrap();
            thread::sleep(Duration::from_micros(dice.below(120_000)));
            export.kill().unwrap();
            let ended = export.wait().unwrap();
            let found = fs::read(place.path("out.raw")).unwrap();
            let is_part_way = place.path("out.raw.cairn-update").exists();
            assert!(is_part_way || found == old || found == new);
            assert!(!ended.success() || found == new);
        }
        place.ok(&update);
        assert!(fs::read(place.path("out.raw")).unwrap() == new);
        assert_eq!(files(&place), ["out.raw"]);
    });
}

#[test]
fn a_base_that_the_file_cannot_hold_is_refused() {
    let place = Place::new();
    let [old, new] = versions();
    import(&place, "old", &old);
    import(&place, "new", &new);
    place.ok(&["import", "in.raw", "other", "--chunk-size", "128K"]);
    fs::write(place.path("out.raw"), &old[512..]).unwrap();
    for (args, code, why) in [
        (&["new", "out.raw", "--base", "old"][..], 4, "does not hold the base"),
        (&["new", "missing.raw", "--base", "old"], 3, "leave out --base"),
        (&["new", "out.raw", "--base", "gone@1"], 3, "gone"),
        (&["new", "out.raw", "--base", "other"], 2, "chunks of the same size"),
        (&["new", "-", "--base", "old"], 2, "--base"),
        (&["new", "out.raw", "--base", "old", "--force"], 2, "--force"),
    ] {
        let run = place.run(&[&["export"], args].concat());
        assert_eq!(run.code, code, "{args:?}: {}", run.stderr);
        assert!(run.stderr.contains(why), "{args:?}: {}", run.stderr);
        assert!(fs::read(place.path("out.raw")).unwrap() == old[512..]);
        assert_eq!(files(&place), ["out.raw"]);
    }
}

/// A loop device, detached when this is dropped.
struct LoopDevice(String);

impl LoopDevice {
    fn of(file: &Path) -> LoopDevice {
        let mut command = std::process::Command::new("losetup");
        let output = command.args(["--find", "--show"]).arg(file).output();
        let output = output.expect("losetup is in the package util-linux");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        LoopDevice(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_block_device_gets_zeros_where_the_snapshot_has_holes() {
    let place = Place::new();
    let [old, new] = versions();
    import(&place, "old", &old);
    import(&place, "new", &new);
    let backing = place.path("backing");
    fs::write(&backing, vec![0xee; new.len() + MIB]).unwrap();
    let device = LoopDevice::of(&backing);
    let path = device.0.as_str();
    let run = place.run(&["export", "new", path]);
    assert_eq!(run.code, 4, "{}", run.stderr);
    assert!(run.stderr.contains("block device; use --force"), "{}", run.stderr);
    let check = |expected: &[u8]| {
        let mut found = vec![0; expected.len() + MIB];
        File::open(path).unwrap().read_exact(&mut found).unwrap();
        assert!(found[..expected.len()] == *expected);
        assert!(found[expected.len()..] == [0xee; MIB], "what is behind the disk has changed");
    };
    place.ok(&["export", "new", path, "--force"]);
    check(&new);
    place.ok(&["export", "old", path, "--base", "new"]);
    check(&old);
    place.ok(&["export", "new", path, "--base", "old"]);
    check(&new);

    let run = {
        let mut options = OpenOptions::new();
        let _held = options.read(true).custom_flags(libc::O_EXCL).open(path).unwrap();
        place.run(&["export", "old", path, "--base", "new"])
    };
    assert!(run.code == 1 && run.stderr.contains("busy"), "{} {}", run.code, run.stderr);
    check(&new);

    import(&place, "large", &random(9, new.len() + 2 * MIB));
    let run = place.run(&["export", "large", path, "--force"]);
    assert_eq!(run.code, 4, "{}", run.stderr);
    assert!(run.stderr.contains("use a larger device"), "{}", run.stderr);
    check(&new);
}
