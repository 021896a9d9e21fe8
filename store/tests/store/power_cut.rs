//! A power cut at each point of a workload. The repository is then opened again.
//!
//! The test program starts itself under a recorder. From the recording, it creates the directories
//! that a power cut could leave: at each point, everything that was synced, and any part of what
//! was not (`crash_images` has the model). Every one of these must open, hold what was reported to
//! its users, and accept further work.
//!
//! `CAIRN_SEED` repeats a run. `CAIRN_SOAK_SECONDS` continues with other seeds for that long.

use std::collections::BTreeSet;
use std::env;
use std::path::Path;
use std::process::Command;

use crash_images::{
    Draw, cut_the_power, kill_and_cut_the_power, leave_out_syncs, mark, record, recorded_root,
};

use crate::support::{
    assert_holds, content, disk, known_blobs, name, new_snapshot, owner, url_of, write,
};
use cairn_store::{
    Attachment, ChunkId, Error, Mode, Repository, Root, Snapshot, SnapshotRef, SnapshotState,
};

/// The repository's directory below the recorded one. Its creation is recorded, too.
const REPOSITORY: &str = "repository";
/// Bytes of a sector, which a disk writes as a whole or not at all.
const ATOM: usize = 512;

/// Seeds of chunks that are stored and never published: the first is flushed, the others are not.
const UNPUBLISHED: [u64; 3] = [901, 902, 903];

/// The last published snapshot of the workload.
const LAST: u64 = 6;
/// A snapshot that is announced and not published.
const PENDING: u64 = 7;

/// The chunks of a snapshot: two more than the snapshot before it, in two leaves of the tree.
fn chunks_of(number: u64) -> Vec<(u64, u64)> {
    (2..=number).flat_map(|n| [(n, 10 * n), (300 + n, 10 * n + 1)]).collect()
}

fn attach(repository: &Repository) -> Attachment {
    let newest = repository.catalog().resolve(&"vm".parse::<SnapshotRef>().unwrap()).unwrap();
    repository.attach(&owner(1), &newest, Mode::ReadWrite).unwrap()
}

fn checkpoint(repository: &Repository, attachment: &Attachment, number: u64) {
    assert_eq!(attachment.reserve(1).unwrap().start, number);
    attachment.begin(&new_snapshot(number)).unwrap();
    mark(&format!("begun {number}"));
    store(repository, attachment, number);
}

/// Stores and publishes an announced snapshot.
fn store(repository: &Repository, attachment: &Attachment, number: u64) {
    let (_, base) = attachment.parent();
    let all = chunks_of(number);
    let root = write(repository, &base, &all[all.len() - 2..]);
    attachment.announced(number).publish_tree(&root, 0, 0).unwrap();
    mark(&format!("published {number}"));
}

/// The recorded workload. It does nothing if it is not recorded.
#[test]
fn workload() {
    let Some(root) = recorded_root() else { return };
    let path = root.join(REPOSITORY);
    let url = url_of(&path);
    {
        let repository = Repository::open_or_create(&url).unwrap();
        mark("created");
        repository.create_image(&name("vm"), disk(1000)).unwrap();
        mark("published 1");
        let attachment = attach(&repository);
        checkpoint(&repository, &attachment, 2);
        repository.put_chunk(&content(UNPUBLISHED[0])).unwrap();
        repository.flush().unwrap();
        mark(&format!("stored {}", UNPUBLISHED[0]));
        checkpoint(&repository, &attachment, 3);
        // This takes space in the segment that is freed when the handle is dropped.
        repository.put_chunk(&content(UNPUBLISHED[1])).unwrap();
    }
    {
        // The segment is continued, and the databases' logs begin again.
        let repository = Repository::open(&url).unwrap();
        let attachment = attach(&repository);
        checkpoint(&repository, &attachment, 4);
        for database in ["index.db", "catalog.db"] {
            // SQLite does this by itself after a thousand pages. From here on the log is
            // overwritten.
            let connection = rusqlite::Connection::open(path.join(database)).unwrap();
            connection.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(())).unwrap();
        }
        for number in 5..=LAST {
            checkpoint(&repository, &attachment, number);
        }
        attachment.reserve(1).unwrap();
        attachment.begin(&new_snapshot(PENDING)).unwrap();
        mark(&format!("begun {PENDING}"));
        repository.put_chunk(&content(UNPUBLISHED[2])).unwrap();
    }
    mark("done");
}

/// Continues after a killed process: stores the snapshot again that was announced last.
#[test]
fn next_workload() {
    let Some(root) = recorded_root() else { return };
    let repository = Repository::open(&url_of(&root.join(REPOSITORY))).unwrap();
    let attachment = attach(&repository);
    let last = repository.catalog().snapshots(&name("vm")).unwrap().pop().unwrap();
    store(&repository, &attachment, last.number);
    drop((attachment, repository));
    mark("done");
}

fn command(workload: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    let name = format!("power_cut::{workload}");
    command.args(["--exact", &name, "--test-threads=1"]);
    command
}

/// What was reported to the workload before the power cut.
struct Reported<'a>(&'a [String]);

impl Reported<'_> {
    fn has(&self, text: &str) -> bool {
        self.0.iter().any(|mark| mark == text)
    }

    /// The numbers that were reported with this word.
    fn all(&self, word: &str) -> BTreeSet<u64> {
        let number = |mark: &String| mark.strip_prefix(word)?.strip_prefix(' ')?.parse().ok();
        self.0.iter().filter_map(number).collect()
    }
}

/// Opens a crash image, checks it, continues to use it and checks it again.
fn check(root: &Path, marks: &[String]) {
    let reported = Reported(marks);
    let path = root.join(REPOSITORY);
    let url = url_of(&path);
    let open = || {
        if reported.has("created") {
            Repository::open(&url)
        } else {
            Repository::open_or_create(&url)
        }
    };
    let added = {
        let repository =
            open().unwrap_or_else(|error| panic!("the repository does not open: {error}"));
        check_content(&repository, &path, &reported, None);
        take_snapshot(&repository)
    };
    let repository = Repository::open(&url).unwrap();
    check_content(&repository, &path, &reported, Some(&added));
}

/// Takes one more snapshot, as a restarted mirror does. Returns it with its chunks.
fn take_snapshot(repository: &Repository) -> (Snapshot, Vec<(u64, u64)>) {
    if repository.catalog().images().unwrap().is_empty() {
        repository.create_image(&name("vm"), disk(1000)).unwrap();
    }
    let attachment = attach(repository);
    for snapshot in repository.catalog().snapshots(&name("vm")).unwrap() {
        if snapshot.state == SnapshotState::Pending {
            attachment.fail(snapshot.number, "the power was cut").unwrap();
        }
    }
    let (parent, base) = attachment.parent();
    let number = attachment.reserve(1).unwrap().start;
    attachment.begin(&new_snapshot(number)).unwrap();
    // Chunks that the repository has, may have, and does not have.
    let new = [(2, 20), (900, UNPUBLISHED[0]), (901, UNPUBLISHED[1]), (902, 1000)];
    let root = write(repository, &base, &new);
    let snapshot = attachment.announced(number).publish_tree(&root, 0, 0).unwrap();
    let old = chunks_of(parent).into_iter().filter(|(index, _)| *index != 2);
    (snapshot, old.chain(new).collect())
}

fn check_content(
    repository: &Repository,
    path: &Path,
    reported: &Reported<'_>,
    added: Option<&(Snapshot, Vec<(u64, u64)>)>,
) {
    let images = repository.catalog().images().unwrap();
    let snapshots = match images.is_empty() {
        true => Vec::new(),
        false => repository.catalog().snapshots(&name("vm")).unwrap(),
    };
    let state_of = |number| snapshots.iter().find(|s| s.number == number).map(|s| s.state);
    for number in reported.all("published") {
        let state = state_of(number);
        let what = format!("snapshot {number}, which was published: {images:?}, {snapshots:?}");
        assert_eq!(state, Some(SnapshotState::Stable), "{what}");
    }
    for number in reported.all("begun") {
        assert!(state_of(number).is_some(), "snapshot {number} was announced and is lost");
    }
    for snapshot in &snapshots {
        match (added, snapshot.state) {
            (Some((added, chunks)), _) if snapshot.number == added.number => {
                assert_holds(repository, snapshot, chunks);
            }
            (_, SnapshotState::Stable) => {
                assert_holds(repository, snapshot, &chunks_of(snapshot.number));
            }
            (None, SnapshotState::Pending) | (Some(_), SnapshotState::Failed) => {}
            (_, state) => panic!("snapshot {} is {state:?}", snapshot.number),
        }
    }
    if let Some(mirror) = repository.catalog().mirror(&owner(1).id).unwrap() {
        let stable = snapshots.iter().rfind(|s| s.state == SnapshotState::Stable);
        let newest = stable.map(|s| (s.number, s.root)).unwrap_or((0, Root::default()));
        assert_eq!((mirror.parent, mirror.root), newest, "the mirror's parent and its content");
    }
    check_chunks(repository, path, &reported.all("stored"));
}

/// Checks that every chunk is complete or unknown, and that those in `stored` exist.
fn check_chunks(repository: &Repository, path: &Path, stored: &BTreeSet<u64>) {
    let mut buf = content(0);
    for seed in UNPUBLISHED.into_iter().chain(chunks_of(LAST).into_iter().map(|(_, seed)| seed)) {
        match repository.read_chunk(&ChunkId::of(&content(seed)), &mut buf) {
            Ok(()) => assert!(buf == content(seed), "chunk {seed} has other content"),
            Err(Error::MissingBlob { .. }) => {
                assert!(!stored.contains(&seed), "chunk {seed} was flushed and is lost");
            }
            Err(error) => panic!("chunk {seed}: {error}"),
        }
    }
    // Some of the blobs are tree nodes, which are shorter. The content of each blob matches its
    // name.
    for id in known_blobs(path) {
        match repository.read_chunk(&ChunkId::from_bytes(id), &mut buf) {
            Ok(()) => {}
            Err(error) if error.to_string().contains("are expected") => {}
            Err(error) => panic!("a blob in the index: {error}"),
        }
    }
}

#[test]
fn a_power_cut_at_any_point_leaves_what_was_reported() {
    cut_the_power(&record(&command("workload")), 6, ATOM, check);
}

/// A process is killed during a publication, another process publishes the same snapshot, and then
/// the power is cut. Data that the second process found may have been only in the page cache.
#[test]
fn a_power_cut_after_a_kill_leaves_what_was_reported_to_the_next_process() {
    let recording = record(&command("workload"));
    let (during, draw) = (("begun 4", "published 4"), Draw { seed: 1, images: 1, atom: ATOM });
    kill_and_cut_the_power(&recording, during, &command("next_workload"), draw, check);
}

#[test]
fn the_test_detects_a_missing_sync() {
    let recording = record(&command("workload"));
    let names = [
        "",
        "repository",
        "repository/segments",
        "repository/segments/00000001",
        "repository/index.db-wal",
        "repository/index.db",
        "repository/catalog.db-wal",
        "repository/catalog.db",
    ];
    for name in names {
        leave_out_syncs(&recording, name, Draw { seed: 1, images: 4, atom: ATOM }, check);
    }
}
