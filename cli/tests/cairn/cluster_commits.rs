//! The guarantees of commits to a cluster.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use cairn_store::documents::{Change, Query};
use cairn_store::encoding::Redundancy;
use cairn_store::{Durability, Error, ErrorKind, MirrorParent, Mode, SnapshotState};

use crate::lab::{Lab, wait_until};
use crate::proxy::Proxy;
use crate::writer::{CHUNK, Disk, NO_COPY, Writer, assert_holds, chunks, owner};

const TWO_AND_TWO: Redundancy = Redundancy::ReedSolomon { data: 2, parity: 2 };

#[test]
fn of_two_clients_that_commit_to_one_image_one_succeeds_and_the_other_is_fenced() {
    let lab = Lab::new(3);
    let (one, other) = (lab.repository(), lab.repository());
    let writer = Writer::create(&one, "vm", Redundancy::Replicas(3));
    let first = one.catalog().resolve(&"vm@1".parse().unwrap()).unwrap();
    let refused = Writer::attach(&other, &first, 2).err().unwrap();
    assert!(matches!(refused, Error::Leased { .. }), "{refused}");
    assert!(refused.to_string().contains("/mirrors/v"), "{refused}");
    // Its lease is removed while it stores a snapshot, as if its host were dead.
    let commit = writer.begin().unwrap();
    let changes = writer.store(&chunks(1, 3)).unwrap();
    let documents = one.cluster().unwrap().1;
    let lease = Query::Key(format!("leases/{}", first.image_id));
    assert!(documents.commit(&Change::default().remove(lease)).unwrap());
    let second = Writer::attach(&other, &first, 2).unwrap();
    let (lost, won) = thread::scope(|scope| {
        let lost = scope.spawn(|| commit.publish(&changes, 0, NO_COPY));
        let won = second.commit(&chunks(2, 3)).unwrap();
        (lost.join().unwrap().unwrap_err(), won)
    });
    assert!(matches!(lost, Error::Fenced { .. }), "{lost}");
    assert_holds(&one, &won, &chunks(2, 3));
    let old = one.catalog().resolve(&format!("vm@{}", commit.number()).parse().unwrap()).unwrap();
    assert!(!old.state.has_content(), "{old:?}");
}

/// All clients try at the same time. A client that is refused tries again.
#[test]
fn clients_that_compete_for_one_image_lose_no_snapshot() {
    const CLIENTS: u8 = 4;
    const EACH: u64 = 3;
    let lab = Lab::new(3);
    let repository = lab.repository();
    let writer = Writer::create(&repository, "vm", Redundancy::Replicas(2));
    writer.attachment.release(None).unwrap();
    let first = repository.catalog().resolve(&"vm@1".parse().unwrap()).unwrap();
    let refused = AtomicU64::new(0);
    let snapshots = thread::scope(|scope| {
        let clients: Vec<_> = (1..=CLIENTS)
            .map(|me| {
                let (repository, first, refused) = (lab.repository(), &first, &refused);
                scope.spawn(move || {
                    let mut published = Vec::new();
                    while (published.len() as u64) < EACH {
                        let writer = match Writer::attach(&repository, first, 10 + me) {
                            Ok(writer) => writer,
                            Err(error) => {
                                assert!(matches!(error, Error::Leased { .. }), "{error}");
                                refused.fetch_add(1, Ordering::Relaxed);
                                continue;
                            }
                        };
                        let step = published.len() as u64;
                        let own = Disk::from([(step, u64::from(me) * 100 + step)]);
                        published.push(writer.commit(&own).unwrap());
                        writer.attachment.release(None).unwrap();
                    }
                    (me, published)
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect::<Vec<_>>()
    });
    println!("{refused:?} attempts were refused");
    let mut numbers = Vec::new();
    for (me, published) in snapshots {
        for (step, snapshot) in published.iter().enumerate() {
            let own = (0..=step as u64).map(|n| (n, u64::from(me) * 100 + n)).collect();
            assert_holds(&repository, snapshot, &own);
            numbers.push(snapshot.number);
        }
    }
    numbers.sort_unstable();
    assert_eq!(numbers, (2..2 + u64::from(CLIENTS) * EACH).collect::<Vec<_>>());
}

#[test]
fn an_optimistic_commit_is_available_at_once_and_stable_with_full_redundancy() {
    let mut lab = Lab::new(4);
    let repository = lab.repository();
    let writer = Writer::create(&repository, "vm", TWO_AND_TWO);
    let pessimist = lab.repository();
    let other = Writer::create(&pessimist, "other", TWO_AND_TWO);
    writer.attachment.release(None).unwrap();
    let optimist = repository.with_durability(Durability::Optimistic);
    let first = repository.catalog().resolve(&"vm@1".parse().unwrap()).unwrap();
    let writer = Writer::attach(&optimist, &first, b'v').unwrap();
    lab.kill(1);
    let refused = other.commit(&chunks(1, 4)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    let (commit, changes, available) = writer.publish(&chunks(2, 4)).unwrap();
    assert_eq!(available.state, SnapshotState::Available);
    let state = |lab: &Lab, name: &str| lab.json(&["show", name])["state"].clone();
    assert_eq!(state(&lab, "vm@2"), "available");
    assert_holds(&lab.repository(), &available, &chunks(2, 4));
    let early = commit.complete(&available, &changes, NO_COPY).unwrap_err();
    assert_eq!(early.kind(), ErrorKind::Unavailable, "{early}");
    // A repair does not make it stable either while a peer is down.
    let repaired = lab.run(&["repair", "--json"]);
    assert_eq!(state(&lab, "vm@2"), "available", "{}", repaired.stderr);
    lab.start_peer(1, &[]);
    lab.wait_for_peers(4);
    let stable = || commit.complete(&available, &changes, NO_COPY).is_ok();
    wait_until("it has all its fragments", stable);
    assert_eq!(state(&lab, "vm@2"), "stable");
    lab.kill(0);
    lab.kill(3);
    assert_holds(&lab.repository(), &available, &chunks(2, 4));
}

/// With two of four peers, a record that needs three copies has two.
#[test]
fn a_stable_snapshot_has_a_record_with_all_its_copies() {
    let mut lab = Lab::new(4);
    let repository = lab.repository();
    Writer::create(&repository, "vm", TWO_AND_TWO).attachment.release(None).unwrap();
    let optimist = repository.with_durability(Durability::Optimistic);
    let first = repository.catalog().resolve(&"vm@1".parse().unwrap()).unwrap();
    let writer = Writer::attach(&optimist, &first, b'v').unwrap();
    lab.kill(1);
    lab.kill(2);
    let (commit, changes, available) = writer.publish(&chunks(5, 4)).unwrap();
    assert_eq!(available.state, SnapshotState::Available);
    lab.start_peer(1, &[]);
    lab.start_peer(2, &[]);
    let complete = || commit.complete(&available, &changes, NO_COPY).is_ok();
    wait_until("it has all its fragments", complete);
    // Only the peers that were down when it was published remain.
    lab.kill(0);
    lab.kill(3);
    assert_holds(&lab.repository(), &available, &chunks(5, 4));
    lab.replace_catalog(2);
    let refused = lab.run(&["catalog", "rebuild"]);
    assert_eq!(refused.code, 6, "{}", refused.stderr);
    assert!(refused.stderr.contains("2 of 4 peers answer"), "{}", refused.stderr);
    lab.ok(&["catalog", "rebuild", "--force"]);
    let shown = lab.json(&["show", "vm@2"]);
    assert_eq!(shown["state"], "stable", "{shown}");
}

#[test]
fn repair_makes_snapshots_of_a_dead_optimistic_client_stable() {
    let mut lab = Lab::new(5);
    // Another image loses data permanently.
    lab.random_disk("frail.raw", 1, 4 << 20);
    lab.ok(&["import", "frail.raw", "frail", "--redundancy", "none", "--chunk-size", "64K"]);
    let id = lab.peers[4].as_ref().unwrap().id.clone();
    lab.kill(4);
    lab.wipe(4);
    lab.ok(&["peers", "lose", &id]);
    {
        let repository = lab.repository();
        Writer::create(&repository, "vm", TWO_AND_TWO).attachment.release(None).unwrap();
        let optimist = repository.with_durability(Durability::Optimistic);
        let first = repository.catalog().resolve(&"vm@1".parse().unwrap()).unwrap();
        lab.kill(2);
        let writer = Writer::attach(&optimist, &first, b'v').unwrap();
        let available = writer.commit(&chunks(3, 4)).unwrap();
        assert_eq!(available.state, SnapshotState::Available);
        // The client ends here, as if its host died.
    }
    lab.start_peer(2, &[]);
    let repository = lab.repository();
    let resolve = || repository.catalog().resolve(&"vm@2".parse().unwrap()).unwrap();
    wait_until("it is repaired", || resolve().state == SnapshotState::Stable);
    let unreadable = || lab.json(&["peers"])["repair"]["unreadable"].as_u64();
    wait_until("the lost data is reported", || unreadable() > Some(0));
    lab.kill(0);
    lab.kill(1);
    assert_holds(&lab.repository(), &resolve(), &chunks(3, 4));
}

#[test]
fn data_that_the_peers_have_is_not_sent_again() {
    let mut lab = Lab::new(3);
    let proxy = Proxy::start(0);
    let at = lab.add_peer(&["--advertise", &proxy.address]);
    proxy.leads_to(&lab.peers[at].as_ref().unwrap().address);
    lab.wait_for_peers(4);
    let disk = lab.random_disk("disk.raw", 1, 8 << 20);
    let len = disk.len() as u64;
    let import = |name: &str| {
        let before = proxy.received();
        lab.ok(&["import", "disk.raw", name, "--redundancy", "rs=2+2"]);
        let shown = lab.json(&["show", name]);
        let figure = |field: &str| shown[field].as_u64().unwrap();
        let figures = ["dirty_bytes", "sent_bytes", "saved_bytes"].map(figure);
        (figures, proxy.received() - before)
    };
    let ([dirty, sent, saved], received) = import("one");
    assert_eq!((dirty, saved), (len, 0));
    assert!(
        (2 * len..2 * len + len / 20).contains(&sent),
        "{sent}: twice the data, and a little for the tree"
    );
    assert!(received > len / 2, "each of four peers gets half of the data: {received}");
    let ([dirty, sent, saved], received) = import("other");
    assert_eq!(dirty, len);
    assert!(saved >= len && sent < len / 100, "{sent} sent, {saved} saved");
    assert!(received < len / 200, "a peer that has half of the disk received {received} bytes");
    lab.assert_exports("other", &disk);
    // The first commit stores new chunks. The second one, to another image, has the same chunks.
    let repository = lab.repository();
    for (image, is_first) in [("live", true), ("twin", false)] {
        let writer = Writer::create(&repository, image, TWO_AND_TWO);
        let snapshot = writer.commit(&chunks(1, 20)).unwrap();
        let len = 20 * CHUNK as u64;
        let (least, most) = if is_first { (2 * len, 3 * len) } else { (0, len / 100) };
        assert!((least..=most).contains(&snapshot.sent_bytes), "{snapshot:?}");
        assert_eq!(snapshot.saved_bytes >= len, !is_first, "{snapshot:?}");
    }
}

#[test]
fn of_ten_concurrent_commits_those_with_a_reservation_succeed_and_the_others_fail_early() {
    const EACH: u64 = 64;
    let mut lab = Lab::new(0);
    // Space for four commits: each takes 8 MiB, and a fifth more because placement is uneven.
    for _ in 0..6 {
        lab.add_peer(&["--capacity", "8M"]);
    }
    lab.wait_for_peers(6);
    let writers: Vec<_> = (0..10u8)
        .map(|me| {
            let image = format!("{}vm", char::from(b'a' + me));
            Writer::create(&lab.repository(), &image, TWO_AND_TWO)
        })
        .collect();
    let barrier = Barrier::new(writers.len());
    let results = thread::scope(|scope| {
        let commits: Vec<_> = (0..)
            .zip(&writers)
            .map(|(me, writer)| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    let space = writer.repository.reserve_space(EACH * CHUNK as u64);
                    // No client releases its reservation before all have tried.
                    barrier.wait();
                    let space = space?;
                    let snapshot = writer.commit(&chunks(me, EACH));
                    drop(space);
                    // The space is reserved, so the commit does not fail.
                    Ok(snapshot.unwrap())
                })
            })
            .collect();
        commits.into_iter().map(|commit| commit.join().unwrap()).collect::<Vec<_>>()
    });
    let refused: Vec<&Error> = results.iter().filter_map(|one| one.as_ref().err()).collect();
    println!("{} of {} commits are refused", refused.len(), results.len());
    assert!((4..=8).contains(&refused.len()), "{refused:?}");
    for error in &refused {
        assert!(matches!(error, Error::NoRoom { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }
    let repository = lab.repository();
    for (me, snapshot) in (0..).zip(&results) {
        if let Ok(snapshot) = snapshot {
            assert_eq!(snapshot.state, SnapshotState::Stable);
            assert_holds(&repository, snapshot, &chunks(me, EACH));
        }
    }
    // Reservations that were not used are released.
    let reserved = || {
        let list = lab.json(&["peers"]);
        let peers = list["peers"].as_array().unwrap().clone();
        peers.iter().map(|peer| peer["reserved"].as_u64().unwrap()).sum::<u64>()
    };
    wait_until("the reservations are released", || reserved() == 0);
}

/// A client of an image, and a mirror that was stopped, both continue after the catalog's disk was
/// lost.
#[test]
fn mirrors_continue_after_the_catalog_was_rebuilt() {
    let mut lab = Lab::new(4);
    let repository = lab.repository();
    let writer = Writer::create(&repository, "vm", TWO_AND_TWO);
    let stopped = Writer::create(&repository, "stopped", TWO_AND_TWO);
    let first = repository.catalog().resolve(&"stopped@1".parse().unwrap()).unwrap();
    writer.commit(&chunks(1, 4)).unwrap();
    stopped.commit(&chunks(2, 4)).unwrap();
    let standing = stopped.attachment.standing();
    stopped.attachment.release(None).unwrap();

    lab.replace_catalog(4);
    let is_gone = || matches!(writer.attachment.renew(), Err(Error::ImageGone { .. }));
    wait_until("the new catalog answers", is_gone);
    lab.ok(&["catalog", "rebuild"]);
    let early = writer.begin().map(drop).unwrap_err();
    assert!(matches!(early, Error::CatalogRebuilt { .. }), "{early}");
    writer.attachment.renew().unwrap();
    let number = writer.attachment.reserve(1).unwrap().start;
    let unknown = writer.attachment.fail(number, "x").unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::NotFound, "it was never announced: {unknown}");
    let snapshot = writer.commit(&chunks(3, 2)).unwrap();
    assert_eq!((snapshot.state, snapshot.parent), (SnapshotState::Stable, Some(2)));
    let mut disk = chunks(1, 4);
    disk.extend(chunks(3, 2));
    assert_holds(&lab.repository(), &snapshot, &disk);
    let second = Writer::attach(&lab.repository(), &snapshot, b'x').err().unwrap();
    assert!(matches!(second, Error::Leased { .. }), "it holds the lease again: {second}");

    let repository = lab.repository();
    let owner = owner(b's');
    let newest = repository.catalog().resolve(&"stopped".parse().unwrap()).unwrap();
    let attach = |parent| repository.attach_again(&owner, &newest, Mode::ReadWrite, parent);
    let attachment = attach(&standing).unwrap();
    assert_eq!(attachment.parent(), (2, newest.root), "the peers had a record of the mirror");
    attachment.release(None).unwrap();
    // If the catalog does not know the mirror, the mirror must know its parent.
    repository.forget_mirror(&owner.id).unwrap();
    let wrong = MirrorParent { number: 1, ..standing };
    let refused = attach(&wrong).err().unwrap();
    assert!(matches!(refused, Error::UnknownParent { .. }), "{refused}");
    let attachment = attach(&standing).unwrap();
    assert_eq!(attachment.parent(), (2, newest.root));
    assert_eq!(first.image_id, newest.image_id);
    // Another writer has acquired the image since, so the old one is fenced.
    let fenced = stopped.attachment.renew().unwrap_err();
    assert_eq!(fenced.kind(), ErrorKind::Conflict, "{fenced}");
}
