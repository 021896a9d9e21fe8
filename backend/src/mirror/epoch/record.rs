//! What is known of one epoch, in shared memory: it outlives the process.
//!
//! ```text
//! page 0   header: the words below
//! then     dirty chunks, a bit each   ┐
//! then     their summary              ├ each from a page's start
//! then     idle chunks, a bit each    ┘
//! ```
//!
//! Words are written in an order in which every prefix makes sense, because the process may end between
//! any two of them: a record's words first, the word that says that they are there last.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use cairn_store::{Consistency, NewSnapshot};

use super::Epoch;
use crate::mapping::{PAGE_BYTES, Words};
use crate::mirror::bits::{Bits, DirtySet};
use crate::mirror::files::disk_file::allocate;

const MAGIC: u64 = u64::from_le_bytes(*b"CRNEPOCH");
const VERSION: u64 = 1;

/// RangeAllocator of words in the header.
mod word {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 1;
    pub(super) const CHUNKS: usize = 2;
    pub(super) const EPOCH: usize = 3;
    pub(super) const STATE: usize = 4;
    pub(super) const NUMBER: usize = 5;
    pub(super) const TIME: usize = 6;
    pub(super) const DIRTY_BYTES: usize = 7;
    pub(super) const PAUSE_US: usize = 8;
    pub(super) const CONSISTENCY: usize = 9;
    /// A length, then 8 words of bytes.
    pub(super) const LABEL: usize = 16;
    /// A length, then 64 words of bytes.
    pub(super) const REASON: usize = 32;
    pub(super) const COUNT: usize = 512;
}

const LABEL_MAX_BYTES: usize = 64;
const REASON_MAX_BYTES: usize = 512;

/// Values of the state word: a bit each.
const ACCEPTED: u64 = 1;
const FAILED: u64 = 2;
const ENDED: u64 = 4;

/// One epoch's sets of chunks and, once a checkpoint has ended it, that checkpoint's record.
pub(crate) struct EpochRecord {
    header: Words,
    /// Chunks that were changed in the epoch.
    pub(crate) dirty: DirtySet,
    /// Chunks that the epoch's snapshot needs nothing of any more.
    pub(crate) idle: Bits,
    path: Option<PathBuf>,
}

/// Offsets of the parts in the file, and its length.
struct SplitRequest {
    dirty: u64,
    summary: u64,
    idle: u64,
    len: u64,
}

fn parts(chunks: u64) -> SplitRequest {
    let page = PAGE_BYTES as u64;
    let bytes = |bits: u64| (bits.div_ceil(64).max(1) * 8).next_multiple_of(page);
    let dirty = page;
    let summary = dirty + bytes(chunks);
    let idle = summary + bytes(chunks.div_ceil(64));
    SplitRequest { dirty, summary, idle, len: idle + bytes(chunks) }
}

impl EpochRecord {
    /// In this process's own memory.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn private(chunks: u64) -> io::Result<EpochRecord> {
        let dirty = DirtySet::new(Bits::zeroed(chunks)?, Bits::zeroed(chunks.div_ceil(64))?);
        let state = EpochRecord {
            header: Words::zeroed(word::COUNT)?,
            dirty,
            idle: Bits::zeroed(chunks)?,
            path: None,
        };
        state.stamp(chunks);
        Ok(state)
    }

    fn create(path: &Path, chunks: u64) -> io::Result<EpochRecord> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        let state = allocate(&file, parts(chunks).len)
            .and_then(|()| EpochRecord::map(&file, path, chunks))
            // Half of a file is of no use to the next process.
            .inspect_err(|_| drop(fs::remove_file(path)))?;
        state.stamp(chunks);
        Ok(state)
    }

    fn stamp(&self, chunks: u64) {
        self.header[word::CHUNKS].store(chunks, Ordering::Relaxed);
        self.header[word::VERSION].store(VERSION, Ordering::Relaxed);
        self.header[word::MAGIC].store(MAGIC, Ordering::Release);
    }

    fn map(file: &File, path: &Path, chunks: u64) -> io::Result<EpochRecord> {
        let SplitRequest { dirty, summary, idle, .. } = parts(chunks);
        let bits = |offset, count| Bits::shared(file, offset, count);
        let dirty = DirtySet::new(bits(dirty, chunks)?, bits(summary, chunks.div_ceil(64))?);
        Ok(EpochRecord {
            header: Words::shared(file, 0, word::COUNT)?,
            dirty,
            idle: bits(idle, chunks)?,
            path: Some(path.into()),
        })
    }

    /// Takes up what a process left. `None` if it is not the state of an epoch that has begun.
    pub(crate) fn open(path: &Path, chunks: u64) -> io::Result<Option<EpochRecord>> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() != parts(chunks).len {
            return Ok(None);
        }
        let state = EpochRecord::map(&file, path, chunks)?;
        let is = |at: usize, value| state.header[at].load(Ordering::Acquire) == value;
        let known = is(word::MAGIC, MAGIC)
            && is(word::VERSION, VERSION)
            && is(word::CHUNKS, chunks)
            && !is(word::EPOCH, 0);
        state.dirty.recount(chunks);
        Ok(known.then_some(state))
    }

    pub(crate) fn epoch(&self) -> Epoch {
        Epoch(self.header[word::EPOCH].load(Ordering::Acquire))
    }

    /// The epoch begins with this state.
    pub(crate) fn begin(&self, epoch: Epoch) {
        self.header[word::EPOCH].store(epoch.0, Ordering::Release);
    }

    /// Records the checkpoint that ended the epoch: from here on it survives the process.
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
        self.header[word::STATE].fetch_or(ACCEPTED, Ordering::Release);
    }

    /// The checkpoint that ended the epoch, if one did.
    pub(crate) fn accepted(&self) -> Option<NewSnapshot> {
        if self.header[word::STATE].load(Ordering::Acquire) & ACCEPTED == 0 {
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

    /// Records that the epoch's snapshot cannot be had any more. The first reason stays.
    pub(crate) fn fail(&self, reason: &str) {
        if self.failure().is_none() {
            self.put_text(word::REASON, reason, REASON_MAX_BYTES);
            self.header[word::STATE].fetch_or(FAILED, Ordering::Release);
        }
    }

    /// Records that the epoch's checkpoint has ended without a snapshot: nobody takes it up again.
    pub(crate) fn end(&self) {
        self.header[word::STATE].fetch_or(ENDED, Ordering::Release);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.header[word::STATE].load(Ordering::Acquire) & ENDED != 0
    }

    /// Why the epoch's snapshot cannot be had, if so.
    pub(crate) fn failure(&self) -> Option<String> {
        let failed = self.header[word::STATE].load(Ordering::Acquire) & FAILED != 0;
        failed.then(|| self.text(word::REASON, REASON_MAX_BYTES))
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

    /// Forgets the epoch: the next process does not find it.
    pub(crate) fn remove(&self) {
        if let Some(path) = &self.path
            && let Err(error) = fs::remove_file(path)
        {
            tracing::error!(%error, path = %path.display(), "an epoch that has ended cannot be removed");
        }
    }
}

/// Makes the state of epochs to come. One is made ahead, so that a checkpoint need not wait for it.
pub(crate) struct EpochFiles {
    chunks: u64,
    /// The directory of the files; memory of this process if there is none.
    dir: Option<PathBuf>,
    next_file: AtomicU64,
    spare: Mutex<Option<EpochRecord>>,
}

impl EpochFiles {
    /// EpochFiles of a disk with this many chunks that leave nothing behind.
    #[cfg(test)]
    pub(crate) fn private(chunks: u64) -> EpochFiles {
        EpochFiles { chunks, dir: None, next_file: AtomicU64::new(0), spare: Mutex::default() }
    }

    /// Takes up the epochs that a process left in `dir`, oldest first. Others are removed.
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

    /// A state for the next epoch.
    pub(crate) fn allocate(&self) -> io::Result<EpochRecord> {
        let spare = self.spare.lock().expect("no code panics with the spare locked").take();
        spare.map_or_else(|| self.make(), Ok)
    }

    /// Makes one ahead.
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
mod tests {
    use cairn_store::{Consistency, NewSnapshot};

    use super::{Epoch, EpochFiles};

    fn new(label: Option<&str>) -> NewSnapshot {
        NewSnapshot {
            number: 7,
            label: label.map(String::from),
            consistency: Consistency::Filesystem,
            time: 1_800_000_000,
            dirty_bytes: 12 << 20,
            pause_us: 33,
        }
    }

    #[test]
    fn an_epoch_is_found_again_with_its_sets_and_its_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let (epochs, found) = EpochFiles::open(dir.path(), 100_000).unwrap();
        assert!(found.is_empty());
        epochs.prepare().unwrap();
        let (first, second) = (epochs.allocate().unwrap(), epochs.allocate().unwrap());
        epochs.prepare().unwrap();
        first.begin(Epoch(4));
        second.begin(Epoch(5));
        first.dirty.insert(3);
        first.dirty.insert(99_999);
        first.idle.set(3);
        first.accept(&new(Some("before-upgrade")));
        second.fail("no room");
        drop((epochs, first, second));
        let (_, found) = EpochFiles::open(dir.path(), 100_000).unwrap();
        assert_eq!(found.iter().map(|one| one.epoch().0).collect::<Vec<_>>(), [4, 5]);
        let (first, second) = (&found[0], &found[1]);
        assert_eq!(first.dirty.iter().collect::<Vec<_>>(), [3, 99_999]);
        assert_eq!(first.dirty.len(), 2);
        assert!(first.idle.get(3) && !first.idle.get(99_999));
        assert_eq!(first.accepted(), Some(new(Some("before-upgrade"))));
        assert_eq!(first.failure(), None);
        assert_eq!((second.accepted(), second.failure()), (None, Some("no room".into())));
        first.remove();
        assert_eq!(EpochFiles::open(dir.path(), 100_000).unwrap().1.len(), 1);
        assert_eq!(EpochFiles::open(dir.path(), 5).unwrap().1.len(), 0, "of another disk");
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let dir = tempfile::tempdir().unwrap();
        let (epochs, _) = EpochFiles::open(dir.path(), 10).unwrap();
        let state = epochs.allocate().unwrap();
        state.fail(&"ü".repeat(600));
        assert_eq!(state.failure(), Some("ü".repeat(256)));
    }
}
