//! The memory that the plan for one blob takes.
//!
//! Only encodings that the plan reads count, and of these the claims by which they are read. Anybody
//! can claim to have the greatest possible fragment of a blob. If such a claim counted, it would take
//! all memory of a repair, and other blobs would wait.

use super::plan::{Findings, Holding, Plan, Step};
use super::read::readable;
use crate::id::BlobId;

/// The most bytes that a plan holds in memory.
pub(super) fn memory(plan: &Plan, holdings: &[Holding], findings: &Findings) -> usize {
    let claim = |encoding| readable(holdings, findings, encoding).first().copied();
    let claims: Vec<Holding> = encodings(plan).filter_map(claim).collect();
    let len = claims.iter().map(|one| one.len as usize).max().unwrap_or(0);
    let needed = claims.iter().map(|one| usize::from(one.data)).max().unwrap_or(1);
    let written = plan.steps.iter().map(|step| match step {
        // The content, and all blocks of the new encoding.
        Step::Encode { .. } => 4 * needed,
        _ => 1,
    });
    // All kept blocks, the content, and the blocks that it gives.
    let kept = plan.removal.as_ref().map_or(0, |removal| 2 * removal.kept.len() + needed);
    len * (needed + written.sum::<usize>() + kept)
}

/// The encodings that a plan reads.
fn encodings(plan: &Plan) -> impl Iterator<Item = &BlobId> {
    let kept = plan.removal.iter().filter_map(|removal| removal.kept.first());
    plan.steps.iter().map(source).chain(kept.map(|one| &one.encoding))
}

/// The encoding that a step reads.
fn source(step: &Step) -> &BlobId {
    match step {
        Step::Rebuild { encoding, .. } | Step::Copy { encoding, .. } => encoding,
        Step::Encode { from, .. } => from,
    }
}

#[cfg(test)]
mod tests {
    use super::memory;
    use crate::cluster::repair::members::{PeerState, RepairMembers, RepairPeer};
    use crate::cluster::repair::plan::{Findings, Holding, Plan, Wanted, plan};
    use crate::encoding::fragment::Kind;
    use crate::encoding::{MAX_STORED, Redundancy};
    use crate::id::{BlobId, PeerId};

    const CODE: Redundancy = Redundancy::ReedSolomon { data: 2, parity: 1 };
    const LEN: u32 = 1000;

    fn id(number: u8) -> PeerId {
        PeerId::from_bytes([number; 16])
    }

    /// A fragment of an encoding as wanted, on the peer with the number of its index.
    fn holding(encoding: &[u8], index: u8) -> Holding {
        let (encoding, kind) = (BlobId::of(encoding), Kind::Content);
        let (data, parity, is_sealed) = (2, 1, true);
        Holding { peer: id(index), encoding, kind, data, parity, index, len: LEN, is_sealed }
    }

    /// The greatest possible claim about an encoding, by a hostile peer.
    fn lie(encoding: &[u8]) -> Holding {
        let (data, parity, len) = (20, 4, MAX_STORED as u32);
        let one = holding(encoding, 2);
        Holding { peer: id(9), data, parity, len, is_sealed: false, ..one }
    }

    /// The plan for some peers, and the hostile one, which gets nothing.
    fn plan_for(peers: u8, holdings: &[Holding], findings: &Findings) -> Plan {
        let node = |number: u8| {
            let domain = number.to_string();
            RepairPeer { id: id(number), weight: 1, domain, state: PeerState::Up, full: false }
        };
        let hostile = RepairPeer { full: true, ..node(9) };
        let members = RepairMembers::new((0..peers).map(node).chain([hostile]));
        plan(&Wanted::content(BlobId::of(b"blob"), CODE), &members, holdings, findings)
    }

    /// The memory of the plan for some fragments, without and with the claims of a hostile peer.
    fn both(peers: u8, holdings: &[Holding], lies: &[Holding]) -> (usize, usize) {
        let findings = Findings::default();
        let plan = plan_for(peers, holdings, &findings);
        assert!(!plan.is_empty());
        let with_lies = [holdings, lies].concat();
        let same = plan_for(peers, &with_lies, &findings);
        assert_eq!(plan, same, "the plan does without them");
        (memory(&plan, holdings, &findings), memory(&same, &with_lies, &findings))
    }

    #[test]
    fn a_claim_that_nobody_has_sealed_takes_no_memory_from_a_repair() {
        let lies = [lie(b"good"), lie(b"invented")];
        let few = [0, 1].map(|index| holding(b"good", index));
        let (alone, with_lies) = both(3, &few, &lies);
        assert_eq!(alone, with_lies, "a fragment is rebuilt");
        assert!(alone >= 3 * LEN as usize);
        // Each fragment is on several peers.
        let on = |peer: u8, index: u8| Holding { peer: id(peer), ..holding(b"good", index) };
        let many: Vec<_> = (0..3).flat_map(|at| (0..3).map(move |index| on(at, index))).collect();
        let (alone, with_lies) = both(3, &many, &lies);
        assert_eq!(alone, with_lies, "the surplus is removed");
        assert!(alone >= 6 * LEN as usize);
    }

    #[test]
    fn the_source_of_a_new_encoding_takes_memory_whether_or_not_it_is_sealed() {
        let source = |index: u8| Holding { data: 4, len: 5000, ..holding(b"source", index) };
        for is_sealed in [true, false] {
            let holdings: Vec<_> =
                (0..4).map(|index| Holding { is_sealed, ..source(index) }).collect();
            let (alone, with_lies) = both(4, &holdings, &[lie(b"source"), lie(b"invented")]);
            assert_eq!(alone, with_lies, "{is_sealed}");
            assert!(alone >= 4 * 5000 * 4, "all data blocks, several times");
        }
    }
}
