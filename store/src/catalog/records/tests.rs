//! Rebuilding a catalog from records.

use std::sync::Arc;

use tempfile::TempDir;

use super::{
    BlobId, Catalog, Change, ImageDocument, MirrorReference, Record, Records, RemovalSummary,
    SnapshotState, StoragePolicy, image_key, snapshot_key,
};
use crate::catalog::{Draft, FirstSnapshot};
use crate::cluster::membership::ClusterEpoch;
use crate::documents::{Documents, Query, SqliteDocuments};
use crate::error::Error;
use crate::geometry::Geometry;
use crate::id::{MirrorId, NodeId};
use crate::name::{ImageName, SnapshotRef};
use crate::repository::Repository;
use crate::snapshot::{Consistency, MirrorOwner, MirrorParent, Mode};
use crate::tree::Root;

/// The epoch of a catalog that is lost.
const OLD: ClusterEpoch = ClusterEpoch::from_number(3);

struct Bench {
    _dir: TempDir,
    documents: Arc<SqliteDocuments>,
    catalog: Catalog,
    draft: Draft,
    name: ImageName,
}

impl Bench {
    fn new() -> Bench {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("catalog.db");
        SqliteDocuments::create(&path).unwrap();
        let documents = Arc::new(SqliteDocuments::open(&path).unwrap());
        let catalog = Catalog::new(documents.clone());
        let name: ImageName = "a".parse().unwrap();
        let draft = draft(&name);
        Bench { _dir: dir, documents, catalog, draft, name }
    }

    /// A record of a snapshot, or its tombstone.
    fn record(&self, number: u64, recorded: u64, is_removal: bool) -> (BlobId, Record) {
        let mut record = self.draft.record(OLD);
        (record.number, record.recorded) = (number, recorded);
        record.snapshot = record.snapshot.filter(|_| !is_removal);
        (BlobId::of(&record.to_bytes()), record)
    }

    fn rebuild(&self, records: &[(BlobId, Record)]) -> (u64, u64, Vec<String>) {
        let inventory = self.catalog.inventory().unwrap();
        let rebuilt = self.catalog.rebuild(&inventory, of(records)).unwrap();
        (rebuilt.images, rebuilt.snapshots, rebuilt.left)
    }

    /// Loses the catalog and rebuilds it from the records, the last of which knows the image, but no
    /// reserved number.
    fn lose_and_rebuild(&self, records: &mut [(BlobId, Record)]) {
        let key = image_key(&self.name);
        let image: ImageDocument =
            self.catalog.read(&[Query::key(&key)]).unwrap().get(&key).unwrap().unwrap();
        records.last_mut().unwrap().1.image = ImageDocument { next_number: 2, ..image };
        assert!(self.documents.commit(&Change::default().remove(Query::prefix(""))).unwrap());
        assert_eq!(self.rebuild(records).0, 1);
    }

    fn numbers(&self) -> Vec<u64> {
        let all = self.catalog.snapshots(&self.name).unwrap();
        all.into_iter().map(|one| one.number).collect()
    }
}

fn of(snapshots: &[(BlobId, Record)]) -> Records {
    Records { snapshots: snapshots.to_vec(), mirrors: Vec::new() }
}

fn draft(name: &ImageName) -> Draft {
    let first = FirstSnapshot {
        root: Root(None),
        state: SnapshotState::Stable,
        consistency: Consistency::Crash,
        dirty_bytes: 0,
        stored_bytes: 0,
        sent_bytes: 0,
        saved_bytes: 0,
    };
    let geometry = Geometry::new(1 << 20, 65536).unwrap();
    Draft::new(name, geometry, StoragePolicy::default(), &first).unwrap()
}

#[test]
fn a_rebuild_restores_no_removed_snapshot_and_reuses_no_number_whatever_the_clocks_say() {
    let bench = Bench::new();
    let mut second = bench.record(2, 200, false);
    second.1.image.next_number = 70;
    let records = [
        bench.record(1, 100, false),
        second,
        // Recorded by a host whose clock is late.
        bench.record(2, 150, true),
        bench.record(3, 300, false),
    ];
    assert_eq!(bench.rebuild(&records), (1, 2, vec![]));
    assert_eq!(bench.numbers(), [1, 3]);
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([7; 16]), "/m").unwrap();
    let first = &bench.catalog.snapshots(&bench.name).unwrap()[0];
    let (holder, ..) = bench.catalog.attach(&owner, first, Mode::ReadWrite, None).unwrap();
    assert_eq!(bench.catalog.reserve(&holder, 1, 0).unwrap().0.start, 70);
}

/// A catalog that was restored from an older copy has made the summary, and the records that it
/// replaces are gone.
#[test]
fn a_rebuild_reuses_no_number_of_a_summary() {
    let bench = Bench::new();
    let first = bench.record(1, 100, false);
    let mut summary = bench.record(0, 200, true);
    assert_eq!(summary.1.image.next_number, 2);
    let removed = serde_json::from_str("[[2,70]]").unwrap();
    summary.1.summary = Some(RemovalSummary { removed, ..RemovalSummary::default() });
    assert_eq!(bench.rebuild(&[first, summary]), (1, 1, vec![]));
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([7; 16]), "/m").unwrap();
    let first = &bench.catalog.snapshots(&bench.name).unwrap()[0];
    let (holder, ..) = bench.catalog.attach(&owner, first, Mode::ReadWrite, None).unwrap();
    assert_eq!(bench.catalog.reserve(&holder, 1, 0).unwrap().0.start, 70);
}

#[test]
fn a_second_rebuild_adds_the_snapshots_that_the_first_did_not_know() {
    let bench = Bench::new();
    let [one, two, three] = [1, 2, 3].map(|number| bench.record(number, number, false));
    assert_eq!(bench.rebuild(&[one.clone(), three.clone()]), (1, 2, vec![]));
    assert_eq!(bench.rebuild(&[one.clone(), two.clone(), three]), (0, 1, vec![]));
    assert_eq!(bench.numbers(), [1, 2, 3]);
    assert_eq!(bench.rebuild(&[two]), (0, 0, vec![]), "nothing is missing");
    // Another image has the name, so the image cannot be restored.
    let other = Bench { draft: draft(&bench.name), ..bench };
    assert_eq!(other.rebuild(&[other.record(1, 9, false)]), (0, 0, vec!["a".into()]));
    assert_eq!(other.numbers(), [1, 2, 3]);
}

/// A rebuild was killed after it had restored snapshots and before it restored their image.
#[test]
fn a_killed_rebuild_leaves_nothing_that_an_image_of_the_same_name_shows() {
    let bench = Bench::new();
    let records = [bench.record(1, 1, false), bench.record(2, 2, false)];
    let id = &records[0].1.image.id;
    let left = records.iter().fold(Change::default(), |change, (_, one)| {
        change.put(snapshot_key(id, one.number), one.snapshot.as_ref().unwrap())
    });
    assert!(bench.documents.commit(&left).unwrap());
    assert!(bench.catalog.images().unwrap().is_empty());
    let imported = draft(&bench.name);
    let basis = bench.catalog.commit_basis().unwrap();
    bench.catalog.insert(&imported, &basis, None, None).unwrap().unwrap();
    assert_eq!(bench.numbers(), [1], "only its own snapshot");
    let shown = bench.catalog.resolve(&SnapshotRef::number(&bench.name, 1)).unwrap();
    assert_eq!(shown.image_id, imported.record(OLD).image.id);
    assert_eq!(bench.rebuild(&records), (0, 0, vec!["a".into()]));

    // Without such an image, a second run completes the first.
    let tombstone = bench.catalog.begin_image_removal(&bench.name, false).unwrap();
    bench.catalog.finish_image_removal(&bench.name, &tombstone).unwrap();
    assert_eq!(bench.rebuild(&records).0, 1);
    assert_eq!(bench.numbers(), [1, 2]);
}

#[test]
fn a_rebuild_beside_a_removal_brings_nothing_back() {
    let bench = Bench::new();
    let records = [1, 2, 3].map(|number| bench.record(number, number, false));
    assert_eq!(bench.rebuild(&records).0, 1);
    // The rebuild lists the catalog and reads the records, all before the removal.
    let inventory = bench.catalog.inventory().unwrap();
    let name = SnapshotRef::number(&bench.name, 2);
    let (removed, _) = bench.catalog.begin_removal(&name).unwrap();
    bench.catalog.finish_removal(&removed).unwrap();
    bench.catalog.rebuild(&inventory, of(&records)).unwrap();
    assert_eq!(bench.numbers(), [1, 3]);
    let inventory = bench.catalog.inventory().unwrap();
    let tombstone = bench.catalog.begin_image_removal(&bench.name, false).unwrap();
    bench.catalog.finish_image_removal(&bench.name, &tombstone).unwrap();
    bench.catalog.rebuild(&inventory, of(&records)).unwrap();
    let gone = bench.catalog.snapshots(&bench.name).unwrap_err();
    assert!(matches!(gone, Error::NoImage { .. }), "{gone}");
}

#[test]
fn a_record_of_another_format_is_refused_with_the_right_reason() {
    let bench = Bench::new();
    let parse = |version: u32, format: &str| {
        let mut record = bench.draft.record(OLD);
        (record.version, record.format) = (version, format.into());
        Records::default().add(&record.to_bytes())
    };
    parse(super::VERSION, super::FORMAT).unwrap();
    let newer = parse(super::VERSION + 1, super::FORMAT).unwrap_err();
    assert!(matches!(newer, Error::NewerFormat { .. }), "{newer}");
    let older = parse(super::VERSION - 1, super::FORMAT).unwrap_err();
    assert!(matches!(older, Error::OlderFormat { .. }), "{older}");
    let other = parse(super::VERSION, "poem").unwrap_err();
    assert!(matches!(other, Error::Corrupt { .. }), "{other}");
}

/// A mirror keeps its parent, also if the parent was removed, until the mirror is forgotten.
#[test]
fn a_rebuild_restores_mirrors_with_the_last_parent_that_they_published() {
    let bench = Bench::new();
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([7; 16]), "/m").unwrap();
    let first = bench.record(1, 1, false);
    bench.rebuild(std::slice::from_ref(&first));
    let snapshot = bench.catalog.resolve(&SnapshotRef::number(&bench.name, 1)).unwrap();
    let mode = Mode::ReadWrite;
    let reference = bench.catalog.new_mirror(&owner, &snapshot, mode, None).unwrap().unwrap();
    bench.catalog.attach(&owner, &snapshot, mode, None).unwrap();
    assert!(bench.catalog.new_mirror(&owner, &snapshot, mode, None).unwrap().is_none());

    let mut published = bench.record(2, 2, false);
    let root = NodeId::from_bytes([5; 32]);
    let document = published.1.snapshot.as_mut().unwrap();
    (document.mirror, document.root) = (Some(owner.id), Some(root));
    let snapshots = vec![first, published, bench.record(2, 3, true), bench.record(3, 3, false)];
    let rebuild = |mirrors: Vec<MirrorReference>| {
        let lost = Bench::new();
        let inventory = lost.catalog.inventory().unwrap();
        let records = Records { snapshots: snapshots.clone(), mirrors };
        let rebuilt = lost.catalog.rebuild(&inventory, records).unwrap();
        assert_eq!(rebuilt.snapshots, 2);
        (rebuilt.mirrors, lost.catalog.mirror(&owner.id).unwrap())
    };
    let (count, mirror) = rebuild(vec![reference.clone()]);
    let mirror = mirror.unwrap();
    assert_eq!((count, mirror.parent, mirror.root), (1, 2, Root(Some(root))));
    let mut removal = MirrorReference::removal(owner.id, StoragePolicy::default().redundancy);
    removal.set_recorded(u64::MAX);
    assert_eq!(rebuild(vec![removal, reference]), (0, None));
}

/// A mirror whose last snapshot the rebuilt catalog does not know must not lose its changes.
#[test]
fn a_mirror_that_is_ahead_of_the_catalog_continues_from_its_own_parent_or_not_at_all() {
    let bench = Bench::new();
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([7; 16]), "/m").unwrap();
    let first = bench.record(1, 1, false);
    bench.rebuild(std::slice::from_ref(&first));
    let snapshot = bench.catalog.resolve(&SnapshotRef::number(&bench.name, 1)).unwrap();
    let attach = |parent: Option<&MirrorParent>| {
        bench.catalog.attach(&owner, &snapshot, Mode::ReadOnly, parent)
    };
    attach(None).unwrap();
    let image = snapshot.image_id;
    let ahead = MirrorParent { image, number: 2, root: Root(None), announced: 2 };
    let refused = attach(Some(&ahead)).map(drop).unwrap_err();
    assert!(matches!(refused, Error::UnknownParent { .. }), "{refused}");
    bench.rebuild(&[first, bench.record(2, 2, false)]);
    let other = MirrorParent { root: Root(Some(NodeId::from_bytes([5; 32]))), ..ahead };
    let refused = attach(Some(&other)).map(drop).unwrap_err();
    assert!(matches!(refused, Error::UnknownParent { .. }), "{refused}");
    assert_eq!(attach(Some(&ahead)).unwrap().1, 2);
    let behind = MirrorParent { number: 1, ..ahead };
    assert_eq!(attach(Some(&behind)).unwrap().1, 2, "the catalog counts");
    let refused = attach(Some(&MirrorParent { announced: 0, ..behind })).map(drop).unwrap_err();
    assert!(matches!(refused, Error::OlderMirror { .. }), "{refused}");
}

/// A writer continues after each rebuild, with its numbers, until another one takes the image.
#[test]
fn a_running_writer_continues_after_each_rebuild_and_gives_no_number_out_twice() {
    let bench = Bench::new();
    let owner = |id| MirrorOwner::this_process(MirrorId::from_bytes([id; 16]), "/m").unwrap();
    let mut records = vec![bench.record(1, 1, false), bench.record(9, 2, true)];
    bench.rebuild(&records);
    let snapshot = bench.catalog.resolve(&SnapshotRef::number(&bench.name, 1)).unwrap();
    let attach = |bench: &Bench, id| {
        bench.catalog.attach(&owner(id), &snapshot, Mode::ReadWrite, None).unwrap().0
    };
    let holder = attach(&bench, 7);
    let end = bench.catalog.reserve(&holder, 25, 0).unwrap().0.end;
    for _ in 0..3 {
        // The restored image is in the records of later snapshots.
        let image = bench.catalog.read(&[Query::Key(image_key(&bench.name))]).unwrap();
        let image: ImageDocument = image.get(&image_key(&bench.name)).unwrap().unwrap();
        let number = records.len() as u64;
        let mut record = bench.record(number, 10 + number, false);
        record.1.image = ImageDocument { next_number: 3, ..image };
        records.push(record);

        let lost = Query::prefix("");
        assert!(bench.documents.commit(&Change::default().remove(lost)).unwrap());
        let gone = bench.catalog.renew(&holder, (1, Root(None)), end, 1 << 20).unwrap_err();
        assert!(matches!(gone, Error::ImageGone { .. }), "{gone}");
        assert_eq!(bench.rebuild(&records).0, 1);
        let early = bench.catalog.reserve(&holder, 1, 0).unwrap_err();
        assert!(matches!(early, Error::CatalogRebuilt { .. }), "{early}");
        bench.catalog.renew(&holder, (1, Root(None)), end, 1 << 20).unwrap();
        assert!(bench.catalog.reserve(&holder, 1, 0).unwrap().0.start >= end);
    }
    // The next catalog is taken by another writer first, which then ends.
    assert!(bench.documents.commit(&Change::default().remove(Query::prefix(""))).unwrap());
    bench.rebuild(&records);
    let other = attach(&bench, 8);
    bench.catalog.release(&other, None).unwrap();
    let fenced = bench.catalog.renew(&holder, (1, Root(None)), end, 1 << 20).unwrap_err();
    assert!(matches!(fenced, Error::Fenced { .. }), "{fenced}");
}

/// Nobody can announce a checkpoint that has failed, so its failure must not wait for that.
#[test]
fn a_failure_of_a_snapshot_that_a_rebuilt_catalog_does_not_have_is_not_found() {
    let bench = Bench::new();
    let mut records = [bench.record(1, 1, false)];
    bench.rebuild(&records);
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([7; 16]), "/m").unwrap();
    let snapshot = bench.catalog.resolve(&SnapshotRef::number(&bench.name, 1)).unwrap();
    let holder = bench.catalog.attach(&owner, &snapshot, Mode::ReadWrite, None).unwrap().0;
    bench.lose_and_rebuild(&mut records);
    let fail = |number| bench.catalog.fail(&holder, number, "x").map(drop).unwrap_err();
    assert!(matches!(fail(2), Error::CatalogRebuilt { .. }));
    bench.catalog.renew(&holder, (1, Root(None)), 2, 1 << 20).unwrap();
    let number = bench.catalog.reserve(&holder, 1, 0).unwrap().0.start;
    assert!(matches!(fail(number), Error::NoSnapshot { .. }));
}

/// A process was killed after it had reserved numbers and before it had recorded them.
#[test]
fn numbers_that_were_resumed_are_not_given_out_again_after_a_rebuild() {
    let bench = Bench::new();
    let mut records = [bench.record(1, 1, false)];
    bench.rebuild(&records);
    let blobs = TempDir::new().unwrap();
    let url = format!("dir:{}", blobs.path().join("repository").display());
    Repository::open_or_create(&url).unwrap();
    let repository = Repository::with_documents(&url, bench.documents.clone()).unwrap();
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([7; 16]), "/m").unwrap();
    let snapshot = bench.catalog.resolve(&SnapshotRef::number(&bench.name, 1)).unwrap();
    let attach = || repository.attach(&owner, &snapshot, Mode::ReadWrite).unwrap();
    let killed = attach();
    assert_eq!(killed.reserve(4).unwrap(), 2..6);
    assert_eq!(killed.reserve(2).unwrap(), 6..8);
    let next = attach();
    assert_eq!(next.resume(&(2..6), None).unwrap(), 2..8);
    bench.lose_and_rebuild(&mut records);
    next.renew().unwrap();
    assert!(next.reserve(1).unwrap().start >= 8);
}

/// The record that was stored last may be that of a checkpoint from before the growth: it is
/// published later than the growth of the image.
#[test]
fn a_rebuilt_image_has_the_largest_size_of_its_records_or_of_its_running_disk() {
    let bench = Bench::new();
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([7; 16]), "/m").unwrap();
    let mut records = [(1, 1 << 20), (2, 3 << 20), (3, 1 << 20)].map(|(number, size)| {
        let (id, mut record) = bench.record(number, number, false);
        record.snapshot.as_mut().unwrap().size = size;
        (id, record)
    });
    let size = || bench.catalog.image(&bench.name).unwrap().geometry.size();
    let size_of = |number| {
        let name = SnapshotRef::number(&bench.name, number);
        bench.catalog.resolve(&name).unwrap().geometry.size()
    };
    bench.rebuild(&records[..1]);
    assert_eq!(size(), 1 << 20);
    bench.rebuild(&records);
    assert_eq!(size(), 3 << 20, "an image that the catalog has");
    assert_eq!([1, 2, 3].map(size_of), [1 << 20, 3 << 20, 1 << 20]);
    let lost = Change::default().remove(Query::prefix(""));
    assert!(bench.documents.commit(&lost).unwrap());
    bench.rebuild(&records);
    assert_eq!(size(), 3 << 20, "an image that the catalog does not have");

    let snapshot = bench.catalog.resolve(&SnapshotRef::number(&bench.name, 1)).unwrap();
    let attach = || bench.catalog.attach(&owner, &snapshot, Mode::ReadWrite, None).unwrap().0;
    let holder = attach();
    let renew = |size| bench.catalog.renew(&holder, (1, Root(None)), 5, size).unwrap();
    assert_eq!(renew(1 << 20), 3 << 20);
    assert_eq!((renew(4 << 20), size()), (4 << 20, 4 << 20), "restored from a copy");
    // The image document of a tombstone counts, too.
    let image = bench.catalog.read(&[Query::Key(image_key(&bench.name))]).unwrap();
    let image: ImageDocument = image.get(&image_key(&bench.name)).unwrap().unwrap();
    records[2] = bench.record(3, 3, true);
    records[2].1.image = ImageDocument { size: 5 << 20, ..image };
    assert!(bench.documents.commit(&lost).unwrap());
    bench.rebuild(&records);
    assert_eq!(size(), 5 << 20);
    assert_eq!((renew(7 << 20), size()), (7 << 20, 7 << 20), "after a rebuild");
}

/// A snapshot is published and removed while a rebuild reads the records.
#[test]
fn a_rebuild_ignores_what_is_published_while_it_runs() {
    let bench = Bench::new();
    let records = [bench.record(1, 1, false)];
    assert_eq!(bench.rebuild(&records).0, 1);
    let inventory = bench.catalog.inventory().unwrap();
    let mut record = bench.record(2, 2, false);
    record.1.epoch = bench.catalog.commit_basis().unwrap().epoch.number();
    let found = of(&[records[0].clone(), record.clone()]);
    assert_eq!(bench.catalog.rebuild(&inventory, found).unwrap().snapshots, 0);
    assert_eq!(bench.rebuild(&[record]).1, 1, "a later rebuild restores it");
}

#[test]
fn a_snapshot_that_failed_after_its_record_was_stored_is_no_parent() {
    let bench = Bench::new();
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([7; 16]), "/m").unwrap();
    let first = bench.record(1, 1, false);
    bench.rebuild(std::slice::from_ref(&first));
    let snapshot = bench.catalog.resolve(&SnapshotRef::number(&bench.name, 1)).unwrap();
    let reference = bench.catalog.new_mirror(&owner, &snapshot, Mode::ReadWrite, None).unwrap();
    let mut recorded = bench.record(2, 2, false);
    recorded.1.snapshot.as_mut().unwrap().mirror = Some(owner.id);
    let mut failure = bench.record(2, 3, true);
    failure.1.is_failure = true;
    let lost = Bench::new();
    let inventory = lost.catalog.inventory().unwrap();
    let snapshots = vec![first, recorded, failure];
    let records = Records { snapshots, mirrors: reference.into_iter().collect() };
    lost.catalog.rebuild(&inventory, records).unwrap();
    assert_eq!(lost.catalog.mirror(&owner.id).unwrap().unwrap().parent, 1);
}
