//! What was received of a blob.

use std::collections::HashMap;

use bytes::Bytes;

use super::fragment::{Description, Fragment};
use crate::error::{Error, Result};
use crate::id::BlobId;

/// Fragments of one encoding of a blob.
pub(super) struct Partial {
    pub(super) description: Description,
    blocks: Vec<Option<Bytes>>,
}

impl Partial {
    /// How many it lacks.
    fn missing(&self) -> usize {
        self.description.needed().saturating_sub(self.blocks.iter().flatten().count())
    }

    /// The fragment that somebody should have had.
    pub(super) fn rebuild(&self, index: u8) -> Result<Fragment> {
        let block = self.description.rebuild(&self.blocks, index.into())?.into();
        Ok(Fragment { description: self.description.clone(), index, block })
    }
}

/// Fragments of a blob, by the name of their encoding.
pub(super) struct Collected {
    blob: BlobId,
    all: HashMap<BlobId, Partial>,
}

impl Collected {
    pub(super) fn new(blob: BlobId) -> Collected {
        Collected { blob, all: HashMap::new() }
    }

    /// Takes a fragment, unless it is not what it says: then it counts for nothing, and comes back.
    pub(super) fn add(&mut self, fragment: Fragment) -> Result<(), Box<Fragment>> {
        if !fragment.is_of(&self.blob) {
            return Err(Box::new(fragment));
        }
        let Fragment { description, index, block } = fragment;
        let partial = self.all.entry(description.id()).or_insert_with(|| {
            let blocks = vec![None; description.width()];
            Partial { description, blocks }
        });
        partial.blocks[usize::from(index)] = Some(block);
        Ok(())
    }

    /// How many fragments the encoding lacks that is nearest to being whole; `needed` if there is none.
    pub(super) fn missing(&self, needed: usize) -> usize {
        self.all.values().map(Partial::missing).min().unwrap_or(needed)
    }

    /// Puts the blob together at the start of `buf`, if an encoding is whole. One that is something else is dropped,
    /// and told.
    pub(super) fn decode(&mut self, buf: &mut [u8], reasons: &mut Vec<Error>) -> Option<Partial> {
        let whole = self.all.extract_if(|_, partial| partial.missing() == 0);
        for (_, partial) in whole {
            let Partial { description, blocks } = &partial;
            let decoded = match buf.get_mut(..description.len as usize) {
                Some(content) => description.decode(blocks, content),
                None => Err(Error::corrupt(format!("blob {}", description.blob), "it is too long")),
            };
            match decoded {
                Ok(()) => return Some(partial),
                Err(error) => reasons.push(error),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::{BlobId, Collected, Fragment};
    use crate::cluster::Redundancy;
    use crate::cluster::fragment::encode;

    proptest! {
        /// Whatever comes first, and whatever is wrong with it.
        #[test]
        fn a_wrong_block_is_one_that_is_missing_and_no_more(
            content in vec(any::<u8>(), 1..2000),
            order in proptest::sample::subsequence((0..8u8).collect::<Vec<_>>(), 8),
            turn in 0usize..8,
            wrong in vec((0usize..8, any::<usize>(), 1..=255u8), 0..5),
        ) {
            let code = Redundancy::ReedSolomon { data: 4, parity: 4 };
            let blob = BlobId::of(&content);
            let (description, blocks) = encode(&blob, &content, code);
            let fragment = |index: u8| {
                let block = blocks.share(index.into());
                Fragment { description: description.clone(), index, block }
            };
            let mut all: Vec<_> = order.iter().map(|index| fragment(*index)).collect();
            all.rotate_left(turn);
            let mut spoilt = std::collections::HashSet::new();
            for (which, at, mask) in wrong {
                if spoilt.insert(which) {
                    let mut block = all[which].block.to_vec();
                    let at = at % block.len();
                    block[at] ^= mask;
                    all[which].block = block.into();
                }
            }
            let mut collected = Collected::new(blob);
            let mut buf = vec![0; content.len() + 10];
            let (mut good, mut reasons) = (0, Vec::new());
            for (at, one) in all.into_iter().enumerate() {
                prop_assert!(good < 4, "four are enough");
                let index = one.index;
                let taken = collected.add(one);
                prop_assert_eq!(taken.is_err(), spoilt.contains(&at));
                good += usize::from(taken.is_ok());
                let whole = collected.decode(&mut buf, &mut reasons);
                prop_assert_eq!(whole.is_some(), good == 4);
                if let Some(whole) = whole {
                    prop_assert_eq!(&buf[..content.len()], &content[..]);
                    prop_assert_eq!(whole.rebuild(index).unwrap(), fragment(index));
                    prop_assert_eq!(whole.rebuild(index ^ 4).unwrap(), fragment(index ^ 4));
                    break;
                }
                prop_assert_eq!(collected.missing(4), 4 - good);
            }
            prop_assert_eq!(good == 4, spoilt.len() <= 4);
            prop_assert!(reasons.is_empty());
        }
    }
}
