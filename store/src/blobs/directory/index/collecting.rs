//! What a collection does with the index: it lists the blobs, removes garbage, and finds the space
//! that nothing refers to.
//!
//! A removal moves the space of a blob to the table `freed` in the transaction that removes its row.
//! A row of `freed` goes when its space was given back to the file system. So a process that dies in
//! between leaves nothing behind that the next collection does not find. Space in `freed` is never
//! used again, so giving it back twice does no harm.

use rusqlite::{OptionalExtension, Row, Transaction, TransactionBehavior};

use super::{Index, Slot, free, highest_collection, lock, slot_of};
use crate::collection::CollectionNumber;
use crate::error::Result;
use crate::id::BlobId;
use crate::planted::{Defect, is_planted};

/// Finds the blobs whose stamp was lost: see [`CollectionNumber::MAX`].
const LOST_STAMPS: &str =
    "CREATE INDEX IF NOT EXISTS lost_stamps ON blobs (id) WHERE stamp = 9223372036854775807";

/// Blobs with lost stamps that get one in a transaction.
const LOST_BATCH: u64 = if cfg!(test) { 3 } else { 10_000 };

/// The most ranges of freed space that are read at a time.
const MAX_FREED: u32 = 1024;

/// A blob in a listing.
pub(crate) struct Listed {
    pub(crate) id: BlobId,
    /// The space of its content, in bytes.
    pub(crate) space: u64,
    pub(crate) stamp: CollectionNumber,
}

/// The row of a blob that was removed.
pub(super) struct Removed {
    pub(super) stamp: CollectionNumber,
    /// The space of its content, in bytes.
    space: u64,
}

/// Space in a segment that nothing refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct FreedSpace {
    pub(in super::super) segment: u64,
    pub(in super::super) offset: u64,
    pub(in super::super) len: u64,
}

impl Index {
    /// The highest collection that has begun to delete here.
    pub(in super::super) fn highest_collection(&self) -> Result<CollectionNumber> {
        highest_collection(&lock(&self.reader))
    }

    /// Records that a collection is about to delete. Returns `false` if a later one has. Blobs whose
    /// stamp was lost get the number of this collection.
    pub(in super::super) fn begin_collection(&self, number: CollectionNumber) -> Result<bool> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if highest_collection(&transaction)? > number {
            return Ok(false);
        }
        transaction.execute("UPDATE collection SET number = ?", [number.0])?;
        transaction.execute_batch(LOST_STAMPS)?;
        transaction.commit()?;
        drop(writer);
        while self.give_lost_stamps(number)? {}
        Ok(true)
    }

    /// Gives some of the blobs whose stamp was lost the number of this collection, unless a later one has
    /// begun. Returns whether there are more. One transaction for all of them would be too large.
    fn give_lost_stamps(&self, number: CollectionNumber) -> Result<bool> {
        // The number is written out, so that SQLite uses the index.
        const LOST: &str = "UPDATE blobs SET stamp = ?1 WHERE id IN (
            SELECT id FROM blobs WHERE stamp = 9223372036854775807 LIMIT ?2)";
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if highest_collection(&transaction)? > number {
            return Ok(false);
        }
        let given = transaction.execute(LOST, [number.0, LOST_BATCH])?;
        transaction.commit()?;
        Ok(given > 0)
    }

    /// Lists the first blobs after one, in the order of their names.
    pub(in super::super) fn list(&self, after: Option<BlobId>, most: usize) -> Result<Vec<Listed>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT id, stamp, segment, offset, length FROM blobs WHERE id > ? ORDER BY id LIMIT ?",
        )?;
        let after = after.map_or(Vec::new(), |id| id.as_bytes().to_vec());
        let row = |row: &Row<'_>| {
            let slot = Slot { segment: row.get(2)?, offset: row.get(3)?, len: row.get(4)? };
            let (id, stamp) = (BlobId::from_bytes(row.get(0)?), CollectionNumber(row.get(1)?));
            Ok(Listed { id, space: slot.end() - slot.offset, stamp })
        };
        Ok(query.query_map((after, most), row)?.collect::<rusqlite::Result<_>>()?)
    }

    /// Removes those of the blobs whose stamp is below a bound. Returns their number and the space
    /// of their contents. Removes nothing if a later collection than `number` has begun.
    pub(in super::super) fn remove(
        &self,
        ids: &[BlobId],
        number: CollectionNumber,
        below: CollectionNumber,
    ) -> Result<(u64, u64)> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let (mut blobs, mut bytes) = (0, 0);
        let is_current = highest_collection(&transaction)? == number;
        if is_current || is_planted(Defect::EarlierDeletion) {
            for id in ids {
                if let Some(removed) = remove(&transaction, id, Some(below))? {
                    (blobs, bytes) = (blobs + 1, bytes + removed.space);
                }
            }
        }
        transaction.commit()?;
        Ok((blobs, bytes))
    }

    /// Some of the space that nothing refers to, in the order of the segments, after this one.
    pub(in super::super) fn freed(&self, after: Option<FreedSpace>) -> Result<Vec<FreedSpace>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT segment, offset, length FROM freed WHERE (segment, offset) > (?, ?)
             ORDER BY segment, offset LIMIT ?",
        )?;
        let (segment, offset) = after
            .map_or((-1, -1), |after| (after.segment.cast_signed(), after.offset.cast_signed()));
        let row = |row: &Row<'_>| {
            Ok(FreedSpace { segment: row.get(0)?, offset: row.get(1)?, len: row.get(2)? })
        };
        let rows = query.query_map((segment, offset, MAX_FREED), row)?;
        Ok(rows.collect::<rusqlite::Result<_>>()?)
    }

    /// Notes that this space was given back to the file system.
    pub(in super::super) fn forget_freed(&self, all: &[FreedSpace]) -> Result<()> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for one in all {
            let delete = "DELETE FROM freed WHERE segment = ? AND offset = ?";
            transaction.prepare_cached(delete)?.execute((one.segment, one.offset))?;
        }
        Ok(transaction.commit()?)
    }

    /// The segments without a blob.
    pub(in super::super) fn empty_segments(&self) -> Result<Vec<u64>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT number FROM segments WHERE length > 0
             AND NOT EXISTS (SELECT 1 FROM groups WHERE segment = number)",
        )?;
        let rows = query.query_map([], |row| row.get(0))?;
        Ok(rows.collect::<rusqlite::Result<_>>()?)
    }

    /// The end of a segment's content; `None` if the index does not have the segment.
    pub(in super::super) fn segment_end(&self, number: u64) -> Result<Option<u64>> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached("SELECT length FROM segments WHERE number = ?")?;
        Ok(query.query_row([number], |row| row.get(0)).optional()?)
    }

    /// Whether the index has a segment.
    pub(in super::super) fn has_segment(&self, number: u64) -> Result<bool> {
        let reader = lock(&self.reader);
        Ok(reader.prepare_cached("SELECT 1 FROM segments WHERE number = ?")?.exists([number])?)
    }

    /// Removes a segment that no process appends to, if it has no blob. Returns whether it did. Its
    /// number is not used again.
    pub(in super::super) fn remove_segment(&self, number: u64) -> Result<bool> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let delete = "DELETE FROM segments WHERE number = ?1
                      AND NOT EXISTS (SELECT 1 FROM groups WHERE segment = ?1)";
        let is_removed = transaction.prepare_cached(delete)?.execute([number])? > 0;
        if is_removed {
            let delete = "DELETE FROM freed WHERE segment = ?";
            transaction.prepare_cached(delete)?.execute([number])?;
        }
        transaction.commit()?;
        Ok(is_removed)
    }
}

/// Removes a blob if its stamp is below a bound, or in any case if there is none. The space of its
/// content is free then, and that of its group's record if it was the last blob of the group.
pub(super) fn remove(
    transaction: &Transaction<'_>,
    id: &BlobId,
    below: Option<CollectionNumber>,
) -> Result<Option<Removed>> {
    let delete = "DELETE FROM blobs WHERE id = ? AND (?2 IS NULL OR stamp < ?2)
                  RETURNING segment, offset, length, stamp, record";
    let row =
        |row: &Row<'_>| Ok((slot_of(row)?, CollectionNumber(row.get(3)?), row.get::<_, u64>(4)?));
    let below = below.map(|below| below.0);
    let found = transaction.prepare_cached(delete)?.query_row((id.as_bytes(), below), row);
    let Some((slot, stamp, record)) = found.optional()? else { return Ok(None) };
    free(transaction, slot)?;
    let delete = "DELETE FROM damaged WHERE id = ?";
    transaction.prepare_cached(delete)?.execute([id.as_bytes()])?;
    let count = "UPDATE groups SET blobs = blobs - 1 WHERE segment = ? AND record = ?
                 RETURNING blobs, length";
    let (left, len): (i64, u32) = transaction
        .prepare_cached(count)?
        .query_row((slot.segment, record), |row| Ok((row.get(0)?, row.get(1)?)))?;
    if left == 0 {
        let delete = "DELETE FROM groups WHERE segment = ? AND record = ?";
        transaction.prepare_cached(delete)?.execute((slot.segment, record))?;
        free(transaction, Slot { segment: slot.segment, offset: record, len })?;
    }
    Ok(Some(Removed { stamp, space: slot.end() - slot.offset }))
}
