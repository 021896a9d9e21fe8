//! Where each blob is: a database beside the segments.
//!
//! A row is inserted when its blob is durable, and seen by others when it is durable itself, so
//! whoever finds a blob here may rely on it. All of it can be made again from the segments, and is
//! when the file is missing.

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior};

use super::group::Entry;
use crate::durable::database;
use crate::durable::segment::{ALIGNMENT, SEGMENT_SIZE};
use crate::error::Result;
use crate::id::BlobId;

const FILE: &str = "index.db";

/// The version of the tables, kept in the database's `user_version`.
const VERSION: u64 = 1;

/// `docs/formats.md` explains every column.
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
    length  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
";

/// Segments to look at for one that can be continued.
const CANDIDATES: u32 = 64;

/// The place of a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) segment: u64,
    pub(super) offset: u64,
    pub(super) len: u32,
}

impl Slot {
    /// The end of its last block.
    pub(super) fn end(&self) -> u64 {
        (self.offset + u64::from(self.len)).next_multiple_of(ALIGNMENT as u64)
    }
}

pub(super) struct Index {
    /// Apart from the writer: to find a blob must not wait for another's sync.
    reader: Mutex<Connection>,
    writer: Mutex<Connection>,
}

impl Index {
    /// Opens the index. If it does not exist it is made, with what `recover` finds in the segments.
    pub(super) fn open(
        repository: &Path,
        recover: impl FnOnce(&mut dyn FnMut(Found) -> Result<()>) -> Result<()>,
    ) -> Result<Self> {
        let path = repository.join(FILE);
        database::make(&path, VERSION, |transaction| {
            transaction.execute_batch(TABLES)?;
            recover(&mut |found| add_found(transaction, found))
        })?;
        let (writer, reader) = database::open(&path, VERSION)?;
        Ok(Self { reader: Mutex::new(reader), writer: Mutex::new(writer) })
    }

    /// Where the blob is, if it is there.
    pub(super) fn find(&self, id: &BlobId) -> Result<Option<Slot>> {
        find(&lock(&self.reader), id)
    }

    /// Where each of these blobs is.
    pub(super) fn find_all<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a BlobId>,
    ) -> Result<Vec<Option<Slot>>> {
        let mut reader = lock(&self.reader);
        // One look for all of them.
        let transaction = reader.transaction()?;
        ids.into_iter().map(|id| find(&transaction, id)).collect()
    }

    /// Segments that have room, the oldest first.
    pub(super) fn with_room(&self) -> Result<Vec<u64>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT number FROM segments WHERE length < ? ORDER BY number LIMIT ?",
        )?;
        let rows = query.query_map((SEGMENT_SIZE, CANDIDATES), |row| row.get(0))?;
        Ok(rows.collect::<rusqlite::Result<_>>()?)
    }

    /// Takes note that this process appends to a segment, which it has locked, and returns where the
    /// content ends.
    ///
    /// The change is more than a note. The last holder may have been killed in the middle of a commit
    /// that nobody has seen, but that the database would find valid when it is next recovered: its blobs
    /// would be known when others lie in their place. A commit of ours ends that.
    pub(super) fn take(&self, segment: u64) -> Result<u64> {
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

    /// Announces an empty segment.
    pub(super) fn new_segment(&self) -> Result<u64> {
        let writer = lock(&self.writer);
        writer.prepare_cached("INSERT INTO segments (length) VALUES (0)")?.execute([])?;
        Ok(writer.last_insert_rowid().unsigned_abs())
    }

    /// Makes durable blobs known, and where their segments end now. If another process was faster with a
    /// blob, its own counts, unless it is `damaged`.
    pub(super) fn insert(
        &self,
        entries: &[Entry],
        damaged: &HashSet<BlobId>,
        ends: impl Iterator<Item = (u64, u64)>,
    ) -> Result<()> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for entry in entries {
            let Slot { segment, offset, len } = entry.slot;
            let insert = match damaged.contains(&entry.id) {
                true => "INSERT OR REPLACE INTO blobs VALUES (?, ?, ?, ?)",
                false => "INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?)",
            };
            let row = (entry.id.as_bytes(), segment, offset, len);
            transaction.prepare_cached(insert)?.execute(row)?;
        }
        for (segment, end) in ends {
            transaction
                .prepare_cached("UPDATE segments SET length = max(length, ?) WHERE number = ?")?
                .execute((end, segment))?;
        }
        Ok(transaction.commit()?)
    }
}

/// Something that a segment holds.
pub(super) enum Found {
    Segment { number: u64, end: u64 },
    Blob { id: BlobId, slot: Slot },
}

fn add_found(transaction: &Transaction<'_>, found: Found) -> Result<()> {
    match found {
        Found::Segment { number, end } => transaction
            .prepare_cached("INSERT INTO segments (number, length) VALUES (?, ?)")?
            .execute((number, end))?,
        Found::Blob { id, slot } => transaction
            .prepare_cached("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?)")?
            .execute((id.as_bytes(), slot.segment, slot.offset, slot.len))?,
    };
    Ok(())
}

fn find(reader: &Connection, id: &BlobId) -> Result<Option<Slot>> {
    let mut query =
        reader.prepare_cached("SELECT segment, offset, length FROM blobs WHERE id = ?")?;
    Ok(query.query_row([id.as_bytes()], slot_of).optional()?)
}

fn slot_of(row: &rusqlite::Row<'_>) -> rusqlite::Result<Slot> {
    Ok(Slot { segment: row.get(0)?, offset: row.get(1)?, len: row.get(2)? })
}

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().expect("no thread panics while it uses the index")
}
