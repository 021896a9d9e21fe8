//! The fragments of a blob that the peers hold, by encoding.

use std::collections::BTreeMap;

use super::Holding;
use crate::cluster::placement::matching::size;
use crate::cluster::repair::members::{PeerState, RepairMembers};
use crate::encoding::fragment::Kind;
use crate::id::BlobId;

/// The fragments of one encoding.
pub(super) struct Layout {
    pub(super) encoding: BlobId,
    pub(super) kind: Kind,
    pub(super) data: usize,
    pub(super) width: usize,
    pub(super) is_sealed: bool,
    /// For each live peer, its fragments as bits.
    pub(super) live: BTreeMap<usize, u32>,
    /// For each peer that is down, its fragments as bits.
    pub(super) down: BTreeMap<usize, u32>,
}

impl Layout {
    /// Whether each holder has a whole copy.
    pub(super) fn is_copies(&self) -> bool {
        self.width == 1
    }

    /// The most holders that can each count for a different fragment.
    pub(super) fn strength(&self) -> usize {
        if self.is_copies() {
            return self.live.len();
        }
        size(&self.live.values().copied().collect::<Vec<_>>())
    }

    /// The fragments that live peers have, as bits.
    pub(super) fn found(&self) -> u32 {
        self.live.values().fold(0, |all, one| all | one)
    }

    /// How many more lost peers the encoding survives. Less than 0 if it cannot be read.
    pub(super) fn survives(&self) -> i32 {
        let found = self.found().count_ones() as i32;
        let needed = self.data as i32;
        match found < needed {
            true => found - needed,
            // Two fragments on one peer are lost together.
            false => (self.strength() as i32 - needed).max(0),
        }
    }
}

/// Groups what was found by encoding. Impossible values are left out.
pub(super) fn layouts<'a>(
    members: &RepairMembers,
    holdings: impl Iterator<Item = &'a Holding>,
) -> Vec<Layout> {
    let mut found: BTreeMap<(BlobId, bool, u8, u8, bool), Layout> = BTreeMap::new();
    for one in holdings.filter(|one| one.is_possible()) {
        let Holding { peer, encoding, kind, data, parity, index, is_sealed, .. } = one;
        let width = usize::from(*data) + usize::from(*parity);
        let Some(at) = members.find(peer) else { continue };
        // A peer may claim anything about an encoding, so claims that differ do not mix.
        let key = (*encoding, *kind == Kind::Record, *data, *parity, *is_sealed);
        let layout = found.entry(key).or_insert_with(|| Layout {
            encoding: *encoding,
            kind: *kind,
            data: (*data).into(),
            width,
            is_sealed: *is_sealed,
            live: BTreeMap::new(),
            down: BTreeMap::new(),
        });
        let holders = match members.nodes()[at].state {
            PeerState::Up | PeerState::Draining => &mut layout.live,
            PeerState::Down => &mut layout.down,
            PeerState::Lost => continue,
        };
        *holders.entry(at).or_default() |= 1 << index;
    }
    found.into_values().collect()
}
