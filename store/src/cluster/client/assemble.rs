//! Decodes a blob from the fragments that were received.
//!
//! A checksum recognises a damaged block. It does not recognise a forged block, which shows only
//! when the decoded content does not have the blob's name. Then one more block is fetched, and
//! choices of *k* blocks that contain it are tried, until one gives the blob. The other blocks
//! are compared with that choice: those that differ are wrong.
//!
//! A sender that lies may send many blocks. So two kinds of choices are tried, and each has its own
//! limit:
//!
//! | choices | limit | find the blob if |
//! |---|---|---|
//! | of the first block of each sender | [`MAX_DECODES`]: all choices of 12 of 16 and of 8 of 18 blocks | *k* honest senders answer, whatever the others send |
//! | in which a sender occurs twice | [`MAX_REPEATED`] | some peers hold several blocks, as in a small cluster, and few lie |
//!
//! A description can be forged, too: its blocks have the checksums that it states, and decode to
//! something else. Its sender is known if it sent everything that was decoded, which is always so
//! for a copy.

use std::collections::HashMap;

use bytes::Bytes;

use crate::encoding::fragment::{Description, Fragment};
use crate::error::{Error, Result};
use crate::id::BlobId;

/// The most choices of the senders' first blocks that are decoded for one encoding. A decode of a
/// chunk of 256 KiB that fails takes about 0.2 ms.
const MAX_DECODES: usize = 2048;

/// The most choices with several blocks of one sender that are decoded for one encoding.
const MAX_REPEATED: usize = 256;

/// The most choices with several blocks of one sender that are examined for each block.
const MAX_EXAMINED: usize = 1 << 16;

/// The most blocks of one encoding that are kept of one sender. Several blocks may claim the same
/// index.
const MAX_OF_SENDER: usize = 32;

/// The most blocks of one encoding that are kept beside the first of each sender.
const MAX_CANDIDATES: usize = 64;

/// A block and its sender.
struct CandidateBlock<T> {
    index: usize,
    from: T,
    block: Bytes,
    /// Whether the sender sent no other block before.
    is_first: bool,
}

/// The received fragments of one encoding of a blob, and the sender of each.
pub(crate) struct EncodingAssembly<T> {
    pub(crate) description: Description,
    /// The blocks in the order in which they arrived.
    candidates: Vec<CandidateBlock<T>>,
    /// The number of candidates of which all choices were tried.
    tried: usize,
    /// The number of choices of first blocks that were decoded without success.
    tries: usize,
    /// The number of other choices that were decoded without success.
    repeated_tries: usize,
    /// Senders and indices of copies that did not have the blob's name.
    wrong: Vec<(T, u8)>,
}

impl<T: Copy + Eq> EncodingAssembly<T> {
    pub(crate) fn new(description: Description) -> EncodingAssembly<T> {
        EncodingAssembly {
            description,
            candidates: Vec::new(),
            tried: 0,
            tries: 0,
            repeated_tries: 0,
            wrong: Vec::new(),
        }
    }

    /// Adds a block, unless there is one with this index from this sender, or the sender has sent
    /// more than an honest one does.
    pub(crate) fn add(&mut self, index: u8, from: T, block: Bytes) {
        let index = usize::from(index);
        let own = || self.candidates.iter().filter(|one| one.from == from);
        let is_first = own().next().is_none();
        let others = self.candidates.iter().filter(|one| !one.is_first).count();
        let is_accepted = is_first || (own().count() < MAX_OF_SENDER && others < MAX_CANDIDATES);
        if index < self.description.width() && is_accepted && own().all(|one| one.index != index) {
            self.candidates.push(CandidateBlock { index, from, block, is_first });
        }
    }

    /// The blocks by index. Of several blocks with one index the first counts.
    fn blocks(&self) -> Vec<Option<&Bytes>> {
        let mut blocks = vec![None; self.description.width()];
        for one in self.candidates.iter().rev() {
            blocks[one.index] = Some(&one.block);
        }
        blocks
    }

    /// The number of blocks that are missing. If decoding has failed, at least one more may help.
    pub(crate) fn missing(&self) -> usize {
        let (needed, present) = (self.description.needed(), self.blocks().iter().flatten().count());
        needed.saturating_sub(present).max(usize::from(self.has_failed()))
    }

    /// Whether a choice of blocks was decoded without success.
    fn has_failed(&self) -> bool {
        self.tries > 0 || self.repeated_tries > 0
    }

    /// Whether no further choice is tried.
    pub(crate) fn is_hopeless(&self) -> bool {
        self.tries >= MAX_DECODES
    }

    /// Decodes the blob, if there are enough blocks and one of them is new. Returns the senders and
    /// indices of wrong blocks. The candidates that remain are right.
    pub(crate) fn decode(&mut self, content: &mut [u8]) -> Option<Result<Vec<(T, u8)>>> {
        let mut failure = None;
        while self.tried < self.candidates.len() {
            if let Some(right) = self.decode_with(self.tried, content, &mut failure) {
                let wrong = match self.has_failed() {
                    false => Vec::new(),
                    true => self.differing(&self.chosen(&right)),
                };
                return Some(Ok(self.keep(&right, wrong)));
            }
            if self.description.needed() == 1 {
                // A copy is decoded alone, so it is the wrong one. Another copy may be right.
                let CandidateBlock { index, from, .. } = self.candidates.remove(self.tried);
                self.wrong.push((from, index as u8));
                (self.tries, self.repeated_tries) = (0, 0);
            } else {
                self.tried += 1;
            }
        }
        failure.map(Err)
    }

    /// Tries the choices that contain the candidate `last` and otherwise earlier ones. Returns the
    /// choice that gives the blob.
    fn decode_with(
        &mut self,
        last: usize,
        content: &mut [u8],
        failure: &mut Option<Error>,
    ) -> Option<Vec<usize>> {
        let needed = self.description.needed() - 1;
        if self.candidates[last].is_first {
            let others = self.compatible(last, true);
            for choice in choices(others.len(), needed) {
                if self.tries >= MAX_DECODES {
                    break;
                }
                let choice: Vec<_> = choice.iter().map(|at| others[*at]).chain([last]).collect();
                if self.has_repeated_index(&choice) {
                    continue;
                }
                match self.description.decode(&self.chosen(&choice), content) {
                    Ok(()) => return Some(choice),
                    Err(error) => *failure = Some(error),
                }
                self.tries += 1;
            }
        }
        for choice in self.repeated_choices(last) {
            if self.repeated_tries >= MAX_REPEATED {
                break;
            }
            match self.description.decode(&self.chosen(&choice), content) {
                Ok(()) => return Some(choice),
                Err(error) => *failure = Some(error),
            }
            self.repeated_tries += 1;
        }
        None
    }

    /// The blocks of a choice, by index.
    fn chosen(&self, choice: &[usize]) -> Vec<Option<&Bytes>> {
        let mut chosen = vec![None; self.description.width()];
        for one in choice.iter().map(|at| &self.candidates[*at]) {
            chosen[one.index] = Some(&one.block);
        }
        chosen
    }

    /// The candidates before `last` that have another index.
    fn compatible(&self, last: usize, only_first: bool) -> Vec<usize> {
        let index = self.candidates[last].index;
        let is_compatible = |at: &usize| {
            let one = &self.candidates[*at];
            one.index != index && (one.is_first || !only_first)
        };
        (0..last).filter(is_compatible).collect()
    }

    fn has_repeated_index(&self, choice: &[usize]) -> bool {
        let indices = choice.iter().fold(0u64, |all, at| all | 1 << self.candidates[*at].index);
        indices.count_ones() as usize != choice.len()
    }

    /// Some of the choices of *k* candidates that contain `last`, otherwise earlier ones, and a block
    /// that is not the first of its sender. Choices with blocks of more senders come first.
    fn repeated_choices(&self, last: usize) -> Vec<Vec<usize>> {
        if self.repeated_tries >= MAX_REPEATED {
            return Vec::new();
        }
        let others = self.compatible(last, false);
        let is_later = |at: &usize| !self.candidates[*at].is_first;
        if !is_later(&last) && !others.iter().any(is_later) {
            return Vec::new();
        }
        let mut all: Vec<(usize, Vec<usize>)> = Vec::new();
        let needed = self.description.needed() - 1;
        for choice in choices(others.len(), needed).take(MAX_EXAMINED) {
            let choice: Vec<_> = choice.iter().map(|at| others[*at]).chain([last]).collect();
            if self.has_repeated_index(&choice) || !choice.iter().any(is_later) {
                continue;
            }
            let mut senders = Vec::new();
            for one in choice.iter().map(|at| &self.candidates[*at]) {
                if !senders.contains(&one.from) {
                    senders.push(one.from);
                }
            }
            all.push((choice.len() - senders.len(), choice));
            if all.len() >= 4 * MAX_REPEATED {
                break;
            }
        }
        all.sort_by_key(|(repeated, _)| *repeated);
        all.into_iter().map(|(_, choice)| choice).collect()
    }

    /// The candidates that differ from the encoding that the blocks in `right` determine.
    fn differing(&self, right: &[Option<&Bytes>]) -> Vec<(T, u8)> {
        let is_right = |one: &&CandidateBlock<T>| match right[one.index] {
            Some(right) => *right == one.block,
            // A block that cannot be rebuilt has another checksum than the description says, so the
            // candidate, which has the checksum, is not it.
            None => {
                self.description.rebuild(right, one.index).is_ok_and(|right| right == *one.block)
            }
        };
        let wrong = self.candidates.iter().filter(|one| !is_right(one));
        wrong.map(|one| (one.from, one.index as u8)).collect()
    }

    /// Keeps only the candidates in `right`. Returns all wrong ones.
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

    /// The senders that certainly sent forged blocks: of a copy that did not have the blob's name,
    /// or of all blocks, if a choice of them could not be decoded.
    fn forgers(&self) -> Vec<T> {
        let copies = self.wrong.iter().map(|(from, _)| *from);
        let only = self.candidates.first().map(|one| one.from);
        let only = only.filter(|only| {
            self.has_failed() && self.candidates.iter().all(|one| one.from == *only)
        });
        copies.chain(only).collect()
    }

    /// Rebuilds the fragment with this index.
    pub(crate) fn rebuild(&self, index: u8) -> Result<Fragment> {
        let block = self.description.rebuild(&self.blocks(), index.into())?.into();
        Ok(Fragment { description: self.description.clone(), index, block })
    }
}

/// All ways to choose `chosen` of the numbers below `count`.
fn choices(count: usize, chosen: usize) -> impl Iterator<Item = Vec<usize>> {
    let first = (chosen <= count).then(|| (0..chosen).collect::<Vec<_>>());
    std::iter::successors(first, move |before| {
        // Advance the last number that can grow, and put the later ones right after it.
        let at = (0..chosen).rfind(|at| before[*at] < count - chosen + at)?;
        let mut next = before.clone();
        (at..chosen).for_each(|later| next[later] = before[at] + 1 + later - at);
        Some(next)
    })
}

/// The received fragments of a blob, by encoding.
pub(crate) struct BlobAssembly<T> {
    blob: BlobId,
    all: HashMap<BlobId, EncodingAssembly<T>>,
    /// The senders of forged encodings that were given up.
    forgers: Vec<T>,
}

/// A decoded blob.
pub(crate) struct AssembledBlob<T> {
    pub(crate) partial: EncodingAssembly<T>,
    /// The senders and indices of forged blocks of this encoding.
    pub(crate) wrong: Vec<(T, u8)>,
}

impl<T: Copy + Eq> BlobAssembly<T> {
    pub(crate) fn new(blob: BlobId) -> BlobAssembly<T> {
        BlobAssembly { blob, all: HashMap::new(), forgers: Vec::new() }
    }

    /// Adds a fragment. Returns it if its block does not match its checksum or it is not of this
    /// blob.
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

    /// The number of fragments that the most complete encoding lacks; `needed` if there is none.
    pub(crate) fn missing(&self, needed: usize) -> usize {
        self.all.values().map(EncodingAssembly::missing).min().unwrap_or(needed)
    }

    /// Decodes the blob into the start of `buf`, if an encoding has enough fragments. Adds the
    /// errors of failed attempts to `reasons`.
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
                    partial.tries = MAX_DECODES;
                    Some(Err(Error::corrupt(
                        format!("blob {}", self.blob),
                        "it is longer than the buffer",
                    )))
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
        let forgers = &mut self.forgers;
        self.all.retain(|_, partial| {
            let is_kept = !partial.is_hopeless();
            if !is_kept {
                forgers.extend(partial.forgers());
            }
            is_kept
        });
        None
    }

    /// The senders that certainly sent a forged encoding, each once. A decoded encoding is not
    /// among these: its wrong blocks were returned with it.
    pub(crate) fn forgers(&self) -> Vec<T> {
        let mut all: Vec<T> = Vec::new();
        let open = self.all.values().flat_map(EncodingAssembly::forgers);
        for one in self.forgers.iter().copied().chain(open) {
            if !all.contains(&one) {
                all.push(one);
            }
        }
        all
    }
}

#[cfg(test)]
mod tests;
