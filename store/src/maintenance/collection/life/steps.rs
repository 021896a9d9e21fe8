//! What users and their processes do, and what must hold after each step.

use std::collections::{BTreeMap, BTreeSet};

use seeded_rng::Rng;

use super::place::{CatalogCopy, Place};
use crate::catalog::SnapshotEdit;
use crate::documents::{Change, Query};
use crate::error::Error;
use crate::id::MirrorId;
use crate::maintenance::collection::tests::{
    Disk, attach, changes, geometry, import, new, put, read, resolve, store,
};
use crate::maintenance::prune::{PruneOptions, prune};
use crate::maintenance::verify::Verifier;
use crate::name::{ImageName, Scope, SnapshotRef};
use crate::repository::attachment::Attachment;
use crate::repository::commit::SnapshotCommit;
use crate::repository::{ReaderLease, Repository};
use crate::retention::RetentionPolicy;
use crate::snapshot::Snapshot;
use crate::tree::Root;

/// Different contents of chunks. Few, so that much is found present.
const CONTENTS: u64 = 30;

/// A check after this many steps reads all content.
const READ_INTERVAL: u64 = 4;

/// A snapshot that must exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Kept {
    pub(super) disk: Disk,
    pub(super) is_pinned: bool,
    pub(super) labels: BTreeSet<String>,
}

/// The snapshots that must exist, by image and number.
pub(super) type Model = BTreeMap<String, BTreeMap<u64, Kept>>;

/// A mirror, and its process if one runs.
pub(super) struct Mirror {
    pub(super) id: u8,
    pub(super) image: String,
    /// What the mirror would read.
    disk: Disk,
    /// The number of its parent.
    parent: u64,
    pub(super) attachment: Option<Attachment>,
    /// The checkpoint that it was storing when its process was killed.
    pub(super) left: Option<(u64, Disk)>,
}

pub(super) struct Reader {
    snapshot: Snapshot,
    disk: Disk,
    _lease: ReaderLease,
}

/// A copy of the catalog, and what it has.
pub(super) struct Saved {
    pub(super) copy: CatalogCopy,
    pub(super) model: Model,
}

pub(super) struct Life {
    pub(super) place: Place,
    pub(super) repository: Repository,
    pub(super) rng: Rng,
    pub(super) model: Model,
    pub(super) mirrors: Vec<Mirror>,
    pub(super) readers: Vec<Reader>,
    pub(super) saved: Option<Saved>,
    steps: u64,
    named: u64,
    mirrors_made: u8,
}

pub(super) fn name(image: &str) -> ImageName {
    image.parse().unwrap()
}

pub(super) fn reference(image: &str, number: u64) -> SnapshotRef {
    SnapshotRef::number(&name(image), number)
}

impl Life {
    pub(super) fn new(place: Place, seed: u64) -> Life {
        let (repository, rng) = (place.open(), Rng::new(seed));
        let (model, mirrors, readers, saved) = Default::default();
        let (steps, named, mirrors_made) = (0, 0, 0);
        Life { place, repository, rng, model, mirrors, readers, saved, steps, named, mirrors_made }
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
    pub(super) fn any(&mut self) -> Option<(String, u64, Kept)> {
        let all: Vec<_> = self
            .model
            .iter()
            .flat_map(|(image, all)| all.iter().map(move |(number, kept)| (image, number, kept)))
            .collect();
        let (image, number, kept) = *all.get(self.rng.below(all.len().max(1) as u64) as usize)?;
        Some((image.clone(), *number, kept.clone()))
    }

    pub(super) fn step(&mut self) {
        self.steps += 1;
        let kind = self.rng.below(28);
        println!("step {}: {kind}", self.steps);
        match kind {
            0..3 => self.import(),
            3 => self.clone_one(),
            4..8 => self.checkpoint(),
            8 => self.attach(),
            9 => self.kill(),
            10..13 => self.remove_snapshot(),
            13 => self.remove_image(),
            14 => self.read(),
            15 => drop(self.readers.pop()),
            16 => self.repository = self.place.open(),
            17 => self.edit(),
            18 => self.prune(),
            19 => self.jump(),
            20..24 => self.collect(),
            _ => self.event(),
        }
        self.check(self.steps.is_multiple_of(READ_INTERVAL));
    }

    /// Perhaps collects in the middle of something else.
    fn interrupt(&mut self) {
        if self.rng.chance(40) {
            self.collect_plainly();
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
            self.expire("commits/");
        }
        self.interrupt();
        match commit.publish_image(&name(&image), geometry(), &root, 0, 0) {
            Ok(_) => self.add_image(image, disk),
            Err(Error::ContentLost { .. }) if is_expired => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Imports without a collection in between: one is running.
    pub(super) fn import_now(&mut self) {
        let (image, disk) = (self.new_name(), self.random_disk(20));
        import(&self.repository, &image, &disk);
        self.add_image(image, disk);
    }

    fn add_image(&mut self, image: String, disk: Disk) {
        let kept = Kept { disk, ..Kept::default() };
        self.model.insert(image, BTreeMap::from([(1, kept)]));
    }

    pub(super) fn expire(&self, prefix: &str) {
        let expired = Change::default().remove(Query::prefix(prefix));
        assert!(self.repository.documents().commit(&expired).unwrap());
    }

    /// The clock jumps, and all leases end.
    fn jump(&mut self) {
        self.readers.clear();
        self.mirrors.iter_mut().for_each(|mirror| mirror.attachment = None);
        ["commits/", "readers/", "leases/"].into_iter().for_each(|prefix| self.expire(prefix));
    }

    pub(super) fn clone_one(&mut self) {
        let Some((image, number, kept)) = self.any() else { return };
        let clone = self.new_name();
        self.repository.clone_snapshot(&reference(&image, number), &name(&clone)).unwrap();
        self.add_image(clone, kept.disk);
    }

    fn attach(&mut self) {
        let Some((image, number, kept)) = self.any() else { return };
        if self.mirrors.iter().any(|mirror| mirror.image == image) {
            return;
        }
        let snapshot = resolve(&self.repository, &format!("{image}@{number}")).unwrap();
        self.mirrors_made += 1;
        let id = self.mirrors_made;
        let attachment = Some(attach(&self.repository, id, &snapshot));
        let (disk, parent) = (kept.disk, number);
        self.mirrors.push(Mirror { id, image, disk, parent, attachment, left: None });
    }

    /// The process of a mirror runs, perhaps again.
    fn attachment(&self, mirror: &mut Mirror) -> Attachment {
        mirror.attachment.take().unwrap_or_else(|| {
            let snapshot = resolve(&self.repository, &mirror.image).unwrap();
            attach(&self.repository, mirror.id, &snapshot)
        })
    }

    /// Takes a checkpoint of a mirror, after its process was started again if it was killed.
    pub(super) fn checkpoint(&mut self) {
        if self.mirrors.is_empty() {
            return self.attach();
        }
        let at = self.rng.below(self.mirrors.len() as u64) as usize;
        let mut mirror = self.mirrors.swap_remove(at);
        let attachment = self.attachment(&mut mirror);
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
        mirror.parent = number;
        let kept = Kept { disk: mirror.disk.clone(), ..Kept::default() };
        self.model.get_mut(&mirror.image).unwrap().insert(number, kept);
    }

    fn kill(&mut self) {
        if let Some(mirror) = self.mirrors.first_mut() {
            mirror.attachment = None;
        }
    }

    pub(super) fn remove_snapshot(&mut self) {
        let Some((image, number, kept)) = self.any() else { return };
        let all = self.model.get_mut(&image).unwrap();
        match self.repository.remove_snapshot(&reference(&image, number)) {
            Ok(_) => {
                assert!(!kept.is_pinned);
                all.remove(&number);
            }
            Err(Error::OnlyStable { .. }) => assert_eq!(all.len(), 1),
            Err(Error::Pinned { .. }) => assert!(kept.is_pinned),
            Err(error) => panic!("{error}"),
        }
    }

    pub(super) fn remove_image(&mut self) {
        let Some((image, ..)) = self.any() else { return };
        if self.model[&image].values().any(|kept| kept.is_pinned) {
            let refused = self.repository.remove_image(&name(&image), true);
            return assert!(refused.is_err());
        }
        if let Some(at) = self.mirrors.iter().position(|mirror| mirror.image == image) {
            let mirror = self.mirrors.remove(at);
            self.forget(mirror);
        }
        self.repository.remove_image(&name(&image), false).unwrap();
        self.model.remove(&image);
    }

    /// The mirror is gone.
    pub(super) fn forget(&self, mut mirror: Mirror) {
        match mirror.attachment.take() {
            Some(attachment) => attachment.detach().unwrap(),
            None => {
                self.attachment(&mut mirror).release(None).unwrap();
                let id = MirrorId::from_bytes([mirror.id; 16]);
                self.repository.forget_mirror(&id).unwrap();
            }
        }
    }

    pub(super) fn read(&mut self) {
        let Some((image, number, kept)) = self.any() else { return };
        let snapshot = resolve(&self.repository, &format!("{image}@{number}")).unwrap();
        let lease = self.repository.begin_reading(&snapshot, "a test").unwrap();
        self.readers.push(Reader { snapshot, disk: kept.disk, _lease: lease });
    }

    /// Adds a label, or changes a pin.
    fn edit(&mut self) {
        let Some((image, number, kept)) = self.any() else { return };
        let mut after = kept.clone();
        let edit = match self.rng.chance(50) && kept.labels.len() < 8 {
            true => {
                let label = format!("label{}", self.steps);
                after.labels.insert(label.clone());
                SnapshotEdit::AddLabel(label)
            }
            false => {
                after.is_pinned = !kept.is_pinned && self.rng.chance(50);
                SnapshotEdit::Pin(after.is_pinned)
            }
        };
        self.repository.edit_snapshot(&reference(&image, number), &edit).unwrap();
        self.model.get_mut(&image).unwrap().insert(number, after);
    }

    /// Keeps the newest snapshots of an image. All have the same time, so the numbers decide.
    fn prune(&mut self) {
        let Some((image, ..)) = self.any() else { return };
        let last = self.rng.between(1, 2) as u32;
        let policy = RetentionPolicy { last: Some(last), ..RetentionPolicy::default() };
        let scope = Scope::Image(name(&image));
        self.repository.catalog().set_policy(&scope, &policy).unwrap();
        prune(&self.repository, &scope, &PruneOptions::default(), &mut |_| Ok(())).unwrap();
        self.repository.catalog().remove_policy(&scope).unwrap();
        let parent = self.mirrors.iter().find(|one| one.image == image).map(|one| one.parent);
        let all = self.model.get_mut(&image).unwrap();
        let newest: BTreeSet<_> = all.keys().rev().take(last as usize).copied().collect();
        all.retain(|number, kept| {
            newest.contains(number) || kept.is_pinned || Some(*number) == parent
        });
    }

    /// The catalog has what must exist and nothing else. With `is_thorough`, another process reads all.
    pub(super) fn check(&self, is_thorough: bool) {
        let repository = self.place.open();
        let catalog = repository.catalog();
        let mut found = Model::new();
        catalog
            .each_image(|image| {
                let mut all = BTreeMap::new();
                for one in catalog.snapshots(&image.name)? {
                    let is_there = one.state.has_content();
                    let model =
                        self.model.get(image.name.as_str()).and_then(|all| all.get(&one.number));
                    let disk = match (is_thorough, model) {
                        (false, Some(kept)) => kept.disk.clone(),
                        _ if !is_there => continue,
                        _ => read(&repository, &one)
                            .unwrap_or_else(|error| panic!("{}: {error}", one.name())),
                    };
                    let labels = one.labels.iter().cloned().collect();
                    if is_there {
                        let kept = Kept { disk, is_pinned: one.is_pinned, labels };
                        all.insert(one.number, kept);
                    }
                }
                found.insert(image.name.to_string(), all);
                Ok(())
            })
            .unwrap();
        assert_eq!(found, self.model);
        for reader in self.readers.iter().filter(|_| is_thorough) {
            assert_eq!(read(&repository, &reader.snapshot).unwrap(), reader.disk);
        }
    }

    /// Verifies a snapshot as users do.
    pub(super) fn verify(&mut self) {
        let Some((image, number, _)) = self.any() else { return };
        let repository = self.place.open();
        let snapshot = resolve(&repository, &format!("{image}@{number}")).unwrap();
        let verifier = Verifier::new(&repository, vec![snapshot], None).unwrap();
        let verified = verifier.run(&|_| ()).unwrap();
        assert_eq!((verified.unreadable, verified.affected.len()), (0, 0), "{verified:?}");
    }

    /// Ends everything that runs. Then nothing but what snapshots refer to is stored.
    pub(super) fn end(mut self) {
        self.readers.clear();
        self.collect_plainly();
        self.check(true);
        // Mirrors finish what they have left.
        while self.mirrors.iter().any(|mirror| mirror.left.is_some()) {
            self.checkpoint();
        }
        for mirror in std::mem::take(&mut self.mirrors) {
            self.forget(mirror);
        }
        // Those of killed processes, and of processes that used the catalog before it was restored.
        ["commits/", "readers/"].into_iter().for_each(|prefix| self.expire(prefix));
        self.settle();
        self.check(true);
        let referred = self.referred();
        let stored = self.place.stored();
        let wrong: Vec<_> = stored.symmetric_difference(&referred).collect();
        assert!(wrong.is_empty(), "{wrong:?} of {}", referred.len());
    }
}
