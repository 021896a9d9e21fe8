//! Changes of two who do not know of each other.

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

type Meanwhile = Box<dyn FnOnce() + Send>;

/// Documents, where something happens between the first read and what comes of it.
struct Between {
    documents: Arc<SqliteDocuments>,
    meanwhile: Mutex<Option<Meanwhile>>,
}

impl Documents for Between {
    fn read(&self, wanted: &[Query]) -> Result<View> {
        let view = self.documents.read(wanted);
        if let Some(meanwhile) = self.meanwhile.lock().unwrap().take() {
            meanwhile();
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

struct Place {
    _dir: TempDir,
    documents: Arc<SqliteDocuments>,
    catalog: Arc<Catalog>,
    image: ImageName,
}

impl Place {
    fn new() -> Place {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("catalog.db");
        SqliteDocuments::create(&path).unwrap();
        let documents = Arc::new(SqliteDocuments::open(&path).unwrap());
        let catalog = Arc::new(Catalog::new(documents.clone()));
        Place { _dir: dir, documents, catalog, image: "a".parse().unwrap() }
    }

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

    /// A writer that has announced a snapshot.
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
fn a_snapshot_that_is_published_while_it_is_removed_as_pending_is_decided_upon_again() {
    let place = Place::new();
    place.create(SnapshotState::Stable);
    let (holder, number) = place.writer();
    // Its lease has expired, and it goes on.
    let expired = Change::default().remove(Query::Key(lease_key(&place.image)));
    assert!(place.documents.commit(&expired).unwrap());
    let catalog = place.catalog.clone();
    let meanwhile = move || {
        catalog.publish(&holder, number, &published(SnapshotState::Stable)).unwrap();
    };
    let meanwhile = Mutex::new(Some(Box::new(meanwhile) as Meanwhile));
    let between = Catalog::new(Arc::new(Between { documents: place.documents.clone(), meanwhile }));
    let (removed, _) = between.remove_snapshot(&SnapshotRef::number(&place.image, number)).unwrap();
    assert_eq!(removed.state, SnapshotState::Stable, "as it was when it was removed");
    assert_eq!(place.state(number), None);
}

#[test]
fn only_what_was_found_available_becomes_stable() {
    let place = Place::new();
    place.create(SnapshotState::Available);
    let found = place.catalog.available().unwrap();
    place.catalog.remove_image(&place.image, false).unwrap();
    place.create(SnapshotState::Available);
    for one in &found {
        place.catalog.promote(one).unwrap();
    }
    assert_eq!(place.state(1), Some(SnapshotState::Available), "it is another one");
    for one in &place.catalog.available().unwrap() {
        place.catalog.promote(one).unwrap();
    }
    assert_eq!(place.state(1), Some(SnapshotState::Stable));
    assert!(place.catalog.available().unwrap().is_empty());
}

#[test]
fn who_is_derived_from_what_is_only_available_is_no_more_than_that() {
    let place = Place::new();
    place.create(SnapshotState::Available);
    let (holder, number) = place.writer();
    let stable = published(SnapshotState::Stable);
    let publish = || place.catalog.publish(&holder, number, &stable).unwrap().state;
    assert_eq!(publish(), SnapshotState::Available);
    assert_eq!(publish(), SnapshotState::Available, "nor is it the next time");
    let record = place.catalog.record(&holder, number, &stable).unwrap();
    assert_eq!(record.state(), Some(SnapshotState::Available));
    let first = place.catalog.available().unwrap().remove(0);
    place.catalog.promote(&first).unwrap();
    assert_eq!(publish(), SnapshotState::Stable);
}

#[test]
fn a_writer_that_did_not_hear_of_its_publication_finds_it() {
    let place = Place::new();
    place.create(SnapshotState::Stable);
    let (holder, number) = place.writer();
    for _ in 0..2 {
        place.catalog.begin(&holder, &new(number)).unwrap();
        let again =
            place.catalog.publish(&holder, number, &published(SnapshotState::Stable)).unwrap();
        assert_eq!((again.number, again.state), (number, SnapshotState::Stable));
    }
    let failed = place.catalog.reserve(&holder, 1).unwrap().start;
    place.catalog.begin(&holder, &new(failed)).unwrap();
    place.catalog.fail(&holder, failed, "no").unwrap();
    place.catalog.begin(&holder, &new(failed)).unwrap_err();
}
