//! A repair in the simulated world, half a step at a time.

use std::collections::{BTreeMap, VecDeque};

use super::PlantedBug;
use super::world::{Peer, World};
use crate::cluster::repair::members::{PeerState, RepairMembers, RepairPeer};
use crate::cluster::repair::plan::{
    Findings, FragmentLocation, Holding, Plan, Rejection, Removal, Step, plan,
};
use crate::id::BlobId;

/// The steps that were carried out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Done {
    pub(super) copied: u64,
    pub(super) rebuilt: u64,
    pub(super) dropped: u64,
}

/// What repair does with one request or a few.
#[derive(Clone, Debug)]
enum Action {
    /// A step that adds.
    Add(Step),
    /// Reads what is kept and compares it with the blob's name.
    Verify(Vec<FragmentLocation>),
    /// Deletes a fragment, after what is kept was verified.
    Drop(FragmentLocation),
}

pub(super) struct Repairing {
    defect: Option<PlantedBug>,
    /// The blob under repair.
    blob: usize,
    steps: VecDeque<Action>,
    /// What this process has found out about each blob.
    findings: BTreeMap<usize, Findings>,
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
            findings: BTreeMap::new(),
            is_read: false,
            seen: (0, 0),
            done: Done::default(),
        }
    }

    /// The process is killed, and another one starts from the beginning.
    pub(super) fn kill(&mut self, world: &mut World) {
        world.counts.kills += 1;
        self.findings.clear();
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
            Some(action) => self.continue_action(world, &action),
        }
    }

    /// Repairs all blobs until no steps are left.
    pub(super) fn run_to_completion(&mut self, world: &mut World) -> Done {
        self.done = Done::default();
        for number in world.blobs.keys().copied().collect::<Vec<_>>() {
            // At most two rounds for missing and misplaced fragments, one for surplus ones, and one
            // that finds nothing to do; for each encoding that turns out to be forged as many.
            let most = 4 * (1 + world.blobs[&number].forged.len());
            let rounds = (0..most).find(|_| {
                self.look(world, number);
                let is_done = self.steps.is_empty();
                while !self.steps.is_empty() {
                    self.step(world);
                }
                is_done
            });
            assert!(rounds.is_some(), "blob {number} still has steps");
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
        let findings = self.findings.entry(number).or_default().clone();
        let planned = plan(&blob.wanted(), &members, &holdings, &findings);
        self.check_plan(world, number, &planned);
        let Plan { steps, removal, .. } = planned;
        assert!(steps.is_empty() || removal.is_none(), "a plan either adds or removes");
        world.watched = removal.as_ref().map(|_| number);
        let steps = steps.into_iter().map(|step| self.apply_defect(world, number, step));
        self.steps = steps.map(Action::Add).collect();
        if let Some(Removal { kept, surplus }) = removal {
            self.steps.push_back(Action::Verify(kept));
            self.steps.extend(surplus.into_iter().map(Action::Drop));
        }
        self.is_read = false;
        self.seen = (world.counts.losses, world.counts.puts);
    }

    fn check_plan(&self, world: &World, number: usize, planned: &Plan) {
        let blob = &world.blobs[&number];
        // The plan's claim about the blob's readability is true.
        let findings = &self.findings[&number];
        let mut reachable = world.holdings(number, |peer| peer.answers);
        reachable.retain(|one| !findings.rejected.contains_key(&one.encoding));
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
        let at_rest = plan(&blob.wanted(), &up, &all, findings).is_empty();
        // With two encodings, the other one may be the stronger one for the moment.
        let is_one = all.iter().all(|one| one.encoding == all[0].encoding);
        if at_rest && has_all_answers && is_one {
            assert!(planned.is_empty(), "blob {number} is moved because a peer is down");
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
                Step::Copy { encoding, .. } | Step::Rebuild { encoding, .. },
                Some(PlantedBug::MixedEncodings),
            ) => {
                let all = world.holdings(number, |peer| peer.answers);
                *encoding = all.first().map_or(*encoding, |one| one.encoding);
            }
            _ => {}
        }
        step
    }

    fn continue_action(&mut self, world: &mut World, action: &Action) {
        if !self.is_read {
            self.is_read = self.read(world, action);
            if !self.is_read {
                // The world has changed: ask again.
                self.give_up(world);
            }
            return;
        }
        if self.write(world, action) {
            self.steps.pop_front();
            world.watched = world.watched.filter(|_| !self.steps.is_empty());
            self.is_read = false;
        } else {
            self.give_up(world);
        }
        world.check(self.blob);
    }

    /// The first half of an action: reads what it needs.
    fn read(&mut self, world: &mut World, action: &Action) -> bool {
        let number = self.blob;
        let answering = world.holdings(number, |peer| peer.answers);
        let has = |place: &FragmentLocation| answering.iter().any(|one| one.location() == *place);
        match action {
            Action::Add(Step::Rebuild { encoding, .. }) => {
                let mut own = answering;
                own.retain(|one| one.encoding == *encoding);
                is_enough(&own) && self.decodes(world, encoding)
            }
            Action::Add(Step::Copy { encoding, index, from, .. }) => {
                let place = FragmentLocation { peer: *from, encoding: *encoding, index: *index };
                let found = has(&place);
                if self.defect == Some(PlantedBug::DropTooEarly) && found {
                    remove(world, number, &place);
                    world.check(number);
                }
                // A fragment alone cannot be compared with the blob's name, but a copy can.
                let is_copy = world.blobs[&number].wanted.needed() == 1;
                found && (!is_copy || self.decodes(world, encoding))
            }
            Action::Add(Step::Encode { .. }) => {
                unreachable!("all encodings in the simulation are as wanted")
            }
            Action::Verify(_) if self.defect == Some(PlantedBug::LostIsUp) => true,
            Action::Verify(kept) => {
                let is_there = kept.iter().all(has);
                match self.defect {
                    Some(PlantedBug::DropWithoutDecode) => is_there,
                    _ => is_there && self.decodes(world, &kept[0].encoding),
                }
            }
            Action::Drop(_) => true,
        }
    }

    /// Decodes an encoding, and rejects it if it does not give the blob.
    fn decodes(&mut self, world: &mut World, encoding: &BlobId) -> bool {
        let is_forged = world.blobs[&self.blob].forged.contains(encoding);
        if is_forged {
            world.counts.rejected += 1;
            let findings = self.findings.entry(self.blob).or_default();
            findings.rejected.insert(*encoding, Rejection::Unreadable);
        }
        !is_forged
    }

    /// The second half of an action: writes.
    fn write(&mut self, world: &mut World, action: &Action) -> bool {
        let number = self.blob;
        match action {
            Action::Add(
                step @ (Step::Rebuild { encoding, index, to }
                | Step::Copy { encoding, index, to, .. }),
            ) => {
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
                let is_forged = world.blobs[&number].forged.contains(encoding);
                assert!(
                    second.is_none() || !is_same || is_forged,
                    "two fragments of blob {number} on one peer"
                );
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
            Action::Add(Step::Encode { .. }) => {
                unreachable!("all encodings in the simulation are as wanted")
            }
            Action::Verify(_) => true,
            Action::Drop(place) => {
                if !world.peer(&place.peer).is_some_and(|peer| peer.answers) {
                    return false;
                }
                let before = world.total(number);
                remove(world, number, place);
                // A peer that keeps the fragment may have been lost since: then the loss weakened
                // the blob.
                if world.counts.losses == self.seen.0 {
                    assert_eq!(world.total(number), before, "a drop weakened the blob");
                }
                (self.done.dropped, world.counts.dropped) =
                    (self.done.dropped + 1, world.counts.dropped + 1);
                true
            }
        }
    }
}

fn remove(world: &mut World, number: usize, place: &FragmentLocation) {
    let Some(Peer { has, .. }) = world.peer(&place.peer) else { return };
    if let Some(own) = has.get_mut(&number) {
        own.remove(&(place.encoding, place.index));
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
