//! Memory for the old content of blocks that the guest overwrites, and for chunks on their way into
//! the repository. Both are bounded.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::blockset::BlockSet;
use super::layout::{BLOCK, Blocks};
use crate::mapping::Buffer;

/// A bounded amount of memory.
pub(crate) struct Arena {
    limit: usize,
    used: AtomicUsize,
}

impl Arena {
    /// At most `limit` bytes.
    pub(crate) fn new(limit: usize) -> Arc<Arena> {
        Arc::new(Arena { limit, used: AtomicUsize::new(0) })
    }

    /// A page-aligned buffer, or nothing if that would be too much. A buffer that is larger than the
    /// whole arena is given out while nothing else is, so that every request can go on some time.
    pub(crate) fn take(self: &Arc<Arena>, len: usize) -> Option<ArenaBuffer> {
        let take = |used: usize| (used == 0 || used + len <= self.limit).then_some(used + len);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).ok()?;
        Some(ArenaBuffer { buffer: Buffer::zeroed(len), arena: self.clone() })
    }
}

/// Memory of an [`Arena`], given back when it is dropped.
pub(crate) struct ArenaBuffer {
    buffer: Buffer,
    arena: Arc<Arena>,
}

impl ArenaBuffer {
    /// The address, for an operation that owns this buffer.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.buffer.as_mut_ptr()
    }
}

impl Deref for ArenaBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer
    }
}

impl DerefMut for ArenaBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer
    }
}

impl Drop for ArenaBuffer {
    fn drop(&mut self) {
        self.arena.used.fetch_sub(self.buffer.len(), Ordering::AcqRel);
    }
}

/// The old content of a run of blocks, counted from their chunk's start.
pub(crate) struct Piece {
    pub(crate) run: Blocks,
    pub(crate) data: ArenaBuffer,
}

/// What writes have put aside of one chunk.
#[derive(Default)]
pub(crate) struct Aside {
    /// Blocks whose state at the cut does not depend on the mirror any more: those of `pieces`, and
    /// those that were absent.
    pub(crate) decided: BlockSet,
    pub(crate) pieces: Vec<Piece>,
}

impl Aside {
    /// Lays the old content over `data`, which was read from the mirror, where the blocks of
    /// `present` were valid. Returns the blocks that are valid now; others are the parent's.
    pub(crate) fn lay_over(&self, data: &mut [u8], present: BlockSet) -> BlockSet {
        let mut valid = present.without(&self.decided);
        for Piece { run, data: old } in &self.pieces {
            let from = (run.first * BLOCK) as usize;
            data[from..from + old.len()].copy_from_slice(old);
            valid = valid.union(&BlockSet::run(*run));
        }
        valid
    }
}

/// A chunk as a frozen epoch had it.
pub(crate) struct Copy {
    /// The chunk's bytes where `present`; others hold anything.
    pub(crate) data: ArenaBuffer,
    /// The blocks that are valid. Others come from the parent root.
    pub(crate) present: BlockSet,
}
