//! Memory for a chunk, aligned for direct I/O.

/// The alignment that direct I/O needs, in bytes: of memory, offsets and lengths.
pub(crate) const ALIGNMENT: usize = 4096;

/// A buffer of zeros at first. The store uses direct I/O if a chunk is aligned.
pub(crate) struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    pub(crate) fn new(len: usize) -> Self {
        let memory = vec![0; len + ALIGNMENT];
        let address = memory.as_ptr().addr();
        Self { start: address.next_multiple_of(ALIGNMENT) - address, memory, len }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.len]
    }
}
