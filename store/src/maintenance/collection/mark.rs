//! Marks: sorts the names of all blobs that a root refers to.
//!
//! Equal subtrees are visited once. The names are sorted in temporary files, so memory holds a part of
//! them, and the names of the tree nodes.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, HashSet};

use super::CollectionProgress;
use crate::catalog::CollectionRoots;
use crate::durable::sorted_runs::SortedRuns;
use crate::error::{Error, Result};
use crate::id::{BlobId, NodeId};
use crate::maintenance::wanted::names;
use crate::name::SnapshotRef;
use crate::planted::{Defect, is_planted};
use crate::repository::Repository;
use crate::tree::Referred;

/// Progress is reported after this many blobs.
const REPORT_INTERVAL: u64 = if cfg!(test) { 8 } else { 1 << 16 };

/// The most snapshots that an error names.
const MAX_NAMED: usize = 20;

/// The names of the blobs that must be kept.
pub(super) struct Marked {
    /// The names in their order.
    pub(super) names: SortedRuns<32>,
    /// The number of references that were visited. A chunk counts once for each node that names it.
    pub(super) count: u64,
}

/// Marks everything that the roots refer to. Fails if a tree node cannot be read that a snapshot
/// needs which is not in `give_up`.
pub(super) fn mark(
    repository: &Repository,
    roots: &CollectionRoots,
    give_up: &[SnapshotRef],
    progress: &dyn Fn(CollectionProgress),
) -> Result<Marked> {
    let (mut sorter, mut seen, mut unreadable) = (names(), HashSet::new(), HashSet::new());
    let (count, mut damaged) = (Cell::new(0u64), None);
    for root in &roots.roots {
        let mut visit = |referred| {
            let name = match referred {
                Referred::Node(id) => *id.as_bytes(),
                Referred::Chunk(id) => *id.as_bytes(),
            };
            sorter.push(name);
            count.set(count.get() + 1);
            if count.get().is_multiple_of(REPORT_INTERVAL) {
                progress(CollectionProgress::Marking { blobs: count.get() });
            }
        };
        let mut failed = |id: NodeId, error: Error| {
            tracing::error!(%error, "cannot read a tree node");
            unreadable.insert(id);
            if matches!(error, Error::Database { .. }) {
                // It says nothing about the node.
                damaged = Some(error);
            }
        };
        repository.trees().walk(&root.root, root.geometry, &mut seen, &mut visit, &mut failed);
    }
    drop(seen);
    if let Some(error) = damaged.take() {
        return Err(error);
    }
    if !unreadable.is_empty() && !is_planted(Defect::SkipUnreadable) {
        check_given_up(repository, roots, &unreadable, give_up)?;
    }
    Ok(Marked { names: sorter.finish()?, count: count.get() })
}

/// Fails if a root that is not given up needs one of the unreadable nodes.
fn check_given_up(
    repository: &Repository,
    roots: &CollectionRoots,
    unreadable: &HashSet<NodeId>,
    give_up: &[SnapshotRef],
) -> Result<()> {
    let blobs: HashSet<BlobId> = unreadable.iter().map(|id| BlobId::from(*id)).collect();
    let (mut answers, mut names) = (HashMap::new(), BTreeSet::new());
    let trees = repository.trees();
    let affected = roots
        .roots
        .iter()
        .filter(|root| trees.refers_to(&root.root, root.geometry, &blobs, &mut answers));
    for root in affected {
        let name = roots.name(root);
        if !give_up.contains(&name) {
            names.insert(name.to_string());
        }
    }
    match names.is_empty() {
        true => Ok(()),
        false => Err(Error::CannotMark {
            nodes: unreadable.len() as u64,
            names: names.into_iter().take(MAX_NAMED).collect(),
            // So that the advice is the whole command.
            given_up: give_up.iter().map(ToString::to_string).collect(),
        }),
    }
}
