//! The peers and their states, as repair sees them.

use std::sync::Arc;

use crate::cluster::placement::members::{Member, MemberState};
use crate::cluster::placement::{Candidate, Ranking, rank};
use crate::id::{BlobId, PeerId};

/// The state of a peer during a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerState {
    /// It answers and takes fragments.
    Up,
    /// It does not answer. It keeps its places: what it holds comes back with it.
    Down,
    /// It is being emptied: it answers, but takes nothing.
    Draining,
    /// It does not come back: what it held is replaced.
    Lost,
}

/// A peer during a repair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairPeer {
    /// The peer's id.
    pub id: PeerId,
    /// See [`Candidate::weight`].
    pub weight: u64,
    /// See [`Candidate::domain`].
    pub domain: String,
    /// Its state.
    pub state: PeerState,
    /// Whether it refuses further fragments. It keeps what it has.
    pub full: bool,
}

impl RepairPeer {
    /// Whether the peer answers.
    pub(super) fn is_live(&self) -> bool {
        matches!(self.state, PeerState::Up | PeerState::Draining)
    }

    /// Whether the peer takes fragments.
    pub(super) fn takes(&self) -> bool {
        self.state == PeerState::Up && !self.full
    }

    fn candidate(&self) -> Candidate {
        // A draining peer keeps a fragment only if there are not enough other peers.
        let weight = if self.state == PeerState::Draining { 0 } else { self.weight };
        Candidate { id: self.id, weight, domain: self.domain.clone() }
    }
}

impl From<&Member> for RepairPeer {
    fn from(member: &Member) -> RepairPeer {
        let state = match member.state {
            MemberState::Up => PeerState::Up,
            MemberState::Down => PeerState::Down,
            MemberState::Draining => PeerState::Draining,
        };
        let Member { id, weight, ref domain, .. } = *member;
        RepairPeer { id, weight, domain: domain.clone(), state, full: false }
    }
}

/// All peers that take part in a repair.
#[derive(Clone, Debug)]
pub struct RepairMembers {
    /// The peers, sorted by id.
    nodes: Vec<RepairPeer>,
    /// The peers that have a rank for every blob.
    ranking: Arc<Ranking>,
    /// The positions of the candidates of `ranking` in `nodes`.
    ranked: Vec<usize>,
}

impl RepairMembers {
    /// Builds the members. Of several peers with one id one counts.
    pub fn new(nodes: impl IntoIterator<Item = RepairPeer>) -> RepairMembers {
        let mut nodes: Vec<RepairPeer> = nodes.into_iter().collect();
        nodes.sort_by_key(|node| node.id);
        nodes.dedup_by_key(|node| node.id);
        let ranking = Arc::new(Ranking::new(Vec::new()));
        let mut members = RepairMembers { nodes, ranking, ranked: Vec::new() };
        members.update_candidates();
        members
    }

    /// The peers, sorted by id.
    pub fn nodes(&self) -> &[RepairPeer] {
        &self.nodes
    }

    /// Sets the state of a peer.
    pub fn set_state(&mut self, peer: &PeerId, state: PeerState) {
        if let Some(at) = self.find(peer) {
            self.nodes[at].state = state;
            self.update_candidates();
        }
    }

    /// Marks a peer as full.
    pub fn set_full(&mut self, peer: &PeerId) {
        if let Some(at) = self.find(peer) {
            self.nodes[at].full = true;
            self.update_candidates();
        }
    }

    fn update_candidates(&mut self) {
        let has_rank = |at: &usize| {
            let node = &self.nodes[*at];
            node.takes() || node.state == PeerState::Down
        };
        self.ranked = (0..self.nodes.len()).filter(has_rank).collect();
        let candidates = self.ranked.iter().map(|at| self.nodes[*at].candidate());
        self.ranking = Arc::new(Ranking::new(candidates.collect()));
    }

    pub(super) fn find(&self, peer: &PeerId) -> Option<usize> {
        self.nodes.binary_search_by_key(peer, |node| node.id).ok()
    }

    /// The first `count` peers for a blob, by rank. Peers that take nothing have a rank only if they
    /// are in `holders`.
    pub(super) fn places(&self, blob: &BlobId, count: usize, holders: &[usize]) -> Vec<usize> {
        if holders.is_empty() {
            let first = self.ranking.first(blob, count).into_iter();
            return first.map(|at| self.ranked[at]).collect();
        }
        let mut candidates = self.ranking.candidates().to_vec();
        candidates.extend(holders.iter().map(|at| self.nodes[*at].candidate()));
        let all: Vec<usize> = self.ranked.iter().chain(holders).copied().collect();
        rank(blob, &candidates).into_iter().take(count).map(|at| all[at]).collect()
    }
}
