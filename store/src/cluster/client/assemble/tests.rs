//! Blocks that are missing, damaged or forged, in any order.

use proptest::collection::vec;
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

use super::{BlobAssembly, BlobId, Fragment, choices};
use crate::encoding::Redundancy;
use crate::encoding::fragment::encode;

proptest! {
    /// The fragments arrive in any order, and any of them may be damaged.
    #[test]
    fn a_damaged_block_counts_as_missing_and_does_no_further_harm(
        content in vec(any::<u8>(), 1..2000),
        order in proptest::sample::subsequence((0..8u8).collect::<Vec<_>>(), 8),
        rotation in 0usize..8,
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
        all.rotate_left(rotation);
        let mut damaged = std::collections::HashSet::new();
        for (which, at, mask) in wrong {
            if damaged.insert(which) {
                let mut block = all[which].block.to_vec();
                let at = at % block.len();
                block[at] ^= mask;
                all[which].block = block.into();
            }
        }
        let mut assembly = BlobAssembly::new(blob);
        let mut buf = vec![0; content.len() + 10];
        let (mut good, mut reasons) = (0, Vec::new());
        for (at, one) in all.into_iter().enumerate() {
            prop_assert!(good < 4, "four blocks are enough");
            let index = one.index;
            let taken = assembly.add(at, one);
            prop_assert_eq!(taken.is_err(), damaged.contains(&at));
            good += usize::from(taken.is_ok());
            let whole = assembly.decode(&mut buf, &mut reasons);
            prop_assert_eq!(whole.is_some(), good == 4);
            if let Some(whole) = whole {
                prop_assert_eq!(&buf[..content.len()], &content[..]);
                prop_assert_eq!(whole.partial.rebuild(index).unwrap(), fragment(index));
                prop_assert_eq!(whole.partial.rebuild(index ^ 4).unwrap(), fragment(index ^ 4));
                break;
            }
            prop_assert_eq!(assembly.missing(4), 4 - good);
        }
        prop_assert_eq!(good == 4, damaged.len() <= 4);
        prop_assert!(reasons.is_empty());
    }

    /// Some peers send forged blocks with the right checksums.
    #[test]
    fn forged_blocks_are_found_if_enough_others_arrive(
        content in vec(any::<u8>(), 8..500),
        which in 0usize..4,
        forged in vec(0u8..8, 0..8),
        rotation in 0u8..8,
    ) {
        let redundancy: Redundancy =
            ["rs=4+4", "rs=2+3", "rs=3+1", "replicas=3"][which].parse().unwrap();
        let blob = BlobId::of(&content);
        let (description, blocks) = encode(&blob, &content, redundancy);
        let width = redundancy.width() as u8;
        // Blocks of another content, as if their checksums were the same.
        let mut other = content.clone();
        other.iter_mut().for_each(|byte| *byte ^= 0x55);
        let forgeries = encode(&blob, &other, redundancy).1;
        let index_of = |place: u8| place % description.width() as u8;
        // Some blocks are the same in both contents, for example pure padding. They are not
        // forged.
        let is_forged = |place: u8| {
            let index = usize::from(index_of(place));
            forged.contains(&place) && forgeries.share(index) != blocks.share(index)
        };
        let mut assembly = BlobAssembly::new(blob);
        let mut buf = vec![0; content.len()];
        let mut good = 0;
        for place in (0..width).map(|place| (place + rotation) % width) {
            let index = index_of(place);
            let from = if is_forged(place) { &forgeries } else { &blocks };
            let partial = assembly.all.entry(description.id());
            let partial = partial
                .or_insert_with(|| super::EncodingAssembly::new(description.clone()));
            partial.add(index, place, from.share(index.into()));
            good += usize::from(!is_forged(place));
            let mut reasons = Vec::new();
            let whole = assembly.decode(&mut buf, &mut reasons);
            prop_assert_eq!(whole.is_some(), good == description.needed());
            if let Some(whole) = whole {
                prop_assert_eq!(&buf, &content);
                let mut wrong: Vec<_> = whole.wrong.iter().map(|(place, _)| *place).collect();
                wrong.sort_unstable();
                let asked = (0..width).map(|place| (place + rotation) % width);
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

/// One peer has nothing and claims to have every block. The other peers are asked one after the
/// other.
#[test]
fn a_peer_that_forges_many_blocks_does_not_prevent_a_read() {
    let large = (0..8).map(|liar| ("rs=8+4", liar));
    let small = [("rs=2+1", 1), ("rs=2+1", 0), ("rs=4+2", 2), ("rs=4+4", 3), ("rs=16+4", 5)];
    for (text, liar) in small.into_iter().chain(large) {
        let redundancy: Redundancy = text.parse().unwrap();
        let content = vec![7; 3000];
        let blob = BlobId::of(&content);
        let (description, blocks) = encode(&blob, &content, redundancy);
        let forgeries = encode(&blob, &[9; 3000], redundancy).1;
        let mut assembly = BlobAssembly::new(blob);
        let mut buf = vec![0; 3000];
        let (width, needed) = (description.width() as u8, description.needed() as u8);
        let mut whole = None;
        for peer in 0..=needed {
            let partial = assembly.all.entry(description.id());
            let partial =
                partial.or_insert_with(|| super::EncodingAssembly::new(description.clone()));
            match peer.cmp(&liar) {
                std::cmp::Ordering::Equal => {
                    (0..width).for_each(|at| partial.add(at, peer, forgeries.share(at.into())));
                }
                order => {
                    let index = if order.is_lt() { peer } else { peer - 1 };
                    partial.add(index, peer, blocks.share(index.into()));
                }
            }
            whole = assembly.decode(&mut buf, &mut Vec::new());
            assert_eq!(whole.is_some(), peer == needed, "{text}");
        }
        let whole = whole.unwrap();
        assert_eq!(buf, content);
        assert!(whole.wrong.iter().all(|(peer, _)| *peer == liar));
        assert_eq!(whole.wrong.len(), usize::from(width), "{text}");
    }
}

/// As many peers as the code survives answer first, and each of them sends six forged blocks.
#[test]
fn as_many_liars_as_may_be_lost_do_not_prevent_a_read() {
    for text in ["rs=4+4", "rs=6+3", "rs=8+4", "rs=10+4", "rs=12+4"] {
        let redundancy: Redundancy = text.parse().unwrap();
        let content = vec![7; 3000];
        let blob = BlobId::of(&content);
        let (description, blocks) = encode(&blob, &content, redundancy);
        let forgeries = encode(&blob, &[9; 3000], redundancy).1;
        let (width, needed) = (description.width(), description.needed());
        let mut assembly = BlobAssembly::new(blob);
        let mut buf = vec![0; 3000];
        for peer in 0..width {
            let partial = assembly.all.entry(description.id());
            let partial =
                partial.or_insert_with(|| super::EncodingAssembly::new(description.clone()));
            match peer < width - needed {
                true => (0..6).for_each(|more| {
                    let at = (peer + more) % width;
                    partial.add(at as u8, peer, forgeries.share(at));
                }),
                false => partial.add(peer as u8, peer, blocks.share(peer)),
            }
            let whole = assembly.decode(&mut buf, &mut Vec::new());
            assert_eq!(whole.is_some(), peer == width - 1, "{text}");
        }
        assert_eq!(buf, content);
    }
}

/// Nine bytes in four blocks: the last block is pure padding.
#[test]
fn a_forged_parity_block_that_changes_only_the_padding_is_found() {
    let redundancy: Redundancy = "rs=4+4".parse().unwrap();
    let content = *b"nine byte";
    let blob = BlobId::of(&content);
    let (description, blocks) = encode(&blob, &content, redundancy);
    for forged in 4..8 {
        let mut assembly = BlobAssembly::new(blob);
        let mut buf = vec![0; content.len()];
        for index in [0, 1, 2, forged, if forged == 7 { 4 } else { forged + 1 }] {
            let mut block = blocks.share(index).to_vec();
            block.iter_mut().for_each(|byte| *byte ^= u8::from(index == forged));
            let partial = assembly.all.entry(description.id());
            let partial =
                partial.or_insert_with(|| super::EncodingAssembly::new(description.clone()));
            partial.add(index as u8, index, block.into());
            let whole = assembly.decode(&mut buf, &mut Vec::new());
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

/// The description has the checksums of the forged parity blocks, so these cannot be rebuilt.
#[test]
fn forged_parity_with_its_own_checksums_does_not_prevent_a_read() {
    let redundancy: Redundancy = "rs=4+4".parse().unwrap();
    let (content, other) = (vec![7; 3000], vec![9; 3000]);
    let blob = BlobId::of(&content);
    let (right, blocks) = encode(&blob, &content, redundancy);
    let (wrong, forgeries) = encode(&blob, &other, redundancy);
    let description = right.with_parity_of(&wrong);
    let mut assembly = BlobAssembly::new(blob);
    let mut buf = vec![0; 3000];
    let mut whole = None;
    for index in [4, 5, 6, 7, 0, 1, 2, 3] {
        let from = if index < 4 { &blocks } else { &forgeries };
        let block = from.share(index);
        let fragment = Fragment { description: description.clone(), index: index as u8, block };
        assert!(assembly.add(index, fragment).is_ok(), "its checksum is right");
        whole = assembly.decode(&mut buf, &mut Vec::new());
        assert_eq!(whole.is_some(), index == 3, "{index}");
    }
    assert!(buf == content);
    let wrong: Vec<_> = whole.unwrap().wrong.into_iter().map(|(from, _)| from).collect();
    assert_eq!(wrong, [4, 5, 6, 7]);
}

#[test]
fn every_choice_is_produced_once() {
    for (count, chosen, all) in [(0, 0, 1), (5, 0, 1), (7, 3, 35), (4, 4, 1), (3, 4, 0)] {
        let mut found: Vec<_> = choices(count, chosen).collect();
        assert!(found.iter().all(|one| one.is_sorted() && one.len() == chosen));
        found.sort();
        found.dedup();
        assert_eq!(found.len(), all, "{chosen} of {count}");
    }
}
