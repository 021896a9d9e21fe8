//! Who keeps which fragment, if some have several and some fragments are there twice.

use crate::encoding::redundancy::MAX_WIDTH;

/// Gives each holder at most one of the fragments that it has, each fragment to one holder, as many as
/// possible. Fragments are bits. A holder that comes earlier is not left out for one that comes later.
pub(crate) fn matching(holders: &[u32]) -> Vec<Option<u8>> {
    let mut owners = [None; MAX_WIDTH];
    for holder in 0..holders.len() {
        augment(holder, holders, &mut owners, &mut 0);
    }
    let mut given = vec![None; holders.len()];
    for (index, owner) in owners.into_iter().enumerate() {
        if let Some(owner) = owner {
            given[owner] = Some(index as u8);
        }
    }
    given
}

/// How many holders have a fragment of their own: so many losses less one leave a fragment.
pub(crate) fn size(holders: &[u32]) -> usize {
    matching(holders).iter().flatten().count()
}

/// Finds a fragment for this holder: a free one, or one whose owner can have another.
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

/// The bits that are set.
pub(crate) fn bits(set: u32) -> impl Iterator<Item = u8> {
    (0..MAX_WIDTH as u8).filter(move |index| set & (1 << index) != 0)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::{bits, matching, size};

    /// The most, by trying everything.
    fn most(holders: &[u32], used: u32) -> usize {
        let Some((first, rest)) = holders.split_first() else { return 0 };
        let with = bits(*first & !used).map(|index| 1 + most(rest, used | 1 << index));
        with.max().unwrap_or(0).max(most(rest, used))
    }

    proptest! {
        #[test]
        fn as_many_as_possible_have_one_of_their_own(holders in vec(0u32..64, 0..7)) {
            let given = matching(&holders);
            let mut used = 0;
            for (has, gets) in holders.iter().zip(&given) {
                if let Some(index) = gets {
                    prop_assert!(has & (1 << index) != 0 && used & (1u32 << index) == 0);
                    used |= 1 << index;
                }
            }
            prop_assert_eq!(size(&holders), most(&holders, 0));
            // Who comes first has one, if it can be.
            for len in 0..holders.len() {
                let had = matching(&holders[..len]);
                prop_assert!(had.iter().zip(&given).all(|(had, has)| had.is_none() || has.is_some()));
            }
        }
    }
}
