//! The part of a collection that deletes blobs from a directory.
//!
//! 1. [`DirectoryBlobs::begin_collection`] records the number. From then on, no earlier collection
//!    deletes anything, and every blob that is put gets at least this stamp.
//! 2. [`DirectoryBlobs::remove`] removes rows of the index whose stamp is below a bound. One
//!    transaction does that and notes the space, so that it excludes every put and every question.
//! 3. [`DirectoryBlobs::reclaim`] gives the noted space back to the file system: it punches holes,
//!    removes segments without blobs, and frees what killed processes have written behind the ends.
//!
//! A process that dies between two steps leaves space that the next collection gives back.

use std::io;

use super::DirectoryBlobs;
use super::index::FreedSpace;
use crate::collection::CollectionNumber;
use crate::durable::segment::{ALIGNMENT, Segment, path_of, segments_in};
use crate::error::{Error, Result};
use crate::id::BlobId;
use crate::sys;

pub(crate) use super::index::Listed as ListedBlob;

/// What was removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Removal {
    pub(crate) blobs: u64,
    /// The space of their contents, in bytes.
    pub(crate) bytes: u64,
}

impl DirectoryBlobs {
    /// The highest collection that has begun to delete here.
    pub(crate) fn highest_collection(&self) -> Result<CollectionNumber> {
        self.index.highest_collection()
    }

    /// Records that a collection is about to delete. Returns `false` if a later one has.
    pub(crate) fn begin_collection(&self, number: CollectionNumber) -> Result<bool> {
        self.index.begin_collection(number)
    }

    /// Lists the first blobs after one, in the order of their names.
    pub(crate) fn list(&self, after: Option<BlobId>, most: usize) -> Result<Vec<ListedBlob>> {
        self.index.list(after, most)
    }

    /// Removes those of the blobs whose stamp is below a bound. Removes nothing if a later collection
    /// than `number` has begun.
    pub(crate) fn remove(
        &self,
        ids: &[BlobId],
        number: CollectionNumber,
        below: CollectionNumber,
    ) -> Result<Removal> {
        let (blobs, bytes) = self.index.remove(ids, number, below)?;
        Ok(Removal { blobs, bytes })
    }

    /// Gives the space of removed blobs back to the file system. Returns how many bytes could not be
    /// given back, because the file system has no holes.
    pub(crate) fn reclaim(&self) -> Result<u64> {
        let (mut after, mut left) = (None, 0);
        loop {
            let some = self.index.freed(after)?;
            let Some(last) = some.last() else { break };
            after = Some(*last);
            let mut done = Vec::with_capacity(some.len());
            for one in some {
                match self.punch(one) {
                    Ok(()) => done.push(one),
                    Err(error) if error.kind() == io::ErrorKind::Unsupported => left += one.len,
                    Err(error) => {
                        let path = path_of(&self.directory, one.segment);
                        return Err(Error::io("freeing a part of", &path, error));
                    }
                }
            }
            self.index.forget_freed(&done)?;
        }
        self.remove_empty_segments()?;
        self.trim_segments()?;
        // A full file system may have taken it.
        self.reserve.keep();
        Ok(left)
    }

    /// Frees what lies behind the ends of segments that no process appends to: what killed processes have
    /// written before the index knew it, and space that was allocated ahead.
    fn trim_segments(&self) -> Result<()> {
        for number in segments_in(&self.directory)? {
            let path = path_of(&self.directory, number);
            let metadata = match std::fs::metadata(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                found => found.map_err(|error| Error::io("examining", &path, error))?,
            };
            if self.index.segment_end(number)?.is_some_and(|end| end < metadata.len()) {
                // Dropping the segment truncates its file.
                let trimmed = self.lock_segment(number).map(drop);
                if let Err(error) = trimmed {
                    tracing::warn!(number, %error, "cannot free the end of a segment");
                }
            }
        }
        Ok(())
    }

    fn punch(&self, space: FreedSpace) -> io::Result<()> {
        let part = space.offset..(space.offset + space.len).next_multiple_of(ALIGNMENT as u64);
        match Segment::punch(&self.directory, space.segment, part) {
            // An earlier collection died after it had removed the segment.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            punched => punched,
        }
    }

    /// Removes the segments without blobs that no process appends to, and files of segments that the
    /// index does not have.
    fn remove_empty_segments(&self) -> Result<()> {
        let mut is_changed = false;
        for number in self.index.empty_segments()? {
            // Nobody appends while this handle holds the lock.
            let Some(segment) = Segment::lock(&self.directory, number)? else { continue };
            if self.index.remove_segment(number)? {
                segment.remove_file()?;
                is_changed = true;
            }
        }
        // A process that died here has removed the row and not the file. The row of a segment is
        // older than its file, so a file without a row is of no use.
        for number in segments_in(&self.directory)? {
            if !self.index.has_segment(number)?
                && let Some(segment) = Segment::lock(&self.directory, number)?
            {
                segment.remove_file()?;
                is_changed = true;
            }
        }
        if is_changed { sys::sync_dir(&self.directory) } else { Ok(()) }
    }
}
