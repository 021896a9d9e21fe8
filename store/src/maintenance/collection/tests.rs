//! Collections of a repository in a directory, and what runs beside them.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use tempfile::TempDir;

use super::{CollectionOptions, CollectionProgress, CollectionReport, collect};
use crate::blobs::NewBlob;
use crate::collection::CollectionNumber;
use crate::documents::{Change, Document, Query};
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::{BlobId, ChunkId, MirrorId};
use crate::metadata::Metadata;
use crate::name::SnapshotRef;
use crate::repository::Repository;
use crate::repository::attachment::Attachment;
use crate::snapshot::{Consistency, MirrorOwner, Mode, NewSnapshot, Snapshot};
use crate::tree::{Referred, Root};

const CHUNK: usize = 65536;

/// The chunks of a disk: the number of the content at each index.
pub(super) type Disk = BTreeMap<u64, u64>;

fn content(number: u64) -> Vec<u8> {
    let mut content = vec![0; CHUNK];
    blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut content);
    content
}

pub(super) fn geometry() -> Geometry {
    Geometry::new(64 * CHUNK as u64, CHUNK as u32).unwrap()
}

/// A repository in a directory, as the processes of a host use it.
pub(super) struct Site(TempDir);

impl Site {
    pub(super) fn new() -> Site {
        let site = Site(TempDir::new().unwrap());
        Repository::open_or_create(&site.url()).unwrap();
        site
    }

    fn url(&self) -> String {
        format!("dir:{}", self.0.path().display())
    }

    pub(super) fn open(&self) -> Repository {
        Repository::open(&self.url()).unwrap()
    }

    pub(super) fn catalog(&self) -> PathBuf {
        self.0.path().join("catalog.db")
    }

    /// Collects without a grace period, as a process of its own.
    pub(super) fn collect(&self) -> CollectionReport {
        self.try_collect(&[]).unwrap()
    }

    fn try_collect(&self, give_up: &[&str]) -> Result<CollectionReport> {
        let give_up = give_up.iter().map(|name| name.parse().unwrap()).collect();
        let options = CollectionOptions { give_up, ..CollectionOptions::default() };
        collect(&self.open(), &options, &|_| ())
    }

    /// The names of all stored blobs.
    pub(super) fn stored(&self) -> BTreeSet<BlobId> {
        let repository = self.open();
        let blobs = repository.blobs_in_directory().unwrap();
        blobs.list(None, usize::MAX >> 1).unwrap().into_iter().map(|one| one.id).collect()
    }

    /// The names of all blobs that snapshots and mirrors refer to.
    pub(super) fn referred(&self) -> BTreeSet<BlobId> {
        let (repository, mut all) = (self.open(), BTreeSet::new());
        for root in repository.catalog().collection_roots(true).unwrap().roots {
            let mut visit = |referred: Referred| {
                all.insert(match referred {
                    Referred::Node(id) => id.into(),
                    Referred::Chunk(id) => id.into(),
                });
            };
            let trees = repository.trees();
            let unread =
                trees.references(&root.root, root.geometry, &mut HashSet::new(), &mut visit);
            assert_eq!(unread, 0);
        }
        all
    }
}

/// Stores chunks and the tree that differs from `base` by them.
pub(super) fn store(repository: &Repository, base: &Root, disk: &Disk) -> Root {
    let contents: Vec<_> = disk.values().map(|number| content(*number)).collect();
    let chunks: Vec<_> = contents.iter().map(|one| NewBlob::new(one)).collect();
    repository.put_chunks(&chunks).unwrap();
    store_tree(repository, base, disk)
}

/// Stores only the tree.
pub(super) fn store_tree(repository: &Repository, base: &Root, disk: &Disk) -> Root {
    repository.commit_tree(base, geometry(), &changes(disk)).unwrap().root
}

pub(super) fn changes(disk: &Disk) -> crate::ChangedChunks {
    let id = |number: &u64| NewBlob::new(&content(*number)).chunk_id();
    disk.iter().map(|(at, number)| (ChunkIndex(*at), Some(id(number)))).collect()
}

fn disk(chunks: impl IntoIterator<Item = (u64, u64)>) -> Disk {
    chunks.into_iter().collect()
}

pub(super) fn import(repository: &Repository, name: &str, disk: &Disk) -> Snapshot {
    let commit = repository.begin_commit().unwrap();
    let root = store(repository, &Root::default(), disk);
    commit.publish_image(&name.parse().unwrap(), geometry(), &root, 0, 0).unwrap()
}

pub(super) fn read(repository: &Repository, snapshot: &Snapshot) -> Result<Disk> {
    static NUMBERS: LazyLock<HashMap<ChunkId, u64>> = LazyLock::new(|| {
        (0..100).map(|one| (NewBlob::new(&content(one)).chunk_id(), one)).collect()
    });
    let (mut found, mut buf) = (Disk::new(), vec![0; CHUNK]);
    for chunk in repository.chunks(&snapshot.root, snapshot.geometry) {
        let (at, id) = chunk?;
        repository.read_chunk(&id, &mut buf)?;
        found.insert(at.0, NUMBERS[&id]);
    }
    Ok(found)
}

pub(super) fn resolve(repository: &Repository, name: &str) -> Result<Snapshot> {
    repository.catalog().resolve(&name.parse::<SnapshotRef>().unwrap())
}

fn remove(repository: &Repository, name: &str) {
    repository.remove_snapshot(&name.parse().unwrap()).unwrap();
}

pub(super) fn attach(repository: &Repository, mirror: u8, snapshot: &Snapshot) -> Attachment {
    let id = MirrorId::from_bytes([mirror; 16]);
    let owner = MirrorOwner::this_process(id, format!("/mirror{mirror}")).unwrap();
    repository.attach(&owner, snapshot, Mode::ReadWrite).unwrap()
}

pub(super) fn new(number: u64) -> NewSnapshot {
    let (consistency, time, dirty_bytes, pause_us) = (Consistency::Crash, 1, 0, 0);
    let size = geometry().size();
    NewSnapshot {
        number,
        label: None,
        metadata: Metadata::default(),
        is_from_guest: false,
        size,
        consistency,
        time,
        dirty_bytes,
        pause_us,
    }
}

/// Takes a checkpoint of a mirror.
fn checkpoint(repository: &Repository, attachment: &Attachment, disk: &Disk) -> Snapshot {
    let number = attachment.reserve(1).unwrap().start;
    let commit = attachment.begin(&new(number)).unwrap();
    put(repository, disk);
    commit.publish(&changes(disk), 0, &|_, _| false).unwrap()
}

/// Puts chunks, durably.
pub(super) fn put(repository: &Repository, disk: &Disk) {
    let contents: Vec<_> = disk.values().map(|number| content(*number)).collect();
    let chunks: Vec<_> = contents.iter().map(|one| NewBlob::new(one)).collect();
    repository.put_chunks(&chunks).unwrap();
    repository.flush().unwrap();
}

#[test]
fn a_collection_leaves_exactly_what_snapshots_and_mirrors_refer_to() {
    let site = Site::new();
    let repository = site.open();
    let first = disk([(0, 1), (1, 2), (63, 3)]);
    import(&repository, "a", &first);
    import(&repository, "b", &disk([(0, 1), (5, 4)]));
    let attachment = attach(&repository, 1, &resolve(&repository, "a@1").unwrap());
    checkpoint(&repository, &attachment, &disk([(1, 5)]));
    repository.remove_image(&"b".parse().unwrap(), false).unwrap();
    let report = site.collect();
    assert_eq!(report.freed.objects, 2, "a chunk and a node of b");
    assert_eq!(site.stored(), site.referred());
    remove(&repository, "a@1");
    let report = site.collect();
    // The chunk that was overwritten, and a node.
    assert_eq!((report.number, report.freed.objects), (CollectionNumber(2), 2));
    assert_eq!(site.stored(), site.referred());
    let newest = resolve(&repository, "a").unwrap();
    assert_eq!(read(&repository, &newest).unwrap(), disk([(0, 1), (1, 5), (63, 3)]));
    assert_eq!(site.collect().freed.objects, 0);
    let last = repository.catalog().last_collection().unwrap().unwrap();
    assert_eq!((last.number, last.freed_bytes), (CollectionNumber(3), 0));
}

#[test]
fn a_dry_run_changes_nothing_and_says_what_a_collection_would_do() {
    let site = Site::new();
    let repository = site.open();
    import(&repository, "a", &disk([(0, 1)]));
    import(&repository, "b", &disk([(0, 2)]));
    repository.remove_image(&"b".parse().unwrap(), false).unwrap();
    let before = site.stored();
    let options = CollectionOptions { dry_run: true, ..CollectionOptions::default() };
    let planned = collect(&repository, &options, &|_| ()).unwrap();
    assert_eq!(site.stored(), before);
    assert_eq!(planned, site.collect());
    assert_eq!(planned.freed.objects, 2);
}

#[test]
fn nothing_within_the_grace_period_is_deleted() {
    let site = Site::new();
    let repository = site.open();
    import(&repository, "b", &disk([(0, 2)]));
    repository.remove_image(&"b".parse().unwrap(), false).unwrap();
    let options = CollectionOptions { grace: Duration::from_secs(3600), ..Default::default() };
    for _ in 0..2 {
        let report = collect(&repository, &options, &|_| ()).unwrap();
        assert_eq!((report.freed.objects, report.waiting.objects), (0, 2));
    }
    assert_eq!(site.collect().freed.objects, 2);
}

/// Calls `hook` once, after everything is marked and before anything is deleted.
pub(super) fn collect_with(repository: &Repository, hook: impl Fn()) -> CollectionReport {
    let is_called = Cell::new(false);
    let report = collect(repository, &CollectionOptions::default(), &|progress| {
        if matches!(progress, CollectionProgress::Sweeping { seen: 0, .. })
            && !is_called.replace(true)
        {
            hook();
        }
    });
    assert!(is_called.get());
    report.unwrap()
}

#[test]
fn a_commit_reuses_a_chunk_between_the_mark_and_the_sweep() {
    for is_begun_before in [true, false] {
        let site = Site::new();
        let repository = site.open();
        let base = import(&repository, "a", &disk([(0, 1)]));
        import(&repository, "b", &disk([(0, 2)]));
        repository.remove_image(&"b".parse().unwrap(), false).unwrap();
        let attachment = attach(&repository, 1, &base);
        let number = attachment.reserve(1).unwrap().start;
        let early = is_begun_before.then(|| attachment.begin(&new(number)).unwrap());
        let change = disk([(7, 2)]);
        let report = collect_with(&site.open(), || {
            let late;
            let commit = match &early {
                Some(commit) => commit,
                None => {
                    late = attachment.begin(&new(number)).unwrap();
                    &late
                }
            };
            put(&repository, &change);
            commit.publish(&changes(&change), 0, &|_, _| false).unwrap();
        });
        // The commit that began before holds everything back.
        assert_eq!(report.freed.objects, if is_begun_before { 0 } else { 1 });
        let newest = resolve(&repository, "a@2").unwrap();
        assert_eq!(read(&site.open(), &newest).unwrap(), disk([(0, 1), (7, 2)]));
        site.collect();
        assert_eq!(read(&site.open(), &newest).unwrap(), disk([(0, 1), (7, 2)]));
        assert_eq!(site.stored(), site.referred());
    }
}

#[test]
fn an_import_outlives_two_collections() {
    let site = Site::new();
    let repository = site.open();
    let all = disk((0..10).map(|at| (at, at + 1)));
    let commit = repository.begin_commit().unwrap();
    put(&repository, &all);
    let report = site.collect();
    assert_eq!((report.freed.objects, report.waiting.objects), (0, 10));
    let holders: Vec<_> = report.holders.iter().map(|one| one.kind).collect();
    assert_eq!(holders, ["commit"]);
    let root = store(&repository, &Root::default(), &all);
    site.collect();
    let image = commit.publish_image(&"a".parse().unwrap(), geometry(), &root, 0, 0).unwrap();
    assert!(site.collect().holders.is_empty());
    assert_eq!(read(&site.open(), &image).unwrap(), all);
}

#[test]
fn an_import_that_is_given_up_leaves_only_garbage() {
    let site = Site::new();
    let repository = site.open();
    let commit = repository.begin_commit().unwrap();
    put(&repository, &disk([(0, 1)]));
    drop(commit);
    assert_eq!(site.collect().freed.objects, 1);
    assert!(site.stored().is_empty());
}

/// The process slept for longer than its lease, and collections have run meanwhile.
/// The catalog of a cluster gets a change from a connection. The process may be dead when that happens.
#[test]
fn a_publication_that_arrives_after_the_death_of_its_process_and_a_collection_fails() {
    let site = Site::new();
    let writer = site.open();
    let commit = writer.begin_commit().unwrap();
    let root = store(&writer, &Root::default(), &disk([(0, 1), (1, 2)]));
    writer.flush().unwrap();
    kill_holders(&writer, "commits/");
    let died = site.collect();
    assert_eq!((died.waiting.objects, died.holders.len()), (0, 0), "{died:?}");
    let late = commit.publish_image(&"late".parse().unwrap(), geometry(), &root, 0, 0);
    assert!(matches!(late, Err(Error::ContentLost { .. })), "{late:?}");
}

/// Makes the documents under a prefix those of a process of this host that has died.
fn kill_holders(repository: &Repository, prefix: &str) {
    let documents = repository.documents();
    let view = documents.read(&[Query::prefix(prefix)]).unwrap();
    let mut change = Change::default();
    for (name, mut document) in view.under::<serde_json::Value>(prefix).unwrap() {
        document["process"]["start_time"] = 1.into();
        change = change.put(format!("{prefix}{name}"), &document);
    }
    assert!(documents.commit(&change).unwrap());
}

#[test]
fn a_commit_whose_document_has_expired_publishes_nothing_that_is_gone() {
    for is_collected in [true, false] {
        let site = Site::new();
        let repository = site.open();
        let commit = repository.begin_commit().unwrap();
        let all = disk([(0, 1)]);
        let root = store(&repository, &Root::default(), &all);
        repository.flush().unwrap();
        let expired = Change::default().remove(Query::prefix("commits/"));
        assert!(repository.documents().commit(&expired).unwrap());
        if is_collected {
            assert_eq!(site.collect().freed.objects, 2);
        }
        let published = commit.publish_image(&"a".parse().unwrap(), geometry(), &root, 0, 0);
        match is_collected {
            true => assert!(matches!(published, Err(Error::ContentLost { .. })), "{published:?}"),
            false => assert_eq!(read(&site.open(), &published.unwrap()).unwrap(), all),
        }
        drop(commit);
        assert_eq!(site.collect().holders, []);
    }
}

/// As after a kill: the layer's chunks are stored, and nobody is there.
#[test]
fn a_layer_of_a_dead_process_is_adopted_after_two_collections() {
    let site = Site::new();
    let change = disk([(3, 9)]);
    let (base, number) = {
        let repository = site.open();
        let base = import(&repository, "a", &disk([(0, 1)]));
        let attachment = attach(&repository, 1, &base);
        let number = attachment.reserve(1).unwrap().start;
        attachment.begin(&new(number)).unwrap();
        put(&repository, &change);
        (base, number)
    };
    for _ in 0..2 {
        let report = site.collect();
        assert_eq!(report.freed.objects, 0);
        assert_eq!(report.holders[0].collection, Some(CollectionNumber(0)));
    }
    let repository = site.open();
    let attachment = attach(&repository, 1, &base);
    let commit = attachment.begin(&new(number)).unwrap();
    commit.mark_unverified();
    // The chunk is in no local file any more.
    let snapshot = commit.publish(&changes(&change), 0, &|_, _| false).unwrap();
    assert_eq!(read(&site.open(), &snapshot).unwrap(), disk([(0, 1), (3, 9)]));
    assert_eq!(site.collect().holders, []);
    assert_eq!(site.stored(), site.referred());
}

#[test]
fn a_mirror_keeps_the_content_of_its_parent_until_it_is_forgotten() {
    let site = Site::new();
    let repository = site.open();
    let base = import(&repository, "a", &disk([(0, 1)]));
    let mirror = attach(&repository, 1, &base);
    let other = mirror.parent();
    checkpoint(&repository, &mirror, &disk([(0, 2)]));
    mirror.release(None).unwrap();
    let reader = attach(&repository, 2, &resolve(&repository, "a@1").unwrap());
    remove(&repository, "a@1");
    let report = site.collect();
    assert_eq!(report.freed.objects, 0);
    assert!(report.holders[0].what.contains("a@1, which was removed"), "{:?}", report.holders);
    let parent = Snapshot { root: other.1, ..base };
    assert_eq!(read(&site.open(), &parent).unwrap(), disk([(0, 1)]));
    reader.release(None).unwrap();
    repository.forget_mirror(&MirrorId::from_bytes([2; 16])).unwrap();
    assert_eq!(site.collect().freed.objects, 2);
}

#[test]
fn a_reader_keeps_what_it_reads() {
    let site = Site::new();
    let repository = site.open();
    let base = import(&repository, "a", &disk([(0, 1)]));
    let mirror = attach(&repository, 1, &base);
    checkpoint(&repository, &mirror, &disk([(0, 2)]));
    let reading = repository.begin_reading(&base, "export to a file").unwrap();
    remove(&repository, "a@1");
    let report = site.collect();
    assert_eq!((report.freed.objects, report.holders[0].kind), (0, "reader"));
    assert_eq!(read(&site.open(), &base).unwrap(), disk([(0, 1)]));
    assert!(reading.is_held());
    drop(reading);
    assert_eq!(site.collect().freed.objects, 2);
    let late = repository.begin_reading(&base, "export to a file");
    assert!(matches!(late, Err(Error::NoSnapshot { .. })));
}

#[test]
fn nothing_is_deleted_while_a_node_cannot_be_read_unless_it_is_given_up() {
    let site = Site::new();
    let repository = site.open();
    let lost = import(&repository, "a", &disk([(0, 1)]));
    import(&repository, "b", &disk([(0, 2)]));
    repository.clone_snapshot(&"a@1".parse().unwrap(), &"c".parse().unwrap()).unwrap();
    import(&repository, "garbage", &disk([(0, 3)]));
    repository.remove_image(&"garbage".parse().unwrap(), false).unwrap();
    let blobs = repository.blobs_in_directory().unwrap();
    blobs.begin_collection(CollectionNumber(0)).unwrap();
    let root: BlobId = lost.root.0.unwrap().into();
    let bound = CollectionNumber(1);
    assert_eq!(blobs.remove(&[root], CollectionNumber(0), bound).unwrap().blobs, 1);
    let before = site.stored();
    let failed = site.try_collect(&["a@1"]).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Corrupt);
    let text = failed.to_string();
    assert!(
        text.contains("Affected: c@1. ") && text.contains("--give-up a@1 --give-up c@1"),
        "{text}"
    );
    assert_eq!(site.stored(), before);
    let report = site.try_collect(&["a@1", "c@1"]).unwrap();
    assert_eq!(report.freed.objects, 3, "the garbage, and the chunk of the snapshots given up");
    assert_eq!(read(&site.open(), &resolve(&repository, "b").unwrap()).unwrap(), disk([(0, 2)]));
}

#[test]
fn a_catalog_that_was_restored_from_an_older_copy_collects_nothing() {
    let site = Site::new();
    let repository = site.open();
    import(&repository, "a", &disk([(0, 1)]));
    drop(repository);
    let copy = fs::read(site.catalog()).unwrap();
    let repository = site.open();
    import(&repository, "b", &disk([(0, 2)]));
    site.collect();
    drop(repository);
    for file in ["catalog.db-wal", "catalog.db-shm"] {
        let _ = fs::remove_file(site.0.path().join(file));
    }
    fs::write(site.catalog(), copy).unwrap();
    let before = site.stored();
    let failed = site.try_collect(&[]).unwrap_err();
    assert!(matches!(failed, Error::OlderCatalog { catalog: 0, blobs: 1 }), "{failed}");
    assert_eq!(site.stored(), before);
    // What is stored with the older number is safe from a collection of the newer one.
    let repository = site.open();
    let again = import(&repository, "c", &disk([(0, 2)]));
    let options = CollectionOptions { accept_older_catalog: true, ..CollectionOptions::default() };
    let report = collect(&repository, &options, &|_| ()).unwrap();
    assert_eq!(report.number, CollectionNumber(2));
    assert_eq!(read(&repository, &again).unwrap(), disk([(0, 2)]));
    assert_eq!(site.stored(), site.referred());
}

/// The catalog was restored from a copy that is older than the mirror's parent. Nothing protected the
/// parent's content from a collection.
#[test]
fn a_checkpoint_whose_parent_an_older_catalog_does_not_know_is_not_published_without_its_content() {
    for is_renewed in [false, true] {
        publish_on_a_parent_that_an_older_catalog_does_not_know(is_renewed);
    }
}

/// With `is_renewed`, the mirror has told the catalog of its parent again, after the content was deleted.
fn publish_on_a_parent_that_an_older_catalog_does_not_know(is_renewed: bool) {
    let site = Site::new();
    let repository = site.open();
    let base = import(&repository, "a", &disk([(0, 1)]));
    let mirror = attach(&repository, 1, &base);
    let prefixes = ["images/", "mirrors/", "snapshots/"];
    let mut copy = Change::default();
    let add = &mut |key: &str, document: Document| {
        let value: serde_json::Value = document.decode(key)?;
        copy = std::mem::take(&mut copy).put(key, &value);
        Ok(())
    };
    repository.documents().scan(&prefixes, add).unwrap();
    checkpoint(&repository, &mirror, &disk([(3, 7)]));
    let lost = prefixes.iter().fold(Change::default(), |all, one| all.remove(Query::prefix(*one)));
    assert!(repository.documents().commit(&lost).unwrap());
    assert!(repository.documents().commit(&copy).unwrap());
    assert_eq!(site.collect().freed.objects, 2, "a chunk and a node of the parent");

    if is_renewed {
        mirror.renew().unwrap();
    }
    let number = mirror.reserve(2).unwrap().end - 1;
    let commit = mirror.begin(&new(number)).unwrap();
    let change = disk([(5, 9)]);
    put(&repository, &change);
    // Trying again does not help.
    for _ in 0..2 {
        let published = commit.publish(&changes(&change), 0, &|_, _| false);
        assert!(matches!(published, Err(Error::ContentLost { .. })), "{published:?}");
    }
    // With the content, the checkpoint is complete.
    put(&repository, &disk([(3, 7)]));
    store(&repository, &base.root, &disk([(3, 7)]));
    repository.flush().unwrap();
    let published = commit.publish(&changes(&change), 0, &|_, _| false).unwrap();
    assert_eq!(read(&repository, &published).unwrap(), disk([(0, 1), (3, 7), (5, 9)]));
}

#[test]
fn one_collection_runs_at_a_time() {
    let site = Site::new();
    let repository = site.open();
    import(&repository, "a", &disk([(0, 1)]));
    collect_with(&repository, || {
        assert!(matches!(site.try_collect(&[]), Err(Error::RepairRuns)));
    });
}

#[test]
fn a_clone_of_a_snapshot_that_is_being_removed_has_all_its_content_or_does_not_exist() {
    let site = Site::new();
    let repository = site.open();
    let base = import(&repository, "a", &disk([(0, 1)]));
    let mirror = attach(&repository, 1, &base);
    checkpoint(&repository, &mirror, &disk([(0, 2)]));
    let source: SnapshotRef = "a@1".parse().unwrap();
    collect_with(&repository, || {
        repository.clone_snapshot(&source, &"early".parse().unwrap()).unwrap();
        remove(&repository, "a@1");
    });
    site.collect();
    let late = repository.clone_snapshot(&source, &"late".parse().unwrap());
    assert!(late.is_err());
    let clone = resolve(&site.open(), "early").unwrap();
    assert_eq!(read(&site.open(), &clone).unwrap(), disk([(0, 1)]));
    assert_eq!(site.stored(), site.referred());
}

/// It has raised the number and marked, and died.
#[test]
fn a_collection_that_was_killed_is_followed_by_the_next() {
    let site = Site::new();
    let repository = site.open();
    import(&repository, "a", &disk([(0, 1)]));
    import(&repository, "b", &disk([(0, 2)]));
    repository.remove_image(&"b".parse().unwrap(), false).unwrap();
    let killed =
        super::collect_while(&repository, &CollectionOptions::default(), &|| false, &|_| ());
    assert!(killed.is_err());
    let report = site.collect();
    assert_eq!((report.number, report.freed.objects), (CollectionNumber(2), 2));
}
