//! Labels, pins, metadata, and the checks of a prune.

use std::sync::Arc;
use std::thread;

use tempfile::TempDir;

use super::documents::POLICIES;
use super::{
    Catalog, CommitBasis, Draft, FirstSnapshot, Holder, MAX_LABELS, PruneCheck, Published, Record,
    Records, Refused, SnapshotEdit,
};
use crate::documents::{Change, Documents, Query, SqliteDocuments};
use crate::encoding::StoragePolicy;
use crate::error::{Error, ErrorKind};
use crate::geometry::Geometry;
use crate::id::{BlobId, MirrorId, NodeId};
use crate::metadata::Metadata;
use crate::name::{ImageName, Scope, SnapshotRef};
use crate::retention::RetentionPolicy;
use crate::snapshot::{Consistency, MirrorOwner, Mode, NewSnapshot, Snapshot, SnapshotState};
use crate::tree::Root;

/// A catalog with the image `job/a`, whose first snapshot is stable and empty.
struct Bench {
    _dir: TempDir,
    documents: Arc<SqliteDocuments>,
    catalog: Catalog,
    name: ImageName,
    first: Record,
}

impl Bench {
    fn new() -> Bench {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("catalog.db");
        SqliteDocuments::create(&path).unwrap();
        let documents = Arc::new(SqliteDocuments::open(&path).unwrap());
        let (catalog, name) = (Catalog::new(documents.clone()), "job/a".parse().unwrap());
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
        let draft = Draft::new(&name, geometry, StoragePolicy::default(), &first).unwrap();
        let basis = catalog.commit_basis().unwrap();
        catalog.insert(&draft, &basis, None, None).unwrap();
        Bench { _dir: dir, documents, catalog, name, first: draft.record(basis.epoch) }
    }

    fn attach(&self) -> Holder {
        let owner = MirrorOwner::this_process(MirrorId::from_bytes([1; 16]), "/m").unwrap();
        let newest = self.catalog.resolve(&"job/a".parse().unwrap()).unwrap();
        self.catalog.attach(&owner, &newest, Mode::ReadWrite, None).unwrap().0
    }

    /// Announces a snapshot.
    fn announce(&self, holder: &Holder) -> (u64, CommitBasis) {
        let number = self.catalog.reserve(holder, 1, 0).unwrap().0.start;
        let new = NewSnapshot {
            number,
            label: None,
            metadata: Metadata::default(),
            is_from_guest: true,
            size: 1 << 20,
            consistency: Consistency::Crash,
            time: number,
            dirty_bytes: 0,
            pause_us: 0,
        };
        let basis = self.catalog.begin(holder, &new).unwrap();
        (number, basis)
    }

    /// Publishes a snapshot in this state.
    fn publish(&self, holder: &Holder, state: SnapshotState) -> u64 {
        let (number, basis) = self.announce(holder);
        let published = Published {
            root: Root(Some(NodeId::from_bytes([9; 32]))),
            state,
            stored_bytes: 0,
            dirty_bytes: 0,
            sent_bytes: 0,
            saved_bytes: 0,
            parent: 1,
            basis,
            base: None,
            record: None,
        };
        self.catalog.publish(holder, number, &published).unwrap().unwrap();
        number
    }

    fn name(&self, number: u64) -> SnapshotRef {
        SnapshotRef::number(&self.name, number)
    }

    fn edit(&self, number: u64, edit: SnapshotEdit) -> Result<Record, Error> {
        let edited = self.catalog.edit(&self.name(number), &edit)?;
        let id = BlobId::of(&edited.record.to_bytes());
        self.catalog.note_record(&edited.snapshot, edited.edits(), id)?;
        Ok(edited.record)
    }

    fn find(&self, number: u64) -> Snapshot {
        self.catalog.resolve(&self.name(number)).unwrap()
    }

    /// Prunes a stable snapshot while another one stays.
    fn prune(&self, number: u64, stable: u64) -> Option<Refused> {
        let policies = self.catalog.find_policy(&self.name).unwrap().versions;
        let check = PruneCheck { state: SnapshotState::Stable, stable: Some(stable), policies };
        self.prune_if(number, &check)
    }

    fn prune_if(&self, number: u64, check: &PruneCheck) -> Option<Refused> {
        match self.catalog.begin_pruning(&self.name(number), check).unwrap() {
            Ok((snapshot, _)) => {
                self.catalog.finish_removal(&snapshot).unwrap();
                None
            }
            Err(refused) => Some(refused),
        }
    }
}

fn label(text: &str) -> SnapshotEdit {
    SnapshotEdit::AddLabel(text.into())
}

fn owner(name: &str) -> SnapshotEdit {
    SnapshotEdit::Metadata { set: vec![("owner".into(), name.into())], unset: Vec::new() }
}

#[test]
fn a_label_names_one_snapshot_until_it_is_removed() {
    let bench = Bench::new();
    let second = bench.publish(&bench.attach(), SnapshotState::Stable);
    bench.edit(1, label("golden")).unwrap();
    bench.edit(1, label("golden")).unwrap();
    bench.edit(1, label("old")).unwrap();
    assert_eq!(bench.find(1).labels, ["golden", "old"]);
    let taken = bench.edit(second, label("golden")).err().unwrap();
    assert!(matches!(taken, Error::SnapshotExists { .. }), "{taken}");
    let number = |name: &str| bench.catalog.resolve(&name.parse().unwrap()).unwrap().number;
    assert_eq!((number("job/a@golden"), number("job/a@old")), (1, 1));
    let remove = SnapshotEdit::RemoveLabel("golden".into());
    bench.edit(1, remove.clone()).unwrap();
    assert_eq!(bench.edit(1, remove).err().unwrap().kind(), ErrorKind::NotFound);
    bench.edit(second, label("golden")).unwrap();
    assert_eq!((number("job/a@golden"), number("job/a@old")), (second, 1));
    for bad in ["7", "-x", "", "a b"] {
        assert_eq!(bench.edit(1, label(bad)).err().unwrap().kind(), ErrorKind::Invalid, "{bad}");
    }
    (1..MAX_LABELS).for_each(|i| drop(bench.edit(1, label(&format!("l{i}"))).unwrap()));
    assert!(matches!(bench.edit(1, label("more")).err().unwrap(), Error::TooLarge { .. }));
}

#[test]
fn a_snapshot_without_content_is_not_edited() {
    let bench = Bench::new();
    let (pending, _) = bench.announce(&bench.attach());
    let refused = bench.edit(pending, SnapshotEdit::Pin(true)).err().unwrap();
    assert!(matches!(refused, Error::WrongState { .. }), "{refused}");
    assert!(matches!(bench.edit(9, label("x")).err().unwrap(), Error::NoSnapshot { .. }));
}

#[test]
fn a_pinned_snapshot_and_its_image_are_not_removed() {
    let bench = Bench::new();
    let second = bench.publish(&bench.attach(), SnapshotState::Stable);
    bench.edit(1, SnapshotEdit::Pin(true)).unwrap();
    let refused = bench.catalog.begin_removal(&bench.name(1)).err().unwrap();
    assert!(refused.to_string().contains("cairn unpin job/a@1"), "{refused}");
    assert_eq!(bench.prune(1, second), Some(Refused::Pinned));
    let lease = Change::default().remove(Query::prefix("leases/"));
    bench.documents.commit(&lease).unwrap();
    let refused = bench.catalog.begin_image_removal(&bench.name, true).err().unwrap();
    assert!(matches!(refused, Error::HasPinned { pinned: 1, .. }), "{refused}");
    bench.edit(1, SnapshotEdit::Pin(false)).unwrap();
    assert_eq!(bench.prune(1, second), None);
    bench.catalog.begin_image_removal(&bench.name, true).unwrap();
}

#[test]
fn only_what_was_taken_from_inside_the_guest_becomes_obsolete() {
    let bench = Bench::new();
    let second = bench.publish(&bench.attach(), SnapshotState::Stable);
    let refused = bench.edit(1, SnapshotEdit::Obsolete).err().unwrap();
    assert!(matches!(refused, Error::NotFromGuest { .. }), "{refused}");
    bench.edit(second, SnapshotEdit::Obsolete).unwrap();
    assert!(bench.find(second).is_obsolete);
    assert_eq!(bench.catalog.image(&bench.name).unwrap().obsolete, 1);
}

#[test]
fn a_rebuilt_catalog_has_the_last_edit_whatever_the_clocks_of_the_hosts_said() {
    let bench = Bench::new();
    let mut records = vec![bench.first.clone()];
    for edit in [label("x"), SnapshotEdit::Pin(true), owner("ann"), label("y"), owner("bob")] {
        records.push(bench.edit(1, edit).unwrap());
    }
    records.push(bench.edit(1, SnapshotEdit::RemoveLabel("x".into())).unwrap());
    let before = bench.find(1);
    assert_eq!(before.labels, ["y"]);
    // Each host's clock is behind that of the host before.
    let mut all = Records::default();
    for (age, mut record) in (0..).zip(records) {
        record.set_recorded(1_000_000 - age);
        all.add(&record.to_bytes()).unwrap();
    }
    bench.documents.commit(&Change::default().remove(Query::prefix(""))).unwrap();
    let inventory = bench.catalog.inventory().unwrap();
    bench.catalog.rebuild(&inventory, all).unwrap();
    assert_eq!(bench.find(1), before);
    assert_eq!(bench.catalog.image(&bench.name).unwrap().pinned, 1);
    let removed = bench.catalog.resolve(&"job/a@x".parse().unwrap()).unwrap_err();
    assert!(matches!(removed, Error::NoSnapshot { .. }), "{removed}");
    assert!(matches!(bench.catalog.begin_removal(&bench.name(1)), Err(Error::Pinned { .. })));
}

#[test]
fn a_repair_and_a_publication_keep_what_an_edit_has_changed() {
    let bench = Bench::new();
    let number = bench.publish(&bench.attach(), SnapshotState::Available);
    bench.edit(number, SnapshotEdit::Pin(true)).unwrap();
    let available = bench.catalog.available().unwrap();
    available.iter().for_each(|one| bench.catalog.promote(one).unwrap());
    let found = bench.find(number);
    assert!(found.is_pinned && found.state == SnapshotState::Stable);
}

#[test]
fn a_prune_leaves_what_has_changed_since_it_decided() {
    let bench = Bench::new();
    let holder = bench.attach();
    let all: Vec<u64> = (0..4).map(|_| bench.publish(&holder, SnapshotState::Stable)).collect();
    let newest = all[3];
    assert_eq!(bench.prune(newest, 1), Some(Refused::Parent("01".repeat(16))));
    // The policy has changed since.
    let policies = bench.catalog.find_policy(&bench.name).unwrap().versions;
    assert_eq!(policies.len(), 3, "of the image, its folder and the repository: {policies:?}");
    let keep_all = RetentionPolicy::default();
    let check = PruneCheck { state: SnapshotState::Stable, stable: Some(newest), policies };
    for scope in [Scope::All, "job/".parse().unwrap(), Scope::Image(bench.name.clone())] {
        bench.catalog.set_policy(&scope, &keep_all).unwrap();
        assert_eq!(bench.prune_if(all[0], &check), Some(Refused::Changed), "{scope}");
        bench.documents.commit(&Change::default().remove(Query::prefix(POLICIES))).unwrap();
    }
    // The snapshot that was to stay is gone, or is the same, or is not stable.
    let removed = bench.catalog.begin_removal(&bench.name(all[1])).unwrap();
    assert_eq!(bench.prune(all[0], all[1]), Some(Refused::Changed));
    bench.catalog.finish_removal(&removed.0).unwrap();
    assert_eq!(bench.prune(all[0], all[1]), Some(Refused::Changed));
    assert_eq!(bench.prune(all[0], all[0]), Some(Refused::Changed));
    let available = bench.publish(&holder, SnapshotState::Available);
    assert_eq!(bench.prune(all[0], available), Some(Refused::Changed));
    assert_eq!(bench.prune(all[1], newest), Some(Refused::Changed), "it is gone");
    assert_eq!(bench.prune(all[0], newest), None);
}

/// Every thread has decided to remove all but its own last stable snapshot.
#[test]
fn prunes_that_disagree_leave_a_stable_snapshot() {
    for _ in 0..5 {
        let bench = Bench::new();
        let holder = bench.attach();
        let all: Vec<u64> = (0..6).map(|_| bench.publish(&holder, SnapshotState::Stable)).collect();
        // No mirror protects its parent.
        bench.documents.commit(&Change::default().remove(Query::prefix("mirrors/"))).unwrap();
        thread::scope(|scope| {
            let (bench, all) = (&bench, &all);
            for keep in [all[0], all[2], all[5]] {
                scope.spawn(move || {
                    for number in all.iter().filter(|number| **number != keep) {
                        bench.prune(*number, keep);
                    }
                });
            }
            scope.spawn(move || {
                for number in all.iter().rev() {
                    let removed = bench.catalog.begin_removal(&bench.name(*number));
                    assert!(
                        removed.is_ok()
                            || removed.is_err_and(|error| {
                                matches!(error, Error::NoSnapshot { .. } | Error::OnlyStable { .. })
                            })
                    );
                }
            });
        });
        let mut left = bench.catalog.snapshots(&bench.name).unwrap().into_iter();
        assert!(left.any(|one| one.state == SnapshotState::Stable));
    }
}

#[test]
fn the_policy_of_the_smallest_scope_replaces_all_others() {
    let bench = Bench::new();
    let set = |scope: &str, last| {
        let policy = RetentionPolicy { last: Some(last), ..RetentionPolicy::default() };
        bench.catalog.set_policy(&scope.parse().unwrap(), &policy)
    };
    let applied = || {
        let applied = bench.catalog.policy_of(&bench.name).unwrap();
        applied.map(|one| (one.scope.to_string(), one.policy.last))
    };
    assert_eq!(applied(), None);
    set("/", 1).unwrap();
    assert_eq!(applied(), Some(("/".into(), Some(1))));
    set("job/a", 3).unwrap();
    set("job/", 2).unwrap();
    set("other/", 9).unwrap();
    assert_eq!(applied(), Some(("job/a".into(), Some(3))));
    bench.catalog.remove_policy(&"job/a".parse().unwrap()).unwrap();
    assert_eq!(applied(), Some(("job/".into(), Some(2))));
    assert!(matches!(set("job/b", 1).unwrap_err(), Error::NoImage { .. }));
    assert_eq!(set("/", 0).unwrap_err().kind(), ErrorKind::Invalid);
    let missing = bench.catalog.remove_policy(&"job/a".parse().unwrap()).unwrap_err();
    assert!(matches!(missing, Error::NoPolicy { .. }), "{missing}");
    let scopes = bench.catalog.policies().unwrap().into_iter().map(|one| one.scope.to_string());
    assert_eq!(scopes.collect::<Vec<_>>(), ["/", "job/", "other/"]);
    // An image that gets the name of a removed one does not get its policy.
    set("job/a", 3).unwrap();
    let tombstone = bench.catalog.begin_image_removal(&bench.name, true).unwrap();
    bench.catalog.finish_image_removal(&bench.name, &tombstone).unwrap();
    assert_eq!(applied(), Some(("job/".into(), Some(2))));
}
