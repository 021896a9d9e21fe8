//! Concurrent changes of the catalog.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;

use super::documents::{SCHEMA, SCHEMA_VERSION, image_key, lease_key};
use super::{Catalog, Draft, FirstSnapshot, Holder, Published};
use crate::catalog::CommitBasis;
use crate::cluster::membership::LOSSES;
use crate::documents::{Change, Documents, Query, SqliteDocuments, View};
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::id::{MirrorId, NodeId};
use crate::metadata::Metadata;
use crate::name::{ImageName, SnapshotRef};
use crate::snapshot::{Consistency, MirrorOwner, Mode, NewSnapshot, SnapshotState};
use crate::tree::Root;

type Hook = Box<dyn FnOnce() + Send>;

/// Documents that call a hook after the first read.
struct HookedDocuments {
    documents: Arc<SqliteDocuments>,
    after_read: Mutex<Option<Hook>>,
}

impl Documents for HookedDocuments {
    fn read(&self, queries: &[Query]) -> Result<View> {
        let view = self.documents.read(queries);
        if let Some(hook) = self.after_read.lock().unwrap().take() {
            hook();
        }
        view
    }

    fn commit(&self, change: &Change) -> Result<bool> {
        self.documents.commit(change)
    }

    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<bool> {
        self.documents.wait(folder, revision, limit)
    }
}

/// A catalog in a directory of its own, for one image.
struct TestCatalog {
    _dir: TempDir,
    documents: Arc<SqliteDocuments>,
    catalog: Arc<Catalog>,
    image: ImageName,
}

impl TestCatalog {
    fn new() -> TestCatalog {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("catalog.db");
        SqliteDocuments::create(&path).unwrap();
        let documents = Arc::new(SqliteDocuments::open(&path).unwrap());
        let catalog = Arc::new(Catalog::new(documents.clone()));
        TestCatalog { _dir: dir, documents, catalog, image: "a".parse().unwrap() }
    }

    /// Creates the image. Its first snapshot has this state.
    fn create(&self, state: SnapshotState) {
        let first = FirstSnapshot {
            root: Root(None),
            state,
            consistency: Consistency::Crash,
            dirty_bytes: 0,
            stored_bytes: 0,
            sent_bytes: 0,
            saved_bytes: 0,
        };
        let geometry = Geometry::new(1 << 20, 65536).unwrap();
        let draft =
            Draft::new(&self.image, geometry, crate::encoding::StoragePolicy::default(), &first)
                .unwrap();
        let basis = self.catalog.commit_basis().unwrap();
        self.catalog.insert(&draft, &basis, None, None).unwrap().unwrap();
    }

    /// Removes a snapshot.
    fn remove(&self, number: u64) {
        let name = SnapshotRef::number(&self.image, number);
        let (snapshot, _) = self.catalog.begin_removal(&name).unwrap();
        self.catalog.finish_removal(&snapshot).unwrap();
    }

    /// Lets the lease of the image expire. Its holder continues.
    fn expire_lease(&self) {
        let newest = self.catalog.snapshots(&self.image).unwrap().pop().unwrap();
        let expired = Change::default().remove(Query::Key(lease_key(&newest.image_id)));
        assert!(self.documents.commit(&expired).unwrap());
    }

    fn state(&self, number: u64) -> Option<SnapshotState> {
        let all = self.catalog.snapshots(&self.image).unwrap();
        all.into_iter().find(|one| one.number == number).map(|one| one.state)
    }

    /// A writer that has announced a snapshot, and the snapshot's number.
    fn writer(&self) -> (Holder, u64) {
        let owner = MirrorOwner::this_process(MirrorId::from_bytes([7; 16]), "/m").unwrap();
        let newest = self.catalog.resolve(&SnapshotRef::number(&self.image, 1)).unwrap();
        let (holder, ..) = self.catalog.attach(&owner, &newest, Mode::ReadWrite, None).unwrap();
        let number = self.catalog.reserve(&holder, 1, 0).unwrap().0.start;
        self.catalog.begin(&holder, &new(number)).unwrap();
        (holder, number)
    }
}

fn new(number: u64) -> NewSnapshot {
    let (consistency, time, dirty_bytes, pause_us) = (Consistency::Crash, 1, 0, 0);
    NewSnapshot {
        number,
        label: None,
        metadata: Metadata::default(),
        is_from_guest: false,
        size: 1 << 20,
        consistency,
        time,
        dirty_bytes,
        pause_us,
    }
}

fn published(state: SnapshotState) -> Published {
    let root = Root(Some(NodeId::from_bytes([9; 32])));
    Published {
        root,
        state,
        stored_bytes: 0,
        dirty_bytes: 0,
        sent_bytes: 0,
        saved_bytes: 0,
        parent: 1,
        basis: CommitBasis::of(&View::default()).unwrap(),
        base: None,
        record: None,
    }
}

#[test]
fn a_removal_of_a_pending_snapshot_restarts_if_the_snapshot_is_published_meanwhile() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Stable);
    let (holder, number) = test.writer();
    test.expire_lease();
    let catalog = test.catalog.clone();
    let hook = move || {
        catalog.publish(&holder, number, &published(SnapshotState::Stable)).unwrap();
    };
    let after_read = Mutex::new(Some(Box::new(hook) as Hook));
    let documents = test.documents.clone();
    let hooked = Catalog::new(Arc::new(HookedDocuments { documents, after_read }));
    let (removed, _) = hooked.begin_removal(&SnapshotRef::number(&test.image, number)).unwrap();
    assert_eq!(removed.state, SnapshotState::Stable, "the state when it was removed");
    assert_eq!(test.state(number), Some(SnapshotState::Removing));
    hooked.finish_removal(&removed).unwrap();
    assert_eq!(test.state(number), None);
}

#[test]
fn a_snapshot_that_changed_after_it_was_found_available_is_not_made_stable() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Available);
    let found = test.catalog.available().unwrap();
    let tombstone = test.catalog.begin_image_removal(&test.image, false).unwrap();
    test.catalog.finish_image_removal(&test.image, &tombstone).unwrap();
    test.create(SnapshotState::Available);
    for one in &found {
        test.catalog.promote(one).unwrap();
    }
    assert_eq!(test.state(1), Some(SnapshotState::Available), "it is another snapshot");
    for one in &test.catalog.available().unwrap() {
        test.catalog.promote(one).unwrap();
    }
    assert_eq!(test.state(1), Some(SnapshotState::Stable));
    assert!(test.catalog.available().unwrap().is_empty());
}

#[test]
fn a_snapshot_whose_parent_is_only_available_is_at_most_available() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Available);
    let (holder, number) = test.writer();
    let stable = published(SnapshotState::Stable);
    let publish = || test.catalog.publish(&holder, number, &stable).unwrap().unwrap().state;
    assert_eq!(publish(), SnapshotState::Available);
    assert_eq!(publish(), SnapshotState::Available, "also when it is published again");
    let record = test.catalog.record(&holder, number, &stable).unwrap().unwrap();
    assert_eq!(record.state(), Some(SnapshotState::Available));
    let first = test.catalog.available().unwrap().remove(0);
    test.catalog.promote(&first).unwrap();
    assert_eq!(publish(), SnapshotState::Stable);
}

#[test]
fn a_writer_may_announce_and_publish_again_after_a_lost_answer() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Stable);
    let (holder, number) = test.writer();
    for _ in 0..2 {
        test.catalog.begin(&holder, &new(number)).unwrap();
        let again =
            test.catalog.publish(&holder, number, &published(SnapshotState::Stable)).unwrap();
        let again = again.unwrap();
        assert_eq!((again.number, again.state), (number, SnapshotState::Stable));
    }
    let failed = test.catalog.reserve(&holder, 1, 0).unwrap().0.start;
    test.catalog.begin(&holder, &new(failed)).unwrap();
    test.catalog.fail(&holder, failed, "no").unwrap();
    test.catalog.begin(&holder, &new(failed)).unwrap_err();
}

#[test]
fn a_publication_in_another_epoch_of_the_cluster_changes_nothing() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Stable);
    let (holder, number) = test.writer();
    let stable = published(SnapshotState::Stable);
    let lost = Change::default().put(LOSSES, &1);
    assert!(test.documents.commit(&lost).unwrap());
    assert!(test.catalog.record(&holder, number, &stable).unwrap().is_none());
    assert!(test.catalog.publish(&holder, number, &stable).unwrap().is_none());
    assert_eq!(test.state(number), Some(SnapshotState::Pending));
    let basis = test.catalog.commit_basis().unwrap();
    let again = Published { basis, ..stable };
    let snapshot = test.catalog.publish(&holder, number, &again).unwrap().unwrap();
    assert_eq!(snapshot.state, SnapshotState::Stable);
}

/// The state of the parent is not forgotten with the parent's name.
#[test]
fn a_snapshot_whose_available_parent_was_removed_is_at_most_available() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Stable);
    let (holder, parent) = test.writer();
    let available = published(SnapshotState::Available);
    test.catalog.publish(&holder, parent, &available).unwrap().unwrap();
    let number = test.catalog.reserve(&holder, 1, 0).unwrap().0.start;
    test.catalog.begin(&holder, &new(number)).unwrap();
    test.remove(parent);
    let stable = Published { parent, ..published(SnapshotState::Stable) };
    let publish = || test.catalog.publish(&holder, number, &stable).unwrap().unwrap().state;
    assert_eq!(publish(), SnapshotState::Available);
    assert_eq!(publish(), SnapshotState::Available, "also when it is published again");
    let found = test.catalog.available().unwrap();
    assert_eq!(found.len(), 1, "only what is available is in the index");
    test.catalog.promote(&found[0]).unwrap();
    assert_eq!(test.state(number), Some(SnapshotState::Stable));
    assert!(!test.catalog.has_available().unwrap());
}

#[test]
fn an_image_whose_name_begins_with_another_images_name_is_independent() {
    let mut test = TestCatalog::new();
    test.create(SnapshotState::Stable);
    let (_, number) = test.writer();
    let short = std::mem::replace(&mut test.image, "a/b".parse().unwrap());
    test.create(SnapshotState::Stable);
    let tombstone = test.catalog.begin_image_removal(&short, true);
    assert!(tombstone.is_err(), "a live writer has it");
    assert_eq!(test.catalog.snapshots(&short).unwrap().len(), 2, "{number}");
    assert_eq!(test.catalog.snapshots(&test.image).unwrap().len(), 1);
    let long = std::mem::replace(&mut test.image, short.clone());
    test.expire_lease();
    let tombstone = test.catalog.begin_image_removal(&short, true).unwrap();
    test.catalog.finish_image_removal(&short, &tombstone).unwrap();
    assert_eq!(test.catalog.snapshots(&long).unwrap().len(), 1);
    let names: Vec<_> = test.catalog.images().unwrap().into_iter().map(|one| one.name).collect();
    assert_eq!(names, [long]);
}

#[test]
fn an_interrupted_removal_hides_the_object_and_is_completed_by_the_next_one() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Stable);
    let (holder, number) = test.writer();
    test.catalog.publish(&holder, number, &published(SnapshotState::Stable)).unwrap().unwrap();
    let name = SnapshotRef::number(&test.image, 1);
    test.catalog.begin_removal(&name).unwrap();
    let removing = test.catalog.resolve(&name).unwrap();
    assert_eq!(removing.state, SnapshotState::Removing);
    removing.require_content().unwrap_err();
    let last = test.catalog.begin_removal(&SnapshotRef::number(&test.image, number));
    assert!(matches!(last, Err(Error::OnlyStable { .. })), "it is the last one with content");
    test.remove(1);
    assert_eq!(test.state(1), None);

    test.expire_lease();
    test.catalog.begin_image_removal(&test.image, true).unwrap();
    let refused = test.catalog.snapshots(&test.image).unwrap_err();
    assert!(matches!(refused, Error::BeingRemoved { .. }), "{refused}");
    let tombstone = test.catalog.begin_image_removal(&test.image, false).unwrap();
    test.catalog.finish_image_removal(&test.image, &tombstone).unwrap();
    test.create(SnapshotState::Stable);
    // The removal of the old image does not touch the new one.
    test.catalog.finish_image_removal(&test.image, &tombstone).unwrap();
    assert_eq!(test.state(1), Some(SnapshotState::Stable));
}

#[test]
fn a_catalog_of_a_newer_version_is_changed_by_no_older_process() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Stable);
    let (holder, number) = test.writer();
    // A newer program adds a field and raises the version.
    let key = image_key(&test.image);
    let view = test.documents.read(&[Query::key(&key)]).unwrap();
    let mut image: serde_json::Value = view.get(&key).unwrap().unwrap();
    image["color"] = "green".into();
    let newer = Change::default().put(&key, &image).put(SCHEMA, &(SCHEMA_VERSION + 1));
    assert!(test.documents.commit(&newer).unwrap());
    let refused = [
        test.catalog.reserve(&holder, 1, 0).map(drop).unwrap_err(),
        test.catalog.publish(&holder, number, &published(SnapshotState::Stable)).unwrap_err(),
        test.catalog.begin_image_removal(&test.image, true).map(drop).unwrap_err(),
    ];
    for error in refused {
        assert!(matches!(error, Error::NewerFormat { .. }), "{error}");
    }
    let view = test.documents.read(&[Query::key(&key)]).unwrap();
    assert_eq!(view.get::<serde_json::Value>(&key).unwrap(), Some(image), "it keeps the field");
}

/// Its number stays used: a tombstone counts for ever.
#[test]
fn a_snapshot_that_was_removed_cannot_be_announced_again() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Stable);
    let (holder, number) = test.writer();
    test.catalog.publish(&holder, number, &published(SnapshotState::Stable)).unwrap().unwrap();
    let pending = test.catalog.reserve(&holder, 1, 0).unwrap().0.start;
    test.catalog.begin(&holder, &new(pending)).unwrap();
    test.expire_lease();
    for number in [number, pending] {
        test.remove(number);
        let refused = test.catalog.begin(&holder, &new(number)).unwrap_err();
        assert!(matches!(refused, Error::WrongState { state: "removed", .. }), "{refused}");
    }
}

#[test]
fn an_interrupted_removal_by_label_is_completed_by_the_same_name() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Stable);
    let (holder, number) = test.writer();
    test.catalog.fail(&holder, number, "no").unwrap();
    let number = test.catalog.reserve(&holder, 2, 0).unwrap().0.start;
    let labelled = |number| NewSnapshot { label: Some("x".into()), ..new(number) };
    test.catalog.begin(&holder, &labelled(number)).unwrap();
    test.catalog.publish(&holder, number, &published(SnapshotState::Stable)).unwrap().unwrap();
    let name: SnapshotRef = "a@x".parse().unwrap();
    test.catalog.begin_removal(&name).unwrap();
    let taken = test.catalog.begin(&holder, &labelled(number + 1)).unwrap_err();
    assert!(matches!(taken, Error::SnapshotExists { .. }), "{taken}");
    let (again, _) = test.catalog.begin_removal(&name).unwrap();
    assert_eq!(again.number, number);
    test.catalog.finish_removal(&again).unwrap();
    test.catalog.begin(&holder, &labelled(number + 1)).unwrap();
}

/// A list that somebody reads slowly, with gaps, and with removals while it is read.
#[test]
fn snapshots_are_listed_in_pages_from_any_number_on() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Stable);
    let (holder, mut number) = test.writer();
    let mut rng = seeded_rng::Rng::new(1);
    for _ in 0..40 {
        let stable = published(SnapshotState::Stable);
        test.catalog.publish(&holder, number, &stable).unwrap().unwrap();
        let skipped = rng.below(12) + 1;
        number = test.catalog.reserve(&holder, skipped, 0).unwrap().0.end - 1;
        test.catalog.begin(&holder, &new(number)).unwrap();
    }
    let numbers = || -> Vec<u64> {
        test.catalog.snapshots(&test.image).unwrap().iter().map(|one| one.number).collect()
    };
    let listed = |after: u64, most: usize| {
        let mut found = Vec::new();
        let each = |one: crate::snapshot::Snapshot| {
            found.push(one.number);
            Ok(found.len() < most)
        };
        test.catalog.each_snapshot_after(&test.image, after, each).unwrap();
        found
    };
    for number in [5, 6, 7, 8].map(|at| numbers()[at]) {
        test.remove(number);
    }
    let all = numbers();
    for after in (0..all.last().unwrap() + 3).chain([u64::MAX]) {
        let expected: Vec<_> = all.iter().copied().filter(|number| *number > after).collect();
        assert_eq!(listed(after, usize::MAX), expected, "after {after}");
        let most = 1 + rng.below(9) as usize;
        assert_eq!(listed(after, most), expected[..most.min(expected.len())], "after {after}");
    }
    // Removing what comes next is seen.
    let mut found = Vec::new();
    let each = |one: crate::snapshot::Snapshot| {
        found.push(one.number);
        if one.number == all[2] {
            test.remove(all[30]);
        }
        Ok(true)
    };
    test.catalog.each_snapshot_after(&test.image, 0, each).unwrap();
    assert_eq!(found, numbers());
}
