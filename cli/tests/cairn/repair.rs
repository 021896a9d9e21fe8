//! A cluster of real processes after losses: what is repaired survives the next ones.

use std::process::Stdio;
use std::time::Instant;

use cairn_store::documents::Query;

use crate::lab::{Lab, random, wait_until};

const MIB: usize = 1 << 20;
const PEERS: usize = 10;

/// The document of the one who repairs.
const REPAIRS: &str = "leader/repair";

/// `CAIRN_SEED` repeats the choice of those that are killed.
#[test]
fn after_two_lost_peers_and_a_repair_any_four_others_may_die() {
    let seed = std::env::var("CAIRN_SEED").ok().map(|text| text.parse().expect("a number"));
    let seed: u64 = seed.unwrap_or_else(|| std::process::id().into());
    println!("CAIRN_SEED={seed}");
    let mut draws = random(seed, 1000).into_iter();
    // So many of these, in any order.
    let mut choose = |from: &[usize], count: usize| -> Vec<usize> {
        let mut left = from.to_vec();
        let mut draw = || usize::from(draws.next().expect("there are enough"));
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
    // The catalog repairs, too: one at a time does.
    wait_until("all is repaired", || lab.is_repaired());
    let told = lab.json(&["peers"]);
    assert_eq!((&told["repair"]["under"], &told["repair"]["survives"]), (&0.into(), &4.into()));
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
    wait_until("the repair has its turn", || {
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
fn a_repair_that_is_killed_does_not_keep_the_catalog_from_it_for_long() {
    let mut lab = Lab::new(5);
    let disk = lab.random_disk("disk.raw", 1, 8 * MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "replicas=3"]);
    wait_until("the catalog has repaired", || lab.json(&["peers"])["repair"]["time"].is_u64());
    let id = lab.peers[0].as_ref().unwrap().id.clone();
    lab.kill(0);
    lab.ok(&["peers", "lose", &id]);
    // So slow that it is not done for minutes. The catalog waits for some seconds before it begins.
    let mut slow = lab.operator().command(&["repair", "--rate", "20K"]);
    let mut slow = slow.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let repository = lab.repository();
    let runs = || {
        let view = repository.cluster().unwrap().1.read(&[Query::key(REPAIRS)]).unwrap();
        view.version(REPAIRS) != 0
    };
    wait_until("it repairs", runs);
    assert_eq!(slow.try_wait().unwrap(), None, "it is the one");
    slow.kill().unwrap();
    slow.wait().unwrap();
    assert!(runs(), "it was at work");
    let killed = Instant::now();
    lab.wait_until_whole(2);
    println!("{:?} after the kill", killed.elapsed());
    lab.kill(1);
    lab.kill(2);
    lab.assert_exports("vm@1", &disk);
}
