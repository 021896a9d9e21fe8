//! The catalog, rebuilt from the records on the peers.

use crate::catalog::{Rebuilt, Record};
use crate::error::{Error, Result};
use crate::id::BlobId;
use crate::repository::Repository;

/// Creates again the images and snapshots that the peers' records describe, after the catalog was lost.
pub fn rebuild_catalog(repository: &Repository) -> Result<Rebuilt> {
    let records = repository.records().ok_or(Error::NoCluster)?;
    let records = records.into_iter().filter_map(|bytes| {
        let record = Record::from_bytes(&bytes);
        let record = record.inspect_err(|error| tracing::warn!(%error, "a record is skipped"));
        record.ok().map(|record| (BlobId::of(&bytes), record))
    });
    repository.catalog().rebuild(records.collect())
}
