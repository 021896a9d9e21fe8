//! What the table knows of the scrub: the progress of its round, and the bad fragments.

use rusqlite::{Row, TransactionBehavior, params};

use super::{KnownFragment, LogPosition, Table, known, lock};
use crate::error::Result;

/// The progress of the scrub. It may lag behind: what was examined since is examined again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct ScrubRecord {
    /// When the last round began, in seconds since 1970; `None` before the first round.
    pub(in super::super) started: Option<u64>,
    /// The number of the last position that was examined.
    pub(in super::super) place: i64,
    /// The number of the last position of the round. The round is over when it is examined.
    pub(in super::super) until: i64,
    /// Bytes of space of the fragments when the round began.
    pub(in super::super) total: u64,
    /// Bytes of space of the fragments that were examined.
    pub(in super::super) done: u64,
    /// Fragments of the round that could not be examined.
    pub(in super::super) unread: u64,
    /// When the last complete round ended, in seconds since 1970.
    pub(in super::super) scrubbed: Option<u64>,
    /// All bad fragments that were ever found.
    pub(in super::super) bad: u64,
}

/// Fragments in the order of the log.
#[derive(Default)]
pub(in super::super) struct LogPage {
    pub(in super::super) all: Vec<KnownFragment>,
    /// The number of the last position in the page; `None` if the page is empty.
    pub(in super::super) last: Option<i64>,
}

impl Table {
    /// The progress of the scrub.
    pub(in super::super) fn scrub(&self) -> Result<ScrubRecord> {
        let query = "SELECT started, place, until, total, done, unread, scrubbed, bad FROM scrub";
        let read = |row: &Row<'_>| {
            Ok(ScrubRecord {
                started: row.get(0)?,
                place: row.get(1)?,
                until: row.get(2)?,
                total: row.get(3)?,
                done: row.get(4)?,
                unread: row.get(5)?,
                scrubbed: row.get(6)?,
                bad: row.get(7)?,
            })
        };
        Ok(lock(&self.reader).query_row(query, [], read)?)
    }

    /// Writes the progress of the scrub, except the number of bad fragments.
    pub(in super::super) fn save_scrub(&self, record: &ScrubRecord) -> Result<()> {
        let ScrubRecord { started, place, until, total, done, unread, scrubbed, bad: _ } = record;
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        transaction.execute(
            "UPDATE scrub SET started = ?, place = ?, until = ?, total = ?, done = ?, unread = ?,
             scrubbed = ?",
            params![started, place, until, total, done, unread, scrubbed],
        )?;
        self.save_time(&transaction)?;
        Ok(transaction.commit()?)
    }

    /// The number of the last position that holds a fragment; 0 if there is none.
    pub(in super::super) fn last_place(&self) -> Result<i64> {
        let query = "SELECT coalesce(max(place), 0) FROM fragments";
        Ok(lock(&self.reader).query_row(query, [], |row| row.get(0))?)
    }

    /// The first `most` fragments after one position and up to another, in the order of the log.
    pub(in super::super) fn log_page(
        &self,
        after: i64,
        until: i64,
        most: usize,
    ) -> Result<LogPage> {
        let reader = lock(&self.reader);
        let mut query = reader.prepare_cached(
            "SELECT place, number, description, stamp FROM fragments
             WHERE place > ? AND place <= ? AND bad = 0 ORDER BY place LIMIT ?",
        )?;
        let mut rows = query.query(params![after, until, most])?;
        let mut page = LogPage::default();
        while let Some(row) = rows.next()? {
            page.last = Some(row.get(0)?);
            page.all.extend(known(row)?);
        }
        Ok(page)
    }

    /// Marks as bad the fragments at these positions that are known. Returns their positions. The
    /// change is durable when this returns.
    pub(in super::super) fn mark_bad(&self, places: &[LogPosition]) -> Result<Vec<LogPosition>> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut marked = Vec::new();
        {
            let mut update = transaction
                .prepare_cached("UPDATE fragments SET bad = 1 WHERE place = ? AND bad = 0")?;
            for place in places {
                if update.execute([place.number()])? == 1 {
                    marked.push(*place);
                }
            }
        }
        transaction.execute("UPDATE scrub SET bad = bad + ?", [marked.len()])?;
        self.save_time(&transaction)?;
        transaction.commit()?;
        Ok(marked)
    }
}
