//! One epoch in shared memory, which outlives the process.
//!
//! ```text
//! page 0   header: the words below
//! then     dirty chunks, a bit each   ┐
//! then     their summary              ├ each from the start of a page
//! then     idle chunks, a bit each    ┘
//! ```
//!
//! The process can end between any two stores. Words are therefore written in an order in which
//! every prefix makes sense: first the words of a record, and last the word that says that the
//! record is there.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use cairn_store::metadata::MAX_METADATA_TEXT;
use cairn_store::{Consistency, Metadata, NewSnapshot};

use super::Epoch;
use super::chunk_state::ChunkStates;
use super::layer_state::LayerState;
use crate::mapping::{PAGE_BYTES, Words};
use crate::mirror::bits::{Bits, DirtySet};
use crate::mirror::files::disk_file::allocate_more;
use crate::mirror::layout::Layout;

const MAGIC: u64 = u64::from_le_bytes(*b"CRNEPOCH");
const VERSION: u64 = 4;

/// Indices of words in the header.
mod word {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 1;
    /// The number of chunks of a disk as large as its capacity.
    pub(super) const CAPACITY: usize = 2;
    pub(super) const EPOCH: usize = 3;
    /// A [`super::LayerState`].
    pub(super) const STATE: usize = 4;
    pub(super) const NUMBER: usize = 5;
    pub(super) const TIME: usize = 6;
    pub(super) const DIRTY_BYTES: usize = 7;
    pub(super) const PAUSE_US: usize = 8;
    pub(super) const CONSISTENCY: usize = 9;
    /// 1 once the words of the checkpoint are complete.
    pub(super) const ACCEPTED: usize = 10;
    /// The size of the disk at the end of the epoch.
    pub(super) const SIZE: usize = 11;
    /// The number of chunks for which the file has space.
    pub(super) const ROOM: usize = 12;
    /// 1 once the layer has a table.
    pub(super) const HAS_TABLE: usize = 13;
    /// 1 if the checkpoint was requested from inside the guest.
    pub(super) const IS_FROM_GUEST: usize = 14;
    /// A length in bytes, then 8 words of text.
    pub(super) const LABEL: usize = 16;
    /// A length in bytes, then 64 words of text.
    pub(super) const REASON: usize = 32;
    /// A length in bytes, then 260 words of text.
    pub(super) const METADATA: usize = 128;
    pub(super) const COUNT: usize = 512;
}

const LABEL_MAX_BYTES: usize = 64;
const REASON_MAX_BYTES: usize = 512;
const _: () = assert!(word::METADATA + 1 + MAX_METADATA_TEXT.div_ceil(8) <= word::COUNT);

/// The record of one epoch: its state, the states of its chunks and, once a checkpoint has ended
/// the epoch, that checkpoint.
pub(crate) struct EpochRecord {
    header: Words,
    pub(crate) chunks: ChunkStates,
    /// The file and its path. Without one, the record is in this process's own memory.
    file: Option<(File, PathBuf)>,
}

/// The number of chunks of a disk, and of one as large as its capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkCounts {
    pub(crate) now: u64,
    pub(crate) capacity: u64,
}

impl ChunkCounts {
    pub(crate) fn of(layout: &Layout) -> ChunkCounts {
        ChunkCounts { now: layout.chunk_count(), capacity: layout.capacity_chunks() }
    }
}

/// Offsets of the parts in the file, and its length.
struct FileParts {
    dirty: u64,
    summary: u64,
    idle: u64,
    len: u64,
}

/// The parts of the file of a disk whose capacity is this many chunks.
fn file_parts(chunks: u64) -> FileParts {
    let page = PAGE_BYTES as u64;
    let bytes = |bits: u64| (bits.div_ceil(64).max(1) * 8).next_multiple_of(page);
    let dirty = page;
    let summary = dirty + bytes(chunks);
    let idle = summary + bytes(chunks.div_ceil(64));
    FileParts { dirty, summary, idle, len: idle + bytes(chunks) }
}

impl EpochRecord {
    /// A record in this process's own memory.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn private(chunks: u64) -> io::Result<EpochRecord> {
        let dirty = DirtySet::new(Bits::zeroed(chunks)?, Bits::zeroed(chunks.div_ceil(64))?);
        let record = EpochRecord {
            header: Words::zeroed(word::COUNT)?,
            chunks: ChunkStates::new(dirty, Bits::zeroed(chunks)?),
            file: None,
        };
        record.stamp(chunks);
        Ok(record)
    }

    fn create(path: &Path, chunks: ChunkCounts) -> io::Result<EpochRecord> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        let record = file
            .set_len(file_parts(chunks.capacity).len)
            .and_then(|()| allocate_more(&file, 0, PAGE_BYTES as u64))
            .and_then(|()| EpochRecord::map(file, path, chunks))
            // The next process cannot use half of a file.
            .inspect_err(|_| drop(fs::remove_file(path)))?;
        record.stamp(chunks.capacity);
        Ok(record)
    }

    /// Makes room for the chunks of a disk that is going to grow. An error changes nothing.
    pub(super) fn grow(&self, chunks: ChunkCounts) -> io::Result<()> {
        if let Some((file, _)) = &self.file {
            make_room(file, &self.header, chunks)?;
            self.chunks.grow(chunks.now);
        }
        Ok(())
    }

    fn stamp(&self, chunks: u64) {
        self.header[word::CAPACITY].store(chunks, Ordering::Relaxed);
        self.header[word::VERSION].store(VERSION, Ordering::Relaxed);
        self.header[word::MAGIC].store(MAGIC, Ordering::Release);
    }

    fn map(file: File, path: &Path, chunks: ChunkCounts) -> io::Result<EpochRecord> {
        let header = Words::shared(&file, 0, word::COUNT)?;
        // A record of before the growth of the disk has less room.
        make_room(&file, &header, chunks)?;
        let FileParts { dirty, summary, idle, .. } = file_parts(chunks.capacity);
        let ChunkCounts { now, capacity } = chunks;
        let bits = |offset, now, capacity| Bits::shared(&file, offset, now, capacity);
        let words = |chunks: u64| chunks.div_ceil(64);
        let summary = bits(summary, words(now), words(capacity))?;
        let dirty = DirtySet::new(bits(dirty, now, capacity)?, summary);
        Ok(EpochRecord {
            header,
            chunks: ChunkStates::new(dirty, bits(idle, now, capacity)?),
            file: Some((file, path.into())),
        })
    }

    /// Opens the record that a process left. `None` if the file is not the record of an epoch that
    /// has begun, or if nothing of the epoch is needed any more.
    pub(crate) fn open(path: &Path, chunks: ChunkCounts) -> io::Result<Option<EpochRecord>> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() != file_parts(chunks.capacity).len {
            return Ok(None);
        }
        let record = EpochRecord::map(file, path, chunks)?;
        let is = |at: usize, value| record.header[at].load(Ordering::Acquire) == value;
        let is_same = is(word::MAGIC, MAGIC) && is(word::CAPACITY, chunks.capacity);
        let has_begun = is_same && !is(word::EPOCH, 0);
        if has_begun && !is(word::VERSION, VERSION) {
            let path = path.display();
            let reason = format!("{path} was written by another version of this program");
            return Err(io::Error::other(reason));
        }
        // A damaged word becomes the state that it counts as, so that transitions find it.
        if LayerState::load(&record.header[word::STATE]).is_none() {
            record.header[word::STATE].store(LayerState::Lost as u64, Ordering::Release);
        }
        let known = has_begun && record.state() != LayerState::Closed;
        record.chunks.adopt(chunks.now);
        Ok(known.then_some(record))
    }

    pub(crate) fn epoch(&self) -> Epoch {
        Epoch(self.header[word::EPOCH].load(Ordering::Acquire))
    }

    /// Begins an epoch with this record.
    pub(crate) fn begin(&self, epoch: Epoch) {
        self.header[word::EPOCH].store(epoch.0, Ordering::Release);
    }

    /// The size of the disk at the end of the epoch.
    pub(crate) fn size(&self) -> u64 {
        self.header[word::SIZE].load(Ordering::Acquire)
    }

    /// The epoch's state. A damaged word counts as Lost: then the epoch's changes go into the next
    /// checkpoint.
    pub(crate) fn state(&self) -> LayerState {
        LayerState::load(&self.header[word::STATE]).unwrap_or(LayerState::Lost)
    }

    fn transition(&self, from: LayerState, to: LayerState) -> bool {
        LayerState::transition(&self.header[word::STATE], from, to)
    }

    /// Goes to the state that `next` returns for the current one; stays if it returns `None`. Another
    /// thread may change the state meanwhile: then `next` is asked again, so that no change is lost.
    fn advance(&self, next: impl Fn(LayerState) -> Option<LayerState>) {
        loop {
            let from = self.state();
            match next(from) {
                Some(to) if !self.transition(from, to) => {}
                _ => return,
            }
        }
    }

    /// Ends the epoch of a disk of this size: writes go into the next one.
    pub(crate) fn freeze(&self, size: u64) {
        self.header[word::SIZE].store(size, Ordering::Release);
        self.advance(|_| Some(LayerState::Frozen));
    }

    /// No write of the epoch is in flight. Several threads may find that at the same time.
    pub(crate) fn settle(&self) {
        self.transition(LayerState::Frozen, LayerState::Settled);
    }

    /// Old content was lost, so the epoch has no snapshot. The first reason stays. The epoch's
    /// changes must be in the current epoch already.
    pub(crate) fn fail(&self, reason: &str) {
        if !matches!(self.state(), LayerState::Failed | LayerState::Lost | LayerState::Closed) {
            self.put_text(word::REASON, reason, REASON_MAX_BYTES);
        }
        self.advance(|from| match from {
            LayerState::Failed | LayerState::Lost | LayerState::Closed => None,
            LayerState::Abandoned => Some(LayerState::Lost),
            _ => Some(LayerState::Failed),
        });
    }

    /// The checkpoint of the epoch has ended without a snapshot: no process resumes it.
    pub(crate) fn abandon(&self) {
        self.advance(|from| match from {
            LayerState::Abandoned | LayerState::Lost => None,
            LayerState::Failed => Some(LayerState::Lost),
            _ => Some(LayerState::Abandoned),
        });
    }

    /// Nothing of the epoch is needed any more: the next process does not find it.
    pub(crate) fn close(&self) {
        self.advance(|_| Some(LayerState::Closed));
        self.remove();
    }

    /// Records the checkpoint that ended the epoch. From here on the checkpoint survives the
    /// process.
    pub(crate) fn accept(&self, new: &NewSnapshot) {
        let set = |at: usize, value: u64| self.header[at].store(value, Ordering::Relaxed);
        set(word::NUMBER, new.number);
        set(word::SIZE, new.size);
        set(word::TIME, new.time);
        set(word::DIRTY_BYTES, new.dirty_bytes);
        set(word::PAUSE_US, new.pause_us);
        let consistency = match new.consistency {
            Consistency::Crash => 0,
            Consistency::Filesystem => 1,
            Consistency::Application => 2,
        };
        set(word::CONSISTENCY, consistency);
        set(word::IS_FROM_GUEST, new.is_from_guest.into());
        self.put_text(word::LABEL, new.label.as_deref().unwrap_or(""), LABEL_MAX_BYTES);
        self.put_text(word::METADATA, &new.metadata.to_text(), MAX_METADATA_TEXT);
        self.header[word::ACCEPTED].store(1, Ordering::Release);
    }

    /// The checkpoint that ended the epoch, if it was recorded.
    pub(crate) fn accepted(&self) -> Option<NewSnapshot> {
        if self.header[word::ACCEPTED].load(Ordering::Acquire) == 0 {
            return None;
        }
        let get = |at: usize| self.header[at].load(Ordering::Relaxed);
        let label = self.text(word::LABEL, LABEL_MAX_BYTES);
        Some(NewSnapshot {
            number: get(word::NUMBER),
            label: (!label.is_empty()).then_some(label),
            // A damaged text costs the metadata, not the checkpoint.
            metadata: Metadata::from_text(&self.text(word::METADATA, MAX_METADATA_TEXT))
                .unwrap_or_default(),
            is_from_guest: get(word::IS_FROM_GUEST) == 1,
            size: self.size(),
            consistency: match get(word::CONSISTENCY) {
                0 => Consistency::Crash,
                1 => Consistency::Filesystem,
                _ => Consistency::Application,
            },
            time: get(word::TIME),
            dirty_bytes: get(word::DIRTY_BYTES),
            pause_us: get(word::PAUSE_US),
        })
    }

    /// Records that the epoch's layer has a table.
    pub(crate) fn set_has_table(&self) {
        self.header[word::HAS_TABLE].store(1, Ordering::Release);
    }

    /// Whether the epoch's layer has a table.
    pub(crate) fn has_table(&self) -> bool {
        self.header[word::HAS_TABLE].load(Ordering::Acquire) != 0
    }

    /// Why no snapshot can be made of the epoch, if so.
    pub(crate) fn failure(&self) -> Option<String> {
        self.state().has_failed().then(|| self.text(word::REASON, REASON_MAX_BYTES))
    }

    fn put_text(&self, at: usize, text: &str, max: usize) {
        let mut end = text.len().min(max);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        for (index, bytes) in text.as_bytes()[..end].chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.header[at + 1 + index].store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
        self.header[at].store(end as u64, Ordering::Relaxed);
    }

    fn text(&self, at: usize, max: usize) -> String {
        let len = (self.header[at].load(Ordering::Relaxed) as usize).min(max);
        let words = self.header[at + 1..].iter().take(len.div_ceil(8));
        let bytes: Vec<u8> =
            words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).take(len).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Removes the file. For records of epochs that never began; others are closed.
    pub(crate) fn remove(&self) {
        if let Some((_, path)) = &self.file
            && let Err(error) = fs::remove_file(path)
        {
            let path = path.display();
            tracing::error!(%error, %path, "cannot remove the record of an epoch that has ended");
        }
    }
}

/// Allocates the space that the parts of a file need, unless it has that. The file is long enough.
fn make_room(file: &File, header: &Words, chunks: ChunkCounts) -> io::Result<()> {
    if header[word::ROOM].load(Ordering::Acquire) >= chunks.now {
        return Ok(());
    }
    let FileParts { dirty, summary, idle, .. } = file_parts(chunks.capacity);
    let bytes = |bits: u64| bits.div_ceil(64).max(1) * 8;
    allocate_more(file, dirty, bytes(chunks.now))?;
    allocate_more(file, summary, bytes(chunks.now.div_ceil(64)))?;
    allocate_more(file, idle, bytes(chunks.now))?;
    header[word::ROOM].store(chunks.now, Ordering::Release);
    Ok(())
}

/// Creates the records of epochs. One record is created ahead of time, so that a checkpoint does
/// not wait for it.
pub(crate) struct EpochFiles {
    chunks: Mutex<ChunkCounts>,
    /// The directory of the files. Without one, records are in this process's own memory.
    dir: Option<PathBuf>,
    next_file: AtomicU64,
    spare: Mutex<Option<EpochRecord>>,
}

impl EpochFiles {
    /// Records of a disk with this many chunks, in this process's own memory.
    #[cfg(test)]
    pub(crate) fn private(chunks: u64) -> EpochFiles {
        let chunks = Mutex::new(ChunkCounts { now: chunks, capacity: chunks });
        EpochFiles { chunks, dir: None, next_file: AtomicU64::new(0), spare: Mutex::default() }
    }

    /// Opens the records that a process left in `dir`, and returns them oldest first. Files that
    /// are of no use are removed.
    pub(crate) fn open(
        dir: &Path,
        chunks: ChunkCounts,
    ) -> io::Result<(EpochFiles, Vec<EpochRecord>)> {
        let mut found = Vec::new();
        let mut next_file = 0;
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let name = entry.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix("epoch-"));
            let Some(number) = number.and_then(|number| number.parse::<u64>().ok()) else {
                continue;
            };
            next_file = next_file.max(number.saturating_add(1));
            match EpochRecord::open(&entry.path(), chunks)? {
                Some(state) => found.push(state),
                None => fs::remove_file(entry.path())?,
            }
        }
        found.sort_by_key(EpochRecord::epoch);
        let (next_file, chunks) = (AtomicU64::new(next_file), Mutex::new(chunks));
        Ok((
            EpochFiles { chunks, dir: Some(dir.into()), next_file, spare: Mutex::default() },
            found,
        ))
    }

    /// Returns a record for the next epoch.
    pub(crate) fn allocate(&self) -> io::Result<EpochRecord> {
        let spare = self.spare.lock().expect("no code panics with the spare locked").take();
        spare.map_or_else(|| self.make(), Ok)
    }

    /// Creates a record ahead of time, unless there is one.
    pub(crate) fn prepare(&self) -> io::Result<()> {
        let missing = self.spare.lock().expect("as in `allocate`").is_none();
        if missing {
            let made = self.make()?;
            *self.spare.lock().expect("as in `allocate`") = Some(made);
        }
        Ok(())
    }

    fn chunks(&self) -> ChunkCounts {
        *self.chunks.lock().expect("no code panics with the counts locked")
    }

    /// Makes room in a record for all chunks of the disk. An error changes nothing.
    pub(crate) fn fit(&self, record: &EpochRecord) -> io::Result<()> {
        record.grow(self.chunks())
    }

    /// Makes room for this many chunks in all records that are not in use yet. An error changes
    /// nothing.
    pub(crate) fn grow(&self, chunks: ChunkCounts) -> io::Result<()> {
        let spare = self.spare.lock().expect("as in `allocate`");
        spare.as_ref().map_or(Ok(()), |spare| spare.grow(chunks))?;
        let mut counts = self.chunks.lock().expect("as in `chunks`");
        counts.now = counts.now.max(chunks.now);
        Ok(())
    }

    fn make(&self) -> io::Result<EpochRecord> {
        match &self.dir {
            Some(dir) => {
                let number = self.next_file.fetch_add(1, Ordering::Relaxed);
                EpochRecord::create(&dir.join(format!("epoch-{number}")), self.chunks())
            }
            #[cfg(test)]
            None => EpochRecord::private(self.chunks().now),
            #[cfg(not(test))]
            None => unreachable!("only tests have epochs without a directory"),
        }
    }
}

#[cfg(test)]
mod tests;
