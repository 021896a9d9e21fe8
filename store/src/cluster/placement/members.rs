//! The members of a cluster, ranked for reads and for writes.
//!
//! | member state | rank for writes | rank for reads |
//! |---|---|---|
//! | up | by score | by score |
//! | down | by score, but passed over: its fragment goes to another peer | asked last |
//! | draining | after all others | by score, as before |

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};

use super::{Candidate, Ranking};
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

/// Places beyond those that a blob needs. They are used when peers are down or refuse a fragment.
const SPARE_PLACES: usize = 8;

/// Members that are ranked at first for a read.
const ASKED_FIRST: usize = 16;

/// The members at one moment, with their rankings.
pub(crate) struct RankedMembers {
    pub(crate) all: Vec<Member>,
    /// The ranking for reads, in the order of `all`.
    readers: Ranking,
    /// The ranking for writes, in the order of `all`. Draining members have weight 0.
    writers: Ranking,
}

impl RankedMembers {
    /// Builds the rankings. Of several members with one id the first counts.
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
        RankedMembers { all, readers: Ranking::new(readers), writers: Ranking::new(writers) }
    }

    fn is_down(&self, at: usize) -> bool {
        self.all[at].state == MemberState::Down
    }

    /// The members to ask for a blob: by rank, with members that are down last. Most reads end
    /// within the first members, so all are ranked only when those were taken.
    pub(crate) fn to_ask(&self, blob: &BlobId) -> impl Iterator<Item = usize> + Send + use<'_> {
        let (first, blob) = (self.readers.first(blob, ASKED_FIRST), *blob);
        let ranked = first.len();
        let up = |at: &usize| !self.is_down(*at);
        let rest = move || {
            let all = self.readers.all(&blob);
            let later: Vec<_> = all[ranked..].iter().copied().filter(up).collect();
            later.into_iter().chain(all.into_iter().filter(|at| self.is_down(*at)))
        };
        let rest = std::iter::once_with(rest).flatten();
        first.into_iter().filter(up).chain(rest)
    }

    /// The places for the `width` fragments of a blob.
    pub(crate) fn places(self: &Arc<Self>, blob: &BlobId, width: usize) -> FragmentTargets {
        let ranks = self.writers.first(blob, width.saturating_add(SPARE_PLACES));
        let taken = (0..ranks.len()).map(|place| (place < width).then_some(true)).collect();
        let state = Mutex::new(Targets { ranks, taken });
        FragmentTargets { members: self.clone(), blob: *blob, state }
    }
}

/// The places of one blob's fragments, by rank.
pub(crate) struct FragmentTargets {
    members: Arc<RankedMembers>,
    blob: BlobId,
    state: Mutex<Targets>,
}

struct Targets {
    /// The members at the first places, or at all of them.
    ranks: Vec<usize>,
    /// For each place: `None` if it is unused, `Some(true)` if it holds or is to hold a fragment,
    /// `Some(false)` if it refused one.
    taken: Vec<Option<bool>>,
}

impl FragmentTargets {
    fn state(&self) -> MutexGuard<'_, Targets> {
        self.state.lock().expect("no code panics with the places locked")
    }

    /// The member at a place.
    pub(crate) fn member(&self, place: usize) -> usize {
        self.state().ranks[place]
    }

    /// Returns `place`, or another place if its member is down; `None` if there is none.
    pub(crate) fn first(&self, mut place: usize) -> Option<usize> {
        while self.members.is_down(self.member(place)) {
            place = self.instead_of(place)?;
        }
        Some(place)
    }

    /// Returns the next place for a fragment that `place` did not take, in a failure domain without
    /// a fragment if possible. Members that are down are never chosen.
    pub(crate) fn instead_of(&self, place: usize) -> Option<usize> {
        let mut state = self.state();
        state.taken[place] = Some(false);
        let mut next = self.in_a_free_domain(&state);
        if next.is_none() && state.ranks.len() < self.members.all.len() {
            state.ranks = self.members.writers.all(&self.blob);
            let places = state.ranks.len();
            state.taken.resize(places, None);
            next = self.in_a_free_domain(&state);
        }
        let next = next.or_else(|| self.free(&state).next())?;
        state.taken[next] = Some(true);
        Some(next)
    }

    /// The unused places whose members are not down.
    fn free<'a>(&'a self, state: &'a Targets) -> impl Iterator<Item = usize> + 'a {
        let is_free =
            |one: &usize| state.taken[*one].is_none() && !self.members.is_down(state.ranks[*one]);
        (0..state.ranks.len()).filter(is_free)
    }

    /// The first free place in a failure domain without a fragment.
    fn in_a_free_domain(&self, state: &Targets) -> Option<usize> {
        let domain = |place: usize| self.members.writers.domain(state.ranks[place]);
        let holding = (0..state.ranks.len()).filter(|one| state.taken[*one] == Some(true));
        let used: HashSet<usize> = holding.map(domain).collect();
        self.free(state).find(|one| !used.contains(&domain(*one)))
    }
}

#[cfg(test)]
mod tests {
    use super::{Arc, BlobId, Member, MemberState, PeerId, RankedMembers};

    /// Two peers in each of four domains.
    fn members(change: impl Fn(&mut Member)) -> Arc<RankedMembers> {
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
        Arc::new(RankedMembers::new((0..8).map(member).collect()))
    }

    #[test]
    fn a_fragment_that_is_refused_goes_to_a_domain_without_one() {
        let places = members(|_| ()).places(&BlobId::of(b"basalt"), 4);
        let other = places.instead_of(2).unwrap();
        let domain = |place| &places.members.all[places.member(place)].domain;
        assert_eq!(domain(other), domain(2), "the other peer of its domain");
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
        assert_eq!(down.to_ask(&blob).last(), Some(order[0]));
        assert_eq!(up.to_ask(&blob).next(), Some(order[0]));
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
        assert!(draining.to_ask(&blob).eq(up.to_ask(&blob)));
    }

    #[test]
    fn without_a_peer_that_is_up_there_is_no_place() {
        let places = members(|one| one.state = MemberState::Down).places(&BlobId::of(b"marl"), 2);
        assert_eq!(places.first(0), None);
    }

    /// A hundred members, of which many are down: more than are ranked at first.
    #[test]
    fn a_read_asks_every_member_once_and_those_that_are_down_last() {
        let member = |n: u8| Member {
            id: PeerId::from_bytes([n; 16]),
            address: n.to_string(),
            weight: 1,
            domain: (n % 30).to_string(),
            state: if n.is_multiple_of(3) { MemberState::Down } else { MemberState::Up },
        };
        let members = Arc::new(RankedMembers::new((0..100).map(member).collect()));
        let blob = BlobId::of(b"chalk");
        let mut expected = members.readers.all(&blob);
        expected.sort_by_key(|at| members.is_down(*at));
        assert_eq!(members.to_ask(&blob).collect::<Vec<_>>(), expected);
        let places = members.places(&blob, 4);
        let mut used: Vec<_> = (0..4).filter_map(|place| places.first(place)).collect();
        used.extend(std::iter::from_fn(|| places.instead_of(0)));
        used.sort_unstable();
        used.dedup();
        assert_eq!(used.len(), 66, "each member that is up gets a place once");
    }
}
