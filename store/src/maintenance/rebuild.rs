//! The catalog, rebuilt from the records on the peers.

use crate::catalog::{Rebuilt, Records};
use crate::error::{Error, Result};
use crate::repository::Repository;

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
    // Before the records are read: see `Inventory`.
    let inventory = repository.catalog().inventory()?;
    let found = repository.records().ok_or(Error::NoCluster)?;
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
    let expected = records.peers().max(found.answered + found.silent.len() as u64);
    if !force && found.answered < expected {
        let silent = found.silent.iter().map(|(peer, reason)| format!("{peer}: {reason}"));
        return Err(Error::PeersMissing {
            answered: found.answered,
            expected,
            silent: silent.collect(),
        });
    }
    repository.catalog().rebuild(&inventory, records)
}
