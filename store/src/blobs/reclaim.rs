//! Space of deleted blobs, given back to the file system.
//!
//! The index forgets a blob first, durably; then nothing refers to its bytes, and a crash loses only space.
//!
//! | in a segment | is given back |
//! |---|---|
//! | the blob | at once: no other byte lies in its blocks |
//! | the records and leftovers around it | if nobody appends to the segment |
//! | all of it | if nobody appends to it and it holds no blob |
//!
//! A record is kept while the index knows one of its blobs where the record says: without it the blob would not
//! be found again if the index were lost. To a segment that is appended to, nothing but the deleted blobs
//! themselves is certain: any gap may hold blobs that are about to be known.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::Path;

use super::group::{self, MAX_RECORD};
use super::index::{Index, Slot};
use super::segment::{ALIGNMENT, SEGMENT_SIZE, fill, hold, path_of};
use crate::error::{Error, Result};
use crate::sys;

/// Gives the space of deleted blobs back, and returns how much. What fails is told in the log: it loses space,
/// and nobody can do anything about it here.
pub(super) fn reclaim(directory: &Path, index: &Index, slots: &[Slot]) -> u64 {
    let mut segments = BTreeMap::<_, Vec<_>>::new();
    slots.iter().for_each(|slot| segments.entry(slot.segment).or_default().push(*slot));
    let mut freed = 0;
    for (number, slots) in segments {
        match punch(directory, number, &slots) {
            Ok(bytes) => freed += bytes,
            Err(error) => tracing::warn!(number, %error, "deleted blobs keep their space"),
        }
        if let Err(error) = clean(directory, index, number, &slots) {
            tracing::warn!(number, %error, "the records of deleted blobs keep their space");
        }
    }
    freed
}

/// Gives back all space of segments that hold nothing. Returns those whose files are gone.
pub(super) fn drop_empty(directory: &Path, index: &Index) -> Result<Vec<u64>> {
    let mut gone = Vec::new();
    for number in index.empty_segments()? {
        let path = path_of(directory, number);
        if fs::metadata(&path).is_ok_and(|metadata| metadata.len() == 0) {
            continue;
        }
        let Some(file) = hold(directory, number)? else { continue };
        let Some(end) = index.take_empty(number)? else { continue };
        file.set_len(0).map_err(|error| Error::io("shortening", &path, error))?;
        // One that is not full is continued where it ended.
        if end >= SEGMENT_SIZE {
            index.forget_segment(number)?;
            fs::remove_file(&path).map_err(|error| Error::io("removing", &path, error))?;
            gone.push(number);
        }
    }
    Ok(gone)
}

/// Gives back the blocks of blobs.
fn punch(directory: &Path, number: u64, slots: &[Slot]) -> Result<u64> {
    let path = path_of(directory, number);
    let file = match File::options().write(true).open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        opened => opened.map_err(|error| Error::io("opening", &path, error))?,
    };
    let mut freed = 0;
    for slot in slots.iter().filter(|slot| slot.space() > 0) {
        sys::punch(&file, slot.offset..slot.end())
            .map_err(|error| Error::io("giving back a part of", &path, error))?;
        freed += slot.space();
    }
    Ok(freed)
}

/// Gives back what is left between the blobs around deleted ones, if nobody appends to the segment.
fn clean(directory: &Path, index: &Index, number: u64, slots: &[Slot]) -> Result<()> {
    let Some(file) = hold(directory, number)? else { return Ok(()) };
    let gaps: Result<BTreeSet<_>> = slots
        .iter()
        .filter_map(|slot| index.gap(slot).transpose())
        .map(|gap| gap.map(|gap| (gap.start, gap.end)))
        .collect();
    for (start, end) in gaps? {
        clean_gap(&file, index, number, start..end)
            .map_err(|error| Error::io("cleaning", &path_of(directory, number), error))?;
    }
    Ok(())
}

/// Gives back what takes space in a gap, but for records of blobs that are known.
fn clean_gap(file: &File, index: &Index, number: u64, gap: Range<u64>) -> io::Result<()> {
    let step = ALIGNMENT as u64;
    let mut buf = vec![0; MAX_RECORD];
    let mut at = gap.start;
    while let Some(data) = sys::next_data(file, at)?.filter(|data| data.start < gap.end) {
        at = data.start - data.start % step;
        let end = data.end.next_multiple_of(step).min(gap.end);
        let mut dead = at;
        while at < end {
            let filled = fill(file, &mut buf, at)?;
            let kept = match group::decode(number, at, &buf[..filled]) {
                Some(blobs) if is_needed(index, &blobs)? => group::record_len(blobs.len()) as u64,
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

/// Whether the index knows a blob of a record where the record says.
fn is_needed(index: &Index, blobs: &[(crate::id::BlobId, Slot)]) -> io::Result<bool> {
    let known = index.find_all(blobs.iter().map(|(id, _)| id)).map_err(io::Error::other)?;
    Ok(known.iter().zip(blobs).any(|(known, (_, slot))| known.as_ref() == Some(slot)))
}
