//! Images, snapshots, and errors as scripts see them.

use std::fs;

use cairn_store::{Consistency, MirrorId, MirrorOwner, Mode, NewSnapshot, Repository};
use serde_json::{Value, json};

use crate::support::Place;

#[test]
fn an_image_is_created_listed_cloned_and_removed() {
    let place = Place::new();
    assert_eq!(place.ok(&["create", "vm1", "20G"]), "vm1@1\n");
    assert_eq!(place.ok(&["clone", "vm1@1", "vm2"]), "vm2@1\n");

    let images = place.ok(&["ls"]);
    let lines = images.lines().collect::<Vec<_>>();
    assert_eq!(lines.len(), 3);
    assert!(lines[0].starts_with("IMAGE    SIZE    CHUNK  SNAPSHOTS  NEWEST  CREATED"), "{images}");
    assert!(lines[1].starts_with("vm1    20 GiB  256 KiB          1       1  20"), "{images}");
    assert!(lines[2].ends_with("vm1@1"), "{images}");
    assert!(place.ok(&["ls", "--bytes"]).contains("21474836480"));

    let snapshots = place.ok(&["ls", "vm1"]);
    assert!(snapshots.lines().nth(1).unwrap().starts_with("vm1@1     stable  20"), "{snapshots}");

    let removed = place.ok(&["rm", "vm2"]);
    assert!(removed.contains("removed vm2") && removed.contains("garbage collection"), "{removed}");
    assert_eq!(place.run(&["ls", "vm2"]).code, 3);
}

#[test]
fn an_image_grows_never_shrinks_and_its_snapshots_keep_their_sizes() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    assert_eq!(place.ok(&["resize", "vm1", "3M"]), "vm1: 1 MiB -> 3 MiB\n");
    assert_eq!(place.json(&["ls"])[0]["size"], 3 << 20);
    assert_eq!(place.json(&["show", "vm1@1"])["size"], 1 << 20);
    let grown = json!({ "image": "vm1", "before": 3 << 20, "size": 3 << 20, "disk": null });
    assert_eq!(place.json(&["resize", "vm1", "3M"]), grown, "the same size is no error");
    for (size, code) in [("2M", 2), ("100", 2), ("65T", 2), ("x", 2)] {
        assert_eq!(place.run(&["resize", "vm1", size]).code, code, "{size}");
    }
    assert!(place.run(&["resize", "vm1", "2M"]).stderr.contains("cannot shrink"));
    assert_eq!(place.run(&["resize", "vm2", "2M"]).code, 3);
    let away = place.run(&["resize", "vm1", "4M", "--control", "away.ctl"]);
    assert_eq!(away.code, 3, "nobody serves it");
    assert_eq!(place.json(&["ls"])[0]["size"], 3 << 20, "the image has not grown");
    assert_eq!(place.ok(&["clone", "vm1@1", "vm2"]), "vm2@1\n");
    assert_eq!(place.json(&["ls"])[1]["size"], 1 << 20);
}

#[test]
fn show_prints_the_properties_of_a_snapshot() {
    let place = Place::new();
    place.disk("in.raw");
    place.ok(&["import", "in.raw", "vm1"]);
    let text = place.ok(&["show", "vm1"]);
    for line in [
        "snapshot:       vm1@1",
        "state:          stable",
        "stored chunks:  3",
        "holes:          9",
    ] {
        assert!(text.lines().any(|found| found == line), "{line:?} is not in\n{text}");
    }
    let value = place.json(&["show", "vm1@1"]);
    assert_eq!(value["size"], 3 << 20);
    assert_eq!((&value["chunks_stored"], &value["chunks_holes"]), (&json!(3), &json!(9)));
    assert_eq!(value["root"].as_str().unwrap().len(), 64);
    assert_eq!((&value["labels"], &value["pinned"]), (&json!([]), &json!(false)));
}

#[test]
fn every_listing_can_be_json() {
    let place = Place::new();
    assert_eq!(place.json(&["create", "vm1", "64K"])["snapshot"], "vm1@1");
    assert_eq!(place.json(&["clone", "vm1", "vm2"])["snapshot"], "vm2@1");
    assert_eq!(place.json(&["ls"])[1]["origin"], "vm1@1");
    assert_eq!(place.json(&["ls", "vm1"])[0]["state"], "stable");
    assert_eq!(place.json(&["mirrors"]), json!([]));
    assert_eq!(place.json(&["rm", "vm2"]), json!({ "removed": "vm2" }));
}

#[test]
fn an_image_with_mirrors_is_kept_until_they_are_forgotten() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    let url = format!("dir:{}", place.path("repository").display());
    let repository = Repository::open(&url).unwrap();
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([7; 16]), "/mirrors/7").unwrap();
    let first = repository.catalog().resolve(&"vm1".parse().unwrap()).unwrap();
    let attachment = repository.attach(&owner, &first, Mode::ReadWrite).unwrap();
    let number = attachment.reserve(1).unwrap().start;
    let new = NewSnapshot {
        number,
        label: Some("golden".into()),
        metadata: cairn_store::Metadata::default(),
        is_from_guest: false,
        size: attachment.geometry().size(),
        consistency: Consistency::Filesystem,
        time: 0,
        dirty_bytes: 0,
        pause_us: 5,
    };
    attachment.begin(&new).unwrap();
    assert_eq!(place.run(&["export", "vm1@golden", "out.raw"]).code, 4, "it is pending");
    attachment.announced(number).publish_tree(&first.root, 0, 0).unwrap();
    assert_eq!(place.json(&["show", "vm1@golden"])["number"], 2);

    let id = "07".repeat(16);
    let listed = place.json(&["mirrors"]);
    assert_eq!((&listed[0]["id"], &listed[0]["parent"]), (&json!(id), &json!(2)));
    assert_eq!(listed[0]["writer_pid"], std::process::id());
    assert!(place.ok(&["mirrors"]).contains("/mirrors/7"));
    for args in [&["rm", "vm1"][..], &["rm", "vm1", "--force"], &["mirrors", "forget", &id]] {
        let run = place.run(args);
        assert_eq!(run.code, 4, "{args:?}");
        let pid = std::process::id().to_string();
        assert!(run.stderr.contains("/mirrors/7") && run.stderr.contains(&pid), "{}", run.stderr);
    }

    attachment.release(None).unwrap();
    let run = place.run(&["rm", "vm1"]);
    assert_eq!(run.code, 4);
    assert!(run.stderr.contains(&format!("cairn mirrors forget {id}")), "{}", run.stderr);
    place.ok(&["mirrors", "forget", &id]);
    place.ok(&["rm", "vm1"]);
}

#[test]
fn a_missing_object_exits_with_3() {
    let place = Place::new();
    let run = place.run(&["ls"]);
    assert_eq!(run.code, 3);
    assert!(run.stderr.starts_with("cairn: opening dir:repository: there is no repository"));
    assert!(run.stderr.contains("; `cairn create`"), "{}", run.stderr);
    assert!(!place.path("repository").exists(), "a command that reads creates nothing");

    place.ok(&["create", "vm1", "1M"]);
    for args in [
        &["ls", "vm2"][..],
        &["show", "vm1@2"],
        &["show", "vm1@label"],
        &["clone", "vm2", "vm3"],
        &["export", "vm2", "out.raw"],
        &["rm", "vm2"],
        &["mirrors", "forget", &"0".repeat(32)],
    ] {
        assert_eq!(place.run(args).code, 3, "{args:?}");
    }
}

#[test]
fn conflicts_exit_with_4() {
    let place = Place::new();
    place.ok(&["create", "vm1", "1M"]);
    assert_eq!(place.run(&["create", "vm1", "1M"]).code, 4);
    assert_eq!(place.run(&["clone", "vm1", "vm1"]).code, 4);
    let run = place.run(&["rm", "vm1@1"]);
    assert_eq!(run.code, 4);
    assert!(run.stderr.contains("only stable snapshot"), "{}", run.stderr);
}

#[test]
fn wrong_usage_exits_with_2_and_creates_nothing() {
    let place = Place::new();
    for args in [
        &[][..],
        &["frobnicate"],
        &["ls", "--colour"],
        &["create", "vm1"],
        &["create", "../vm1", "1G"],
        &["create", "vm1", "0"],
        &["create", "vm1", "100"],
        &["create", "vm1", "65T"],
        &["create", "vm1", "lots"],
        &["create", "vm1", "1G", "--chunk-size", "100K"],
        &["create", "vm1", "1G", "--chunk-size", "4G"],
        &["show", "vm1@"],
        &["mirrors", "forget", "xyz"],
        &["mirrors", "forget"],
        &["mirrors", "forget", "--unseen", "1h"],
        &["mirrors", "forget", "--unseen", "30d", &"0".repeat(32)],
        &["mirrors", "forget", "--dry-run", &"0".repeat(32)],
        &["checkpoint"],
        &["checkpoint", "--control", "x", "--wait", "forever"],
        &["checkpoint", "--control", "x", "--timeout", "-1"],
        &["ls", "--store", "ftp:somewhere"],
    ] {
        let run = place.run(args);
        assert_eq!(run.code, 2, "{args:?}: {}", run.stderr);
        assert!(!run.stderr.is_empty(), "{args:?}");
    }
    assert!(!place.path("repository").exists());
    let directory = place.path("").display().to_string();
    let run = place.run(&["import", &directory, "vm1"]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("it is a directory"), "{}", run.stderr);
    let run = place.command(&["ls"]).env_remove("CAIRN_STORE").output().unwrap();
    assert_eq!(run.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&run.stderr).contains("CAIRN_STORE"));
}

#[test]
fn errors_can_be_json() {
    let place = Place::new();
    for (args, kind) in [(&["ls", "--json"][..], "notfound"), (&["create", "--json"], "usage")] {
        let run = place.run(args);
        let error: Value = serde_json::from_str(&run.stderr).unwrap();
        assert_eq!(error["error"]["kind"], kind);
        assert!(error["error"]["message"].as_str().is_some_and(|text| !text.is_empty()));
    }
}

#[test]
fn help_documents_the_exit_codes_and_shows_examples() {
    let place = Place::new();
    let help = place.ok(&["--help"]);
    assert!(help.contains("Exit codes:") && help.contains("5  stored data is corrupt"), "{help}");
    assert!(place.ok(&["export", "--help"]).contains("cairn export vm1@3 vm1.raw"));
}

#[test]
fn a_directory_with_other_files_does_not_become_a_repository() {
    let place = Place::new();
    fs::create_dir(place.path("repository")).unwrap();
    fs::write(place.path("repository/thesis.tex"), "...").unwrap();
    let run = place.run(&["create", "vm1", "1M"]);
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("is not a repository"), "{}", run.stderr);
    assert_eq!(fs::read_dir(place.path("repository")).unwrap().count(), 1);
}
