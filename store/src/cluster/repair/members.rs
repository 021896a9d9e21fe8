//! The peers, as repair sees them.

use crate::cluster::placement::members::{Member, MemberState};
use crate::cluster::placement::{Candidate, rank};
use crate::id::{BlobId, PeerId};

/// What a peer can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerState {
    /// All that is asked of it.
    Up,
    /// Nothing for the moment. It keeps its places: what it holds comes back with it.
    Down,
    /// It gives away what it has and takes nothing.
    Draining,
    /// It does not come back: what it held is to be rebuilt.
    Lost,
}

/// A peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairPeer {
    /// Who it is.
    pub id: PeerId,
    /// See [`Candidate::weight`].
    pub weight: u64,
    /// See [`Candidate::domain`].
    pub domain: String,
    /// What it can do.
    pub state: PeerState,
    /// It keeps what it has, but takes no more.
    pub full: bool,
}

impl RepairPeer {
    /// It answers.
    pub(super) fn is_live(&self) -> bool {
        matches!(self.state, PeerState::Up | PeerState::Draining)
    }

    /// It can be given a fragment.
    pub(super) fn takes(&self) -> bool {
        self.state == PeerState::Up && !self.full
    }

    fn candidate(&self) -> Candidate {
        // One that is drained keeps a part only if there is nobody else.
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

/// All peers that are registered.
#[derive(Clone, Debug)]
pub struct RepairMembers {
    /// By id.
    nodes: Vec<RepairPeer>,
    /// Those that have a rank for every blob, and who they are.
    candidates: Vec<Candidate>,
    ranked: Vec<usize>,
}

impl RepairMembers {
    /// These peers. One that is named twice counts once.
    pub fn new(nodes: impl IntoIterator<Item = RepairPeer>) -> RepairMembers {
        let mut nodes: Vec<RepairPeer> = nodes.into_iter().collect();
        nodes.sort_by_key(|node| node.id);
        nodes.dedup_by_key(|node| node.id);
        let mut members = RepairMembers { nodes, candidates: Vec::new(), ranked: Vec::new() };
        members.sort();
        members
    }

    /// The peers, by id.
    pub fn nodes(&self) -> &[RepairPeer] {
        &self.nodes
    }

    /// Notes that a peer was found in this state.
    pub fn set_state(&mut self, peer: &PeerId, state: PeerState) {
        if let Some(at) = self.find(peer) {
            self.nodes[at].state = state;
            self.sort();
        }
    }

    /// Notes that a peer takes no more.
    pub fn set_full(&mut self, peer: &PeerId) {
        if let Some(at) = self.find(peer) {
            self.nodes[at].full = true;
            self.sort();
        }
    }

    fn sort(&mut self) {
        let has_rank = |at: &usize| {
            let node = &self.nodes[*at];
            node.takes() || node.state == PeerState::Down
        };
        self.ranked = (0..self.nodes.len()).filter(has_rank).collect();
        self.candidates = self.ranked.iter().map(|at| self.nodes[*at].candidate()).collect();
    }

    pub(super) fn find(&self, peer: &PeerId) -> Option<usize> {
        self.nodes.binary_search_by_key(peer, |node| node.id).ok()
    }

    /// The order in which peers are to hold a part of this blob. Those that take nothing are among them only
    /// if they are named in `holders`.
    pub(super) fn rank(&self, blob: &BlobId, holders: &[usize]) -> Vec<usize> {
        if holders.is_empty() {
            return rank(blob, &self.candidates).into_iter().map(|at| self.ranked[at]).collect();
        }
        let mut candidates = self.candidates.clone();
        candidates.extend(holders.iter().map(|at| self.nodes[*at].candidate()));
        let all: Vec<usize> = self.ranked.iter().chain(holders).copied().collect();
        rank(blob, &candidates).into_iter().map(|at| all[at]).collect()
    }
}
