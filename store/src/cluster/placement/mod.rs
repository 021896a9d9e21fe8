//! Placement: which peers hold a blob. Weighted rendezvous hashing, spread over failure domains.
//!
//! - **Ranking.** Every peer has a score for every blob, drawn from both names. A peer with twice
//!   the capacity wins twice as often. The order of the scores is the order in which peers are
//!   asked to hold the blob's fragments.
//! - **No table.** Every process that knows the same peers computes the same order.
//! - **Little movement.** A peer that joins takes its share from all others. A peer that leaves
//!   gives its share to all others. Nothing else moves.
//! - **Failure domains.** Peers that would fail together are a *domain*. The order goes in rounds:
//!   the best peer of each domain comes before the second best of any.
//!
//! `members` holds the members of a cluster and applies the ranking to them. `ranking` computes the
//! first places of a blob without a sort of all peers. `matching` assigns fragments to holders, at
//! most one to each.

pub(crate) mod matching;
pub(crate) mod members;
mod ranking;

pub use members::{Member, MemberState};
pub use ranking::Ranking;

use std::collections::HashMap;

use crate::id::{BlobId, PeerId};

/// The properties of a peer that placement uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The peer.
    pub id: PeerId,
    /// Its share of the blobs, relative to the weights of the others; for example bytes. A peer
    /// with weight 0 comes after all others.
    pub weight: u64,
    /// Its failure domain: the peers that fail together.
    pub domain: String,
}

/// Ranks the candidates for a blob. Returns their positions in the slice, best first.
pub fn rank(blob: &BlobId, candidates: &[Candidate]) -> Vec<usize> {
    let mut scored: Vec<(f64, usize)> =
        candidates.iter().enumerate().map(|(at, one)| (score(blob, one), at)).collect();
    scored.sort_by(|(one, at), (other, other_at)| {
        other.total_cmp(one).then_with(|| candidates[*at].id.cmp(&candidates[*other_at].id))
    });
    let mut seen: HashMap<&str, usize> = HashMap::new();
    let mut rounds: Vec<(usize, usize)> = scored
        .into_iter()
        .map(|(_, at)| {
            let round = seen.entry(&candidates[at].domain).or_default();
            *round += 1;
            (*round, at)
        })
        .collect();
    // The sort is stable: within a round the scores decide.
    rounds.sort_by_key(|(round, at)| (candidates[*at].weight == 0, *round));
    rounds.into_iter().map(|(_, at)| at).collect()
}

/// Computes `-weight / ln(u)` with `u` uniform between 0 and 1. The chance of the highest score is
/// then proportional to the weight.
fn score(blob: &BlobId, candidate: &Candidate) -> f64 {
    let mut names = [0; 48];
    names[..32].copy_from_slice(blob.as_bytes());
    names[32..].copy_from_slice(candidate.id.as_bytes());
    let mut draw = [0; 8];
    draw.copy_from_slice(&blake3::hash(&names).as_bytes()[..8]);
    // With 52 bits, adding half a step is exact and keeps `uniform` away from 0 and 1.
    let uniform = ((u64::from_le_bytes(draw) >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
    candidate.weight as f64 / -uniform.ln()
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::{Candidate, rank};
    use crate::id::{BlobId, PeerId};

    fn candidate(number: u64, weight: u64, domain: u64) -> Candidate {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&number.to_le_bytes());
        Candidate { id: PeerId::from_bytes(id), weight, domain: domain.to_string() }
    }

    fn blob(number: u64) -> BlobId {
        BlobId::of(&number.to_le_bytes())
    }

    fn order(blob_number: u64, candidates: &[Candidate]) -> Vec<PeerId> {
        let ranked = rank(&blob(blob_number), candidates);
        ranked.into_iter().map(|at| candidates[at].id).collect()
    }

    proptest! {
        #[test]
        fn the_order_does_not_depend_on_the_input_order_and_has_each_peer_once(
            weights in vec((0u64..1000, 0u64..5), 1..20),
            number in any::<u64>(),
            rotation in any::<usize>(),
        ) {
            let all: Vec<_> = weights
                .iter()
                .zip(0..)
                .map(|((weight, domain), n)| candidate(n, *weight, *domain))
                .collect();
            let mut rotated = all.clone();
            rotated.rotate_left(rotation % all.len());
            let found = order(number, &all);
            prop_assert_eq!(&found, &order(number, &rotated));
            let mut sorted = found;
            sorted.sort_unstable();
            sorted.dedup();
            prop_assert_eq!(sorted.len(), all.len());
        }

        #[test]
        fn domains_come_in_rounds(sizes in vec(1usize..5, 1..8), number in any::<u64>()) {
            let domains = || sizes.iter().enumerate();
            let all: Vec<_> = domains()
                .flat_map(|(domain, size)| (0..*size).map(move |n| (domain as u64, n as u64)))
                .map(|(domain, n)| candidate(domain * 100 + n, 1 + n, domain))
                .collect();
            let ranked = rank(&blob(number), &all);
            let first: std::collections::BTreeSet<_> =
                ranked[..sizes.len()].iter().map(|at| &all[*at].domain).collect();
            prop_assert_eq!(first.len(), sizes.len());
        }

        #[test]
        fn a_peer_that_leaves_moves_nothing_else(
            count in 2u64..20,
            gone in any::<u64>(),
            number in any::<u64>(),
        ) {
            let all: Vec<_> = (0..count).map(|n| candidate(n, 100 + n, n)).collect();
            let mut fewer = all.clone();
            let gone = fewer.remove((gone % count) as usize).id;
            let mut expected = order(number, &all);
            expected.retain(|id| *id != gone);
            prop_assert_eq!(order(number, &fewer), expected);
        }

        #[test]
        fn a_peer_with_weight_0_comes_last(count in 1u64..20, number in any::<u64>()) {
            let mut all: Vec<_> = (1..=count).map(|n| candidate(n, 100 + n, n % 2)).collect();
            all.push(candidate(0, 0, 7));
            prop_assert!(order(number, &all).last() == Some(&all.last().unwrap().id));
        }
    }

    #[test]
    fn shares_follow_the_weights() {
        let all: Vec<_> =
            [100, 100, 200, 400].into_iter().zip(0..).map(|(w, n)| candidate(n, w, n)).collect();
        let mut wins = [0; 4];
        for number in 0..20_000 {
            wins[rank(&blob(number), &all)[0]] += 1;
        }
        for (wins, expected) in wins.into_iter().zip([2500, 2500, 5000, 10_000]) {
            assert!((expected - 250..expected + 250).contains(&wins), "{wins} of {expected}");
        }
    }
}
