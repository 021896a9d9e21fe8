//! What is to be done for one blob: a decision, without any effect.
//!
//! The places of a blob are the first k+m peers of its ranking. Which of its fragments is at which of them does
//! not matter: so what is at one of the places stays there, and only a place without a fragment gets one. It is copied
//! if it is somewhere else, and computed from others if it is nowhere.
//!
//! | a peer is | its place | what it holds |
//! |---|---|---|
//! | up | gets a fragment if it has none | counts |
//! | full | is another's, unless it has a fragment | counts |
//! | draining | is another's, unless there are not enough | counts, and is copied to the places |
//! | down | stays its own | is awaited: as many fragments are not rebuilt as there are places that are down |
//! | lost | is another's | is gone |
//!
//! When all fragments are at their places, and none of these is down, what is elsewhere is surplus. Not before:
//! what a peer that is down has is not known, and may be the same as what seems to be there twice. So every step is
//! right by itself, in any order and if none of the others is ever done; what becomes surplus by a step is dropped
//! by the next plan, which sees that the step was done. When there is nothing left to do, a plan has no steps.
//!
//! Fragments of two encodings are never counted together. Of several encodings as they are wanted one is completed,
//! and then the others are surplus. Encodings with other numbers of blocks may be wanted by other images: they
//! are left alone.

use std::collections::BTreeMap;

use super::members::{PeerState, RepairMembers};
use crate::cluster::placement::matching::{bits, matching, size};
use crate::encoding::redundancy::{MAX_WIDTH, Redundancy};
use crate::id::{BlobId, PeerId};

/// A fragment that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Who has it.
    pub peer: PeerId,
    /// The name of its description.
    pub encoding: BlobId,
    /// Blocks that are enough.
    pub data: u8,
    /// Blocks beside them.
    pub parity: u8,
    /// Which block it is.
    pub index: u8,
    /// Bytes of the block, as its holder says.
    pub len: u32,
}

/// A fragment of a blob, and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FragmentLocation {
    /// Who has it.
    pub peer: PeerId,
    /// The encoding.
    pub encoding: BlobId,
    /// The fragment.
    pub index: u8,
}

/// Something to do for a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Compute a fragment that nobody has from others of its encoding, and store it.
    Rebuild {
        /// The encoding.
        encoding: BlobId,
        /// The fragment.
        index: u8,
        /// Where it is to be.
        to: PeerId,
    },
    /// Store a fragment at its place. It stays where it is, until it is dropped as surplus.
    Copy {
        /// The encoding.
        encoding: BlobId,
        /// The fragment.
        index: u8,
        /// Where it is.
        from: PeerId,
        /// Where it is to be.
        to: PeerId,
    },
    /// Encode the blob as it is wanted, from an encoding that nobody wants here: there is no other.
    Encode {
        /// The encoding that it can be read from.
        from: BlobId,
        /// Where the fragments are to be, in the order of their indices.
        to: Vec<PeerId>,
    },
    /// Remove a fragment that is surplus.
    Drop {
        /// Who has it.
        peer: PeerId,
        /// The encoding.
        encoding: BlobId,
        /// The fragment.
        index: u8,
        /// What must be there, and be what it should be, for this one to be surplus.
        kept: Vec<FragmentLocation>,
    },
}

/// How a blob is, and what is to be done for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The encoding that is kept; nothing if there is none as it is wanted that can be read.
    pub encoding: Option<BlobId>,
    /// Peers whose loss it survives, counting only what live ones have. Less than 0: it cannot be read now.
    pub survives: i32,
    /// Fragments, or copies, that no live peer has.
    pub missing: usize,
    /// Of these, those that may come back with a peer that is down.
    pub waiting: usize,
    /// Of these, those that no peer is left for.
    pub unplaced: usize,
    /// What is to be done, what adds to its safety first.
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
    /// By peer that is live: the fragments as bits.
    live: BTreeMap<usize, u32>,
    /// By peer that is down.
    down: BTreeMap<usize, u32>,
}

impl Layout {
    /// Each peer has the whole.
    fn is_copies(&self) -> bool {
        self.width == 1
    }

    /// Holders with a fragment of their own.
    fn strength(&self) -> usize {
        if self.is_copies() {
            return self.live.len();
        }
        size(&self.live.values().copied().collect::<Vec<_>>())
    }

    /// Fragments that live peers have, as bits.
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

/// Sorts what was found. What cannot be is left out.
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

/// Decides what is to be done for a blob that is wanted like this.
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
    // The first of equals, whoever asks.
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

/// There is no encoding as it is wanted that can be read.
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
    // While one is down, it may be there.
    if let Some(source) = source
        && down == 0
        && places.len() >= wanted.needed()
    {
        let to = places.into_iter().map(|at| members.nodes()[at].id).collect();
        plan.steps.push(Step::Encode { from: source.encoding, to });
    }
    plan
}

/// A plan in the making, for one encoding.
struct Work<'a> {
    members: &'a RepairMembers,
    layout: &'a Layout,
    /// The peers that are to have a fragment, or a copy, by rank.
    places: Vec<usize>,
    /// The fragment that each of them keeps.
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
            let kept = policy(layout, &places);
            // Who takes nothing, and has nothing that is needed there, is in the way.
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

    /// All fragments are at their places.
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

    /// Places that are to get a fragment, by rank.
    fn vacant(&self) -> Vec<usize> {
        let takes = |place: &usize| self.members.nodes()[self.places[*place]].takes();
        (0..self.places.len()).filter(|place| self.kept[*place].is_none()).filter(takes).collect()
    }

    /// Places of peers that are down.
    fn down(&self) -> impl Iterator<Item = usize> {
        let is_down = |place: &usize| !self.members.nodes()[self.places[*place]].is_live();
        (0..self.places.len()).filter(is_down)
    }

    /// Whole copies.
    fn copies(&mut self, blob: &BlobId) {
        let (encoding, index) = (self.layout.encoding, 0);
        let holders: Vec<usize> = self.layout.live.keys().copied().collect();
        self.missing = self.width.saturating_sub(holders.len());
        self.waiting = self.down().count().min(self.missing);
        let vacant = self.vacant();
        self.unplaced = (self.missing - self.waiting).saturating_sub(vacant.len());
        for (turn, place) in vacant.into_iter().enumerate() {
            // Each from another one, and another for each blob.
            let from = holders[(turn + usize::from(blob.as_bytes()[0])) % holders.len()];
            let (from, to) = (self.id(from), self.id(self.places[place]));
            self.steps.push(Step::Copy { encoding, index, from, to });
        }
        if self.is_complete() {
            // One more copy makes up for any that turns out to be bad.
            let kept = self.all_kept();
            for holder in holders.into_iter().filter(|at| !self.places.contains(at)) {
                let (peer, kept) = (self.id(holder), kept.clone());
                self.steps.push(Step::Drop { peer, encoding, index, kept });
            }
        }
    }

    /// Fragments of which some are enough.
    fn fragments(&mut self) {
        let encoding = self.layout.encoding;
        let at_place = self.kept.iter().flatten().fold(0u32, |all, index| all | 1 << index);
        let found = self.layout.found();
        let known = self.layout.down.values().fold(0, |all, one| all | one) & !found;
        let mut lost: Vec<u8> =
            bits(!found & !known).take_while(|index| usize::from(*index) < self.width).collect();
        self.missing = self.width - found.count_ones() as usize;
        // What a peer that is down has is most likely what has the number of its rank.
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
            let from = holders.next().map(|(at, _)| self.id(*at)).expect("it was found somewhere");
            self.steps.push(Step::Copy { encoding, index, from, to });
        }
        if self.is_complete() {
            self.drop_surplus();
        }
    }

    /// Drops what is not where it is kept. Every fragment is kept by somebody.
    fn drop_surplus(&mut self) {
        let encoding = self.layout.encoding;
        // What a peer has beside the fragment that it keeps makes up for any that turns out to be bad.
        let has_one =
            |at: &usize| self.layout.live.get(at).is_some_and(|has| has.count_ones() == 1);
        let is_plain = self.places.iter().all(has_one);
        for (holder, has) in &self.layout.live {
            for index in bits(*has) {
                let place = self.kept.iter().position(|kept| *kept == Some(index));
                let keeper = self.places[place.expect("all are at their places")];
                if keeper != *holder {
                    let kept = match is_plain {
                        true => vec![FragmentLocation { peer: self.id(keeper), encoding, index }],
                        false => self.all_kept(),
                    };
                    let peer = self.id(*holder);
                    self.steps.push(Step::Drop { peer, encoding, index, kept });
                }
            }
        }
    }

    /// Drops another encoding.
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

/// Which of its fragments the peer at each place keeps.
fn policy(layout: &Layout, places: &[usize]) -> Vec<Option<u8>> {
    let has = |at: &usize| layout.live.get(at).copied().unwrap_or(0);
    if layout.is_copies() {
        return places.iter().map(|at| (has(at) != 0).then_some(0)).collect();
    }
    matching(&places.iter().map(has).collect::<Vec<_>>())
}

/// Takes the place with the number of the fragment, if it is vacant, or the first one.
fn take_place(vacant: &mut Vec<usize>, index: u8, places: &[usize]) -> usize {
    let own = vacant.iter().position(|place| *place == usize::from(index));
    places[vacant.remove(own.unwrap_or(0))]
}

#[cfg(test)]
mod tests;
