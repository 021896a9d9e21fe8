//! The plan for one blob: a pure decision.
//!
//! The *places* of a blob are the first *k* + *m* peers of its ranking. Which fragment is at which
//! place does not matter. A fragment at a place stays there. A place without a fragment gets one:
//! it is copied if another peer has it, and computed from others if no peer has it.
//!
//! | a peer is | its place | what it holds |
//! |---|---|---|
//! | up | gets a fragment if it has none | counts |
//! | full | belongs to another peer, unless it has a fragment | counts |
//! | draining | belongs to another peer, unless too few are left | counts, is copied to the places |
//! | down | stays its own | is awaited: one missing fragment is not rebuilt for each place that is down |
//! | lost | belongs to another peer | is gone |
//!
//! - Fragments outside their places are surplus when all places are filled and none of them is down.
//!   Before that, nobody knows what a peer that is down has: it may be the same fragment that seems
//!   to be surplus.
//! - Every step is safe alone and in any order. What
//!   a step makes surplus is dropped by the next plan, which sees that the step was done. When
//!   nothing is left to do, a plan has no steps.
//! - Fragments of two encodings are never counted together. Of several encodings as wanted, one is
//!   completed; then the others are surplus. Encodings with other numbers of blocks may be wanted
//!   by other images and are left alone.

use std::collections::BTreeMap;

use super::members::{PeerState, RepairMembers};
use crate::cluster::placement::matching::{bits, matching, size};
use crate::encoding::redundancy::{MAX_WIDTH, Redundancy};
use crate::id::{BlobId, PeerId};

/// A fragment that a peer reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// The peer that has it.
    pub peer: PeerId,
    /// The hash of its encoding's description.
    pub encoding: BlobId,
    /// The number of data blocks, which are enough to decode the blob.
    pub data: u8,
    /// The number of parity blocks.
    pub parity: u8,
    /// The block's index.
    pub index: u8,
    /// The block's length in bytes, as its holder reports it.
    pub len: u32,
}

/// A fragment of a blob on a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FragmentLocation {
    /// The peer that has it.
    pub peer: PeerId,
    /// The hash of its encoding's description.
    pub encoding: BlobId,
    /// The block's index.
    pub index: u8,
}

/// A step of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Compute a fragment that no peer has from others of its encoding, and store it.
    Rebuild {
        /// The encoding.
        encoding: BlobId,
        /// The block's index.
        index: u8,
        /// The peer that gets it.
        to: PeerId,
    },
    /// Store a fragment at its place. The source stays until it is dropped as surplus.
    Copy {
        /// The encoding.
        encoding: BlobId,
        /// The block's index.
        index: u8,
        /// The peer that has it.
        from: PeerId,
        /// The peer that gets it.
        to: PeerId,
    },
    /// Encode the blob as wanted from another encoding, because no encoding as wanted can be read.
    Encode {
        /// The encoding that can be read.
        from: BlobId,
        /// The peers that get the fragments, in the order of the indices.
        to: Vec<PeerId>,
    },
    /// Delete a surplus fragment.
    Drop {
        /// The peer that has it.
        peer: PeerId,
        /// The encoding.
        encoding: BlobId,
        /// The block's index.
        index: u8,
        /// The fragments that make this one surplus. They must be read or written before it is
        /// deleted.
        kept: Vec<FragmentLocation>,
    },
}

/// The state of a blob, and the steps for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The encoding that is kept; `None` if no encoding as wanted can be read.
    pub encoding: Option<BlobId>,
    /// How many more lost peers the blob survives, counting only fragments on live peers. Less than
    /// 0 if it cannot be read.
    pub survives: i32,
    /// The number of fragments, or copies, that no live peer has.
    pub missing: usize,
    /// Of the missing fragments, the number that may come back with a peer that is down.
    pub waiting: usize,
    /// Of the missing fragments, the number for which no peer is left.
    pub unplaced: usize,
    /// The steps. Steps that add redundancy come before drops.
    pub steps: Vec<Step>,
}

impl Plan {
    fn of(encoding: Option<BlobId>, survives: i32, missing: usize) -> Plan {
        Plan { encoding, survives, missing, waiting: 0, unplaced: 0, steps: Vec::new() }
    }
}

/// The fragments of one encoding.
struct Layout {
    encoding: BlobId,
    data: usize,
    width: usize,
    /// For each live peer, its fragments as bits.
    live: BTreeMap<usize, u32>,
    /// For each peer that is down, its fragments as bits.
    down: BTreeMap<usize, u32>,
}

impl Layout {
    /// Whether each holder has a whole copy.
    fn is_copies(&self) -> bool {
        self.width == 1
    }

    /// The most holders that can each count for a different fragment.
    fn strength(&self) -> usize {
        if self.is_copies() {
            return self.live.len();
        }
        size(&self.live.values().copied().collect::<Vec<_>>())
    }

    /// The fragments that live peers have, as bits.
    fn found(&self) -> u32 {
        self.live.values().fold(0, |all, one| all | one)
    }

    fn survives(&self) -> i32 {
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
fn layouts(members: &RepairMembers, holdings: &[Holding]) -> Vec<Layout> {
    let mut found: BTreeMap<(BlobId, u8, u8), Layout> = BTreeMap::new();
    for Holding { peer, encoding, data, parity, index, .. } in holdings {
        let width = usize::from(*data) + usize::from(*parity);
        let Some(at) = members.find(peer) else { continue };
        if *data == 0 || width > MAX_WIDTH || usize::from(*index) >= width {
            continue;
        }
        let layout = found.entry((*encoding, *data, *parity)).or_insert_with(|| Layout {
            encoding: *encoding,
            data: (*data).into(),
            width,
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

/// Plans the steps for a blob that is wanted with this redundancy.
pub fn plan(
    blob: &BlobId,
    wanted: Redundancy,
    members: &RepairMembers,
    holdings: &[Holding],
) -> Plan {
    let layouts = layouts(members, holdings);
    let survives = layouts.iter().map(Layout::survives).max();
    let survives = survives.unwrap_or(-(wanted.needed() as i32));
    let (data, width) = match wanted {
        Redundancy::Replicas(_) => (1, 1),
        Redundancy::ReedSolomon { .. } => (wanted.needed(), wanted.width()),
    };
    let is_wanted = |one: &&Layout| (one.data, one.width) == (data, width);
    let readable = layouts.iter().filter(is_wanted).filter(|one| one.survives() >= 0);
    // Of equal encodings the first is chosen, so every repair chooses the same one.
    let chosen = readable.rev().max_by_key(|one| one.strength());
    let Some(chosen) = chosen else {
        let source = layouts.iter().find(|one| one.survives() >= 0);
        let found = layouts.iter().filter(is_wanted).map(Layout::strength).max().unwrap_or(0);
        let missing = wanted.width().saturating_sub(found);
        return unreadable(blob, wanted, members, source, Plan::of(None, survives, missing));
    };
    let mut work = Work::new(blob, wanted, members, chosen);
    match chosen.is_copies() {
        true => work.copies(blob),
        false => work.fragments(),
    }
    if work.is_complete() {
        let others = layouts.iter().filter(is_wanted).filter(|one| one.encoding != chosen.encoding);
        others.for_each(|other| work.drop_all(other));
    }
    let Work { missing, waiting, unplaced, steps, .. } = work;
    Plan { encoding: Some(chosen.encoding), survives, missing, waiting, unplaced, steps }
}

/// Completes the plan for a blob without a readable encoding as wanted.
fn unreadable(
    blob: &BlobId,
    wanted: Redundancy,
    members: &RepairMembers,
    source: Option<&Layout>,
    mut plan: Plan,
) -> Plan {
    let width = wanted.width();
    let places: Vec<usize> = members.rank(blob, &[]).into_iter().take(width).collect();
    let down = places.iter().filter(|at| !members.nodes()[**at].takes()).count();
    plan.waiting = down.min(plan.missing);
    plan.unplaced = plan.missing.min(width - places.len());
    // While a place is down, its peer may have an encoding as wanted.
    if let Some(source) = source
        && down == 0
        && places.len() >= wanted.needed()
    {
        let to = places.into_iter().map(|at| members.nodes()[at].id).collect();
        plan.steps.push(Step::Encode { from: source.encoding, to });
    }
    plan
}

/// A plan under construction, for one encoding.
struct Work<'a> {
    members: &'a RepairMembers,
    layout: &'a Layout,
    /// The places: the peers that are to have a fragment or a copy, by rank.
    places: Vec<usize>,
    /// The fragment that each place keeps.
    kept: Vec<Option<u8>>,
    width: usize,
    missing: usize,
    waiting: usize,
    unplaced: usize,
    steps: Vec<Step>,
}

impl<'a> Work<'a> {
    fn new(
        blob: &BlobId,
        wanted: Redundancy,
        members: &'a RepairMembers,
        layout: &'a Layout,
    ) -> Work<'a> {
        let width = wanted.width();
        let takes = |at: usize| members.nodes()[at].takes();
        let mut holders: Vec<usize> =
            layout.live.keys().copied().filter(|at| !takes(*at)).collect();
        loop {
            let mut places = members.rank(blob, &holders);
            places.truncate(width);
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
                let (missing, waiting, unplaced, steps) = (0, 0, 0, Vec::new());
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
                };
            }
            holders.retain(|at| !idle.contains(at));
        }
    }

    fn id(&self, at: usize) -> PeerId {
        self.members.nodes()[at].id
    }

    /// Whether all fragments are at their places.
    fn is_complete(&self) -> bool {
        self.kept.iter().flatten().count() == self.width
    }

    /// The fragments that are at their places.
    fn all_kept(&self) -> Vec<FragmentLocation> {
        let encoding = self.layout.encoding;
        let kept = self.places.iter().zip(&self.kept);
        kept.filter_map(|(at, index)| {
            Some(FragmentLocation { peer: self.id(*at), encoding, index: (*index)? })
        })
        .collect()
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
    fn copies(&mut self, blob: &BlobId) {
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
            // All kept copies must be read: until then a surplus copy could replace a bad one.
            let kept = self.all_kept();
            for holder in holders.into_iter().filter(|at| !self.places.contains(at)) {
                let (peer, kept) = (self.id(holder), kept.clone());
                self.steps.push(Step::Drop { peer, encoding, index, kept });
            }
        }
    }

    /// Plans the steps for Reed-Solomon fragments.
    fn fragments(&mut self) {
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
            self.drop_surplus();
        }
    }

    /// Drops every fragment that is not at the place that keeps it. Each fragment has such a place.
    fn drop_surplus(&mut self) {
        let encoding = self.layout.encoding;
        // If a place holds further fragments, all kept ones must be read: until then a further
        // fragment could replace a bad one.
        let has_one =
            |at: &usize| self.layout.live.get(at).is_some_and(|has| has.count_ones() == 1);
        let has_one_each = self.places.iter().all(has_one);
        for (holder, has) in &self.layout.live {
            for index in bits(*has) {
                let place = self.kept.iter().position(|kept| *kept == Some(index));
                let kept_on = self.places[place.expect("all fragments are at their places")];
                if kept_on != *holder {
                    let kept = match has_one_each {
                        true => vec![FragmentLocation { peer: self.id(kept_on), encoding, index }],
                        false => self.all_kept(),
                    };
                    let peer = self.id(*holder);
                    self.steps.push(Step::Drop { peer, encoding, index, kept });
                }
            }
        }
    }

    /// Drops all fragments of another encoding.
    fn drop_all(&mut self, other: &Layout) {
        let kept = self.all_kept();
        for (holder, has) in &other.live {
            for index in bits(*has) {
                let (peer, encoding, kept) = (self.id(*holder), other.encoding, kept.clone());
                self.steps.push(Step::Drop { peer, encoding, index, kept });
            }
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

#[cfg(test)]
mod tests;
