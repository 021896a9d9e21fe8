//! The catalog, rebuilt from the records on the peers.

use crate::catalog::{Rebuilt, Records};
use crate::cluster::client::records::FoundRecords;
use crate::error::{Error, Result};
use crate::id::PeerId;
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
    if !force {
        require_all(&found, records.peers())?;
    }
    repository.catalog().rebuild(&inventory, records)
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
