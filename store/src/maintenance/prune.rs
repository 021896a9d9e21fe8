//! Prune: removes the snapshots that retention policies do not keep.
//!
//! For each image: read the policy, read the snapshots, [decide](crate::retention), remove. Nothing is
//! locked meanwhile. So each removal relies, in the transaction that begins it, on what the decision
//! depends on: the snapshot's state, that it is not pinned, no mirror's parent and not being read, the
//! policy, and a stable snapshot that stays. A removal that finds one of them changed leaves the snapshot to the
//! next prune. So two prunes, or a prune beside `cairn rm`, leave a stable snapshot, whatever their
//! order is.

use std::cell::Cell;
use std::collections::HashMap;

use crate::catalog::{PruneCheck, Refused};
use crate::clock::now;
use crate::error::{Error, Result};
use crate::id::ImageId;
use crate::name::{ImageName, Scope, SnapshotRef};
use crate::repository::Repository;
use crate::retention::{Candidate, Removed, RetentionPolicy, Verdict, last_stable, retention};
use crate::snapshot::{Image, Snapshot};

/// Why a snapshot must stay, if the caller knows of a use that the catalog does not.
pub type Protect<'a> = &'a dyn Fn(&ImageId, u64) -> Option<String>;

/// What a prune does.
#[derive(Clone, Copy)]
pub struct PruneOptions<'a> {
    /// Whether nothing is removed.
    pub is_dry_run: bool,
    /// Whether images of which nothing can go are left out, without reading their snapshots.
    pub is_brief: bool,
    /// Seconds since 1970, UTC.
    pub now: u64,
    /// Further snapshots that stay.
    pub protect: Protect<'a>,
    /// Asked before each removal. The prune ends early if it returns `false`.
    pub should_continue: &'a dyn Fn() -> bool,
}

impl Default for PruneOptions<'_> {
    fn default() -> Self {
        PruneOptions {
            is_dry_run: false,
            is_brief: false,
            now: now(),
            protect: &|_, _| None,
            should_continue: &|| true,
        }
    }
}

/// A snapshot, and what a prune has done with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrunedSnapshot {
    /// Its name.
    pub name: SnapshotRef,
    /// When it was requested: seconds since 1970, UTC.
    pub time: u64,
    /// The scope whose policy applied, if one did.
    pub policy: Option<Scope>,
    /// Whether it is gone, or in a dry run, would go.
    pub is_removed: bool,
    /// Why.
    pub reason: String,
}

/// Prunes the images of a scope. Passes every snapshot to `each`, with what was done and why.
///
/// If an image of several fails, the others are pruned, and then the call fails with the first error.
/// Fails if the scope has no image, except that a repository may be empty.
pub fn prune(
    repository: &Repository,
    scope: &Scope,
    options: &PruneOptions<'_>,
    each: &mut dyn FnMut(PrunedSnapshot) -> Result<()>,
) -> Result<()> {
    let images = images_of(repository, scope)?;
    let mut parents: HashMap<ImageName, HashMap<u64, String>> = HashMap::new();
    for mirror in repository.catalog().mirrors()? {
        let reason = format!("the parent of mirror {} on host {}", mirror.id, mirror.host);
        parents.entry(mirror.image).or_default().insert(mirror.parent, reason);
    }
    let mut readers: HashMap<ImageId, HashMap<u64, String>> = HashMap::new();
    for read in repository.catalog().read_snapshots()? {
        readers.entry(read.image).or_default().insert(read.number, read.reader);
    }
    let is_one = matches!(scope, Scope::Image(_));
    let (mut failure, is_stopped) = (None, Cell::new(false));
    let each = &mut |one: PrunedSnapshot| each(one).inspect_err(|_| is_stopped.set(true));
    for image in images {
        let parents = parents.remove(&image.name).unwrap_or_default();
        match (ImagePrune { repository, options, parents, readers: &readers }).run(&image, each) {
            // It was removed meanwhile.
            Err(Error::NoImage { .. } | Error::BeingRemoved { .. }) if !is_one => {}
            Err(error) if is_one || is_stopped.get() => return Err(error),
            // The records of another image may be on other peers.
            Err(error) => {
                tracing::warn!(image = %image.name, %error, "an image was not pruned to its end");
                failure.get_or_insert(error);
            }
            Ok(()) => {}
        }
        if !(options.should_continue)() {
            break;
        }
    }
    failure.map_or(Ok(()), Err)
}

/// The images of a scope, by name.
fn images_of(repository: &Repository, scope: &Scope) -> Result<Vec<Image>> {
    let catalog = repository.catalog();
    if let Scope::Image(name) = scope {
        return Ok(vec![catalog.image(name)?]);
    }
    let mut images = Vec::new();
    catalog.each_image(|image| {
        if scope.contains(&image.name) {
            images.push(image);
        }
        Ok(())
    })?;
    match scope {
        Scope::Folder(_) if images.is_empty() => {
            Err(Error::EmptyFolder { folder: scope.to_string() })
        }
        _ => Ok(images),
    }
}

/// The prune of one image.
struct ImagePrune<'a> {
    repository: &'a Repository,
    options: &'a PruneOptions<'a>,
    /// The parents of mirrors, and whose they are.
    parents: HashMap<u64, String>,
    /// The snapshots that are being read, of all images, and by whom.
    readers: &'a HashMap<ImageId, HashMap<u64, String>>,
}

impl ImagePrune<'_> {
    fn run(&self, image: &Image, each: &mut dyn FnMut(PrunedSnapshot) -> Result<()>) -> Result<()> {
        // Before the snapshots are read: the removals rely on this policy.
        let found = self.repository.catalog().find_policy(&image.name)?;
        let policy = found.applied.as_ref().map(|applied| &applied.policy);
        if self.options.is_brief && !can_remove(image, policy) {
            return Ok(());
        }
        let mut candidates = Vec::new();
        self.repository.catalog().each_snapshot(&image.name, |snapshot| {
            candidates.push(self.candidate(&snapshot));
            Ok(())
        })?;
        let verdicts = retention(&candidates, policy, self.options.now);
        let stable = last_stable(&candidates);
        for (one, verdict) in candidates.iter().zip(verdicts) {
            if !(self.options.should_continue)() {
                break;
            }
            let name = SnapshotRef::number(&image.name, one.number);
            let mut reason = verdict.to_string();
            let mut is_removed = verdict.is_removal();
            let mut failure = None;
            if is_removed && !self.options.is_dry_run {
                let check = PruneCheck {
                    state: one.state,
                    stable: stable.filter(|_| one.state.has_content()),
                    policies: match verdict {
                        // Whatever the policy is.
                        Verdict::Remove(Removed::Begun) => Vec::new(),
                        _ => found.versions.clone(),
                    },
                };
                match self.repository.prune_snapshot(&name, &check) {
                    Ok(None) => {}
                    Ok(Some(refused)) => (is_removed, reason) = (false, why_kept(refused)),
                    Err(error) => {
                        (is_removed, reason) = (false, format!("the removal failed: {error}"));
                        failure = Some(error);
                    }
                }
            }
            let policy = found.applied.as_ref().map(|applied| applied.scope.clone());
            each(PrunedSnapshot { name, time: one.time, policy, is_removed, reason })?;
            if let Some(error) = failure {
                return Err(error);
            }
        }
        Ok(())
    }

    fn candidate(&self, snapshot: &Snapshot) -> Candidate {
        let parent = || self.parents.get(&snapshot.number).cloned();
        let reader = || self.readers.get(&snapshot.image_id)?.get(&snapshot.number).cloned();
        let protection = (self.options.protect)(&snapshot.image_id, snapshot.number);
        Candidate {
            number: snapshot.number,
            time: snapshot.time,
            state: snapshot.state,
            is_pinned: snapshot.is_pinned,
            is_obsolete: snapshot.is_obsolete,
            protection: protection.or_else(parent).or_else(reader),
        }
    }
}

/// Whether a prune may remove something of the image.
fn can_remove(image: &Image, policy: Option<&RetentionPolicy>) -> bool {
    match policy {
        Some(policy) => !policy.keeps_all(),
        None => image.obsolete > 0,
    }
}

fn why_kept(refused: Refused) -> String {
    match refused {
        Refused::Pinned => "pinned".into(),
        Refused::Read(reader) => reader,
        Refused::Parent(mirror) => format!("the parent of mirror {mirror}"),
        Refused::Changed => "it, the policy or the last stable snapshot has just changed".into(),
    }
}
