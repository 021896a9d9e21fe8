//! External merge sort: more entries than fit into memory, in their order.
//!
//! ```text
//! push ─► buffer ─ full: sort, fold ─► run ─ FAN_IN runs of one level ─► one run of the next level
//!           │                           │
//!           └───────────────────────────┴─► finish ─► SortedRuns::read: a merge of all of them
//! ```
//!
//! Entries have a fixed length and are compared as bytes. Their first bytes are the *key*. Of several
//! entries with one key, the greatest counts; the others are dropped as soon as they meet.
//!
//! A run is a file without a name, so a process that dies leaves nothing behind. Nothing is synced:
//! the files are of no use to another process. Few entries stay in memory and need no file. Blocks have
//! checksums: a block that changed on the disk is an error, and never another entry, because callers
//! delete what they do not find here.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::slice;

use twox_hash::XxHash3_64;

use crate::error::{Error, Result};
use crate::sys;

/// The runs of one level that are merged into one of the next.
const FAN_IN: usize = if cfg!(test) { 3 } else { 64 };

/// The bytes that are read and written at a time. Each run that is read has one block in memory.
const BLOCK_BYTES: usize = if cfg!(test) { 256 } else { 64 << 10 };

/// The directory for temporary files, which may be large: `TMPDIR`, or else `/var/tmp`, because
/// `/tmp` is in memory on many systems.
pub(crate) fn temporary_directory() -> PathBuf {
    match std::env::var_os("TMPDIR") {
        Some(directory) if !directory.is_empty() => directory.into(),
        _ => "/var/tmp".into(),
    }
}

/// Takes entries in any order.
///
/// A failure to write is kept, and [`RunSorter::finish`] returns it. The files are gone by then.
pub(crate) struct RunSorter<const N: usize> {
    directory: PathBuf,
    key: usize,
    /// The most entries in memory.
    most: usize,
    buffer: Vec<[u8; N]>,
    runs: Vec<Run>,
    failed: Option<Error>,
}

impl<const N: usize> RunSorter<N> {
    /// Sorts entries with a key of `key` bytes. At most `most` entries are in memory, the others in
    /// files of this directory.
    pub(crate) fn new(directory: &Path, key: usize, most: usize) -> RunSorter<N> {
        let (buffer, runs, failed) = (Vec::new(), Vec::new(), None);
        RunSorter { directory: directory.into(), key, most, buffer, runs, failed }
    }

    /// Adds an entry.
    pub(crate) fn push(&mut self, entry: [u8; N]) {
        if self.failed.is_some() {
            return;
        }
        if self.buffer.len() >= self.most {
            fold(&mut self.buffer, self.key);
            // If most entries were duplicates, there is room again.
            if self.buffer.len() > self.most / 2
                && let Err(error) = self.spill()
            {
                (self.buffer, self.runs) = (Vec::new(), Vec::new());
                self.failed = Some(self.error(error));
                return;
            }
        }
        self.buffer.push(entry);
    }

    /// Moves the sorted buffer to a file.
    fn spill(&mut self) -> io::Result<()> {
        let entries = self.buffer.iter().map(|entry| Ok(*entry));
        self.runs.push(Run::write(&self.directory, 0, entries)?);
        self.buffer.clear();
        loop {
            let level = self.runs.last().map_or(0, |run| run.level);
            let same = self.runs.iter().rev().take_while(|run| run.level == level).count();
            if same < FAN_IN {
                return Ok(());
            }
            let at = self.runs.len() - same;
            let merge = Merge::<N>::new(&self.runs[at..], &[], self.key)?;
            let merged = Run::write(&self.directory, level + 1, merge)?;
            self.runs.truncate(at);
            self.runs.push(merged);
        }
    }

    fn error(&self, source: io::Error) -> Error {
        Error::TemporaryFiles { directory: self.directory.clone(), source }
    }

    /// Ends the entries. Fails if one of them could not be written.
    pub(crate) fn finish(mut self) -> Result<SortedRuns<N>> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        fold(&mut self.buffer, self.key);
        let RunSorter { directory, key, buffer, runs, .. } = self;
        Ok(SortedRuns { directory, key, buffer, runs })
    }
}

/// Sorts entries, and keeps the greatest of each key.
fn fold<const N: usize>(buffer: &mut Vec<[u8; N]>, key: usize) {
    buffer.sort_unstable();
    buffer.dedup_by(|next, kept| {
        let is_same = next[..key] == kept[..key];
        if is_same {
            *kept = *next;
        }
        is_same
    });
}

/// Sorted entries, of which each key occurs once. They can be read any number of times.
pub(crate) struct SortedRuns<const N: usize> {
    directory: PathBuf,
    key: usize,
    buffer: Vec<[u8; N]>,
    runs: Vec<Run>,
}

impl<const N: usize> SortedRuns<N> {
    /// Whether there is no entry.
    pub(crate) fn is_empty(&self) -> bool {
        self.buffer.is_empty() && self.runs.is_empty()
    }

    /// Reads the entries in their order.
    pub(crate) fn read(&self) -> Result<SortedEntries<'_, N>> {
        let failed = |source| Error::TemporaryFiles { directory: self.directory.clone(), source };
        let merge = Merge::new(&self.runs, &self.buffer, self.key).map_err(failed)?;
        Ok(SortedEntries { runs: self, merge, next: None })
    }
}

/// Reads sorted entries. It ends after the first error.
pub(crate) struct SortedEntries<'a, const N: usize> {
    runs: &'a SortedRuns<N>,
    merge: Merge<'a, N>,
    /// An entry that [`SortedEntries::seek`] has found.
    next: Option<[u8; N]>,
}

impl<const N: usize> SortedEntries<'_, N> {
    /// Skips all entries that are less than `prefix` in their first bytes. Returns the first entry
    /// that is not, and leaves it there.
    pub(crate) fn seek(&mut self, prefix: &[u8]) -> Result<Option<[u8; N]>> {
        loop {
            match self.next().transpose()? {
                Some(entry) if entry[..prefix.len()] < *prefix => {}
                found => {
                    self.next = found;
                    return Ok(found);
                }
            }
        }
    }
}

impl<const N: usize> Iterator for SortedEntries<'_, N> {
    type Item = Result<[u8; N]>;

    fn next(&mut self) -> Option<Result<[u8; N]>> {
        if let Some(entry) = self.next.take() {
            return Some(Ok(entry));
        }
        let directory = &self.runs.directory;
        let failed = |source| Error::TemporaryFiles { directory: directory.clone(), source };
        self.merge.next().map(|entry| entry.map_err(failed))
    }
}

/// Sorted entries in a file.
struct Run {
    file: File,
    entries: u64,
    /// The checksums of the blocks.
    checksums: Vec<u64>,
    /// How often its entries were merged.
    level: u32,
}

impl Run {
    /// Writes a run. The entries are sorted.
    fn write<const N: usize>(
        directory: &Path,
        level: u32,
        entries: impl Iterator<Item = io::Result<[u8; N]>>,
    ) -> io::Result<Run> {
        let file = unnamed_file(directory)?;
        let mut run = Run { file, entries: 0, checksums: Vec::new(), level };
        let (mut block, full) = (Vec::with_capacity(BLOCK_BYTES), block_entries::<N>() * N);
        for entry in entries {
            block.extend_from_slice(&entry?);
            run.entries += 1;
            if block.len() == full {
                run.append(&mut block)?;
            }
        }
        run.append(&mut block)?;
        Ok(run)
    }

    fn append(&mut self, block: &mut Vec<u8>) -> io::Result<()> {
        if !block.is_empty() {
            (&self.file).write_all(block)?;
            self.checksums.push(XxHash3_64::oneshot(block));
            block.clear();
        }
        Ok(())
    }
}

/// The entries in a block.
const fn block_entries<const N: usize>() -> usize {
    if BLOCK_BYTES < N { 1 } else { BLOCK_BYTES / N }
}

/// Creates a file that disappears when it is closed.
fn unnamed_file(directory: &Path) -> io::Result<File> {
    let number = u64::from_le_bytes(sys::random()?);
    let path = directory.join(format!("cairn-{number:016x}.tmp"));
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

/// Reads a run block by block.
struct RunReader<'a, const N: usize> {
    run: &'a Run,
    block: Vec<u8>,
    /// The offset of the next entry in the block.
    at: usize,
    /// The number of the next block.
    next: usize,
}

impl<'a, const N: usize> RunReader<'a, N> {
    fn new(run: &'a Run) -> Self {
        RunReader { run, block: Vec::new(), at: 0, next: 0 }
    }

    fn next(&mut self) -> io::Result<Option<[u8; N]>> {
        if self.at == self.block.len() && !self.fill()? {
            return Ok(None);
        }
        let entry = self.block[self.at..self.at + N].try_into().expect("blocks have whole entries");
        self.at += N;
        Ok(Some(entry))
    }

    /// Reads the next block. Returns whether there is one.
    fn fill(&mut self) -> io::Result<bool> {
        let Some(checksum) = self.run.checksums.get(self.next) else { return Ok(false) };
        let before = (self.next * block_entries::<N>()) as u64;
        let entries = (self.run.entries - before).min(block_entries::<N>() as u64);
        self.block.resize(entries as usize * N, 0);
        self.run.file.read_exact_at(&mut self.block, before * N as u64)?;
        if XxHash3_64::oneshot(&self.block) != *checksum {
            let reason = "a file has other bytes than were written to it";
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        (self.at, self.next) = (0, self.next + 1);
        Ok(true)
    }
}

/// One of the sorted parts of a merge.
enum Source<'a, const N: usize> {
    File(RunReader<'a, N>),
    Memory(slice::Iter<'a, [u8; N]>),
}

impl<const N: usize> Source<'_, N> {
    fn next(&mut self) -> io::Result<Option<[u8; N]>> {
        match self {
            Source::File(reader) => reader.next(),
            Source::Memory(entries) => Ok(entries.next().copied()),
        }
    }
}

/// Merges runs and a sorted buffer. It ends after the first error.
struct Merge<'a, const N: usize> {
    sources: Vec<Source<'a, N>>,
    /// The next entry of each source that has one.
    heads: BinaryHeap<Reverse<([u8; N], usize)>>,
    key: usize,
}

impl<'a, const N: usize> Merge<'a, N> {
    fn new(runs: &'a [Run], buffer: &'a [[u8; N]], key: usize) -> io::Result<Merge<'a, N>> {
        let files = runs.iter().map(|run| Source::File(RunReader::new(run)));
        let mut sources: Vec<_> = files.chain([Source::Memory(buffer.iter())]).collect();
        let mut heads = BinaryHeap::with_capacity(sources.len());
        for (at, source) in sources.iter_mut().enumerate() {
            heads.extend(source.next()?.map(|entry| Reverse((entry, at))));
        }
        Ok(Merge { sources, heads, key })
    }

    fn pop(&mut self) -> io::Result<Option<[u8; N]>> {
        let Some(Reverse((entry, at))) = self.heads.pop() else { return Ok(None) };
        self.heads.extend(self.sources[at].next()?.map(|entry| Reverse((entry, at))));
        Ok(Some(entry))
    }

    /// The greatest entry of the next key.
    fn next_key(&mut self) -> io::Result<Option<[u8; N]>> {
        let Some(mut entry) = self.pop()? else { return Ok(None) };
        while let Some(Reverse((next, _))) = self.heads.peek()
            && next[..self.key] == entry[..self.key]
        {
            entry = self.pop()?.expect("there is a next entry");
        }
        Ok(Some(entry))
    }
}

impl<const N: usize> Iterator for Merge<'_, N> {
    type Item = io::Result<[u8; N]>;

    fn next(&mut self) -> Option<io::Result<[u8; N]>> {
        let next = self.next_key();
        if next.is_err() {
            self.heads.clear();
        }
        next.transpose()
    }
}

#[cfg(test)]
mod tests;
