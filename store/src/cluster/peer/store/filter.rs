//! A Bloom filter over the names of the blobs that a peer has fragments of.
//!
//! Most fragments that are put, and most blobs that are asked for, are of blobs that the peer has
//! never seen. The filter recognises them without the table: a name that it does not contain is
//! neither in the table nor pending. If the filter contains a name, the blob may be present. The
//! filter also keeps the names of deleted blobs, because they cannot be removed from it.
//!
//! ```text
//! start ─► next: all pending names ─► in steps, all names of the table ─► current ─► full ─► start
//! ```
//!
//! Names that are added meanwhile go into both filters. Until there is a current one, every blob
//! may be present.

use crate::id::BlobId;

/// The bits for each name. About one unknown name in a hundred passes.
const BITS_PER_NAME: usize = 12;

/// The bits of a cache line. All bits of a name are in one line.
const LINE_BITS: usize = 512;

/// The bits that are set for a name.
const PROBES: usize = 6;

/// The least and the greatest capacity in names. A new filter has capacity for twice the present
/// names. A peer with too many fragments works without a filter.
const CAPACITY: (usize, usize) = (1 << 16, 1 << 27);

/// The filter, and the one that is being built to replace it.
#[derive(Default)]
pub(super) struct Filter {
    current: Option<Bits>,
    /// The filter that is being built, and the last name of the table that it contains.
    next: Option<(Bits, BlobId)>,
}

impl Filter {
    /// Whether the peer may have fragments of a blob.
    pub(super) fn may_have(&self, blob: &BlobId) -> bool {
        self.current.as_ref().is_none_or(|bits| bits.may_have(blob))
    }

    /// Adds a name before it gets into the table.
    pub(super) fn insert(&mut self, blob: &BlobId) {
        let next = self.next.as_mut().map(|(bits, _)| bits);
        self.current.iter_mut().chain(next).for_each(|bits| bits.insert(blob));
    }

    /// The name after which the table is to be read next; `None` if nothing has to be read.
    /// `fragments` is the number of all fragments, and `pending` are the names that may not be in
    /// the table yet.
    pub(super) fn wants<'a>(
        &mut self,
        fragments: u64,
        pending: impl Iterator<Item = &'a BlobId>,
    ) -> Option<BlobId> {
        let fragments = usize::try_from(fragments).unwrap_or(usize::MAX);
        if self.next.is_none() && self.current.as_ref().is_none_or(Bits::is_full) {
            if fragments > CAPACITY.1 / 2 {
                self.current = None;
                return None;
            }
            let mut bits = Bits::new(fragments.saturating_mul(2).clamp(CAPACITY.0, CAPACITY.1));
            pending.for_each(|blob| bits.insert(blob));
            self.next = Some((bits, BlobId::from_bytes([0; 32])));
        }
        self.next.as_ref().map(|(_, last)| *last)
    }

    /// Adds the next names of the table. `last` states that they are the last ones.
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

/// The bits of one filter.
struct Bits {
    lines: Vec<[u64; LINE_BITS / 64]>,
    capacity: usize,
    names: usize,
}

impl Bits {
    fn new(capacity: usize) -> Bits {
        Bits {
            lines: vec![[0; LINE_BITS / 64]; (capacity * BITS_PER_NAME).div_ceil(LINE_BITS)],
            capacity,
            names: 0,
        }
    }

    fn is_full(&self) -> bool {
        self.names >= self.capacity
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

    /// The line and the bits of a name. A name is a hash, so its bytes are as good as random.
    fn places(&self, blob: &BlobId) -> (usize, impl Iterator<Item = usize> + use<>) {
        let words = blob.as_bytes().as_chunks::<8>().0;
        let [line, bits] = [words[1], words[2]].map(u64::from_le_bytes);
        let line = (u128::from(line) * self.lines.len() as u128) >> 64;
        let bits = (0..PROBES).map(move |n| (bits >> (9 * n)) as usize % LINE_BITS);
        (line as usize, bits)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert, proptest};

    use super::{BlobId, CAPACITY, Filter};

    fn name(number: u64) -> BlobId {
        BlobId::of(&number.to_le_bytes())
    }

    proptest! {
        /// The table changes while the filter is built, with the steps interleaved in any way.
        #[test]
        fn a_present_name_always_passes(steps in vec((0u8..5, any::<u8>()), 1..200)) {
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
                        // As if the filter were full.
                        if let Some(bits) = &mut filter.current {
                            bits.names = bits.capacity;
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
    fn unknown_names_rarely_pass_and_a_full_filter_is_rebuilt() {
        let mut filter = Filter::default();
        assert!(filter.may_have(&name(1)), "there is no filter yet");
        assert!(filter.wants(0, [].into_iter()).is_some());
        filter.extend(&[], true);
        assert!(!filter.may_have(&name(1)));
        (0..CAPACITY.0 as u64).for_each(|number| filter.insert(&name(number)));
        let wrong = (1 << 20..(1 << 20) + 10_000).filter(|n| filter.may_have(&name(*n))).count();
        assert!(wrong < 300, "{wrong} of 10,000");
        // Most blobs have been deleted since.
        assert!(filter.wants(1, [name(5)].iter()).is_some());
        filter.extend(&[name(3)], true);
        assert!(
            filter.may_have(&name(3)) && filter.may_have(&name(5)) && !filter.may_have(&name(4))
        );
        assert!(filter.wants(2, [].into_iter()).is_none());
        // Too many fragments for a filter.
        (0..CAPACITY.0 as u64).for_each(|number| filter.insert(&name(number)));
        assert!(filter.wants(CAPACITY.1 as u64 + 1, [].into_iter()).is_none());
        assert!(filter.may_have(&name(1 << 40)));
    }
}
