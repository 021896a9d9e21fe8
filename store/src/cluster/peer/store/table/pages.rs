//! Pages of the table in the order of the blobs' names.

use rusqlite::{OptionalExtension, params};

use super::{KnownFragment, Table, known, lock};
use crate::error::Result;
use crate::id::BlobId;

/// A page of fragments in the order of their blobs.
pub(in super::super) struct Page {
    pub(in super::super) all: Vec<KnownFragment>,
    /// The last blob of the page, whose fragments are all in it; `None` if the page is the last
    /// one.
    pub(in super::super) until: Option<BlobId>,
}

impl Table {
    /// A page of fragments, in the order of their blobs, starting after this blob: all fragments of
    /// a blob or none, and at most `most`.
    pub(in super::super) fn list(&self, after: &BlobId, most: usize) -> Result<Page> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT place, number, description, stamp, blob FROM fragments WHERE blob > ? AND bad = 0
             ORDER BY blob LIMIT ?",
        )?;
        let mut rows = query.query(params![after.as_bytes(), most + 1])?;
        let (mut all, mut read, mut before, mut last) = (Vec::new(), 0, None, None);
        while let Some(row) = rows.next()? {
            let blob = BlobId::from_bytes(row.get(4)?);
            if last != Some(blob) {
                (before, last) = (last, Some(blob));
            }
            read += 1;
            all.extend(known(row)?);
        }
        if read <= most {
            return Ok(Page { all, until: None });
        }
        // The last blob may have more fragments.
        all.retain(|one| Some(one.description.blob) != last);
        Ok(Page { all, until: before })
    }

    /// The first `most` blobs after this one, in their order, that have fragments, be they bad.
    pub(in super::super) fn names(&self, after: &BlobId, most: usize) -> Result<Vec<BlobId>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT DISTINCT blob FROM fragments WHERE blob > ? ORDER BY blob LIMIT ?",
        )?;
        let names = query.query_map(params![after.as_bytes(), most], |row| row.get(0))?;
        Ok(names.map(|name| name.map(BlobId::from_bytes)).collect::<rusqlite::Result<_>>()?)
    }

    /// The first blob after this one that is a record; `None` if there is none.
    pub(in super::super) fn record(&self, after: &BlobId) -> Result<Option<BlobId>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT blob FROM fragments WHERE kind = 1 AND bad = 0 AND blob > ?
             ORDER BY blob LIMIT 1",
        )?;
        let next = query.query_row([after.as_bytes()], |row| row.get(0)).optional()?;
        Ok(next.map(BlobId::from_bytes))
    }
}
