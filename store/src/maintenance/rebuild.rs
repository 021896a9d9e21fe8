//! The catalog, rebuilt from the records on the peers.

use crate::catalog::{Catalog, Rebuilt, Records, commit_key};
use crate::cluster::client::records::FoundRecords;
use crate::collection::CollectionNumber;
use crate::error::{Error, Result};
use crate::id::{LeaseId, PeerId};
use crate::repository::Repository;

/// How often the records are read while collections begin meanwhile.
const MAX_READS: usize = 3;

/// Restores the images, snapshots and mirrors that the peers' records describe and the catalog does
/// not have.
///
/// Fails without `force` if the cluster has no peer, because those of a lost catalog join an empty
/// one only after some seconds. Also fails without `force` if a peer does not answer, or if fewer peers answer than the cluster had.
/// Such a peer may have the only record of a snapshot or the only tombstone of a removed one. For the
/// same reason, fails without `force` if a record has no valid seal: it may be a tombstone that was
/// stored with a newer `mac.key`.
pub fn rebuild_catalog(repository: &Repository, force: bool) -> Result<Rebuilt> {
    let (cluster, _) = repository.cluster().ok_or(Error::NoCluster)?;
    if !force && cluster.members().is_empty() {
        return Err(Error::NoPeerYet);
    }
    // Mirrors are restored after their images. A collection in between would take what only they need.
    let hold =
        |catalog: &Catalog, id: &LeaseId| catalog.hold_everything(id, "a rebuild of the catalog");
    let (_held, _) = repository.leases().hold(commit_key, hold)?;
    // Before the records are read: see `Inventory`.
    let inventory = repository.catalog().inventory()?;
    let number = || repository.catalog().collection_number();
    let found = unchanged(number, || repository.records().ok_or(Error::NoCluster))?;
    if found.unsealed > 0 {
        if !force {
            return Err(Error::UnsealedRecords { records: found.unsealed });
        }
        tracing::warn!(records = found.unsealed, "records without a valid seal are ignored");
    }
    let mut records = Records::default();
    for bytes in &found.records {
        if let Err(error) = records.add(bytes) {
            tracing::warn!(%error, "a record is skipped");
        }
    }
    if !force {
        require_all(&found, records.peers())?;
    }
    repository.catalog().rebuild(&inventory, records)
}

/// Reads records while no collection begins. A collection deletes records that a summary replaces,
/// which an earlier collection has stored. So a reader beside one collection finds the summary or the
/// records. A reader beside two of them may have read a peer before it got the summary, and another
/// peer after the records were deleted.
fn unchanged<T>(
    number: impl Fn() -> Result<CollectionNumber>,
    mut read: impl FnMut() -> Result<T>,
) -> Result<T> {
    let mut before = number()?;
    for _ in 0..MAX_READS {
        let found = read()?;
        let after = number()?;
        if after == before {
            return Ok(found);
        }
        tracing::warn!("a collection has begun; reading the records again");
        before = after;
    }
    Err(Error::RepairRuns)
}

/// Fails unless all members answered, and at least as many peers as were members when the newest
/// record was written.
fn require_all(found: &FoundRecords, recorded: u64) -> Result<()> {
    if found.silent.is_empty() && found.answered.len() as u64 >= recorded {
        return Ok(());
    }
    let short = |peer: &PeerId| peer.to_string()[..8].to_owned();
    let answered = found.answered.iter().map(short).collect();
    let silent = found.silent.iter().map(|(peer, why)| format!("{}: {why}", short(peer)));
    Err(Error::PeersMissing { answered, silent: silent.collect(), recorded })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::{MAX_READS, unchanged};
    use crate::collection::CollectionNumber;
    use crate::error::Error;

    #[test]
    fn records_are_read_again_if_a_collection_has_begun_meanwhile() {
        for (begun, reads) in [(0, 1), (1, 2), (2, 3)] {
            let (number, read) = (Cell::new(0), Cell::new(0));
            let found = unchanged(
                || Ok(CollectionNumber(number.get())),
                || {
                    read.set(read.get() + 1);
                    number.set(begun.min(read.get()));
                    Ok(read.get())
                },
            );
            assert_eq!((found.unwrap(), read.get()), (reads, reads));
        }
        let number = Cell::new(0);
        let next = || Ok(CollectionNumber(number.replace(number.get() + 1)));
        assert!(matches!(unchanged(next, || Ok(())), Err(Error::RepairRuns)));
        assert_eq!(number.get() as usize, MAX_READS + 1);
    }
}
