//! Which space of the log holds fragments, so that the rest can be given back. A bad fragment holds
//! its space, too.

use rusqlite::{OptionalExtension, Row};

use super::{LogPosition, Table, lock};
use crate::error::Result;

impl Table {
    /// Whether a fragment is at this position.
    pub(in super::super) fn is_at(&self, place: LogPosition) -> Result<bool> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached("SELECT 1 FROM fragments WHERE place = ?")?;
        Ok(query.exists([place.number()])?)
    }

    /// The gap around a position in which there is no fragment, not even a bad one: from the end of
    /// the block before it to the start of the one after it; `None` if there is no later one.
    pub(in super::super) fn gap(&self, place: LogPosition) -> Result<(u64, Option<u64>)> {
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

    /// Whether a segment holds no fragment, not even a bad one.
    pub(in super::super) fn is_empty(&self, segment: u64) -> Result<bool> {
        let reader = lock(&self.reader);
        let (first, end) = (LogPosition { segment, offset: 0 }, segment_end_number(segment));
        let mut query = reader
            .prepare_cached("SELECT 1 FROM fragments WHERE place >= ? AND place < ? LIMIT 1")?;
        Ok(!query.exists([first.number(), end])?)
    }

    /// Removes an empty segment. Its number is never used again.
    pub(in super::super) fn forget_segment(&self, segment: u64) -> Result<()> {
        let writer = lock(&self.writer);
        writer.prepare_cached("DELETE FROM segments WHERE number = ?")?.execute([segment])?;
        Ok(())
    }
}

/// The number of the first position after a segment.
fn segment_end_number(segment: u64) -> i64 {
    LogPosition { segment: segment + 1, offset: 0 }.number()
}
