//! The power is cut, at each point of a workload, and the repository is opened again.
//!
//! The test program starts itself under a recorder. From what that saw, it makes the directories that a
//! power cut could leave: at each point, what was synced, and any part of what was not (`crash_images` has
//! the model). Every one of them must open, hold what its users were told, and be of use for more.
//!
//! `CAIRN_SEED` repeats a run, `CAIRN_SOAK_SECONDS` goes on with others for that long.

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

/// Where the repository is, below what is recorded: its own directory is made, too.
const REPOSITORY: &str = "repository";
/// A sector of a disk.
const ATOM: usize = 512;

/// Chunks that are stored and never published: the first is flushed, the others are not.
const LOOSE: [u64; 3] = [901, 902, 903];

/// The last snapshot of the workload that is published, and one that is only begun.
const LAST: u64 = 6;
const PENDING: u64 = 7;

/// What a snapshot holds: two chunks more than the one before it, in two leaves of the tree.
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

/// Stores and publishes a snapshot that was begun.
fn store(repository: &Repository, attachment: &Attachment, number: u64) {
    let (_, base) = attachment.parent();
    let all = chunks_of(number);
    let root = write(repository, &base, &all[all.len() - 2..]);
    attachment.publish(number, &root, 0, 0).unwrap();
    mark(&format!("published {number}"));
}

/// What is recorded; when it is not, it does nothing.
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
        repository.put_chunk(&content(LOOSE[0])).unwrap();
        repository.flush().unwrap();
        mark(&format!("stored {}", LOOSE[0]));
        checkpoint(&repository, &attachment, 3);
        // Room in the segment that is given back with the handle.
        repository.put_chunk(&content(LOOSE[1])).unwrap();
    }
    {
        // The segment is continued, and the databases' logs begin again.
        let repository = Repository::open(&url).unwrap();
        let attachment = attach(&repository);
        checkpoint(&repository, &attachment, 4);
        for database in ["index.db", "catalog.db"] {
            // As it happens by itself after a thousand pages: from here on the log is overwritten.
            let connection = rusqlite::Connection::open(path.join(database)).unwrap();
            connection.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(())).unwrap();
        }
        for number in 5..=LAST {
            checkpoint(&repository, &attachment, number);
        }
        attachment.reserve(1).unwrap();
        attachment.begin(&new_snapshot(PENDING)).unwrap();
        mark(&format!("begun {PENDING}"));
        repository.put_chunk(&content(LOOSE[2])).unwrap();
    }
    mark("done");
}

/// What a killed process leaves is taken up: the snapshot that was begun last is stored once more.
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

/// What the workload had been told before the power cut.
struct Told<'a>(&'a [String]);

impl Told<'_> {
    fn has(&self, text: &str) -> bool {
        self.0.iter().any(|mark| mark == text)
    }

    /// Numbers that were told with this word.
    fn all(&self, word: &str) -> BTreeSet<u64> {
        let number = |mark: &String| mark.strip_prefix(word)?.strip_prefix(' ')?.parse().ok();
        self.0.iter().filter_map(number).collect()
    }
}

/// Opens an image, checks it, goes on with it and checks it again.
fn check(root: &Path, marks: &[String]) {
    let told = Told(marks);
    let path = root.join(REPOSITORY);
    let url = url_of(&path);
    let open = || {
        if told.has("created") { Repository::open(&url) } else { Repository::open_or_create(&url) }
    };
    let added = {
        let repository = open().unwrap_or_else(|error| panic!("it does not open: {error}"));
        check_content(&repository, &path, &told, None);
        go_on(&repository)
    };
    let repository = Repository::open(&url).unwrap();
    check_content(&repository, &path, &told, Some(&added));
}

/// Takes one more snapshot, as a mirror does that comes back.
fn go_on(repository: &Repository) -> (Snapshot, Vec<(u64, u64)>) {
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
    // Chunks that are there already, that may be, and that are not.
    let new = [(2, 20), (900, LOOSE[0]), (901, LOOSE[1]), (902, 1000)];
    let root = write(repository, &base, &new);
    let snapshot = attachment.publish(number, &root, 0, 0).unwrap();
    let old = chunks_of(parent).into_iter().filter(|(index, _)| *index != 2);
    (snapshot, old.chain(new).collect())
}

fn check_content(
    repository: &Repository,
    path: &Path,
    told: &Told<'_>,
    added: Option<&(Snapshot, Vec<(u64, u64)>)>,
) {
    let images = repository.catalog().images().unwrap();
    let snapshots = match images.is_empty() {
        true => Vec::new(),
        false => repository.catalog().snapshots(&name("vm")).unwrap(),
    };
    let state_of = |number| snapshots.iter().find(|s| s.number == number).map(|s| s.state);
    for number in told.all("published") {
        let state = state_of(number);
        assert_eq!(state, Some(SnapshotState::Stable), "snapshot {number}, which was published");
    }
    for number in told.all("begun") {
        assert!(state_of(number).is_some(), "snapshot {number} was begun and is gone");
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
        assert_eq!((mirror.parent, mirror.root), newest, "what the mirror is based on");
    }
    check_chunks(repository, path, &told.all("stored"));
}

/// Every chunk is whole or unknown, and those that were stored are there.
fn check_chunks(repository: &Repository, path: &Path, stored: &BTreeSet<u64>) {
    let mut buf = content(0);
    for seed in LOOSE.into_iter().chain(chunks_of(LAST).into_iter().map(|(_, seed)| seed)) {
        match repository.read_chunk(&ChunkId::of(&content(seed)), &mut buf) {
            Ok(()) => assert!(buf == content(seed), "chunk {seed} reads as another"),
            Err(Error::MissingBlob { .. }) => {
                assert!(!stored.contains(&seed), "chunk {seed} was flushed and is gone");
            }
            Err(error) => panic!("chunk {seed}: {error}"),
        }
    }
    // Tree nodes are among them, which are shorter; what there is of a blob has its name in any case.
    for id in known_blobs(path) {
        match repository.read_chunk(&ChunkId::from_bytes(id), &mut buf) {
            Ok(()) => {}
            Err(error) if error.to_string().contains("are expected") => {}
            Err(error) => panic!("a blob that the index knows: {error}"),
        }
    }
}

#[test]
fn a_power_cut_at_any_point_leaves_what_was_told() {
    cut_the_power(&record(&command("workload")), 6, ATOM, check);
}

/// A process is killed in the middle of a publication, another one publishes the same, and then the power
/// is cut: what the second one found was perhaps only in the kernel's hands.
#[test]
fn a_power_cut_after_a_kill_leaves_what_the_next_process_was_told() {
    let recording = record(&command("workload"));
    let (during, draw) = (("begun 4", "published 4"), Draw { seed: 1, images: 1, atom: ATOM });
    kill_and_cut_the_power(&recording, during, &command("next_workload"), draw, check);
}

#[test]
fn a_sync_that_is_left_out_is_found() {
    let recording = record(&command("workload"));
    let documents = [
        "",
        "repository",
        "repository/segments",
        "repository/segments/00000001",
        "repository/index.db-wal",
        "repository/index.db",
        "repository/catalog.db-wal",
        "repository/catalog.db",
    ];
    for name in documents {
        leave_out_syncs(&recording, name, Draw { seed: 1, images: 4, atom: ATOM }, check);
    }
}
