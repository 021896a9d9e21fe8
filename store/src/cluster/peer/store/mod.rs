//! What a peer keeps, in its data directory.
//!
//! ```text
//! DIR/peer.json      the marker: who this peer is
//! DIR/segments/      fragments, appended to a log
//! DIR/fragments.db   which fragments there are, and where
//! ```
//!
//! ```text
//! put ──► verified, appended to the log ──► staged ──(flush: one sync)──► pending ──(many at once)──► in the table
//!                                              │                            │ durable and known
//!                                              └─► sync failed: poisoned    └─► found again in the log after a crash
//! ```
//!
//! A fragment is known when it is durable in the log; until the table knows it, it is *pending*, in memory. A
//! failed sync may have lost fragments whose put has returned, and the kernel tells only once: the store is poisoned, and
//! fails every put and flush from then on.
//!
//! A deletion is the other way round: the row goes, durably, then the block. What a crash leaves in between takes space,
//! and no more. A fragment that a put relies on, since it was there, is not deleted before that put has ended.
//!
//! Locks are taken in the order `flushing`, `log`, `settling`, `state`.

#[cfg(test)]
mod delete_tests;
mod filter;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod group;
mod log;
#[cfg(test)]
mod model_tests;
mod pending;
mod reading;
mod reclaim;
mod table;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use self::filter::Filter;
use self::group::{Key, KnownFragment, MAX_GROUP};
use self::log::{Files, Log};
use self::pending::Pending;
use self::reclaim::reclaim;
use self::table::{DATABASE, Table};
use crate::cluster::protocol::{FragmentId, Usage};
use crate::durable::data_directory::DataDirectory;
use crate::durable::segment::{ALIGNMENT, Segment};
use crate::durable::sync::SegmentSync;
use crate::encoding::fragment::Fragment;
use crate::error::{Error, Result};
use crate::id::{BlobId, PeerId};
use crate::sys;

/// Versions 1 and 2 were never released.
const DIRECTORY: DataDirectory = DataDirectory {
    server: "peer",
    marker: "peer.json",
    format: "cairn-peer",
    version: 3,
    parts: &["segments", DATABASE],
};

/// The most fragments of one blob: of all ways to encode it that anybody may try.
const MAX_FRAGMENTS: usize = 64;

/// The table is told when so many fragments are pending, or so many bytes of them.
const MANY: (usize, u64) = (1024, 256 << 20);

/// Without that, no more than so many times as much is taken.
const BOUND: usize = 16;

/// Names that are read from the table at a time, for the filter. Tests have few, and must see more than one step.
const NAMES: usize = if cfg!(test) { 3 } else { 1 << 14 };

/// A fragment whose put has not ended.
struct Staged {
    id: FragmentId,
    known: KnownFragment,
    how: Staging,
}

enum Staging {
    /// It is new, and takes so much space.
    New(u64, Arc<Segment>),
    /// It replaces one that is damaged.
    Instead(KnownFragment, Arc<Segment>),
    /// It was there: its age begins again.
    Again,
}

#[derive(Default)]
pub(super) struct StoreState {
    staged: Vec<Staged>,
    /// Fragments whose put has not ended, those included that are just flushed.
    busy: HashSet<FragmentId>,
    pending: Pending,
    filter: Filter,
    /// Space of fragments that are known, and that was taken for those that are not yet.
    used: u64,
    taken: u64,
    /// Space that clients have reserved and not used.
    reserved: u64,
    /// Fragments that are known.
    fragments: u64,
}

/// The fragments of one peer.
pub struct PeerStore {
    id: PeerId,
    capacity: Option<u64>,
    directory: PathBuf,
    /// It may be used by one process only.
    _lock: File,
    table: Table,
    files: Files,
    key: Key,
    sync: SegmentSync,
    /// Held by the one thread that makes fragments durable.
    flushing: Mutex<()>,
    /// Held by who puts fragments, and by who deletes some.
    log: Mutex<Log>,
    /// Held by the one thread that tells the table.
    settling: Mutex<()>,
    state: Mutex<StoreState>,
}

/// Room on a peer that one client has reserved. What is left of it is free again when this is dropped.
pub struct Room {
    store: Arc<PeerStore>,
    left: Mutex<u64>,
}

impl Room {
    /// Nothing yet.
    pub fn new(store: Arc<PeerStore>) -> Room {
        Room { store, left: Mutex::new(0) }
    }

    /// Reserves so much, instead of what was reserved before. Fails if there is not that much, and then what was
    /// reserved before stays.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        let capacity = self.store.usage()?.capacity;
        let mut state = self.store.state();
        let mut left = self.left();
        let others = state.used + state.taken + state.reserved - *left;
        if others.checked_add(bytes).is_none_or(|all| all > capacity) && bytes > *left {
            return Err(Error::PeerFull { path: self.store.directory.clone(), capacity });
        }
        state.reserved = state.reserved - *left + bytes;
        *left = bytes;
        Ok(())
    }

    fn left(&self) -> MutexGuard<'_, u64> {
        self.left.lock().expect("no thread panics while it counts")
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let left = *self.left();
        self.store.state().reserved -= left;
    }
}

/// What comes of a fragment that is put.
enum Admitted {
    /// It is new, and space was taken for it.
    New(u64),
    /// It is there, but damaged.
    Damaged(KnownFragment),
    /// It is there.
    There(KnownFragment),
    /// Another put of it has not ended.
    Busy,
}

impl PeerStore {
    /// Opens a data directory, and makes it first if it is empty or not there. Without a capacity the file system
    /// is the limit.
    pub fn open(directory: &Path, capacity: Option<u64>) -> Result<PeerStore> {
        let make = || log::make(directory).and_then(|()| table::make(directory));
        let (lock, id) = DIRECTORY.take(directory, make)?;
        let id = id.parse()?;
        // A table that is lost is made again from the log.
        make()?;
        let table = Table::open(directory)?;
        let log = Log::open(directory, &id, &table)?;
        let (fragments, used) = table.count()?;
        let store = PeerStore {
            id,
            capacity,
            directory: directory.to_owned(),
            _lock: lock,
            table,
            files: Files::new(directory),
            key: Key::of(&id),
            sync: SegmentSync::new(directory.to_owned()),
            flushing: Mutex::default(),
            log: Mutex::new(log),
            settling: Mutex::default(),
            state: Mutex::new(StoreState { fragments, used, ..StoreState::default() }),
        };
        store.read_names()?;
        Ok(store)
    }

    /// Who this peer is.
    pub fn id(&self) -> PeerId {
        self.id
    }

    /// Takes fragments: many at once take less space and time. They are durable, and others find them, after the
    /// next [`PeerStore::flush`]. Tells for each whether it was taken; fails if the disk does.
    pub fn put(&self, fragments: &[Fragment]) -> Result<Vec<Result<()>>> {
        self.put_in(fragments, |_| None)
    }

    /// As [`PeerStore::put`], into the room that was reserved for each, as long as there is some.
    pub fn put_in<'a>(
        &self,
        fragments: &[Fragment],
        room: impl Fn(usize) -> Option<&'a Room>,
    ) -> Result<Vec<Result<()>>> {
        let mut log = self.log();
        self.sync.check()?;
        if self.is_pending(BOUND) {
            // The table could not be told. Without another try there would be no bound.
            self.settle(false)?;
        }
        let capacity = self.usage()?.capacity;
        let ids: Vec<_> = fragments.iter().map(id).collect();
        // Before what is known: what is no more on its way is.
        let (mut busy, mut coming) = {
            let state = self.state();
            let busy: HashSet<_> =
                ids.iter().filter(|id| state.busy.contains(id)).copied().collect();
            // Fragments of each blob that will be known.
            let mut coming = HashMap::<BlobId, usize>::new();
            for one in state.staged.iter().filter(|one| matches!(one.how, Staging::New(..))) {
                *coming.entry(one.id.blob).or_default() += 1;
            }
            (busy, coming)
        };
        let blobs: Vec<_> = ids.iter().map(|id| id.blob).collect();
        let known = self.known(&blobs)?;
        let mut results = Vec::with_capacity(fragments.len());
        let (mut again, mut new) = (Vec::new(), Vec::new());
        for (at, (fragment, found)) in fragments.iter().zip(known).enumerate() {
            let id = ids[at];
            let coming = coming.entry(id.blob).or_default();
            let is_busy = busy.contains(&id);
            let admitted = self.admit(fragment, found.known, *coming, capacity, room(at), is_busy);
            if admitted.is_ok() {
                busy.insert(id);
            }
            results.push(match admitted {
                Ok(Admitted::Busy) => Ok(()),
                Ok(Admitted::There(known)) => {
                    again.push(Staged { id, known, how: Staging::Again });
                    Ok(())
                }
                Ok(Admitted::New(bytes)) => {
                    *coming += 1;
                    new.push((fragment, id, None, bytes));
                    Ok(())
                }
                Ok(Admitted::Damaged(old)) => {
                    new.push((fragment, id, Some(old), 0));
                    Ok(())
                }
                Err(error) => Err(error),
            });
        }
        let bytes = new.iter().map(|(.., bytes)| bytes).sum::<u64>();
        let mut staged = again;
        for group in new.chunks_mut(MAX_GROUP) {
            let fragments: Vec<_> = group.iter().map(|(fragment, ..)| *fragment).collect();
            let (segment, all) = log.append(&self.table, &fragments).inspect_err(|_| {
                // What was appended before, nothing refers to.
                self.state().taken -= bytes;
            })?;
            for ((_, id, old, bytes), known) in group.iter_mut().zip(all) {
                let segment = segment.clone();
                let how = match old.take() {
                    Some(old) => Staging::Instead(old, segment),
                    None => Staging::New(*bytes, segment),
                };
                staged.push(Staged { id: *id, known, how });
            }
        }
        let mut state = self.state();
        state.busy.extend(staged.iter().map(|one| one.id));
        state.staged.extend(staged);
        Ok(results)
    }

    /// Verifies a fragment and takes space for it, if it is new.
    fn admit(
        &self,
        fragment: &Fragment,
        known: Vec<KnownFragment>,
        coming: usize,
        capacity: u64,
        room: Option<&Room>,
        is_busy: bool,
    ) -> Result<Admitted> {
        let Fragment { description, index, block } = fragment;
        if !description.matches((*index).into(), block) {
            let reason = "it is not the block that its description names";
            return Err(Error::corrupt(format!("a fragment of {}", description.blob), reason));
        }
        if is_busy {
            return Ok(Admitted::Busy);
        }
        let count = known.len() + coming;
        let is_it = |one: &KnownFragment| one.index == *index && one.description == *description;
        if let Some(known) = known.into_iter().find(is_it) {
            let mut there = vec![0; block.len()];
            let read = self.files.read(&known, &mut there);
            let path = self.files.path(known.place.segment);
            let is_whole = read.map_err(|error| Error::io("reading", &path, error))?;
            return Ok(if is_whole { Admitted::There(known) } else { Admitted::Damaged(known) });
        }
        if count >= MAX_FRAGMENTS {
            let reason = "there are too many encodings of it";
            return Err(Error::corrupt(format!("blob {}", description.blob), reason));
        }
        let bytes = block.len().next_multiple_of(ALIGNMENT) as u64;
        let mut state = self.state();
        let mut left = room.map(Room::left);
        let drawn = left.as_ref().map_or(0, |left| bytes.min(**left));
        if state.used + state.taken + state.reserved - drawn + bytes > capacity {
            return Err(Error::PeerFull { path: self.directory.clone(), capacity });
        }
        if let Some(left) = &mut left {
            **left -= drawn;
        }
        state.reserved -= drawn;
        state.taken += bytes;
        Ok(Admitted::New(bytes))
    }

    /// Returns when everything put before this call is durable.
    pub fn flush(&self) -> Result<()> {
        // Who waits here finds its fragments durable, or the store poisoned.
        let _flushing = self.flushing.lock().expect("no thread panics while it flushes");
        self.sync.check()?;
        let staged = std::mem::take(&mut self.state().staged);
        self.sync.sync(staged.iter().filter_map(|Staged { known, how, .. }| match how {
            Staging::New(_, segment) | Staging::Instead(_, segment) => Some((segment, known.end())),
            Staging::Again => None,
        }))?;
        let again = staged.iter().filter(|one| matches!(one.how, Staging::Again));
        let again: Vec<_> = again.map(|one| one.known.place).collect();
        let touched = if again.is_empty() { Ok(()) } else { self.table.touch(&again) };
        let mut state = self.state();
        for Staged { id, known, how } in staged {
            state.busy.remove(&id);
            match how {
                Staging::New(bytes, _) => {
                    state.filter.insert(&id.blob);
                    state.taken -= bytes;
                    state.used += bytes;
                    state.fragments += 1;
                    state.pending.push(known, None);
                }
                Staging::Instead(old, _) => state.pending.push(known, Some(old)),
                Staging::Again => {}
            }
        }
        touched
    }

    /// Whether so many times as much is pending as should be.
    fn is_pending(&self, times: usize) -> bool {
        let pending = &self.state().pending;
        pending.len() >= MANY.0 * times || pending.bytes() >= MANY.1 * times as u64
    }

    /// Tells the table what is pending, if it is `much`, or however much it is. It is for who has time: nobody need wait
    /// for it.
    pub fn settle(&self, much: bool) -> Result<()> {
        if much && !self.is_pending(1) {
            return Ok(());
        }
        let _settling = self.settling.lock().expect("no thread panics while it tells the table");
        let batch = self.state().pending.batch();
        if batch.all.is_empty() {
            return Ok(());
        }
        self.table.insert(&batch.all, &batch.ends, &batch.replaced_places())?;
        self.state().pending.remove(&batch);
        if !batch.replaced.is_empty() {
            let old: Vec<_> = batch.replaced.iter().map(|one| KnownFragment::clone(one)).collect();
            reclaim(&self.files, &self.key, &self.table, &old, false);
        }
        self.read_some_names().map(drop)
    }

    /// Has more of the names read by which it is known of what there is nothing, if they are not all read yet. Returns
    /// whether there are more. It is for who has time.
    pub fn read_names(&self) -> Result<bool> {
        let _settling = self.settling.lock().expect("no thread panics while it tells the table");
        self.read_some_names()
    }

    /// The same, by who is the only one.
    fn read_some_names(&self) -> Result<bool> {
        let after = {
            let StoreState { filter, fragments, pending, .. } = &mut *self.state();
            filter.wants(*fragments, pending.names())
        };
        let Some(after) = after else { return Ok(false) };
        let names = self.table.names(&after, NAMES)?;
        let is_end = names.len() < NAMES;
        self.state().filter.extend(&names, is_end);
        Ok(!is_end)
    }

    /// Deletes fragments that nobody has stored or asked for (with renewal) within so many seconds; the others
    /// stay. Returns the bytes that the disk has again. That is durable when this returns.
    pub fn delete(&self, fragments: &[FragmentId], idle: u32) -> Result<u64> {
        // Nothing becomes known meanwhile, and nobody begins to rely on anything.
        let _flushing = self.flushing.lock().expect("no thread panics while it flushes");
        let log = self.log();
        self.settle(false)?;
        let (unused, used, quiet) = {
            let state = self.state();
            let is_unused = |id: &&FragmentId| {
                let FragmentId { blob, encoding, index } = id;
                !state.busy.contains(id) && !state.pending.contains(blob, encoding, *index)
            };
            let unused: Vec<_> = fragments.iter().filter(is_unused).copied().collect();
            let staged = state.staged.iter().map(|one| one.known.place.segment);
            let used: HashSet<_> = staged.chain(log.current()).collect();
            (unused, used, state.staged.is_empty())
        };
        let deleted = self.table.delete(&unused, idle)?;
        {
            let mut state = self.state();
            state.fragments = state.fragments.saturating_sub(deleted.len() as u64);
            let space = deleted.iter().map(KnownFragment::space).sum();
            state.used = state.used.saturating_sub(space);
        }
        let freed = reclaim(&self.files, &self.key, &self.table, &deleted, quiet);
        let segments: HashSet<_> = deleted.iter().map(|one| one.place.segment).collect();
        for number in segments.difference(&used) {
            if self.table.is_empty(*number)? {
                // Without a row, what is left of its file would be read again.
                self.files.remove(*number)?;
                self.table.forget_segment(*number)?;
            }
        }
        Ok(freed)
    }

    /// How much there is.
    pub fn usage(&self) -> Result<Usage> {
        let (used, reserved, fragments) = {
            let state = self.state();
            (state.used + state.taken, state.reserved, state.fragments)
        };
        let capacity = match self.capacity {
            Some(capacity) => capacity,
            None => used + sys::free_space(&self.directory)?,
        };
        Ok(Usage { capacity, used, reserved, fragments })
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().expect("no thread panics while it puts")
    }

    pub(super) fn state(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock().expect("no thread panics while it holds the state")
    }
}

impl Drop for PeerStore {
    /// The next start has less to read then.
    fn drop(&mut self) {
        if let Err(error) = self.settle(false) {
            tracing::warn!(%error, "the table could not be told; the log is read again at the next start");
        }
    }
}

fn id(fragment: &Fragment) -> FragmentId {
    let Fragment { description, index, .. } = fragment;
    FragmentId { blob: description.blob, encoding: description.id(), index: *index }
}
