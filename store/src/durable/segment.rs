//! A segment: a file that groups of contents are appended to, by one process at a time.
//!
//! A group is a record, which tells what it holds, and the contents behind it. All begin at multiples of 4 KiB, so that
//! they go to the disk without a copy in the page cache, and so that each can give its space back alone. The
//! process that appends holds a lock on the file; when it is gone, another may continue where the content ends, which is
//! known to an index beside the segments.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::sys;

/// What direct I/O needs of addresses and lengths, on any usual disk.
pub(crate) const ALIGNMENT: usize = 4096;

/// A segment that is this long is not continued.
pub(crate) const SEGMENT_SIZE: u64 = 4 << 30;

/// Space is allocated ahead: this part of what there is, within bounds. A process that ends without
/// giving it back leaves it to the next one.
const AHEAD: u64 = 8;
const MIN_STEP: u64 = 1 << 20;
const MAX_STEP: u64 = 64 << 20;

pub(crate) struct Segment {
    pub(crate) number: u64,
    path: PathBuf,
    file: File,
    tail: Mutex<Tail>,
    /// The end of what the index may know.
    known: AtomicU64,
}

/// Where the next blob goes.
struct Tail {
    end: u64,
    allocated: u64,
}

impl Segment {
    /// Opens a segment to append to it, and makes its file if there is none. Nothing if another process
    /// has it.
    pub(crate) fn lock(directory: &Path, number: u64) -> Result<Option<Segment>> {
        let path = path_of(directory, number);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let direct = options.clone().custom_flags(libc::O_DIRECT).open(&path);
        let file = match direct {
            // A file system without direct I/O.
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

    /// Continues at `end`. What is behind it was never made known.
    pub(crate) fn continue_at(&self, end: u64) -> Result<()> {
        let metadata = self.file.metadata().map_err(|e| Error::io("examining", &self.path, e))?;
        self.known.store(end, Ordering::Relaxed);
        *self.tail() = Tail { end, allocated: metadata.len().max(end) };
        Ok(())
    }

    /// Whether the next blobs should go elsewhere.
    pub(crate) fn is_full(&self) -> bool {
        self.tail().end >= SEGMENT_SIZE
    }

    /// Writes a group: its record, of this length, and the contents. The record is made when it is known where the group
    /// starts, which this returns. Nothing is synced.
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
            self.give_back(start, len);
            Error::io("writing", &self.path, error)
        })?;
        Ok(start)
    }

    fn write_at(&self, slices: &[&[u8]], start: u64) -> io::Result<()> {
        match sys::write_all_at(&self.file, slices, start) {
            // The disk's own blocks may be larger than the alignment.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                sys::end_direct_io(&self.file)?;
                sys::write_all_at(&self.file, slices, start)
            }
            written => written,
        }
    }

    /// Takes room at the end. Space that was allocated ahead makes writes of several threads
    /// independent of each other.
    fn reserve(&self, len: u64) -> Result<u64> {
        let mut tail = self.tail();
        let (start, end) = (tail.end, tail.end + len);
        if end > tail.allocated {
            let step = (tail.allocated / AHEAD).clamp(MIN_STEP, MAX_STEP);
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
                // Then it is allocated by writing.
                Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(end),
                allocated => allocated,
            };
            tail.allocated = allocated.map_err(|e| Error::io("extending", &self.path, e))?;
        }
        tail.end = end;
        Ok(start)
    }

    /// Gives room back that was taken last.
    fn give_back(&self, start: u64, len: u64) {
        let mut tail = self.tail();
        if tail.end == start + len {
            tail.end = start;
        }
    }

    /// Returns when everything that was written is durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io("syncing", &self.path, e))
    }

    /// The index knows content up to here, or is about to.
    pub(crate) fn set_known(&self, end: u64) {
        self.known.fetch_max(end, Ordering::Relaxed);
    }

    fn tail(&self) -> MutexGuard<'_, Tail> {
        self.tail.lock().expect("no thread panics while it holds a segment's tail")
    }
}

impl Drop for Segment {
    /// Gives back what was allocated ahead.
    fn drop(&mut self) {
        if self.tail().allocated > 0
            && let Err(error) = self.file.set_len(self.known.load(Ordering::Relaxed))
        {
            tracing::debug!(path = %self.path.display(), %error, "unused space stays");
        }
    }
}

/// Where contents of these lengths are that lie one behind the other from `start` on, and where they end.
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
        // Another spelling of a number is no segment's name.
        numbers.extend(number.filter(|number| path_of(directory, *number).ends_with(&name)));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// The file of a segment.
pub(crate) fn path_of(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("{number:08}"))
}

/// Reads as much as there is.
pub(crate) fn fill(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let (filled, error) = fill_some(file, buf, offset);
    error.map_or(Ok(filled), Err)
}

/// Reads as much as can be read, and tells why it is not more.
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

/// Whether the content can go to the disk as it is.
fn is_aligned(content: &[u8]) -> bool {
    content.len().is_multiple_of(ALIGNMENT) && content.as_ptr().addr().is_multiple_of(ALIGNMENT)
}

/// A copy that direct I/O can use, padded with zeros.
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
