//! Images, snapshots, clones and their content.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::documents::for_each_document_store;
use crate::support::{
    CHUNK, TestRepository, assert_holds, content, disk, name, new_snapshot, write,
};
use cairn_store::collection::CollectionNumber;
use cairn_store::encoding::StoragePolicy;
use cairn_store::{
    BlobId, Blobs, ChunkIndex, Error, ErrorKind, NewBlob, NewSnapshot, Repository, Result, Root,
    SnapshotRef, SnapshotState,
};
use tempfile::TempDir;

for_each_document_store!(
    an_image_begins_with_an_empty_stable_snapshot,
    an_imported_image_holds_what_was_written,
    objects_that_do_not_exist_are_reported_as_not_found,
    a_clone_shares_content_and_is_independent_of_its_source,
    snapshots_without_content_cannot_be_cloned_and_the_error_says_why,
    a_disk_grows_and_its_snapshots_keep_their_sizes,
    the_last_snapshot_with_content_cannot_be_removed,
);

fn at(text: &str) -> SnapshotRef {
    text.parse().unwrap()
}

fn kind<T>(result: Result<T>) -> ErrorKind {
    result.err().expect("it is refused").kind()
}

fn an_image_begins_with_an_empty_stable_snapshot(test: &TestRepository) {
    let first = test.image("vm1");
    assert_eq!(first.name().to_string(), "vm1@1");
    assert_eq!((first.root, first.state), (Root(None), SnapshotState::Stable));
    assert_eq!(test.repository.catalog().resolve(&at("vm1")).unwrap(), first);
    assert_eq!(
        test.repository.chunk_at(&first.root, first.geometry, ChunkIndex(999)).unwrap(),
        None
    );

    let image = test.repository.catalog().image(&name("vm1")).unwrap();
    assert_eq!((image.snapshots, image.newest, image.geometry), (1, Some(1), disk(1000)));
    assert_eq!(kind(test.repository.create_image(&name("vm1"), disk(1))), ErrorKind::Conflict);
}

fn an_imported_image_holds_what_was_written(test: &TestRepository) {
    let seeds = [(0, 7), (1, 8), (999, 7)];
    let root = write(&test.repository, &Root::default(), &seeds);
    let snapshot = test.repository.publish_image(&name("a"), disk(1000), &root, 10, 20).unwrap();
    assert_eq!((snapshot.stored_bytes, snapshot.dirty_bytes), (10, 20));
    assert_holds(&test.again(), &snapshot, &seeds);
}

fn objects_that_do_not_exist_are_reported_as_not_found(test: &TestRepository) {
    test.image("vm1");
    for missing in ["vm2", "vm1@2", "vm1@label"] {
        assert_eq!(
            kind(test.repository.catalog().resolve(&at(missing))),
            ErrorKind::NotFound,
            "{missing}"
        );
    }
    assert_eq!(kind(test.repository.catalog().image(&name("vm2"))), ErrorKind::NotFound);
    assert_eq!(kind(test.repository.catalog().snapshots(&name("vm2"))), ErrorKind::NotFound);
    assert_eq!(kind(test.repository.remove_image(&name("vm2"), true)), ErrorKind::NotFound);
}

fn a_clone_shares_content_and_is_independent_of_its_source(test: &TestRepository) {
    let repository = &test.repository;
    let root = write(repository, &Root::default(), &[(3, 3)]);
    repository.publish_image(&name("a"), disk(1000), &root, 0, 0).unwrap();
    let clone = repository.clone_snapshot(&at("a"), &name("b")).unwrap();
    assert_eq!((clone.name().to_string().as_str(), clone.root), ("b@1", root));
    assert_eq!(repository.catalog().image(&name("b")).unwrap().origin.as_deref(), Some("a@1"));
    assert_eq!(kind(repository.clone_snapshot(&at("a"), &name("b"))), ErrorKind::Conflict);

    repository.remove_image(&name("a"), false).unwrap();
    assert_holds(repository, &clone, &[(3, 3)]);
}

fn snapshots_without_content_cannot_be_cloned_and_the_error_says_why(test: &TestRepository) {
    let attachment = test.attach(1, &test.image("a")).unwrap();
    let number = attachment.reserve(1).unwrap().start;
    attachment.begin(&new_snapshot(number)).unwrap();
    assert_eq!(kind(test.repository.clone_snapshot(&at("a@2"), &name("b"))), ErrorKind::Conflict);
    attachment.fail(number, "the disk was full").unwrap();
    let error = test.repository.clone_snapshot(&at("a@2"), &name("b")).unwrap_err();
    assert!(error.to_string().contains("the disk was full"), "{error}");
    assert_eq!(
        test.repository.catalog().resolve(&at("a")).unwrap().number,
        1,
        "the newest stable snapshot"
    );
}

fn a_disk_grows_and_its_snapshots_keep_their_sizes(test: &TestRepository) {
    let repository = &test.repository;
    let (catalog, vm) = (repository.catalog(), name("a"));
    let third_chunk = repository.put_chunk(&content(3)).unwrap().id;
    let changes = BTreeMap::from([(ChunkIndex(3), Some(third_chunk))]);
    let root = repository.commit_tree(&Root::default(), disk(200), &changes).unwrap().root;
    let first = repository.publish_image(&vm, disk(200), &root, 0, 0).unwrap();
    let writer = test.attach(1, &first).unwrap();
    assert_eq!(writer.renew().unwrap(), disk(200).size());
    for refused in [disk(199).size(), disk(200).size() + 1, 0, u64::MAX] {
        assert_eq!(kind(catalog.resize(&vm, refused)), ErrorKind::Invalid, "{refused}");
    }
    assert_eq!(catalog.resize(&vm, disk(200).size()).unwrap().geometry, disk(200), "no change");
    assert_eq!(catalog.resize(&vm, disk(1000).size()).unwrap().geometry, disk(200));
    assert_eq!(catalog.image(&vm).unwrap().geometry, disk(1000));
    assert_eq!(catalog.resolve(&at("a@1")).unwrap().geometry, disk(200));
    assert_eq!(writer.renew().unwrap(), disk(1000).size(), "the writer learns of it");
    assert_eq!(writer.geometry(), disk(200), "until the mirror has grown");

    // A checkpoint from before the growth, and one from after it.
    let numbers = writer.reserve(2).unwrap();
    let chunk = repository.put_chunk(&content(5)).unwrap().id;
    for (number, chunks, at) in [(numbers.start, 200, 199), (numbers.start + 1, 1000, 999)] {
        writer.grow(disk(chunks).size()).unwrap();
        let new = NewSnapshot { size: disk(chunks).size(), ..new_snapshot(number) };
        let changes = BTreeMap::from([(ChunkIndex(at), Some(chunk))]);
        let published = writer.begin(&new).unwrap().publish(&changes, 0, &|_, _| false).unwrap();
        assert_eq!(published.geometry, disk(chunks));
    }
    let [second, third] = ["a@2", "a@3"].map(|name| catalog.resolve(&at(name)).unwrap());
    assert_holds(repository, &second, &[(3, 3), (199, 5)]);
    assert_holds(repository, &third, &[(3, 3), (199, 5), (999, 5)]);
    assert_eq!(third.root, write(repository, &Root::default(), &[(3, 3), (199, 5), (999, 5)]));
    let clone = repository.clone_snapshot(&at("a@2"), &name("b")).unwrap();
    assert_eq!((clone.geometry, clone.root), (disk(200), second.root));
    assert_eq!(catalog.image(&name("b")).unwrap().geometry, disk(200));
}

fn the_last_snapshot_with_content_cannot_be_removed(test: &TestRepository) {
    let attachment = test.attach(1, &test.image("a")).unwrap();
    assert!(matches!(test.repository.remove_snapshot(&at("a@1")), Err(Error::OnlyStable { .. })));
    let number = attachment.reserve(1).unwrap().start;
    attachment.begin(&new_snapshot(number)).unwrap();
    assert_eq!(kind(test.repository.remove_snapshot(&at("a@2"))), ErrorKind::Conflict, "pending");
    attachment.announced(number).publish_tree(&Root::default(), 0, 0).unwrap();
    assert_eq!(test.repository.remove_snapshot(&at("a@1")).unwrap().number, 1);
    assert_eq!(kind(test.repository.catalog().resolve(&at("a@1"))), ErrorKind::NotFound);
}

#[test]
fn a_damaged_chunk_or_node_is_reported_as_corrupt() {
    let test = TestRepository::new();
    let root = write(&test.repository, &Root::default(), &[(5, 5)]);
    test.repository.flush().unwrap();
    let geometry = disk(1000);
    let id = test.repository.chunk_at(&root, geometry, ChunkIndex(5)).unwrap().unwrap();
    let chunk = test.locate(id.as_bytes());
    let node = test.locate(root.0.unwrap().as_bytes());
    // A fresh handle has an empty cache.
    let fresh = || Repository::open(&test.url()).unwrap();
    let mut buf = vec![0; CHUNK];

    for ((file, part), damaged) in [(&chunk, false), (&node, true)] {
        let good = fs::read(file).unwrap();
        let mut flipped = good.clone();
        flipped[(part.start + part.end) / 2] ^= 1;
        for bad in [&flipped[..], &good[..part.end - 1], &[]] {
            fs::write(file, bad).unwrap();
            let repository = fresh();
            let found = repository.chunk_at(&root, geometry, ChunkIndex(5));
            let read = repository.read_chunk(&id, &mut buf);
            let result = if damaged { found.map(|_| ()) } else { read };
            assert_eq!(kind(result), ErrorKind::Corrupt);
        }
        fs::write(file, good).unwrap();
    }
    fresh().read_chunk(&id, &mut buf).unwrap();
    assert!(buf == content(5));
}

#[test]
fn a_chunk_of_another_length_is_reported_as_corrupt() {
    let test = TestRepository::new();
    let id = test.repository.put_chunk(&content(1)).unwrap().id;
    for len in [CHUNK / 2, CHUNK * 2] {
        assert_eq!(kind(test.repository.read_chunk(&id, &mut vec![0; len])), ErrorKind::Corrupt);
    }
}

#[test]
fn opening_a_path_without_a_repository_creates_nothing() {
    let dir = TempDir::new().unwrap();
    let open = |path: &str| Repository::open(&format!("dir:{}/{path}", dir.path().display()));
    let error = open("missing").err().unwrap();
    assert!(matches!(error, Error::NoRepository { .. }) && error.kind() == ErrorKind::NotFound);
    assert!(error.to_string().contains("cairn create"), "{error}");

    fs::create_dir(dir.path().join("photos")).unwrap();
    fs::write(dir.path().join("photos/cat.jpg"), "meow").unwrap();
    assert_eq!(kind(open("photos")), ErrorKind::Invalid);
    let created = Repository::open_or_create(&format!("dir:{}/photos", dir.path().display()));
    assert_eq!(kind(created), ErrorKind::Invalid);
    assert_eq!(fs::read_dir(dir.path().join("photos")).unwrap().count(), 1);
    for open in [Repository::open, Repository::open_or_create] {
        let file = open(&format!("dir:{}/photos/cat.jpg", dir.path().display()));
        assert_eq!(kind(file), ErrorKind::Invalid, "a file is not a directory");
    }
    for bad in ["", "dir:", "/plain/path", "s3:bucket"] {
        assert_eq!(kind(Repository::open(bad)), ErrorKind::Invalid, "{bad}");
    }
}

#[test]
fn an_unfinished_creation_is_finished() {
    let test = TestRepository::new();
    let TestRepository { dir, repository, .. } = test;
    drop(repository);
    fs::remove_file(dir.path().join("repository.json")).unwrap();
    fs::remove_dir_all(dir.path().join("segments")).unwrap();
    assert_eq!(kind(Repository::open(&crate::support::url(&dir))), ErrorKind::Invalid);
    Repository::open_or_create(&crate::support::url(&dir)).unwrap();
    assert!(dir.path().join("segments").is_dir());
}

/// The marker has the version of the repository. Without it, nobody knows the version.
#[test]
fn a_repository_that_lost_its_marker_is_not_marked_again() {
    let marker = |dir: &TempDir| dir.path().join("repository.json");
    // The catalog is of another version.
    for version in [1, 99] {
        let TestRepository { dir, repository, .. } = TestRepository::new();
        drop(repository);
        fs::remove_file(marker(&dir)).unwrap();
        let catalog = rusqlite::Connection::open(dir.path().join("catalog.db")).unwrap();
        catalog.execute_batch(&format!("PRAGMA user_version = {version}")).unwrap();
        drop(catalog);
        let error = Repository::open_or_create(&crate::support::url(&dir)).err().unwrap();
        let is_refused = matches!(error, Error::NewerFormat { .. } | Error::OlderFormat { .. });
        assert!(is_refused, "{error}");
        assert!(!marker(&dir).exists());
    }
    // There are blobs, whose format only the marker states.
    let TestRepository { dir, repository, .. } = TestRepository::new();
    let content = vec![7; 65536];
    repository.put_chunks(&[NewBlob::new(&content)]).unwrap();
    drop(repository);
    fs::remove_file(marker(&dir)).unwrap();
    let error = Repository::open_or_create(&crate::support::url(&dir)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains("repository.json"), "{error}");
    assert!(!marker(&dir).exists());
}

#[test]
fn newer_and_older_formats_are_refused() {
    let test = TestRepository::new();
    let catalog = rusqlite::Connection::open(test.dir.path().join("catalog.db")).unwrap();
    catalog.execute_batch("PRAGMA user_version = 99").unwrap();
    let error = Repository::open(&test.url()).err().unwrap();
    assert!(matches!(error, Error::NewerFormat { found: 99, .. }), "{error}");

    let test = TestRepository::new();
    let marker = r#"{"format":"cairn-repository","version":99}"#;
    fs::write(test.dir.path().join("repository.json"), marker).unwrap();
    let error = Repository::open(&test.url()).err().unwrap();
    assert!(matches!(error, Error::NewerFormat { found: 99, .. }), "{error}");

    let test = TestRepository::new();
    let marker = r#"{"format":"cairn-repository","version":1}"#;
    fs::write(test.dir.path().join("repository.json"), marker).unwrap();
    let error = Repository::open(&test.url()).err().unwrap();
    assert!(matches!(error, Error::OlderFormat { found: 1, .. }), "{error}");
}

#[test]
fn a_damaged_marker_or_catalog_is_reported_as_corrupt() {
    let test = TestRepository::new();
    fs::write(test.dir.path().join("repository.json"), "{").unwrap();
    assert_eq!(kind(Repository::open(&test.url())), ErrorKind::Corrupt);

    let TestRepository { dir, repository, .. } = TestRepository::new();
    drop(repository);
    fs::write(dir.path().join("catalog.db"), "x".repeat(8192)).unwrap();
    assert_eq!(kind(Repository::open(&crate::support::url(&dir))), ErrorKind::Corrupt);
}

#[test]
fn many_threads_create_one_repository_at_once() {
    let dir = TempDir::new().unwrap();
    let url = format!("dir:{}/deep/repository", dir.path().display());
    thread::scope(|scope| {
        for n in 0..8 {
            let url = &url;
            scope.spawn(move || {
                let repository = Repository::open_or_create(url).unwrap();
                repository.create_image(&name(&format!("image{n}")), disk(1)).unwrap();
            });
        }
    });
    assert_eq!(Repository::open(&url).unwrap().catalog().images().unwrap().len(), 8);
}

/// Blobs whose syncs fail on demand, as with a failing disk.
struct FaultyBlobs {
    inner: Arc<dyn Blobs>,
    failing: Arc<AtomicBool>,
}

impl Blobs for FaultyBlobs {
    fn get(&self, id: &BlobId, buf: &mut [u8]) -> Result<usize> {
        self.inner.get(id, buf)
    }

    fn put(&self, blobs: &[NewBlob<'_>], policy: &StoragePolicy) -> Result<u64> {
        self.inner.put(blobs, policy)
    }

    fn flush(&self) -> Result<()> {
        if self.failing.load(Ordering::Relaxed) {
            return Err(Error::Poisoned { path: "faulty".into() });
        }
        self.inner.flush()
    }

    fn raise_stamp(&self, number: CollectionNumber) {
        self.inner.raise_stamp(number);
    }

    fn known(&self, ids: &[BlobId], policy: &StoragePolicy) -> Result<Vec<bool>> {
        self.inner.known(ids, policy)
    }
}

#[test]
fn a_snapshot_is_published_only_if_its_content_is_durable() {
    let test = TestRepository::new();
    let first = test.image("a");
    let failing = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&failing);
    let repository = Repository::open_with(&test.url(), |inner| {
        Arc::new(FaultyBlobs { inner, failing: flag }) as Arc<dyn Blobs>
    })
    .unwrap();
    let attachment =
        repository.attach(&crate::support::owner(1), &first, cairn_store::Mode::ReadWrite).unwrap();
    let number = attachment.reserve(1).unwrap().start;
    attachment.begin(&new_snapshot(number)).unwrap();
    let root = write(&repository, &first.root, &[(1, 1)]);

    failing.store(true, Ordering::Relaxed);
    assert_eq!(
        kind(attachment.announced(number).publish_tree(&root, 0, 0)),
        ErrorKind::Unavailable
    );
    assert_eq!(
        kind(repository.publish_image(&name("b"), disk(1000), &root, 0, 0)),
        ErrorKind::Unavailable
    );
    assert_eq!(repository.catalog().resolve(&at("a@2")).unwrap().state, SnapshotState::Pending);
    assert_eq!(attachment.parent(), (1, Root(None)));

    failing.store(false, Ordering::Relaxed);
    let snapshot = attachment.announced(number).publish_tree(&root, 0, 0).unwrap();
    assert_holds(&repository, &snapshot, &[(1, 1)]);
}
