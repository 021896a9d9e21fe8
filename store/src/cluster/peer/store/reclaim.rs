//! Gives the space of deleted fragments back to the file system.
//!
//! A fragment's row is removed from the table first, durably. After that nothing refers to the
//! block, and a crash loses only space.
//!
//! | in a segment | is given back |
//! |---|---|
//! | the block | at once: no other byte lies in its pages |
//! | records and leftovers around it | at once, if a later fragment is known or no put is pending |
//! | the whole segment | if it holds nothing and is not appended to |
//!
//! A record is kept while one of its fragments is known where the record says: without the record
//! the fragment would not be found if the table were lost. Fragments get into the table in the
//! order of the log. So bytes after the last known fragment stay, because the table may still learn
//! of them. Everything before it is known or deleted.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;

use super::group::{Key, KnownFragment, LogPosition, MAX_RECORD, decode};
use super::log::Files;
use super::table::Table;
use crate::durable::segment::{ALIGNMENT, fill};
use crate::error::{Error, Result};
use crate::sys;

/// Gives the space of deleted fragments back, and returns the bytes of their blocks. `quiet` states
/// that the table knows everything in the log, and that nothing is appended meanwhile. Failures are
/// only logged: they lose space, and the caller can do nothing about them.
pub(super) fn reclaim(
    files: &Files,
    key: &Key,
    table: &Table,
    deleted: &[KnownFragment],
    quiet: bool,
) -> u64 {
    let mut segments = BTreeMap::<_, Vec<_>>::new();
    deleted.iter().for_each(|one| segments.entry(one.place.segment).or_default().push(one));
    let mut freed = 0;
    for (number, all) in segments {
        match punch(files, number, &all) {
            Ok(bytes) => freed += bytes,
            Err(error) => {
                tracing::warn!(number, %error, "failed to give back the space of deleted fragments")
            }
        }
        if let Err(error) = clean(files, key, table, number, &all, quiet) {
            tracing::warn!(number, %error, "failed to give back the space of their records");
        }
    }
    freed
}

/// Punches the blocks of deleted fragments out of their segment.
fn punch(files: &Files, number: u64, deleted: &[&KnownFragment]) -> Result<u64> {
    let file = files.to_write(number)?;
    let mut freed = 0;
    for one in deleted {
        sys::punch(&file, one.place.offset..one.end())
            .map_err(|error| Error::io("giving back a part of", &files.path(number), error))?;
        freed += one.space();
    }
    Ok(freed)
}

/// Gives back what is left in the gaps around deleted fragments.
fn clean(
    files: &Files,
    key: &Key,
    table: &Table,
    number: u64,
    deleted: &[&KnownFragment],
    quiet: bool,
) -> Result<()> {
    let file = files.to_write(number)?;
    let mut gaps = BTreeMap::new();
    for one in deleted {
        let (start, end) = table.gap(one.place)?;
        if let Some(end) = end.or(quiet.then_some(u64::MAX)) {
            gaps.insert(start, end);
        }
    }
    for (start, end) in gaps {
        clean_gap(&file, key, table, number, start..end)
            .map_err(|error| Error::io("cleaning", &files.path(number), error))?;
    }
    Ok(())
}

/// Punches everything in a gap except records that are needed.
fn clean_gap(
    file: &File,
    key: &Key,
    table: &Table,
    number: u64,
    gap: Range<u64>,
) -> io::Result<()> {
    let step = ALIGNMENT as u64;
    let mut buf = vec![0; MAX_RECORD];
    let mut at = gap.start;
    while let Some(data) = sys::next_data(file, at)?.filter(|data| data.start < gap.end) {
        at = at.max(data.start - data.start % step);
        let end = data.end.next_multiple_of(step).min(gap.end);
        let mut dead = at;
        while at < end {
            let filled = fill(file, &mut buf, at)?;
            let kept =
                match decode(key, LogPosition { segment: number, offset: at }, &buf[..filled]) {
                    Some((len, all)) if is_needed(table, &all)? => len as u64,
                    _ => 0,
                };
            if kept > 0 && at > dead {
                sys::punch(file, dead..at)?;
            }
            at += kept.max(step);
            if kept > 0 {
                dead = at;
            }
        }
        if at > dead {
            sys::punch(file, dead..at)?;
        }
    }
    Ok(())
}

/// Whether the table knows a fragment of a record where the record says.
fn is_needed(table: &Table, all: &[KnownFragment]) -> io::Result<bool> {
    for one in all {
        if table.is_at(one.place).map_err(io::Error::other)? {
            return Ok(true);
        }
    }
    Ok(false)
}
