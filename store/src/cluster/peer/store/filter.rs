//! Of which blobs a peer has nothing, told without a look into the table.
//!
//! Most fragments that are put are of blobs that the peer has never seen, and so are most blobs that it is asked about. A
//! Bloom filter knows them: what it does not have is not in the table; what it has may be. It holds all names that are in
//! the table or pending, and names of fragments that have been deleted, which nobody can take out.
//!
//! ```text
//! begin ──► next: all that is pending ──► and, step by step, all that is in the table ──► current ──► full ──► begin
//! ```
//!
//! What comes meanwhile is added to both. Until there is a current one, everything may be there.

use crate::id::BlobId;

/// Bits for each name. Of a hundred blobs that are not there, about one may be.
const BITS: usize = 12;

/// A name's bits are all in one line of the processor's cache.
const LINE: usize = 512;

/// How many they are.
const PROBES: usize = 6;

/// Names for which there is room at least and at most. At first there is room for twice as many as there are; who has
/// too many fragments for that does without.
const ROOM: (usize, usize) = (1 << 16, 1 << 27);

#[derive(Default)]
pub(super) struct Filter {
    current: Option<Bits>,
    /// The one that is just made, and the last name of the table that it has.
    next: Option<(Bits, BlobId)>,
}

impl Filter {
    /// Whether there may be something of a blob.
    pub(super) fn may_have(&self, blob: &BlobId) -> bool {
        self.current.as_ref().is_none_or(|bits| bits.may_have(blob))
    }

    /// Adds a name, before it is in the table.
    pub(super) fn insert(&mut self, blob: &BlobId) {
        let next = self.next.as_mut().map(|(bits, _)| bits);
        self.current.iter_mut().chain(next).for_each(|bits| bits.insert(blob));
    }

    /// Behind which name the table is to be read on; nothing if that is not needed. There are so many fragments, and
    /// `pending` are the names that may not be in the table yet.
    pub(super) fn wants<'a>(
        &mut self,
        fragments: u64,
        pending: impl Iterator<Item = &'a BlobId>,
    ) -> Option<BlobId> {
        let fragments = usize::try_from(fragments).unwrap_or(usize::MAX);
        if self.next.is_none() && self.current.as_ref().is_none_or(Bits::is_full) {
            if fragments > ROOM.1 / 2 {
                self.current = None;
                return None;
            }
            let mut bits = Bits::new(fragments.saturating_mul(2).clamp(ROOM.0, ROOM.1));
            pending.for_each(|blob| bits.insert(blob));
            self.next = Some((bits, BlobId::from_bytes([0; 32])));
        }
        self.next.as_ref().map(|(_, last)| *last)
    }

    /// The names that come next in the table, and whether they are the last.
    pub(super) fn extend(&mut self, names: &[BlobId], last: bool) {
        if let Some((bits, at)) = &mut self.next {
            names.iter().for_each(|blob| bits.insert(blob));
            *at = names.last().copied().unwrap_or(*at);
        }
        if last {
            self.current = self.next.take().map(|(bits, _)| bits).or(self.current.take());
        }
    }
}

struct Bits {
    lines: Vec<[u64; LINE / 64]>,
    room: usize,
    names: usize,
}

impl Bits {
    fn new(room: usize) -> Bits {
        Bits { lines: vec![[0; LINE / 64]; (room * BITS).div_ceil(LINE)], room, names: 0 }
    }

    fn is_full(&self) -> bool {
        self.names >= self.room
    }

    fn insert(&mut self, blob: &BlobId) {
        let (line, bits) = self.places(blob);
        bits.for_each(|bit| self.lines[line][bit / 64] |= 1 << (bit % 64));
        self.names += 1;
    }

    fn may_have(&self, blob: &BlobId) -> bool {
        let (line, mut bits) = self.places(blob);
        bits.all(|bit| self.lines[line][bit / 64] & 1 << (bit % 64) != 0)
    }

    /// A name is a hash: its bytes are as good as random.
    fn places(&self, blob: &BlobId) -> (usize, impl Iterator<Item = usize> + use<>) {
        let words = blob.as_bytes().as_chunks::<8>().0;
        let [line, bits] = [words[1], words[2]].map(u64::from_le_bytes);
        let line = (u128::from(line) * self.lines.len() as u128) >> 64;
        let bits = (0..PROBES).map(move |n| (bits >> (9 * n)) as usize % LINE);
        (line as usize, bits)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert, proptest};

    use super::{BlobId, Filter, ROOM};

    fn name(number: u64) -> BlobId {
        BlobId::of(&number.to_le_bytes())
    }

    proptest! {
        /// A table that changes while the filter is made, however their steps come together.
        #[test]
        fn what_is_there_is_never_denied(steps in vec((0u8..5, any::<u8>()), 1..200)) {
            let mut filter = Filter::default();
            let (mut table, mut pending) = (BTreeSet::new(), BTreeSet::new());
            for (what, number) in steps {
                let blob = name(number.into());
                match what {
                    0 => {
                        filter.insert(&blob);
                        pending.insert(blob);
                    }
                    1 => table.extend(std::mem::take(&mut pending)),
                    2 => drop(table.remove(&blob)),
                    3 => {
                        // As if it were full.
                        if let Some(bits) = &mut filter.current {
                            bits.names = bits.room;
                        }
                    }
                    _ => {
                        let Some(after) = filter.wants(7, pending.iter()) else { continue };
                        let page: Vec<_> =
                            table.iter().filter(|blob| **blob > after).take(3).copied().collect();
                        filter.extend(&page, page.len() < 3);
                    }
                }
                prop_assert!(table.iter().chain(&pending).all(|blob| filter.may_have(blob)));
            }
        }
    }

    #[test]
    fn what_is_not_there_is_mostly_denied_and_what_is_full_is_made_again() {
        let mut filter = Filter::default();
        assert!(filter.may_have(&name(1)), "nothing is known yet");
        assert!(filter.wants(0, [].into_iter()).is_some());
        filter.extend(&[], true);
        assert!(!filter.may_have(&name(1)));
        (0..ROOM.0 as u64).for_each(|number| filter.insert(&name(number)));
        let wrong = (1 << 20..(1 << 20) + 10_000).filter(|n| filter.may_have(&name(*n))).count();
        assert!(wrong < 300, "{wrong} of 10,000");
        // Most have been deleted since.
        assert!(filter.wants(1, [name(5)].iter()).is_some());
        filter.extend(&[name(3)], true);
        assert!(
            filter.may_have(&name(3)) && filter.may_have(&name(5)) && !filter.may_have(&name(4))
        );
        assert!(filter.wants(2, [].into_iter()).is_none());
        // Too many to keep them all.
        (0..ROOM.0 as u64).for_each(|number| filter.insert(&name(number)));
        assert!(filter.wants(ROOM.1 as u64 + 1, [].into_iter()).is_none());
        assert!(filter.may_have(&name(1 << 40)));
    }
}
