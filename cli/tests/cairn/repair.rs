//! Repair of a cluster of real processes: repaired data survives further losses.

use std::process::Stdio;
use std::time::Instant;

use cairn_store::documents::Query;

use crate::lab::{Lab, random, wait_until};

const MIB: usize = 1 << 20;
const PEERS: usize = 10;

/// The document of the repair lease.
const LEASE: &str = "leader/repair";

/// `CAIRN_SEED` repeats the choice of the peers that are killed.
#[test]
fn after_two_lost_peers_and_a_repair_any_four_others_may_die() {
    let seed = std::env::var("CAIRN_SEED").ok().map(|text| text.parse().expect("a number"));
    let seed: u64 = seed.unwrap_or_else(|| std::process::id().into());
    println!("CAIRN_SEED={seed}");
    let mut draws = random(seed, 1000).into_iter();
    // `count` random elements of `from`.
    let mut choose = |from: &[usize], count: usize| -> Vec<usize> {
        let mut left = from.to_vec();
        let mut draw = || usize::from(draws.next().expect("there are enough random bytes"));
        (0..count).map(|_| left.remove(draw() % left.len())).collect()
    };
    let mut lab = Lab::new(PEERS);
    let disk = lab.random_disk("disk.raw", seed, 12 * MIB + 4096);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "rs=4+4"]);
    let all: Vec<usize> = (0..PEERS).collect();
    let lost = choose(&all, 2);
    for at in &lost {
        let id = lab.peers[*at].as_ref().expect("it runs").id.clone();
        lab.kill(*at);
        lab.ok(&["peers", "lose", &id]);
    }
    // The catalog repairs too, and only one repair runs at a time.
    wait_until("everything is repaired", || lab.is_repaired());
    let list = lab.json(&["peers"]);
    assert_eq!((&list["repair"]["under"], &list["repair"]["survives"]), (&0.into(), &4.into()));
    let rest: Vec<usize> = all.into_iter().filter(|at| !lost.contains(at)).collect();
    for _ in 0..2 {
        let dead = choose(&rest, 4);
        dead.iter().for_each(|at| lab.kill(*at));
        lab.assert_exports("vm@1", &disk);
        dead.iter().for_each(|at| lab.start_peer(*at, &[]));
        lab.wait_for_peers(PEERS - 2);
    }
}

#[test]
fn a_repair_reports_that_it_waits_for_a_peer_that_is_down() {
    let mut lab = Lab::new(3);
    lab.random_disk("disk.raw", 1, MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "replicas=3"]);
    let id = lab.peers[1].as_ref().unwrap().id.clone();
    lab.stop(1);
    assert_eq!(lab.peer(&id)["state"], "down");
    let report = std::cell::RefCell::new(String::new());
    // The catalog may be repairing at the same time.
    wait_until("the repair gets its lease", || {
        let run = lab.run(&["repair"]);
        *report.borrow_mut() = String::from_utf8(run.stdout).unwrap();
        run.code == 0
    });
    let report = report.into_inner();
    assert!(report.contains("0 fragments rebuilt"), "{report}");
    assert!(report.contains("for peers that are down"), "{report}");
    assert!(report.contains("cairn peers lose"), "{report}");
}

#[test]
fn a_killed_repair_delays_the_next_one_only_for_a_short_time() {
    let mut lab = Lab::new(5);
    let disk = lab.random_disk("disk.raw", 1, 8 * MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "replicas=3"]);
    wait_until("the catalog has repaired", || lab.json(&["peers"])["repair"]["time"].is_u64());
    let id = lab.peers[0].as_ref().unwrap().id.clone();
    lab.kill(0);
    lab.ok(&["peers", "lose", &id]);
    // So slow that it takes minutes. The catalog waits for some seconds before it starts its own
    // repair.
    let mut slow = lab.operator().command(&["repair", "--rate", "20K"]);
    let mut slow = slow.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let repository = lab.repository();
    let runs = || {
        let view = repository.cluster().unwrap().1.read(&[Query::key(LEASE)]).unwrap();
        view.version(LEASE) != 0
    };
    wait_until("a repair runs", runs);
    assert_eq!(slow.try_wait().unwrap(), None, "the slow repair is the one that runs");
    slow.kill().unwrap();
    slow.wait().unwrap();
    assert!(runs(), "the killed repair held the lease");
    let killed = Instant::now();
    lab.wait_until_whole(2);
    println!("{:?} after the kill", killed.elapsed());
    lab.kill(1);
    lab.kill(2);
    lab.assert_exports("vm@1", &disk);
}
