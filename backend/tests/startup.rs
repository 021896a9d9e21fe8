//! Starts that must fail, and how: soon, with a non-zero exit code, and with a message that says
//! what is wrong.

mod support;

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use seeded_rng::Rng;
use support::backend::{Backend, Ended, IMAGE, Options, Site, run, run_with};
use support::device::{Device, Shape};
use support::repository;
use support::sys;

const CHUNK: u32 = 64 << 10;
const SIZE: usize = 4 << 20;

fn random_disk(seed: u64, len: usize) -> Vec<u8> {
    let mut disk = vec![0; len];
    Rng::new(seed).fill(&mut disk);
    disk
}

fn site_with_an_image() -> Site {
    let site = Site::new();
    repository::import(&site.store(), IMAGE, CHUNK, &random_disk(1, SIZE));
    site
}

/// Checks that the start failed soon, without a panic, and with a message that contains `word`.
fn refused(ended: &Ended, words: &[&str]) {
    assert!(!ended.status.success(), "it ended well: {ended:?}");
    assert!(ended.status.code().is_some(), "a signal ended it: {ended:?}");
    assert!(ended.after < Duration::from_secs(12), "it took {:?}", ended.after);
    let message = ended.message.to_lowercase();
    assert!(!message.contains("panicked"), "{}", ended.message);
    for word in words {
        assert!(message.contains(&word.to_lowercase()), "no {word:?} in: {}", ended.message);
    }
}

#[test]
fn a_wrong_command_line_is_refused() {
    let site = site_with_an_image();
    let good = Options::new(&site);
    refused(&run(&[]), &["usage"]);
    refused(&run(&good.clone().with(&["--no-such-flag"]).arguments()), &["--no-such-flag"]);
    let wrong: [&[&str]; 5] = [
        &["--queue-size", "0"],
        &["--queue-size", "100"],
        &["--queue-size", "65536"],
        &["--cow-memory", "lots"],
        &["--vsock-port", "high"],
    ];
    for flags in wrong {
        refused(&run(&good.clone().with(flags).arguments()), &[flags[0]]);
    }
    for queues in [0, 100_000] {
        let options = Options { queues, ..good.clone() };
        refused(&run(&options.arguments()), &["queue"]);
    }
    let options = Options { store: "ftp://x".into(), ..good.clone() };
    refused(&run(&options.arguments()), &["ftp://x"]);
    let options = Options { image: "a/b".into(), ..good };
    refused(&run(&options.arguments()), &["a/b"]);
}

/// systemd starts the process again unless the exit code says that this cannot help.
#[test]
fn the_exit_code_of_a_failed_start_says_what_can_help() {
    let site = site_with_an_image();
    let good = Options::new(&site);
    let assert_code = |options: &Options, code: i32| {
        let ended = run(&options.arguments());
        assert_eq!(ended.status.code(), Some(code), "{}", ended.message);
    };
    for image in ["a b", "-", "vm1@", "vm1@-1"] {
        assert_code(&Options { image: image.into(), ..good.clone() }, 2);
    }
    for store in ["ftp://x", "dir:", "cairn://nowhere", "x"] {
        assert_code(&Options { store: store.into(), ..good.clone() }, 2);
    }
    let cluster = Options { store: "cairn://127.0.0.1:1".into(), ..good.clone() };
    assert_code(&cluster, 2);
    assert_code(&cluster.clone().with(&["--keys", "/nowhere"]), 2);
    assert_code(&Options { image: "vm2".into(), ..good.clone() }, 3);
    assert_code(&Options { image: "vm1@7".into(), ..good.clone() }, 3);
    assert_code(&cluster.with(&["--insecure"]), 6);
    let backend = Backend::start(&good);
    assert_code(&Options::named(&site, "other"), 4);
    backend.terminate();
    let map = site.path("disk").join("map");
    fs::write(&map, [7; 8192]).expect("the mirror has a map");
    assert_code(&good, 5);
    fs::write(site.path("file"), "").expect("a file");
    assert_code(&Options { mirror: site.path("file").join("mirror"), ..good }, 1);
}

#[test]
fn an_empty_variable_counts_as_unset() {
    let site = site_with_an_image();
    let arguments = Options::new(&site).with(&["--insecure"]).arguments();
    let empty = [("CAIRN_STORE", ""), ("CAIRN_KEYS", ""), ("CAIRN_LIVE", "")];
    // The rest of the arguments follows the repository's, which comes first.
    let ended = run_with(&arguments[2..], &empty);
    assert_eq!(ended.status.code(), Some(2));
    assert!(ended.message.contains("--store"), "{}", ended.message);
    let image = arguments.iter().position(|argument| argument == "--image").expect("an image");
    let mut arguments = arguments;
    arguments[image + 1] = "vm2".into();
    let ended = run_with(&arguments, &empty);
    assert_eq!(ended.status.code(), Some(3), "{}", ended.message);
}

#[test]
fn something_that_is_not_there_is_named() {
    let site = site_with_an_image();
    let good = Options::new(&site);
    let options = Options { image: "vm2".into(), ..good.clone() };
    refused(&run(&options.arguments()), &["vm2"]);
    let options = Options { image: format!("{IMAGE}@7"), ..good.clone() };
    refused(&run(&options.arguments()), &["vm1@7"]);
    let options = Options { store: format!("dir:{}", site.path("none").display()), ..good.clone() };
    refused(&run(&options.arguments()), &["none"]);
    assert!(!site.path("none").exists(), "a failed start makes no repository");
    let options = Options { socket: "/nowhere/at/all.s".into(), ..good };
    refused(&run(&options.arguments()), &["/nowhere/at/all.s"]);
}

#[test]
fn an_image_has_one_writer() {
    let site = site_with_an_image();
    let backend = Backend::start(&Options::new(&site));
    refused(&run(&Options::named(&site, "other").arguments()), &[IMAGE]);
    let mut device = backend.device(Shape::default());
    device.queues[0].write(0, &[1; 4096]).expect("the first one serves");
    // The process may read, and its writer may end.
    let reader = Options::named(&site, "reader").with(&["--read-only"]);
    let reader = Backend::start(&Options { image: format!("{IMAGE}@1"), ..reader });
    drop(device);
    backend.terminate();
    let next = Backend::start(&Options::named(&site, "next"));
    next.terminate();
    reader.terminate();
}

#[test]
fn a_mirror_has_one_process() {
    let site = site_with_an_image();
    let backend = Backend::start(&Options::new(&site));
    let second = Options { mirror: site.path("disk"), ..Options::named(&site, "second") };
    refused(&run(&second.arguments()), &["disk"]);
    let mut device = backend.device(Shape::default());
    device.queues[0].write(0, &[1; 4096]).expect("the first one serves");
}

/// The kernel keeps the lock of a dead process until its last write has landed.
#[test]
fn a_mirror_whose_process_is_dead_is_served_as_soon_as_its_writes_have_landed() {
    let site = site_with_an_image();
    let options = Options::new(&site);
    Backend::start(&options).terminate();
    // `flock` takes the lock and ends. A process that has inherited the open file keeps it.
    let script = "exec 9<>\"$0\" && flock -w 20 9 && { sleep 4 & }";
    let disk = options.mirror.join("disk");
    let shell = Command::new("sh").args(["-c", script]).arg(&disk).status().expect("start sh");
    assert!(shell.success(), "the lock was not free");
    let start = Instant::now();
    Backend::start(&options).terminate();
    assert!(start.elapsed() > Duration::from_secs(3), "somebody else had the lock");
}

#[test]
fn a_mirror_stays_with_its_image() {
    let site = site_with_an_image();
    Backend::start(&Options::new(&site)).terminate();
    repository::import(&site.store(), "vm2", CHUNK, &random_disk(2, SIZE));
    repository::import(&site.store(), "larger", CHUNK, &random_disk(3, 2 * SIZE));
    repository::import(&site.store(), "coarser", 2 * CHUNK, &random_disk(4, SIZE));
    for other in ["vm2", "larger", "coarser"] {
        let options = Options { image: other.into(), ..Options::new(&site) };
        refused(&run(&options.arguments()), &[IMAGE]);
    }
    Backend::start(&Options::new(&site)).terminate();
}

#[test]
fn a_corrupt_chunk_is_an_error_for_its_readers_only() {
    let site = site_with_an_image();
    let disk = random_disk(1, SIZE);
    let path = site.repository().join("segments/00000001");
    let segment = fs::read(&path).expect("the segment");
    let file = fs::OpenOptions::new().write(true).open(&path).expect("the segment");
    let place_of = |chunk: usize| {
        let start = &disk[chunk * CHUNK as usize..][..4096];
        let block = segment.chunks(4096).position(|block| block == start);
        block.expect("the chunk is there") as u64 * 4096
    };
    for chunk in [3, 5, 7] {
        let at = place_of(chunk) + 1000 * chunk as u64;
        file.write_all_at(&[0xff, 0, 0xff, 0], at).expect("spoil a chunk");
    }

    let mut backend = Backend::start(&Options::new(&site).with(&["--fetch-retry", "1"]));
    let mut device = backend.device(Shape::default());
    let queue = &mut device.queues[0];
    for chunk in 0..16u64 {
        let at = chunk * u64::from(CHUNK) + 4096;
        match (chunk, queue.read(at, 8192)) {
            (3 | 5 | 7, Err(error)) => assert_eq!(error.raw_os_error(), Some(libc::EIO)),
            (3 | 5 | 7, Ok(_)) => panic!("chunk {chunk} is spoiled and was read"),
            (_, Ok(data)) => assert!(data == disk[at as usize..at as usize + 8192]),
            (_, Err(error)) => panic!("chunk {chunk}: {error}"),
        }
    }
    // Writes that do not need the old content go on, and can be read back.
    let at = 3 * u64::from(CHUNK);
    queue.write(at, &[8; 4096]).expect("a write of a whole block");
    assert_eq!(queue.read(at, 4096).expect("read it"), [8; 4096]);
    assert!(queue.write(at + 8192, &[8; 512]).is_err(), "a part of a block that cannot be read");
    queue.write(at, &[9; CHUNK as usize]).expect("a write of the whole chunk");
    assert_eq!(queue.read(at + 8192, 4096).expect("the chunk is local"), [9; 4096]);
    backend.assert_alive();
}

#[test]
fn a_damaged_map_is_refused() {
    let site = site_with_an_image();
    let options = Options::new(&site);
    let backend = Backend::start(&options);
    let mut device = backend.device(Shape::default());
    device.queues[0].write(0, &[1; 4096]).expect("write");
    device.queues[0].flush().expect("flush");
    drop(device);
    backend.terminate();
    let map = site.path("disk").join("map");
    let good = fs::read(&map).expect("the map");

    // There are two headers, and one of them is enough.
    let slots = [0..64, 4096..4160];
    for slot in slots.clone() {
        let mut damaged = good.clone();
        damaged[slot].fill(0xaa);
        fs::write(&map, &damaged).expect("damage the map");
        serves_what_was_flushed(&options);
    }
    let mut damaged = good.clone();
    for slot in slots {
        damaged[slot].fill(0xaa);
    }
    fs::write(&map, &damaged).expect("damage the map");
    refused(&run(&options.arguments()), &["map"]);
    for len in [0, 10, good.len() / 2, good.len() - 1] {
        fs::write(&map, &good[..len]).expect("cut the map short");
        refused(&run(&options.arguments()), &["map"]);
    }
    fs::write(&map, &good).expect("restore the map");
    serves_what_was_flushed(&options);
}

fn serves_what_was_flushed(options: &Options) {
    let backend = Backend::start(options);
    let mut device = backend.device(Shape::default());
    assert!(device.queues[0].read(0, 4096).expect("read") == [1; 4096], "flushed data is lost");
    drop(device);
    backend.terminate();
}

#[test]
fn capabilities_are_printed_as_json() {
    let ended = run(&["--print-capabilities".into()]);
    assert!(ended.status.success(), "{ended:?}");
    let told: serde_json::Value = serde_json::from_str(&ended.output).expect("JSON");
    assert_eq!(told["type"], "block", "{told}");
    assert!(
        told["features"].as_array().is_some_and(|f| f.iter().any(|f| f == "read-only")),
        "{told}"
    );
}

/// QEMU's conventions allow each of these options beside `--print-capabilities`, which wins.
#[test]
fn capabilities_are_printed_whatever_other_options_there_are() {
    let ended = run(&["--fd=3".into(), "--print-capabilities".into(), "--read-only".into()]);
    assert!(ended.status.success() && ended.output.contains("block"), "{ended:?}");
}

/// The file has what `VhostUserBackend` in QEMU's `docs/interop/vhost-user.json` demands, and no
/// other member.
#[test]
fn the_file_for_qemu_describes_the_program() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../contrib/qemu/50-cairn.json");
    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let members: Vec<&str> = file.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(members, ["binary", "description", "type"]);
    assert!(file["description"].is_string() && file["binary"] == "/usr/local/bin/cairn-blk");
    let told = run(&["--print-capabilities".into()]).output;
    let told: serde_json::Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(file["type"], told["type"]);
}

#[test]
fn a_listening_socket_can_be_inherited() {
    let site = site_with_an_image();
    let good = Options::new(&site);
    let listener = UnixListener::bind(&good.socket).expect("listen");
    sys::inherit(listener.as_raw_fd());
    let mut options = good.clone().with(&["--fd", &listener.as_raw_fd().to_string()]);
    options.without_socket_path = true;
    let backend = Backend::start(&options);
    drop(listener);
    let mut device = backend.device(Shape::default());
    device.queues[0].write(0, &[1; 512]).expect("write");
    drop(device);
    backend.terminate();
}

#[test]
fn a_reader_cannot_write_nor_take_checkpoints() {
    let site = site_with_an_image();
    let backend = Backend::start(&Options::new(&site).with(&["--read-only"]));
    let shape = Shape { read_only: true, ..Shape::default() };
    assert!(
        Device::try_connect(&backend.options.socket, Shape::default()).is_err(),
        "it is read-only"
    );
    let mut device = backend.device(shape);
    assert!(device.read_all() == random_disk(1, SIZE));
    drop(device);
    let mut control = backend.control();
    assert!(control.status().read_only);
    let refusal = control.checkpoint().expect_err("nothing can change");
    assert_eq!(refusal.kind, cairn_agent::RefusalKind::Denied, "{refusal:?}");
    backend.terminate();
}

#[test]
fn the_control_socket_is_its_owners_alone() {
    let site = site_with_an_image();
    let backend = Backend::start(&Options::new(&site));
    let mode = |path: &Path| fs::metadata(path).expect("a socket").permissions().mode() & 0o777;
    assert_eq!(mode(&backend.options.control), 0o600);
    let options = backend.options.clone();
    backend.terminate();
    for socket in [options.socket, options.control] {
        assert!(!socket.exists(), "{} is left behind", socket.display());
    }
}
