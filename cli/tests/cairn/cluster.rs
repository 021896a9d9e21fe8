//! A repository in a cluster of real processes that are killed.

use crate::lab::{Lab, wait_for_repair, wait_until};

const MIB: usize = 1 << 20;

#[test]
fn a_disk_is_read_back_after_four_of_eight_peers_and_the_catalog_died() {
    let mut lab = Lab::new(8);
    let disk = lab.random_disk("disk.raw", 1, 9 * MIB + 4096);
    let made = lab.json(&["import", "disk.raw", "vm"]);
    assert_eq!(made["redundancy"], "rs=4+4", "the default for eight peers");
    lab.assert_exports("vm@1", &disk);
    for at in [1, 3, 4, 6] {
        lab.kill(at);
    }
    lab.assert_exports("vm@1", &disk);
    drop(lab.catalog.take());
    let refused = lab.run(&["ls"]);
    assert_eq!(refused.code, 6, "unavailable: {}", refused.stderr);
    assert!(refused.stderr.contains(lab.address()), "{}", refused.stderr);
    lab.start_catalog();
    lab.assert_exports("vm@1", &disk);
    lab.wait_for_peers(4);
    // An image with rs=4+4 needs eight peers, and there are four.
    lab.random_disk("other.raw", 2, MIB);
    let refused = lab.run(&["import", "other.raw", "other", "--redundancy", "rs=4+4"]);
    assert_eq!(refused.code, 6, "{}", refused.stderr);
    assert_eq!(lab.json(&["ls"]).as_array().unwrap().len(), 1, "a failed import leaves no image");
    lab.ok(&["import", "other.raw", "other", "--redundancy", "replicas=2"]);
}

#[test]
fn a_cluster_with_keys_uses_tls_and_the_keys_of_a_peer_are_no_clients_keys() {
    let lab = Lab::with(3, true, "600");
    let disk = lab.random_disk("disk.raw", 1, 3 * MIB);
    assert_eq!(lab.json(&["import", "disk.raw", "vm"])["redundancy"], "replicas=3");
    lab.assert_exports("vm", &disk);
    let url = lab.url();
    let refused = lab.place.run(&["--store", &url, "--insecure", "ls"]);
    assert_ne!(refused.code, 0, "a connection without TLS");
    let refused = lab.place.run(&["--store", &url, "ls"]);
    assert_eq!(refused.code, 2, "plain TCP needs --insecure: {}", refused.stderr);
    assert!(refused.stderr.contains("--keys"), "{}", refused.stderr);
    // The keys of a peer are of no use for a client, also if the files have other names.
    let stolen = lab.place.path("stolen");
    std::fs::create_dir(&stolen).unwrap();
    let list = "revoked.crl.pem";
    for (from, to) in
        [("ca.pem", "ca.pem"), (list, list), ("peer.pem", "client.pem"), ("peer.key", "client.key")]
    {
        std::fs::copy(lab.place.path("peer0-keys").join(from), stolen.join(to)).unwrap();
    }
    for args in [&["ls"][..], &["create", "mine", "1M"], &["rm", "vm"]] {
        let run = lab.place.run(&[&["--store", &url, "--keys", "stolen"], args].concat());
        assert_eq!(run.code, 2, "{args:?}: {}", run.stderr);
        assert!(run.stderr.contains("that of a peer"), "{}", run.stderr);
    }
    lab.assert_exports("vm", &disk);
}

#[test]
fn the_certificate_of_a_peer_decides_its_id() {
    let mut lab = Lab::with(2, true, "600");
    let id = lab.peers[0].as_ref().unwrap().id.clone();
    let signed = lab.place.json(&["keys", "sign", "--keys", "keys", "more-keys"]);
    assert_eq!((&signed["role"], &signed["keys"]), (&"peer".into(), &"more-keys".into()));
    let disk = lab.random_disk("disk.raw", 1, MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "replicas=2"]);
    lab.stop(0);
    // Other keys with the data of the peer.
    let address = lab.address().to_owned();
    let serve = |data: &str, keys: &str| {
        let args = ["serve", "--data", data, "--listen", "127.0.0.1:0", "--catalog", &address];
        lab.place.run(&[&args, &["--keys", keys][..]].concat())
    };
    let refused = serve("peer0", "more-keys");
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains(&format!("cairn keys sign --peer {id}")), "{}", refused.stderr);
    // The keys of the peer with an empty disk.
    let refused = serve("empty", "peer0-keys");
    assert_eq!(refused.code, 4, "{}", refused.stderr);
    assert!(refused.stderr.contains(&format!("cairn peers lose {id}")), "{}", refused.stderr);
    assert!(!lab.place.path("empty").exists());
    // New keys of the same peer, in place of the former.
    let again = ["keys", "sign", "--keys", "keys", "--peer", &id, "again"];
    lab.place.ok(&again);
    std::fs::remove_dir_all(lab.place.path("peer0-keys")).unwrap();
    std::fs::rename(lab.place.path("again"), lab.place.path("peer0-keys")).unwrap();
    lab.start_peer(0, &[]);
    assert_eq!(lab.peers[0].as_ref().unwrap().id, id);
    lab.wait_for_peers(2);
    // The disk is lost, and the operator says so: the peer returns with an empty one.
    lab.kill(0);
    lab.wipe(0);
    lab.ok(&["peers", "lose", &id]);
    lab.start_peer(0, &[]);
    assert_eq!(lab.peers[0].as_ref().unwrap().id, id);
    lab.wait_for_peers(2);
    wait_for_repair("the peer has its fragments again", || lab.is_repaired());
    lab.kill(1);
    lab.assert_exports("vm", &disk);
}

#[test]
fn a_revoked_peer_is_cut_off_and_the_others_go_on() {
    let mut lab = Lab::with(3, true, "600");
    let disk = lab.random_disk("disk.raw", 1, MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "replicas=2"]);
    let id = lab.peers[0].as_ref().unwrap().id.clone();
    let revoked = lab.place.json(&["keys", "revoke", "--keys", "keys", &id[..8]]);
    assert_eq!(revoked["revoked"], 1);
    // Catalog and clients read the list in their directory of keys; no process is restarted.
    wait_until("the peer is down", || lab.peer(&id)["state"] == "down");
    lab.assert_exports("vm", &disk);
    lab.ok(&["import", "disk.raw", "other", "--redundancy", "replicas=2"]);
    lab.kill(0);
    lab.start_peer(0, &[]);
    lab.assert_exports("other", &disk);
    assert_eq!(lab.peer(&id)["state"], "down", "also after a restart");
    let refused = lab.place.run(&["keys", "revoke", "--keys", "keys", &id]);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
}

#[test]
fn fragments_of_a_lost_peer_are_rebuilt_automatically() {
    let mut lab = Lab::with(6, false, "3");
    let disk = lab.random_disk("disk.raw", 1, 6 * MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "rs=2+2"]);
    let lost = lab.peers[0].as_ref().unwrap().id.clone();
    lab.kill(0);
    wait_until("the peer is lost", || lab.peer(&lost)["state"] == "lost");
    lab.wait_until_whole(2);
    let (one, other) = (1, 2);
    lab.kill(one);
    lab.kill(other);
    lab.assert_exports("vm", &disk);
}

#[test]
fn a_drained_peer_becomes_empty_and_can_be_forgotten() {
    let lab = Lab::new(6);
    let disk = lab.random_disk("disk.raw", 1, 4 * MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "rs=2+2"]);
    let id = lab.peers[2].as_ref().unwrap().id.clone();
    wait_until("it holds fragments", || lab.peer(&id)["fragments"].as_u64() > Some(0));
    let refused = lab.run(&["peers", "forget", &id]);
    assert_eq!(refused.code, 4, "{}", refused.stderr);
    lab.ok(&["peers", "drain", &id[..8]]);
    wait_until("it is empty", || lab.peer(&id)["fragments"] == 0);
    assert_eq!(lab.peer(&id)["state"], "draining");
    lab.assert_exports("vm", &disk);
    lab.ok(&["peers", "forget", &id]);
}

#[test]
fn a_drain_that_cannot_finish_says_why() {
    let mut lab = Lab::new(4);
    lab.random_disk("disk.raw", 1, MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "rs=2+2"]);
    let id = lab.peers[2].as_ref().unwrap().id.clone();
    wait_until("it holds fragments", || lab.peer(&id)["fragments"].as_u64() > Some(0));
    assert_eq!(lab.peer(&id)["drain_waits_for"], serde_json::Value::Null, "it is not drained");
    let reason = "image vm needs 4 peers, and 3 other peers are members";
    let said = lab.ok(&["peers", "drain", &id]);
    assert!(said.contains(reason), "{said}");
    let waits_for = lab.peer(&id)["drain_waits_for"].clone();
    assert!(waits_for[0].as_str().unwrap().contains(reason), "{waits_for}");
    let table = lab.ok(&["peers"]);
    assert!(table.contains(&format!("the drain of {} waits: {reason}", &id[..8])), "{table}");
    let added = lab.add_peer(&[]);
    wait_until("it is empty", || lab.peer(&id)["fragments"] == 0);
    assert_eq!(lab.peer(&id)["drain_waits_for"], serde_json::json!([]));
    lab.kill(added);
}

#[test]
fn a_drained_peer_that_was_stopped_is_declared_lost_and_then_forgotten() {
    let mut lab = Lab::new(4);
    lab.random_disk("disk.raw", 1, MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "replicas=2"]);
    let id = lab.peers[2].as_ref().unwrap().id.clone();
    lab.ok(&["peers", "drain", &id]);
    wait_until("it is empty", || lab.peer(&id)["fragments"] == 0);
    lab.stop(2);
    assert_eq!(lab.peer(&id)["state"], "down");
    let refused = lab.run(&["peers", "forget", &id]);
    assert_eq!(refused.code, 4, "{}", refused.stderr);
    assert!(!refused.stderr.contains("holds"), "it is empty: {}", refused.stderr);
    let command = format!("cairn peers lose {}", &id[..8]);
    assert!(refused.stderr.contains(&command), "{}", refused.stderr);
    lab.ok(&["peers", "lose", &id]);
    lab.ok(&["peers", "forget", &id]);
    assert_eq!(lab.peer(&id), serde_json::Value::Null, "it is not listed");
}

#[test]
fn the_catalog_is_restored_from_the_peers() {
    let mut lab = Lab::new(4);
    let disk = lab.random_disk("disk.raw", 1, 3 * MIB);
    lab.ok(&["import", "disk.raw", "vm"]);
    lab.ok(&["clone", "vm@1", "twin"]);
    lab.ok(&["clone", "vm@1", "gone"]);
    lab.ok(&["rm", "gone"]);
    let before = lab.json(&["ls"]);
    lab.replace_catalog(4);
    assert_eq!(lab.json(&["ls"]).as_array().unwrap().len(), 0);
    let rebuilt = lab.json(&["catalog", "rebuild"]);
    assert_eq!((&rebuilt["images"], &rebuilt["snapshots"]), (&2.into(), &2.into()));
    assert_eq!(lab.json(&["ls"]), before);
    lab.assert_exports("vm@1", &disk);
    lab.assert_exports("twin", &disk);
    let again = lab.json(&["catalog", "rebuild"]);
    assert_eq!((&again["images"], &again["snapshots"]), (&0.into(), &0.into()));
}

#[test]
fn a_refused_rebuild_says_which_peers_answered_and_how_many_there_were() {
    let mut lab = Lab::new(3);
    let ids: Vec<_> = lab.peers.iter().flatten().map(|peer| peer.id[..8].to_owned()).collect();
    lab.ok(&["create", "vm", "1M", "--redundancy", "replicas=2"]);
    lab.kill(2);
    lab.ok(&["peers", "lose", &ids[2]]);
    lab.ok(&["peers", "forget", &ids[2]]);
    lab.replace_catalog(2);
    let refused = lab.run(&["catalog", "rebuild"]);
    assert_eq!(refused.code, 6, "{}", refused.stderr);
    assert!(refused.stderr.contains("2 of 3 peers answer ("), "{}", refused.stderr);
    for id in &ids[..2] {
        assert!(refused.stderr.contains(id), "no {id}: {}", refused.stderr);
    }
    let count = "3 peers were members when the newest record was written";
    assert!(refused.stderr.contains(count), "{}", refused.stderr);
    assert!(refused.stderr.contains("removed on purpose since then"), "{}", refused.stderr);
    assert_eq!(lab.json(&["catalog", "rebuild", "--force"])["images"], 1);
}

#[test]
fn a_catalog_without_peers_is_not_rebuilt() {
    let lab = Lab::new(0);
    let refused = lab.run(&["catalog", "rebuild"]);
    assert_eq!(refused.code, 6, "{}", refused.stderr);
    assert!(refused.stderr.contains("until `cairn peers` shows all"), "{}", refused.stderr);
    assert_eq!(lab.json(&["catalog", "rebuild", "--force"])["images"], 0);
}

#[test]
fn the_chosen_redundancy_is_printed_only_if_the_image_can_be_created() {
    let lab = Lab::new(2);
    lab.random_disk("disk.raw", 1, MIB);
    std::fs::write(lab.place.path("empty.raw"), "").unwrap();
    let chosen = "redundancy replicas=2, chosen by";
    let prints = |args: &[&str]| {
        let run = lab.run(args);
        (run.code, run.stderr.contains(chosen))
    };
    assert_eq!(prints(&["import", "disk.raw", "vm"]), (0, true));
    assert_eq!(prints(&["import", "missing.raw", "other"]), (3, false));
    assert_eq!(prints(&["import", "empty.raw", "other"]), (2, false));
    assert_eq!(prints(&["import", "disk.raw", "vm"]), (4, false));
    assert_eq!(prints(&["create", "vm", "1M"]), (4, false));
    assert_eq!(prints(&["create", "other", "1M"]), (0, true));
}

#[test]
fn an_import_with_too_few_peers_says_how_many_it_needs() {
    let lab = Lab::new(2);
    lab.random_disk("disk.raw", 1, MIB);
    let run = lab.run(&["import", "disk.raw", "vm", "--redundancy", "replicas=3"]);
    assert_eq!(run.code, 6, "{}", run.stderr);
    assert!(run.stderr.contains("3 peers are needed, and 2 are up;"), "{}", run.stderr);
    assert!(!run.stderr.contains("memory"), "the process ends: {}", run.stderr);
}

#[test]
fn an_import_without_space_for_all_of_it_succeeds_if_most_is_stored() {
    let mut lab = Lab::new(0);
    for _ in 0..2 {
        lab.add_peer(&["--capacity", "5M"]);
    }
    lab.wait_for_peers(2);
    let disk = lab.random_disk("disk.raw", 1, 3 * MIB);
    let first = lab.run(&["import", "disk.raw", "vm", "--redundancy", "replicas=2"]);
    assert_eq!((first.code, first.stderr.contains("warning")), (0, false), "{}", first.stderr);
    let second = lab.run(&["import", "disk.raw", "twin", "--redundancy", "replicas=2"]);
    assert_eq!(second.code, 0, "{}", second.stderr);
    assert!(second.stderr.contains("warning: the peers lack"), "{}", second.stderr);
    lab.assert_exports("twin", &disk);
    lab.random_disk("other.raw", 2, 3 * MIB);
    let third = lab.run(&["import", "other.raw", "other", "--redundancy", "replicas=2"]);
    assert_eq!(third.code, 6, "{}", third.stderr);
    assert_eq!(lab.json(&["ls"]).as_array().unwrap().len(), 2, "a failed import leaves no image");
}
