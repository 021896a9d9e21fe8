//! Reads the chunks and tree nodes of a directory in the order of their segments.
//!
//! ```text
//! names, sorted ─► their places ─► sorted by place ─► extents of up to 4 MiB ─► threads: read, hash
//! ```
//!
//! Direct I/O reads an extent at a time, so that the disk itself is read, at its speed, and the page
//! cache, which may be better than the disk, stays as it is. A blob that is not as it should be there is
//! looked up and read again alone, also with direct I/O: another process may have stored it again
//! meanwhile. Its error counts.

use std::fs::File;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::{SortedChunks, parse};
use crate::blobs::directory::{BlobPlace, DirectoryBlobs};
use crate::buffers::Buffer;
use crate::durable::sorted_runs::{RunSorter, SortedRuns, temporary_directory};
use crate::error::{Error, Result};
use crate::id::ChunkId;

/// The names that are looked up in the index at a time.
const LOOKUP_BATCH: usize = 4096;

/// The most bytes that are read at a time.
const EXTENT_BYTES: u64 = 4 << 20;

/// What lies between two chunks, such as the record of a group, is read with them up to this length.
const MAX_GAP: u64 = 64 << 10;

/// The most places in memory: 12 MiB.
const MAX_PLACES: usize = if cfg!(test) { 8 } else { 1 << 18 };

/// The length of an entry: segment, offset, length there, length as wanted, name.
const PLACE: usize = 56;

/// Receives the result of reading each chunk, and the chunk's length.
pub(super) type OnRead<'a> = dyn Fn(ChunkId, u32, Result<()>) + Sync + 'a;

/// Reads of the chunks in a directory.
pub(super) struct SegmentReads<'a> {
    pub(super) blobs: &'a DirectoryBlobs,
    pub(super) chunks: &'a SortedChunks,
}

/// A chunk in a segment.
struct Placed {
    place: BlobPlace,
    chunk: ChunkId,
    /// The length that the chunk must have; 0 if it is a tree node, whose length is not known.
    len: u32,
}

/// Neighbours in one segment.
type Extent = Vec<Placed>;

impl SegmentReads<'_> {
    /// Reads all chunks. Fails only if their names cannot be sorted.
    pub(super) fn run(&self, on_read: &OnRead<'_>) -> Result<()> {
        let places = self.places(on_read)?;
        // While one thread hashes, another one reads.
        let threads = 2 * thread::available_parallelism().map_or(1, usize::from);
        let (queue, waiting) = sync_channel::<Extent>(threads);
        let waiting = Mutex::new(waiting);
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let mut open = None;
                    while let Some(extent) = next(&waiting) {
                        self.read(&extent, &mut open, on_read);
                    }
                });
            }
            let queue = queue;
            let mut extent = Extent::new();
            for entry in places.read()? {
                let next = placed(&entry?);
                if !continues(&extent, &next) {
                    let full = std::mem::take(&mut extent);
                    queue.send(full).expect("the readers wait for the end of the queue");
                }
                extent.push(next);
            }
            queue.send(extent).expect("the readers wait for the end of the queue");
            Ok(())
        })
    }

    /// The places of all chunks, in their order. A chunk without a place is read at once.
    fn places(&self, on_read: &OnRead<'_>) -> Result<SortedRuns<PLACE>> {
        let mut sorter = RunSorter::new(&temporary_directory(), PLACE, MAX_PLACES);
        let mut chunks = self.chunks.read()?;
        loop {
            let some = chunks.by_ref().take(LOOKUP_BATCH).collect::<Result<Vec<_>>>()?;
            if some.is_empty() {
                return sorter.finish();
            }
            let some: Vec<_> = some.iter().map(parse).collect();
            let ids: Vec<_> = some.iter().map(|(chunk, _)| (*chunk).into()).collect();
            for ((chunk, len), place) in some.into_iter().zip(self.blobs.places(&ids)?) {
                match place {
                    Some(place) => sorter.push(entry(&Placed { place, chunk, len })),
                    None => self.read_alone(&chunk, len, on_read),
                }
            }
        }
    }

    /// Reads an extent. `open` is the segment that was read last.
    fn read(&self, extent: &Extent, open: &mut Option<(u64, File)>, on_read: &OnRead<'_>) {
        let (Some(first), Some(last)) = (extent.first(), extent.last()) else { return };
        let (segment, start) = (first.place.segment, first.place.offset);
        let mut buffer = Buffer::new((last.place.end() - start) as usize, 0);
        let filled = self.fill(segment, start, &mut buffer, open);
        for one in extent {
            let at = (one.place.offset - start) as usize;
            let content = buffer[..filled].get(at..at + one.place.len as usize);
            match content.is_some_and(|content| is_right(content, &one.chunk, one.len)) {
                true => on_read(one.chunk, one.len, Ok(())),
                false => self.read_alone(&one.chunk, one.len, on_read),
            }
        }
    }

    /// Reads a part of a segment. Returns the number of bytes up to the first error.
    fn fill(
        &self,
        segment: u64,
        start: u64,
        buffer: &mut [u8],
        open: &mut Option<(u64, File)>,
    ) -> usize {
        if open.as_ref().is_none_or(|(number, _)| *number != segment) {
            *open = self.blobs.open_direct(segment).ok().map(|file| (segment, file));
        }
        open.as_ref().map_or(0, |(_, file)| self.blobs.read_direct(file, start, buffer))
    }

    fn read_alone(&self, chunk: &ChunkId, len: u32, on_read: &OnRead<'_>) {
        on_read(*chunk, len, self.check_alone(chunk, len));
    }

    fn check_alone(&self, chunk: &ChunkId, len: u32) -> Result<()> {
        let found = self.blobs.check_on_disk(&(*chunk).into())?;
        if len == 0 || found == len {
            return Ok(());
        }
        let reason = format!("it has {found} bytes, {len} are expected");
        Err(Error::corrupt(format!("chunk {chunk}"), reason))
    }
}

/// Whether a blob has its name, and a chunk its length.
fn is_right(content: &[u8], name: &ChunkId, len: u32) -> bool {
    (len == 0 || content.len() == len as usize) && ChunkId::of(content) == *name
}

fn next(waiting: &Mutex<Receiver<Extent>>) -> Option<Extent> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

/// Whether a chunk belongs to an extent.
fn continues(extent: &Extent, next: &Placed) -> bool {
    let (Some(first), Some(last)) = (extent.first(), extent.last()) else { return true };
    let (start, end) = (first.place.offset, last.place.end());
    first.place.segment == next.place.segment
        && next.place.offset <= end.saturating_add(MAX_GAP)
        && next.place.end().saturating_sub(start) <= EXTENT_BYTES
}

/// Entries sort by place.
fn entry(one: &Placed) -> [u8; PLACE] {
    let mut entry = [0; PLACE];
    entry[..8].copy_from_slice(&one.place.segment.to_be_bytes());
    entry[8..16].copy_from_slice(&one.place.offset.to_be_bytes());
    entry[16..20].copy_from_slice(&one.place.len.to_be_bytes());
    entry[20..24].copy_from_slice(&one.len.to_be_bytes());
    entry[24..].copy_from_slice(one.chunk.as_bytes());
    entry
}

fn placed(entry: &[u8; PLACE]) -> Placed {
    let u64_at = |at: usize| u64::from_be_bytes(entry[at..at + 8].try_into().expect("8 bytes"));
    let u32_at = |at: usize| u32::from_be_bytes(entry[at..at + 4].try_into().expect("4 bytes"));
    Placed {
        place: BlobPlace { segment: u64_at(0), offset: u64_at(8), len: u32_at(16) },
        chunk: ChunkId::from_bytes(entry[24..].try_into().expect("32 bytes")),
        len: u32_at(20),
    }
}
