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

use cairn_store::{Consistency, NewSnapshot};

use super::Epoch;
use super::chunk_state::ChunkStates;
use super::layer_state::LayerState;
use crate::mapping::{PAGE_BYTES, Words};
use crate::mirror::bits::{Bits, DirtySet};
use crate::mirror::files::disk_file::allocate;

const MAGIC: u64 = u64::from_le_bytes(*b"CRNEPOCH");
const VERSION: u64 = 3;

/// Indices of words in the header.
mod word {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 1;
    pub(super) const CHUNKS: usize = 2;
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
    /// 1 once the layer has a table.
    pub(super) const HAS_TABLE: usize = 11;
    /// A length in bytes, then 8 words of text.
    pub(super) const LABEL: usize = 16;
    /// A length in bytes, then 64 words of text.
    pub(super) const REASON: usize = 32;
    pub(super) const COUNT: usize = 512;
}

const LABEL_MAX_BYTES: usize = 64;
const REASON_MAX_BYTES: usize = 512;

/// The record of one epoch: its state, the states of its chunks and, once a checkpoint has ended
/// the epoch, that checkpoint.
pub(crate) struct EpochRecord {
    header: Words,
    pub(crate) chunks: ChunkStates,
    path: Option<PathBuf>,
}

/// Offsets of the parts in the file, and its length.
struct FileParts {
    dirty: u64,
    summary: u64,
    idle: u64,
    len: u64,
}

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
            path: None,
        };
        record.stamp(chunks);
        Ok(record)
    }

    fn create(path: &Path, chunks: u64) -> io::Result<EpochRecord> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        let record = allocate(&file, file_parts(chunks).len)
            .and_then(|()| EpochRecord::map(&file, path, chunks))
            // The next process cannot use half of a file.
            .inspect_err(|_| drop(fs::remove_file(path)))?;
        record.stamp(chunks);
        Ok(record)
    }

    fn stamp(&self, chunks: u64) {
        self.header[word::CHUNKS].store(chunks, Ordering::Relaxed);
        self.header[word::VERSION].store(VERSION, Ordering::Relaxed);
        self.header[word::MAGIC].store(MAGIC, Ordering::Release);
    }

    fn map(file: &File, path: &Path, chunks: u64) -> io::Result<EpochRecord> {
        let FileParts { dirty, summary, idle, .. } = file_parts(chunks);
        let bits = |offset, count| Bits::shared(file, offset, count);
        let dirty = DirtySet::new(bits(dirty, chunks)?, bits(summary, chunks.div_ceil(64))?);
        Ok(EpochRecord {
            header: Words::shared(file, 0, word::COUNT)?,
            chunks: ChunkStates::new(dirty, bits(idle, chunks)?),
            path: Some(path.into()),
        })
    }

    /// Opens the record that a process left. `None` if the file is not the record of an epoch that
    /// has begun, or if nothing of the epoch is needed any more.
    pub(crate) fn open(path: &Path, chunks: u64) -> io::Result<Option<EpochRecord>> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() != file_parts(chunks).len {
            return Ok(None);
        }
        let record = EpochRecord::map(&file, path, chunks)?;
        let is = |at: usize, value| record.header[at].load(Ordering::Acquire) == value;
        let has_begun = is(word::MAGIC, MAGIC) && is(word::CHUNKS, chunks) && !is(word::EPOCH, 0);
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
        record.chunks.adopt(chunks);
        Ok(known.then_some(record))
    }

    pub(crate) fn epoch(&self) -> Epoch {
        Epoch(self.header[word::EPOCH].load(Ordering::Acquire))
    }

    /// Begins an epoch with this record.
    pub(crate) fn begin(&self, epoch: Epoch) {
        self.header[word::EPOCH].store(epoch.0, Ordering::Release);
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

    /// Ends the epoch: writes go into the next one.
    pub(crate) fn freeze(&self) {
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
        set(word::TIME, new.time);
        set(word::DIRTY_BYTES, new.dirty_bytes);
        set(word::PAUSE_US, new.pause_us);
        let consistency = match new.consistency {
            Consistency::Crash => 0,
            Consistency::Filesystem => 1,
            Consistency::Application => 2,
        };
        set(word::CONSISTENCY, consistency);
        self.put_text(word::LABEL, new.label.as_deref().unwrap_or(""), LABEL_MAX_BYTES);
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
        if let Some(path) = &self.path
            && let Err(error) = fs::remove_file(path)
        {
            let path = path.display();
            tracing::error!(%error, %path, "cannot remove the record of an epoch that has ended");
        }
    }
}

/// Creates the records of epochs. One record is created ahead of time, so that a checkpoint does
/// not wait for it.
pub(crate) struct EpochFiles {
    chunks: u64,
    /// The directory of the files. Without one, records are in this process's own memory.
    dir: Option<PathBuf>,
    next_file: AtomicU64,
    spare: Mutex<Option<EpochRecord>>,
}

impl EpochFiles {
    /// Records of a disk with this many chunks, in this process's own memory.
    #[cfg(test)]
    pub(crate) fn private(chunks: u64) -> EpochFiles {
        EpochFiles { chunks, dir: None, next_file: AtomicU64::new(0), spare: Mutex::default() }
    }

    /// Opens the records that a process left in `dir`, and returns them oldest first. Files that
    /// are of no use are removed.
    pub(crate) fn open(dir: &Path, chunks: u64) -> io::Result<(EpochFiles, Vec<EpochRecord>)> {
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
        let next_file = AtomicU64::new(next_file);
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

    fn make(&self) -> io::Result<EpochRecord> {
        match &self.dir {
            Some(dir) => {
                let number = self.next_file.fetch_add(1, Ordering::Relaxed);
                EpochRecord::create(&dir.join(format!("epoch-{number}")), self.chunks)
            }
            #[cfg(test)]
            None => EpochRecord::private(self.chunks),
            #[cfg(not(test))]
            None => unreachable!("only tests have epochs without a directory"),
        }
    }
}

#[cfg(test)]
mod tests;
