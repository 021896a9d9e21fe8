//! Compares the fragments of an encoding with the blob's name: a pure decision.
//!
//! A checksum tells whether a block is the one that its description means. It does not tell whether
//! the description is of the blob: a client whose memory flipped a bit, or a hostile peer, can make
//! a description of anything. So the blob is decoded and hashed. The decoded blocks then determine
//! every other block, parity included, and each fragment is compared with its own.

use bytes::Bytes;

use super::plan::Rejection;
use crate::cluster::client::assemble::EncodingAssembly;
use crate::encoding::fragment::{Description, Fragment};

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The blob was decoded and has its name. The fragments at these positions differ from what the
    /// blob gives. All others are right.
    Decoded {
        /// Positions of wrong fragments.
        wrong: Vec<usize>,
    },
    /// The encoding does not give the blob as it should.
    Rejected(Rejection),
}

/// Compares fragments with the name of their blob. They are all of the encoding with this
/// description, match their checksums, and are enough to decode the blob.
pub(super) fn verify(description: &Description, fragments: &[Fragment]) -> Verdict {
    let right = match description.width() {
        1 => right_copy(description, fragments).map(|copy| vec![copy]),
        _ => right_blocks(description, fragments),
    };
    match right {
        Ok(right) => {
            let is_wrong = |at: &usize| {
                let Fragment { index, block, .. } = &fragments[*at];
                right.get(usize::from(*index)) != Some(block)
            };
            Verdict::Decoded { wrong: (0..fragments.len()).filter(is_wrong).collect() }
        }
        Err(rejection) => Verdict::Rejected(rejection),
    }
}

/// The block of a copy that has the blob's name.
fn right_copy(description: &Description, copies: &[Fragment]) -> Result<Bytes, Rejection> {
    let mut content = vec![0; description.len as usize];
    let mut is_right =
        |copy: &&Fragment| description.decode(&[Some(&copy.block)], &mut content).is_ok();
    let right = copies.iter().find(|copy| is_right(copy));
    right.map(|copy| copy.block.clone()).ok_or(Rejection::Unreadable)
}

/// All blocks that the blob gives.
fn right_blocks(
    description: &Description,
    fragments: &[Fragment],
) -> Result<Vec<Bytes>, Rejection> {
    let mut assembly = EncodingAssembly::new(description.clone());
    for (at, fragment) in fragments.iter().enumerate() {
        assembly.add(fragment.index, at, fragment.block.clone());
    }
    let mut content = vec![0; description.len as usize];
    match assembly.decode(&mut content) {
        Some(Ok(_)) => {}
        Some(Err(_)) | None => return Err(Rejection::Unreadable),
    }
    // A block that does not match its checksum shows that the description is of other parity.
    let rebuild = |index: usize| {
        let rebuilt = assembly.rebuild(index as u8);
        rebuilt.map(|fragment| fragment.block).map_err(|_| Rejection::Inconsistent)
    };
    (0..description.width()).map(rebuild).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert_eq, proptest};

    use super::{Rejection, Verdict, verify};
    use crate::encoding::Redundancy;
    use crate::encoding::fragment::{Fragment, encode};
    use crate::encoding::redundancy::StoragePolicy;
    use crate::id::BlobId;

    /// All fragments of an encoding of `content` under the name `blob`, with right checksums.
    pub(in crate::cluster::repair) fn fragments(
        blob: &BlobId,
        content: &[u8],
        policy: impl Into<StoragePolicy>,
    ) -> Vec<Fragment> {
        let (description, blocks) = encode(blob, content, policy);
        let fragment = |index: usize| {
            let block = blocks.share(index);
            Fragment { description: description.clone(), index: index as u8, block }
        };
        (0..description.width()).map(fragment).collect()
    }

    /// An encoding whose data blocks are those of `content` and whose parity blocks are those of
    /// another content, with right checksums for each.
    pub(in crate::cluster::repair) fn inconsistent(
        blob: &BlobId,
        content: &[u8],
        code: Redundancy,
    ) -> Vec<Fragment> {
        let other: Vec<u8> = content.iter().map(|byte| byte ^ 0x5A).collect();
        let (mut right, wrong) = (fragments(blob, content, code), fragments(blob, &other, code));
        let description = right[0].description.with_parity_of(&wrong[0].description);
        for (index, fragment) in right.iter_mut().enumerate() {
            fragment.description = description.clone();
            if index >= code.needed() {
                fragment.block = wrong[index].block.clone();
            }
        }
        right
    }

    const CODES: [&str; 4] = ["rs=4+4", "rs=2+1", "rs=3+2", "none"];

    proptest! {
        #[test]
        fn an_encoding_of_another_content_is_rejected(
            content in vec(any::<u8>(), 1..400),
            flipped in any::<usize>(),
            which in 0usize..4,
        ) {
            let (blob, code) = (BlobId::of(&content), CODES[which].parse::<Redundancy>().unwrap());
            let good = fragments(&blob, &content, code);
            let right = Verdict::Decoded { wrong: Vec::new() };
            prop_assert_eq!(verify(&good[0].description, &good), right);
            let mut other = content.clone();
            other[flipped % content.len()] ^= 1;
            let forged = fragments(&blob, &other, code);
            let is_whole = |one: &Fragment| one.is_of(&blob);
            prop_assert_eq!(forged.iter().filter(|one| is_whole(one)).count(), forged.len());
            let rejected = Verdict::Rejected(Rejection::Unreadable);
            prop_assert_eq!(verify(&forged[0].description, &forged), rejected);
        }

        /// Wrong parity does no harm until a data block is lost.
        #[test]
        fn an_encoding_with_the_parity_of_another_content_is_rejected(
            content in vec(any::<u8>(), 1..400),
            which in 0usize..3,
        ) {
            let (blob, code) = (BlobId::of(&content), CODES[which].parse::<Redundancy>().unwrap());
            let forged = inconsistent(&blob, &content, code);
            prop_assert_eq!(forged.iter().filter(|one| one.is_of(&blob)).count(), forged.len());
            let rejected = Verdict::Rejected(Rejection::Inconsistent);
            prop_assert_eq!(verify(&forged[0].description, &forged), rejected);
        }

        /// As if somebody had found other blocks with the same checksums.
        #[test]
        fn every_fragment_that_differs_is_named(
            content in vec(any::<u8>(), 1..400),
            wrong in proptest::sample::subsequence((0..8usize).collect::<Vec<_>>(), 0..=4),
        ) {
            let blob = BlobId::of(&content);
            let mut all = fragments(&blob, &content, "rs=4+4".parse::<Redundancy>().unwrap());
            let description = all[0].description.clone();
            for at in &wrong {
                let mut block = all[*at].block.to_vec();
                block.iter_mut().for_each(|byte| *byte ^= 0xA5 ^ *at as u8);
                all[*at].block = block.into();
            }
            prop_assert_eq!(verify(&description, &all), Verdict::Decoded { wrong });
        }
    }

    #[test]
    fn of_several_copies_the_wrong_ones_are_named() {
        let content = vec![7; 1000];
        let copy = fragments(&BlobId::of(&content), &content, Redundancy::NONE).remove(0);
        let mut all = vec![copy.clone(); 4];
        for at in [0, 2] {
            all[at].block = vec![8; 1000].into();
        }
        let verdict = verify(&copy.description, &all);
        assert_eq!(verdict, Verdict::Decoded { wrong: vec![0, 2] });
    }
}
