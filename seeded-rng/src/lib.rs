//! Random numbers that a seed reproduces, for tests and benchmarks.
//!
//! A test that fails prints its seed. The same seed gives the same sequence in every version of
//! this crate, so that the failure can be repeated. Nothing here is fit for cryptography.

/// The increment of SplitMix64: 2⁶⁴ divided by the golden ratio, made odd.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// The SplitMix64 generator: small, fast, and random enough to choose offsets, requests and faults.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator whose sequence follows from `seed` alone.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The state of the generator. It determines the rest of the sequence.
    pub fn state(&self) -> u64 {
        self.0
    }

    /// The next number of the sequence.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(INCREMENT);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..limit`.
    ///
    /// # Panics
    ///
    /// If `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next_u64() % limit
    }

    /// A number in `low..=high`.
    ///
    /// # Panics
    ///
    /// If `high` is less than `low`, or if the range covers all numbers of 64 bits.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Returns true in `percent` of 100 cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of the values in `from`.
    ///
    /// # Panics
    ///
    /// If `from` is empty.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Fills `bytes` with random data.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(8) {
            let word = self.next_u64().to_le_bytes();
            part.copy_from_slice(&word[..part.len()]);
        }
    }
}

/// Hashes a number: the output with this index, from 0, of the generator with seed 0.
pub fn mix(index: u64) -> u64 {
    Rng::new(index.wrapping_mul(INCREMENT)).next_u64()
}

#[cfg(test)]
mod tests {
    use super::{Rng, mix};

    /// The first outputs of the reference implementation for seed 0.
    const REFERENCE: [u64; 4] = [
        0xe220_a839_7b1d_cdaf,
        0x6e78_9e6a_a1b9_65f4,
        0x06c4_5d18_8009_454f,
        0xf88b_b8a8_724c_81ec,
    ];

    #[test]
    fn the_sequence_is_that_of_the_reference_implementation() {
        let mut rng = Rng::new(0);
        assert_eq!(REFERENCE.map(|_| rng.next_u64()), REFERENCE);
    }

    #[test]
    fn mix_computes_any_output_of_the_generator_with_seed_0() {
        assert_eq!([0, 1, 2, 3].map(mix), REFERENCE);
    }

    #[test]
    fn numbers_stay_within_their_range() {
        let mut rng = Rng::new(1);
        for _ in 0..1000 {
            assert!(rng.below(7) < 7);
            assert!((3..=5).contains(&rng.between(3, 5)));
            assert!([2, 4].contains(&rng.pick(&[2, 4])));
        }
        assert!(!rng.chance(0) && rng.chance(100));
    }

    #[test]
    fn fill_writes_the_sequence_in_little_endian_order_and_cuts_the_last_number() {
        let mut bytes = [0; 11];
        Rng::new(0).fill(&mut bytes);
        assert_eq!(bytes[..8], REFERENCE[0].to_le_bytes());
        assert_eq!(bytes[8..], REFERENCE[1].to_le_bytes()[..3]);
    }
}
