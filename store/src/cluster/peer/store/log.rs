//! The log of a peer: the segments that fragments are appended to.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::group::{Entries, Key, KnownFragment, LogPosition, MAX_RECORD, decode};
use super::table::Table;
use crate::collection::CollectionNumber;
use crate::durable::segment;
use crate::durable::segment::{ALIGNMENT, Segment, fill_some, path_of, segments_in};
use crate::encoding::fragment::Fragment;
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::sys;

/// The most segments that are kept open for reading.
const OPEN_FILES: usize = 64;

/// Creates the directory of the segments, unless it exists.
pub(super) fn make(directory: &Path) -> Result<()> {
    let segments = directory.join("segments");
    match fs::create_dir(&segments) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(Error::io("creating", &segments, error))
        }
        _ => Ok(()),
    }
}

/// The end of the log, where fragments are appended.
pub(super) struct Log {
    directory: PathBuf,
    key: Key,
    current: Option<Arc<Segment>>,
}

impl Log {
    /// Opens the log of a peer. Adds to the table the fragments that were still pending when the
    /// previous process ended.
    ///
    /// A segment that the table does not know at all was in a table that is lost. The stamps in the
    /// log are too low then: questions have raised them in the table.
    pub(super) fn open(directory: &Path, peer: &PeerId, table: &Table) -> Result<Log> {
        let (directory, key) = (directory.join("segments"), Key::of(peer));
        let mut last = None;
        for number in segments_in(&directory)? {
            let known = table.segment_end(number)?;
            let (mut found, end) = scan(&directory, &key, number, known.unwrap_or(0))?;
            if known.is_none() {
                found.iter_mut().for_each(|one| one.stamp = CollectionNumber::MAX);
            }
            if !found.is_empty() {
                let fragments = found.len();
                tracing::info!(
                    number,
                    fragments,
                    "recovered fragments at the end of a segment that were not in the table"
                );
            }
            table.recover(&found, number, end)?;
            last = Some((number, end));
        }
        let mut log = Log { directory, key, current: None };
        if let Some((number, end)) = last {
            log.current = Some(log.open_segment(number, end)?);
        }
        Ok(log)
    }

    /// Returns the number of the segment that is appended to.
    pub(super) fn current(&self) -> Option<u64> {
        self.current.as_ref().map(|segment| segment.number)
    }

    /// Frees the space that was allocated ahead.
    pub(super) fn free_ahead(&self) {
        if let Some(segment) = &self.current {
            segment.free_ahead();
        }
    }

    /// Appends a group. Returns the segment and the position of each block. Syncs nothing.
    pub(super) fn append(
        &mut self,
        table: &Table,
        fragments: &[(&Fragment, CollectionNumber)],
    ) -> Result<(Arc<Segment>, Vec<KnownFragment>)> {
        let segment = match self.current.take().filter(|segment| !segment.is_full()) {
            Some(segment) => segment,
            None => self.open_segment(table.new_segment()?, 0)?,
        };
        self.current = Some(segment.clone());
        let entries = fragments.iter().map(|(one, stamp)| (&one.description, one.index, *stamp));
        let entries = Entries::new(entries);
        let blocks: Vec<&[u8]> = fragments.iter().map(|(one, _)| &one.block[..]).collect();
        let number = segment.number;
        let start = segment.append(entries.record_len(), &blocks, |offset| {
            entries.record(&self.key, LogPosition { segment: number, offset })
        })?;
        let first = start + entries.record_len() as u64;
        let (offsets, _) = segment::place(first, blocks.iter().map(|block| block.len()));
        let known = fragments.iter().zip(offsets).map(|((one, stamp), offset)| KnownFragment {
            description: one.description.clone(),
            index: one.index,
            place: LogPosition { segment: number, offset },
            stamp: *stamp,
        });
        Ok((segment, known.collect()))
    }

    /// Opens a segment to append to it from offset `end` on.
    fn open_segment(&self, number: u64, end: u64) -> Result<Arc<Segment>> {
        let segment = Segment::lock(&self.directory, number)?
            .ok_or_else(|| Error::InUse { path: path_of(&self.directory, number) })?;
        if end == 0 {
            // The file may have just been created.
            sys::sync_dir(&self.directory)?;
        }
        segment.continue_at(end)?;
        Ok(Arc::new(segment))
    }
}

/// Scans a segment from offset `from` on. Returns the fragments that its records name, which are
/// durable, and the offset of the next group.
///
/// Skips fragments that are damaged or were not completely written when the process ended. Their
/// space is not used again: their record would claim whatever is written there.
fn scan(directory: &Path, key: &Key, number: u64, from: u64) -> Result<(Vec<KnownFragment>, u64)> {
    let path = path_of(directory, number);
    let file = File::open(&path).map_err(|error| Error::io("reading", &path, error))?;
    let len = file.metadata().map_err(|error| Error::io("reading", &path, error))?.len();
    if from < len {
        file.sync_all().map_err(|error| Error::io("syncing", &path, error))?;
    }
    scan_file(&file, key, number, from).map_err(|error| Error::io("reading", &path, error))
}

/// Does the work of [`scan`] on an open file, without the sync. Pages that cannot be read are
/// skipped and not overwritten either, because a later attempt may be able to read them.
pub(super) fn scan_file(
    file: &File,
    key: &Key,
    number: u64,
    from: u64,
) -> io::Result<(Vec<KnownFragment>, u64)> {
    let mut record = vec![0; MAX_RECORD];
    let mut block = Vec::new();
    let (mut found, mut end, mut at) = (Vec::new(), from, from);
    // Holes hold nothing: they are preallocated or reclaimed space.
    while let Some(data) = sys::next_data(file, at)? {
        at = at.max(data.start - data.start % ALIGNMENT as u64);
        while at < data.end {
            let place = LogPosition { segment: number, offset: at };
            at += ALIGNMENT as u64;
            let (filled, error) = fill_some(file, &mut record, place.offset);
            if let Some(error) = error {
                let offset = place.offset + filled as u64;
                tracing::warn!(number, offset, %error, "skipping an unreadable page");
                end = end.max(data.end.next_multiple_of(ALIGNMENT as u64));
            }
            let Some((_, known)) = decode(key, place, &record[..filled]) else { continue };
            end = known.iter().map(KnownFragment::end).fold(end, u64::max);
            for one in known {
                block.resize(one.description.block_len(), 0);
                let is_read = file.read_exact_at(&mut block, one.place.offset).is_ok();
                if is_read && one.description.matches(one.index.into(), &block) {
                    // A valid block contains no records.
                    at = at.max(one.end());
                    found.push(one);
                }
            }
        }
    }
    Ok((found, end))
}

/// The segment files, for reading and deletion.
pub(super) struct Files {
    directory: PathBuf,
    open: Mutex<HashMap<u64, Arc<File>>>,
}

impl Files {
    pub(super) fn new(directory: &Path) -> Files {
        Files { directory: directory.join("segments"), open: Mutex::default() }
    }

    /// Reads a block and returns whether it matches its description. A block that the disk has lost
    /// does not match. Any other read error is returned: it may be transient.
    pub(super) fn read(&self, known: &KnownFragment, block: &mut [u8]) -> io::Result<bool> {
        let file = self.file(known.place.segment);
        match file.and_then(|file| file.read_exact_at(block, known.place.offset)) {
            Ok(()) => Ok(known.description.matches(known.index.into(), block)),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof
                ) || error.raw_os_error() == Some(libc::EIO) =>
            {
                tracing::error!(place = ?known.place, %error, "cannot read a block");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Reads a part of a block, which is not verified.
    pub(super) fn read_part(
        &self,
        known: &KnownFragment,
        offset: usize,
        bytes: &mut [u8],
    ) -> io::Result<()> {
        let at = known.place.offset + offset as u64;
        self.file(known.place.segment).and_then(|file| file.read_exact_at(bytes, at))
    }

    /// Returns the path of a segment's file.
    pub(super) fn path(&self, number: u64) -> PathBuf {
        path_of(&self.directory, number)
    }

    /// Opens a segment's file for writing.
    pub(super) fn to_write(&self, number: u64) -> Result<File> {
        let path = self.path(number);
        let opened = File::options().read(true).write(true).open(&path);
        opened.map_err(|error| Error::io("opening", &path, error))
    }

    /// Removes a segment's file. When this returns, no power cut brings the file back.
    pub(super) fn remove(&self, number: u64) -> Result<()> {
        self.files().remove(&number);
        let path = self.path(number);
        fs::remove_file(&path).map_err(|error| Error::io("removing", &path, error))?;
        sys::sync_dir(&self.directory)
    }

    /// Returns a segment's file. Reads use the page cache, because neighbours are often read next.
    fn file(&self, number: u64) -> io::Result<Arc<File>> {
        let mut files = self.files();
        if let Some(file) = files.get(&number) {
            return Ok(file.clone());
        }
        let file = Arc::new(File::open(self.path(number))?);
        if files.len() >= OPEN_FILES {
            files.clear();
        }
        files.insert(number, file.clone());
        Ok(file)
    }

    fn files(&self) -> MutexGuard<'_, HashMap<u64, Arc<File>>> {
        self.open.lock().expect("no thread panics with the files locked")
    }
}
