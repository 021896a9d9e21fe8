//! Test data: different chunks that cannot be compressed.

use seeded_rng::Rng;

pub(crate) const CHUNK: usize = 256 << 10;

/// Chunks in memory, created before the measurement.
pub(crate) struct Data {
    bytes: Vec<u8>,
}

impl Data {
    pub(crate) fn new(bytes: usize) -> Data {
        let mut noise = vec![0; bytes / CHUNK * CHUNK];
        Rng::new(0x0ca1).fill(&mut noise);
        Data { bytes: noise }
    }

    /// Makes all chunks different from those of other measurements.
    pub(crate) fn make_unique(&mut self, measurement: u64) {
        for (number, chunk) in (0u64..).zip(self.bytes.chunks_mut(CHUNK)) {
            chunk[..8].copy_from_slice(&measurement.to_le_bytes());
            chunk[8..16].copy_from_slice(&number.to_le_bytes());
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// One part of the data for each client.
    pub(crate) fn parts(&self, clients: usize) -> impl Iterator<Item = &[u8]> {
        let chunks = self.bytes.len() / CHUNK / clients;
        self.bytes.chunks_exact(chunks * CHUNK).take(clients)
    }
}
