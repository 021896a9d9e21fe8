//! What segments hold, by their records: for an index that is lost.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::group;
use super::group::MAX_RECORD;
use super::index::Found;
use crate::durable::segment::{ALIGNMENT, fill, path_of};
use crate::error::{Error, Result};
use crate::id::BlobId;

/// Tells what a segment's file holds, by its records. Each blob's content is checked, and all of it is
/// made durable first. What cannot be read is left out.
pub(super) fn scan(
    directory: &Path,
    number: u64,
    tell: &mut dyn FnMut(Found) -> Result<()>,
) -> Result<()> {
    let path = path_of(directory, number);
    let file = File::open(&path).map_err(|error| Error::io("reading", &path, error))?;
    file.sync_all().map_err(|error| Error::io("syncing", &path, error))?;
    scan_file(&file, &path, number, tell)
}

/// As [`scan`], for the file alone.
pub(super) fn scan_file(
    file: &File,
    path: &Path,
    number: u64,
    tell: &mut dyn FnMut(Found) -> Result<()>,
) -> Result<()> {
    let len = file.metadata().map_err(|error| Error::io("reading", path, error))?.len();
    // What the lost index said about the end is not known; this is behind all of it.
    tell(Found::Segment { number, end: len.next_multiple_of(ALIGNMENT as u64) })?;
    let mut record = vec![0; MAX_RECORD];
    let mut content = Vec::new();
    let mut at = 0;
    while at < len {
        let start = at;
        at += ALIGNMENT as u64;
        let filled = match fill(file, &mut record, start) {
            Ok(filled) => filled,
            Err(error) => {
                tracing::warn!(path = %path.display(), offset = start, %error, "a block is lost");
                continue;
            }
        };
        for (id, slot) in group::decode(number, start, &record[..filled]).into_iter().flatten() {
            content.resize(slot.len as usize, 0);
            let whole = file.read_exact_at(&mut content, slot.offset).is_ok();
            if whole && BlobId::of(&content) == id {
                tell(Found::Blob { id, slot })?;
                // A blob that is whole holds no records of ours.
                at = at.max(slot.end());
            }
        }
    }
    Ok(())
}
