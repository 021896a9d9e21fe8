//! The scrub of running peers.

use std::os::unix::fs::FileExt;

use serde_json::Value;

use crate::lab::{Lab, wait_for_repair, wait_until};

const MIB: usize = 1 << 20;

/// The entry of a running peer in `cairn peers`.
fn peer(lab: &Lab, at: usize) -> Value {
    lab.peer(&lab.peers[at].as_ref().unwrap().id)
}

/// Flips a bit in each page of the first `bytes` bytes of a peer's log.
fn damage(lab: &Lab, at: usize, bytes: u64) {
    let path = lab.data(at).join("segments/00000001");
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    for place in (100..bytes).step_by(4096) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, place).unwrap();
        file.write_all_at(&[byte[0] ^ 4], place).unwrap();
    }
}

#[test]
fn damage_on_a_running_peer_is_found_by_its_scrub_and_repaired() {
    let mut lab = Lab::new(3);
    let scrubbed = lab.add_peer(&["--scrub-interval", "2s"]);
    lab.wait_for_peers(4);
    let disk = lab.random_disk("disk.raw", 1, 6 * MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "rs=2+2", "--chunk-size", "64K"]);
    wait_until("the peer was scrubbed", || peer(&lab, scrubbed)["scrubbed"].is_u64());
    wait_until("the catalog has repaired", || lab.json(&["peers"])["repair"]["time"].is_u64());
    let before = peer(&lab, scrubbed);
    assert_eq!(before["bad"], 0);
    assert!(before["fragments"].as_u64() > Some(90), "{before}");
    // Nobody reads the damaged blocks.
    damage(&lab, scrubbed, MIB as u64);
    wait_until("the scrub has found the damage", || {
        peer(&lab, scrubbed)["bad"].as_u64() > Some(10)
    });
    wait_for_repair("the fragments are rebuilt", || {
        let now = peer(&lab, scrubbed);
        now["fragments"] == before["fragments"] && lab.json(&["peers"])["repair"]["under"] == 0
    });
    let table = lab.ok(&["peers"]);
    assert!(table.contains("SCRUBBED") && table.contains(" ago"), "{table}");
    // The two other peers are needed no more.
    lab.kill(0);
    lab.kill(1);
    lab.assert_exports("vm", &disk);
    // What the scrub has found survives a restart.
    let found = peer(&lab, scrubbed);
    lab.stop(scrubbed);
    lab.start_peer(scrubbed, &["--scrub-interval", "off"]);
    lab.wait_for_peers(2);
    let after = peer(&lab, scrubbed);
    assert_eq!(after["bad"], found["bad"]);
    assert!(after["scrubbed"].as_u64() >= found["scrubbed"].as_u64(), "{after}");
}

#[test]
fn a_peer_without_a_scrub_is_shown_as_never_scrubbed() {
    let mut lab = Lab::new(0);
    let at = lab.add_peer(&["--scrub-interval", "off"]);
    lab.wait_for_peers(1);
    assert_eq!((&peer(&lab, at)["scrubbed"], &peer(&lab, at)["bad"]), (&Value::Null, &0.into()));
    assert!(lab.ok(&["peers"]).contains("never"));
    lab.kill(at);
    lab.start_peer(at, &["--scrub-interval", "14d"]);
    lab.wait_for_peers(1);
    wait_until("an empty peer is scrubbed at once", || peer(&lab, at)["scrubbed"].is_u64());
}

#[test]
fn a_wrong_interval_and_one_for_a_catalog_are_refused() {
    let lab = Lab::new(0);
    let serve = ["serve", "--data", "x", "--listen", "127.0.0.1:0"];
    let bad = lab.run(&[&serve[..], &["--scrub-interval", "fortnight"]].concat());
    assert_eq!(bad.code, 2);
    assert!(bad.stderr.contains("suffix"), "{}", bad.stderr);
    let catalog = lab.run(&[&serve[..], &["--scrub-interval", "1d", "--catalog"]].concat());
    assert_eq!(catalog.code, 2);
    assert!(catalog.stderr.contains("are for peers"), "{}", catalog.stderr);
}
