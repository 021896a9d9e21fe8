//! A plan under construction: which fragments are at their places, and what follows from that.

use super::layout::Layout;
use super::{FragmentLocation, Removal, Step, Wanted};
use crate::cluster::placement::matching::{bits, matching};
use crate::cluster::repair::members::RepairMembers;
use crate::id::{BlobId, PeerId};

/// A plan under construction, for one encoding.
pub(super) struct Work<'a> {
    members: &'a RepairMembers,
    layout: &'a Layout,
    /// The places: the peers that are to have a fragment or a copy, by rank.
    places: Vec<usize>,
    /// The fragment that each place keeps.
    kept: Vec<Option<u8>>,
    width: usize,
    pub(super) missing: usize,
    pub(super) waiting: usize,
    pub(super) unplaced: usize,
    pub(super) steps: Vec<Step>,
    /// Fragments to delete.
    pub(super) surplus: Vec<FragmentLocation>,
}

impl<'a> Work<'a> {
    pub(super) fn new(wanted: &Wanted, members: &'a RepairMembers, layout: &'a Layout) -> Work<'a> {
        let width = wanted.redundancy.width();
        let takes = |at: usize| members.nodes()[at].takes();
        let mut holders: Vec<usize> =
            layout.live.keys().copied().filter(|at| !takes(*at)).collect();
        loop {
            let places = members.places(&wanted.blob, width, &holders);
            let kept = kept_fragments(layout, &places);
            // A peer that takes nothing and keeps no fragment must not occupy a place.
            let idle: Vec<usize> = holders
                .iter()
                .copied()
                .filter(|at| {
                    places.iter().zip(&kept).any(|(place, kept)| place == at && kept.is_none())
                })
                .collect();
            if idle.is_empty() {
                let (missing, waiting, unplaced) = (0, 0, 0);
                let (steps, surplus) = (Vec::new(), Vec::new());
                return Work {
                    members,
                    layout,
                    places,
                    kept,
                    width,
                    missing,
                    waiting,
                    unplaced,
                    steps,
                    surplus,
                };
            }
            holders.retain(|at| !idle.contains(at));
        }
    }

    fn id(&self, at: usize) -> PeerId {
        self.members.nodes()[at].id
    }

    /// Whether all fragments are at their places.
    pub(super) fn is_complete(&self) -> bool {
        self.kept.iter().flatten().count() == self.width
    }

    /// The removal of the surplus, if there is any.
    pub(super) fn removal(&mut self) -> Option<Removal> {
        let encoding = self.layout.encoding;
        let kept = self.places.iter().zip(&self.kept).filter_map(|(at, index)| {
            Some(FragmentLocation { peer: self.id(*at), encoding, index: (*index)? })
        });
        let kept = kept.collect();
        let surplus = std::mem::take(&mut self.surplus);
        (!surplus.is_empty()).then_some(Removal { kept, surplus })
    }

    /// The places that are to get a fragment, by rank.
    fn vacant(&self) -> Vec<usize> {
        let takes = |place: &usize| self.members.nodes()[self.places[*place]].takes();
        (0..self.places.len()).filter(|place| self.kept[*place].is_none()).filter(takes).collect()
    }

    /// The places of peers that are down.
    fn down(&self) -> impl Iterator<Item = usize> {
        let is_down = |place: &usize| !self.members.nodes()[self.places[*place]].is_live();
        (0..self.places.len()).filter(is_down)
    }

    /// Plans the steps for whole copies.
    pub(super) fn copies(&mut self, blob: &BlobId) {
        let (encoding, index) = (self.layout.encoding, 0);
        let holders: Vec<usize> = self.layout.live.keys().copied().collect();
        self.missing = self.width.saturating_sub(holders.len());
        self.waiting = self.down().count().min(self.missing);
        let vacant = self.vacant();
        self.unplaced = (self.missing - self.waiting).saturating_sub(vacant.len());
        for (nth, place) in vacant.into_iter().enumerate() {
            // Spread the reads over the holders, differently for each blob.
            let from = holders[(nth + usize::from(blob.as_bytes()[0])) % holders.len()];
            let (from, to) = (self.id(from), self.id(self.places[place]));
            self.steps.push(Step::Copy { encoding, index, from, to });
        }
        if self.is_complete() {
            for holder in holders.into_iter().filter(|at| !self.places.contains(at)) {
                let peer = self.id(holder);
                self.surplus.push(FragmentLocation { peer, encoding, index });
            }
        }
    }

    /// Plans the steps for Reed-Solomon fragments.
    pub(super) fn fragments(&mut self) {
        let encoding = self.layout.encoding;
        let at_place = self.kept.iter().flatten().fold(0u32, |all, index| all | 1 << index);
        let found = self.layout.found();
        let known = self.layout.down.values().fold(0, |all, one| all | one) & !found;
        let mut lost: Vec<u8> =
            bits(!found & !known).take_while(|index| usize::from(*index) < self.width).collect();
        self.missing = self.width - found.count_ones() as usize;
        // A peer that is down most likely has the fragment with the number of its rank.
        let unknown = |place: &usize| {
            let has = self.layout.down.get(&self.places[*place]);
            has.is_none_or(|has| has & known == 0)
        };
        let mut awaited = 0;
        for place in self.down().filter(unknown).collect::<Vec<_>>() {
            let likely = lost.iter().position(|index| usize::from(*index) == place);
            if likely.is_some() || !lost.is_empty() {
                awaited += 1;
                lost.remove(likely.unwrap_or(lost.len() - 1));
            }
        }
        self.waiting = awaited + known.count_ones() as usize;
        let mut vacant = self.vacant();
        self.unplaced = lost.len().saturating_sub(vacant.len());
        lost.truncate(vacant.len());
        for index in lost {
            let to = self.id(take_place(&mut vacant, index, &self.places));
            self.steps.push(Step::Rebuild { encoding, index, to });
        }
        for index in bits(found & !at_place) {
            if vacant.is_empty() {
                break;
            }
            let to = self.id(take_place(&mut vacant, index, &self.places));
            let mut holders = self.layout.live.iter().filter(|(_, has)| *has & (1 << index) != 0);
            let from =
                holders.next().map(|(at, _)| self.id(*at)).expect("a live peer has the fragment");
            self.steps.push(Step::Copy { encoding, index, from, to });
        }
        if self.is_complete() {
            self.remove_duplicates();
        }
    }

    /// Removes every fragment that is not at the place that keeps it. Each fragment has such a
    /// place.
    fn remove_duplicates(&mut self) {
        for (holder, has) in &self.layout.live {
            let place = self.places.iter().position(|at| at == holder);
            let kept = place.and_then(|place| self.kept[place]);
            let others = bits(*has).filter(|index| kept != Some(*index));
            let (peer, encoding) = (self.members.nodes()[*holder].id, self.layout.encoding);
            self.surplus.extend(others.map(|index| FragmentLocation { peer, encoding, index }));
        }
    }

    /// Removes all fragments of another encoding.
    pub(super) fn remove_all(&mut self, other: &Layout) {
        for (holder, has) in &other.live {
            let (peer, encoding) = (self.id(*holder), other.encoding);
            self.surplus.extend(bits(*has).map(|index| FragmentLocation { peer, encoding, index }));
        }
    }
}

/// For each place, the fragment that its peer keeps.
fn kept_fragments(layout: &Layout, places: &[usize]) -> Vec<Option<u8>> {
    let has = |at: &usize| layout.live.get(at).copied().unwrap_or(0);
    if layout.is_copies() {
        return places.iter().map(|at| (has(at) != 0).then_some(0)).collect();
    }
    matching(&places.iter().map(has).collect::<Vec<_>>())
}

/// Takes the vacant place with the number of the fragment, or else the first one.
fn take_place(vacant: &mut Vec<usize>, index: u8, places: &[usize]) -> usize {
    let own = vacant.iter().position(|place| *place == usize::from(index));
    places[vacant.remove(own.unwrap_or(0))]
}
