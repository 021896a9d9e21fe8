//! Scans segments for group records, to rebuild a lost index.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::group;
use super::group::{Group, MAX_RECORD_LEN};
use super::index::Found;
use crate::durable::segment::{ALIGNMENT, fill, path_of};
use crate::error::{Error, Result};
use crate::id::BlobId;

/// Reports the segment and the blobs that its records name. Syncs the file first, so every reported
/// blob is durable. Verifies the content of each blob, and skips what cannot be read.
pub(super) fn scan(
    directory: &Path,
    number: u64,
    report: &mut dyn FnMut(Found) -> Result<()>,
) -> Result<()> {
    let path = path_of(directory, number);
    let file = File::open(&path).map_err(|error| Error::io("reading", &path, error))?;
    file.sync_all().map_err(|error| Error::io("syncing", &path, error))?;
    scan_file(&file, &path, number, report)
}

/// Does the work of [`scan`] on an open file, without the sync.
pub(super) fn scan_file(
    file: &File,
    path: &Path,
    number: u64,
    report: &mut dyn FnMut(Found) -> Result<()>,
) -> Result<()> {
    let len = file.metadata().map_err(|error| Error::io("reading", path, error))?.len();
    // The end that the lost index recorded is unknown. The end of the file is never before it.
    report(Found::Segment { number, end: len.next_multiple_of(ALIGNMENT as u64) })?;
    let mut record = vec![0; MAX_RECORD_LEN];
    let mut content = Vec::new();
    let mut at = 0;
    while at < len {
        let start = at;
        at += ALIGNMENT as u64;
        let filled = match fill(file, &mut record, start) {
            Ok(filled) => filled,
            Err(error) => {
                let path = path.display();
                tracing::warn!(%path, offset = start, %error, "skipping an unreadable block");
                continue;
            }
        };
        let blobs = group::decode(number, start, &record[..filled]).unwrap_or_default();
        let group = Group::new(start, blobs.len());
        for (id, slot) in blobs {
            content.resize(slot.len as usize, 0);
            let is_read = file.read_exact_at(&mut content, slot.offset).is_ok();
            if is_read && BlobId::of(&content) == id {
                report(Found::Blob { id, slot, group })?;
                // Inside a valid blob there are no records of this repository.
                at = at.max(slot.end());
            }
        }
    }
    Ok(())
}
