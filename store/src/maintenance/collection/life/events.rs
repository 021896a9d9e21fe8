//! Collections, and what goes wrong.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use super::place::Place;
use super::steps::{Life, Model, Saved, name, reference};
use crate::catalog::SnapshotEdit;
use crate::error::{Error, Result};
use crate::id::BlobId;
use crate::maintenance::collection::{
    CollectionOptions, CollectionProgress, CollectionReport, collect, collect_while,
};
use crate::tree::Referred;

impl Life {
    pub(super) fn event(&mut self) {
        let kind = self.rng.below(8);
        println!("event {kind}");
        match kind {
            0 => self.verify(),
            1 => self.collect_dry(),
            2 => self.collect_and_die(),
            3 => self.saved = Some(self.save()),
            4 => {
                if let Some(saved) = self.saved.take() {
                    self.restore(saved, true);
                }
            }
            _ if matches!(self.place, Place::Directory(_)) => self.directory_event(),
            _ => self.peer_event(),
        }
    }

    fn directory_event(&mut self) {
        match self.rng.below(3) {
            0 => self.restore_under_a_stopped_collector(),
            _ => self.collect_blindly(),
        }
    }

    fn peer_event(&mut self) {
        let Place::Peers(peers) = &mut self.place else { return };
        let at = self.rng.below(peers.count()) as usize;
        match self.rng.below(6) {
            0 => peers.lose_table(at),
            1 => peers.drain(at),
            2 | 3 => {
                let is_empty = self.rng.chance(50);
                peers.lose_and_return(at, is_empty);
                self.restart_all();
            }
            4 => {
                self.stop_all();
                let Place::Peers(peers) = &mut self.place else { return };
                peers.rebuild();
                self.repository = self.place.open();
                // Nobody adopts what was only announced to the old catalog.
                self.mirrors.iter_mut().for_each(|mirror| mirror.left = None);
                self.saved = None;
            }
            _ => self.collect_while_a_peer_is_down(at),
        }
    }

    /// All processes are killed.
    fn stop_all(&mut self) {
        self.readers.clear();
        self.mirrors.iter_mut().for_each(|mirror| mirror.attachment = None);
    }

    /// All processes are killed, and started again.
    fn restart_all(&mut self) {
        self.stop_all();
        self.repository = self.place.open();
    }

    fn try_collect(
        &self,
        options: &CollectionOptions,
        hook: impl Fn(),
    ) -> Result<CollectionReport> {
        let is_called = Cell::new(false);
        collect(&self.place.open(), options, &|progress| {
            if matches!(progress, CollectionProgress::Sweeping { seen: 0, .. })
                && !is_called.replace(true)
            {
                hook();
            }
        })
    }

    /// Collects without a grace period, as a process of its own.
    pub(super) fn collect_plainly(&self) -> CollectionReport {
        let report = self.try_collect(&CollectionOptions::default(), || ()).unwrap();
        assert!(report.silent.is_empty(), "{report:?}");
        report
    }

    /// Collects, and does something else between the mark and the sweep.
    pub(super) fn collect(&mut self) {
        let grace = Duration::from_secs(if self.rng.chance(20) { 3600 } else { 0 });
        let is_busy = self.rng.chance(50);
        let me = RefCell::new(&mut *self);
        let options = CollectionOptions { grace, ..CollectionOptions::default() };
        let open = me.borrow().place.open();
        let is_called = Cell::new(false);
        let report = collect(&open, &options, &|progress| {
            let is_first = matches!(progress, CollectionProgress::Sweeping { seen: 0, .. });
            if is_first && !is_called.replace(true) && is_busy {
                let mut me = me.borrow_mut();
                match me.rng.below(6) {
                    0 => me.clone_one(),
                    1 => me.remove_snapshot(),
                    2 => me.read(),
                    _ => me.import_now(),
                }
            }
        });
        report.unwrap();
        self.check(true);
    }

    /// A dry run changes nothing, and says what the collection after it frees.
    fn collect_dry(&mut self) {
        let before = self.place.stored();
        let options = CollectionOptions { dry_run: true, ..CollectionOptions::default() };
        let planned = self.try_collect(&options, || ()).unwrap();
        assert_eq!(self.place.stored(), before);
        assert_eq!(self.collect_plainly(), planned);
        self.check(true);
    }

    /// A collection is killed at any point.
    fn collect_and_die(&mut self) {
        let left = Cell::new(self.rng.below(12));
        let die = || {
            if left.replace(left.get().saturating_sub(1)) == 0 {
                resume_unwind(Box::new("killed"));
            }
        };
        let collector = self.place.open();
        let options = CollectionOptions::default();
        let proceed = || {
            die();
            true
        };
        let died = catch_unwind(AssertUnwindSafe(|| {
            collect_while(&collector, &options, &proceed, &|_| die()).map(drop)
        }));
        if let Ok(result) = died {
            result.unwrap();
        }
        self.check(true);
    }

    /// A segment cannot be read while a collection runs.
    fn collect_blindly(&mut self) {
        // Nobody appends to the segment.
        self.restart_all();
        let Place::Directory(site) = &self.place else { return };
        let segments = site.catalog().with_file_name("segments");
        let mut files: Vec<_> = fs::read_dir(&segments).unwrap().map(|one| one.unwrap()).collect();
        files.sort_by_key(|one| one.file_name());
        if files.is_empty() {
            return;
        }
        let file = files.swap_remove(self.rng.below(files.len() as u64) as usize).path();
        let away = file.with_extension("away");
        fs::rename(&file, &away).unwrap();
        let collected = self.try_collect(&CollectionOptions::default(), || ());
        fs::rename(&away, &file).unwrap();
        if let Err(error) = collected {
            assert!(matches!(error, Error::CannotMark { .. } | Error::Io { .. }), "{error}");
        }
        self.check(true);
    }

    fn save(&self) -> Saved {
        Saved { copy: self.place.copy_catalog(), model: self.model.clone() }
    }

    /// Restores the catalog from a copy. On peers, it is completed by the records on the peers; in a
    /// directory, what came after the copy is given up, and so is what was removed after it, unless
    /// nothing `is_collected` since.
    fn restore(&mut self, Saved { copy, model }: Saved, is_collected: bool) {
        let before = std::mem::take(&mut self.model);
        self.stop_all();
        self.mirrors.clear();
        self.place.restore_catalog(&copy);
        self.repository = self.place.open();
        if let Place::Peers(peers) = &self.place {
            let names = |model: &Model| {
                let all = model.iter();
                all.map(|(image, all)| (image.clone(), all.keys().copied().collect::<Vec<_>>()))
                    .collect::<Vec<_>>()
            };
            if names(&before) != names(&model) {
                let refused = self.try_collect(&CollectionOptions::default(), || ());
                let is_right =
                    matches!(&refused, Err(Error::Unlisted { .. } | Error::Revived { .. }));
                assert!(is_right, "{refused:?}");
            }
            peers.rebuild_missing();
            self.model = completed(model, before);
            self.forget_mirrors();
        } else if is_collected {
            self.give_up(model, before);
        } else {
            self.model = model;
            self.forget_mirrors();
        }
        self.check(true);
        self.collect_with_older_catalog();
        self.check(true);
    }

    /// The catalog's snapshots that were removed since the copy was made may have lost their content.
    pub(super) fn give_up(&mut self, model: Model, before: Model) {
        self.forget_mirrors();
        for (image, all) in model {
            let left: Vec<u64> =
                before.get(&image).into_iter().flat_map(|old| old.keys()).copied().collect();
            let gone: Vec<_> = all.keys().filter(|number| !left.contains(number)).collect();
            let unpin = |number: u64| {
                let edit = SnapshotEdit::Pin(false);
                self.repository.edit_snapshot(&reference(&image, number), &edit).unwrap();
            };
            if gone.len() == all.len() {
                all.keys().for_each(|number| unpin(*number));
                self.repository.remove_image(&name(&image), true).unwrap();
                continue;
            }
            for number in &gone {
                unpin(**number);
                self.repository.remove_snapshot(&reference(&image, **number)).unwrap();
            }
            let mut all = all.clone();
            all.retain(|number, _| left.contains(number));
            self.model.insert(image, all);
        }
    }

    /// Forgets all mirrors of a restored catalog: their files are newer.
    pub(super) fn forget_mirrors(&self) {
        self.expire("leases/");
        for mirror in self.repository.catalog().mirrors().unwrap() {
            self.repository.forget_mirror(&mirror.id).unwrap();
        }
    }

    /// Refused if the place has seen a later collection, until that is accepted.
    pub(super) fn collect_with_older_catalog(&self) {
        let highest = match self.repository.blobs_in_directory() {
            Some(blobs) => blobs.highest_collection().unwrap(),
            None => return drop(self.collect_plainly()),
        };
        let is_older = self.repository.catalog().collection_number().unwrap() < highest;
        let first = self.try_collect(&CollectionOptions::default(), || ());
        assert_eq!(matches!(first, Err(Error::OlderCatalog { .. })), is_older, "{first:?}");
        let accept_older_catalog = true;
        let options = CollectionOptions { accept_older_catalog, ..CollectionOptions::default() };
        self.try_collect(&options, || ()).unwrap();
    }

    /// A collector is stopped between its mark and its sweep. The catalog is restored from a copy
    /// meanwhile, which has what the collector takes for garbage, and another collection is complete.
    fn restore_under_a_stopped_collector(&mut self) {
        self.collect_plainly();
        let saved = Cell::new(Some(self.save()));
        (0..3).for_each(|_| self.remove_snapshot());
        self.remove_image();
        let collector = self.place.open();
        let me = RefCell::new(&mut *self);
        let stopped = collect(&collector, &CollectionOptions::default(), &|progress| {
            if matches!(progress, CollectionProgress::Sweeping { seen: 0, .. })
                && let Some(saved) = saved.take()
            {
                me.borrow_mut().restore(saved, false);
            }
        });
        // It may have noticed.
        drop(stopped);
        self.saved = None;
        self.check(true);
    }

    /// A peer is down during the mark, and back before the sweep.
    fn collect_while_a_peer_is_down(&mut self, at: usize) {
        let collector = self.place.open();
        let Place::Peers(peers) = &mut self.place else { return };
        peers.take_away(at);
        let peers = RefCell::new(peers);
        let is_back = Cell::new(false);
        let collected = collect(&collector, &CollectionOptions::default(), &|progress| {
            if matches!(progress, CollectionProgress::Marking { .. }) && !is_back.replace(true) {
                peers.borrow_mut().bring_back(at);
            }
        });
        if !is_back.get() {
            peers.borrow_mut().bring_back(at);
        }
        // It may need the records of the peer, or its nodes.
        if let Err(error) = collected {
            let is_right = matches!(error, Error::CannotMark { .. })
                || error.kind() == crate::error::ErrorKind::Unavailable;
            assert!(is_right, "{error}");
        }
        self.restart_all();
        self.check(true);
    }

    /// Frees all garbage, and completes all redundancy.
    pub(super) fn settle(&mut self) {
        if let Place::Peers(peers) = &self.place {
            // A repair deletes surplus copies when they are old.
            peers.site.peers.iter().for_each(|peer| peer.age(25 * 3600));
            peers.repair();
        }
        // The first one may give a number to what has lost its stamp.
        self.collect_plainly();
        let report = self.collect_plainly();
        let holds_only_pins = report.holders.iter().all(|holder| holder.kind == "pin");
        assert!(holds_only_pins && report.waiting.objects == 0, "{report:?}");
        if let Place::Peers(peers) = &self.place {
            peers.repair();
            peers.check_whole();
        }
    }

    /// The names of all blobs that snapshots refer to.
    pub(super) fn referred(&self) -> BTreeSet<BlobId> {
        let (repository, mut all) = (self.place.open(), BTreeSet::new());
        for root in repository.catalog().collection_roots(false).unwrap().roots {
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

/// The snapshots before a restoration, with the edits that the restored copy has.
fn completed(restored: Model, before: Model) -> Model {
    let mut all = before;
    for (image, snapshots) in &mut all {
        for (number, kept) in snapshots {
            if let Some(old) = restored.get(image).and_then(|old| old.get(number)) {
                *kept = old.clone();
            }
        }
    }
    all
}
