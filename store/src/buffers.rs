//! Memory for blocks, used again and again.
//!
//! A block passes through a process in one buffer. To get fresh memory for each costs more than to fill it: the kernel
//! clears every page first. What was in a buffer before stays in it, so whoever takes one overwrites all of it.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::{LazyLock, Mutex};

use bytes::Bytes;

/// What direct I/O needs of an address.
const ALIGNMENT: usize = 4096;

/// Shorter ones are not worth it.
const WORTH: usize = 16 << 10;

/// Bytes that wait to be used again, at most.
const KEPT: usize = 64 << 20;

#[derive(Default)]
struct Pool {
    /// By their length.
    free: HashMap<usize, Vec<Vec<u8>>>,
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
    /// A buffer of this length, of which the byte at `aligned` is at the start of a page.
    pub(crate) fn new(len: usize, aligned: usize) -> Buffer {
        // One more page than what is used, to begin anywhere.
        let size = len.next_multiple_of(ALIGNMENT) + ALIGNMENT;
        let kept = (len >= WORTH).then(|| {
            let mut pool = POOL.lock().expect("no code panics with the pool locked");
            let memory = pool.free.get_mut(&size).and_then(Vec::pop);
            pool.bytes -= memory.as_ref().map_or(0, Vec::len);
            memory
        });
        let memory = kept.flatten().unwrap_or_else(|| vec![0; size]);
        let at = (memory.as_ptr().addr() + aligned) % ALIGNMENT;
        let start = (ALIGNMENT - at) % ALIGNMENT;
        Buffer { memory, start, len }
    }

    /// Shares it. It is used again when nobody has it any more.
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
        if self.len < WORTH {
            return;
        }
        let mut pool = POOL.lock().expect("no code panics with the pool locked");
        if pool.bytes + memory.len() <= KEPT {
            pool.bytes += memory.len();
            pool.free.entry(memory.len()).or_default().push(memory);
        } else {
            // Lengths that nobody uses any more make room in time.
            pool.free.clear();
            pool.bytes = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ALIGNMENT, Buffer};

    #[test]
    fn the_byte_that_was_named_is_aligned_and_the_length_is_exact() {
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
