//! The index: a database beside the segments that maps each blob to its position.
//!
//! A row is inserted when its blob is durable, and other handles see the row when it is durable
//! itself. So a process that finds a blob in the index can rely on it. If the file is missing, the
//! index is rebuilt from the segments.

mod collecting;

use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior};

pub(super) use self::collecting::FreedSpace;
pub(crate) use self::collecting::Listed;
use super::group::{Entry, Group};
use crate::collection::CollectionNumber;
use crate::durable::database;
use crate::durable::segment::{ALIGNMENT, SEGMENT_SIZE};
use crate::error::{Error, Result};
use crate::id::BlobId;

/// The name of the database's file.
const FILE_NAME: &str = "index.db";

/// The version of the tables, stored in the database's `user_version`.
const VERSION: u64 = 3;

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
    stamp   INTEGER NOT NULL,
    record  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE groups (
    segment INTEGER NOT NULL,
    record  INTEGER NOT NULL,
    length  INTEGER NOT NULL,
    blobs   INTEGER NOT NULL,
    PRIMARY KEY (segment, record)
) STRICT, WITHOUT ROWID;

CREATE TABLE freed (
    segment INTEGER NOT NULL,
    offset  INTEGER NOT NULL,
    length  INTEGER NOT NULL,
    PRIMARY KEY (segment, offset)
) STRICT, WITHOUT ROWID;

CREATE TABLE damaged (
    id BLOB NOT NULL PRIMARY KEY CHECK (length(id) = 32)
) STRICT, WITHOUT ROWID;

CREATE TABLE collection (number INTEGER NOT NULL) STRICT;
INSERT INTO collection VALUES (0);
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

/// A blob as the index has it.
#[derive(Clone, Copy)]
pub(super) struct Stored {
    pub(super) slot: Slot,
    pub(super) stamp: CollectionNumber,
    /// Whether a process has found the blob damaged.
    pub(super) is_damaged: bool,
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
        Ok(Self { reader: Mutex::new(reader), writer: Mutex::new(writer) })
    }

    /// Returns the slot of a blob, or `None` if the blob is not in the index.
    pub(super) fn find(&self, id: &BlobId) -> Result<Option<Slot>> {
        Ok(find(&lock(&self.reader), id)?.map(|(slot, _)| slot))
    }

    /// Returns what the index has of each blob, or `None` for a blob that is not in the index.
    pub(super) fn find_all<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a BlobId>,
    ) -> Result<Vec<Option<Stored>>> {
        let mut reader = lock(&self.reader);
        // All lookups see the same state.
        let transaction = reader.transaction()?;
        let damaged = Damaged::new(&transaction)?;
        let find = |id| match find(&transaction, id)? {
            Some((slot, stamp)) => Ok(Some(Stored { slot, stamp, is_damaged: damaged.has(id)? })),
            None => Ok(None),
        };
        ids.into_iter().map(find).collect()
    }

    /// Records that a blob is damaged, for all processes. A put of such a blob replaces it. Does
    /// nothing if the blob was deleted since it was read.
    pub(super) fn mark_damaged(&self, id: &BlobId) -> Result<()> {
        let writer = lock(&self.writer);
        let insert = "INSERT OR IGNORE INTO damaged SELECT id FROM blobs WHERE id = ?";
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
    ///
    /// Returns `None` if a collection has removed the segment.
    pub(super) fn acquire(&self, segment: u64) -> Result<Option<u64>> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let end = transaction
            .prepare_cached(
                "UPDATE segments SET taken = taken + 1 WHERE number = ? RETURNING length",
            )?
            .query_row([segment], |row| row.get(0))
            .optional()?;
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
    /// already added a blob, its row stays, except for damaged blobs, whose rows are replaced. The
    /// stamps become at least `stamp`.
    ///
    /// `unused` are blobs that this process has written and that nothing refers to. Their space and
    /// that of other blobs that are not used any more is [reclaimed](Self::freed) later. So `ends` must
    /// not precede the end of an unused blob.
    pub(super) fn insert(
        &self,
        entries: &[Entry],
        unused: &[Entry],
        ends: impl Iterator<Item = (u64, u64)>,
        stamp: CollectionNumber,
    ) -> Result<()> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let stamp = stamp.max(highest_collection(&transaction)?);
        let damaged = Damaged::new(&transaction)?;
        for entry in entries {
            let replaced = match damaged.has(&entry.id)? {
                true => collecting::remove(&transaction, &entry.id, None)?,
                false => None,
            };
            // The stamp stays: a process may rely on it.
            let stamp = stamp.max(replaced.map_or(stamp, |replaced| replaced.stamp));
            if !add(&transaction, &entry.id, entry.slot, entry.group, stamp)? {
                // Another process has stored the blob.
                raise(&transaction, &entry.id, stamp)?;
                // Or this one has, in a transaction whose success it did not hear of.
                if find(&transaction, &entry.id)?.is_none_or(|(slot, _)| slot != entry.slot) {
                    free(&transaction, entry.slot)?;
                }
            }
        }
        unused.iter().try_for_each(|entry| free(&transaction, entry.slot))?;
        for (segment, end) in ends {
            let update = "UPDATE segments SET length = max(length, ?) WHERE number = ?";
            if transaction.prepare_cached(update)?.execute((end, segment))? == 0 {
                // Its file is removed sooner or later.
                let reason = "the index does not have it any more";
                return Err(Error::corrupt(format!("segment {segment}"), reason));
            }
        }
        Ok(transaction.commit()?)
    }

    /// Raises the stamps of blobs to `stamp`, durably. Returns which of the blobs are still there:
    /// no collection below `stamp` deletes those.
    pub(super) fn raise_stamps<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a BlobId>,
        stamp: CollectionNumber,
    ) -> Result<Vec<bool>> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let stamp = stamp.max(highest_collection(&transaction)?);
        let raised = ids.into_iter().map(|id| raise(&transaction, id, stamp));
        let raised = raised.collect::<Result<_>>()?;
        transaction.commit()?;
        Ok(raised)
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
    Blob { id: BlobId, slot: Slot, group: Group },
}

/// Adds one item to the index that is being rebuilt.
fn add_found(transaction: &Transaction<'_>, found: Found) -> Result<()> {
    match found {
        Found::Segment { number, end } => transaction
            .prepare_cached("INSERT INTO segments (number, length) VALUES (?, ?)")?
            .execute((number, end))?,
        // The stamp was lost with the index.
        Found::Blob { id, slot, group } => {
            add(transaction, &id, slot, group, CollectionNumber::MAX)?;
            0
        }
    };
    Ok(())
}

/// Adds a blob and counts it in its group. Returns `false`, and adds nothing, if it is there.
fn add(
    transaction: &Transaction<'_>,
    id: &BlobId,
    slot: Slot,
    group: Group,
    stamp: CollectionNumber,
) -> Result<bool> {
    let Slot { segment, offset, len } = slot;
    let insert = "INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?, ?, ?, ?)";
    let row = (id.as_bytes(), segment, offset, len, PLAIN, stamp.0, group.record);
    if transaction.prepare_cached(insert)?.execute(row)? == 0 {
        return Ok(false);
    }
    let count = "INSERT INTO groups VALUES (?, ?, ?, 1)
                 ON CONFLICT (segment, record) DO UPDATE SET blobs = blobs + 1";
    transaction.prepare_cached(count)?.execute((segment, group.record, group.record_len))?;
    Ok(true)
}

/// Raises the stamp of a blob. Returns whether the blob is there.
fn raise(transaction: &Transaction<'_>, id: &BlobId, stamp: CollectionNumber) -> Result<bool> {
    let update = "UPDATE blobs SET stamp = max(stamp, ?) WHERE id = ?";
    Ok(transaction.prepare_cached(update)?.execute((stamp.0, id.as_bytes()))? > 0)
}

/// Notes that nothing refers to the content of a slot any more.
fn free(transaction: &Transaction<'_>, slot: Slot) -> Result<()> {
    let insert = "INSERT OR IGNORE INTO freed VALUES (?, ?, ?)";
    let row = (slot.segment, slot.offset, slot.end() - slot.offset);
    transaction.prepare_cached(insert)?.execute(row)?;
    Ok(())
}

/// The highest collection that has begun to delete here.
fn highest_collection(connection: &Connection) -> Result<CollectionNumber> {
    let mut query = connection.prepare_cached("SELECT number FROM collection")?;
    Ok(CollectionNumber(query.query_row([], |row| row.get(0))?))
}

fn find(reader: &Connection, id: &BlobId) -> Result<Option<(Slot, CollectionNumber)>> {
    let mut query = reader
        .prepare_cached("SELECT segment, offset, length, form, stamp FROM blobs WHERE id = ?")?;
    let row = |row: &rusqlite::Row<'_>| {
        Ok((slot_of(row)?, row.get::<_, u8>(3)?, CollectionNumber(row.get(4)?)))
    };
    match query.query_row([id.as_bytes()], row).optional()? {
        None => Ok(None),
        Some((slot, PLAIN, stamp)) => Ok(Some((slot, stamp))),
        Some((_, form, _)) => {
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
