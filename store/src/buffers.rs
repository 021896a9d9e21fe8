//! A pool of buffers for blocks.
//!
//! A block passes through a process in one buffer. Allocating memory for each block costs more than
//! filling it, because the kernel clears every page first. So buffers are reused. A reused buffer
//! has its previous content, and its user overwrites all of it.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::{LazyLock, Mutex};

use bytes::Bytes;

/// The alignment of addresses that direct I/O needs, in bytes.
const ALIGNMENT: usize = 4096;

/// Shorter buffers are not pooled.
const MIN_POOLED_BYTES: usize = 16 << 10;

/// The most bytes of free buffers in the pool.
const MAX_POOL_BYTES: usize = 64 << 20;

#[derive(Default)]
struct Pool {
    /// The free buffers, by length.
    free: HashMap<usize, Vec<Vec<u8>>>,
    /// Bytes of all free buffers.
    bytes: usize,
}

static POOL: LazyLock<Mutex<Pool>> = LazyLock::new(Mutex::default);

/// A buffer of fixed length, with any content.
pub(crate) struct Buffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// A buffer of `len` bytes. The byte at offset `aligned` is at the start of a page.
    pub(crate) fn new(len: usize, aligned: usize) -> Buffer {
        // One page more than needed, so that the buffer can begin at any offset in a page.
        let size = len.next_multiple_of(ALIGNMENT) + ALIGNMENT;
        let pooled = (len >= MIN_POOLED_BYTES).then(|| {
            let mut pool = POOL.lock().expect("no code panics with the pool locked");
            let memory = pool.free.get_mut(&size).and_then(Vec::pop);
            pool.bytes -= memory.as_ref().map_or(0, Vec::len);
            memory
        });
        let memory = pooled.flatten().unwrap_or_else(|| vec![0; size]);
        let at = (memory.as_ptr().addr() + aligned) % ALIGNMENT;
        let start = (ALIGNMENT - at) % ALIGNMENT;
        Buffer { memory, start, len }
    }

    /// Makes the buffer shareable. Its memory returns to the pool when the last reference is
    /// dropped.
    pub(crate) fn share(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        if self.len < MIN_POOLED_BYTES {
            return;
        }
        let mut pool = POOL.lock().expect("no code panics with the pool locked");
        if pool.bytes + memory.len() <= MAX_POOL_BYTES {
            pool.bytes += memory.len();
            pool.free.entry(memory.len()).or_default().push(memory);
        } else {
            // Emptying the pool also frees buffers of lengths that are not used any more.
            pool.free.clear();
            pool.bytes = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ALIGNMENT, Buffer};

    #[test]
    fn the_requested_offset_is_aligned_and_the_length_is_exact() {
        for (len, aligned) in [(1, 0), (1, 1), (20_000, 49), (65_841, 305), (1 << 20, 0), (100, 77)]
        {
            for _ in 0..3 {
                let mut buffer = Buffer::new(len, aligned);
                assert_eq!((buffer.as_ptr().addr() + aligned) % ALIGNMENT, 0);
                assert_eq!(buffer.len(), len);
                buffer.fill(7);
                let shared = buffer.share();
                assert!(shared.slice(len / 2..).iter().all(|byte| *byte == 7));
            }
        }
    }
}
