//! Buffers of one chunk each: a bounded pool, and the copies of chunks that a frozen epoch holds.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};

use super::presence::ChunkPresence;
use crate::mapping::Buffer;

/// A bounded number of chunk buffers, allocated as they are wanted and kept for the next user.
pub(crate) struct Pool {
    chunk_size: usize,
    limit: usize,
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    lent: usize,
    idle: Vec<Buffer>,
}

impl Pool {
    /// A pool of at most `limit` buffers of `chunk_size` bytes.
    pub(crate) fn new(chunk_size: usize, limit: usize) -> Arc<Pool> {
        Arc::new(Pool { chunk_size, limit, state: Mutex::default() })
    }

    /// A buffer with any content, or nothing if all are in use.
    pub(crate) fn take(self: &Arc<Pool>) -> Option<ChunkBuffer> {
        let mut state = self.state.lock().expect("no code panics with the pool locked");
        if state.lent == self.limit {
            return None;
        }
        state.lent += 1;
        let idle = state.idle.pop();
        drop(state);
        let buffer = idle.unwrap_or_else(|| Buffer::zeroed(self.chunk_size));
        Some(ChunkBuffer { buffer: Some(buffer), pool: self.clone() })
    }
}

/// A buffer that goes back to its pool when it is dropped.
pub(crate) struct ChunkBuffer {
    buffer: Option<Buffer>,
    pool: Arc<Pool>,
}

impl ChunkBuffer {
    fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().expect("taken only by drop")
    }

    /// The buffer itself, for an operation that owns it.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.buffer.as_mut().expect("taken only by drop").as_mut_ptr()
    }
}

impl Deref for ChunkBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer()
    }
}

impl DerefMut for ChunkBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut().expect("taken only by drop")
    }
}

impl Drop for ChunkBuffer {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock().expect("no code panics with the pool locked");
        state.lent -= 1;
        state.idle.extend(self.buffer.take());
    }
}

/// A chunk as a frozen epoch had it.
pub(crate) struct Copy {
    /// The bytes of the blocks that were present; others hold anything.
    pub(crate) data: ChunkBuffer,
    /// Which blocks were present when the copy was taken. Others come from the parent root.
    pub(crate) present: ChunkPresence,
}
