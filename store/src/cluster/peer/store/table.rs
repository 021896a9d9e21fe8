//! Which fragments a peer has, and where: a database beside the log.
//!
//! It is behind the log: a fragment is durable when it is in the log, and gets here later, with many others. Up to where
//! the table knows each segment is in the table too, and what is behind that is read again from the segment when the
//! peer starts. So the fragments that are known are, in each segment, all up to some place, less those deleted.
//!
//! A row is deleted before its block is.

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

/// The age of a fragment is not renewed before it is so many seconds: most are asked for again and again, and a look is
/// cheaper than a change. Everything may be idle for so much longer.
const GRAIN: i64 = 300;

/// `docs/formats.md` explains every column. Rows are appended, and only what they are found by is scattered.
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

pub(super) struct Table {
    /// Apart from the writer: to find a fragment must not wait for a sync.
    reader: Mutex<Connection>,
    writer: Mutex<Connection>,
}

/// The fragments of a blob.
#[derive(Default)]
pub(super) struct Found {
    pub(super) known: Vec<KnownFragment>,
    /// Whether the age of one of them should be renewed, if somebody asks for that.
    pub(super) is_old: bool,
}

/// Fragments in the order of their blobs.
pub(super) struct Page {
    pub(super) all: Vec<KnownFragment>,
    /// The last blob whose fragments are all there; nothing if the page is the last one.
    pub(super) until: Option<BlobId>,
}

/// Makes the database, unless it is there.
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

    /// How many fragments there are, and the bytes that the disk takes for them.
    pub(super) fn count(&self) -> Result<(u64, u64)> {
        let query = "SELECT count(*), coalesce(sum(space), 0) FROM fragments";
        Ok(lock(&self.reader).query_row(query, [], |row| Ok((row.get(0)?, row.get(1)?)))?)
    }

    /// Up to where a segment is known.
    pub(super) fn segment_end(&self, number: u64) -> Result<u64> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached("SELECT length FROM segments WHERE number = ?")?;
        Ok(query.query_row([number], |row| row.get(0)).optional()?.unwrap_or(0))
    }

    /// Announces an empty segment. Its number was never used.
    pub(super) fn new_segment(&self) -> Result<u64> {
        let writer = lock(&self.writer);
        writer.prepare_cached("INSERT INTO segments (length) VALUES (0)")?.execute([])?;
        Ok(writer.last_insert_rowid().unsigned_abs())
    }

    /// The fragments of each of these blobs, which are few: each may have many.
    pub(super) fn of_blobs(&self, blobs: &[BlobId]) -> Result<Vec<Found>> {
        let mut reader = lock(&self.reader);
        let transaction = reader.transaction()?;
        let mut query = transaction.prepare_cached(
            "SELECT place, number, description, touched FROM fragments WHERE blob = ?",
        )?;
        let old = now() as i64 - GRAIN;
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

    /// Whether a fragment is known at this place.
    pub(super) fn is_at(&self, place: LogPosition) -> Result<bool> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached("SELECT 1 FROM fragments WHERE place = ?")?;
        Ok(query.exists([place.number()])?)
    }

    /// Makes fragments of the log known, and up to where each segment is known now. Those at the places in `replaced`
    /// are not known any more.
    pub(super) fn insert(
        &self,
        all: &[Arc<KnownFragment>],
        ends: &BTreeMap<u64, u64>,
        replaced: &[LogPosition],
    ) -> Result<()> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        insert(&transaction, all.iter().map(|one| &**one))?;
        // One that was never told of may be among them.
        for place in replaced {
            remove(&transaction, *place)?;
        }
        ends.iter().try_for_each(|(number, end)| set_end(&transaction, *number, *end))?;
        Ok(transaction.commit()?)
    }

    /// Makes what was found at the end of a segment known. What is newer replaces what is older.
    pub(super) fn recover(&self, found: &[KnownFragment], number: u64, end: u64) -> Result<()> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for one in found {
            let others = {
                let mut query = transaction.prepare_cached(
                    "SELECT place, number, description FROM fragments WHERE blob = ?",
                )?;
                collect(query.query([one.description.blob.as_bytes()])?)?
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

    /// The age of these begins again.
    pub(super) fn touch(&self, places: &[LogPosition]) -> Result<()> {
        let places = places.iter().map(|place| place.number());
        self.touch_all("UPDATE fragments SET touched = ? WHERE place = ?", places)
    }

    /// The same for all fragments of these blobs.
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

    /// Takes fragments out that nobody has stored or asked for within so many seconds. Returns those that were
    /// there. That is durable when this returns.
    pub(super) fn delete(&self, all: &[FragmentId], idle: u32) -> Result<Vec<KnownFragment>> {
        let until = match idle {
            0 => i64::MAX,
            seconds => now() as i64 - i64::from(seconds) - GRAIN,
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
                collect(query.query(params![blob.as_bytes(), index, until])?)?
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

    /// The fragments of the first blobs behind this one, in their order: all of a blob or none, and no more than
    /// `most`.
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
        // There may be more of the last one.
        all.retain(|one| Some(one.description.blob) != last);
        Ok(Page { all, until: before })
    }

    /// The first blobs behind this one, in their order, of which there is something: no more than `most`.
    pub(super) fn names(&self, after: &BlobId, most: usize) -> Result<Vec<BlobId>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT DISTINCT blob FROM fragments WHERE blob > ? ORDER BY blob LIMIT ?",
        )?;
        let names = query.query_map(params![after.as_bytes(), most], |row| row.get(0))?;
        Ok(names.map(|name| name.map(BlobId::from_bytes)).collect::<rusqlite::Result<_>>()?)
    }

    /// The first blob behind this one that is a record; nothing if there is none.
    pub(super) fn record(&self, after: &BlobId) -> Result<Option<BlobId>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT blob FROM fragments WHERE kind = 1 AND blob > ? ORDER BY blob LIMIT 1",
        )?;
        let next = query.query_row([after.as_bytes()], |row| row.get(0)).optional()?;
        Ok(next.map(BlobId::from_bytes))
    }

    /// The part around a place in which nothing is known: from the end of the block before it to the start of the
    /// one behind it, if there is one.
    pub(super) fn gap(&self, place: LogPosition) -> Result<(u64, Option<u64>)> {
        let reader = lock(&self.reader);
        let (first, behind) = (LogPosition { offset: 0, ..place }, segment_behind(place.segment));
        let mut next = reader.prepare_cached(
            "SELECT place FROM fragments WHERE place > ? AND place < ? ORDER BY place LIMIT 1",
        )?;
        let next = next.query_row([place.number(), behind], |row| row.get(0)).optional()?;
        let next = next.map(|number| LogPosition::from_number(number).offset);
        let mut before = reader.prepare_cached(
            "SELECT place, space FROM fragments WHERE place < ? AND place >= ?
             ORDER BY place DESC LIMIT 1",
        )?;
        let end = |row: &Row<'_>| {
            let space: usize = row.get(1)?;
            Ok(LogPosition::from_number(row.get(0)?).behind(space))
        };
        let before = before.query_row([place.number(), first.number()], end).optional()?;
        Ok((before.unwrap_or(0), next))
    }

    /// Whether a segment holds nothing.
    pub(super) fn is_empty(&self, segment: u64) -> Result<bool> {
        let reader = lock(&self.reader);
        let (first, behind) = (LogPosition { segment, offset: 0 }, segment_behind(segment));
        let mut query = reader
            .prepare_cached("SELECT 1 FROM fragments WHERE place >= ? AND place < ? LIMIT 1")?;
        Ok(!query.exists([first.number(), behind])?)
    }

    /// Forgets a segment that holds nothing. Its number is never used again.
    pub(super) fn forget_segment(&self, segment: u64) -> Result<()> {
        let writer = lock(&self.writer);
        writer.prepare_cached("DELETE FROM segments WHERE number = ?")?.execute([segment])?;
        Ok(())
    }
}

/// The number of the first place behind a segment.
fn segment_behind(segment: u64) -> i64 {
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

/// Reads rows. One that makes no sense is told in the log, and left out: it is no reason to do without the others.
fn collect(mut rows: rusqlite::Rows<'_>) -> Result<Vec<KnownFragment>> {
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
            tracing::error!(%error, "a fragment is not known any more");
            Ok(None)
        }
    }
}

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().expect("no thread panics while it uses the table")
}
