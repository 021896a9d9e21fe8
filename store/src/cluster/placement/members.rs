//! The members of a cluster, ranked for reads and for writes.
//!
//! | member state | rank for writes | rank for reads |
//! |---|---|---|
//! | up | by score | by score |
//! | down | by score, but passed over: its fragment goes to another peer | asked last |
//! | draining | after all others | by score, as before |

use std::collections::HashSet;
use std::sync::Mutex;

use super::{Candidate, rank};
use crate::id::{BlobId, PeerId};

/// The state of a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemberState {
    /// It takes part.
    #[default]
    Up,
    /// Its heartbeats have stopped. It keeps its rank, so nothing moves if it returns.
    Down,
    /// It is being emptied. It gets no fragment while other peers can take it.
    Draining,
}

/// A member of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The peer's id.
    pub id: PeerId,
    /// The address at which it listens.
    pub address: String,
    /// See [`Candidate::weight`].
    pub weight: u64,
    /// See [`Candidate::domain`].
    pub domain: String,
    /// Its state.
    pub state: MemberState,
}

impl Member {
    /// The member as a candidate for reads.
    fn candidate(&self) -> Candidate {
        Candidate { id: self.id, weight: self.weight, domain: self.domain.clone() }
    }
}

/// The members at one moment, with their candidates for ranking.
pub(crate) struct RankedMembers {
    pub(crate) all: Vec<Member>,
    /// The candidates for reads, in the order of `all`.
    readers: Vec<Candidate>,
    /// The candidates for writes, in the order of `all`. Draining members have weight 0.
    writers: Vec<Candidate>,
}

impl RankedMembers {
    /// Builds the ranking. Of several members with one id the first counts.
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

    /// The members to ask for a blob: by rank, with members that are down last.
    pub(crate) fn to_ask(&self, blob: &BlobId) -> Vec<usize> {
        let mut ranks = rank(blob, &self.readers);
        ranks.sort_by_key(|at| self.all[*at].state == MemberState::Down);
        ranks
    }

    /// The places for the `width` fragments of a blob.
    pub(crate) fn places(&self, blob: &BlobId, width: usize) -> FragmentTargets {
        let ranks = rank(blob, &self.writers);
        let taken = (0..ranks.len()).map(|place| (place < width).then_some(true)).collect();
        let domains = ranks.iter().map(|at| self.writers[*at].domain.clone()).collect();
        let down = ranks.iter().map(|at| self.all[*at].state == MemberState::Down).collect();
        FragmentTargets { ranks, domains, down, taken: Mutex::new(taken) }
    }
}

/// The places of one blob's fragments, by rank.
pub(crate) struct FragmentTargets {
    ranks: Vec<usize>,
    domains: Vec<String>,
    down: Vec<bool>,
    /// For each rank: `None` if it is unused, `Some(true)` if it holds or is to hold a fragment,
    /// `Some(false)` if it refused one.
    taken: Mutex<Vec<Option<bool>>>,
}

impl FragmentTargets {
    /// The member at a place.
    pub(crate) fn member(&self, place: usize) -> usize {
        self.ranks[place]
    }

    /// Returns `place`, or another place if its member is down; `None` if there is none.
    pub(crate) fn first(&self, mut place: usize) -> Option<usize> {
        while self.down[place] {
            place = self.instead_of(place)?;
        }
        Some(place)
    }

    /// Returns the next place for a fragment that `place` did not take, in a failure domain without
    /// a fragment if possible. Members that are down are never chosen.
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
        assert_eq!(places.domains[other], places.domains[2], "the other peer of its domain");
        assert_eq!(places.instead_of(other), (4..8).find(|one| *one != other), "the next by rank");
        let left: Vec<_> = std::iter::from_fn(|| places.instead_of(0)).collect();
        assert_eq!(left.len(), 2, "each place is used once: {left:?}");
    }

    #[test]
    fn a_peer_that_is_down_keeps_its_rank_and_is_passed_over() {
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
    fn a_draining_peer_gets_nothing_new_and_is_read_as_before() {
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
        assert_eq!(places.member(7), first, "the draining peer comes last");
        assert_eq!(draining.to_ask(&blob), up.to_ask(&blob));
    }

    #[test]
    fn without_a_peer_that_is_up_there_is_no_place() {
        let places = members(|one| one.state = MemberState::Down).places(&BlobId::of(b"marl"), 2);
        assert_eq!(places.first(0), None);
    }
}
