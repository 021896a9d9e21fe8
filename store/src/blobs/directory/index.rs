//! The index: a database beside the segments that maps each blob to its position.
//!
//! A row is inserted when its blob is durable, and other handles see the row when it is durable
//! itself. So a process that finds a blob in the index can rely on it. If the file is missing, the
//! index is rebuilt from the segments.

use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior};

use super::group::Entry;
use crate::collection::CollectionNumber;
use crate::durable::database;
use crate::durable::segment::{ALIGNMENT, SEGMENT_SIZE};
use crate::error::{Error, Result};
use crate::id::BlobId;

/// The name of the database's file.
const FILE_NAME: &str = "index.db";

/// The version of the tables, stored in the database's `user_version`. Version 1 was never
/// released.
const VERSION: u64 = 2;

/// The tables. `docs/formats.md` describes every column.
const TABLES: &str = "
CREATE TABLE segments (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    length INTEGER NOT NULL,
    taken  INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE blobs (
    id      BLOB    NOT NULL PRIMARY KEY CHECK (length(id) = 32),
    segment INTEGER NOT NULL,
    offset  INTEGER NOT NULL,
    length  INTEGER NOT NULL,
    form    INTEGER NOT NULL,
    stamp   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
";

/// The table of blobs that were found damaged. It is created when the index is opened, because the
/// first repositories of this version do not have it.
const DAMAGED_TABLE: &str = "
CREATE TABLE IF NOT EXISTS damaged (
    id BLOB NOT NULL PRIMARY KEY CHECK (length(id) = 32)
) STRICT, WITHOUT ROWID;
";

/// The form of a blob that is stored as its content. There is no other form.
const PLAIN: u8 = 0;

/// The most segments that are considered when a handle looks for one to continue.
const MAX_CANDIDATES: u32 = 64;

/// The position of a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) segment: u64,
    pub(super) offset: u64,
    pub(super) len: u32,
}

impl Slot {
    /// Returns the end of the blob's last block.
    pub(super) fn end(&self) -> u64 {
        (self.offset + u64::from(self.len)).next_multiple_of(ALIGNMENT as u64)
    }
}

/// The connections to the database.
pub(super) struct Index {
    /// Separate from the writer, so that a lookup does not wait for another thread's sync.
    reader: Mutex<Connection>,
    writer: Mutex<Connection>,
}

impl Index {
    /// Opens the index. If it does not exist, creates it with what `recover` finds in the segments.
    pub(super) fn open(
        repository: &Path,
        recover: impl FnOnce(&mut dyn FnMut(Found) -> Result<()>) -> Result<()>,
    ) -> Result<Self> {
        let path = repository.join(FILE_NAME);
        database::make(&path, VERSION, |transaction| {
            transaction.execute_batch(TABLES)?;
            recover(&mut |found| add_found(transaction, found))
        })?;
        let (writer, reader) = database::open(&path, VERSION)?;
        writer.execute_batch(DAMAGED_TABLE)?;
        Ok(Self { reader: Mutex::new(reader), writer: Mutex::new(writer) })
    }

    /// Returns the slot of a blob, or `None` if the blob is not in the index.
    pub(super) fn find(&self, id: &BlobId) -> Result<Option<Slot>> {
        find(&lock(&self.reader), id)
    }

    /// Returns the slot of each blob and whether the blob was found damaged, or `None` for a blob that
    /// is not in the index.
    pub(super) fn find_all<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a BlobId>,
    ) -> Result<Vec<Option<(Slot, bool)>>> {
        let mut reader = lock(&self.reader);
        // All lookups see the same state.
        let transaction = reader.transaction()?;
        let damaged = Damaged::new(&transaction)?;
        let find = |id| match find(&transaction, id)? {
            Some(slot) => Ok(Some((slot, damaged.has(id)?))),
            None => Ok(None),
        };
        ids.into_iter().map(find).collect()
    }

    /// Records that a blob is damaged, for all processes. A put of such a blob replaces it.
    pub(super) fn mark_damaged(&self, id: &BlobId) -> Result<()> {
        let writer = lock(&self.writer);
        let insert = "INSERT OR IGNORE INTO damaged VALUES (?)";
        writer.prepare_cached(insert)?.execute([id.as_bytes()])?;
        Ok(())
    }

    /// Returns the segments below the size limit, the oldest first.
    pub(super) fn segments_with_room(&self) -> Result<Vec<u64>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT number FROM segments WHERE length < ? ORDER BY number LIMIT ?",
        )?;
        let rows = query.query_map((SEGMENT_SIZE, MAX_CANDIDATES), |row| row.get(0))?;
        Ok(rows.collect::<rusqlite::Result<_>>()?)
    }

    /// Records that this process appends to a segment, which it has locked, and returns the end of
    /// the segment's content.
    ///
    /// The change is necessary for correctness. The previous holder may have been killed during a
    /// commit that no process has seen, but that the database would accept at its next recovery.
    /// The index would then list blobs whose bytes this process has overwritten. A commit by this
    /// process rules that out.
    pub(super) fn acquire(&self, segment: u64) -> Result<u64> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let end = transaction
            .prepare_cached(
                "UPDATE segments SET taken = taken + 1 WHERE number = ? RETURNING length",
            )?
            .query_row([segment], |row| row.get(0))?;
        transaction.commit()?;
        Ok(end)
    }

    /// Adds an empty segment and returns its number.
    pub(super) fn new_segment(&self) -> Result<u64> {
        let writer = lock(&self.writer);
        writer.prepare_cached("INSERT INTO segments (length) VALUES (0)")?.execute([])?;
        Ok(writer.last_insert_rowid().unsigned_abs())
    }

    /// Adds blobs that are durable, and updates the ends of their segments. If another process has
    /// already added a blob, its row stays, except for damaged blobs, whose rows are replaced.
    pub(super) fn insert(
        &self,
        entries: &[Entry],
        ends: impl Iterator<Item = (u64, u64)>,
    ) -> Result<()> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let damaged = Damaged::new(&transaction)?;
        for entry in entries {
            let Slot { segment, offset, len } = entry.slot;
            let is_damaged = damaged.has(&entry.id)?;
            let insert = match is_damaged {
                // The stamp stays: a process may rely on it.
                true => {
                    "INSERT INTO blobs VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET
                     segment = excluded.segment, offset = excluded.offset,
                     length = excluded.length, form = excluded.form,
                     stamp = max(stamp, excluded.stamp)"
                }
                false => "INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?, ?, ?)",
            };
            // No collection has run.
            let CollectionNumber(stamp) = CollectionNumber::FIRST;
            let row = (entry.id.as_bytes(), segment, offset, len, PLAIN, stamp);
            transaction.prepare_cached(insert)?.execute(row)?;
            if is_damaged {
                let delete = "DELETE FROM damaged WHERE id = ?";
                transaction.prepare_cached(delete)?.execute([entry.id.as_bytes()])?;
            }
        }
        for (segment, end) in ends {
            transaction
                .prepare_cached("UPDATE segments SET length = max(length, ?) WHERE number = ?")?
                .execute((end, segment))?;
        }
        Ok(transaction.commit()?)
    }
}

/// Looks up which blobs were found damaged. Hardly ever is there one, and then no lookup is needed.
struct Damaged<'a>(Option<&'a Connection>);

impl<'a> Damaged<'a> {
    fn new(connection: &'a Connection) -> Result<Damaged<'a>> {
        let any = connection.prepare_cached("SELECT 1 FROM damaged LIMIT 1")?.exists([])?;
        Ok(Damaged(any.then_some(connection)))
    }

    fn has(&self, id: &BlobId) -> Result<bool> {
        let Some(connection) = self.0 else { return Ok(false) };
        let mut query = connection.prepare_cached("SELECT 1 FROM damaged WHERE id = ?")?;
        Ok(query.exists([id.as_bytes()])?)
    }
}

/// An item that the scan of a segment reports.
pub(super) enum Found {
    Segment { number: u64, end: u64 },
    Blob { id: BlobId, slot: Slot },
}

/// Adds one item to the index that is being rebuilt.
fn add_found(transaction: &Transaction<'_>, found: Found) -> Result<()> {
    match found {
        Found::Segment { number, end } => transaction
            .prepare_cached("INSERT INTO segments (number, length) VALUES (?, ?)")?
            .execute((number, end))?,
        Found::Blob { id, slot } => transaction
            .prepare_cached("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?, ?, ?)")?
            .execute((
                id.as_bytes(),
                slot.segment,
                slot.offset,
                slot.len,
                PLAIN,
                // The stamp was lost with the index.
                CollectionNumber::MAX.0,
            ))?,
    };
    Ok(())
}

fn find(reader: &Connection, id: &BlobId) -> Result<Option<Slot>> {
    let mut query =
        reader.prepare_cached("SELECT segment, offset, length, form FROM blobs WHERE id = ?")?;
    let row = |row: &rusqlite::Row<'_>| Ok((slot_of(row)?, row.get::<_, u8>(3)?));
    match query.query_row([id.as_bytes()], row).optional()? {
        None => Ok(None),
        Some((slot, PLAIN)) => Ok(Some(slot)),
        Some((_, form)) => {
            let reason = format!("it is stored in form {form}, which this version cannot read");
            Err(Error::corrupt(format!("blob {id}"), reason))
        }
    }
}

fn slot_of(row: &rusqlite::Row<'_>) -> rusqlite::Result<Slot> {
    Ok(Slot { segment: row.get(0)?, offset: row.get(1)?, len: row.get(2)? })
}

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().expect("no thread panics with the index locked")
}
