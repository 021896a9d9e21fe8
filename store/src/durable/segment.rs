//! A segment: a file that one process at a time appends groups of contents to.
//!
//! ```text
//! segment:  │ record │ content │ content │ … │ record │ content │ …   each at a multiple of 4 KiB
//!           └──────────── group ─────────────┘
//! ```
//!
//! The record of a group describes its contents. Because of the alignment, direct I/O writes
//! contents without the page cache, and the space of each content can be punched out alone. The
//! process that appends holds a lock on the file. When that process has ended, another may continue
//! at the end of the content. The index records where the content ends.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::sys;

/// The alignment of addresses and lengths that direct I/O needs on any usual disk, in bytes.
pub(crate) const ALIGNMENT: usize = 4096;

/// A segment with this many bytes or more is not continued.
pub(crate) const SEGMENT_SIZE: u64 = 4 << 30;

/// Space is allocated ahead, in steps of the segment's length divided by this, within the bounds
/// below. If a process dies and does not free the rest, the next process uses it.
const ALLOCATION_DIVISOR: u64 = 8;
/// The smallest step of allocation, in bytes.
const MIN_ALLOCATION: u64 = 1 << 20;
/// The largest step of allocation, in bytes.
const MAX_ALLOCATION: u64 = 64 << 20;

pub(crate) struct Segment {
    pub(crate) number: u64,
    path: PathBuf,
    file: File,
    tail: Mutex<Tail>,
    /// The end of the content that the index may refer to.
    known: AtomicU64,
}

/// Where the next group goes.
struct Tail {
    end: u64,
    /// The file has space up to here.
    allocated: u64,
}

impl Segment {
    /// Opens a segment for appending, and creates its file if it does not exist. Returns `None` if
    /// another process holds the segment.
    pub(crate) fn lock(directory: &Path, number: u64) -> Result<Option<Segment>> {
        let path = path_of(directory, number);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let direct = options.clone().custom_flags(libc::O_DIRECT).open(&path);
        let file = match direct {
            // The file system has no direct I/O.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => options.open(&path),
            opened => opened,
        };
        let file = file.map_err(|e| Error::io("opening", &path, e))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => return Ok(None),
            Err(std::fs::TryLockError::Error(error)) => {
                return Err(Error::io("locking", &path, error));
            }
        }
        let tail = Mutex::new(Tail { end: 0, allocated: 0 });
        Ok(Some(Segment { number, path, file, tail, known: AtomicU64::new(0) }))
    }

    /// Continues at `end`. The index knows nothing behind it, so the bytes there are overwritten.
    pub(crate) fn continue_at(&self, end: u64) -> Result<()> {
        let metadata = self.file.metadata().map_err(|e| Error::io("examining", &self.path, e))?;
        self.known.store(end, Ordering::Relaxed);
        *self.tail() = Tail { end, allocated: metadata.len().max(end) };
        Ok(())
    }

    /// Removes the file of a segment that has no content.
    pub(crate) fn remove_file(&self) -> Result<()> {
        fs::remove_file(&self.path).map_err(|e| Error::io("removing", &self.path, e))
    }

    /// Frees the space of a part that nothing refers to. Fails with
    /// [`io::ErrorKind::Unsupported`] if the file system has no holes.
    pub(crate) fn punch(directory: &Path, number: u64, part: Range<u64>) -> io::Result<()> {
        let file = File::options().write(true).open(path_of(directory, number))?;
        sys::punch(&file, part)
    }

    /// Whether the next blobs should go to another segment.
    pub(crate) fn is_full(&self) -> bool {
        self.tail().end >= SEGMENT_SIZE
    }

    /// Writes a group: its record, which has `record_len` bytes, and the contents. `record` creates
    /// the record from the group's start, which this function also returns. Nothing is synced.
    pub(crate) fn append(
        &self,
        record_len: usize,
        contents: &[&[u8]],
        record: impl FnOnce(u64) -> Vec<u8>,
    ) -> Result<u64> {
        let (_, len) = place(record_len as u64, contents.iter().map(|content| content.len()));
        let start = self.reserve(len)?;
        let record = Padded::new(&record(start));
        debug_assert_eq!(record.len, record_len);
        let padded: Vec<_> = contents
            .iter()
            .map(|content| (!is_aligned(content)).then(|| Padded::new(content)))
            .collect();
        let mut slices = vec![record.bytes()];
        slices.extend(contents.iter().zip(&padded).map(|(content, padded)| match padded {
            Some(padded) => padded.bytes(),
            None => content,
        }));
        self.write_at(&slices, start).map_err(|error| {
            self.unreserve(start, len);
            Error::io("writing", &self.path, error)
        })?;
        Ok(start)
    }

    fn write_at(&self, slices: &[&[u8]], start: u64) -> io::Result<()> {
        match sys::write_all_at(&self.file, slices, start) {
            // The disk's blocks may be larger than the alignment.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                sys::end_direct_io(&self.file)?;
                sys::write_all_at(&self.file, slices, start)
            }
            written => written,
        }
    }

    /// Reserves `len` bytes at the end and returns their start. Space is allocated ahead, so that
    /// writes of several threads do not wait for each other.
    fn reserve(&self, len: u64) -> Result<u64> {
        let mut tail = self.tail();
        let (start, end) = (tail.end, tail.end + len);
        if end > tail.allocated {
            let step = tail.allocated / ALLOCATION_DIVISOR;
            let step = step.clamp(MIN_ALLOCATION, MAX_ALLOCATION);
            let step = step.max(end - tail.allocated);
            let allocate = |to| sys::allocate(&self.file, tail.allocated..to).map(|()| to);
            let allocated = match allocate(tail.allocated + step) {
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
                    ) =>
                {
                    allocate(end)
                }
                // The file system allocates the space when it is written.
                Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(end),
                allocated => allocated,
            };
            tail.allocated = allocated.map_err(|e| Error::io("extending", &self.path, e))?;
        }
        tail.end = end;
        Ok(start)
    }

    /// Releases a range that was [reserved](Self::reserve), if it is the last one.
    fn unreserve(&self, start: u64, len: u64) {
        let mut tail = self.tail();
        if tail.end == start + len {
            tail.end = start;
        }
    }

    /// Frees the space that was allocated ahead. The next group allocates space again.
    pub(crate) fn free_ahead(&self) {
        let mut tail = self.tail();
        if tail.allocated > tail.end && self.truncate(tail.end) {
            tail.allocated = tail.end;
        }
    }

    /// Returns whether the file ends at `end` now.
    fn truncate(&self, end: u64) -> bool {
        let truncated = self.file.set_len(end);
        if let Err(error) = &truncated {
            let path = self.path.display();
            tracing::debug!(%path, %error, "cannot free the unused space of a segment");
        }
        truncated.is_ok()
    }

    /// Makes everything durable that was written.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io("syncing", &self.path, e))
    }

    /// Notes that the index refers to content up to `end`, or is about to.
    pub(crate) fn set_known(&self, end: u64) {
        self.known.fetch_max(end, Ordering::Relaxed);
    }

    fn tail(&self) -> MutexGuard<'_, Tail> {
        self.tail.lock().expect("no thread panics while it holds a segment's tail")
    }
}

impl Drop for Segment {
    /// Frees the space that was allocated ahead.
    fn drop(&mut self) {
        if self.tail().allocated > 0 {
            self.truncate(self.known.load(Ordering::Relaxed));
        }
    }
}

/// The offsets of contents with these lengths, one after the other from `start`, and their end.
pub(crate) fn place(start: u64, lens: impl Iterator<Item = usize>) -> (Vec<u64>, u64) {
    let mut end = start;
    let offsets = lens.map(|len| {
        let offset = end;
        end += len.next_multiple_of(ALIGNMENT) as u64;
        offset
    });
    (offsets.collect(), end)
}

/// The numbers of the segments that have files in a directory, in order.
pub(crate) fn segments_in(directory: &Path) -> Result<Vec<u64>> {
    let failed = |error| Error::io("reading", directory, error);
    let mut numbers = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let number = name.to_str().and_then(|name| name.parse::<u64>().ok());
        // The name must be the canonical spelling of the number.
        numbers.extend(number.filter(|number| path_of(directory, *number).ends_with(&name)));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// The path of a segment's file.
pub(crate) fn path_of(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("{number:08}"))
}

/// Reads until the buffer is full or the file ends. Returns the number of bytes.
pub(crate) fn fill(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let (filled, error) = fill_some(file, buf, offset);
    error.map_or(Ok(filled), Err)
}

/// Reads until the buffer is full, the file ends or an error occurs. Returns the number of bytes
/// and the error.
pub(crate) fn fill_some(file: &File, buf: &mut [u8], offset: u64) -> (usize, Option<io::Error>) {
    let mut filled = 0;
    while filled < buf.len() {
        match file.read_at(&mut buf[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(len) => filled += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (filled, Some(error)),
        }
    }
    (filled, None)
}

/// Whether direct I/O can write the content without a copy.
fn is_aligned(content: &[u8]) -> bool {
    content.len().is_multiple_of(ALIGNMENT) && content.as_ptr().addr().is_multiple_of(ALIGNMENT)
}

/// A copy that direct I/O can write, padded with zeros.
struct Padded {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Padded {
    fn new(content: &[u8]) -> Self {
        let len = content.len().next_multiple_of(ALIGNMENT);
        let mut memory = vec![0; len + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        memory[start..start + content.len()].copy_from_slice(content);
        Self { memory, start, len }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}
