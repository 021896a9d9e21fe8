//! A repository in a cluster of real processes that are killed.

use cairn_store::cluster::Connection;
use cairn_store::net::identity::{Role, Security};

use crate::lab::{Lab, wait_until};

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
fn a_cluster_with_keys_uses_tls_and_a_peer_cannot_change_the_catalog() {
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
    // A client with the keys of a peer can only read.
    let stolen = lab.place.path("stolen");
    std::fs::create_dir(&stolen).unwrap();
    for (from, to) in [("ca.pem", "ca.pem"), ("peer.pem", "client.pem"), ("peer.key", "client.key")]
    {
        std::fs::copy(lab.place.path("keys").join(from), stolen.join(to)).unwrap();
    }
    let stolen =
        |args: &[&str]| lab.place.run(&[&["--store", &url, "--keys", "stolen"], args].concat());
    assert_eq!(stolen(&["ls"]).code, 0);
    let refused = stolen(&["create", "mine", "1M"]);
    assert_ne!(refused.code, 0);
    assert_eq!(lab.json(&["ls"]).as_array().unwrap().len(), 1, "{}", refused.stderr);
    let peer = lab.peers[0].as_ref().unwrap().address.clone();
    let deleted = |role| {
        let security = Security::load(&lab.place.path("keys"), role).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
            Connection::open(&peer, &security).await.unwrap().delete(&[], 0, until).await
        })
    };
    let refused = deleted(Role::Peer).unwrap_err().to_string();
    assert!(refused.contains("may not delete"), "{refused}");
    assert_eq!(deleted(Role::Client).unwrap(), 0);
    assert_ne!(stolen(&["rm", "vm"]).code, 0);
    lab.assert_exports("vm", &disk);
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
    assert_eq!((&again["images"], &again["left"]), (&0.into(), &serde_json::json!(["twin", "vm"])));
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
