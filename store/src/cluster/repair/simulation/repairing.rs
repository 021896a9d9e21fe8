//! A repair in the simulated world, half a step at a time.

use std::collections::VecDeque;

use super::PlantedBug;
use super::world::{Peer, World};
use crate::cluster::repair::members::{PeerState, RepairMembers, RepairPeer};
use crate::cluster::repair::plan::{Holding, Plan, Step, plan};
use crate::id::{BlobId, PeerId};

/// The steps that were carried out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Done {
    pub(super) copied: u64,
    pub(super) rebuilt: u64,
    pub(super) dropped: u64,
}

pub(super) struct Repairing {
    defect: Option<PlantedBug>,
    /// The blob under repair.
    blob: usize,
    steps: VecDeque<Step>,
    /// Whether the first half of the first step is done.
    is_read: bool,
    /// The counts of losses and of puts when the peers were asked.
    seen: (u64, u64),
    done: Done,
}

impl Repairing {
    pub(super) fn new(defect: Option<PlantedBug>) -> Repairing {
        Repairing {
            defect,
            blob: 0,
            steps: VecDeque::new(),
            is_read: false,
            seen: (0, 0),
            done: Done::default(),
        }
    }

    /// The process is killed, and another one starts from the beginning.
    pub(super) fn kill(&mut self, world: &mut World) {
        world.counts.kills += 1;
        self.give_up(world);
    }

    fn give_up(&mut self, world: &mut World) {
        self.steps.clear();
        world.watched = None;
        self.is_read = false;
    }

    pub(super) fn step(&mut self, world: &mut World) {
        if !world.blobs.contains_key(&self.blob) {
            self.give_up(world);
        }
        match self.steps.front().cloned() {
            None => {
                if let Some(number) = world.any_blob() {
                    self.look(world, number);
                }
            }
            Some(step) => self.continue_step(world, &step),
        }
    }

    /// Repairs all blobs until no steps are left.
    pub(super) fn run_to_completion(&mut self, world: &mut World) -> Done {
        self.done = Done::default();
        for number in world.blobs.keys().copied().collect::<Vec<_>>() {
            // At most two rounds for missing and misplaced fragments, one for surplus ones, and one
            // that finds nothing to do.
            let rounds = (0..6).find(|_| {
                self.look(world, number);
                let is_done = self.steps.is_empty();
                while !self.steps.is_empty() {
                    self.step(world);
                }
                is_done
            });
            assert!(rounds.is_some_and(|rounds| rounds < 4), "blob {number} still has steps");
        }
        self.done
    }

    /// Asks the peers and plans.
    fn look(&mut self, world: &mut World, number: usize) {
        self.blob = number;
        let blob = &world.blobs[&number];
        let mut members = world.members();
        let mut holdings = world.holdings(number, |peer| peer.answers);
        match self.defect {
            Some(PlantedBug::MixedEncodings) => {
                holdings.iter_mut().for_each(|one| one.encoding = BlobId::of(b"any"));
            }
            Some(PlantedBug::DownIsLost) => members = with(world, PeerState::Down, PeerState::Lost),
            Some(PlantedBug::LostIsUp) => {
                members = with(world, PeerState::Lost, PeerState::Up);
                holdings = world.holdings(number, |_| true);
            }
            _ => {}
        }
        let planned = plan(&blob.id, blob.wanted, &members, &holdings);
        self.check_plan(world, number, &planned);
        let steps = planned.steps.into_iter();
        self.steps = steps.map(|step| self.apply_defect(world, number, step)).collect();
        self.is_read = false;
        self.seen = (world.counts.losses, world.counts.puts);
        let drops = self.steps.iter().any(|step| matches!(step, Step::Drop { .. }));
        world.watched = drops.then_some(number);
    }

    fn check_plan(&self, world: &World, number: usize, planned: &Plan) {
        let blob = &world.blobs[&number];
        // The plan's claim about the blob's readability is true.
        let reachable = world.holdings(number, |peer| peer.answers);
        assert_eq!(planned.survives >= 0, is_enough(&reachable), "blob {number}");
        // A peer that is down must not move anything that would stay if the peer were up.
        let has_all_answers = world
            .peers
            .iter()
            .all(|peer| peer.answers || !matches!(peer.node.state, PeerState::Draining));
        if world.peers.iter().all(|peer| peer.node.state != PeerState::Down) {
            return;
        }
        let up = with(world, PeerState::Down, PeerState::Up);
        let all = world.holdings(number, |peer| peer.node.state != PeerState::Lost);
        let at_rest = plan(&blob.id, blob.wanted, &up, &all).steps.is_empty();
        // With two encodings, the other one may be the stronger one for the moment.
        let is_one = all.iter().all(|one| one.encoding == all[0].encoding);
        if at_rest && has_all_answers && is_one {
            assert_eq!(planned.steps, [], "blob {number} is moved because a peer is down");
        }
    }

    /// Applies the deliberate defect to a step.
    fn apply_defect(&self, world: &World, number: usize, mut step: Step) -> Step {
        match (&mut step, self.defect) {
            (Step::Copy { to, .. } | Step::Rebuild { to, .. }, Some(PlantedBug::TwoOnOne)) => {
                let has_one = world.peers.iter().find(|peer| peer.has.contains_key(&number));
                *to = has_one.map_or(*to, |peer| peer.node.id);
            }
            (
                Step::Copy { encoding, .. }
                | Step::Rebuild { encoding, .. }
                | Step::Drop { encoding, .. },
                Some(PlantedBug::MixedEncodings),
            ) => {
                let all = world.holdings(number, |peer| peer.answers);
                *encoding = all.first().map_or(*encoding, |one| one.encoding);
            }
            _ => {}
        }
        step
    }

    fn continue_step(&mut self, world: &mut World, step: &Step) {
        if !self.is_read {
            self.is_read = self.read(world, step);
            if !self.is_read {
                // The world has changed: ask again.
                self.give_up(world);
            }
            return;
        }
        if self.write(world, step) {
            self.steps.pop_front();
            world.watched = world.watched.filter(|_| !self.steps.is_empty());
            self.is_read = false;
        } else {
            self.give_up(world);
        }
        world.check(self.blob);
    }

    /// The first half of a step: reads what it needs.
    fn read(&mut self, world: &mut World, step: &Step) -> bool {
        let number = self.blob;
        let answering = world.holdings(number, |peer| peer.answers);
        let has = |peer: &PeerId, encoding: &BlobId, index: u8| {
            answering
                .iter()
                .any(|one| (&one.peer, &one.encoding, one.index) == (peer, encoding, index))
        };
        match step {
            Step::Rebuild { encoding, .. } => {
                let mut own = answering;
                own.retain(|one| one.encoding == *encoding);
                is_enough(&own)
            }
            Step::Copy { encoding, index, from, .. } => {
                let found = has(from, encoding, *index);
                if self.defect == Some(PlantedBug::DropTooEarly) && found {
                    remove(world, number, from, encoding, *index);
                    world.check(number);
                }
                found
            }
            Step::Drop { .. } if self.defect == Some(PlantedBug::LostIsUp) => true,
            Step::Drop { kept, .. } => {
                kept.iter().all(|one| has(&one.peer, &one.encoding, one.index))
            }
            Step::Encode { .. } => unreachable!("all encodings in the simulation are as wanted"),
        }
    }

    /// The second half of a step: writes.
    fn write(&mut self, world: &mut World, step: &Step) -> bool {
        let number = self.blob;
        match step {
            Step::Rebuild { encoding, index, to } | Step::Copy { encoding, index, to, .. } => {
                let Some(peer) = world.peer(to) else { return false };
                if !peer.answers || peer.node.full {
                    return false;
                }
                // A further fragment on the peer is acceptable if another peer has it, too.
                let all = world.holdings(number, |peer| peer.node.state != PeerState::Lost);
                let mut others = all.iter().filter(|one| one.peer == *to && one.index != *index);
                let is_elsewhere = |other: &Holding| {
                    let same =
                        |one: &Holding| (one.encoding, one.index) == (other.encoding, other.index);
                    all.iter().any(|one| one.peer != *to && same(one))
                };
                let second = others.find(|one| one.encoding == *encoding && !is_elsewhere(one));
                let is_same = self.seen == (world.counts.losses, world.counts.puts);
                assert!(second.is_none() || !is_same, "two fragments of blob {number} on one peer");
                world.store(number, *encoding, *index, to);
                match step {
                    Step::Rebuild { .. } => {
                        (self.done.rebuilt, world.counts.rebuilt) =
                            (self.done.rebuilt + 1, world.counts.rebuilt + 1);
                    }
                    _ => {
                        (self.done.copied, world.counts.copied) =
                            (self.done.copied + 1, world.counts.copied + 1);
                    }
                }
                true
            }
            Step::Drop { peer, encoding, index, .. } => {
                if !world.peer(peer).is_some_and(|peer| peer.answers) {
                    return false;
                }
                let before = world.total(number);
                remove(world, number, peer, encoding, *index);
                // A peer that keeps the fragment may have been lost since: then the loss weakened
                // the blob.
                if world.counts.losses == self.seen.0 {
                    assert_eq!(world.total(number), before, "a drop weakened the blob");
                }
                (self.done.dropped, world.counts.dropped) =
                    (self.done.dropped + 1, world.counts.dropped + 1);
                true
            }
            Step::Encode { .. } => unreachable!("all encodings in the simulation are as wanted"),
        }
    }
}

fn remove(world: &mut World, number: usize, peer: &PeerId, encoding: &BlobId, index: u8) {
    let Some(Peer { has, .. }) = world.peer(peer) else { return };
    if let Some(own) = has.get_mut(&number) {
        own.remove(&(*encoding, index));
        if own.is_empty() {
            has.remove(&number);
        }
    }
}

/// Whether there are enough fragments of one encoding to read the blob.
fn is_enough(holdings: &[Holding]) -> bool {
    holdings.iter().any(|first| {
        let mut own: Vec<u8> = holdings
            .iter()
            .filter(|one| one.encoding == first.encoding)
            .map(|one| one.index)
            .collect();
        own.sort_unstable();
        own.dedup();
        own.len() >= first.data.into()
    })
}

/// The members, with all peers in `state` changed to `other`.
fn with(world: &World, state: PeerState, other: PeerState) -> RepairMembers {
    let changed = |node: &RepairPeer| match node.state == state {
        true => RepairPeer { state: other, ..node.clone() },
        false => node.clone(),
    };
    RepairMembers::new(world.members().nodes().iter().map(changed))
}
