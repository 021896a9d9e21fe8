//! The table of a peer's fragments and their positions: a database beside the log.
//!
//! The table lags behind the log. A fragment is durable when it is in the log, and gets into the
//! table later, with many others. For each segment the table has the offset up to which it knows
//! the segment. When the peer starts, it reads the rest of each segment. So in each segment the
//! table knows all fragments up to some offset, less the deleted ones.
//!
//! A deletion removes the row before the block.
//!
//! A fragment that the scrub has found bad keeps its row, marked as `bad`, and with it its block.
//! It counts as missing: it is in no answer and in no count. The row and the block go when the
//! fragment is stored again or deleted.

mod pages;
mod scrub;
mod space;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};

use super::group::{KnownFragment, LogPosition};
use super::running_time::{Elapsed, RunningTime};
use crate::cluster::protocol::{FragmentId, StampBound};
use crate::collection::CollectionNumber;
use crate::durable::database;
use crate::encoding::Seal;
use crate::encoding::fragment::Description;
use crate::error::Result;
use crate::id::BlobId;

pub(super) use self::scrub::ScrubRecord;

pub(super) const DATABASE: &str = "fragments.db";

/// The version of the tables. Versions 1 to 4 were never released.
const VERSION: u64 = 5;

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
    touched     INTEGER NOT NULL,
    stamp       INTEGER NOT NULL,
    bad         INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE INDEX fragments_by_blob ON fragments (blob);
CREATE INDEX records ON fragments (blob) WHERE kind = 1;
CREATE INDEX bad_fragments ON fragments (blob) WHERE bad = 1;

CREATE TABLE clock (
    running INTEGER NOT NULL
) STRICT;
INSERT INTO clock VALUES (0);

CREATE TABLE scrub (
    started  INTEGER,
    place    INTEGER NOT NULL,
    until    INTEGER NOT NULL,
    total    INTEGER NOT NULL,
    done     INTEGER NOT NULL,
    unread   INTEGER NOT NULL,
    scrubbed INTEGER,
    bad      INTEGER NOT NULL
) STRICT;
INSERT INTO scrub VALUES (NULL, 0, 0, 0, 0, 0, NULL, 0);
";

/// The database of fragments.
pub(super) struct Table {
    /// Separate from the writer: a lookup must not wait for a sync.
    reader: Mutex<Connection>,
    writer: Mutex<Connection>,
    /// The clock of the column `touched`.
    time: RunningTime,
}

/// The fragments that a deletion has removed from the table.
#[derive(Default)]
pub(super) struct Deleted {
    /// Fragments that were known until then.
    pub(super) known: Vec<KnownFragment>,
    /// Fragments that were bad, and counted as missing already.
    pub(super) bad: Vec<KnownFragment>,
}

/// The fragments of a blob.
#[derive(Default)]
pub(super) struct Found {
    pub(super) known: Vec<KnownFragment>,
    /// Whether one of them is old enough to be renewed on request.
    pub(super) is_old: bool,
}

impl Found {
    /// Whether a fragment has a lower stamp.
    pub(super) fn is_below(&self, stamp: CollectionNumber) -> bool {
        self.known.iter().any(|one| one.stamp < stamp)
    }
}

/// Creates the database, unless it exists.
pub(super) fn make(directory: &Path) -> Result<()> {
    database::make(&directory.join(DATABASE), VERSION, |transaction| {
        Ok(transaction.execute_batch(TABLES)?)
    })
}

impl Table {
    /// Opens the table. Its clock advances with `elapsed`.
    pub(super) fn open(directory: &Path, elapsed: Elapsed) -> Result<Table> {
        let (writer, reader) = database::open(&directory.join(DATABASE), VERSION)?;
        let base = writer.query_row("SELECT running FROM clock", [], |row| row.get(0))?;
        let time = RunningTime::new(base, elapsed);
        Ok(Table { reader: Mutex::new(reader), writer: Mutex::new(writer), time })
    }

    /// The clock of the column `touched`.
    fn now(&self) -> i64 {
        self.time.now().cast_signed()
    }

    /// Writes the clock with another change, if the table has an old time.
    fn save_time(&self, transaction: &Transaction<'_>) -> Result<()> {
        if let Some(now) = self.time.unsaved() {
            set_time(transaction, now)?;
            // If the commit fails, the table has an older time, which is harmless.
            self.time.set_saved(now);
        }
        Ok(())
    }

    /// Writes the clock, so that the next process continues at this time.
    pub(super) fn close(&self) -> Result<()> {
        set_time(&lock(&self.writer), self.time.now())
    }

    /// The number of fragments, and the bytes that they take on the disk.
    pub(super) fn count(&self) -> Result<(u64, u64)> {
        let query = "SELECT count(*), coalesce(sum(space), 0) FROM fragments WHERE bad = 0";
        Ok(lock(&self.reader).query_row(query, [], |row| Ok((row.get(0)?, row.get(1)?)))?)
    }

    /// The offset up to which a segment is known; `None` if it is not known at all.
    pub(super) fn segment_end(&self, number: u64) -> Result<Option<u64>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached("SELECT length FROM segments WHERE number = ?")?;
        Ok(query.query_row([number], |row| row.get(0)).optional()?)
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
            "SELECT place, number, description, stamp, touched FROM fragments
             WHERE blob = ? AND bad = 0",
        )?;
        let old = self.now() - RENEWAL_SECONDS;
        let mut of_blob = |blob: &BlobId| {
            let mut rows = query.query([blob.as_bytes()])?;
            let mut found = Found::default();
            while let Some(row) = rows.next()? {
                found.known.extend(known(row)?);
                found.is_old |= row.get::<_, i64>(4)? < old;
            }
            Ok(found)
        };
        blobs.iter().map(&mut of_blob).collect()
    }

    /// Adds fragments of the log, sets the offsets up to which the segments are known, and removes
    /// the rows at the positions in `replaced`. Also removes the bad ones of the added fragments,
    /// and returns these.
    pub(super) fn insert(
        &self,
        all: &[Arc<KnownFragment>],
        ends: &BTreeMap<u64, u64>,
        replaced: &[LogPosition],
    ) -> Result<Vec<KnownFragment>> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let (mut bad, now) = (Vec::new(), self.now());
        for one in all {
            let own = remove_bad(&transaction, one)?;
            insert(&transaction, one, own.iter().map(|one| one.stamp).max(), now)?;
            bad.extend(own);
        }
        // A replaced fragment may be among the added ones.
        for place in replaced {
            pass_on_stamp(&transaction, *place)?;
            remove(&transaction, *place)?;
        }
        ends.iter().try_for_each(|(number, end)| set_end(&transaction, *number, *end))?;
        self.save_time(&transaction)?;
        transaction.commit()?;
        Ok(bad)
    }

    /// Adds the fragments that were found at the end of a segment. Later ones replace earlier ones.
    pub(super) fn recover(&self, found: &[KnownFragment], number: u64, end: u64) -> Result<()> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for one in found {
            let others = {
                let mut query = transaction.prepare_cached(
                    "SELECT place, number, description, stamp FROM fragments WHERE blob = ?",
                )?;
                read_rows(query.query([one.description.blob.as_bytes()])?)?
            };
            let mut stamp = None;
            for other in others.iter().filter(|other| other.is_like(one)) {
                remove(&transaction, other.place)?;
                stamp = stamp.max(Some(other.stamp));
            }
            insert(&transaction, one, stamp, self.now())?;
        }
        set_end(&transaction, number, end)?;
        Ok(transaction.commit()?)
    }

    /// Resets the idle timers of fragments, raises their stamps, and replaces their seals.
    pub(super) fn update(&self, all: &[(FragmentId, Seal, CollectionNumber)]) -> Result<()> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for (id, seal, stamp) in all {
            let found = {
                let mut query = transaction.prepare_cached(
                    "SELECT place, number, description, stamp FROM fragments
                     WHERE blob = ? AND number = ?",
                )?;
                read_rows(query.query(params![id.blob.as_bytes(), id.index])?)?
            };
            for one in found.into_iter().filter(|one| one.description.id() == id.encoding) {
                let mut update = transaction.prepare_cached(
                    "UPDATE fragments SET touched = ?, stamp = ?, description = ? WHERE place = ?",
                )?;
                let stamp = one.stamp.max(*stamp);
                let description = one.description.with_seal(*seal).to_bytes();
                update.execute(params![self.now(), stamp.0, description, one.place.number()])?;
            }
        }
        self.save_time(&transaction)?;
        Ok(transaction.commit()?)
    }

    /// Resets the idle timers of all fragments of these blobs, and raises their stamps.
    pub(super) fn renew(&self, blobs: &[BlobId], stamp: CollectionNumber) -> Result<()> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        {
            let mut update = transaction.prepare_cached(
                "UPDATE fragments SET touched = ?, stamp = max(stamp, ?) WHERE blob = ?",
            )?;
            for blob in blobs {
                update.execute(params![self.now(), stamp.0, blob.as_bytes()])?;
            }
        }
        self.save_time(&transaction)?;
        Ok(transaction.commit()?)
    }

    /// Removes fragments that no client has stored or renewed for `idle` seconds, and whose stamp
    /// is within a bound. Returns the removed ones. The removal is durable when this returns.
    pub(super) fn delete(
        &self,
        all: &[FragmentId],
        idle: u32,
        bound: StampBound,
    ) -> Result<Deleted> {
        let until = self.idle_since(idle);
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut deleted = Deleted::default();
        for id in all {
            for (one, is_bad) in removable(&transaction, id, until)? {
                if is_below(&one, bound.below) {
                    remove(&transaction, one.place)?;
                    if is_bad { &mut deleted.bad } else { &mut deleted.known }.push(one);
                } else if one.stamp == CollectionNumber::MAX {
                    // Whoever relies on it began before this collection.
                    set_stamp(&transaction, one.place, bound.number)?;
                }
            }
        }
        self.save_time(&transaction)?;
        transaction.commit()?;
        Ok(deleted)
    }

    /// The fragments that [`Table::delete`] would remove.
    pub(super) fn deletable(
        &self,
        all: &[FragmentId],
        idle: u32,
        below: CollectionNumber,
    ) -> Result<Vec<KnownFragment>> {
        let (until, reader) = (self.idle_since(idle), lock(&self.reader));
        let mut found = Vec::new();
        for id in all {
            let own = removable(&reader, id, until)?.into_iter().map(|(one, _)| one);
            found.extend(own.filter(|one| is_below(one, below)));
        }
        Ok(found)
    }

    /// The latest age of a fragment that was idle for so long.
    fn idle_since(&self, idle: u32) -> i64 {
        match idle {
            0 => i64::MAX,
            seconds => self.now() - i64::from(seconds) - RENEWAL_SECONDS,
        }
    }
}

/// The fragments with this id that were last touched by `until`, and whether each of them is bad.
fn removable(
    connection: &Connection,
    FragmentId { blob, encoding, index }: &FragmentId,
    until: i64,
) -> Result<Vec<(KnownFragment, bool)>> {
    let mut query = connection.prepare_cached(
        "SELECT place, number, description, stamp, bad FROM fragments
         WHERE blob = ? AND number = ? AND touched <= ?",
    )?;
    let mut rows = query.query(params![blob.as_bytes(), index, until])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        let is_bad: bool = row.get(4)?;
        let one = known(row)?.filter(|one| one.description.id() == *encoding);
        found.extend(one.map(|one| (one, is_bad)));
    }
    Ok(found)
}

/// Whether the stamp of a fragment is below a bound.
fn is_below(one: &KnownFragment, below: CollectionNumber) -> bool {
    below == CollectionNumber::MAX || one.stamp < below
}

fn set_stamp(
    transaction: &Transaction<'_>,
    place: LogPosition,
    stamp: CollectionNumber,
) -> Result<()> {
    let mut update =
        transaction.prepare_cached("UPDATE fragments SET stamp = ? WHERE place = ?")?;
    update.execute(params![stamp.0, place.number()])?;
    Ok(())
}

/// Adds a fragment. Its stamp is at least that of the same fragment in the table before.
fn insert(
    transaction: &Transaction<'_>,
    one: &KnownFragment,
    stamp: Option<CollectionNumber>,
    now: i64,
) -> Result<()> {
    let mut insert = transaction.prepare_cached(
        "INSERT OR REPLACE INTO fragments
         (place, blob, number, kind, space, description, touched, stamp)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    )?;
    insert.execute(params![
        one.place.number(),
        one.description.blob.as_bytes(),
        one.index,
        one.description.kind() as u8,
        one.space(),
        one.description.to_bytes(),
        now,
        stamp.map_or(one.stamp, |stamp| stamp.max(one.stamp)).0,
    ])?;
    Ok(())
}

/// Raises the stamps of all fragments with the blob and the index of the one at this position, which
/// is about to be removed, to its stamp: one of them replaces it. A question may have raised its stamp
/// since the replacement was put.
fn pass_on_stamp(transaction: &Transaction<'_>, place: LogPosition) -> Result<()> {
    let mut query =
        transaction.prepare_cached("SELECT blob, number, stamp FROM fragments WHERE place = ?")?;
    let row = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
    let found: Option<([u8; 32], u8, i64)> = query.query_row([place.number()], row).optional()?;
    let Some((blob, index, stamp)) = found else { return Ok(()) };
    let mut update = transaction.prepare_cached(
        "UPDATE fragments SET stamp = max(stamp, ?) WHERE blob = ? AND number = ?",
    )?;
    update.execute(params![stamp, blob, index])?;
    Ok(())
}

fn remove(transaction: &Transaction<'_>, place: LogPosition) -> Result<()> {
    let mut delete = transaction.prepare_cached("DELETE FROM fragments WHERE place = ?")?;
    delete.execute([place.number()])?;
    Ok(())
}

/// Removes the bad ones of a fragment that was stored again.
fn remove_bad(transaction: &Transaction<'_>, stored: &KnownFragment) -> Result<Vec<KnownFragment>> {
    let mut bad = {
        let mut query = transaction.prepare_cached(
            "SELECT place, number, description, stamp FROM fragments WHERE blob = ? AND bad = 1",
        )?;
        read_rows(query.query([stored.description.blob.as_bytes()])?)?
    };
    bad.retain(|one| one.is_like(stored));
    bad.iter().try_for_each(|one| remove(transaction, one.place))?;
    Ok(bad)
}

fn set_time(connection: &Connection, time: u64) -> Result<()> {
    let mut update = connection.prepare_cached("UPDATE clock SET running = max(running, ?)")?;
    update.execute([time.cast_signed()])?;
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

/// Reads a row that begins with place, number, description and stamp.
fn known(row: &Row<'_>) -> rusqlite::Result<Option<KnownFragment>> {
    let (place, index) = (LogPosition::from_number(row.get(0)?), row.get(1)?);
    let stamp = CollectionNumber(row.get(3)?);
    match Description::from_bytes(row.get_ref(2)?.as_blob()?) {
        Ok((description, _)) => Ok(Some(KnownFragment { description, index, place, stamp })),
        Err(error) => {
            tracing::error!(%error, "ignored an invalid row of the table of fragments");
            Ok(None)
        }
    }
}

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().expect("no thread panics while it uses the table")
}
