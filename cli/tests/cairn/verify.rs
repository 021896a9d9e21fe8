//! `cairn verify`.

use std::fs;
use std::os::unix::fs::FileExt;

use serde_json::Value;

use crate::lab::Lab;
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
fn a_cluster_is_verified_like_a_directory() {
    let mut lab = Lab::new(3);
    lab.random_disk("disk.raw", 1, 16 * MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "replicas=2"]);
    let whole = lab.json(&["verify"]);
    assert_eq!((&whole["blobs"], &whole["bytes"]), (&65.into(), &(16 * MIB).into()), "{whole}");
    // One peer is not needed. Without two of three, a third of the blobs has no copy that answers. The
    // ids of the peers are random, but that no blob of 65 is among them is impossible in practice.
    lab.kill(0);
    lab.ok(&["verify", "vm"]);
    lab.kill(1);
    let run = lab.run(&["verify", "vm", "--json"]);
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(run.code, 6, "{report} {}", run.stderr);
    assert_eq!((&report["lost"], &report["affected"][0]), (&0.into(), &"vm@1".into()), "{report}");
    let text = String::from_utf8(lab.run(&["verify", "vm"]).stdout).unwrap();
    assert!(text.starts_with("1 snapshot read, 1 unreadable at the moment: "), "{text}");
}
