//! Peers that are full, that hang, or that are lost while a snapshot is stored.

use std::time::{Duration, Instant};

use cairn_store::cluster::Connection;
use cairn_store::collection::CollectionNumber;
use cairn_store::encoding::Redundancy;
use cairn_store::encoding::fragment::{Fragment, encode};
use cairn_store::net::identity::Security;
use cairn_store::{BlobId, Error, LocalCopy, SnapshotState};

use crate::lab::{Lab, TIMEOUT, random, wait_for_members, wait_until};
use crate::writer::{NO_COPY, Writer, assert_holds, chunks, content};

const MIB: usize = 1 << 20;
const TWO_AND_TWO: Redundancy = Redundancy::ReedSolomon { data: 2, parity: 2 };

const STOP: i32 = 19;
const CONTINUE: i32 = 18;

/// Stores blobs that nothing refers to on a peer until it is full.
fn fill(lab: &Lab, at: usize) {
    let address = lab.peers[at].as_ref().unwrap().address.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let peer = Connection::open(&address, &Security::INSECURE).await.unwrap();
        for len in [MIB, 4096] {
            for seed in 0.. {
                let content = random(seed + len as u64, len);
                let (description, blocks) =
                    encode(&BlobId::of(&content), &content, Redundancy::NONE);
                let fragment = Fragment { description, index: 0, block: blocks.share(0) };
                if peer.put(fragment, CollectionNumber::FIRST).await.is_err() {
                    break;
                }
                assert!(seed < 10_000, "the peer does not become full");
            }
        }
    });
}

#[test]
fn fragments_that_full_peers_refuse_go_to_other_peers() {
    const CAPACITY: &str = "12M";
    let mut lab = Lab::new(0);
    for _ in 0..6 {
        lab.add_peer(&["--capacity", CAPACITY]);
    }
    lab.wait_for_peers(6);
    fill(&lab, 1);
    fill(&lab, 4);
    let id = |lab: &Lab, at: usize| lab.peers[at].as_ref().unwrap().id.clone();
    let full = [id(&lab, 1), id(&lab, 4)];
    let fragments = |lab: &Lab, id: &str| lab.peer(id)["fragments"].as_u64();
    wait_until("the peers report that they are full", || {
        full.iter().all(|id| fragments(&lab, id) > Some(11))
    });
    let before = full.clone().map(|id| fragments(&lab, &id));
    let disk = lab.random_disk("disk.raw", 1, 6 * MIB);
    lab.ok(&["import", "disk.raw", "vm", "--redundancy", "rs=2+2", "--chunk-size", "64K"]);
    let writer = Writer::create(&lab.repository(), "live", TWO_AND_TWO);
    let snapshot = writer.commit(&chunks(1, 20)).unwrap();
    assert_eq!(snapshot.state, SnapshotState::Stable);
    // Everything is on the four other peers. Any two of them may fail together with the full ones.
    assert_eq!(full.clone().map(|id| fragments(&lab, &id)), before);
    for at in [1, 4, 0, 5] {
        lab.kill(at);
    }
    lab.assert_exports("vm", &disk);
    assert_holds(&lab.repository(), &snapshot, &chunks(1, 20));
    for at in [0, 1, 4, 5] {
        lab.start_peer(at, &["--capacity", CAPACITY]);
    }
    lab.wait_for_peers(6);
    // If no peer has space, the import fails with that reason and leaves no image.
    lab.random_disk("large.raw", 2, 24 * MIB);
    let refused = lab.run(&["import", "large.raw", "large", "--redundancy", "rs=2+2"]);
    assert_eq!(refused.code, 6, "{}", refused.stderr);
    assert!(refused.stderr.contains("full"), "{}", refused.stderr);
    assert!(lab.json(&["ls"]).as_array().unwrap().iter().all(|one| one["name"] != "large"));
    lab.assert_exports("vm", &disk);
}

/// With `CAIRN_SOAK_SECONDS` the peer hangs for a minute.
#[test]
fn commits_continue_while_a_peer_hangs() {
    let soak = std::env::var("CAIRN_SOAK_SECONDS").is_ok();
    let time = Duration::from_secs(if soak { 60 } else { 10 });
    let lab = Lab::new(6);
    let repository = lab.repository();
    let writer = Writer::create(&repository, "vm", TWO_AND_TWO);
    let mut snapshots = vec![(writer.commit(&chunks(0, 8)).unwrap(), chunks(0, 8))];
    let stopped = lab.peers[2].as_ref().unwrap();
    let begin = Instant::now();
    let mut longest = Duration::ZERO;
    std::thread::scope(|scope| {
        // The peer stops during a commit.
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            stopped.signal(STOP);
        });
        while begin.elapsed() < time || snapshots.len() <= 5 {
            assert!(begin.elapsed() < 2 * TIMEOUT, "only {} commits", snapshots.len());
            let disk = chunks(snapshots.len() as u64, 8);
            let before = Instant::now();
            writer.attachment.renew().unwrap();
            let snapshot = writer.commit(&disk).unwrap();
            assert!(before.elapsed() < TIMEOUT, "a commit took {:?}", before.elapsed());
            longest = longest.max(before.elapsed());
            assert_eq!(snapshot.state, SnapshotState::Stable);
            snapshots.push((snapshot, disk));
        }
    });
    println!("{} commits in {:?}, the longest {longest:?}", snapshots.len(), begin.elapsed());

    let (last, disk) = snapshots.last().unwrap();
    assert_holds(&lab.repository(), last, disk);
    stopped.signal(CONTINUE);
    lab.wait_for_peers(6);
    writer.commit(&chunks(1000, 8)).unwrap();
    for (snapshot, disk) in &snapshots {
        assert_holds(&repository, snapshot, disk);
    }
}

/// Replaces two peers by peers with empty disks, which come back under new ids.
fn lose_two(lab: &mut Lab) {
    for at in [0, 3] {
        let id = lab.peers[at].as_ref().unwrap().id.clone();
        lab.kill(at);
        lab.wipe(at);
        lab.ok(&["peers", "lose", &id]);
        lab.start_peer(at, &[]);
    }
    lab.wait_for_peers(5);
}

/// A repair does not see chunks that no snapshot refers to yet. So a commit that was under way when
/// peers were lost asks for its chunks again, and restores their redundancy.
#[test]
fn a_commit_restores_what_was_lost_with_peers_while_it_was_stored() {
    let mut lab = Lab::new(5);
    let repository = lab.repository();
    let writer = Writer::create(&repository, "vm", TWO_AND_TWO);
    let commit = writer.begin().unwrap();
    let changes = writer.store(&chunks(1, 40)).unwrap();
    repository.flush().unwrap();
    lose_two(&mut lab);
    wait_until("everything is repaired", || lab.is_repaired());
    wait_for_members(&repository, 5);
    let snapshot = commit.publish(&changes, 0, NO_COPY).unwrap();
    assert_eq!(snapshot.state, SnapshotState::Stable);
    lab.kill(1);
    lab.kill(2);
    assert_holds(&lab.repository(), &snapshot, &chunks(1, 40));
}

/// More peers are lost than the redundancy survives. What the client still has is stored again. If
/// the client has no copy of a lost chunk, nothing is published.
#[test]
fn a_commit_whose_chunks_are_lost_uses_the_clients_copies_or_fails() {
    let mut lab = Lab::new(5);
    let repository = lab.repository();
    let writer = Writer::create(&repository, "vm", Redundancy::Replicas(2));
    let disk = chunks(1, 40);
    let commit = writer.begin().unwrap();
    let changes = writer.store(&disk).unwrap();
    repository.flush().unwrap();
    lose_two(&mut lab);
    wait_for_members(&repository, 5);

    let error = commit.publish(&changes, 0, NO_COPY).unwrap_err();
    assert!(matches!(error, Error::ContentLost { .. }), "{error}");
    let state = || {
        let name = format!("vm@{}", commit.number()).parse().unwrap();
        repository.catalog().resolve(&name).unwrap().state
    };
    assert_eq!(state(), SnapshotState::Pending);
    assert_eq!(writer.attachment.parent().0, 1, "the mirror's parent has not moved");

    // A copy that has changed since does not count.
    let stale: LocalCopy<'_> = &|_, buf| {
        buf.fill(7);
        true
    };
    let error = commit.publish(&changes, 0, stale).unwrap_err();
    assert!(matches!(error, Error::ContentLost { .. }), "{error}");
    let local: LocalCopy<'_> = &|at, buf| {
        buf.copy_from_slice(&content(disk[&at.0]));
        true
    };
    let snapshot = commit.publish(&changes, 0, local).unwrap();
    assert_eq!((snapshot.state, state()), (SnapshotState::Stable, SnapshotState::Stable));
    assert_holds(&lab.repository(), &snapshot, &disk);
    lab.kill(2);
    assert_holds(&lab.repository(), &snapshot, &disk);
}

/// A client remembers which chunks it has stored. It must not rely on that after a peer was lost.
#[test]
fn a_client_checks_stored_chunks_again_after_a_loss() {
    let mut lab = Lab::new(5);
    let repository = lab.repository();
    let writer = Writer::create(&repository, "vm", TWO_AND_TWO);
    // No snapshot refers to these chunks.
    writer.store(&chunks(1, 40)).unwrap();
    repository.flush().unwrap();
    lose_two(&mut lab);
    wait_for_members(&repository, 5);
    let snapshot = writer.commit(&chunks(1, 40)).unwrap();
    assert_eq!(snapshot.state, SnapshotState::Stable);
    lab.kill(1);
    lab.kill(2);
    assert_holds(&lab.repository(), &snapshot, &chunks(1, 40));
}
