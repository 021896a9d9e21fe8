//! Concurrent changes of the catalog.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;

use super::documents::lease_key;
use super::{Catalog, Draft, FirstSnapshot, Holder, Published};
use crate::documents::{Change, Documents, Query, SqliteDocuments, View};
use crate::error::Result;
use crate::geometry::Geometry;
use crate::id::{MirrorId, NodeId};
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

    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<()> {
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
        self.catalog.insert(&draft, None).unwrap();
    }

    fn state(&self, number: u64) -> Option<SnapshotState> {
        let all = self.catalog.snapshots(&self.image).unwrap();
        all.into_iter().find(|one| one.number == number).map(|one| one.state)
    }

    /// A writer that has announced a snapshot, and the snapshot's number.
    fn writer(&self) -> (Holder, u64) {
        let owner = MirrorOwner::this_process(MirrorId::from_bytes([7; 16]), "/m").unwrap();
        let newest = self.catalog.resolve(&SnapshotRef::number(&self.image, 1)).unwrap();
        let (holder, ..) = self.catalog.attach(&owner, &newest, Mode::ReadWrite).unwrap();
        let number = self.catalog.reserve(&holder, 1).unwrap().start;
        self.catalog.begin(&holder, &new(number)).unwrap();
        (holder, number)
    }
}

fn new(number: u64) -> NewSnapshot {
    let (consistency, time, dirty_bytes, pause_us) = (Consistency::Crash, 1, 0, 0);
    NewSnapshot { number, label: None, consistency, time, dirty_bytes, pause_us }
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
        losses: 0,
        record: None,
    }
}

#[test]
fn a_removal_of_a_pending_snapshot_restarts_if_the_snapshot_is_published_meanwhile() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Stable);
    let (holder, number) = test.writer();
    // The writer's lease has expired, and the writer continues.
    let expired = Change::default().remove(Query::Key(lease_key(&test.image)));
    assert!(test.documents.commit(&expired).unwrap());
    let catalog = test.catalog.clone();
    let hook = move || {
        catalog.publish(&holder, number, &published(SnapshotState::Stable)).unwrap();
    };
    let after_read = Mutex::new(Some(Box::new(hook) as Hook));
    let documents = test.documents.clone();
    let hooked = Catalog::new(Arc::new(HookedDocuments { documents, after_read }));
    let (removed, _) = hooked.remove_snapshot(&SnapshotRef::number(&test.image, number)).unwrap();
    assert_eq!(removed.state, SnapshotState::Stable, "the state when it was removed");
    assert_eq!(test.state(number), None);
}

#[test]
fn a_snapshot_that_changed_after_it_was_found_available_is_not_made_stable() {
    let test = TestCatalog::new();
    test.create(SnapshotState::Available);
    let found = test.catalog.available().unwrap();
    test.catalog.remove_image(&test.image, false).unwrap();
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
    let publish = || test.catalog.publish(&holder, number, &stable).unwrap().state;
    assert_eq!(publish(), SnapshotState::Available);
    assert_eq!(publish(), SnapshotState::Available, "also when it is published again");
    let record = test.catalog.record(&holder, number, &stable).unwrap();
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
        assert_eq!((again.number, again.state), (number, SnapshotState::Stable));
    }
    let failed = test.catalog.reserve(&holder, 1).unwrap().start;
    test.catalog.begin(&holder, &new(failed)).unwrap();
    test.catalog.fail(&holder, failed, "no").unwrap();
    test.catalog.begin(&holder, &new(failed)).unwrap_err();
}
