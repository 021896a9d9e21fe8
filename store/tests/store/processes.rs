//! Several processes use one repository. Some of them are killed.
//!
//! The test program starts itself again with a role in its environment. The test `role` does the
//! work of the role, and nothing without one.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::documents::for_each_document_store;
use crate::support::{
    TestRepository, assert_holds, content, disk, name, new_snapshot, open, owner, write,
};
use cairn_store::{ChunkId, ErrorKind, Mode, Repository, Root, SnapshotState};

const ROLE: &str = "CAIRN_TEST_ROLE";
const STORE: &str = "CAIRN_TEST_STORE";
/// The address of the documents, if they are not in the directory.
const CATALOG: &str = "CAIRN_TEST_CATALOG";
const SEED: &str = "CAIRN_TEST_SEED";

for_each_document_store!(
    processes_that_want_one_image_write_one_after_the_other,
    a_kill_at_any_moment_leaves_every_published_snapshot_readable,
);

fn start(role: &str, url: &str, seed: u64) -> Child {
    start_with(role, url, None, seed)
}

fn start_with(role: &str, url: &str, documents: Option<&str>, seed: u64) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    if let Some(documents) = documents {
        command.env(CATALOG, documents);
    }
    command
        .args(["--exact", "processes::role", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(STORE, url)
        .env(SEED, seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn role() {
    let Ok(role) = env::var(ROLE) else { return };
    let url = env::var(STORE).unwrap();
    let seed: u64 = env::var(SEED).unwrap().parse().unwrap();
    match role.as_str() {
        "fill" => fill(&url, seed),
        "contend" => contend(&url, seed),
        "checkpoint" => checkpoint_forever(&url, seed),
        "append" => append_forever(&url, seed),
        other => panic!("unknown role {other}"),
    }
}

/// The chunks of a snapshot of the role `fill`: some that all processes have, and some of its own.
fn chunks_of(seed: u64) -> Vec<(u64, u64)> {
    (0..20).map(|n| (n, n)).chain((20..40).map(|n| (n, 1000 * seed + n))).collect()
}

/// Creates an image and two snapshots of it, at the same time as other processes of this role.
fn fill(url: &str, seed: u64) {
    let repository = Repository::open_or_create(url).unwrap();
    let image = name(&format!("vm{seed}"));
    let first = repository.create_image(&image, disk(1000)).unwrap();
    let attachment = repository.attach(&owner(seed as u8), &first, Mode::ReadWrite).unwrap();
    let numbers = attachment.reserve(8).unwrap();
    let chunks = chunks_of(seed);
    let (mut root, mut number) = (first.root, numbers.start);
    for part in chunks.chunks(20) {
        root = thread::scope(|scope| {
            // Two threads of each process store the same chunks.
            scope.spawn(|| {
                part.iter().for_each(|(_, seed)| {
                    repository.put_chunk(&content(*seed)).unwrap();
                })
            });
            write(&repository, &root, part)
        });
        attachment.begin(&new_snapshot(number)).unwrap();
        attachment.announced(number).publish_tree(&root, 0, 0).unwrap();
        attachment.renew().unwrap();
        number += 1;
    }
    attachment.release(Some(number..numbers.end)).unwrap();
}

#[test]
fn processes_that_fill_one_repository_do_not_disturb_each_other() {
    let dir = tempfile::TempDir::new().unwrap();
    let url = format!("dir:{}/repository", dir.path().display());
    let processes = (1..=4).map(|seed| start("fill", &url, seed)).collect::<Vec<_>>();
    for process in processes {
        assert!(process.wait_with_output().unwrap().status.success());
    }
    let repository = Repository::open(&url).unwrap();
    for seed in 1..=4 {
        let snapshots = repository.catalog().snapshots(&name(&format!("vm{seed}"))).unwrap();
        assert_eq!(snapshots.iter().map(|s| s.number).collect::<Vec<_>>(), [1, 2, 3]);
        assert_holds(&repository, &snapshots[1], &chunks_of(seed)[..20]);
        assert_holds(&repository, &snapshots[2], &chunks_of(seed));
    }
    let segments = std::fs::read_dir(dir.path().join("repository/segments")).unwrap().count();
    assert!((1..=4).contains(&segments), "{segments}: at most one for each process");
}

/// Attaches the image when it is free, publishes one snapshot and releases it, five times.
fn contend(url: &str, seed: u64) {
    let repository = open(url, env::var(CATALOG).ok().as_deref());
    let first = repository.catalog().resolve(&"vm@1".parse().unwrap()).unwrap();
    let mut published = 0;
    while published < 5 {
        let attachment = match repository.attach(&owner(seed as u8), &first, Mode::ReadWrite) {
            Ok(attachment) => attachment,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
                thread::sleep(Duration::from_millis(1));
                continue;
            }
        };
        let (_, root) = attachment.parent();
        let number = attachment.reserve(1).unwrap().start;
        attachment.begin(&new_snapshot(number)).unwrap();
        let root = write(&repository, &root, &[(published, 100 * seed + published)]);
        attachment.announced(number).publish_tree(&root, 0, 0).unwrap();
        attachment.release(None).unwrap();
        published += 1;
    }
}

fn processes_that_want_one_image_write_one_after_the_other(test: &TestRepository) {
    test.image("vm");
    let writers = (1..=4)
        .map(|seed| start_with("contend", &test.url(), test.catalog_address(), seed))
        .collect::<Vec<_>>();
    for writer in writers {
        assert!(writer.wait_with_output().unwrap().status.success());
    }
    let snapshots = test.repository.catalog().snapshots(&name("vm")).unwrap();
    assert_eq!(
        snapshots.iter().map(|s| s.number).collect::<Vec<_>>(),
        (1..=21).collect::<Vec<_>>()
    );
    for seed in 1..=4 {
        let own = snapshots.iter().filter(|s| s.mirror == Some(owner(seed).id)).collect::<Vec<_>>();
        assert_eq!(own.len(), 5);
        let chunks = (0..5).map(|n| (n, 100 * u64::from(seed) + n)).collect::<Vec<_>>();
        for (count, snapshot) in own.iter().enumerate() {
            assert_holds(&test.repository, snapshot, &chunks[..=count]);
        }
    }
}

/// The chunk that snapshot `number` adds.
fn step(number: u64) -> (u64, u64) {
    (number % 1000, number)
}

/// Publishes one snapshot after the other until it is killed, and prints each number.
fn checkpoint_forever(url: &str, seed: u64) {
    let repository = open(url, env::var(CATALOG).ok().as_deref());
    let newest = repository.catalog().resolve(&"vm".parse().unwrap()).unwrap();
    let attachment = repository.attach(&owner(seed as u8), &newest, Mode::ReadWrite).unwrap();
    let (_, mut root) = attachment.parent();
    for _ in 0..10_000 {
        let number = attachment.reserve(1).unwrap().start;
        attachment.begin(&new_snapshot(number)).unwrap();
        root = write(&repository, &root, &[step(number)]);
        attachment.announced(number).publish_tree(&root, 0, 0).unwrap();
        println!("published {number}");
    }
}

fn a_kill_at_any_moment_leaves_every_published_snapshot_readable(test: &TestRepository) {
    const ROUNDS: u64 = 20;
    test.image("vm");
    let mut reported = Vec::new();
    for round in 0..ROUNDS {
        let mut writer = start_with("checkpoint", &test.url(), test.catalog_address(), 1);
        let lines = BufReader::new(writer.stdout.take().unwrap()).lines();
        // The writer is killed after a few publications, at a point of the next one that differs in
        // each round.
        let mut published = lines
            .map_while(Result::ok)
            .filter_map(|line| line.strip_prefix("published ")?.parse::<u64>().ok());
        reported.extend(published.by_ref().take(1 + round as usize % 3));
        thread::sleep(Duration::from_micros(round * 700));
        writer.kill().unwrap();
        reported.extend(published);
        writer.wait().unwrap();
    }

    let repository = test.again();
    let snapshots = repository.catalog().snapshots(&name("vm")).unwrap();
    let stable = snapshots.iter().filter(|s| s.state == SnapshotState::Stable).collect::<Vec<_>>();
    let mut chunks = Vec::new();
    for snapshot in &stable {
        if snapshot.number > 1 {
            chunks.push(step(snapshot.number));
        }
        assert_holds(&repository, snapshot, &chunks);
    }
    for number in reported {
        assert!(
            stable.iter().any(|s| s.number == number),
            "snapshot {number} was reported as published and is lost"
        );
    }
    assert!(stable.len() > ROUNDS as usize);
    let mirror = repository.catalog().mirror(&owner(1).id).unwrap().unwrap();
    assert_eq!(
        mirror.parent,
        stable.last().unwrap().number,
        "the mirror's parent moves together with the snapshot"
    );

    // The segment of the killed processes is continued, and the repository is usable.
    assert_eq!(std::fs::read_dir(test.dir.path().join("segments")).unwrap().count(), 1);
    let newest = repository.catalog().resolve(&"vm".parse().unwrap()).unwrap();
    let attachment = repository.attach(&owner(1), &newest, Mode::ReadWrite).unwrap();
    assert_ne!(attachment.parent().1, Root::default());
}

/// Stores one chunk after the other until it is killed, some of them the same as other processes,
/// and prints each when it is durable.
fn append_forever(url: &str, seed: u64) {
    let repository = Repository::open(url).unwrap();
    for n in 0..10_000 {
        let chunks = [n / 3, 1_000_000 * seed + n];
        for seed in chunks {
            repository.put_chunk(&content(seed)).unwrap();
        }
        repository.flush().unwrap();
        chunks.iter().for_each(|seed| println!("stored {seed}"));
    }
}

#[test]
fn kills_among_many_writers_leave_no_blob_in_the_index_that_cannot_be_read() {
    const ROUNDS: u64 = 12;
    const WRITERS: u64 = 3;
    let test = TestRepository::new();
    let mut reported = Vec::new();
    for round in 0..ROUNDS {
        // The writers are killed one after the other. Those that live longer have the index open,
        // and may continue the segment of a killed one.
        let mut writers: Vec<_> = (1..=WRITERS)
            .map(|writer| start("append", &test.url(), WRITERS * round + writer))
            .collect();
        let mut outputs: Vec<_> = writers
            .iter_mut()
            .map(|writer| BufReader::new(writer.stdout.take().unwrap()).lines())
            .map(|lines| lines.map_while(Result::ok))
            .map(|lines| lines.filter_map(|l| l.strip_prefix("stored ")?.parse::<u64>().ok()))
            .collect();
        reported.extend(outputs[0].next());
        thread::sleep(Duration::from_micros(700 * round));
        for writer in &mut writers {
            writer.kill().unwrap();
            thread::sleep(Duration::from_millis(5 * (round % 3)));
        }
        reported.extend(outputs.into_iter().flatten());
        for mut writer in writers {
            writer.wait().unwrap();
        }
    }
    assert!(reported.len() >= ROUNDS as usize, "a writer ended before it stored anything");
    let repository = Repository::open(&test.url()).unwrap();
    let mut buf = content(0);
    for seed in reported {
        let id = ChunkId::of(&content(seed));
        repository.read_chunk(&id, &mut buf).unwrap_or_else(|error| panic!("{seed}: {error}"));
    }
    for id in test.known_blobs() {
        repository.read_chunk(&ChunkId::from_bytes(id), &mut buf).unwrap();
    }
}
