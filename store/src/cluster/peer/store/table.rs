//! The table of a peer's fragments and their positions: a database beside the log.
//!
//! The table lags behind the log. A fragment is durable when it is in the log, and gets into the
//! table later, with many others. For each segment the table has the offset up to which it knows
//! the segment. When the peer starts, it reads the rest of each segment. So in each segment the
//! table knows all fragments up to some offset, less the deleted ones.
//!
//! A deletion removes the row before the block.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use rusqlite::{
    Connection, OptionalExtension, Row, ToSql, Transaction, TransactionBehavior, params,
};

use super::group::{KnownFragment, LogPosition};
use crate::clock::now;
use crate::cluster::protocol::FragmentId;
use crate::durable::database;
use crate::encoding::fragment::Description;
use crate::error::Result;
use crate::id::BlobId;

pub(super) const DATABASE: &str = "fragments.db";

/// The version of the tables. Versions 1 and 2 were never released.
const VERSION: u64 = 3;

/// The age of a fragment is renewed only when it is older than this many seconds: most fragments
/// are asked for again and again, and a read is cheaper than a write. Deletion adds this time to
/// every idle time.
const RENEWAL_SECONDS: i64 = 300;

/// `docs/formats.md` explains every column. Rows are appended in the order of the log; only the
/// indices are updated at random positions.
const TABLES: &str = "
CREATE TABLE segments (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    length INTEGER NOT NULL
) STRICT;

CREATE TABLE fragments (
    place       INTEGER PRIMARY KEY,
    blob        BLOB    NOT NULL CHECK (length(blob) = 32),
    number      INTEGER NOT NULL,
    kind        INTEGER NOT NULL,
    space       INTEGER NOT NULL,
    description BLOB    NOT NULL,
    touched     INTEGER NOT NULL
) STRICT;

CREATE INDEX fragments_by_blob ON fragments (blob);
CREATE INDEX records ON fragments (blob) WHERE kind = 1;
";

/// The database of fragments.
pub(super) struct Table {
    /// Separate from the writer: a lookup must not wait for a sync.
    reader: Mutex<Connection>,
    writer: Mutex<Connection>,
}

/// The fragments of a blob.
#[derive(Default)]
pub(super) struct Found {
    pub(super) known: Vec<KnownFragment>,
    /// Whether one of them is old enough to be renewed on request.
    pub(super) is_old: bool,
}

/// A page of fragments in the order of their blobs.
pub(super) struct Page {
    pub(super) all: Vec<KnownFragment>,
    /// The last blob of the page, whose fragments are all in it; `None` if the page is the last
    /// one.
    pub(super) until: Option<BlobId>,
}

/// Creates the database, unless it exists.
pub(super) fn make(directory: &Path) -> Result<()> {
    database::make(&directory.join(DATABASE), VERSION, |transaction| {
        Ok(transaction.execute_batch(TABLES)?)
    })
}

impl Table {
    pub(super) fn open(directory: &Path) -> Result<Table> {
        let (writer, reader) = database::open(&directory.join(DATABASE), VERSION)?;
        Ok(Table { reader: Mutex::new(reader), writer: Mutex::new(writer) })
    }

    /// The number of fragments, and the bytes that they take on the disk.
    pub(super) fn count(&self) -> Result<(u64, u64)> {
        let query = "SELECT count(*), coalesce(sum(space), 0) FROM fragments";
        Ok(lock(&self.reader).query_row(query, [], |row| Ok((row.get(0)?, row.get(1)?)))?)
    }

    /// The offset up to which a segment is known.
    pub(super) fn segment_end(&self, number: u64) -> Result<u64> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached("SELECT length FROM segments WHERE number = ?")?;
        Ok(query.query_row([number], |row| row.get(0)).optional()?.unwrap_or(0))
    }

    /// Adds an empty segment. Its number was never used before.
    pub(super) fn new_segment(&self) -> Result<u64> {
        let writer = lock(&self.writer);
        writer.prepare_cached("INSERT INTO segments (length) VALUES (0)")?.execute([])?;
        Ok(writer.last_insert_rowid().unsigned_abs())
    }

    /// The fragments of each of these blobs. Pass few blobs: each may have many fragments.
    pub(super) fn of_blobs(&self, blobs: &[BlobId]) -> Result<Vec<Found>> {
        let mut reader = lock(&self.reader);
        let transaction = reader.transaction()?;
        let mut query = transaction.prepare_cached(
            "SELECT place, number, description, touched FROM fragments WHERE blob = ?",
        )?;
        let old = now() as i64 - RENEWAL_SECONDS;
        let mut of_blob = |blob: &BlobId| {
            let mut rows = query.query([blob.as_bytes()])?;
            let mut found = Found::default();
            while let Some(row) = rows.next()? {
                found.known.extend(known(row)?);
                found.is_old |= row.get::<_, i64>(3)? < old;
            }
            Ok(found)
        };
        blobs.iter().map(&mut of_blob).collect()
    }

    /// Whether a fragment is known at this position.
    pub(super) fn is_at(&self, place: LogPosition) -> Result<bool> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached("SELECT 1 FROM fragments WHERE place = ?")?;
        Ok(query.exists([place.number()])?)
    }

    /// Adds fragments of the log, sets the offsets up to which the segments are known, and removes
    /// the rows at the positions in `replaced`.
    pub(super) fn insert(
        &self,
        all: &[Arc<KnownFragment>],
        ends: &BTreeMap<u64, u64>,
        replaced: &[LogPosition],
    ) -> Result<()> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        insert(&transaction, all.iter().map(|one| &**one))?;
        // A replaced fragment may be among the added ones.
        for place in replaced {
            remove(&transaction, *place)?;
        }
        ends.iter().try_for_each(|(number, end)| set_end(&transaction, *number, *end))?;
        Ok(transaction.commit()?)
    }

    /// Adds the fragments that were found at the end of a segment. Later ones replace earlier ones.
    pub(super) fn recover(&self, found: &[KnownFragment], number: u64, end: u64) -> Result<()> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for one in found {
            let others = {
                let mut query = transaction.prepare_cached(
                    "SELECT place, number, description FROM fragments WHERE blob = ?",
                )?;
                read_rows(query.query([one.description.blob.as_bytes()])?)?
            };
            for other in others {
                if other.is_like(one) {
                    remove(&transaction, other.place)?;
                }
            }
            insert(&transaction, std::iter::once(one))?;
        }
        set_end(&transaction, number, end)?;
        Ok(transaction.commit()?)
    }

    /// Resets the idle timers of the fragments at these positions.
    pub(super) fn touch(&self, places: &[LogPosition]) -> Result<()> {
        let places = places.iter().map(|place| place.number());
        self.touch_all("UPDATE fragments SET touched = ? WHERE place = ?", places)
    }

    /// Resets the idle timers of all fragments of these blobs.
    pub(super) fn renew(&self, blobs: &[BlobId]) -> Result<()> {
        let blobs = blobs.iter().map(BlobId::as_bytes);
        self.touch_all("UPDATE fragments SET touched = ? WHERE blob = ?", blobs)
    }

    fn touch_all(&self, update: &str, keys: impl Iterator<Item: ToSql>) -> Result<()> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        {
            let mut update = transaction.prepare_cached(update)?;
            for key in keys {
                update.execute(params![now() as i64, key])?;
            }
        }
        Ok(transaction.commit()?)
    }

    /// Removes fragments that no client has stored or renewed for `idle` seconds. Returns the
    /// removed ones. The removal is durable when this returns.
    pub(super) fn delete(&self, all: &[FragmentId], idle: u32) -> Result<Vec<KnownFragment>> {
        let until = match idle {
            0 => i64::MAX,
            seconds => now() as i64 - i64::from(seconds) - RENEWAL_SECONDS,
        };
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut deleted = Vec::new();
        for FragmentId { blob, encoding, index } in all {
            let found = {
                let mut query = transaction.prepare_cached(
                    "SELECT place, number, description FROM fragments
                     WHERE blob = ? AND number = ? AND touched <= ?",
                )?;
                read_rows(query.query(params![blob.as_bytes(), index, until])?)?
            };
            for one in found {
                if one.description.id() == *encoding {
                    remove(&transaction, one.place)?;
                    deleted.push(one);
                }
            }
        }
        transaction.commit()?;
        Ok(deleted)
    }

    /// A page of fragments, in the order of their blobs, starting after this blob: all fragments of
    /// a blob or none, and at most `most`.
    pub(super) fn list(&self, after: &BlobId, most: usize) -> Result<Page> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT place, number, description, blob FROM fragments WHERE blob > ?
             ORDER BY blob LIMIT ?",
        )?;
        let mut rows = query.query(params![after.as_bytes(), most + 1])?;
        let (mut all, mut read, mut before, mut last) = (Vec::new(), 0, None, None);
        while let Some(row) = rows.next()? {
            let blob = BlobId::from_bytes(row.get(3)?);
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

    /// The first `most` blobs after this one, in their order, that have fragments.
    pub(super) fn names(&self, after: &BlobId, most: usize) -> Result<Vec<BlobId>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT DISTINCT blob FROM fragments WHERE blob > ? ORDER BY blob LIMIT ?",
        )?;
        let names = query.query_map(params![after.as_bytes(), most], |row| row.get(0))?;
        Ok(names.map(|name| name.map(BlobId::from_bytes)).collect::<rusqlite::Result<_>>()?)
    }

    /// The first blob after this one that is a record; `None` if there is none.
    pub(super) fn record(&self, after: &BlobId) -> Result<Option<BlobId>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT blob FROM fragments WHERE kind = 1 AND blob > ? ORDER BY blob LIMIT 1",
        )?;
        let next = query.query_row([after.as_bytes()], |row| row.get(0)).optional()?;
        Ok(next.map(BlobId::from_bytes))
    }

    /// The gap around a position in which no fragment is known: from the end of the block before it
    /// to the start of the one after it; `None` if there is no later one.
    pub(super) fn gap(&self, place: LogPosition) -> Result<(u64, Option<u64>)> {
        let reader = lock(&self.reader);
        let (first, end) = (LogPosition { offset: 0, ..place }, segment_end_number(place.segment));
        let mut next = reader.prepare_cached(
            "SELECT place FROM fragments WHERE place > ? AND place < ? ORDER BY place LIMIT 1",
        )?;
        let next = next.query_row([place.number(), end], |row| row.get(0)).optional()?;
        let next = next.map(|number| LogPosition::from_number(number).offset);
        let mut before = reader.prepare_cached(
            "SELECT place, space FROM fragments WHERE place < ? AND place >= ?
             ORDER BY place DESC LIMIT 1",
        )?;
        let block_end = |row: &Row<'_>| {
            let space: usize = row.get(1)?;
            Ok(LogPosition::from_number(row.get(0)?).end_of_block(space))
        };
        let before = before.query_row([place.number(), first.number()], block_end).optional()?;
        Ok((before.unwrap_or(0), next))
    }

    /// Whether a segment holds no known fragment.
    pub(super) fn is_empty(&self, segment: u64) -> Result<bool> {
        let reader = lock(&self.reader);
        let (first, end) = (LogPosition { segment, offset: 0 }, segment_end_number(segment));
        let mut query = reader
            .prepare_cached("SELECT 1 FROM fragments WHERE place >= ? AND place < ? LIMIT 1")?;
        Ok(!query.exists([first.number(), end])?)
    }

    /// Removes an empty segment. Its number is never used again.
    pub(super) fn forget_segment(&self, segment: u64) -> Result<()> {
        let writer = lock(&self.writer);
        writer.prepare_cached("DELETE FROM segments WHERE number = ?")?.execute([segment])?;
        Ok(())
    }
}

/// The number of the first position after a segment.
fn segment_end_number(segment: u64) -> i64 {
    LogPosition { segment: segment + 1, offset: 0 }.number()
}

fn insert<'a>(
    transaction: &Transaction<'_>,
    all: impl Iterator<Item = &'a KnownFragment>,
) -> Result<()> {
    let mut insert = transaction.prepare_cached(
        "INSERT OR REPLACE INTO fragments (place, blob, number, kind, space, description, touched)
         VALUES (?, ?, ?, ?, ?, ?, ?)",
    )?;
    let (now, mut bytes) = (now() as i64, Vec::new());
    for one in all {
        bytes.clear();
        one.description.write(&mut bytes);
        insert.execute(params![
            one.place.number(),
            one.description.blob.as_bytes(),
            one.index,
            one.description.kind() as u8,
            one.space(),
            bytes,
            now,
        ])?;
    }
    Ok(())
}

fn remove(transaction: &Transaction<'_>, place: LogPosition) -> Result<()> {
    let mut delete = transaction.prepare_cached("DELETE FROM fragments WHERE place = ?")?;
    delete.execute([place.number()])?;
    Ok(())
}

fn set_end(transaction: &Transaction<'_>, number: u64, end: u64) -> Result<()> {
    let mut update = transaction.prepare_cached(
        "INSERT INTO segments (number, length) VALUES (?1, ?2)
         ON CONFLICT (number) DO UPDATE SET length = max(length, ?2)",
    )?;
    update.execute([number, end])?;
    Ok(())
}

/// Reads rows. An invalid row is logged and left out: the other rows are still useful.
fn read_rows(mut rows: rusqlite::Rows<'_>) -> Result<Vec<KnownFragment>> {
    let mut all = Vec::new();
    while let Some(row) = rows.next()? {
        all.extend(known(row)?);
    }
    Ok(all)
}

fn known(row: &Row<'_>) -> rusqlite::Result<Option<KnownFragment>> {
    let (place, index) = (LogPosition::from_number(row.get(0)?), row.get(1)?);
    match Description::from_bytes(row.get_ref(2)?.as_blob()?) {
        Ok((description, _)) => Ok(Some(KnownFragment { description, index, place })),
        Err(error) => {
            tracing::error!(%error, "ignored an invalid row of the table of fragments");
            Ok(None)
        }
    }
}

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().expect("no thread panics while it uses the table")
}
