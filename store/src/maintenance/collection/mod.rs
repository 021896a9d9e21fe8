//! Collections: they delete the blobs that nothing refers to. `docs/gc.md` has the protocol and why it
//! is safe beside everything else.
//!
//! ```text
//! catalog: raise the number ─► read all roots as of one moment ─► mark ─► sweep ─► completed
//!                              │                                  │        │
//!              oldest commit, grace period ─► bound               │        └─ a directory: its index
//!                                      trees, equal ones once ◄───┘           peers: their lists
//! ```
//!
//! | file | does |
//! |---|---|
//! | `mod` | the order of the steps, and the report |
//! | `mark` | sorts the names of all blobs that a root refers to |
//! | `sweep_directory` | deletes from a directory what is not marked |
//! | `sweep_peers` | deletes from peers what is not marked |
//! | `fold` | deletes from peers the records that nobody needs |
//!
//! - One collection or repair runs at a time: it holds the lease that repairs hold, too.
//! - A blob is deleted only if it is not marked *and* its stamp is below the bound.
//! - Nothing is deleted if a tree node cannot be read, unless the caller gives up the snapshots that
//!   need it.
//! - A collection that is killed leaves blobs without names, which the next one deletes.

#[cfg(test)]
mod catalog_tests;
mod fold;
#[cfg(test)]
mod interleaving_tests;
#[cfg(test)]
mod life;
mod mark;
mod sweep_directory;
mod sweep_peers;
#[cfg(test)]
mod tests;

use std::time::Duration;

use self::mark::{Marked, mark};
use super::repair_lease::RepairLease;
use crate::catalog::{CollectionRoots, SpaceHolder};
use crate::collection::CollectionNumber;
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::name::{Selector, SnapshotRef};
use crate::planted::{Defect, is_planted};
use crate::repository::Repository;
use crate::sys;

/// How a collection is carried out.
#[derive(Clone, Debug, Default)]
pub struct CollectionOptions {
    /// Delete nothing, and change nothing.
    pub dry_run: bool,
    /// Keep what was stored, or found present by a commit, within this time. Stamps protect what
    /// running commits need, also without a grace period.
    pub grace: Duration,
    /// Snapshots whose tree nodes need not be readable. What only their unreadable nodes refer to is
    /// deleted.
    pub give_up: Vec<SnapshotRef>,
    /// Collect although the catalog is older than the blobs.
    pub accept_older_catalog: bool,
}

/// How far a collection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectionProgress {
    /// It has marked this many blobs.
    Marking {
        /// The number of blobs.
        blobs: u64,
    },
    /// It has looked at this many stored blobs or fragments, and has freed this many bytes.
    Sweeping {
        /// The number of blobs or fragments.
        seen: u64,
        /// The freed bytes.
        freed: u64,
    },
}

/// A number of stored blobs, or fragments on peers, and the space that they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// The number of blobs or fragments.
    pub objects: u64,
    /// The space of their contents in bytes.
    pub bytes: u64,
}

impl Space {
    fn add(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes += bytes;
    }
}

/// What a collection has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CollectionReport {
    /// Its number.
    pub number: CollectionNumber,
    /// What was stored, or found present by a commit, since the collection with this number is kept.
    pub bound: CollectionNumber,
    /// The number of snapshots, mirrors and readers whose content it has marked.
    pub roots: u64,
    /// The number of different blobs that it has marked.
    pub marked: u64,
    /// What is marked and stored.
    pub live: Space,
    /// What it has deleted, or would delete.
    pub freed: Space,
    /// Garbage that it has not deleted, because a commit may rely on it or the grace period is not
    /// over.
    pub waiting: Space,
    /// What keeps space from being freed.
    pub holders: Vec<SpaceHolder>,
    /// The peers that did not answer, and why. Their garbage stays until the next collection.
    pub silent: Vec<(PeerId, String)>,
}

/// Deletes the blobs that nothing refers to. The calling thread has the lowest priority from then on.
pub fn collect(
    repository: &Repository,
    options: &CollectionOptions,
    progress: &dyn Fn(CollectionProgress),
) -> Result<CollectionReport> {
    collect_while(repository, options, &|| true, progress)
}

/// As [`collect`], until `proceed` returns `false`.
pub fn collect_while(
    repository: &Repository,
    options: &CollectionOptions,
    proceed: &dyn Fn() -> bool,
    progress: &dyn Fn(CollectionProgress),
) -> Result<CollectionReport> {
    RepairLease::with(repository.documents(), |lease| {
        // Guests on this host come first. The thread that renews the lease keeps its priority.
        sys::lower_priority();
        let proceed = || proceed() && lease.is_held();
        Collection { repository, options, lease, proceed: &proceed, progress }.run()
    })
}

/// A collection under the lease.
struct Collection<'a> {
    repository: &'a Repository,
    options: &'a CollectionOptions,
    lease: &'a RepairLease<'a>,
    proceed: &'a dyn Fn() -> bool,
    progress: &'a dyn Fn(CollectionProgress),
}

impl Collection<'_> {
    fn run(&self) -> Result<CollectionReport> {
        let catalog = self.repository.catalog();
        let name = |name: &SnapshotRef| match catalog.resolve(name) {
            // A mirror may continue a snapshot that was removed.
            Err(error @ Error::NoSnapshot { .. }) => {
                let mirrors = catalog.mirrors()?;
                let is_parent = mirrors.iter().any(|mirror| {
                    mirror.image == name.image && name.selector == Selector::Number(mirror.parent)
                });
                if is_parent { Ok(name.clone()) } else { Err(error) }
            }
            found => found.map(|snapshot| snapshot.name()),
        };
        let give_up: Vec<_> = self.options.give_up.iter().map(name).collect::<Result<_>>()?;
        let number = self.begin()?;
        let basis = catalog.commit_basis()?;
        if self.repository.blobs_in_directory().is_none() {
            // Before the roots are read: what a rebuild restores until then is among them.
            self.check_catalog(number)?;
        }
        // After the number was raised: see `catalog::collection`.
        let mut roots = catalog.collection_roots(self.options.dry_run)?;
        let bound = self.bound(number, &roots)?;
        let marked = mark(self.repository, &roots, &give_up, self.progress);
        let Marked { names, count } = match marked {
            Err(error @ Error::CannotMark { .. }) => return Err(self.why_unmarked(number, error)),
            marked => marked?,
        };
        let mut report = CollectionReport {
            number,
            bound,
            roots: roots.roots.len() as u64,
            marked: count,
            holders: std::mem::take(&mut roots.holders),
            ..CollectionReport::default()
        };
        drop(roots);
        match self.repository.blobs_in_directory() {
            Some(blobs) => self.sweep_directory(blobs, &names, &mut report)?,
            None => {
                // A rebuild that has begun meanwhile restores mirrors that are no roots here.
                if catalog.commit_basis()? != basis {
                    return Err(Error::ClusterChanged);
                }
                self.sweep_peers(&names, &mut report)?;
            }
        }
        if !(self.proceed)() {
            return Err(Error::LeaseLost);
        }
        if !self.options.dry_run {
            catalog.end_collection(number, report.freed.bytes)?;
        }
        Ok(report)
    }

    /// Raises the number. A dry run only returns the number that a collection would have.
    fn begin(&self) -> Result<CollectionNumber> {
        let catalog = self.repository.catalog();
        let highest = match self.repository.blobs_in_directory() {
            Some(blobs) => blobs.highest_collection()?,
            None => CollectionNumber::FIRST,
        };
        match self.options.dry_run {
            true => {
                let known = catalog.collection_number()?;
                if known < highest && !self.options.accept_older_catalog {
                    let (catalog, blobs) = (known.0, highest.0);
                    return Err(Error::OlderCatalog { catalog, blobs });
                }
                Ok(known.max(highest).next())
            }
            false => {
                let number =
                    catalog.begin_collection(highest, self.options.accept_older_catalog)?;
                // Before the roots are read: what these commits have stored is garbage then.
                catalog.end_dead_commits()?;
                Ok(number)
            }
        }
    }

    /// The bound of the stamps: what has this stamp, or a higher one, is kept.
    fn bound(&self, number: CollectionNumber, roots: &CollectionRoots) -> Result<CollectionNumber> {
        let graced = match self.options.grace.as_secs() {
            0 => number,
            seconds => self.repository.catalog().collection_before(seconds)?,
        };
        let oldest = roots.oldest.filter(|_| !is_planted(Defect::IgnoreOldestCommit));
        Ok(number.min(graced).min(oldest.unwrap_or(number)))
    }
}
