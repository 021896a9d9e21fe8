//! The index of *available* snapshots: published, perhaps without full redundancy.

use super::Catalog;
use super::documents::{
    AVAILABLE, AvailableDocument, ImageDocument, SnapshotDocument, available_key, image_key,
    number_of, snapshot_key,
};
use super::images::Referrer;
use crate::cluster::membership::LOSSES;
use crate::documents::{Change, Query};
use crate::encoding::StoragePolicy;
use crate::error::{Error, Result};
use crate::id::ImageId;
use crate::snapshot::SnapshotState;

/// Entries of the index whose snapshots are read together.
const READ_TOGETHER: usize = 500;

/// A snapshot that was *available* when it was read.
pub(crate) struct Available {
    pub(crate) policy: StoragePolicy,
    pub(crate) refers: Referrer,
    key: String,
    version: u64,
    /// The key of its entry in the index of available snapshots.
    index: String,
    /// The version of the count of lost peers.
    losses: u64,
}

impl Catalog {
    /// Whether a snapshot is *available*.
    pub(crate) fn has_available(&self) -> Result<bool> {
        let last = self.documents.last(AVAILABLE, &Query::after(AVAILABLE), 1)?;
        Ok(!last.documents.is_empty())
    }

    /// The snapshots that are *available*.
    pub(crate) fn available(&self) -> Result<Vec<Available>> {
        let index = self.read(&[Query::prefix(AVAILABLE), Query::key(LOSSES)])?;
        let mut found = Vec::new();
        for some in index.under::<AvailableDocument>(AVAILABLE)?.chunks(READ_TOGETHER) {
            let some: Vec<_> = some
                .iter()
                .map(|(key, entry)| Ok((parse_available(key)?, image_key(&entry.image))))
                .collect::<Result<_>>()?;
            let keys = some.iter().flat_map(|((id, number), image_key)| {
                [image_key.clone(), snapshot_key(id, *number)].map(Query::Key)
            });
            let view = self.read(&keys.collect::<Vec<_>>())?;
            for ((id, number), image_key) in some {
                let snapshot_key = snapshot_key(&id, number);
                let image = view.get::<ImageDocument>(&image_key)?;
                let snapshot = view.get::<SnapshotDocument>(&snapshot_key)?;
                // The snapshot may have been removed since the index was read.
                if let (Some(image), Some(one)) = (image.filter(|image| image.id == id), snapshot)
                    && one.state == SnapshotState::Available
                {
                    found.push(Available {
                        policy: image.policy(),
                        refers: Referrer::snapshot(one.geometry(image.chunk_size)?, &one),
                        version: view.version(&snapshot_key),
                        key: snapshot_key,
                        index: available_key(&id, number),
                        losses: index.version(LOSSES),
                    });
                }
            }
        }
        Ok(found)
    }

    /// Makes an available snapshot stable. Leaves it alone if it was removed or has changed since
    /// it was read, or if a peer was lost since: what repair has found there is gone.
    pub(crate) fn promote(&self, available: &Available) -> Result<()> {
        let Available { key, version, index, losses, .. } = available;
        self.change(&[Query::key(key), Query::key(LOSSES)], |view| {
            let is_same = view.version(key) == *version && view.version(LOSSES) == *losses;
            let change = match view.get::<SnapshotDocument>(key)? {
                Some(one) if is_same => {
                    let stable = SnapshotDocument { state: SnapshotState::Stable, ..one };
                    Change::default().put(key, &stable).remove(Query::key(index))
                }
                _ => Change::default(),
            };
            Ok((change, ()))
        })
    }
}

/// The image and the number of an entry of the index of available snapshots.
fn parse_available(key: &str) -> Result<(ImageId, u64)> {
    let parts = key.split_once('/');
    let (id, number) = parts.ok_or_else(|| {
        Error::corrupt("the catalog", format!("'{AVAILABLE}{key}' names no snapshot"))
    })?;
    Ok((id.parse()?, number_of(number)?))
}
