//! `cairn gc`: space is given back, and what is needed stays.

use std::cell::RefCell;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Stdio;

use serde_json::Value;

use crate::lab::{Lab, random, wait_until};
use crate::support::Place;

const MIB: usize = 1 << 20;

/// The bytes that the segments of a repository take on the disk.
fn space(place: &Place) -> u64 {
    let segments = fs::read_dir(place.path("repository/segments")).unwrap();
    segments.map(|segment| segment.unwrap().metadata().unwrap().blocks() * 512).sum()
}

#[test]
fn removed_images_give_their_space_back_and_the_others_stay() {
    let place = Place::new();
    let shared = random(1, 8 * MIB);
    for image in 0..6u64 {
        let mut disk = shared.clone();
        disk.extend(random(10 + image, 8 * MIB));
        fs::write(place.path("disk.raw"), &disk).unwrap();
        place.ok(&["import", "disk.raw", &format!("vm{image}")]);
    }
    for image in [0, 2, 4] {
        place.ok(&["rm", &format!("vm{image}")]);
    }
    let planned = place.json(&["gc", "--dry-run", "--grace", "0"]);
    let before = space(&place);
    let waiting = place.ok(&["gc"]);
    assert!(waiting.contains("--grace 0s frees it"), "{waiting}");
    assert_eq!(space(&place), before);
    let report = place.json(&["gc", "--grace", "0s"]);
    for field in ["live_bytes", "freed_bytes", "freed_objects"] {
        assert_eq!(report[field], planned[field], "{field}");
    }
    assert!(report["freed_bytes"].as_u64().unwrap() >= 3 * 8 * MIB as u64, "{report}");
    // What the model says: the shared part, and the own parts of three images.
    let alive = (8 + 3 * 8) * MIB as u64;
    assert!(space(&place) <= alive + alive / 20, "{} for {alive}", space(&place));
    for image in [1u64, 3, 5] {
        place.ok(&["export", &format!("vm{image}"), "out.raw", "--force"]);
        let out = fs::read(place.path("out.raw")).unwrap();
        assert!(out[..8 * MIB] == shared && out[8 * MIB..] == random(10 + image, 8 * MIB));
    }
    assert_eq!(place.json(&["gc", "--grace", "0"])["freed_bytes"], 0);
    place.ok(&["verify"]);
}

#[test]
fn nothing_is_deleted_if_a_tree_cannot_be_read() {
    let place = Place::new();
    let disk = random(1, MIB);
    fs::write(place.path("disk.raw"), &disk).unwrap();
    place.ok(&["import", "disk.raw", "vm1"]);
    place.ok(&["import", "disk.raw", "vm2"]);
    place.ok(&["rm", "vm2"]);
    // The only tree node is the last blob.
    let segment = fs::OpenOptions::new().write(true).open(place.segment()).unwrap();
    segment.set_len(segment.metadata().unwrap().len() - 4096).unwrap();
    let run = place.run(&["gc", "--grace", "0"]);
    assert_eq!(run.code, 5, "{}", run.stderr);
    assert!(run.stderr.contains("--give-up vm1@1"), "{}", run.stderr);
    for wrong in ["vm3@1", "vm1@7"] {
        let run = place.run(&["gc", "--grace", "0", "--give-up", wrong]);
        assert_eq!(run.code, 3, "{}", run.stderr);
    }
    place.ok(&["clone", "vm1", "vm4"]);
    let run = place.run(&["gc", "--grace", "0", "--give-up", "vm1@1"]);
    assert_eq!(run.code, 5, "{}", run.stderr);
    assert!(run.stderr.contains("`cairn gc --give-up vm1@1 --give-up vm4@1`"), "{}", run.stderr);
    place.ok(&["rm", "vm4"]);
    place.ok(&["gc", "--grace", "0", "--give-up", "vm1@1"]);
}

/// The index tells where blobs are. That it is damaged says nothing about them.
#[test]
fn a_damaged_index_is_named_and_no_data_is_given_up() {
    let place = Place::new();
    fs::write(place.path("disk.raw"), random(1, 4 * MIB)).unwrap();
    place.ok(&["import", "disk.raw", "vm1", "--chunk-size", "64K"]);
    let index = place.path("repository/index.db");
    let file = fs::OpenOptions::new().write(true).open(&index).unwrap();
    // The first page has the schema. The pages of the tables follow.
    let len = file.metadata().unwrap().len();
    file.write_all_at(&vec![0x5a; len as usize - 4096], 4096).unwrap();
    for args in [&["verify"][..], &["gc", "--grace", "0"], &["export", "vm1", "out.raw"]] {
        let run = place.run(args);
        assert_eq!(run.code, 5, "{args:?}: {}", run.stderr);
        assert!(run.stderr.contains("remove index.db with"), "{args:?}: {}", run.stderr);
        assert!(!run.stderr.contains("--give-up"), "{args:?}: {}", run.stderr);
    }
    for name in ["index.db", "index.db-wal", "index.db-shm"] {
        let _ = fs::remove_file(place.path("repository").join(name));
    }
    place.ok(&["verify"]);
}

#[test]
fn a_collection_frees_what_a_killed_import_has_written() {
    let place = Place::new();
    fs::write(place.path("small.raw"), random(1, MIB)).unwrap();
    place.ok(&["import", "small.raw", "vm1"]);
    let before = space(&place);
    let mut import = place.command(&["import", "-", "vm2"]);
    let mut import = import.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    // It waits for the end of its input.
    let mut input = import.stdin.take().unwrap();
    input.write_all(&random(2, 24 * MIB)).unwrap();
    wait_until("something is written", || space(&place) > before + 8 * MIB as u64);
    import.kill().unwrap();
    import.wait().unwrap();
    drop(input);
    place.ok(&["gc", "--grace", "0"]);
    // The import may have begun a group.
    assert!(space(&place) <= before + 64 * 1024, "{} > {before}", space(&place));
    place.ok(&["verify"]);
}

#[test]
fn a_dry_run_with_an_older_catalog_is_refused_as_the_collection_is() {
    let place = Place::new();
    fs::write(place.path("disk.raw"), random(1, MIB)).unwrap();
    place.ok(&["import", "disk.raw", "vm1"]);
    let copy = place.path("catalog.copy");
    fs::copy(place.path("repository/catalog.db"), &copy).unwrap();
    place.ok(&["gc"]);
    fs::copy(&copy, place.path("repository/catalog.db")).unwrap();
    for args in [&["gc"][..], &["gc", "--dry-run"]] {
        let run = place.run(args);
        assert!(run.code == 4 && run.stderr.contains("older copy"), "{args:?}: {}", run.stderr);
    }
    place.ok(&["gc", "--dry-run", "--accept-older-catalog"]);
}

#[test]
fn peers_give_space_back() {
    let lab = Lab::new(4);
    let kept = lab.random_disk("kept.raw", 1, 6 * MIB);
    lab.ok(&["import", "kept.raw", "kept", "--redundancy", "rs=2+1", "--compress", "none"]);
    lab.random_disk("gone.raw", 2, 6 * MIB);
    lab.ok(&["import", "gone.raw", "gone", "--redundancy", "rs=2+1", "--compress", "none"]);
    lab.ok(&["rm", "gone"]);
    let report = RefCell::new(Value::Null);
    // The catalog's supervisor may be repairing.
    wait_until("a collection has run", || {
        let run = lab.run(&["gc", "--grace", "0", "--json"]);
        *report.borrow_mut() = serde_json::from_slice(&run.stdout).unwrap_or_default();
        run.code == 0
    });
    let report = report.into_inner();
    let freed = report["freed_bytes"].as_u64().unwrap();
    let (least, most) = (9 * MIB as u64, 9 * MIB as u64 * 21 / 20);
    assert!((least..=most).contains(&freed), "{report}");
    assert_eq!(report["silent_peers"], serde_json::json!([]));
    let live = report["live_bytes"].as_u64().unwrap();
    assert!((least..=most).contains(&live), "{report}");
    lab.assert_exports("kept@1", &kept);
}
