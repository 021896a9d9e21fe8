//! Sets of blocks within one chunk.

use super::layout::Blocks;

/// The number of words for the blocks of the largest chunk: 4 MiB in blocks of 4 KiB.
const WORDS: usize = 16;

/// A set of blocks of one chunk, counted from the chunk's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockSet([u64; WORDS]);

impl BlockSet {
    /// The set with these words. Missing words are empty.
    pub(crate) fn from_words(words: impl IntoIterator<Item = u64>) -> BlockSet {
        let mut set = BlockSet::default();
        for (to, from) in set.0.iter_mut().zip(words) {
            *to = from;
        }
        set
    }

    /// The set of one run.
    pub(crate) fn run(run: Blocks) -> BlockSet {
        let mut set = BlockSet::default();
        for (word, mask) in super::bits::masks(run.first, run.count) {
            set.0[word] |= mask;
        }
        set
    }

    /// The words of the set. Block 0 is the lowest bit of the first word.
    pub(crate) fn words(&self) -> &[u64] {
        &self.0
    }

    pub(crate) fn contains(&self, block: u64) -> bool {
        self.0[(block / 64) as usize] & (1 << (block % 64)) != 0
    }

    pub(crate) fn len(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    pub(crate) fn union(&self, other: &BlockSet) -> BlockSet {
        self.zip(other, |a, b| a | b)
    }

    pub(crate) fn intersection(&self, other: &BlockSet) -> BlockSet {
        self.zip(other, |a, b| a & b)
    }

    pub(crate) fn without(&self, other: &BlockSet) -> BlockSet {
        self.zip(other, |a, b| a & !b)
    }

    fn zip(&self, other: &BlockSet, combine: impl Fn(u64, u64) -> u64) -> BlockSet {
        BlockSet(std::array::from_fn(|word| combine(self.0[word], other.0[word])))
    }

    /// The longest runs of adjacent blocks, in ascending order.
    pub(crate) fn runs(&self) -> Vec<Blocks> {
        let mut runs: Vec<Blocks> = Vec::new();
        for (index, word) in self.0.iter().enumerate() {
            for bit in super::bits::ones(*word) {
                let block = index as u64 * 64 + bit;
                match runs.last_mut() {
                    Some(run) if run.end() == block => run.count += 1,
                    _ => runs.push(Blocks { first: block, count: 1 }),
                }
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::prop;
    use proptest::{prop_assert_eq, proptest};

    use super::{BlockSet, Blocks};

    proptest! {
        #[test]
        fn sets_behave_as_sets(
            a in prop::collection::btree_set(0u64..1024, 0..60),
            b in prop::collection::btree_set(0u64..1024, 0..60),
        ) {
            let set = |blocks: &BTreeSet<u64>| blocks.iter().fold(BlockSet::default(), |set, block| {
                set.union(&BlockSet::run(Blocks { first: *block, count: 1 }))
            });
            let all = |set: BlockSet| (0..1024).filter(|block| set.contains(*block)).collect::<BTreeSet<_>>();
            let (x, y) = (set(&a), set(&b));
            prop_assert_eq!(x.len(), a.len() as u64);
            prop_assert_eq!(all(x.union(&y)), &a | &b);
            prop_assert_eq!(all(x.intersection(&y)), &a & &b);
            prop_assert_eq!(all(x.without(&y)), &a - &b);
            let covered = x.runs().iter().flat_map(|run| run.first..run.end()).collect::<BTreeSet<_>>();
            prop_assert_eq!(covered, a);
        }
    }
}
