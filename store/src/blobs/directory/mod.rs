//! Blobs in a directory of this host: append-only segment files and an index.
//!
//! ```text
//! put ──► written to a segment ──► staged ──(flush)──► segment synced ──► in the index
//!              │                      ▲                      │    │
//!              ▼                      └── index failed ──────┼────┘
//!         put fails                                          └─► sync failed: poisoned
//! ```
//!
//! - **Group commit.** One sync and one transaction make all staged blobs durable, whichever
//!   threads put them.
//! - **Visibility.** Other handles see a blob when it is in the index. By then it is durable.
//! - **Failed sync.** A failed sync may have lost blobs whose put has already returned, and the
//!   kernel reports the failure only once. The handle is poisoned: it fails every later put and
//!   flush, so no snapshot that relies on a lost blob is published.
//! - **Stamps.** Every blob that is put, or found present, gets the [stamp](crate::collection) of
//!   the handle before the call returns. A blob that a collection has deleted meanwhile counts as
//!   missing, and is stored again.
//! - **Crash.** A crash leaves bytes at the end of a segment that nothing refers to. The next
//!   process that appends to the segment overwrites them.

mod collecting;
#[cfg(test)]
mod collecting_tests;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod group;
mod index;
mod places;
mod scan;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once};

pub(crate) use self::collecting::ListedBlob;
use self::group::{Entry, Group, MAX_BLOBS, encode, place, record_len};
use self::index::{Index, Slot, Stored};
pub(crate) use self::places::BlobPlace;
use self::scan::scan;
use super::{Blobs, NewBlob};
use crate::collection::CollectionNumber;
use crate::durable::reserve::Reserve;
use crate::durable::segment::{Segment, path_of, segments_in};
use crate::durable::sync::SegmentSync;
use crate::encoding::StoragePolicy;
use crate::error::{Error, Result};
use crate::id::BlobId;
use crate::planted::{Defect, is_planted};
use crate::sys;

/// The staged blobs are flushed when they have this many bytes.
const STAGED_BYTES: u64 = 64 << 20;

/// The staged blobs are flushed when there are this many of them.
const STAGED_BLOBS: usize = 4096;

/// The most segments that are kept open for reading.
const OPEN_FILES: usize = 64;

/// A handle on the blobs of a directory.
pub(crate) struct DirectoryBlobs {
    directory: PathBuf,
    reserve: Reserve,
    keep_reserve: Once,
    index: Index,
    state: Mutex<WriterState>,
    sync: SegmentSync,
    /// The segment that this handle appends to.
    current: Mutex<Option<Arc<Segment>>>,
    /// Locked by the thread that makes a group durable.
    flushing: Mutex<()>,
    /// Segments that are open for reading, by number.
    files: Mutex<HashMap<u64, Arc<File>>>,
    /// The least stamp of what is put, or found present.
    stamp: AtomicU64,
}

#[derive(Default)]
struct WriterState {
    /// Blobs that are written and not in the index, with the least stamp that they will have.
    staged: HashMap<BlobId, (Slot, CollectionNumber)>,
    /// Blobs that were written and are not used, because another copy is staged.
    unused: Vec<Entry>,
    /// The staged blobs that no thread is flushing.
    waiting: Vec<Entry>,
    waiting_bytes: u64,
}

impl WriterState {
    /// Returns whether the waiting blobs have reached a limit.
    fn is_full(&self) -> bool {
        self.waiting_bytes >= STAGED_BYTES || self.waiting.len() >= STAGED_BLOBS
    }
}

impl DirectoryBlobs {
    /// Creates the directory and the index. Another process may do the same at the same time.
    pub(crate) fn create(repository: &Path) -> Result<()> {
        let directory = directory_in(repository);
        match fs::create_dir(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(Error::io("creating", &directory, error));
            }
            _ => {}
        }
        Self::open(repository).map(|_| ())
    }

    /// Whether the repository has a segment, so that blobs were stored in it.
    pub(crate) fn has_segments(repository: &Path) -> Result<bool> {
        let directory = directory_in(repository);
        match directory.is_dir() {
            true => Ok(!segments_in(&directory)?.is_empty()),
            false => Ok(false),
        }
    }

    /// Opens the blobs of a repository. Rebuilds the index if it is missing.
    pub(crate) fn open(repository: &Path) -> Result<Self> {
        let directory = directory_in(repository);
        let index = Index::open(repository, |report| {
            segments_in(&directory)?.into_iter().try_for_each(|number| {
                tracing::warn!(number, "the index is missing: rebuilding it from a segment");
                scan(&directory, number, report)
            })
        })?;
        let (state, current, flushing, files, stamp) = Default::default();
        let sync = SegmentSync::new(directory.clone());
        let reserve = Reserve::of(repository)?;
        Ok(Self {
            directory,
            reserve,
            keep_reserve: Once::new(),
            index,
            state,
            sync,
            current,
            flushing,
            files,
            stamp,
        })
    }

    fn stamp(&self) -> CollectionNumber {
        CollectionNumber(self.stamp.load(Ordering::SeqCst))
    }

    /// Returns the segment to append to.
    fn current(&self) -> Result<Arc<Segment>> {
        let mut current = self.current.lock().expect("no thread panics with the segment locked");
        if let Some(segment) = &*current
            && !segment.is_full()
        {
            return Ok(Arc::clone(segment));
        }
        let segment = Arc::new(self.take_segment()?);
        *current = Some(Arc::clone(&segment));
        Ok(segment)
    }

    /// Continues a segment that no other handle appends to, or starts an empty one.
    fn take_segment(&self) -> Result<Segment> {
        for number in self.index.segments_with_room()? {
            match self.lock_segment(number) {
                Ok(Some(segment)) if !segment.is_full() => return Ok(segment),
                Ok(_) => {}
                Err(error) => tracing::warn!(number, %error, "cannot continue a segment"),
            }
        }
        loop {
            // Another process may see the segment and lock it first.
            if let Some(segment) = self.lock_segment(self.index.new_segment()?)? {
                return Ok(segment);
            }
        }
    }

    /// Locks a segment to append to it. Returns `None` if another handle holds the lock.
    fn lock_segment(&self, number: u64) -> Result<Option<Segment>> {
        let Some(segment) = Segment::lock(&self.directory, number)? else { return Ok(None) };
        // The end is stable only while the lock is held.
        let Some(end) = self.index.acquire(number)? else {
            // A collection has removed the segment since it was listed, and the lock has just
            // created an empty file. No other process uses the number.
            segment.remove_file()?;
            return Ok(None);
        };
        if end == 0 {
            // The file may have just been created.
            sys::sync_dir(&self.directory)?;
        }
        segment.continue_at(end)?;
        Ok(Some(segment))
    }

    /// Returns the blobs that are not stored or are damaged, without duplicates. All others have at
    /// least the stamp of this handle.
    fn missing<'a>(&self, blobs: &[NewBlob<'a>]) -> Result<Vec<NewBlob<'a>>> {
        let stamp = self.stamp();
        let (mut unstaged, is_staged_below) = self.unstaged(blobs, stamp)?;
        if is_staged_below {
            // Another thread may be adding them to the index with the older stamp at this moment.
            self.flush()?;
            (unstaged, _) = self.unstaged(blobs, stamp)?;
        }
        let stored = self.stored(unstaged.iter().map(NewBlob::id).collect(), stamp)?;
        let is_stored = |blob: &NewBlob<'_>, stored: &Stored| {
            !stored.is_damaged || self.check_slot(&blob.id(), stored.slot).is_ok()
        };
        let all = unstaged.into_iter().zip(stored);
        let missing =
            all.filter(|(blob, stored)| !stored.is_some_and(|stored| is_stored(blob, &stored)));
        Ok(missing.map(|(blob, _)| blob).collect())
    }

    /// Returns the blobs that are not staged, without duplicates, and whether others are staged with
    /// a stamp below this one.
    fn unstaged<'a>(
        &self,
        blobs: &[NewBlob<'a>],
        stamp: CollectionNumber,
    ) -> Result<(Vec<NewBlob<'a>>, bool)> {
        let (mut unstaged, mut seen) = (Vec::with_capacity(blobs.len()), HashSet::new());
        let mut is_below = false;
        let state = self.state();
        self.sync.check()?;
        for blob in blobs {
            match state.staged.get(&blob.id()) {
                Some((_, staged)) => is_below |= *staged < stamp,
                None if seen.insert(blob.id()) => unstaged.push(blob.clone()),
                None => {}
            }
        }
        Ok((unstaged, is_below))
    }

    /// Returns what the index has of each blob, after its stamp was raised.
    fn stored(&self, ids: Vec<BlobId>, stamp: CollectionNumber) -> Result<Vec<Option<Stored>>> {
        // The catalog of this handle may have been restored from an older copy, while a collection of
        // the catalog before still deletes.
        let stamp = stamp.max(self.index.highest_collection()?);
        let mut stored = self.index.find_all(&ids)?;
        let is_below = |one: &Option<Stored>| {
            one.is_some_and(|one| one.stamp < stamp) && !is_planted(Defect::NoStamp)
        };
        let below: Vec<usize> = (0..ids.len()).filter(|at| is_below(&stored[*at])).collect();
        if !below.is_empty() {
            let raised = self.index.raise_stamps(below.iter().map(|at| &ids[*at]), stamp)?;
            for (at, is_there) in below.into_iter().zip(raised) {
                // A collection has deleted it since it was looked up.
                stored[at] = stored[at].filter(|_| is_there);
            }
        }
        Ok(stored)
    }

    /// Writes blobs and stages them. Returns how many bytes are added.
    fn append_and_stage(&self, blobs: &[NewBlob<'_>]) -> Result<u64> {
        let segment = self.current()?;
        let (group, slots) = append(&segment, blobs)?;
        let mut added = 0;
        let mut state = self.state();
        self.sync.check()?;
        let stamp = self.stamp();
        for (id, slot) in blobs.iter().map(NewBlob::id).zip(slots) {
            let entry = Entry { id, slot, group, segment: Arc::clone(&segment) };
            if state.staged.contains_key(&id) {
                // Another thread staged the blob first.
                state.unused.push(entry);
                continue;
            }
            state.staged.insert(id, (slot, stamp));
            state.waiting.push(entry);
            state.waiting_bytes += u64::from(slot.len);
            added += u64::from(slot.len);
        }
        Ok(added)
    }

    /// Makes blobs durable, then visible to other handles.
    fn commit(&self, entries: &[Entry], unused: &[Entry]) -> Result<()> {
        // With what is not used: its space is given back later, so nothing may be written there.
        let written = entries.iter().chain(unused);
        let ends = self.sync.sync(written.map(|one| (&one.segment, one.slot.end())))?;
        self.index.insert(entries, unused, ends.into_iter(), self.stamp())
    }

    /// Reads a blob from its slot and verifies its content.
    fn read(&self, id: &BlobId, slot: Slot, buf: &mut [u8]) -> Result<usize> {
        let path = path_of(&self.directory, slot.segment);
        let corrupt = |reason: String| {
            let object = format!("blob {id}, at {} of {}", slot.offset, path.display());
            Error::corrupt(object, reason)
        };
        let len = slot.len as usize;
        let Some(content) = buf.get_mut(..len) else {
            return Err(corrupt(format!("it has {len} bytes, at most {} are expected", buf.len())));
        };
        let read =
            self.file(slot.segment).and_then(|file| file.read_exact_at(content, slot.offset));
        let reason = match read {
            Ok(()) if BlobId::of(content) == *id => return Ok(len),
            Ok(()) => "its content does not match its name",
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => "the file is too short",
            Err(error) if error.kind() == io::ErrorKind::NotFound => "the file is missing",
            Err(error) => {
                if error.raw_os_error() == Some(libc::EIO) {
                    self.mark_damaged(id);
                }
                return Err(Error::io("reading", &path, error));
            }
        };
        self.mark_damaged(id);
        Err(corrupt(reason.into()))
    }

    /// Returns a segment's file. Reads use the page cache, because neighbours are often read next.
    fn file(&self, number: u64) -> io::Result<Arc<File>> {
        let mut files = self.files.lock().expect("no thread panics with the files locked");
        if let Some(file) = files.get(&number) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(File::open(path_of(&self.directory, number))?);
        if files.len() >= OPEN_FILES {
            files.clear();
        }
        files.insert(number, Arc::clone(&file));
        Ok(file)
    }

    /// Lets the next put of a blob replace it. If that cannot be recorded, nothing is worse than
    /// before.
    fn mark_damaged(&self, id: &BlobId) {
        if let Err(error) = self.index.mark_damaged(id) {
            tracing::warn!(blob = %id, %error, "failed to record that a blob is damaged");
        }
    }

    fn state(&self) -> MutexGuard<'_, WriterState> {
        self.state.lock().expect("no thread panics with the state locked")
    }
}

impl Blobs for DirectoryBlobs {
    fn get(&self, id: &BlobId, buf: &mut [u8]) -> Result<usize> {
        // First the staged blobs: a blob that leaves them is already in the index.
        let staged = self.state().staged.get(id).copied();
        let slot = match staged {
            Some((slot, _)) => Some(slot),
            None => self.index.find(id)?,
        };
        let Some(slot) = slot else { return Err(Error::MissingBlob { id: *id }) };
        self.read(id, slot, buf).or_else(|error| match self.index.find(id)? {
            // Another process has replaced the damaged blob in the meantime, or has stored the same
            // blob before this one.
            Some(other) if other != slot => self.read(id, other, buf),
            // A collection has deleted it in the meantime.
            None if staged.is_none() => Err(Error::MissingBlob { id: *id }),
            _ => Err(error),
        })
    }

    fn put(&self, blobs: &[NewBlob<'_>], _: &StoragePolicy) -> Result<u64> {
        let mut added = 0;
        if self.state().is_full() {
            // The last flush has failed. Without a retry the staged blobs would be unbounded.
            self.flush()?;
        }
        for missing in self.missing(blobs)?.chunks(MAX_BLOBS) {
            self.keep_reserve.call_once(|| self.reserve.keep());
            self.reserve.check(missing.iter().map(|blob| blob.content.len() as u64).sum())?;
            added += self.append_and_stage(missing)?;
            if self.state().is_full() {
                self.flush()?;
            }
        }
        Ok(added)
    }

    fn flush(&self) -> Result<()> {
        // A thread that waited for the lock finds its blobs durable, or waiting again.
        let _flushing = self.flushing.lock().expect("no thread panics during a flush");
        let (entries, unused) = {
            let mut state = self.state();
            self.sync.check()?;
            if state.waiting.is_empty() {
                return Ok(());
            }
            state.waiting_bytes = 0;
            (std::mem::take(&mut state.waiting), std::mem::take(&mut state.unused))
        };
        if entries.is_empty() && unused.is_empty() {
            return Ok(());
        }
        let result = self.commit(&entries, &unused);
        let mut state = self.state();
        match &result {
            Ok(()) => entries.iter().for_each(|entry| {
                state.staged.remove(&entry.id);
            }),
            Err(_) => {
                state.waiting_bytes +=
                    entries.iter().map(|entry| u64::from(entry.slot.len)).sum::<u64>();
                state.waiting.extend(entries);
                state.unused.extend(unused);
            }
        }
        result
    }

    fn raise_stamp(&self, number: CollectionNumber) {
        self.stamp.fetch_max(number.0, Ordering::SeqCst);
    }

    fn known(&self, ids: &[BlobId], _: &StoragePolicy) -> Result<Vec<bool>> {
        // What this process has staged may have an older stamp.
        self.flush()?;
        let stored = self.stored(ids.to_vec(), self.stamp())?;
        Ok(stored.into_iter().map(|one| one.is_some_and(|one| !one.is_damaged)).collect())
    }
}

/// Returns the directory of the segments.
fn directory_in(repository: &Path) -> PathBuf {
    repository.join("segments")
}

/// Appends a group. Returns it, and the slots of its blobs. Syncs nothing.
fn append(segment: &Segment, blobs: &[NewBlob<'_>]) -> Result<(Group, Vec<Slot>)> {
    let contents: Vec<_> = blobs.iter().map(|blob| blob.content).collect();
    let lens: Vec<_> = contents.iter().map(|content| content.len()).collect();
    let mut slots = Vec::new();
    let start = segment.append(record_len(blobs.len()), &contents, |start| {
        (slots, _) = place(segment.number, start, &lens);
        let ids = blobs.iter().map(NewBlob::id);
        encode(segment.number, ids.zip(slots.iter().copied()))
    })?;
    Ok((Group::new(start, blobs.len()), slots))
}
