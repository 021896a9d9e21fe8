//! What was received of a blob.
//!
//! A block that is damaged is told by its checksum. One that was forged is not: it shows when the blob is put together,
//! and is something else. Then one more block is asked for, and each choice of as many as are enough is tried that has
//! not been, until one is the blob. The blocks outside of it that differ from it are the wrong ones.

use std::collections::HashMap;

use bytes::Bytes;

use crate::encoding::fragment::{Description, Fragment};
use crate::error::{Error, Result};
use crate::id::BlobId;

/// Choices of blocks that are tried for one encoding at most, and looked at for each block.
const TRIES: usize = 256;
const LOOKS: usize = 1 << 16;

/// Blocks of one encoding that are kept at most: several may say that they are the same one.
const MOST: usize = 64;

/// A block, and from whom it is.
struct CandidateBlock<T> {
    index: usize,
    from: T,
    block: Bytes,
}

/// Fragments of one encoding of a blob, and from whom each is.
pub(crate) struct EncodingAssembly<T> {
    pub(crate) description: Description,
    /// In the order in which they came.
    candidates: Vec<CandidateBlock<T>>,
    /// So many of them were tried, in all choices of these.
    tried: usize,
    tries: usize,
    /// Copies that were something else.
    wrong: Vec<(T, u8)>,
}

impl<T: Copy + Eq> EncodingAssembly<T> {
    pub(crate) fn new(description: Description) -> EncodingAssembly<T> {
        EncodingAssembly {
            description,
            candidates: Vec::new(),
            tried: 0,
            tries: 0,
            wrong: Vec::new(),
        }
    }

    /// Takes a block, unless there is one with this index from there.
    pub(crate) fn add(&mut self, index: u8, from: T, block: Bytes) {
        let index = usize::from(index);
        let is_there = |one: &CandidateBlock<T>| one.index == index && one.from == from;
        if index < self.description.width()
            && self.candidates.len() < MOST
            && !self.candidates.iter().any(is_there)
        {
            self.candidates.push(CandidateBlock { index, from, block });
        }
    }

    /// The blocks by their index: of each the first one.
    fn blocks(&self) -> Vec<Option<&Bytes>> {
        let mut blocks = vec![None; self.description.width()];
        for one in self.candidates.iter().rev() {
            blocks[one.index] = Some(&one.block);
        }
        blocks
    }

    /// How many it lacks. If it was something else, one more may help.
    pub(crate) fn missing(&self) -> usize {
        let (needed, present) = (self.description.needed(), self.blocks().iter().flatten().count());
        needed.saturating_sub(present).max(usize::from(self.tries > 0))
    }

    /// Whether nothing more is tried.
    fn is_hopeless(&self) -> bool {
        self.tries >= TRIES
    }

    /// Puts the blob together, if there are enough blocks and one of them is new, and returns from whom the wrong ones
    /// were. Those that are left are right.
    pub(crate) fn decode(&mut self, content: &mut [u8]) -> Option<Result<Vec<(T, u8)>>> {
        let mut failure = None;
        while self.tried < self.candidates.len() {
            for choice in self.choices(self.tried) {
                if self.is_hopeless() {
                    return failure.map(Err);
                }
                let mut chosen = vec![None; self.description.width()];
                for one in choice.iter().map(|at| &self.candidates[*at]) {
                    chosen[one.index] = Some(&one.block);
                }
                match self.description.decode(&chosen, content) {
                    Ok(()) => {
                        let wrong =
                            if self.tries > 0 { self.differing(&chosen) } else { Ok(vec![]) };
                        return Some(wrong.map(|wrong| self.keep(&choice, wrong)));
                    }
                    Err(error) => failure = Some(error),
                }
                self.tries += 1;
            }
            if self.description.needed() == 1 {
                // It is the only one, so it is the wrong one. Another copy may be right.
                let CandidateBlock { index, from, .. } = self.candidates.remove(self.tried);
                self.wrong.push((from, index as u8));
                self.tries = 0;
            } else {
                self.tried += 1;
            }
        }
        failure.map(Err)
    }

    /// The choices of as many as are enough that have this one and those before it. Those come first in which each is from
    /// somebody else: one who lies can do so for many blocks.
    fn choices(&self, last: usize) -> Vec<Vec<usize>> {
        let others: Vec<_> = (0..last)
            .filter(|at| self.candidates[*at].index != self.candidates[last].index)
            .collect();
        let mut all: Vec<(usize, Vec<usize>)> = Vec::new();
        for choice in choices(others.len(), self.description.needed() - 1).take(LOOKS) {
            let choice: Vec<_> = choice.iter().map(|at| others[*at]).chain([last]).collect();
            let (mut indexes, mut senders) = (0u64, Vec::new());
            for one in choice.iter().map(|at| &self.candidates[*at]) {
                indexes |= 1 << one.index;
                if !senders.contains(&one.from) {
                    senders.push(one.from);
                }
            }
            if indexes.count_ones() as usize == choice.len() {
                all.push((choice.len() - senders.len(), choice));
                if all.len() >= 4 * TRIES {
                    break;
                }
            }
        }
        all.sort_by_key(|(repeated, _)| *repeated);
        all.into_iter().map(|(_, choice)| choice).collect()
    }

    /// The blocks that are others than those that belong to these.
    fn differing(&self, right: &[Option<&Bytes>]) -> Result<Vec<(T, u8)>> {
        let mut wrong = Vec::new();
        for CandidateBlock { index, from, block } in &self.candidates {
            let is_right = match right[*index] {
                Some(right) => right == block,
                None => self.description.rebuild(right, *index)? == **block,
            };
            if !is_right {
                wrong.push((*from, *index as u8));
            }
        }
        Ok(wrong)
    }

    /// Only these are left. Returns all that were wrong.
    fn keep(&mut self, right: &[usize], wrong: Vec<(T, u8)>) -> Vec<(T, u8)> {
        let mut at = 0;
        self.candidates.retain(|_| {
            at += 1;
            right.contains(&(at - 1))
        });
        let mut all = std::mem::take(&mut self.wrong);
        all.extend(wrong);
        all
    }

    /// The fragment that somebody should have had.
    pub(crate) fn rebuild(&self, index: u8) -> Result<Fragment> {
        let block = self.description.rebuild(&self.blocks(), index.into())?.into();
        Ok(Fragment { description: self.description.clone(), index, block })
    }
}

/// All ways to choose so many of the numbers below `count`.
fn choices(count: usize, chosen: usize) -> impl Iterator<Item = Vec<usize>> {
    let first = (chosen <= count).then(|| (0..chosen).collect::<Vec<_>>());
    std::iter::successors(first, move |before| {
        // The last one that can go on does, and those behind it follow it.
        let at = (0..chosen).rfind(|at| before[*at] < count - chosen + at)?;
        let mut next = before.clone();
        (at..chosen).for_each(|later| next[later] = before[at] + 1 + later - at);
        Some(next)
    })
}

/// Fragments of a blob, by the name of their encoding.
pub(crate) struct BlobAssembly<T> {
    blob: BlobId,
    all: HashMap<BlobId, EncodingAssembly<T>>,
}

/// A blob that was put together.
pub(crate) struct AssembledBlob<T> {
    pub(crate) partial: EncodingAssembly<T>,
    /// From whom blocks were that are forged, and which.
    pub(crate) wrong: Vec<(T, u8)>,
}

impl<T: Copy + Eq> BlobAssembly<T> {
    pub(crate) fn new(blob: BlobId) -> BlobAssembly<T> {
        BlobAssembly { blob, all: HashMap::new() }
    }

    /// Takes a fragment, unless it is not what it says: then it counts for nothing, and comes back.
    pub(crate) fn add(&mut self, from: T, fragment: Fragment) -> Result<(), Box<Fragment>> {
        if !fragment.is_of(&self.blob) {
            return Err(Box::new(fragment));
        }
        let Fragment { description, index, block } = fragment;
        let partial =
            self.all.entry(description.id()).or_insert_with(|| EncodingAssembly::new(description));
        partial.add(index, from, block);
        Ok(())
    }

    /// How many fragments the encoding lacks that is nearest to being whole; `needed` if there is none.
    pub(crate) fn missing(&self, needed: usize) -> usize {
        self.all.values().map(EncodingAssembly::missing).min().unwrap_or(needed)
    }

    /// Puts the blob together at the start of `buf`, if an encoding is whole. What is something else is told.
    pub(crate) fn decode(
        &mut self,
        buf: &mut [u8],
        reasons: &mut Vec<Error>,
    ) -> Option<AssembledBlob<T>> {
        let mut whole = None;
        for (encoding, partial) in &mut self.all {
            let decoded = match buf.get_mut(..partial.description.len as usize) {
                Some(content) => partial.decode(content),
                None => {
                    partial.tries = TRIES;
                    Some(Err(Error::corrupt(format!("blob {}", self.blob), "it is too long")))
                }
            };
            match decoded {
                Some(Ok(wrong)) => {
                    whole = Some((*encoding, wrong));
                    break;
                }
                Some(Err(error)) => reasons.push(error),
                None => {}
            }
        }
        if let Some((encoding, wrong)) = whole {
            let partial = self.all.remove(&encoding)?;
            return Some(AssembledBlob { partial, wrong });
        }
        self.all.retain(|_, partial| !partial.is_hopeless());
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::{BlobAssembly, BlobId, Fragment, choices};
    use crate::encoding::Redundancy;
    use crate::encoding::fragment::encode;

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
            let mut collected = BlobAssembly::new(blob);
            let mut buf = vec![0; content.len() + 10];
            let (mut good, mut reasons) = (0, Vec::new());
            for (at, one) in all.into_iter().enumerate() {
                prop_assert!(good < 4, "four are enough");
                let index = one.index;
                let taken = collected.add(at, one);
                prop_assert_eq!(taken.is_err(), spoilt.contains(&at));
                good += usize::from(taken.is_ok());
                let whole = collected.decode(&mut buf, &mut reasons);
                prop_assert_eq!(whole.is_some(), good == 4);
                if let Some(whole) = whole {
                    prop_assert_eq!(&buf[..content.len()], &content[..]);
                    prop_assert_eq!(whole.partial.rebuild(index).unwrap(), fragment(index));
                    prop_assert_eq!(whole.partial.rebuild(index ^ 4).unwrap(), fragment(index ^ 4));
                    break;
                }
                prop_assert_eq!(collected.missing(4), 4 - good);
            }
            prop_assert_eq!(good == 4, spoilt.len() <= 4);
            prop_assert!(reasons.is_empty());
        }

        /// Peers that lie so that the checksums are right.
        #[test]
        fn forged_blocks_are_found_as_long_as_enough_others_come(
            content in vec(any::<u8>(), 8..500),
            which in 0usize..4,
            forged in vec(0u8..8, 0..8),
            turn in 0u8..8,
        ) {
            let redundancy: Redundancy =
                ["rs=4+4", "rs=2+3", "rs=3+1", "replicas=3"][which].parse().unwrap();
            let blob = BlobId::of(&content);
            let (description, blocks) = encode(&blob, &content, redundancy);
            let width = redundancy.width() as u8;
            // Blocks of another content, as if their checksums were the same.
            let mut other = content.clone();
            other.iter_mut().for_each(|byte| *byte ^= 0x55);
            let lies = encode(&blob, &other, redundancy).1;
            let index_of = |place: u8| place % description.width() as u8;
            // Some blocks of both contents are the same ones, such as what is only padding. Those are not forged.
            let is_forged = |place: u8| {
                let index = usize::from(index_of(place));
                forged.contains(&place) && lies.share(index) != blocks.share(index)
            };
            let mut collected = BlobAssembly::new(blob);
            let mut buf = vec![0; content.len()];
            let mut good = 0;
            for place in (0..width).map(|place| (place + turn) % width) {
                let index = index_of(place);
                let from = if is_forged(place) { &lies } else { &blocks };
                let partial = collected.all.entry(description.id());
                let partial = partial.or_insert_with(|| super::EncodingAssembly::new(description.clone()));
                partial.add(index, place, from.share(index.into()));
                good += usize::from(!is_forged(place));
                let mut reasons = Vec::new();
                let whole = collected.decode(&mut buf, &mut reasons);
                prop_assert_eq!(whole.is_some(), good == description.needed());
                if let Some(whole) = whole {
                    prop_assert_eq!(&buf, &content);
                    let mut wrong: Vec<_> = whole.wrong.iter().map(|(place, _)| *place).collect();
                    wrong.sort_unstable();
                    let asked = (0..width).map(|place| (place + turn) % width);
                    let asked = asked.take_while(|other| *other != place);
                    let mut lied: Vec<_> = asked.filter(|place| is_forged(*place)).collect();
                    lied.sort_unstable();
                    prop_assert_eq!(wrong, lied);
                    for index in 0..description.width() as u8 {
                        let right = whole.partial.rebuild(index).unwrap();
                        prop_assert_eq!(right.block, blocks.share(index.into()));
                    }
                    break;
                }
            }
        }
    }

    /// One peer has nothing, and says that it has everything. The others are asked one after the other.
    #[test]
    fn who_lies_for_many_blocks_at_once_does_not_keep_the_others_from_being_read() {
        for (text, before) in [("rs=2+1", 1), ("rs=2+1", 0), ("rs=4+2", 2), ("rs=4+4", 3)] {
            let redundancy: Redundancy = text.parse().unwrap();
            let content = vec![7; 3000];
            let blob = BlobId::of(&content);
            let (description, blocks) = encode(&blob, &content, redundancy);
            let lies = encode(&blob, &[9; 3000], redundancy).1;
            let mut collected = BlobAssembly::new(blob);
            let mut buf = vec![0; 3000];
            let (width, needed) = (description.width() as u8, description.needed() as u8);
            let mut whole = None;
            for peer in 0..=needed {
                let partial = collected.all.entry(description.id());
                let partial =
                    partial.or_insert_with(|| super::EncodingAssembly::new(description.clone()));
                match peer.cmp(&before) {
                    std::cmp::Ordering::Equal => {
                        (0..width).for_each(|at| partial.add(at, peer, lies.share(at.into())));
                    }
                    order => {
                        let index = if order.is_lt() { peer } else { peer - 1 };
                        partial.add(index, peer, blocks.share(index.into()));
                    }
                }
                whole = collected.decode(&mut buf, &mut Vec::new());
                assert_eq!(whole.is_some(), peer == needed, "{text}");
            }
            let whole = whole.unwrap();
            assert_eq!(buf, content);
            assert!(whole.wrong.iter().all(|(peer, _)| *peer == before));
            assert_eq!(whole.wrong.len(), usize::from(width), "{text}");
        }
    }

    /// The last block of nine bytes in four is padding only.
    #[test]
    fn a_forged_parity_block_that_changes_only_the_padding_is_found() {
        let redundancy: Redundancy = "rs=4+4".parse().unwrap();
        let content = *b"nine byte";
        let blob = BlobId::of(&content);
        let (description, blocks) = encode(&blob, &content, redundancy);
        for forged in 4..8 {
            let mut collected = BlobAssembly::new(blob);
            let mut buf = vec![0; content.len()];
            for index in [0, 1, 2, forged, if forged == 7 { 4 } else { forged + 1 }] {
                let mut block = blocks.share(index).to_vec();
                block.iter_mut().for_each(|byte| *byte ^= u8::from(index == forged));
                let partial = collected.all.entry(description.id());
                let partial =
                    partial.or_insert_with(|| super::EncodingAssembly::new(description.clone()));
                partial.add(index as u8, index, block.into());
                let whole = collected.decode(&mut buf, &mut Vec::new());
                let is_last = index > 2 && index != forged;
                assert_eq!(whole.is_some(), is_last, "{index} with {forged}");
                if let Some(whole) = whole {
                    assert_eq!(
                        (&buf[..], &whole.wrong[..]),
                        (&content[..], &[(forged, forged as u8)][..])
                    );
                }
            }
        }
    }

    #[test]
    fn every_choice_comes_once() {
        for (count, chosen, all) in [(0, 0, 1), (5, 0, 1), (7, 3, 35), (4, 4, 1), (3, 4, 0)] {
            let mut found: Vec<_> = choices(count, chosen).collect();
            assert!(found.iter().all(|one| one.is_sorted() && one.len() == chosen));
            found.sort();
            found.dedup();
            assert_eq!(found.len(), all, "{chosen} of {count}");
        }
    }
}
