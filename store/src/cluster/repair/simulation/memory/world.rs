//! The simulated peers in memory, what they hold, and the events.

use std::collections::{BTreeMap, BTreeSet};

use seeded_rng::Rng;

use super::BLOBS;
use crate::cluster::placement::matching::size;
use crate::cluster::placement::{Candidate, rank};
use crate::cluster::repair::members::{PeerState, RepairPeer};
use crate::cluster::repair::verify::tests::{fragments, inconsistent};
use crate::encoding::fragment::{Fragment, encode};
use crate::encoding::redundancy::Redundancy;
use crate::id::{BlobId, PeerId};

/// Blob, encoding and index.
pub(super) type Key = (BlobId, BlobId, u8);

pub(super) struct Peer {
    pub(super) node: RepairPeer,
    pub(super) answers: bool,
    pub(super) fragments: BTreeMap<Key, Fragment>,
    /// The fragments that have turned bad.
    pub(super) bad: BTreeSet<Key>,
}

pub(super) struct Blob {
    pub(super) content: Vec<u8>,
    pub(super) wanted: Redundancy,
    /// The only encoding that is right.
    pub(super) encoding: BlobId,
    pub(super) losses: usize,
}

/// A deliberate defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Defect {
    /// Peers claim to have stored what they have not. Repair has to find that out.
    LosesPuts,
    /// They also claim to have it when it is read. Nobody can find that out, so it must show.
    LosesPutsAndLies,
}

pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) peers: BTreeMap<PeerId, Peer>,
    pub(super) blobs: BTreeMap<BlobId, Blob>,
    /// The requests until the repair is killed; `None` if no failure happens any more.
    pub(super) left: Option<u64>,
    pub(super) requests: u64,
    pub(super) defect: Option<Defect>,
    /// A violation of the invariant. It is kept here because a panic would end only one task.
    pub(super) violation: Option<String>,
}

impl World {
    pub(super) fn new(mut rng: Rng, defect: Option<Defect>) -> World {
        let mut world = World {
            peers: BTreeMap::new(),
            blobs: BTreeMap::new(),
            left: None,
            requests: 0,
            defect,
            violation: None,
            rng: Rng::new(rng.below(u64::MAX)),
        };
        (0..9).for_each(|_| world.join());
        let codes = ["replicas=2", "replicas=3", "rs=2+2", "rs=3+2"];
        for number in 0..BLOBS {
            let wanted: Redundancy = codes[number as usize % codes.len()].parse().unwrap();
            let content = [number ^ rng.state(), number].map(u64::to_le_bytes).concat();
            let blob = BlobId::of(&content);
            let (description, blocks) = encode(&blob, &content, wanted);
            let encoding = description.id();
            for (place, id) in world.ranking(&blob).into_iter().take(wanted.width()).enumerate() {
                let index = (place % description.width()) as u8;
                let block = blocks.share(index.into());
                let fragment = Fragment { description: description.clone(), index, block };
                let peer = world.peers.get_mut(&id).unwrap();
                peer.fragments.insert((blob, encoding, index), fragment);
            }
            world.blobs.insert(blob, Blob { content, wanted, encoding, losses: 0 });
        }
        world
    }

    pub(super) fn ranking(&self, blob: &BlobId) -> Vec<PeerId> {
        let up =
            self.peers.values().map(|peer| &peer.node).filter(|node| node.state == PeerState::Up);
        let candidate = |node: &RepairPeer| Candidate {
            id: node.id,
            weight: node.weight,
            domain: node.domain.clone(),
        };
        let up: Vec<Candidate> = up.map(candidate).collect();
        rank(blob, &up).into_iter().map(|at| up[at].id).collect()
    }

    pub(super) fn join(&mut self) {
        let (a, b) = (self.rng.below(u64::MAX), self.rng.below(u64::MAX));
        let id = [a.to_le_bytes(), b.to_le_bytes()].concat().try_into().unwrap();
        let id = PeerId::from_bytes(id);
        let domain = self.rng.below(8).to_string();
        let node = RepairPeer {
            id,
            weight: 1 + self.rng.below(2),
            domain,
            state: PeerState::Up,
            full: false,
        };
        let (fragments, bad) = (BTreeMap::new(), BTreeSet::new());
        self.peers.insert(id, Peer { node, answers: true, fragments, bad });
    }

    pub(super) fn any(&mut self, is: impl Fn(&Peer) -> bool) -> Option<PeerId> {
        let all: Vec<PeerId> =
            self.peers.values().filter(|peer| is(peer)).map(|peer| peer.node.id).collect();
        (!all.is_empty()).then(|| all[self.rng.below(all.len() as u64) as usize])
    }

    pub(super) fn event(&mut self) {
        match self.rng.below(12) {
            10.. => self.forge(),
            0..4 => {
                if let Some(id) = self.any(|one| one.node.state != PeerState::Lost) {
                    let peer = self.peers.get_mut(&id).unwrap();
                    peer.answers = !peer.answers;
                }
            }
            4..6 => {
                if let Some(id) = self.any(|one| one.node.state != PeerState::Lost) {
                    let peer = self.peers.get_mut(&id).unwrap();
                    peer.node.full = !peer.node.full;
                }
            }
            6 => {
                let Some(id) = self.any(|one| one.node.state != PeerState::Lost) else { return };
                let held = self.peers[&id].fragments.keys().filter(|key| self.is_right(key));
                let held: BTreeSet<BlobId> = held.map(|key| key.0).collect();
                if self.count_losses(&held) {
                    let peer = self.peers.get_mut(&id).unwrap();
                    (peer.node.state, peer.answers) = (PeerState::Lost, false);
                    self.join();
                }
            }
            _ => {
                let Some(id) = self.any(|one| !one.fragments.is_empty()) else { return };
                let at = self.rng.below(self.peers[&id].fragments.len() as u64) as usize;
                let key = *self.peers[&id].fragments.keys().nth(at).unwrap();
                let counts = !self.is_right(&key) || self.peers[&id].bad.contains(&key);
                if counts || self.count_losses(&[key.0].into()) {
                    self.peers.get_mut(&id).unwrap().bad.insert(key);
                }
            }
        }
    }

    pub(super) fn is_right(&self, key: &Key) -> bool {
        self.blobs[&key.0].encoding == key.1
    }

    /// Somebody stores another content under a blob's name, or the right data with other parity: on
    /// many peers or on few, and not always enough of it.
    pub(super) fn forge(&mut self) {
        let at = self.rng.below(self.blobs.len() as u64) as usize;
        let (blob, Blob { content, wanted, .. }) = self.blobs.iter().nth(at).unwrap();
        let (blob, wanted) = (*blob, *wanted);
        let all = match wanted.needed() > 1 && self.rng.chance(30) {
            true => inconsistent(&blob, content, wanted),
            false => {
                let mut other = content.clone();
                other[self.rng.below(content.len() as u64) as usize] ^= 1 << self.rng.below(8);
                fragments(&blob, &other, wanted)
            }
        };
        let mut able = self.ranking(&blob);
        able.retain(|id| self.peers[id].answers && !self.peers[id].node.full);
        if able.is_empty() {
            return;
        }
        let spread = 1 + self.rng.below(able.len() as u64) as usize;
        let count = wanted.width() - self.rng.below(wanted.width() as u64) as usize;
        for place in 0..count {
            let fragment = all[place % all.len()].clone();
            let key = (blob, fragment.description.id(), fragment.index);
            let peer = self.peers.get_mut(&able[place % spread]).unwrap();
            peer.fragments.insert(key, fragment);
            peer.bad.remove(&key);
        }
    }

    /// Moves all fragments to random peers, and leaves out as many as the blobs survive at most.
    pub(super) fn scatter(&mut self) {
        let ids: Vec<PeerId> = self.peers.keys().copied().collect();
        let all: Vec<(Key, Fragment)> =
            self.peers.values_mut().flat_map(|peer| std::mem::take(&mut peer.fragments)).collect();
        let mut lost: BTreeMap<BlobId, usize> = BTreeMap::new();
        for (key, fragment) in all {
            let lost = lost.entry(key.0).or_default();
            if *lost < self.blobs[&key.0].wanted.survives() && self.rng.chance(40) {
                *lost += 1;
                continue;
            }
            // Often on few peers.
            let most = if self.rng.chance(50) { 2 } else { ids.len() as u64 };
            let id = ids[self.rng.below(most) as usize];
            self.peers.get_mut(&id).unwrap().fragments.insert(key, fragment);
        }
    }

    /// Counts a loss for each of these blobs, if all of them can survive one more. Returns whether
    /// it did.
    pub(super) fn count_losses(&mut self, blobs: &BTreeSet<BlobId>) -> bool {
        let can = |blob: &BlobId| self.blobs[blob].losses < self.blobs[blob].wanted.survives();
        if !blobs.iter().all(can) {
            return false;
        }
        blobs.iter().for_each(|blob| self.blobs.get_mut(blob).unwrap().losses += 1);
        true
    }

    pub(super) fn strength(&self, blob: &BlobId) -> usize {
        let Blob { wanted, encoding, .. } = self.blobs[blob];
        let bits = |peer: &Peer| {
            let good = peer
                .fragments
                .keys()
                .filter(|key| (key.0, key.1) == (*blob, encoding) && !peer.bad.contains(key));
            good.fold(0u32, |all, key| all | 1 << key.2)
        };
        let present = self.peers.values().filter(|peer| peer.node.state != PeerState::Lost);
        let holders: Vec<u32> = present.map(bits).filter(|bits| *bits != 0).collect();
        let strength = if wanted.needed() == 1 { holders.len() } else { size(&holders) };
        strength.min(wanted.width())
    }

    pub(super) fn check(&mut self) {
        for (blob, Blob { wanted, losses, .. }) in &self.blobs {
            let strength = self.strength(blob);
            let width = wanted.width();
            if strength + losses < width {
                self.violation = Some(format!("{wanted}: {strength} after {losses} losses"));
            }
        }
    }

    /// Resets the losses of blobs with full redundancy.
    pub(super) fn reset_losses(&mut self) {
        for blob in self.blobs.keys().copied().collect::<Vec<_>>() {
            if self.strength(&blob) == self.blobs[&blob].wanted.width() {
                self.blobs.get_mut(&blob).unwrap().losses = 0;
            }
        }
    }

    pub(super) fn most_come_back(&mut self) {
        for peer in self.peers.values_mut().filter(|peer| peer.node.state != PeerState::Lost) {
            peer.answers |= self.rng.chance(85);
            peer.node.full &= self.rng.chance(30);
        }
    }

    /// Ends all failures, and removes the fragments that have turned bad.
    pub(super) fn end_events(&mut self) {
        (self.left, self.defect) = (None, None);
        for peer in self.peers.values_mut().filter(|peer| peer.node.state != PeerState::Lost) {
            (peer.answers, peer.node.full) = (true, false);
            let bad = std::mem::take(&mut peer.bad);
            peer.fragments.retain(|key, _| !bad.contains(key));
        }
    }

    /// Asserts that all fragments are at their places and nowhere else.
    pub(super) fn check_places(&self) {
        for (blob, Blob { wanted, content, .. }) in &self.blobs {
            let places: BTreeSet<_> = self.ranking(blob).into_iter().take(wanted.width()).collect();
            let present = self.peers.values().filter(|peer| peer.node.state != PeerState::Lost);
            let mut blocks = vec![None; if wanted.needed() == 1 { 1 } else { wanted.width() }];
            let mut description = None;
            for peer in present {
                let own: Vec<_> = peer.fragments.iter().filter(|(key, _)| key.0 == *blob).collect();
                assert_eq!(own.len(), usize::from(places.contains(&peer.node.id)), "{wanted}");
                for ((_, _, index), fragment) in own {
                    blocks[usize::from(*index)] = Some(fragment.block.clone());
                    description = Some(fragment.description.clone());
                }
            }
            assert!(blocks.iter().all(Option::is_some), "{wanted}");
            let mut found = vec![0; content.len()];
            description.unwrap().decode(&blocks, &mut found).unwrap();
            assert_eq!(&found, content);
        }
    }
}
