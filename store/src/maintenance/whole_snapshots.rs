//! Which *available* snapshots became whole: repair looked at all of their blobs, and none of them
//! lacks redundancy.
//!
//! ```text
//! trees of the snapshots ─► references, each with its owner ─┐
//!                           sorted by name                   ├─► merge ─► owners with a bad blob
//! blobs that repair looked at, sorted ───────────────────────┤               │
//! blobs that are short, sorted ──────────────────────────────┘               ▼
//!                                             snapshots none of whose nodes has a bad blob
//! ```
//!
//! The *owner* of a chunk is the tree node that refers to it; a node and a record own themselves.
//! Snapshots share most of their nodes, so each node is read once, and each reference is sorted once,
//! however many snapshots are *available*. In memory is one number for each node.

use std::collections::{HashMap, HashSet};

use super::wanted::{KEY, SortedWanted, key};
use crate::catalog::Available;
use crate::cluster::repair::Wanted;
use crate::durable::sorted_runs::{RunSorter, SortedRuns, temporary_directory};
use crate::encoding::StoragePolicy;
use crate::error::Result;
use crate::id::NodeId;
use crate::repository::Repository;
use crate::tree::Referred;

/// The most references in memory: 40 MiB.
const MAX_REFERENCES: usize = if cfg!(test) { 8 } else { 1 << 20 };

/// The length of a reference: the key of the blob, the number of its owner, the number of copies.
const REFERENCE: usize = KEY + 4 + 1;

/// Something with blobs: a tree node, or a record.
type Owner = u32;

/// The owners that were found, and their references.
struct References {
    sorter: RunSorter<REFERENCE>,
    /// Whether each owner has a bad blob.
    is_bad: Vec<bool>,
}

impl References {
    fn add_owner(&mut self) -> Owner {
        self.is_bad.push(false);
        (self.is_bad.len() - 1) as Owner
    }

    fn add(&mut self, owner: Owner, wanted: &Wanted) {
        let (key, copies) = key(wanted);
        let mut entry = [copies; REFERENCE];
        entry[..KEY].copy_from_slice(&key);
        entry[KEY..KEY + 4].copy_from_slice(&owner.to_be_bytes());
        self.sorter.push(entry);
    }
}

/// Returns for each snapshot whether repair looked at all of its blobs, with at least the redundancy
/// that the snapshot wants, and none of them is `short`.
pub(super) fn whole_snapshots(
    repository: &Repository,
    snapshots: &[Available],
    looked_at: &SortedWanted,
    short: &SortedRuns<32>,
) -> Result<Vec<bool>> {
    let sorter = RunSorter::new(&temporary_directory(), REFERENCE - 1, MAX_REFERENCES);
    let mut references = References { sorter, is_bad: Vec::new() };
    let mut records = Vec::new();
    for Available { policy, refers, .. } in snapshots {
        let small = policy.redundancy.of_small_blobs();
        records.push(refers.record.map(|record| {
            let owner = references.add_owner();
            references.add(owner, &Wanted::record(record, small));
            owner
        }));
    }
    let policies: HashSet<StoragePolicy> = snapshots.iter().map(|one| one.policy).collect();
    let visit = |policy| (policy, visit(repository, policy, snapshots, &mut references));
    let by_policy: HashMap<_, _> = policies.into_iter().map(visit).collect();
    let References { sorter, mut is_bad } = references;
    find_bad(&sorter.finish()?, looked_at, short, &mut is_bad)?;
    let mut answers: HashMap<StoragePolicy, HashMap<NodeId, bool>> = HashMap::new();
    let is_whole = |(snapshot, record): (&Available, &Option<Owner>)| {
        let Available { policy, refers, .. } = snapshot;
        let nodes = &by_policy[policy];
        // A node that was not visited is below one that could not be read.
        let is_sought = |id: &NodeId| nodes.get(id).is_none_or(|owner| is_bad[*owner as usize]);
        let answers = answers.entry(*policy).or_default();
        let trees = repository.trees();
        record.is_none_or(|owner| !is_bad[owner as usize])
            && !trees.has_node(&refers.root, refers.geometry, &is_sought, answers)
    };
    Ok(snapshots.iter().zip(&records).map(is_whole).collect())
}

/// Adds the references of all snapshots with a policy. Returns the numbers of their nodes. A node that
/// cannot be read is bad.
fn visit(
    repository: &Repository,
    policy: StoragePolicy,
    snapshots: &[Available],
    references: &mut References,
) -> HashMap<NodeId, Owner> {
    let mut nodes = HashMap::new();
    let (chunks, small) = (policy.redundancy, policy.redundancy.of_small_blobs());
    let (mut seen, mut unread) = (HashSet::new(), Vec::new());
    for Available { refers, .. } in snapshots.iter().filter(|one| one.policy == policy) {
        // A walk visits a node, then the chunks that it refers to.
        let mut owner = 0;
        let mut add = |referred| match referred {
            Referred::Node(id) => {
                owner = references.add_owner();
                nodes.insert(id, owner);
                references.add(owner, &Wanted::content(id.into(), small));
            }
            Referred::Chunk(id) => references.add(owner, &Wanted::content(id.into(), chunks)),
        };
        let mut failed = |id: NodeId, _| unread.push(id);
        let trees = repository.trees();
        trees.walk(&refers.root, refers.geometry, &mut seen, &mut add, &mut failed);
    }
    unread.iter().for_each(|id| references.is_bad[nodes[id] as usize] = true);
    nodes
}

/// Marks the owners of blobs that repair did not look at, and of blobs that are short.
fn find_bad(
    references: &SortedRuns<REFERENCE>,
    looked_at: &SortedWanted,
    short: &SortedRuns<32>,
    is_bad: &mut [bool],
) -> Result<()> {
    let (mut looked_at, mut short) = (looked_at.lookup()?, short.read()?);
    for reference in references.read()? {
        let reference = reference?;
        let (key, rest) = reference.split_first_chunk::<KEY>().expect("a reference has a key");
        let [owner @ .., copies] = *rest.first_chunk::<5>().expect("a reference has an owner");
        let blob = &key[..32];
        let is_short = short.seek(blob)?.is_some_and(|name| name[..] == *blob);
        if is_short || !looked_at.has(key, copies)? {
            is_bad[u32::from_be_bytes(owner) as usize] = true;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
