//! A network partition that heals. The test needs root and `ip` (iproute2) for network namespaces.

use std::process::Command;
use std::time::Instant;

use cairn_store::SnapshotState;
use cairn_store::encoding::Redundancy;

use crate::lab::{Lab, TIMEOUT, wait_until};
use crate::writer::{Writer, assert_holds, chunks};

const MIB: usize = 1 << 20;
const TWO_AND_TWO: Redundancy = Redundancy::ReedSolomon { data: 2, parity: 2 };

/// A network namespace and a link to it. Both are removed when this value is dropped.
struct Namespace {
    name: String,
    /// The interfaces of the link: outside and inside of the namespace.
    ends: [String; 2],
    hosts: [String; 2],
}

impl Namespace {
    fn new() -> Namespace {
        let number = std::process::id();
        let host = |end| format!("10.{}.{}.{end}", 213 + number / 250 % 40, number % 250);
        let namespace = Namespace {
            name: format!("cairn-{number}"),
            ends: [format!("cra{number}"), format!("crb{number}")],
            hosts: [host(1), host(2)],
        };
        let Namespace { name, ends: [here, there], hosts: [own, other] } = &namespace;
        ip(&["netns", "add", name]);
        ip(&["link", "add", here, "type", "veth", "peer", "name", there, "netns", name]);
        ip(&["addr", "add", &format!("{own}/30"), "dev", here]);
        ip(&["link", "set", here, "up"]);
        ip(&["-n", name, "addr", "add", &format!("{other}/30"), "dev", there]);
        ip(&["-n", name, "link", "set", there, "up"]);
        ip(&["-n", name, "link", "set", "lo", "up"]);
        namespace
    }

    /// Drops all packets on the link from here on, without an error to the sender.
    fn cut_off(&self) {
        let nobody = ["lladdr", "02:00:00:00:00:01", "nud", "permanent"];
        let Namespace { name, ends: [here, there], hosts: [own, other] } = self;
        ip(&[&["neigh", "replace", other, "dev", here], &nobody[..]].concat());
        ip(&[&["-n", name, "neigh", "replace", own, "dev", there], &nobody[..]].concat());
    }

    fn heal(&self) {
        let Namespace { name, ends: [here, there], hosts: [own, other] } = self;
        ip(&["neigh", "del", other, "dev", here]);
        ip(&["-n", name, "neigh", "del", own, "dev", there]);
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
        let _ = Command::new("ip").args(["link", "del", &self.ends[0]]).output();
    }
}

fn ip(args: &[&str]) {
    let needed = "this test needs root, and `ip` of iproute2, for network namespaces";
    let run = Command::new("ip").args(args).output().expect(needed);
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "ip {}: {error}; {needed}", args.join(" "));
}

#[test]
fn a_peer_and_a_client_behind_a_partition_continue_when_the_network_heals() {
    let namespace = Namespace::new();
    let mut lab = Lab::on(&namespace.hosts[0], 4);
    lab.add_peer_on(&namespace.hosts[1], Some(&namespace.name), &[]);
    lab.wait_for_peers(5);
    let mut inside = lab.operator();
    inside.space = Some(namespace.name.clone());
    let disk = lab.random_disk("disk.raw", 1, 4 * MIB);
    let import = |name: &str| inside.run(&["import", "disk.raw", name, "--redundancy", "rs=2+2"]);
    assert_eq!(import("before").code, 0);
    let repository = lab.repository();
    let writer = Writer::create(&repository, "vm", TWO_AND_TWO);
    let mut snapshots = vec![(writer.commit(&chunks(0, 10)).unwrap(), chunks(0, 10))];

    namespace.cut_off();
    // On this side commits continue: four peers are enough.
    let begin = Instant::now();
    for number in 1..5 {
        let disk = chunks(number, 10);
        writer.attachment.renew().unwrap();
        let snapshot = writer.commit(&disk).unwrap();
        assert_eq!(snapshot.state, SnapshotState::Stable);
        snapshots.push((snapshot, disk));
    }
    println!("four commits during the partition took {:?}", begin.elapsed());
    lab.assert_exports("before", &disk);
    // On the other side an import fails with an error that names the catalog.
    let begin = Instant::now();
    let refused = import("meanwhile");
    assert_eq!(refused.code, 6, "{}", refused.stderr);
    assert!(refused.stderr.contains(lab.address()), "{}", refused.stderr);
    assert!(begin.elapsed() < TIMEOUT, "the import took {:?} to fail", begin.elapsed());
    let id = lab.peers[4].as_ref().unwrap().id.clone();
    wait_until("the peer is down", || lab.peer(&id)["state"] == "down");
    assert_eq!(lab.json(&["ls"]).as_array().unwrap().len(), 2);

    namespace.heal();
    lab.wait_for_peers(5);
    wait_until("the client continues", || import("meanwhile").code == 0);
    let last = chunks(9, 10);
    snapshots.push((writer.commit(&last).unwrap(), last));
    wait_until("everything is repaired", || lab.run(&["repair"]).code == 0);
    // The peer that was cut off counts again.
    lab.kill(0);
    lab.kill(2);
    for name in ["before", "meanwhile"] {
        lab.assert_exports(name, &disk);
    }
    let fresh = lab.repository();
    for (snapshot, disk) in &snapshots {
        assert_holds(&fresh, snapshot, disk);
    }
}
