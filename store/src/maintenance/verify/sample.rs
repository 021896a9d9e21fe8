//! A random part of the chunks.

use twox_hash::XxHash3_64;

use crate::error::{Error, Result};
use crate::id::ChunkId;
use crate::sys;

/// Selects chunks by their names and a seed. So a chunk that snapshots share is selected for all of
/// them or for none, and the same seed selects the same chunks again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    seed: u64,
    /// Chunks whose hash is less are selected.
    below: u128,
}

impl Sample {
    /// Selects this fraction of the chunks, more than 0 and at most 1, by a seed.
    pub fn new(fraction: f64, seed: u64) -> Result<Sample> {
        if !(fraction > 0.0 && fraction <= 1.0) {
            let reason = "a sample is more than 0% and at most 100% of the chunks";
            return Err(Error::BadArgument(reason.into()));
        }
        // Below 2^64, a fraction of at most 1 loses nothing that matters.
        let below = (fraction * 2f64.powi(64)) as u128;
        Ok(Sample { seed, below })
    }

    /// A random seed.
    pub fn random_seed() -> Result<u64> {
        // 48 bits: every program that reads JSON has them.
        let random = sys::random().map_err(|e| Error::io("reading", "/dev/urandom".as_ref(), e))?;
        Ok(u64::from_le_bytes(random) >> 16)
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Whether a chunk is selected.
    pub fn has(&self, chunk: &ChunkId) -> bool {
        u128::from(XxHash3_64::oneshot_with_seed(self.seed, chunk.as_bytes())) < self.below
    }
}

#[cfg(test)]
mod tests {
    use super::{ChunkId, Sample};

    #[test]
    fn a_sample_has_its_fraction_and_depends_on_the_seed() {
        let all: Vec<_> = (0..20_000u64).map(|n| ChunkId::of(&n.to_le_bytes())).collect();
        let select = |fraction, seed| -> Vec<bool> {
            let sample = Sample::new(fraction, seed).unwrap();
            all.iter().map(|id| sample.has(id)).collect()
        };
        let count = |selected: &[bool]| selected.iter().filter(|one| **one).count();
        for seed in 0..4 {
            let some = select(0.05, seed);
            // 1000 are expected, with a standard deviation of 31.
            assert!((800..1200).contains(&count(&some)), "{}", count(&some));
            assert_eq!(some, select(0.05, seed));
            assert_ne!(some, select(0.05, seed + 1));
            assert_eq!(count(&select(1.0, seed)), all.len());
        }
        for bad in [0.0, -0.1, 1.01, f64::NAN] {
            assert!(Sample::new(bad, 1).is_err(), "{bad}");
        }
    }
}
