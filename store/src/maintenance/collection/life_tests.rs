//! Random lives of a repository against a model: imports, clones, checkpoints, kills, removals, readers
//! and collections in any order, also in the middle of each other.
//!
//! After each collection, every snapshot of the model is read and compared. At the end, the repository
//! holds exactly the blobs that its snapshots refer to. `CAIRN_SEED` repeats a life, and
//! `CAIRN_SOAK_SECONDS` lives further ones for that long.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use seeded_rng::Rng;

use super::tests::{
    Disk, Site, attach, changes, collect_with, geometry, import, new, put, read, resolve, store,
};
use crate::documents::{Change, Query};
use crate::error::Error;
use crate::id::MirrorId;
use crate::name::{ImageName, SnapshotRef};
use crate::repository::attachment::Attachment;
use crate::repository::commit::SnapshotCommit;
use crate::repository::{ReaderLease, Repository};
use crate::snapshot::Snapshot;
use crate::tree::Root;

/// The lives in an ordinary run of the tests, and the steps of each.
const LIVES: u64 = 6;
const STEPS: u64 = 80;

/// Different contents of chunks. Few, so that much is found present.
const CONTENTS: u64 = 30;

/// A mirror, and its process if one runs.
struct Mirror {
    id: u8,
    image: String,
    /// What the mirror would read.
    disk: Disk,
    attachment: Option<Attachment>,
    /// The checkpoint that it was storing when its process was killed.
    left: Option<(u64, Disk)>,
}

struct Reader {
    snapshot: Snapshot,
    disk: Disk,
    _lease: ReaderLease,
}

struct Life {
    site: Site,
    repository: Repository,
    rng: Rng,
    /// The snapshots that must exist, by image and number.
    images: BTreeMap<String, BTreeMap<u64, Disk>>,
    mirrors: Vec<Mirror>,
    readers: Vec<Reader>,
    named: u64,
    mirrors_made: u8,
}

fn name(image: &str) -> ImageName {
    image.parse().unwrap()
}

impl Life {
    fn new(seed: u64) -> Life {
        let site = Site::new();
        let (repository, rng) = (site.open(), Rng::new(seed));
        let (images, mirrors, readers) = Default::default();
        Life { site, repository, rng, images, mirrors, readers, named: 0, mirrors_made: 0 }
    }

    fn random_disk(&mut self, most: u64) -> Disk {
        let chunks = self.rng.between(1, most);
        (0..chunks).map(|_| (self.rng.below(64), self.rng.between(1, CONTENTS - 1))).collect()
    }

    fn new_name(&mut self) -> String {
        self.named += 1;
        format!("image{}", self.named)
    }

    /// A random snapshot that exists.
    fn any(&mut self) -> Option<(String, u64, Disk)> {
        let all: Vec<_> = self
            .images
            .iter()
            .flat_map(|(image, all)| all.iter().map(move |(number, disk)| (image, number, disk)))
            .collect();
        let (image, number, disk) = *all.get(self.rng.below(all.len().max(1) as u64) as usize)?;
        Some((image.clone(), *number, disk.clone()))
    }

    fn step(&mut self) {
        match self.rng.below(20) {
            0..3 => self.import(),
            3 => self.clone_one(),
            4..9 => self.checkpoint(),
            9 => self.attach(),
            10 => self.kill(),
            11..14 => self.remove_snapshot(),
            14 => self.remove_image(),
            15 => self.read(),
            16 => drop(self.readers.pop()),
            17 => self.repository = self.site.open(),
            _ => self.collect(),
        }
    }

    /// Perhaps collects in the middle of something else.
    fn interrupt(&mut self) {
        if self.rng.chance(30) {
            self.site.collect();
        }
    }

    fn import(&mut self) {
        let (image, disk) = (self.new_name(), self.random_disk(20));
        let commit = self.repository.begin_commit().unwrap();
        put(&self.repository, &disk);
        self.interrupt();
        if self.rng.chance(20) {
            // Its process dies.
            return;
        }
        let root = store(&self.repository, &Root::default(), &disk);
        self.repository.flush().unwrap();
        let is_expired = self.rng.chance(20);
        if is_expired {
            let expired = Change::default().remove(Query::prefix("commits/"));
            assert!(self.repository.documents().commit(&expired).unwrap());
        }
        self.interrupt();
        match commit.publish_image(&name(&image), geometry(), &root, 0, 0) {
            Ok(_) => {
                self.images.insert(image, BTreeMap::from([(1, disk)]));
            }
            Err(Error::ContentLost { .. }) if is_expired => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn clone_one(&mut self) {
        let Some((image, number, disk)) = self.any() else { return };
        let clone = self.new_name();
        let source = SnapshotRef::number(&name(&image), number);
        self.repository.clone_snapshot(&source, &name(&clone)).unwrap();
        self.images.insert(clone, BTreeMap::from([(1, disk)]));
    }

    fn attach(&mut self) {
        let Some((image, number, disk)) = self.any() else { return };
        if self.mirrors.iter().any(|mirror| mirror.image == image) {
            return;
        }
        let snapshot = resolve(&self.repository, &format!("{image}@{number}")).unwrap();
        self.mirrors_made += 1;
        let id = self.mirrors_made;
        let attachment = Some(attach(&self.repository, id, &snapshot));
        self.mirrors.push(Mirror { id, image, disk, attachment, left: None });
    }

    /// Takes a checkpoint of a mirror, after its process was started again if it was killed.
    fn checkpoint(&mut self) {
        if self.mirrors.is_empty() {
            return self.attach();
        }
        let at = self.rng.below(self.mirrors.len() as u64) as usize;
        let mut mirror = self.mirrors.swap_remove(at);
        if mirror.attachment.is_none() {
            let snapshot = resolve(&self.repository, &mirror.image).unwrap();
            mirror.attachment = Some(attach(&self.repository, mirror.id, &snapshot));
        }
        let attachment = mirror.attachment.take().unwrap();
        let left = mirror.left.take();
        let is_adopted = left.is_some();
        let (number, change) =
            left.unwrap_or_else(|| (attachment.reserve(1).unwrap().start, self.random_disk(5)));
        let commit = attachment.begin(&new(number)).unwrap();
        if is_adopted {
            // What was stored is nowhere else.
            commit.mark_unverified();
        } else {
            put(&self.repository, &change);
        }
        self.interrupt();
        let is_killed = self.rng.chance(25);
        if !is_killed {
            self.publish(&commit, &mut mirror, number, &change);
        }
        drop(commit);
        (mirror.attachment, mirror.left) = match is_killed {
            true => (None, Some((number, change))),
            false => (Some(attachment), None),
        };
        self.mirrors.push(mirror);
    }

    fn publish(
        &mut self,
        commit: &SnapshotCommit<'_>,
        mirror: &mut Mirror,
        number: u64,
        change: &Disk,
    ) {
        commit.publish(&changes(change), 0, &|_, _| false).unwrap();
        mirror.disk.extend(change);
        let image = self.images.get_mut(&mirror.image).unwrap();
        image.insert(number, mirror.disk.clone());
    }

    fn kill(&mut self) {
        if let Some(mirror) = self.mirrors.first_mut() {
            mirror.attachment = None;
        }
    }

    fn remove_snapshot(&mut self) {
        let Some((image, number, _)) = self.any() else { return };
        let all = self.images.get_mut(&image).unwrap();
        let snapshot = SnapshotRef::number(&name(&image), number);
        match self.repository.remove_snapshot(&snapshot) {
            Ok(_) => {
                all.remove(&number);
            }
            Err(Error::OnlyStable { .. }) => assert_eq!(all.len(), 1),
            Err(error) => panic!("{error}"),
        }
    }

    fn remove_image(&mut self) {
        let Some((image, ..)) = self.any() else { return };
        if let Some(at) = self.mirrors.iter().position(|mirror| mirror.image == image) {
            let mirror = self.mirrors.remove(at);
            match &mirror.attachment {
                Some(attachment) => attachment.detach().unwrap(),
                None => {
                    let snapshot = resolve(&self.repository, &image).unwrap();
                    attach(&self.repository, mirror.id, &snapshot).release(None).unwrap();
                    let id = MirrorId::from_bytes([mirror.id; 16]);
                    self.repository.forget_mirror(&id).unwrap();
                }
            }
        }
        self.repository.remove_image(&name(&image), false).unwrap();
        self.images.remove(&image);
    }

    fn read(&mut self) {
        let Some((image, number, disk)) = self.any() else { return };
        let snapshot = resolve(&self.repository, &format!("{image}@{number}")).unwrap();
        let lease = self.repository.begin_reading(&snapshot, "a test").unwrap();
        self.readers.push(Reader { snapshot, disk, _lease: lease });
    }

    /// Collects, and does something else between the mark and the sweep.
    fn collect(&mut self) {
        let collector = self.site.open();
        let is_busy = self.rng.chance(50);
        let me = RefCell::new(&mut *self);
        collect_with(&collector, || {
            let mut me = me.borrow_mut();
            if is_busy {
                match me.rng.below(6) {
                    0 => me.clone_one(),
                    1 => me.remove_snapshot(),
                    2 => me.read(),
                    _ => me.import_now(),
                }
            }
        });
        self.check();
    }

    /// Imports without another collection in between: one is running.
    fn import_now(&mut self) {
        let (image, disk) = (self.new_name(), self.random_disk(20));
        import(&self.repository, &image, &disk);
        self.images.insert(image, BTreeMap::from([(1, disk)]));
    }

    /// Everything that must exist can be read by another process, and nothing else exists.
    fn check(&self) {
        let repository = self.site.open();
        let catalog = repository.catalog();
        let found: Vec<_> = catalog.images().unwrap().into_iter().map(|one| one.name).collect();
        let expected: Vec<_> = self.images.keys().map(|image| name(image)).collect();
        assert_eq!(found.len(), expected.len());
        for (image, snapshots) in &self.images {
            let found = catalog.snapshots(&name(image)).unwrap();
            let with_content = found.into_iter().filter(|one| one.state.has_content());
            let found: BTreeMap<u64, Disk> = with_content
                .map(|one| {
                    let disk = read(&repository, &one);
                    (one.number, disk.unwrap_or_else(|error| panic!("{}: {error}", one.name())))
                })
                .collect();
            assert_eq!(&found, snapshots, "{image}");
        }
        for reader in &self.readers {
            assert_eq!(read(&repository, &reader.snapshot).unwrap(), reader.disk);
        }
    }

    /// Ends everything that runs. Then nothing but what snapshots refer to is stored.
    fn end(mut self) {
        self.readers.clear();
        self.site.collect();
        self.check();
        // Mirrors finish what they have left.
        while self.mirrors.iter().any(|mirror| mirror.left.is_some()) {
            self.checkpoint();
        }
        for mirror in std::mem::take(&mut self.mirrors) {
            match mirror.attachment {
                Some(attachment) => attachment.release(None).unwrap(),
                None => {
                    let snapshot = resolve(&self.repository, &mirror.image).unwrap();
                    attach(&self.repository, mirror.id, &snapshot).release(None).unwrap();
                }
            }
        }
        let report = self.site.collect();
        let holders: Vec<_> = report.holders.iter().map(|one| one.collection).collect();
        assert!(holders.iter().all(Option::is_none), "{:?}", report.holders);
        self.check();
        assert_eq!(self.site.stored(), self.site.referred());
    }
}

fn live(seed: u64) {
    println!("CAIRN_SEED={seed}");
    let mut life = Life::new(seed);
    (0..STEPS).for_each(|_| life.step());
    life.end();
}

#[test]
fn a_random_life_keeps_what_is_needed_and_leaves_nothing_else() {
    let number = |name| std::env::var(name).ok().map(|text: String| text.parse().unwrap());
    if let Some(seed) = number("CAIRN_SEED") {
        return live(seed);
    }
    (0..LIVES).for_each(live);
    let soak = Duration::from_secs(number("CAIRN_SOAK_SECONDS").unwrap_or(0));
    let (begin, mut seed) = (Instant::now(), LIVES);
    while begin.elapsed() < soak {
        live(seed);
        seed += 1;
    }
}
