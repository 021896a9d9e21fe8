//! Room for the old content of blocks that the guest overwrites, and for chunks on their way into the
//! repository. All of it is bounded: first memory is used, then a file on the local disk.

use std::collections::HashMap;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::blockset::BlockSet;
use super::layout::{BLOCK, Blocks};
use crate::mapping::Buffer;

/// A bounded amount of memory.
pub(crate) struct Arena {
    limit: usize,
    used: AtomicUsize,
    /// Large buffers to be used again: fresh ones cost a page fault for each page. All have one
    /// length, and together with those in use they stay below the limit.
    idle: Mutex<Vec<Buffer>>,
}

/// From this length on buffers are kept.
const LARGE: usize = 64 << 10;

impl Arena {
    /// At most `limit` bytes.
    pub(crate) fn new(limit: usize) -> Arc<Arena> {
        Arc::new(Arena { limit, used: AtomicUsize::new(0), idle: Mutex::default() })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.idle.lock().expect("no code panics with the idle buffers locked")
    }

    /// A page-aligned buffer with any content, or nothing if that would be too much. A buffer that is larger than the
    /// whole arena is given out while nothing else is, so that every request can go on some time.
    pub(crate) fn take(self: &Arc<Arena>, len: usize) -> Option<ArenaBuffer> {
        let take = |used: usize| (used == 0 || used + len <= self.limit).then_some(used + len);
        let used = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).ok()? + len;
        let mut idle = self.idle();
        let kept =
            if idle.last().is_some_and(|last| last.len() == len) { idle.pop() } else { None };
        if idle.last().is_some_and(|last| used + idle.len() * last.len() > self.limit) {
            idle.clear();
        }
        drop(idle);
        let buffer = kept.unwrap_or_else(|| Buffer::zeroed(len));
        Some(ArenaBuffer { buffer: Some(buffer), arena: self.clone() })
    }
}

/// Memory of an [`Arena`], given back when it is dropped.
pub(crate) struct ArenaBuffer {
    /// Taken by drop alone.
    buffer: Option<Buffer>,
    arena: Arc<Arena>,
}

impl ArenaBuffer {
    /// The address, for an operation that owns this buffer.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.buffer.as_mut().expect("taken by drop alone").as_mut_ptr()
    }
}

impl Deref for ArenaBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.as_ref().expect("taken by drop alone")
    }
}

impl DerefMut for ArenaBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut().expect("taken by drop alone")
    }
}

impl Drop for ArenaBuffer {
    fn drop(&mut self) {
        let buffer = self.buffer.take().expect("taken by drop alone");
        let len = buffer.len();
        let mut idle = self.arena.idle();
        let used = self.arena.used.fetch_sub(len, Ordering::AcqRel);
        let fits = used + idle.len() * len <= self.arena.limit;
        if len >= LARGE && fits && idle.last().is_none_or(|last| last.len() == len) {
            idle.push(buffer);
        }
    }
}

/// The places in the file that takes copies when memory is short. Only the arithmetic: the file is
/// somebody else's.
pub(crate) struct Spill {
    limit: u64,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    end: u64,
    taken: u64,
    /// Places that were given back, by length.
    free: HashMap<u64, Vec<u64>>,
}

impl Spill {
    /// At most `limit` bytes.
    pub(crate) fn new(limit: u64) -> Arc<Spill> {
        Arc::new(Spill { limit, places: Mutex::default() })
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().expect("no code panics with the places locked")
    }

    /// A place for `len` bytes, or nothing if there is none left.
    pub(crate) fn take(self: &Arc<Spill>, len: u64) -> Option<Place> {
        let mut places = self.places();
        let offset = match places.free.get_mut(&len).and_then(Vec::pop) {
            Some(offset) => offset,
            None if places.end + len <= self.limit => {
                places.end += len;
                places.end - len
            }
            None => return None,
        };
        places.taken += 1;
        Some(Place { offset, len, spill: self.clone() })
    }
}

/// A place in the spill file, given back when it is dropped.
pub(crate) struct Place {
    pub(crate) offset: u64,
    len: u64,
    spill: Arc<Spill>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.spill.places();
        places.taken -= 1;
        if places.taken == 0 {
            *places = Places::default();
        } else {
            places.free.entry(self.len).or_default().push(self.offset);
        }
    }
}

/// Where old content is.
pub(crate) enum Old {
    Memory(ArenaBuffer),
    File(Place),
}

/// The old content of a run of blocks, counted from their chunk's start.
pub(crate) struct Piece {
    pub(crate) run: Blocks,
    pub(crate) old: Old,
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
    /// `present` were valid. Returns the blocks that are valid now; others are the parent's. `read`
    /// brings what lies in the spill file at an offset.
    pub(crate) fn lay_over(
        &self,
        data: &mut [u8],
        present: BlockSet,
        read: impl Fn(&mut [u8], u64) -> io::Result<()>,
    ) -> io::Result<BlockSet> {
        let mut valid = present.without(&self.decided);
        for Piece { run, old } in &self.pieces {
            let from = (run.first * BLOCK) as usize;
            let to = &mut data[from..from + run.span().len as usize];
            match old {
                Old::Memory(old) => to.copy_from_slice(old),
                Old::File(place) => read(to, place.offset)?,
            }
            valid = valid.union(&BlockSet::run(*run));
        }
        Ok(valid)
    }
}

/// A chunk as a frozen epoch had it.
pub(crate) struct Copy {
    /// The chunk's bytes where `present`; others hold anything.
    pub(crate) data: ArenaBuffer,
    /// The blocks that are valid. Others come from the parent root.
    pub(crate) present: BlockSet,
}

#[cfg(test)]
mod tests {
    use super::{Arena, Spill};

    #[test]
    fn an_arena_is_bounded_but_gives_one_buffer_of_any_size() {
        let arena = Arena::new(8192);
        let first = arena.take(4096).unwrap();
        assert!(arena.take(8192).is_none());
        let second = arena.take(4096).unwrap();
        assert!(arena.take(4096).is_none());
        drop((first, second));
        assert_eq!(arena.take(1 << 20).unwrap().len(), 1 << 20);
    }

    #[test]
    fn large_buffers_are_used_again_but_never_beyond_the_limit() {
        let arena = Arena::new(4 * 65536);
        let buffers: Vec<_> = (0..4).map(|_| arena.take(65536).unwrap()).collect();
        drop(buffers);
        assert_eq!(arena.idle().len(), 4);
        let again = arena.take(65536).unwrap();
        assert_eq!(arena.idle().len(), 3);
        let small = arena.take(4096).unwrap();
        assert_eq!(arena.idle().len(), 0, "the rest makes room for others");
        drop((again, small));
    }

    #[test]
    fn places_do_not_overlap_and_are_used_again() {
        let spill = Spill::new(3 * 4096);
        let a = spill.take(4096).unwrap();
        let b = spill.take(8192).unwrap();
        assert_eq!((a.offset, b.offset), (0, 4096));
        assert!(spill.take(4096).is_none());
        drop(a);
        assert_eq!(spill.take(4096).unwrap().offset, 0);
        drop(b);
        assert_eq!(spill.take(3 * 4096).unwrap().offset, 0, "all of it is free again");
    }
}
