//! The simulated world: the peers, what they hold, and the events.

use std::collections::{BTreeMap, BTreeSet};

use seeded_rng::Rng;

use super::Counts;
use crate::cluster::placement::matching::size;
use crate::cluster::placement::{Candidate, rank};
use crate::cluster::repair::members::{PeerState, RepairMembers, RepairPeer};
use crate::cluster::repair::plan::{Holding, Wanted};
use crate::encoding::fragment::Kind;
use crate::encoding::redundancy::Redundancy;
use crate::id::{BlobId, PeerId};

const MAX_PEERS: usize = 11;
const MAX_LOST: usize = 3;
const MAX_BLOBS: usize = 12;

const CODES: [Redundancy; 5] = [
    Redundancy::Replicas(2),
    Redundancy::Replicas(3),
    Redundancy::ReedSolomon { data: 2, parity: 1 },
    Redundancy::ReedSolomon { data: 2, parity: 2 },
    Redundancy::ReedSolomon { data: 3, parity: 3 },
];

pub(super) struct Peer {
    pub(super) node: RepairPeer,
    /// Whether the peer answers, whatever state the catalog has for it.
    pub(super) answers: bool,
    /// For each blob, the encodings and indices of its fragments.
    pub(super) has: BTreeMap<usize, BTreeSet<(BlobId, u8)>>,
}

pub(super) struct Blob {
    pub(super) id: BlobId,
    pub(super) wanted: Redundancy,
    /// The encodings that give the blob.
    encodings: Vec<BlobId>,
    /// The encodings of another content under the blob's name.
    pub(super) forged: BTreeSet<BlobId>,
    /// Whether the blob once had its full redundancy.
    was_whole: bool,
    /// Holders that were lost since the blob was last whole.
    losses: usize,
}

impl Blob {
    pub(super) fn wanted(&self) -> Wanted {
        Wanted::content(self.id, self.wanted)
    }
}

pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) peers: Vec<Peer>,
    pub(super) blobs: BTreeMap<usize, Blob>,
    pub(super) counts: Counts,
    /// The blob that repair has asked about in order to drop a fragment of it. A holder that is
    /// lost from then on counts as lost after the drop.
    pub(super) watched: Option<usize>,
    next: u64,
}

impl World {
    pub(super) fn new(rng: Rng) -> World {
        let (peers, blobs) = (Vec::new(), BTreeMap::new());
        let mut world =
            World { rng, peers, blobs, counts: Counts::default(), watched: None, next: 0 };
        (0..7).for_each(|_| world.join());
        world
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn event(&mut self) {
        match self.rng.below(100) {
            0..10 if self.present() < MAX_PEERS => self.join(),
            10..40 => self.flap(),
            40..46 => drop(self.lose_one(PeerState::Up)),
            46..50 => drop(self.lose_one(PeerState::Down)),
            50..53 => self.return_lost_peer(),
            53..57 => self.drain(),
            57..65 => self.fill(),
            65..80 => self.put(),
            80..86 => self.forge(),
            _ => self.read(),
        }
    }

    /// Peers that are not lost.
    fn present(&self) -> usize {
        self.peers.iter().filter(|peer| peer.node.state != PeerState::Lost).count()
    }

    /// A peer joins, perhaps with an empty disk in place of another peer.
    pub(super) fn join(&mut self) {
        self.counts.joins += 1;
        let number = self.number();
        let digest = blake3::hash(&(number ^ self.rng.state()).to_le_bytes());
        let id = PeerId::from_bytes(digest.as_bytes()[..16].try_into().expect("16 bytes"));
        let (weight, domain) = (1 + self.rng.below(3), self.rng.below(6).to_string());
        let node = RepairPeer { id, weight, domain, state: PeerState::Up, full: false };
        self.peers.push(Peer { node, answers: true, has: BTreeMap::new() });
        // Peers that were lost long ago never return.
        let mut lost = self.peers.iter().filter(|peer| peer.node.state == PeerState::Lost).count();
        self.peers.retain(|peer| {
            let leaves = lost > MAX_LOST && peer.node.state == PeerState::Lost;
            lost -= usize::from(leaves);
            !leaves
        });
    }

    fn any_peer(&mut self, is: impl Fn(&Peer) -> bool) -> Option<usize> {
        let all: Vec<usize> = (0..self.peers.len()).filter(|at| is(&self.peers[*at])).collect();
        (!all.is_empty()).then(|| all[self.rng.below(all.len() as u64) as usize])
    }

    /// A peer goes away, or one that is away comes back. The catalog keeps a draining peer as
    /// draining.
    fn flap(&mut self) {
        let is_away = |peer: &Peer| !peer.answers && peer.node.state != PeerState::Lost;
        let away = self.peers.iter().filter(|peer| is_away(peer)).count();
        if away > 0 && (away > 2 || self.rng.chance(60)) {
            let Some(at) = self.any_peer(|one| !one.answers && one.node.state != PeerState::Lost)
            else {
                return;
            };
            self.counts.flaps += 1;
            let peer = &mut self.peers[at];
            peer.answers = true;
            if peer.node.state == PeerState::Down {
                peer.node.state = PeerState::Up;
            }
        } else if let Some(at) = self.any_peer(|one| one.answers) {
            let peer = &mut self.peers[at];
            peer.answers = false;
            if peer.node.state == PeerState::Up {
                peer.node.state = PeerState::Down;
            }
        }
    }

    /// Loses a peer, unless a blob that was whole would be lost with it. Returns whether one was
    /// lost.
    pub(super) fn lose_one(&mut self, state: PeerState) -> bool {
        let Some(at) = self.any_peer(|one| one.node.state == state) else { return false };
        // A holder of nothing but forged fragments is no loss.
        let is_right = |(number, has): &(&usize, &BTreeSet<(BlobId, u8)>)| {
            has.iter().any(|(encoding, _)| !self.blobs[*number].forged.contains(encoding))
        };
        let held = self.peers[at].has.iter().filter(is_right).map(|(number, _)| *number);
        let held: Vec<usize> = held.collect();
        let endures = |number: &usize| {
            let blob = &self.blobs[number];
            !blob.was_whole || blob.losses < blob.wanted.survives()
        };
        if !held.iter().all(endures) || self.present() <= 4 {
            return false;
        }
        self.counts.losses += 1;
        let peer = &mut self.peers[at];
        (peer.node.state, peer.answers) = (PeerState::Lost, false);
        for number in held {
            let blob = self.blobs.get_mut(&number).expect("peers hold only known blobs");
            blob.losses += 1;
            if !blob.was_whole && !self.is_readable(number) {
                // Its writer did not wait for full redundancy.
                self.blobs.remove(&number);
                self.peers.iter_mut().for_each(|peer| drop(peer.has.remove(&number)));
                continue;
            }
            self.check(number);
        }
        true
    }

    /// A lost peer returns with what it had.
    fn return_lost_peer(&mut self) {
        if let Some(at) = self.any_peer(|one| one.node.state == PeerState::Lost) {
            self.counts.returns += 1;
            let peer = &mut self.peers[at];
            (peer.node.state, peer.answers) = (PeerState::Up, true);
            for number in peer.has.keys().copied().collect::<Vec<_>>() {
                self.check(number);
            }
        }
    }

    fn drain(&mut self) {
        if let Some(at) = self.any_peer(|one| one.node.state == PeerState::Draining)
            && self.rng.chance(70)
        {
            let peer = &mut self.peers[at];
            peer.node.state = if peer.answers { PeerState::Up } else { PeerState::Down };
        } else if let Some(at) = self.any_peer(|one| one.node.state == PeerState::Up) {
            self.counts.drains += 1;
            self.peers[at].node.state = PeerState::Draining;
        }
    }

    fn fill(&mut self) {
        if let Some(at) = self.any_peer(|one| one.node.full) {
            self.peers[at].node.full = false;
        } else if let Some(at) = self.any_peer(|one| one.node.state == PeerState::Up) {
            self.counts.full += 1;
            self.peers[at].node.full = true;
        }
    }

    /// A client stores a blob, or stores an existing blob in another encoding.
    fn put(&mut self) {
        let again = self.rng.chance(30).then(|| self.any_blob()).flatten();
        let number = match again {
            Some(number) => number,
            None => {
                if self.blobs.len() >= MAX_BLOBS {
                    let oldest = self.blobs.pop_first().map(|(number, _)| number);
                    let oldest = oldest.expect("there is a blob");
                    self.peers.iter_mut().for_each(|peer| drop(peer.has.remove(&oldest)));
                }
                let number = self.number();
                let id = BlobId::of(&(number ^ self.rng.state()).to_le_bytes());
                let wanted = CODES[self.rng.below(CODES.len() as u64) as usize];
                let (was_whole, losses, encodings) = (false, 0, Vec::new());
                let forged = BTreeSet::new();
                let blob = Blob { id, wanted, encodings, forged, was_whole, losses };
                self.blobs.insert(number as usize, blob);
                number as usize
            }
        };
        let Blob { id, wanted, .. } = self.blobs[&number];
        let able = |peer: &&Peer| matches!(peer.node.state, PeerState::Up) && !peer.node.full;
        let able: Vec<Candidate> = self.peers.iter().filter(able).map(candidate).collect();
        let is_optimistic = self.rng.chance(30);
        let count = if is_optimistic { wanted.needed() } else { wanted.width() };
        if able.len() < count {
            if again.is_none() {
                self.blobs.remove(&number);
            }
            return;
        }
        self.counts.puts += 1;
        let version = self.rng.below(2) as u8;
        let encoding = BlobId::of(&[&id.as_bytes()[..], &[version]].concat());
        let mut indices: Vec<usize> = (0..wanted.width()).collect();
        // Any of the fragments may be stored first.
        let rotation = self.rng.below(indices.len() as u64) as usize;
        indices.rotate_left(if is_optimistic { rotation } else { 0 });
        let order = rank(&id, &able);
        for place in indices.into_iter().take(count) {
            let peer = able[order[place % order.len()]].id;
            let index = if wanted.needed() == 1 { 0 } else { place as u8 };
            self.store(number, encoding, index, &peer);
        }
        self.check(number);
    }

    /// Somebody stores another content under the name of a blob, with right checksums: on as many
    /// peers as a client would, or on few, and not always enough of it.
    fn forge(&mut self) {
        let Some(number) = self.any_blob() else { return };
        let Blob { id, wanted, .. } = self.blobs[&number];
        let able = |peer: &&Peer| matches!(peer.node.state, PeerState::Up) && !peer.node.full;
        let able: Vec<Candidate> = self.peers.iter().filter(able).map(candidate).collect();
        if able.is_empty() {
            return;
        }
        self.counts.forged += 1;
        let version = 2 + self.rng.below(3) as u8;
        let encoding = BlobId::of(&[&id.as_bytes()[..], &[version]].concat());
        self.blobs.get_mut(&number).expect("it is there").forged.insert(encoding);
        let order = rank(&id, &able);
        let spread = match self.rng.chance(60) {
            true => order.len(),
            false => 1 + self.rng.below(order.len().min(3) as u64) as usize,
        };
        let count = wanted.width() - self.rng.below(wanted.width() as u64) as usize;
        for place in 0..count {
            let peer = able[order[place % spread]].id;
            let index = if wanted.needed() == 1 { 0 } else { place as u8 };
            self.store(number, encoding, index, &peer);
        }
        self.check(number);
    }

    /// Whether a peer that is not lost holds a forged fragment.
    pub(super) fn has_forged(&self) -> bool {
        let is_forged = |(number, has): (&usize, &BTreeSet<(BlobId, u8)>)| {
            has.iter().any(|(encoding, _)| self.blobs[number].forged.contains(encoding))
        };
        let mut present = self.peers.iter().filter(|peer| peer.node.state != PeerState::Lost);
        present.any(|peer| peer.has.iter().any(is_forged))
    }

    /// Adds a fragment to a peer.
    pub(super) fn store(&mut self, number: usize, encoding: BlobId, index: u8, to: &PeerId) {
        let blob = self.blobs.get_mut(&number).expect("the blob exists");
        if !blob.encodings.contains(&encoding) && !blob.forged.contains(&encoding) {
            blob.encodings.push(encoding);
        }
        let peer = self.peer(to).expect("the peer exists");
        peer.has.entry(number).or_default().insert((encoding, index));
    }

    pub(super) fn peer(&mut self, id: &PeerId) -> Option<&mut Peer> {
        self.peers.iter_mut().find(|peer| peer.node.id == *id)
    }

    pub(super) fn any_blob(&mut self) -> Option<usize> {
        let all: Vec<usize> = self.blobs.keys().copied().collect();
        (!all.is_empty()).then(|| all[self.rng.below(all.len() as u64) as usize])
    }

    /// A client reads a blob. It may have to wait for peers that are away, but the blob is not
    /// lost.
    fn read(&mut self) {
        if let Some(number) = self.any_blob() {
            self.counts.reads += 1;
            assert!(self.is_readable(number), "blob {number} is lost");
        }
    }

    /// The fragments of an encoding on each matching peer, as bits.
    fn holders(&self, number: usize, encoding: &BlobId, is: impl Fn(&Peer) -> bool) -> Vec<u32> {
        let bits = |peer: &Peer| {
            let has = peer.has.get(&number)?;
            let own = has.iter().filter(|(one, _)| one == encoding);
            Some(own.fold(0u32, |all, (_, index)| all | 1 << index)).filter(|all| *all != 0)
        };
        self.peers.iter().filter(|peer| is(peer)).filter_map(bits).collect()
    }

    /// The fragments of the strongest encoding, each counted on a peer of its own.
    fn strength(&self, number: usize, is: impl Fn(&Peer) -> bool + Copy) -> usize {
        let blob = &self.blobs[&number];
        let strength = |encoding: &BlobId| {
            let holders = self.holders(number, encoding, is);
            if blob.wanted.needed() == 1 { holders.len() } else { size(&holders) }
        };
        blob.encodings.iter().map(strength).max().unwrap_or(0)
    }

    fn is_readable(&self, number: usize) -> bool {
        let blob = &self.blobs[&number];
        blob.encodings.iter().any(|encoding| {
            let holders = self.holders(number, encoding, |peer| peer.node.state != PeerState::Lost);
            let found = holders.iter().fold(0, |all, one| all | one).count_ones();
            found as usize >= blob.wanted.needed()
        })
    }

    /// The strength of a blob when all peers come back that are not lost. Surplus copies do not
    /// count.
    pub(super) fn total(&self, number: usize) -> usize {
        let all = self.strength(number, |peer| peer.node.state != PeerState::Lost);
        all.min(self.blobs[&number].wanted.width())
    }

    /// Asserts that a blob is as strong as its losses allow.
    pub(super) fn check(&mut self, number: usize) {
        let strength = self.total(number);
        let blob = self.blobs.get_mut(&number).expect("the blob exists");
        let width = blob.wanted.width();
        if strength >= width {
            blob.was_whole = true;
            if self.watched != Some(number) {
                blob.losses = 0;
            }
        }
        if blob.was_whole {
            let losses = blob.losses;
            assert!(
                strength + losses >= width,
                "blob {number}: {strength} of {width} after {losses} losses"
            );
        }
    }

    pub(super) fn members(&self) -> RepairMembers {
        RepairMembers::new(self.peers.iter().map(|peer| peer.node.clone()))
    }

    /// What the matching peers report of a blob.
    pub(super) fn holdings(&self, number: usize, is: impl Fn(&Peer) -> bool) -> Vec<Holding> {
        let blob = &self.blobs[&number];
        let data = blob.wanted.needed() as u8;
        let parity = if data == 1 { 0 } else { blob.wanted.survives() as u8 };
        let all = self.peers.iter().filter(|peer| is(peer));
        all.flat_map(|peer| {
            let has = peer.has.get(&number).into_iter().flatten();
            let peer = peer.node.id;
            has.map(move |(encoding, index)| Holding {
                peer,
                encoding: *encoding,
                kind: Kind::Content,
                data,
                parity,
                index: *index,
                len: 1,
                is_sealed: true,
            })
        })
        .collect()
    }

    /// Brings back all peers that are not lost. No peer is full any more.
    pub(super) fn end_events(&mut self) {
        self.all_come_back();
        self.peers.iter_mut().for_each(|peer| peer.node.full = false);
    }

    pub(super) fn many_go_down(&mut self) {
        for at in 0..self.peers.len() {
            let leaves = self.rng.chance(40);
            let peer = &mut self.peers[at];
            if leaves && peer.node.state == PeerState::Up {
                (peer.node.state, peer.answers) = (PeerState::Down, false);
            }
        }
    }

    pub(super) fn all_come_back(&mut self) {
        for peer in self.peers.iter_mut().filter(|peer| peer.node.state != PeerState::Lost) {
            peer.answers = true;
            if peer.node.state == PeerState::Down {
                peer.node.state = PeerState::Up;
            }
        }
    }

    /// The places of each blob.
    pub(super) fn places(&self) -> BTreeMap<usize, BTreeSet<PeerId>> {
        let up = self.peers.iter().filter(|peer| peer.node.state == PeerState::Up);
        let up: Vec<Candidate> = up.map(candidate).collect();
        let places = |blob: &Blob| {
            let order = rank(&blob.id, &up).into_iter().take(blob.wanted.width());
            order.map(|at| up[at].id).collect()
        };
        self.blobs.iter().map(|(number, blob)| (*number, places(blob))).collect()
    }

    /// Whether there are enough peers for the full redundancy of each blob.
    pub(super) fn has_enough_peers(&self) -> bool {
        self.places()
            .iter()
            .all(|(number, places)| places.len() == self.blobs[number].wanted.width())
    }

    /// The number of places that are new compared with `before`.
    pub(super) fn changed_places(&self, before: &BTreeMap<usize, BTreeSet<PeerId>>) -> u64 {
        let new = |(number, places): (usize, BTreeSet<PeerId>)| {
            let new = places.difference(&before[&number]).count();
            assert!(new <= 1, "one peer more or less moved {new} fragments of a blob");
            new as u64
        };
        self.places().into_iter().map(new).sum()
    }

    /// Asserts that all fragments are at their places and nowhere else.
    pub(super) fn check_places(&self) {
        for (number, places) in self.places() {
            let blob = &self.blobs[&number];
            let width = blob.wanted.width();
            let strength = self.strength(number, |peer| peer.answers);
            if places.len() < width {
                assert!(strength >= places.len(), "blob {number} could be on more peers");
                continue;
            }
            assert_eq!(strength, width, "blob {number} lacks fragments");
            for peer in self.peers.iter().filter(|peer| peer.answers) {
                let held = peer.has.get(&number).map_or(0, BTreeSet::len);
                let wanted = usize::from(places.contains(&peer.node.id));
                assert_eq!(held, wanted, "fragments of blob {number} on {:?}", peer.node);
            }
        }
    }
}

fn candidate(peer: &Peer) -> Candidate {
    let RepairPeer { id, weight, ref domain, .. } = peer.node;
    Candidate { id, weight, domain: domain.clone() }
}
