//! The peers of a cluster, and which of them are to have the fragments of a blob.

use std::collections::HashSet;
use std::sync::Mutex;

use super::{Candidate, rank};
use crate::id::{BlobId, PeerId};

/// What the cluster knows of a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemberState {
    /// It takes part.
    #[default]
    Up,
    /// It has not been heard of for a while. It keeps its rank, so that nothing moves if it returns.
    Down,
    /// It is being emptied, and gets nothing while others can.
    Draining,
}

/// A peer that takes part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Who it is.
    pub id: PeerId,
    /// Where it listens.
    pub address: String,
    /// See [`Candidate::weight`].
    pub weight: u64,
    /// See [`Candidate::domain`].
    pub domain: String,
    /// Whether it can be asked.
    pub state: MemberState,
}

impl Member {
    /// As a reader ranks it.
    fn candidate(&self) -> Candidate {
        Candidate { id: self.id, weight: self.weight, domain: self.domain.clone() }
    }
}

/// The members at one time.
pub(crate) struct RankedMembers {
    pub(crate) all: Vec<Member>,
    /// As they are ranked for reads,
    readers: Vec<Candidate>,
    /// and for writes.
    writers: Vec<Candidate>,
}

impl RankedMembers {
    /// One that is named twice counts once.
    pub(crate) fn new(mut all: Vec<Member>) -> RankedMembers {
        let mut seen = HashSet::new();
        all.retain(|member| seen.insert(member.id));
        let readers: Vec<_> = all.iter().map(Member::candidate).collect();
        let mut writers = readers.clone();
        for (writer, member) in writers.iter_mut().zip(&all) {
            if member.state == MemberState::Draining {
                writer.weight = 0;
            }
        }
        RankedMembers { all, readers, writers }
    }

    /// Where to look for a blob: by rank, and those that are down at last.
    pub(crate) fn to_ask(&self, blob: &BlobId) -> Vec<usize> {
        let mut ranks = rank(blob, &self.readers);
        ranks.sort_by_key(|at| self.all[*at].state == MemberState::Down);
        ranks
    }

    /// The places of a blob's fragments.
    pub(crate) fn places(&self, blob: &BlobId, width: usize) -> FragmentTargets {
        let ranks = rank(blob, &self.writers);
        let taken = (0..ranks.len()).map(|place| (place < width).then_some(true)).collect();
        let domains = ranks.iter().map(|at| self.writers[*at].domain.clone()).collect();
        let down = ranks.iter().map(|at| self.all[*at].state == MemberState::Down).collect();
        FragmentTargets { ranks, domains, down, taken: Mutex::new(taken) }
    }
}

/// The places that the fragments of one blob go to, by rank.
pub(crate) struct FragmentTargets {
    ranks: Vec<usize>,
    domains: Vec<String>,
    down: Vec<bool>,
    /// For each rank: nothing, or whether it has a fragment, or is to have one.
    taken: Mutex<Vec<Option<bool>>>,
}

impl FragmentTargets {
    /// The member of a place.
    pub(crate) fn member(&self, place: usize) -> usize {
        self.ranks[place]
    }

    /// The place itself, or another one if its member is down; nothing if there is none.
    pub(crate) fn first(&self, mut place: usize) -> Option<usize> {
        while self.down[place] {
            place = self.instead_of(place)?;
        }
        Some(place)
    }

    /// The next place for a fragment that one did not take: in a failure domain that has none, if there is one. Members
    /// that are down come at last.
    pub(crate) fn instead_of(&self, place: usize) -> Option<usize> {
        let mut taken = self.taken.lock().expect("no code panics with the places locked");
        taken[place] = Some(false);
        let has_one = |place: usize| {
            let holds = |one: &usize| taken[*one] == Some(true);
            (0..taken.len()).filter(holds).any(|one| self.domains[one] == self.domains[place])
        };
        let free = || (0..taken.len()).filter(|one| taken[*one].is_none() && !self.down[*one]);
        let next = free().find(|one| !has_one(*one)).or_else(|| free().next())?;
        taken[next] = Some(true);
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::{BlobId, Member, MemberState, PeerId, RankedMembers};

    /// Two peers in each of four domains.
    fn members(change: impl Fn(&mut Member)) -> RankedMembers {
        let member = |n: u8| {
            let mut member = Member {
                id: PeerId::from_bytes([n; 16]),
                address: n.to_string(),
                weight: 1,
                domain: (n % 4).to_string(),
                state: MemberState::Up,
            };
            change(&mut member);
            member
        };
        RankedMembers::new((0..8).map(member).collect())
    }

    #[test]
    fn a_fragment_that_is_refused_goes_to_a_domain_without_one() {
        let places = members(|_| ()).places(&BlobId::of(b"basalt"), 4);
        let other = places.instead_of(2).unwrap();
        assert_eq!(places.domains[other], places.domains[2], "the other one of its domain");
        assert_eq!(places.instead_of(other), (4..8).find(|one| *one != other), "any, by rank");
        let left: Vec<_> = std::iter::from_fn(|| places.instead_of(0)).collect();
        assert_eq!(left.len(), 2, "each is used once: {left:?}");
    }

    #[test]
    fn one_that_is_down_keeps_its_rank_and_is_passed_over() {
        let blob = BlobId::of(b"gneiss");
        let up = members(|_| ());
        let order: Vec<_> = (0..8).map(|place| up.places(&blob, 3).member(place)).collect();
        let first = up.all[order[0]].id;
        let down = members(|one| {
            if one.id == first {
                one.state = MemberState::Down;
            }
        });
        let places = down.places(&blob, 3);
        let now: Vec<_> = (0..8).map(|place| places.member(place)).collect();
        assert_eq!(now, order, "nothing moves");
        assert_eq!(places.first(1), Some(1));
        assert!(places.first(0).unwrap() >= 3);
        assert_eq!(down.to_ask(&blob).last(), Some(&order[0]));
        assert_eq!(up.to_ask(&blob)[0], order[0]);
    }

    #[test]
    fn one_that_is_drained_gets_nothing_new_and_is_asked_as_before() {
        let blob = BlobId::of(b"slate");
        let up = members(|_| ());
        let first = up.places(&blob, 1).member(0);
        let id = up.all[first].id;
        let draining = members(|one| {
            if one.id == id {
                one.state = MemberState::Draining;
            }
        });
        let places = draining.places(&blob, 8);
        assert_eq!(places.member(7), first, "it comes after all others");
        assert_eq!(draining.to_ask(&blob), up.to_ask(&blob));
    }

    #[test]
    fn there_is_no_place_if_all_are_down() {
        let places = members(|one| one.state = MemberState::Down).places(&BlobId::of(b"marl"), 2);
        assert_eq!(places.first(0), None);
    }
}
