//! `cairn verify`.

use std::fs;
use std::os::unix::fs::FileExt;

use serde_json::{Value, json};

use crate::lab::{Lab, wait_until};
use crate::support::Place;

const MIB: usize = 1 << 20;

/// Flips a bit of the first page of the repository that begins with these bytes.
fn damage(place: &Place, content: &[u8]) {
    let path = place.path("repository/segments/00000001");
    let bytes = fs::read(&path).unwrap();
    let at = (0..bytes.len()).step_by(4096).find(|at| bytes[*at..].starts_with(content)).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[content[0] ^ 1], at as u64).unwrap();
}

#[test]
fn damage_in_a_directory_is_reported_with_the_snapshots_that_it_affects() {
    let place = Place::new();
    place.disk("disk.raw");
    fs::write(place.path("other.raw"), vec![9; MIB]).unwrap();
    place.ok(&["import", "disk.raw", "vm1"]);
    place.ok(&["import", "other.raw", "vm2"]);
    place.ok(&["clone", "vm1@1", "copy"]);
    place.ok(&["create", "empty", "1G"]);
    let whole = place.json(&["verify"]);
    // Three chunks and a node of vm1 and its clone, a chunk and a node of vm2.
    assert_eq!((&whole["snapshots"], &whole["blobs"]), (&4.into(), &6.into()), "{whole}");
    assert_eq!((&whole["unreadable"], &whole["bytes"]), (&0.into(), &MIB.into()), "{whole}");
    let text = place.ok(&["verify", "vm1", "vm1@1"]);
    assert_eq!(text, "1 snapshot verified: 4 blobs, 768 KiB read\n");

    damage(&place, &[2; 4096]);
    let run = place.run(&["verify"]);
    let text = String::from_utf8(run.stdout).unwrap();
    assert_eq!(run.code, 5, "{text}{}", run.stderr);
    assert!(text.starts_with("4 snapshots read, 2 damaged: 6 blobs, "), "{text}");
    assert!(text.contains("unreadable: chunk "), "{text}");
    assert!(text.contains("affected: vm1@1\n") && text.contains("affected: copy@1\n"), "{text}");
    assert!(!text.contains("vm2"), "{text}");
    assert!(run.stderr.contains("1 blob is lost, which 2 snapshots need"), "{}", run.stderr);
    let run = place.run(&["verify", "--json"]);
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!((run.code, &report["lost"]), (5, &1.into()), "{report}");
    let error: Value = serde_json::from_str(&run.stderr).unwrap();
    assert_eq!(error["error"]["kind"], "corrupt", "{error}");
    assert_eq!(report["errors"][0]["used_as"], "chunk");
    assert_eq!(report["affected"], serde_json::json!(["copy@1", "vm1@1"]));
    place.ok(&["verify", "vm2", "empty"]);
    let one = place.run(&["verify", "copy"]);
    let text = String::from_utf8(one.stdout).unwrap();
    assert!(text.starts_with("1 snapshot read, 1 damaged: "), "{text}");
    assert!(one.stderr.contains("1 blob is lost, which 1 snapshot needs"), "{}", one.stderr);

    for (name, code) in [("vm9", 3), ("vm1@9", 3), ("vm1@", 2)] {
        assert_eq!(place.run(&["verify", name]).code, code, "{name}");
    }
}

#[test]
fn snapshots_show_when_they_were_last_verified_and_whole() {
    let place = Place::new();
    place.disk("disk.raw");
    place.ok(&["import", "disk.raw", "vm1"]);
    place.ok(&["clone", "vm1@1", "copy"]);
    let listed = |image: &str| place.json(&["ls", image])[0]["verified"].clone();
    let shown = || place.json(&["show", "vm1@1"])["verified"].clone();
    assert_eq!((listed("vm1"), shown()), (Value::Null, Value::Null));
    let report = place.json(&["verify", "--sample", "50%"]);
    assert_eq!((&report["verified"], report["seed"].is_u64()), (&0.into(), true), "{report}");
    let seed = report["seed"].to_string();
    let again = place.json(&["verify", "--sample", "50%", "--seed", &seed]);
    assert_eq!(again["blobs"], report["blobs"]);
    let text = place.ok(&["verify", "--sample", "50%", "--seed", "7"]);
    assert!(
        text.starts_with("2 snapshots verified in part: ") && text.contains("seed: 7"),
        "{text}"
    );
    assert_eq!(listed("vm1"), Value::Null);
    assert_eq!(place.json(&["verify", "vm1"])["verified"], 1);
    assert!(listed("vm1").as_u64() > Some(1 << 30));
    assert_eq!((listed("vm1"), listed("copy")), (shown(), Value::Null));
    assert!(place.ok(&["ls", "vm1"]).contains("VERIFIED"));
    assert!(place.ok(&["show", "vm1@1"]).contains("verified:"));

    damage(&place, &[2; 4096]);
    let run = place.run(&["verify", "copy", "--repair"]);
    assert_eq!(run.code, 5);
    assert!(run.stderr.contains("nothing to repair from"), "{}", run.stderr);
    assert!(listed("vm1").is_u64(), "nobody has looked");
    assert_eq!(place.run(&["verify"]).code, 5);
    assert_eq!(listed("vm1"), Value::Null);
    // The same data is stored again.
    place.ok(&["import", "disk.raw", "vm2"]);
    assert_eq!(listed("vm1"), Value::Null);
    assert_eq!(place.json(&["verify"])["verified"], 3);
    assert!(listed("vm1").is_u64() && listed("copy").is_u64());
    for bad in ["0%", "5", "101%", "x%"] {
        assert_eq!(place.run(&["verify", "--sample", bad]).code, 2, "{bad}");
    }
    assert_eq!(place.run(&["verify", "--seed", "1"]).code, 2);
    assert_eq!(place.run(&["verify", "none/"]).code, 3);
}

/// Flips a bit in each page of the first `bytes` bytes of a peer's log.
fn damage_peer(lab: &Lab, at: usize, bytes: u64) {
    let path = lab.data(at).join("segments/00000001");
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    for place in (100..bytes).step_by(4096) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, place).unwrap();
        file.write_all_at(&[byte[0] ^ 4], place).unwrap();
    }
}

#[test]
fn damaged_fragments_are_named_with_their_peers_and_repaired() {
    let lab = Lab::new(4);
    let disk = lab.random_disk("disk.raw", 1, 4 * MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "rs=2+2", "--chunk-size", "64K"]);
    wait_until("the catalog has repaired", || lab.json(&["peers"])["repair"]["time"].is_u64());
    let whole = lab.json(&["verify"]);
    assert_eq!((&whole["verified"], &whole["weak"]), (&1.into(), &0.into()), "{whole}");
    assert_eq!((&whole["blobs"], &whole["bytes"]), (&65.into(), &(4 * MIB).into()), "{whole}");
    let listed = || lab.json(&["ls", "vm"])[0]["verified"].clone();
    assert!(listed().is_u64());

    damage_peer(&lab, 2, MIB as u64);
    let run = lab.run(&["verify", "--json"]);
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(run.code, 5, "{report} {}", run.stderr);
    assert_eq!((&report["lost"], &report["unreadable"]), (&0.into(), &0.into()), "{report}");
    assert!(report["damaged_fragments"].as_u64() > Some(10), "{report}");
    assert_eq!(report["missing_fragments"], 0, "{report}");
    assert_eq!(report["weakened"], serde_json::json!(["vm@1"]));
    let peer = &lab.peers[2].as_ref().unwrap().id;
    for fragment in report["fragments"].as_array().unwrap() {
        assert_eq!((&fragment["peer"], &fragment["state"]), (&json!(peer), &"damaged".into()));
    }
    assert_eq!(listed(), Value::Null, "damage was found");
    lab.assert_exports("vm", &disk);

    // The catalog's supervisor may be repairing.
    wait_until("what was found is repaired", || lab.run(&["verify", "--repair"]).code == 0);
    let whole = lab.json(&["verify"]);
    assert_eq!((&whole["weak"], &whole["verified"]), (&0.into(), &1.into()), "{whole}");
    assert!(listed().is_u64());
}

#[test]
fn what_a_peer_that_is_down_has_is_neither_looked_at_nor_missing() {
    let mut lab = Lab::new(3);
    lab.random_disk("disk.raw", 1, 2 * MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "replicas=3"]);
    wait_until("the catalog has repaired", || lab.json(&["peers"])["repair"]["time"].is_u64());
    assert_eq!(lab.json(&["verify"])["weak"], 0);
    let id = lab.peers[1].as_ref().unwrap().id.clone();
    lab.kill(1);
    let run = lab.run(&["verify", "--json"]);
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(run.code, 6, "{report} {}", run.stderr);
    assert_eq!((&report["unreadable"], &report["weak"]), (&0.into(), &0.into()), "{report}");
    assert_eq!(report["silent_peers"][0]["peer"], json!(id), "{report}");
    assert_eq!(report["verified"], 0, "not everything was looked at");
}

#[test]
fn a_cluster_is_verified_like_a_directory() {
    let mut lab = Lab::new(3);
    lab.random_disk("disk.raw", 1, 16 * MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "replicas=2"]);
    let whole = lab.json(&["verify"]);
    assert_eq!((&whole["blobs"], &whole["bytes"]), (&65.into(), &(16 * MIB).into()), "{whole}");
    // One peer is not needed. Without two of three, a third of the blobs has no copy that answers. The
    // ids of the peers are random, but that no blob of 65 is among them is impossible in practice.
    lab.kill(0);
    let run = lab.run(&["verify", "vm"]);
    assert!(run.code == 6 && run.stderr.contains("everything can be read"), "{}", run.stderr);
    lab.kill(1);
    let run = lab.run(&["verify", "vm", "--json"]);
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(run.code, 6, "{report} {}", run.stderr);
    assert_eq!((&report["lost"], &report["affected"][0]), (&0.into(), &"vm@1".into()), "{report}");
    let text = String::from_utf8(lab.run(&["verify", "vm"]).stdout).unwrap();
    assert!(text.starts_with("1 snapshot read, 1 unreadable at the moment: "), "{text}");
}
