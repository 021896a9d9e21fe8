//! The index in an image's document is exact after every sequence and interleaving of operations.
//!
//! Each change is one transaction, so a kill of a process leaves the state between two of them: the
//! sequences below stop removals and rebuilds half way.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use seeded_rng::Rng;
use tempfile::TempDir;

use super::documents::{
    ImageDocument, SnapshotDocument, image_key, labels_of, lease_key, snapshots, snapshots_of,
};
use super::index::{LabelDocument, SnapshotIndex};
use super::records::{Record, Records};
use super::{Catalog, Draft, FirstSnapshot, Holder, Published, SnapshotEdit};
use crate::documents::{Change, Documents, Query, SqliteDocuments, View};
use crate::encoding::StoragePolicy;
use crate::error::Error;
use crate::geometry::Geometry;
use crate::id::{BlobId, MirrorId, NodeId};
use crate::metadata::Metadata;
use crate::name::{ImageName, SnapshotRef};
use crate::snapshot::{Consistency, MirrorOwner, Mode, NewSnapshot, Snapshot, SnapshotState};
use crate::tree::Root;

const LABELS: [Option<&str>; 4] = [None, None, Some("x"), Some("y")];

/// A catalog with one image, and the records that its operations have stored.
struct World {
    _dir: TempDir,
    documents: Arc<SqliteDocuments>,
    catalog: Catalog,
    name: ImageName,
    records: Mutex<Vec<(BlobId, Record)>>,
    /// Removals that have begun.
    removing: Mutex<Vec<Snapshot>>,
}

impl World {
    fn new() -> World {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("catalog.db");
        SqliteDocuments::create(&path).unwrap();
        let documents = Arc::new(SqliteDocuments::open(&path).unwrap());
        let (catalog, name) = (Catalog::new(documents.clone()), "a".parse().unwrap());
        let (records, removing) = Default::default();
        let world = World { _dir: dir, documents, catalog, name, records, removing };
        world.create();
        world
    }

    fn keep(&self, record: Record) {
        self.records.lock().unwrap().push((BlobId::of(&record.to_bytes()), record));
    }

    fn create(&self) {
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
        let draft = Draft::new(&self.name, geometry, StoragePolicy::default(), &first).unwrap();
        let basis = self.catalog.commit_basis().unwrap();
        self.keep(draft.record(basis.epoch));
        self.catalog.insert(&draft, &basis, None, None).unwrap();
    }

    fn attach(&self, mirror: u8) -> Result<Holder, Error> {
        let owner = MirrorOwner::this_process(MirrorId::from_bytes([mirror; 16]), "/m")?;
        let newest = self.catalog.resolve(&self.newest())?;
        // The lease of a process that was killed has expired.
        let expired = Change::default().remove(Query::Key(lease_key(&newest.image_id)));
        self.documents.commit(&expired)?;
        Ok(self.catalog.attach(&owner, &newest, Mode::ReadWrite, None)?.0)
    }

    fn newest(&self) -> SnapshotRef {
        "a".parse().unwrap()
    }

    /// A name of a snapshot that may exist.
    fn some_name(&self, rng: &mut Rng) -> SnapshotRef {
        match rng.below(8) {
            0 => self.newest(),
            1 => "a@x".parse().unwrap(),
            2 => "a@y".parse().unwrap(),
            _ => SnapshotRef::number(&self.name, rng.between(1, 40)),
        }
    }

    /// Announces a snapshot, and publishes it, lets it fail, or leaves it.
    fn checkpoint(&self, holder: &Holder, rng: &mut Rng) -> Result<(), Error> {
        let number = self.catalog.reserve(holder, rng.between(1, 3), 0)?.0.start;
        let label = rng.pick(&LABELS).map(str::to_owned);
        let (consistency, time, dirty_bytes, pause_us) = (Consistency::Crash, 1, 0, 0);
        let new = NewSnapshot {
            number,
            label,
            metadata: Metadata::default(),
            is_from_guest: rng.below(2) == 0,
            size: 1 << 20,
            consistency,
            time,
            dirty_bytes,
            pause_us,
        };
        let basis = self.catalog.begin(holder, &new)?;
        let state = rng.pick(&[SnapshotState::Stable, SnapshotState::Available]);
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
        match rng.below(10) {
            0 | 1 => self.keep(self.catalog.fail(holder, number, "no")?),
            2 => {}
            _ => {
                if let Some(record) = self.catalog.record(holder, number, &published)? {
                    self.keep(record);
                }
                self.catalog.publish(holder, number, &published)?;
            }
        }
        Ok(())
    }

    fn begin_removal(&self, rng: &mut Rng) -> Result<(), Error> {
        let (snapshot, tombstone) = self.catalog.begin_removal(&self.some_name(rng))?;
        self.keep(tombstone);
        self.removing.lock().unwrap().push(snapshot);
        Ok(())
    }

    fn finish_removal(&self, rng: &mut Rng) -> Result<(), Error> {
        let mut all = self.removing.lock().unwrap();
        if all.is_empty() {
            return Ok(());
        }
        let at = rng.below(all.len() as u64) as usize;
        let one = all.swap_remove(at);
        drop(all);
        self.catalog.finish_removal(&one)
    }

    /// Changes a label, the pin or the obsolete mark of a snapshot, and keeps its record.
    fn edit(&self, rng: &mut Rng) -> Result<(), Error> {
        let edit = match rng.below(6) {
            0 => SnapshotEdit::AddLabel("x".into()),
            1 => SnapshotEdit::AddLabel("z".into()),
            2 => SnapshotEdit::RemoveLabel("x".into()),
            3 => SnapshotEdit::Pin(true),
            4 => SnapshotEdit::Pin(false),
            _ => SnapshotEdit::Obsolete,
        };
        let edited = self.catalog.edit(&self.some_name(rng), &edit)?;
        let (edits, record) = (edited.edits(), edited.record);
        let id = BlobId::of(&record.to_bytes());
        self.keep(record);
        self.catalog.note_record(&edited.snapshot, edits, id)
    }

    fn promote(&self) -> Result<(), Error> {
        self.catalog.available()?.iter().try_for_each(|one| self.catalog.promote(one))
    }

    fn rebuild(&self) -> Result<(), Error> {
        let inventory = self.catalog.inventory()?;
        let mut records = Records::default();
        records.snapshots.clone_from(&self.records.lock().unwrap());
        self.catalog.rebuild(&inventory, records).map(drop)
    }

    /// Compares the index with the snapshots. Returns `false` if there is no image.
    fn check(&self) -> bool {
        let key = image_key(&self.name);
        let view = self.documents.read(&[Query::key(&key)]).unwrap();
        let Some(image) = view.get::<ImageDocument>(&key).unwrap() else { return false };
        let prefixes = [snapshots_of(&image.id), labels_of(&image.id)].map(Query::Prefix);
        let view = self.documents.read(&prefixes).unwrap();
        let all = snapshots(&view, &image.id).unwrap();
        let mut counted = SnapshotIndex::default();
        all.iter().for_each(|(number, one)| counted.add(*number, one));
        assert!(counted.highest <= image.index.highest);
        counted.highest = image.index.highest;
        assert_eq!(image.index, counted);
        let found = self.catalog.resolve(&self.newest()).ok().map(|one| one.number);
        let with_content = all.iter().filter(|(_, one)| one.state.has_content());
        assert_eq!(found, with_content.map(|(number, _)| *number).max());
        let labels = view.under::<LabelDocument>(&labels_of(&image.id)).unwrap();
        let find = |number| all.iter().find(|(other, _)| *other == number).map(|(_, one)| one);
        for (label, LabelDocument { number, failed }) in &labels {
            let one: &SnapshotDocument = find(*number).expect("a label names a snapshot");
            assert!(one.labels.contains(label));
            assert_eq!(one.state == SnapshotState::Failed, *failed);
        }
        for (number, one) in all.iter().filter(|(_, one)| one.state != SnapshotState::Failed) {
            for label in &one.labels {
                let named = labels.iter().find(|(other, _)| other == label);
                assert_eq!(named.map(|(_, label)| label.number), Some(*number), "{label}");
            }
            assert!(!one.is_pinned || one.state.has_content());
        }
        true
    }
}

/// Errors of operations that are refused for a good reason.
fn allow(result: Result<(), Error>) {
    match result {
        Ok(())
        | Err(
            Error::NoSnapshot { .. }
            | Error::NoImage { .. }
            | Error::NoMirror { .. }
            | Error::OnlyStable { .. }
            | Error::Pinned { .. }
            | Error::HasPinned { .. }
            | Error::NoLabel { .. }
            | Error::NotFromGuest { .. }
            | Error::SnapshotExists { .. }
            | Error::Leased { .. }
            | Error::Fenced { .. }
            | Error::WrongState { .. }
            | Error::CatalogRebuilt { .. }
            | Error::ImageGone { .. }
            | Error::ImageExists { .. }
            | Error::BeingRemoved { .. },
        ) => {}
        Err(error) => panic!("{error}"),
    }
}

fn run_sequence(seed: u64) {
    let (mut rng, world) = (Rng::new(seed), World::new());
    let mut holder = world.attach(1).ok();
    for _ in 0..120 {
        match rng.below(100) {
            0..=44 => match &holder {
                Some(holder) => allow(world.checkpoint(holder, &mut rng)),
                None => holder = world.attach(rng.between(1, 3) as u8).ok(),
            },
            45..=64 => allow(world.begin_removal(&mut rng)),
            65..=79 => allow(world.finish_removal(&mut rng)),
            80..=81 => allow(world.edit(&mut rng)),
            82..=84 => holder = world.attach(rng.between(1, 3) as u8).ok(),
            85..=88 => allow(world.promote()),
            89..=93 => allow(world.rebuild()),
            // The catalog is lost, or a rebuild was killed before it restored the image's document.
            94..=96 => {
                let lost = Query::prefix(rng.pick(&["", "images/"]));
                assert!(world.documents.commit(&Change::default().remove(lost)).unwrap());
                allow(world.rebuild());
            }
            _ => {
                let removed = world.catalog.begin_image_removal(&world.name, true);
                if let Ok(tombstone) = removed {
                    world.keep(tombstone.clone());
                    allow(world.catalog.finish_image_removal(&world.name, &tombstone));
                    world.create();
                }
            }
        }
        world.check();
    }
}

/// `CAIRN_SEED` repeats one sequence. `CAIRN_SOAK_SECONDS` continues with others for that long.
#[test]
fn the_index_is_exact_after_every_operation() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("CAIRN_SEED") {
        return run_sequence(seed);
    }
    let soak = Duration::from_secs(number("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let begin = Instant::now();
    let mut seed = 0;
    while seed < 12 || begin.elapsed() < soak {
        println!("CAIRN_SEED={seed}");
        run_sequence(seed);
        seed += 1;
    }
}

#[test]
fn the_index_is_exact_after_concurrent_operations() {
    let world = World::new();
    let end = Instant::now() + Duration::from_secs(2);
    thread::scope(|scope| {
        let world = &world;
        let run = |seed: u64, step: &'static (dyn Fn(&World, &mut Rng) + Sync)| {
            let mut rng = Rng::new(seed);
            scope.spawn(move || {
                while Instant::now() < end {
                    step(world, &mut rng);
                }
            });
        };
        run(1, &|world, rng| {
            if let Ok(holder) = world.attach(1) {
                (0..20).for_each(|_| allow(world.checkpoint(&holder, rng)));
            }
        });
        for seed in [2, 3] {
            run(seed, &|world, rng| {
                allow(world.begin_removal(rng));
                allow(world.finish_removal(rng));
            });
        }
        run(6, &|world, rng| allow(world.edit(rng)));
        run(4, &|world, _| allow(world.rebuild()));
        run(5, &|world, _| {
            allow(world.promote());
            // As after a rebuild that was killed: two rebuilds restore the image.
            let lost = Query::prefix("images/");
            assert!(world.documents.commit(&Change::default().remove(lost)).unwrap());
            allow(world.rebuild());
        });
    });
    allow(world.rebuild());
    assert!(world.check(), "the image exists");
}

/// Documents that count how many of them were read.
struct CountingDocuments {
    documents: Arc<SqliteDocuments>,
    read: AtomicU64,
}

impl CountingDocuments {
    fn count(&self, view: &View) {
        self.read.fetch_add(view.documents.len() as u64, Ordering::Relaxed);
    }
}

impl Documents for CountingDocuments {
    fn read(&self, queries: &[Query]) -> Result<View, Error> {
        let view = self.documents.read(queries)?;
        self.count(&view);
        Ok(view)
    }

    fn last(&self, prefix: &str, before: &str, limit: usize) -> Result<View, Error> {
        let view = self.documents.last(prefix, before, limit)?;
        self.count(&view);
        Ok(view)
    }

    fn commit(&self, change: &Change) -> Result<bool, Error> {
        self.documents.commit(change)
    }

    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<bool, Error> {
        self.documents.wait(folder, revision, limit)
    }
}

/// So pruning n snapshots costs n times as much as pruning one.
#[test]
fn an_operation_on_one_snapshot_does_not_read_the_others() {
    const SNAPSHOTS: u64 = 200;
    const MOST: u64 = 48;
    let world = World::new();
    let (holder, mut rng) = (world.attach(1).unwrap(), Rng::new(1));
    while world.catalog.image(&world.name).unwrap().snapshots < SNAPSHOTS {
        allow(world.checkpoint(&holder, &mut rng));
    }
    let counting = CountingDocuments { documents: world.documents.clone(), read: 0.into() };
    let counting = Arc::new(counting);
    let catalog = Catalog::new(counting.clone());
    let check = |what: &str| {
        let read = counting.read.swap(0, Ordering::Relaxed);
        assert!(read <= MOST, "{what} has read {read} documents");
    };
    let number = |n| SnapshotRef::number(&world.name, n);
    let label = world.catalog.snapshots(&world.name).unwrap().into_iter();
    let label = label.rev().find_map(|mut one| one.labels.pop()).unwrap();
    catalog.image(&world.name).unwrap();
    check("image");
    let newest = catalog.resolve(&world.newest()).unwrap();
    check("resolving the newest snapshot");
    catalog.resolve(&format!("a@{label}").parse().unwrap()).unwrap();
    check("resolving a label");
    let (left, _) = catalog.reserve(&holder, 5, 0).unwrap();
    check("reserve");
    let (unused, _) = catalog.resume(&holder, &left, None).unwrap();
    check("resume");
    for name in [world.newest(), number(1), newest.name(), world.newest()] {
        if let Ok((removed, _)) = catalog.begin_removal(&name) {
            check("beginning a removal");
            catalog.finish_removal(&removed).unwrap();
            check("finishing a removal");
        }
    }
    catalog.has_available().unwrap();
    check("looking for available snapshots");
    catalog.release(&holder, Some(unused)).unwrap();
    check("release");
    assert!(world.check());
}
