//! Bipartite matching of holders and fragments, for the case that a peer has several fragments or a
//! fragment is on several peers.

use crate::encoding::redundancy::MAX_WIDTH;

/// Returns a maximum matching: each holder gets at most one of the fragments that it has, and each
/// fragment goes to at most one holder.
///
/// `holders` is a bit set of fragment indexes for each holder. A holder is never left without a
/// fragment in favour of a later one. The algorithm is Kuhn's, with augmenting paths.
pub(crate) fn matching(holders: &[u32]) -> Vec<Option<u8>> {
    let mut owners = [None; MAX_WIDTH];
    for holder in 0..holders.len() {
        augment(holder, holders, &mut owners, &mut 0);
    }
    let mut assigned = vec![None; holders.len()];
    for (index, owner) in owners.into_iter().enumerate() {
        if let Some(owner) = owner {
            assigned[owner] = Some(index as u8);
        }
    }
    assigned
}

/// Returns the size of a maximum matching: the number of holders that can have a fragment of their
/// own. If the size is `n`, the loss of `n - 1` of these holders leaves a fragment.
pub(crate) fn size(holders: &[u32]) -> usize {
    matching(holders).iter().flatten().count()
}

/// Finds a fragment for a holder: a free one, or one whose owner can get another. Returns whether
/// it found one. `seen` is the set of fragments that were already tried.
fn augment(
    holder: usize,
    holders: &[u32],
    owners: &mut [Option<usize>; MAX_WIDTH],
    seen: &mut u32,
) -> bool {
    for index in bits(holders[holder]) {
        if *seen & (1 << index) != 0 {
            continue;
        }
        *seen |= 1 << index;
        let is_free = match owners[usize::from(index)] {
            None => true,
            Some(owner) => augment(owner, holders, owners, seen),
        };
        if is_free {
            owners[usize::from(index)] = Some(holder);
            return true;
        }
    }
    false
}

/// Iterates over the bits that are set, the lowest first.
pub(crate) fn bits(set: u32) -> impl Iterator<Item = u8> {
    (0..MAX_WIDTH as u8).filter(move |index| set & (1 << index) != 0)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::{bits, matching, size};

    /// Returns the size of a maximum matching by trying every assignment.
    fn brute_force_size(holders: &[u32], used: u32) -> usize {
        let Some((first, rest)) = holders.split_first() else { return 0 };
        let with = bits(*first & !used).map(|index| 1 + brute_force_size(rest, used | 1 << index));
        with.max().unwrap_or(0).max(brute_force_size(rest, used))
    }

    proptest! {
        #[test]
        fn a_matching_is_maximum_and_prefers_earlier_holders(holders in vec(0u32..64, 0..7)) {
            let assigned = matching(&holders);
            let mut used = 0;
            for (has, assigned_index) in holders.iter().zip(&assigned) {
                if let Some(index) = assigned_index {
                    prop_assert!(has & (1 << index) != 0 && used & (1u32 << index) == 0);
                    used |= 1 << index;
                }
            }
            prop_assert_eq!(size(&holders), brute_force_size(&holders, 0));
            // A holder that has a fragment keeps having one when later holders are added.
            for len in 0..holders.len() {
                let had = matching(&holders[..len]);
                let mut pairs = had.iter().zip(&assigned);
                prop_assert!(pairs.all(|(had, has)| had.is_none() || has.is_some()));
            }
        }
    }
}
