//! Blobs on their way to durability, synced in groups.
//!
//! A blob's name must imply durable content, so each file is synced before it gets its name. One sync
//! for each would wait for the disk each time. Instead files are staged: written, their writeback
//! started, and kept open under temporary names. When enough have gathered, the thread that adds the
//! last one syncs and names them all; meanwhile other threads fill the next group.
//!
//! ```text
//! put ──► written ──► waiting ──(group full, or flush)──► settling ──► named ──► directory synced
//!            │                        ▲      sync, rename │              (by flush)
//!            ▼                        └── rename failed ──┘
//!       write failed: put fails            sync failed: poisoned
//! ```
//!
//! A failed rename keeps the file staged, and the next flush tries again. A failed sync may have lost
//! blobs whose put has already returned, and the kernel tells only once: the stage is poisoned, and
//! fails every put and flush from then on, so that nothing that relies on a lost blob is published.
//!
//! A crash leaves temporary files, which the next open removes, and named blobs that nothing refers to.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::{io, mem, thread};

use super::temp::TempFile;
use crate::error::{Error, Result};
use crate::id::BlobId;
use crate::sys;

/// A group is settled when it has this many files,
const GROUP_FILES: usize = 64;
/// or this many bytes.
const GROUP_BYTES: u64 = 16 << 20;
/// Directories that are synced at the same time.
const SYNC_THREADS: usize = 8;
/// The most files that are open at once, over all groups, up to one for each thread in `add`.
const MAX_OPEN: usize = 4 * GROUP_FILES;

pub(crate) struct Stage {
    blobs: PathBuf,
    state: Mutex<State>,
    /// Signalled when a group is settled.
    settled: Condvar,
    /// Held while directories are synced: a flush that finds none left waits for the one that took
    /// them.
    barrier: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// Everything that is staged and not named.
    open: HashMap<BlobId, Arc<Staged>>,
    /// Of these, what no thread settles yet.
    waiting: Vec<Arc<Staged>>,
    waiting_bytes: u64,
    settling: usize,
    next_serial: u64,
    /// Directories whose entries must be synced, by their position in the fan-out.
    unsynced: BTreeSet<u8>,
    poisoned: bool,
}

struct Staged {
    id: BlobId,
    serial: u64,
    temp: TempFile,
}

impl Stage {
    pub(crate) fn new(blobs: PathBuf) -> Self {
        let (state, settled, barrier) = Default::default();
        Self { blobs, state, settled, barrier }
    }

    /// The content of a staged blob, while it has no name.
    pub(crate) fn with_staged<T>(
        &self,
        id: &BlobId,
        read: impl FnOnce(&TempFile) -> T,
    ) -> Option<T> {
        let staged = self.lock().open.get(id).cloned()?;
        Some(read(&staged.temp))
    }

    /// The next flush syncs the directory of this blob, whose name exists.
    pub(crate) fn rely_on(&self, id: &BlobId) {
        self.lock().unsynced.insert(directory_of(id));
    }

    /// Fails when an earlier sync failed.
    pub(crate) fn check(&self) -> Result<()> {
        self.check_state(&self.lock())
    }

    /// Takes a written file. Returns whether it adds a blob: not if another thread was first.
    pub(crate) fn add(&self, id: BlobId, temp: TempFile) -> Result<bool> {
        sys::start_writeback(temp.file());
        let mut state = self.lock();
        while state.open.len() >= MAX_OPEN && state.settling > 0 {
            state = self.wait(state);
        }
        self.check_state(&state)?;
        if state.open.contains_key(&id) {
            return Ok(false);
        }
        let serial = state.next_serial;
        state.next_serial += 1;
        state.waiting_bytes += temp.len();
        let staged = Arc::new(Staged { id, serial, temp });
        state.open.insert(id, Arc::clone(&staged));
        state.waiting.push(staged);
        if state.waiting.len() >= GROUP_FILES || state.waiting_bytes >= GROUP_BYTES {
            self.settle(state)?;
        }
        Ok(true)
    }

    /// Returns when everything that was added before this call has durable content under its name.
    pub(crate) fn settle_all(&self) -> Result<()> {
        let mut state = self.lock();
        let end = state.next_serial;
        loop {
            self.check_state(&state)?;
            if state.waiting.iter().any(|staged| staged.serial < end) {
                self.settle(state)?;
                state = self.lock();
            } else if state.open.values().any(|staged| staged.serial < end) {
                state = self.wait(state);
            } else {
                return Ok(());
            }
        }
    }

    /// Makes everything durable that was added or relied on before this call.
    pub(crate) fn flush(&self) -> Result<()> {
        self.settle_all()?;
        let _barrier = self.barrier.lock().expect("no thread panics while it syncs");
        self.check()?;
        let unsynced: Vec<u8> = mem::take(&mut self.lock().unsynced).into_iter().collect();
        // The disk merges flushes that come in together.
        let share = unsynced.len().div_ceil(SYNC_THREADS).max(1);
        let results: Vec<Result<()>> = thread::scope(|scope| {
            let shares = unsynced.chunks(share).map(|part| {
                let builder = thread::Builder::new().name("sync".into());
                (part, builder.spawn_scoped(scope, || self.sync_directories(part)))
            });
            let shares: Vec<_> = shares.collect();
            let join = |(part, thread): (&[u8], io::Result<thread::ScopedJoinHandle<'_, _>>)| {
                match thread {
                    Ok(thread) => thread.join().expect("syncing does not panic"),
                    // No thread to be had: then one after the other.
                    Err(_) => self.sync_directories(part),
                }
            };
            shares.into_iter().map(join).collect()
        });
        results.into_iter().collect()
    }

    /// Syncs directories. Where only descriptors or memory were short, the next flush tries again;
    /// any other failure is final.
    fn sync_directories(&self, directories: &[u8]) -> Result<()> {
        for (at, directory) in directories.iter().enumerate() {
            let path = self.blobs.join(format!("{directory:02x}"));
            if let Err(error) = File::open(&path).and_then(|opened| opened.sync_all()) {
                match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM) => {
                        self.lock().unsynced.extend(&directories[at..]);
                    }
                    _ => self.lock().poisoned = true,
                }
                return Err(Error::io("syncing", &path, error));
            }
        }
        Ok(())
    }

    /// Syncs and names all that waits. Other threads go on meanwhile.
    fn settle(&self, mut state: MutexGuard<'_, State>) -> Result<()> {
        let group = mem::take(&mut state.waiting);
        state.waiting_bytes = 0;
        state.settling += 1;
        drop(state);

        let synced = group.iter().try_for_each(|staged| staged.temp.sync());
        let lost = synced.is_err();
        let mut named = 0;
        let result = synced.and_then(|()| {
            group.iter().try_for_each(|staged| {
                staged.temp.place(&path_of(&self.blobs, &staged.id))?;
                named += 1;
                Ok(())
            })
        });

        let mut state = self.lock();
        state.settling -= 1;
        for staged in &group[..named] {
            state.open.remove(&staged.id);
            state.unsynced.insert(directory_of(&staged.id));
        }
        if lost {
            state.poisoned = true;
            state.open.clear();
            state.waiting.clear();
        } else {
            state.waiting_bytes += group[named..].iter().map(|s| s.temp.len()).sum::<u64>();
            state.waiting.extend_from_slice(&group[named..]);
        }
        drop(state);
        self.settled.notify_all();
        result
    }

    fn check_state(&self, state: &State) -> Result<()> {
        if state.poisoned {
            return Err(Error::Poisoned { path: self.blobs.clone() });
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the stage")
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.settled.wait(state).expect("no thread panics while it holds the stage")
    }
}

/// The file of a blob.
pub(crate) fn path_of(blobs: &Path, id: &BlobId) -> PathBuf {
    blobs.join(format!("{:02x}", directory_of(id))).join(id.to_string())
}

fn directory_of(id: &BlobId) -> u8 {
    id.as_bytes()[0]
}
