//! Lists the blobs that the catalog refers to.

use std::collections::HashSet;

use crate::catalog::Referrer;
use crate::cluster::repair::Wanted;
use crate::encoding::StoragePolicy;
use crate::error::Result;
use crate::id::NodeId;
use crate::repository::Repository;
use crate::tree::Referred;

/// Reports every blob that the catalog refers to, with the redundancy that it should have. A blob
/// may be reported several times. Omits the blobs below unreadable tree nodes, and returns the
/// number of such nodes.
pub(super) fn all_references(
    repository: &Repository,
    mut report: impl FnMut(Wanted),
) -> Result<u64> {
    let mut unreadable = 0;
    for (policy, roots) in repository.catalog().roots()? {
        let mut seen = HashSet::new();
        for root in roots {
            unreadable += references_of(repository, &root, &policy, &mut seen, &mut report);
        }
    }
    Ok(unreadable)
}

/// Reports the blobs of one referrer, except the tree nodes in `seen` and the blobs below them.
/// Adds the visited nodes to `seen`. Returns the number of unreadable nodes.
pub(super) fn references_of(
    repository: &Repository,
    referrer: &Referrer,
    policy: &StoragePolicy,
    seen: &mut HashSet<NodeId>,
    report: &mut dyn FnMut(Wanted),
) -> u64 {
    let (chunks, small) = (policy.redundancy, policy.redundancy.of_small_blobs());
    let Referrer { geometry, root, record } = referrer;
    record.iter().for_each(|record| report(Wanted::record(*record, small)));
    repository.trees().references(root, *geometry, seen, &mut |referred| match referred {
        Referred::Node(id) => report(Wanted::content(id.into(), small)),
        Referred::Chunk(id) => report(Wanted::content(id.into(), chunks)),
    })
}
