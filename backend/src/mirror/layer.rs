//! A frozen epoch and selective copy-on-write (BlobCR, algorithms 2 to 4).
//!
//! ```text
//!                 a write copies it aside, or persist reads it
//!   Scheduled ──────────────► Pending ──────────────► Idle
//!       ▲                        │
//!       └────────────────────────┘  the read failed
//! ```
//!
//! A chunk of the epoch's dirty set is *Scheduled* until someone takes it. *Pending* lasts for one
//! local read into memory; writes to the chunk wait for it. *Idle* is forever: the epoch has what it
//! needs, the mirror is free to change. A chunk outside the dirty set is Idle from the start.
//!
//! The dirty set is complete, and its chunks may be taken, only when the layer is *settled*: no write
//! of the epoch is submitted any more.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cairn_store::{ChunkId, ChunkIndex};

use super::bits::{Bits, DirtySet};
use super::copies::Copy;

/// The time between two checkpoints, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Epoch(pub(crate) u64);

/// What [`Layer::take`] found.
pub(crate) enum Take {
    /// Idle: nothing to do for this chunk.
    Idle,
    /// Pending with somebody else: wait for an event.
    Busy,
    /// Was Scheduled, is Pending with the caller, who must end it with [`Layer::taken`] or
    /// [`Layer::untake`].
    Taken,
}

/// One frozen epoch on its way into the repository.
pub(crate) struct Layer {
    pub(crate) epoch: Epoch,
    pub(crate) dirty: Arc<DirtySet>,
    settled: AtomicBool,
    /// Set once no write has to look at this layer any more: it is published, given up or lost.
    closed: AtomicBool,
    idle: Bits,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    pending: HashSet<u64>,
    copies: HashMap<u64, Copy>,
    stored: BTreeMap<ChunkIndex, Option<ChunkId>>,
    /// Why this epoch's snapshot cannot be had, as soon as that is known.
    failure: Option<String>,
}

impl Layer {
    pub(crate) fn new(epoch: Epoch, dirty: Arc<DirtySet>, chunks: u64) -> io::Result<Layer> {
        Ok(Layer {
            epoch,
            dirty,
            settled: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            idle: Bits::zeroed(chunks)?,
            inner: Mutex::default(),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no code panics with a layer locked")
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Acquire)
    }

    pub(crate) fn set_settled(&self) {
        self.settled.store(true, Ordering::Release);
    }

    /// Whether a write must not touch `chunk` yet. A few loads.
    pub(crate) fn guards(&self, chunk: ChunkIndex) -> bool {
        !self.closed.load(Ordering::Acquire)
            && self.dirty.contains(chunk.0)
            && !self.idle.get(chunk.0)
    }

    /// Scheduled → Pending.
    pub(crate) fn take(&self, chunk: ChunkIndex) -> Take {
        debug_assert!(self.is_settled(), "the dirty set may still grow");
        if !self.guards(chunk) {
            return Take::Idle;
        }
        let mut inner = self.inner();
        // Idle is set under this lock, so this look is final.
        if !self.guards(chunk) {
            Take::Idle
        } else if inner.pending.insert(chunk.0) {
            Take::Taken
        } else {
            Take::Busy
        }
    }

    /// Pending → Idle. `copy` is kept for the snapshot; persist, which has the bytes in its own
    /// hands, passes none.
    pub(crate) fn taken(&self, chunk: ChunkIndex, copy: Option<Copy>) {
        let mut inner = self.inner();
        let was_pending = inner.pending.remove(&chunk.0);
        debug_assert!(was_pending, "only a pending chunk is taken");
        // A layer that was closed meanwhile needs nothing any more.
        if let Some(copy) = copy.filter(|_| !self.closed.load(Ordering::Acquire)) {
            inner.copies.insert(chunk.0, copy);
        }
        self.idle.set(chunk.0);
    }

    /// Pending → Scheduled, after a failed read.
    pub(crate) fn untake(&self, chunk: ChunkIndex) {
        let was_pending = self.inner().pending.remove(&chunk.0);
        debug_assert!(was_pending, "only a pending chunk goes back");
    }

    /// Removes a copy to store it. If that fails it must come back with [`Layer::keep_copy`].
    pub(crate) fn take_copy(&self, chunk: ChunkIndex) -> Option<Copy> {
        self.inner().copies.remove(&chunk.0)
    }

    /// Keeps the only bytes that exist of a chunk that is Idle but not stored.
    pub(crate) fn keep_copy(&self, chunk: ChunkIndex, copy: Copy) {
        self.inner().copies.insert(chunk.0, copy);
    }

    /// At most `limit` chunks that have a copy.
    pub(crate) fn copied(&self, limit: usize) -> Vec<ChunkIndex> {
        self.inner().copies.keys().take(limit).copied().map(ChunkIndex).collect()
    }

    /// Records that a chunk's blob is durable (`None`: the chunk is a hole).
    pub(crate) fn store(&self, ids: impl IntoIterator<Item = (ChunkIndex, Option<ChunkId>)>) {
        self.inner().stored.extend(ids);
    }

    /// The durable chunks so far.
    pub(crate) fn stored(&self) -> BTreeMap<ChunkIndex, Option<ChunkId>> {
        self.inner().stored.clone()
    }

    /// How many chunks are durable.
    pub(crate) fn stored_count(&self) -> u64 {
        self.inner().stored.len() as u64
    }

    /// Whether a chunk is durable.
    pub(crate) fn is_stored(&self, chunk: ChunkIndex) -> bool {
        self.inner().stored.contains_key(&chunk)
    }

    /// Notes that the snapshot cannot be completed. The first reason stays. From here on no write
    /// has to wait for this layer.
    pub(crate) fn set_failure(&self, reason: String) {
        self.inner().failure.get_or_insert(reason);
        self.closed.store(true, Ordering::Release);
    }

    /// Why the snapshot cannot be completed, if so.
    pub(crate) fn failure(&self) -> Option<String> {
        self.inner().failure.clone()
    }

    /// Ends the layer: it guards nothing and holds nothing any more.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let mut inner = self.inner();
        inner.copies.clear();
        inner.stored.clear();
    }
}
