use std::collections::BTreeSet;

use super::{Findings, FragmentLocation, Holding, Plan, Rejection, Removal, Step, Wanted, plan};
use crate::cluster::placement::{Candidate, rank};
use crate::cluster::repair::members::{PeerState, RepairMembers, RepairPeer};
use crate::encoding::Redundancy;
use crate::encoding::fragment::Kind;
use crate::id::{BlobId, PeerId};

const CODE: Redundancy = Redundancy::ReedSolomon { data: 4, parity: 2 };

fn id(number: u8) -> PeerId {
    PeerId::from_bytes([number; 16])
}

fn node(number: u8) -> RepairPeer {
    let domain = number.to_string();
    RepairPeer { id: id(number), weight: 1, domain, state: PeerState::Up, full: false }
}

/// Some peers, and what they hold of one blob.
struct Scene {
    nodes: Vec<RepairPeer>,
    blob: BlobId,
    wanted: Redundancy,
    holdings: Vec<Holding>,
    findings: Findings,
}

impl Scene {
    /// A blob whose fragments are at their places.
    fn new(peers: u8, wanted: Redundancy) -> Scene {
        let (nodes, blob) = ((0..peers).map(node).collect(), BlobId::of(b"blob"));
        let (holdings, findings) = (Vec::new(), Findings::default());
        let mut scene = Scene { nodes, blob, wanted, holdings, findings };
        for (index, peer) in scene.ranking().into_iter().take(wanted.width()).enumerate() {
            scene.add(peer, b"one", index as u8);
        }
        scene
    }

    fn ranking(&self) -> Vec<PeerId> {
        let candidate = |node: &RepairPeer| Candidate {
            id: node.id,
            weight: node.weight,
            domain: node.domain.clone(),
        };
        let candidates: Vec<_> = self.nodes.iter().map(candidate).collect();
        rank(&self.blob, &candidates).into_iter().map(|at| candidates[at].id).collect()
    }

    fn add(&mut self, peer: PeerId, encoding: &[u8], index: u8) {
        let (data, parity, index) = match self.wanted {
            Redundancy::Replicas(_) => (1, 0, 0),
            Redundancy::ReedSolomon { data, parity } => (data, parity, index),
        };
        let (encoding, kind) = (BlobId::of(encoding), Kind::Content);
        self.holdings.push(Holding {
            peer,
            encoding,
            kind,
            data,
            parity,
            index,
            len: 1,
            is_sealed: true,
        });
    }

    fn node(&mut self, peer: PeerId) -> &mut RepairPeer {
        self.nodes.iter_mut().find(|node| node.id == peer).unwrap()
    }

    /// Sets a peer's state. What a peer that does not answer holds is unknown.
    fn set(&mut self, peer: PeerId, state: PeerState) {
        self.node(peer).state = state;
        if matches!(state, PeerState::Down | PeerState::Lost) {
            self.holdings.retain(|one| one.peer != peer);
        }
    }

    fn plan(&self) -> Plan {
        let (wanted, members) =
            (Wanted::content(self.blob, self.wanted), RepairMembers::new(self.nodes.clone()));
        plan(&wanted, &members, &self.holdings, &self.findings)
    }

    /// Carries out the steps of the plan, or its removal.
    fn execute(&mut self) -> Plan {
        let plan = self.plan();
        for step in &plan.steps {
            match step {
                Step::Rebuild { index, to, .. } | Step::Copy { index, to, .. } => {
                    self.add(*to, b"one", *index);
                }
                Step::Encode { .. } => panic!("these tests encode nothing"),
            }
        }
        if let Some(Removal { surplus, .. }) = &plan.removal {
            self.holdings.retain(|one| !surplus.contains(&one.location()));
        }
        plan
    }

    fn is_at_rest(&self) -> bool {
        self.plan().is_empty()
    }
}

#[test]
fn a_blob_with_full_redundancy_needs_no_steps() {
    for wanted in [CODE, Redundancy::Replicas(3), Redundancy::NONE] {
        let plan = Scene::new(9, wanted).plan();
        assert!(plan.is_empty() && plan.missing == 0, "{wanted}");
        assert_eq!(plan.survives, wanted.survives() as i32, "{wanted}");
    }
}

#[test]
fn a_fragment_of_a_lost_peer_is_rebuilt_at_the_next_place() {
    let mut scene = Scene::new(9, CODE);
    let ranking = scene.ranking();
    scene.set(ranking[2], PeerState::Lost);
    let plan = scene.plan();
    assert_eq!((plan.survives, plan.missing, plan.waiting), (1, 1, 0));
    let (encoding, to) = (BlobId::of(b"one"), ranking[6]);
    assert_eq!(plan.steps, [Step::Rebuild { encoding, index: 2, to }]);
    scene.execute();
    assert!(scene.is_at_rest());
}

#[test]
fn a_lost_copy_is_copied_again() {
    let mut scene = Scene::new(5, Redundancy::Replicas(3));
    let ranking = scene.ranking();
    scene.set(ranking[0], PeerState::Lost);
    scene.set(ranking[1], PeerState::Lost);
    assert_eq!(scene.plan().survives, 0);
    let steps = scene.execute().steps;
    let to: BTreeSet<_> = steps
        .iter()
        .map(|step| match step {
            Step::Copy { from, to, .. } if *from == ranking[2] => *to,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(to, ranking[3..].iter().copied().collect());
    assert!(scene.is_at_rest() && scene.plan().survives == 2);
}

#[test]
fn a_peer_that_is_down_is_awaited() {
    for wanted in [CODE, Redundancy::Replicas(3)] {
        let mut scene = Scene::new(9, wanted);
        let ranking = scene.ranking();
        (0..3).for_each(|place| scene.set(ranking[place], PeerState::Down));
        let plan = scene.plan();
        assert_eq!((plan.steps, plan.missing, plan.waiting), (Vec::new(), 3, 3), "{wanted}");
        assert_eq!(plan.survives, -1, "the blob cannot be read");
    }
}

#[test]
fn a_missing_fragment_is_rebuilt_while_another_peer_is_down() {
    let mut scene = Scene::new(9, CODE);
    let ranking = scene.ranking();
    scene.set(ranking[1], PeerState::Down);
    scene.holdings.retain(|one| one.index != 4);
    let (encoding, to) = (BlobId::of(b"one"), ranking[4]);
    assert_eq!(scene.plan().steps, [Step::Rebuild { encoding, index: 4, to }]);
    assert_eq!((scene.plan().missing, scene.plan().waiting), (2, 1));
}

#[test]
fn a_fragment_that_a_peer_that_is_down_is_known_to_have_is_not_rebuilt() {
    let mut scene = Scene::new(9, CODE);
    let ranking = scene.ranking();
    scene.node(ranking[0]).state = PeerState::Down;
    scene.holdings.retain(|one| one.index != 5);
    let (encoding, to) = (BlobId::of(b"one"), ranking[5]);
    let plan = scene.plan();
    assert_eq!(plan.steps, [Step::Rebuild { encoding, index: 5, to }]);
    assert_eq!((plan.missing, plan.waiting, plan.survives), (2, 1, 0));
}

#[test]
fn a_draining_peer_keeps_its_fragment_until_another_peer_has_it() {
    for wanted in [CODE, Redundancy::Replicas(3)] {
        let mut scene = Scene::new(9, wanted);
        let ranking = scene.ranking();
        let (from, to) = (ranking[1], ranking[wanted.width()]);
        scene.set(from, PeerState::Draining);
        assert_eq!(scene.plan().survives, wanted.survives() as i32);
        let steps = scene.execute().steps;
        assert!(matches!(&steps[..], [Step::Copy { to: place, .. }] if *place == to), "{steps:?}");
        let Removal { surplus, .. } = scene.execute().removal.unwrap();
        assert!(matches!(surplus[..], [one] if one.peer == from), "{surplus:?}");
        assert!(scene.is_at_rest());
    }
}

#[test]
fn the_last_peers_are_not_drained_at_the_cost_of_redundancy() {
    let mut scene = Scene::new(6, CODE);
    let ranking = scene.ranking();
    scene.set(ranking[3], PeerState::Draining);
    assert_eq!((scene.plan().steps, scene.plan().missing), (Vec::new(), 0));
    scene.nodes.push(node(77));
    let steps = scene.execute().steps;
    assert!(matches!(steps[..], [Step::Copy { to, .. }] if to == id(77)), "{steps:?}");
}

#[test]
fn a_peer_that_joins_gets_one_fragment_and_another_loses_it() {
    let mut scene = Scene::new(9, CODE);
    let before = scene.ranking();
    let new = (10..200).map(node).find(|new| {
        scene.nodes.push(new.clone());
        let is_in = scene.ranking()[..6].contains(&new.id);
        scene.nodes.pop();
        is_in
    });
    scene.nodes.push(new.unwrap());
    let to = scene.nodes.last().unwrap().id;
    let steps = scene.execute().steps;
    assert!(matches!(steps[..], [Step::Copy { to: place, .. }] if place == to), "{steps:?}");
    let Removal { kept, surplus } = scene.execute().removal.unwrap();
    assert!(matches!(surplus[..], [one] if one.peer == before[5]), "{surplus:?}");
    let kept: BTreeSet<_> = kept.iter().map(|one| one.peer).collect();
    assert_eq!(kept, scene.ranking()[..6].iter().copied().collect());
    assert!(scene.is_at_rest());
}

#[test]
fn a_full_peer_is_replaced_within_its_domain() {
    let mut scene = Scene::new(12, CODE);
    // Two peers in each domain.
    scene.nodes.iter_mut().zip(0..).for_each(|(node, n)| node.domain = (n / 2).to_string());
    scene.holdings.clear();
    let ranking = scene.ranking();
    for (index, peer) in ranking.iter().take(6).enumerate().skip(1) {
        scene.add(*peer, b"one", index as u8);
    }
    scene.node(ranking[0]).full = true;
    let domain = scene.node(ranking[0]).domain.clone();
    let steps = scene.execute().steps;
    let Step::Rebuild { index: 0, to, .. } = steps[0] else { panic!("{steps:?}") };
    assert_eq!((scene.node(to).domain.clone(), to == ranking[0]), (domain, false));
    assert!(scene.is_at_rest());
    // A full peer keeps what it has.
    scene.node(ranking[1]).full = true;
    assert!(scene.is_at_rest());
}

#[test]
fn with_too_few_peers_the_missing_fragments_are_reported_as_unplaced() {
    let mut scene = Scene::new(6, CODE);
    let ranking = scene.ranking();
    scene.set(ranking[0], PeerState::Lost);
    let plan = scene.plan();
    assert_eq!((plan.steps, plan.missing, plan.unplaced), (Vec::new(), 1, 1));
    assert_eq!(plan.survives, 1);
}

#[test]
fn fragments_on_one_peer_are_lost_together() {
    let mut scene = Scene::new(9, CODE);
    let ranking = scene.ranking();
    scene.holdings.clear();
    (0..6).for_each(|index| scene.add(ranking[0], b"one", index));
    assert_eq!(scene.plan().survives, 0, "the loss of one peer loses all fragments");
    assert_eq!(scene.execute().steps.len(), 5);
    assert_eq!(scene.plan().survives, 2);
    scene.execute();
    assert!(scene.is_at_rest() && scene.holdings.len() == 6);
}

#[test]
fn two_encodings_are_not_counted_together() {
    let mut scene = Scene::new(9, CODE);
    let ranking = scene.ranking();
    scene.holdings.clear();
    (0..3).for_each(|index| scene.add(ranking[usize::from(index)], b"one", index));
    (3..6).for_each(|index| scene.add(ranking[usize::from(index)], b"two", index));
    assert_eq!((scene.plan().survives, scene.plan().steps), (-1, Vec::new()));
    // One encoding can be read: it is completed, and then the other one is surplus.
    scene.add(ranking[3], b"one", 3);
    let steps = scene.execute().steps;
    assert!(steps.iter().all(|step| matches!(step, Step::Rebuild { .. })));
    let Removal { kept, surplus } = scene.execute().removal.unwrap();
    assert!(kept.iter().all(|one| one.encoding == BlobId::of(b"one")) && kept.len() == 6);
    assert!(surplus.iter().all(|one| one.encoding == BlobId::of(b"two")) && surplus.len() == 3);
    assert!(scene.is_at_rest() && scene.holdings.len() == 6);
}

/// A scene with a second, complete encoding at the same places.
fn with_two_encodings() -> Scene {
    let mut scene = Scene::new(9, CODE);
    for (index, peer) in scene.ranking().into_iter().take(6).enumerate() {
        scene.add(peer, b"two", index as u8);
    }
    scene
}

#[test]
fn a_rejected_encoding_is_surplus_and_another_one_is_completed_however_weak_it_is() {
    for (rejected, other) in [(b"one", b"two"), (b"two", b"one")] {
        let mut scene = with_two_encodings();
        let (bad, good) = (BlobId::of(rejected), BlobId::of(other));
        // Only enough fragments of the good encoding are left.
        scene.holdings.retain(|one| one.encoding == bad || one.index < 4);
        scene.findings.rejected.insert(bad, Rejection::Unreadable);
        let plan = scene.plan();
        assert_eq!((plan.encoding, plan.missing, plan.survives), (Some(good), 2, 0));
        assert!(plan.removal.is_none() && plan.steps.len() == 2, "{plan:?}");
        let is_good =
            |step: &Step| matches!(step, Step::Rebuild { encoding, .. } if *encoding == good);
        assert!(plan.steps.iter().all(is_good), "{plan:?}");
        for (index, peer) in scene.ranking().into_iter().enumerate().take(6).skip(4) {
            scene.add(peer, other, index as u8);
        }
        let Removal { kept, surplus } = scene.plan().removal.unwrap();
        assert!(kept.iter().all(|one| one.encoding == good) && kept.len() == 6);
        assert!(surplus.iter().all(|one| one.encoding == bad) && surplus.len() == 6);
    }
}

#[test]
fn a_rejected_encoding_is_never_completed_kept_or_counted() {
    let mut scene = with_two_encodings();
    scene.findings.rejected.insert(BlobId::of(b"one"), Rejection::Unreadable);
    // The other encoding cannot be read. The fragments of both stay.
    scene.holdings.retain(|one| one.encoding == BlobId::of(b"one") || one.index < 3);
    let plan = scene.plan();
    assert_eq!((plan.encoding, plan.survives, plan.missing), (None, -1, 3));
    assert!(plan.is_empty(), "{plan:?}");
    scene.holdings.retain(|one| one.encoding == BlobId::of(b"one"));
    let plan = scene.plan();
    assert_eq!((plan.encoding, plan.survives, plan.missing), (None, -4, 6));
    assert!(plan.is_empty(), "{plan:?}");
}

#[test]
fn an_inconsistent_encoding_is_encoded_again_as_the_last_resort() {
    let mut scene = Scene::new(9, CODE);
    let one = BlobId::of(b"one");
    scene.findings.rejected.insert(one, Rejection::Inconsistent);
    let plan = scene.plan();
    assert_eq!((plan.encoding, plan.survives), (None, 0));
    let to = scene.ranking()[..6].to_vec();
    assert_eq!(plan.steps, [Step::Encode { from: one, to: to.clone() }]);
    // Copies are a better source.
    let (encoding, kind) = (BlobId::of(b"zzz"), Kind::Content);
    let copy = Holding {
        peer: to[0],
        encoding,
        kind,
        data: 1,
        parity: 0,
        index: 0,
        len: 1,
        is_sealed: true,
    };
    scene.holdings.push(copy);
    assert_eq!(scene.plan().steps, [Step::Encode { from: encoding, to }]);
}

#[test]
fn a_forged_fragment_counts_as_missing_and_is_surplus_in_the_end() {
    let mut scene = Scene::new(9, CODE);
    let ranking = scene.ranking();
    let encoding = BlobId::of(b"one");
    // It is outside its place, or at its place.
    let outside = FragmentLocation { peer: ranking[7], encoding, index: 2 };
    scene.add(ranking[7], b"one", 2);
    scene.findings.forged.insert(outside);
    let Removal { kept, surplus } = scene.plan().removal.unwrap();
    assert_eq!((kept.len(), &surplus[..]), (6, &[outside][..]));
    scene.findings.forged =
        [FragmentLocation { peer: ranking[2], encoding, index: 2 }].into_iter().collect();
    scene.holdings.retain(|one| one.peer != ranking[7]);
    assert_eq!(scene.plan().steps, [Step::Rebuild { encoding, index: 2, to: ranking[2] }]);
}

#[test]
fn a_peer_that_refuses_this_blob_is_passed_over() {
    let mut scene = Scene::new(9, CODE);
    let ranking = scene.ranking();
    scene.holdings.retain(|one| one.index != 2);
    scene.findings.refusing.insert(ranking[2]);
    let encoding = BlobId::of(b"one");
    assert_eq!(scene.plan().steps, [Step::Rebuild { encoding, index: 2, to: ranking[6] }]);
}

#[test]
fn a_record_that_is_also_stored_as_content_keeps_its_copies_as_a_record() {
    let mut scene = Scene::new(5, Redundancy::Replicas(2));
    let ranking = scene.ranking();
    let wanted = Wanted::record(scene.blob, scene.wanted);
    let members = RepairMembers::new(scene.nodes.clone());
    let plan_of = |scene: &Scene| plan(&wanted, &members, &scene.holdings, &scene.findings);
    // Content is a source, not a record.
    let (from, to) = (BlobId::of(b"one"), ranking[..2].to_vec());
    assert_eq!(plan_of(&scene).steps, [Step::Encode { from, to }]);
    for peer in &ranking[..2] {
        let copy = scene.holdings[0];
        let encoding = BlobId::of(b"record");
        scene.holdings.push(Holding { peer: *peer, encoding, kind: Kind::Record, ..copy });
    }
    // Neither makes the other one surplus.
    assert!(plan_of(&scene).is_empty() && scene.is_at_rest());
}

#[test]
fn another_encoding_is_left_alone_and_used_as_a_source_only_if_there_is_no_other() {
    let mut scene = Scene::new(9, Redundancy::Replicas(2));
    let copies = scene.holdings.clone();
    scene.wanted = CODE;
    let plan = scene.plan();
    assert_eq!((plan.survives, plan.missing), (1, 6));
    let (from, to) = (BlobId::of(b"one"), scene.ranking()[..6].to_vec());
    assert_eq!(plan.steps, [Step::Encode { from, to }]);
    let mut whole = Scene::new(9, CODE);
    whole.holdings.extend(copies);
    assert!(whole.is_at_rest());
}

#[test]
fn impossible_holdings_are_ignored() {
    let mut scene = Scene::new(9, CODE);
    let expected = scene.plan();
    let one = scene.holdings[0];
    scene.holdings.extend([
        Holding { index: 6, ..one },
        Holding { data: 0, ..one },
        Holding { data: 200, parity: 100, index: 250, ..one },
        Holding { data: 32, parity: 1, ..one },
        Holding { peer: id(99), index: 3, ..one },
    ]);
    assert_eq!(scene.plan(), expected);
    scene.holdings.clear();
    assert!(scene.is_at_rest() && scene.plan().survives == -4);
}

/// As many peers as fragments are wanted, less one, have all fragments: one peer has two of them.
#[test]
fn a_blob_with_two_fragments_on_one_peer_is_short() {
    let mut scene = Scene::new(6, CODE);
    let whole = scene.plan();
    assert!(!whole.is_short && whole.missing == 0, "{whole:?}");
    let (last, first) = (scene.ranking()[5], scene.ranking()[0]);
    scene.set(last, PeerState::Lost);
    scene.add(first, b"one", 5);
    let plan = scene.plan();
    assert_eq!((plan.missing, plan.is_short), (0, true), "{plan:?}");
}
