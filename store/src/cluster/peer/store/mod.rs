//! [`PeerStore`]: the fragments of a peer, in its data directory.
//!
//! ```text
//! DIR/peer.json      the marker, with the peer's id
//! DIR/segments/      the log that fragments are appended to
//! DIR/fragments.db   the table of fragments and their positions, the clock, the scrub's progress
//! ```
//!
//! ```text
//! put ─► verified, appended to log ─► staged ─(flush: one sync)─► pending ─(many)─► in the table
//!                                       │                           │ durable and known
//!                                       └─► sync failed: poisoned   └─► in the log after a crash
//! ```
//!
//! - **Known.** A fragment is *known* when it is durable in the log. It is *pending*, in memory,
//!   until it is written to the table. After a crash, pending fragments are read from the log.
//! - **Failed sync.** A failed sync may have lost fragments whose put has returned, and the kernel
//!   reports the failure only once. The store is poisoned: it fails every later put and flush.
//! - **Deletion** runs in the opposite order: the row is removed durably, then the block. A crash
//!   between the two leaves unused space and nothing else.
//! - **Busy.** A put may rely on a fragment that is already stored. Such a fragment is not deleted
//!   before the put has ended.
//! - **Idle time** is measured by a clock that counts the time for which the peer has run, not by
//!   the wall clock: see `running_time`.
//! - **Stamps.** Each put, and each question with renewal, raises the stamp of a fragment to a
//!   collection number. A deletion has a bound, and leaves fragments with a higher stamp.
//! - **Bad.** The scrub reads every block from the disk. A fragment whose block is damaged counts
//!   as missing from then on: see `scrub`.
//! - **Lock order:** `flushing`, `log`, `settling`, `state`, `scrub`.

#[cfg(test)]
mod delete_tests;
mod filter;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod group;
#[cfg(test)]
mod idle_tests;
mod log;
#[cfg(test)]
mod model_tests;
mod pending;
mod reading;
mod reclaim;
mod room;
mod running_time;
mod scrub;
#[cfg(test)]
mod scrub_tests;
#[cfg(test)]
mod stamp_tests;
mod storing;
mod table;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use self::filter::Filter;
use self::group::{Key, KnownFragment};
use self::log::{Files, Log};
use self::pending::Pending;
use self::reclaim::reclaim;
use self::running_time::{Elapsed, since_now};
use self::storing::Staged;
use self::table::{DATABASE, Deleted, ScrubRecord, Table};
use crate::cluster::protocol::{DeletedFragments, FragmentId, PeerTime, StampBound, Usage};
use crate::durable::data_directory::DataDirectory;
use crate::durable::reserve::Reserve;
use crate::durable::sync::SegmentSync;
use crate::error::{Error, Result};
use crate::id::PeerId;

pub use self::room::Room;
pub use self::scrub::{ScrubPause, ScrubRound, ScrubStatus};
pub(super) use self::storing::PutOrder;

/// The format of the data directory. Versions 1 to 3 were never released.
const DIRECTORY: DataDirectory = DataDirectory {
    server: "peer",
    marker: "peer.json",
    format: "cairn-peer",
    version: 4,
    parts: &["segments", DATABASE],
};

/// Pending fragments are written to the table when there are this many of them.
const PENDING_LIMIT: usize = 1024;

/// Pending fragments are written to the table when their blocks have this many bytes.
const PENDING_LIMIT_BYTES: u64 = 256 << 20;

/// If the table cannot be written, puts fail when the pending fragments reach this many times a
/// limit.
const MAX_PENDING_FACTOR: usize = 16;

/// The number of blob names that one step reads from the table into the Bloom filter. Tests have
/// few names and must cover several steps.
const NAMES_PER_STEP: usize = if cfg!(test) { 3 } else { 1 << 14 };

/// The part of a [`PeerStore`] that is in memory.
#[derive(Default)]
pub(super) struct StoreState {
    staged: Vec<Staged>,
    /// For each fragment, the number of its puts that have not ended, including those that are being
    /// flushed.
    busy: HashMap<FragmentId, usize>,
    pending: Pending,
    filter: Filter,
    /// Bytes of space of the known fragments.
    used: u64,
    /// Bytes of space of the fragments that are staged or being appended.
    staged_bytes: u64,
    /// Bytes of space that clients have reserved and not used.
    reserved: u64,
    /// The number of known fragments.
    fragments: u64,
}

/// The fragments of one peer.
pub struct PeerStore {
    id: PeerId,
    capacity: Option<u64>,
    directory: PathBuf,
    opened: Instant,
    /// Locks the directory, which only one process may use.
    _lock: File,
    reserve: Reserve,
    table: Table,
    files: Files,
    key: Key,
    sync: SegmentSync,
    /// Locked by the thread that makes fragments durable.
    flushing: Mutex<()>,
    /// Locked by a thread that puts or deletes fragments.
    log: Mutex<Log>,
    /// Locked by the thread that writes pending fragments to the table or loads the filter.
    settling: Mutex<()>,
    state: Mutex<StoreState>,
    scrub: Mutex<ScrubRecord>,
    /// The requests that are being carried out.
    requests: AtomicUsize,
}

impl PeerStore {
    /// Opens a data directory, and creates it first if it is empty or missing. Without a `capacity`
    /// the free space of the file system is the limit.
    pub fn open(directory: &Path, capacity: Option<u64>) -> Result<PeerStore> {
        PeerStore::open_as(directory, capacity, None)
    }

    /// Opens a data directory like [`PeerStore::open`]. With an `own` id, a new directory gets that
    /// id, and a directory with another id is refused.
    pub fn open_as(
        directory: &Path,
        capacity: Option<u64>,
        own: Option<PeerId>,
    ) -> Result<PeerStore> {
        Self::open_with_clock(directory, capacity, own, since_now())
    }

    /// Opens a data directory like [`PeerStore::open_as`]. Idle times are measured with `elapsed`.
    fn open_with_clock(
        directory: &Path,
        capacity: Option<u64>,
        own: Option<PeerId>,
        elapsed: Elapsed,
    ) -> Result<PeerStore> {
        let make = || log::make(directory).and_then(|()| table::make(directory));
        let (lock, id) = DIRECTORY.take(directory, own.map(|id| id.to_string()), make)?;
        let id: PeerId = id.parse()?;
        if let Some(own) = own.filter(|own| *own != id) {
            let (found, wanted) = (id.to_string(), own.to_string());
            return Err(Error::OtherPeer { path: directory.to_owned(), found, wanted });
        }
        // If the table is missing, this creates an empty one, and `Log::open` fills it from the
        // log.
        let reserve = Reserve::of_peer(directory)?;
        reserve.release();
        make()?;
        let table = Table::open(directory, elapsed)?;
        let log = Log::open(directory, &id, &table)?;
        let (fragments, used) = table.count()?;
        let scrub = table.scrub()?;
        let store = PeerStore {
            id,
            capacity,
            directory: directory.to_owned(),
            opened: Instant::now(),
            _lock: lock,
            reserve,
            table,
            files: Files::new(directory),
            key: Key::of(&id),
            sync: SegmentSync::new(directory.to_owned()),
            flushing: Mutex::default(),
            log: Mutex::new(log),
            settling: Mutex::default(),
            state: Mutex::new(StoreState { fragments, used, ..StoreState::default() }),
            scrub: Mutex::new(scrub),
            requests: AtomicUsize::new(0),
        };
        store.read_names()?;
        store.reserve.keep();
        Ok(store)
    }

    /// Whether a peer has stored data in this directory.
    pub fn is_in(directory: &Path) -> Result<bool> {
        DIRECTORY.read_marker(directory).map(|found| found.is_some())
    }

    /// Returns the id of this peer.
    pub fn id(&self) -> PeerId {
        self.id
    }

    /// Returns whether the pending fragments have reached `factor` times a limit.
    fn has_pending(&self, factor: usize) -> bool {
        let pending = &self.state().pending;
        pending.len() >= PENDING_LIMIT * factor
            || pending.bytes() >= PENDING_LIMIT_BYTES * factor as u64
    }

    /// Writes the pending fragments to the table. With `only_at_limit`, does so only if they have
    /// reached a limit. It is meant for an idle thread: no put has to wait for it.
    pub fn settle(&self, only_at_limit: bool) -> Result<()> {
        if only_at_limit && !self.has_pending(1) {
            return Ok(());
        }
        let _settling = self.settling.lock().expect("no thread panics while it writes the table");
        let batch = self.state().pending.batch();
        if batch.all.is_empty() {
            return Ok(());
        }
        let mut old = self.table.insert(&batch.all, &batch.ends, &batch.replaced_places())?;
        self.state().pending.remove(&batch);
        old.extend(batch.replaced.iter().map(|one| KnownFragment::clone(one)));
        if !old.is_empty() {
            reclaim(&self.files, &self.key, &self.table, &old, false);
        }
        self.read_names_step().map(drop)
    }

    /// Loads the next batch of blob names into the Bloom filter, if it needs any. Returns whether
    /// more remain. It is meant for an idle thread.
    pub fn read_names(&self) -> Result<bool> {
        let _settling = self.settling.lock().expect("no thread panics while it writes the table");
        self.read_names_step()
    }

    /// Loads the next batch of names. The caller holds `settling`.
    fn read_names_step(&self) -> Result<bool> {
        let after = {
            let StoreState { filter, fragments, pending, .. } = &mut *self.state();
            filter.wants(*fragments, pending.names())
        };
        let Some(after) = after else { return Ok(false) };
        let names = self.table.names(&after, NAMES_PER_STEP)?;
        let is_end = names.len() < NAMES_PER_STEP;
        self.state().filter.extend(&names, is_end);
        Ok(!is_end)
    }

    /// The time on this peer's clock.
    pub fn clock(&self) -> PeerTime {
        PeerTime(self.opened.elapsed().as_millis() as u64)
    }

    /// Deletes those of the fragments that were neither stored nor asked for with renewal in the
    /// last `idle` seconds. Returns the bytes that were freed on the disk. The deletion is durable
    /// when this returns.
    pub fn delete(&self, fragments: &[FragmentId], idle: u32) -> Result<u64> {
        Ok(self.delete_before(PeerTime(u64::MAX), fragments, idle, StampBound::ANY)?.bytes)
    }

    /// What [`PeerStore::delete_before`] would delete. Fragments that are not in the table yet do not
    /// count.
    pub fn deletable(
        &self,
        fragments: &[FragmentId],
        idle: u32,
        bound: StampBound,
    ) -> Result<DeletedFragments> {
        self.settle(false)?;
        let found = self.table.deletable(fragments, idle, bound.below)?;
        let bytes = found.iter().map(KnownFragment::space).sum();
        Ok(DeletedFragments { fragments: found.len() as u32, bytes })
    }

    /// Deletes those fragments like [`PeerStore::delete`] whose stamp is within a bound, unless the
    /// deadline is over.
    pub fn delete_before(
        &self,
        deadline: PeerTime,
        fragments: &[FragmentId],
        idle: u32,
        bound: StampBound,
    ) -> Result<DeletedFragments> {
        // With both locks held, no fragment becomes known and no put starts to rely on one.
        let _flushing = self.flushing.lock().expect("no thread panics during a flush");
        let log = self.log();
        // The table needs space, too.
        log.free_ahead();
        self.reserve.release();
        self.settle(false)?;
        // The locks may have taken long.
        if self.clock() >= deadline {
            return Err(Error::LateDeletion);
        }
        let (unused, used, quiet) = {
            let state = self.state();
            let is_unused = |id: &&FragmentId| {
                let FragmentId { blob, encoding, index } = id;
                !state.busy.contains_key(id) && !state.pending.contains(blob, encoding, *index)
            };
            let unused: Vec<_> = fragments.iter().filter(is_unused).copied().collect();
            let written = state.staged.iter().filter_map(Staged::written);
            let staged = written.map(|(segment, _)| segment.number);
            let used: HashSet<_> = staged.chain(log.current()).collect();
            (unused, used, state.staged.is_empty())
        };
        let Deleted { known: mut deleted, bad } = self.table.delete(&unused, idle, bound)?;
        self.uncount(&deleted);
        deleted.extend(bad);
        let bytes = reclaim(&self.files, &self.key, &self.table, &deleted, quiet);
        if !deleted.is_empty() {
            self.reserve.keep();
        }
        let segments: HashSet<_> = deleted.iter().map(|one| one.place.segment).collect();
        for number in segments.difference(&used) {
            if self.table.is_empty(*number)? {
                // The file goes first, durably: a file without a row would be scanned at the next
                // start, and its fragments would be back.
                self.files.remove(*number)?;
                self.table.forget_segment(*number)?;
            }
        }
        Ok(DeletedFragments { fragments: deleted.len() as u32, bytes })
    }

    /// Subtracts fragments from the counts of known fragments.
    fn uncount(&self, gone: &[KnownFragment]) {
        let mut state = self.state();
        state.fragments = state.fragments.saturating_sub(gone.len() as u64);
        let space = gone.iter().map(KnownFragment::space).sum();
        state.used = state.used.saturating_sub(space);
    }

    /// Returns the capacity, the used and reserved space, and the number of fragments.
    pub fn usage(&self) -> Result<Usage> {
        let (used, reserved, fragments) = {
            let state = self.state();
            (state.used + state.staged_bytes, state.reserved, state.fragments)
        };
        let capacity = match self.capacity {
            Some(capacity) => capacity,
            None => used + self.reserve.free_for_blobs()?,
        };
        Ok(Usage { capacity, used, reserved, fragments })
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().expect("no thread panics with the log locked")
    }

    pub(super) fn state(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock().expect("no thread panics with the state locked")
    }
}

impl Drop for PeerStore {
    /// Writes the pending fragments to the table, so that the next start has less to scan, and the
    /// clock, so that it continues.
    fn drop(&mut self) {
        if let Err(error) = self.settle(false).and_then(|()| self.table.close()) {
            tracing::warn!(%error, "cannot write the table; the log is scanned at the next start");
        }
    }
}
