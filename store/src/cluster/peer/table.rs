//! Which fragments a peer has: a database beside the log of their blocks.
//!
//! A row is inserted when its block is durable, and is deleted before its block is. So whoever finds a row may rely
//! on the block.

use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};

use super::super::fragment::Description;
use super::{FragmentId, Held};
use crate::database;
use crate::error::Result;
use crate::id::BlobId;

pub(super) const DATABASE: &str = "fragments.db";

/// The version of the tables. Version 1 was never released.
const VERSION: u64 = 2;

/// `docs/formats.md` explains every column. Rows are appended, and only what they are found by is scattered.
const TABLES: &str = "
CREATE TABLE fragments (
    id          INTEGER PRIMARY KEY,
    blob        BLOB    NOT NULL CHECK (length(blob) = 32),
    encoding    BLOB    NOT NULL CHECK (length(encoding) = 32),
    number      INTEGER NOT NULL,
    kind        INTEGER NOT NULL,
    block       INTEGER NOT NULL,
    description BLOB    NOT NULL,
    touched     INTEGER NOT NULL
) STRICT;

CREATE UNIQUE INDEX fragments_by_blob ON fragments (blob, encoding, number);
CREATE INDEX fragments_by_block ON fragments (block);
CREATE INDEX records ON fragments (blob) WHERE kind = 1;
";

/// A fragment, as it is found: what it belongs to, and which block it is.
pub(super) type Known = (Description, u8);

pub(super) struct Table {
    /// Apart from the writer: to find a fragment must not wait for a sync.
    reader: Mutex<Connection>,
    writer: Mutex<Connection>,
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

    /// How many fragments there are.
    pub(super) fn count(&self) -> Result<u64> {
        let reader = lock(&self.reader);
        Ok(reader.query_row("SELECT count(*) FROM fragments", [], |row| row.get(0))?)
    }

    /// The fragments of a blob.
    pub(super) fn of_blob(&self, blob: &BlobId) -> Result<Vec<Known>> {
        let reader = lock(&self.reader);
        let mut query =
            reader.prepare_cached("SELECT description, number FROM fragments WHERE blob = ?")?;
        collect(query.query([blob.as_bytes()])?, known)
    }

    /// The same for many blobs, with one look at the database.
    pub(super) fn of_blobs<'a>(
        &self,
        blobs: impl Iterator<Item = &'a BlobId>,
    ) -> Result<Vec<Vec<Known>>> {
        let mut reader = lock(&self.reader);
        let transaction = reader.transaction()?;
        let mut query = transaction
            .prepare_cached("SELECT description, number FROM fragments WHERE blob = ?")?;
        blobs.map(|blob| collect(query.query([blob.as_bytes()])?, known)).collect()
    }

    /// Makes fragments known, or renews their age. Returns how many were not known.
    pub(super) fn insert<'a>(&self, all: impl Iterator<Item = &'a Known>) -> Result<u64> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut new = 0;
        {
            let mut touch = transaction.prepare_cached(
                "UPDATE fragments SET touched = ?4 WHERE blob = ?1 AND encoding = ?2 AND number = ?3",
            )?;
            let mut insert = transaction.prepare_cached(
                "INSERT INTO fragments (blob, encoding, number, kind, block, description, touched)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            )?;
            for (description, index) in all {
                let (blob, encoding) = (description.blob, description.id());
                if touch.execute(params![blob.as_bytes(), encoding.as_bytes(), index, now()])? > 0 {
                    continue;
                }
                let Some(block) = description.block((*index).into()) else { continue };
                insert.execute(params![
                    blob.as_bytes(),
                    encoding.as_bytes(),
                    index,
                    description.kind() as u8,
                    short(&block),
                    description.to_bytes(),
                    now(),
                ])?;
                new += 1;
            }
        }
        transaction.commit()?;
        Ok(new)
    }

    /// Takes fragments out that nobody has stored or asked for within so many seconds. Returns those that were
    /// there. That is durable when this returns.
    pub(super) fn delete(&self, all: &[FragmentId], idle: u32) -> Result<Vec<Known>> {
        let until = match idle {
            0 => i64::MAX,
            seconds => now() - i64::from(seconds),
        };
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut deleted = Vec::new();
        {
            let mut delete = transaction.prepare_cached(
                "DELETE FROM fragments WHERE blob = ?1 AND encoding = ?2 AND number = ?3
                 AND touched <= ?4 RETURNING description, number",
            )?;
            for FragmentId { blob, encoding, index } in all {
                let row = params![blob.as_bytes(), encoding.as_bytes(), index, until];
                deleted.extend(collect(delete.query(row)?, known)?);
            }
        }
        transaction.commit()?;
        Ok(deleted)
    }

    /// Whether a fragment has this block.
    pub(super) fn refers_to(&self, block: &BlobId) -> Result<bool> {
        let reader = lock(&self.reader);
        let mut query =
            reader.prepare_cached("SELECT description, number FROM fragments WHERE block = ?")?;
        let mut rows = query.query([short(block)])?;
        while let Some(row) = rows.next()? {
            // What cannot be read may be the one.
            let Some((description, index)) = known(row)? else { return Ok(true) };
            if description.block(index.into()).as_ref() == Some(block) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What there is of each of these blobs, `room` fragments in all at most.
    pub(super) fn have(&self, blobs: &[BlobId], mut room: usize) -> Result<Vec<Vec<Held>>> {
        let mut reader = lock(&self.reader);
        let transaction = reader.transaction()?;
        let mut query = transaction
            .prepare_cached("SELECT description, number, encoding FROM fragments WHERE blob = ?")?;
        let mut held = |blob: &BlobId| collect(query.query([blob.as_bytes()])?, held);
        blobs.iter().map(|blob| Ok(within(held(blob)?, &mut room))).collect()
    }

    /// As [`Table::have`], and the age of what is there begins again.
    pub(super) fn renew(&self, blobs: &[BlobId], mut room: usize) -> Result<Vec<Vec<Held>>> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut answers = Vec::with_capacity(blobs.len());
        {
            let mut touch = transaction.prepare_cached(
                "UPDATE fragments SET touched = ?2 WHERE blob = ?1
                 RETURNING description, number, encoding",
            )?;
            for blob in blobs {
                let rows = touch.query(params![blob.as_bytes(), now()])?;
                answers.push(within(collect(rows, held)?, &mut room));
            }
        }
        transaction.commit()?;
        Ok(answers)
    }

    /// The fragments of the first blobs behind this one, in their order: all of a blob or none, and no more than
    /// `most`.
    pub(super) fn list(&self, after: &BlobId, most: usize) -> Result<Vec<(BlobId, Held)>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT description, number, encoding, blob FROM fragments WHERE blob > ?
             ORDER BY blob, encoding, number LIMIT ?",
        )?;
        let mut rows = query.query(params![after.as_bytes(), most + 1])?;
        let (mut all, mut read, mut last) = (Vec::new(), 0, None);
        while let Some(row) = rows.next()? {
            let blob = BlobId::from_bytes(row.get(3)?);
            (read, last) = (read + 1, Some(blob));
            all.extend(held(row)?.map(|held| (blob, held)));
        }
        if read > most {
            // There may be more of the last one.
            all.retain(|(blob, _)| Some(*blob) != last);
        }
        Ok(all)
    }

    /// The fragments of the first record behind this one; nothing if there is none.
    pub(super) fn record(&self, after: &BlobId) -> Result<Option<(BlobId, Vec<Known>)>> {
        let reader = lock(&self.reader);
        let next: Option<[u8; 32]> = reader
            .prepare_cached(
                "SELECT blob FROM fragments WHERE kind = 1 AND blob > ? ORDER BY blob LIMIT 1",
            )?
            .query_row([after.as_bytes()], |row| row.get(0))
            .optional()?;
        let Some(blob) = next else { return Ok(None) };
        let mut query = reader.prepare_cached(
            "SELECT description, number FROM fragments WHERE kind = 1 AND blob = ?",
        )?;
        Ok(Some((BlobId::from_bytes(blob), collect(query.query([blob])?, known)?)))
    }
}

/// Reads rows. One that makes no sense is told in the log, and left out: it is no reason to do without the others.
fn collect<T>(
    mut rows: rusqlite::Rows<'_>,
    read: impl Fn(&Row<'_>) -> rusqlite::Result<Option<T>>,
) -> Result<Vec<T>> {
    let mut all = Vec::new();
    while let Some(row) = rows.next()? {
        all.extend(read(row)?);
    }
    Ok(all)
}

fn known(row: &Row<'_>) -> rusqlite::Result<Option<Known>> {
    let (bytes, index): (Vec<u8>, _) = (row.get(0)?, row.get(1)?);
    match Description::from_bytes(&bytes) {
        Ok((description, _)) => Ok(Some((description, index))),
        Err(error) => {
            tracing::error!(%error, "a fragment is not known any more");
            Ok(None)
        }
    }
}

fn held(row: &Row<'_>) -> rusqlite::Result<Option<Held>> {
    let encoding = BlobId::from_bytes(row.get(2)?);
    Ok(known(row)?.map(|(description, index)| {
        let (data, width) = (description.needed() as u8, description.width() as u8);
        let (len, kind) = (description.block_len() as u32, description.kind());
        Held { encoding, data, parity: width - data, index, kind, len }
    }))
}

/// As many as there is room for.
fn within(mut held: Vec<Held>, room: &mut usize) -> Vec<Held> {
    held.truncate(*room);
    *room -= held.len();
    held
}

/// What a block is found by: the start of its name. It is short, and hardly ever that of two.
fn short(block: &BlobId) -> i64 {
    let (start, _) = block.as_bytes().split_first_chunk().expect("a name has 32 bytes");
    i64::from_le_bytes(*start)
}

/// Seconds since 1970.
fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().expect("no thread panics while it uses the table")
}
