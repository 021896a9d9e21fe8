//! Which peers hold a blob: rendezvous hashing, weighted by capacity, spread over failure domains.
//!
//! Every peer has a score for every blob, drawn from both names: a peer with twice the capacity wins twice as
//! often. The order of the scores is the order in which peers are asked to hold the blob's parts. It is the same
//! for everybody who knows the same peers, and needs no table. A peer that joins takes its share from all others, one
//! that leaves gives its share to all others, and nothing else moves.
//!
//! Peers that would fail together are a *domain*. The order goes round the domains: the best peer of each comes
//! before the second best of any.

pub(crate) mod matching;
pub(crate) mod members;

pub use members::{Member, MemberState};

use std::collections::HashMap;

use crate::id::{BlobId, PeerId};

/// What placement has to know of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The peer.
    pub id: PeerId,
    /// Its share of the blobs, as a number to be compared with that of others: bytes, say. With 0 it comes
    /// after all others.
    pub weight: u64,
    /// What it fails together with.
    pub domain: String,
}

/// The candidates in the order in which they are to hold a part of this blob, as places in the slice.
pub fn rank(blob: &BlobId, candidates: &[Candidate]) -> Vec<usize> {
    let mut scored: Vec<(f64, usize)> =
        candidates.iter().enumerate().map(|(at, one)| (score(blob, one), at)).collect();
    scored.sort_by(|(one, at), (other, behind)| {
        other.total_cmp(one).then_with(|| candidates[*at].id.cmp(&candidates[*behind].id))
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
    // Stable: within a round the scores decide.
    rounds.sort_by_key(|(round, at)| (candidates[*at].weight == 0, *round));
    rounds.into_iter().map(|(_, at)| at).collect()
}

/// With `-weight / ln(u)`, `u` uniform between 0 and 1, the chance of the highest score is proportional to the
/// weight.
fn score(blob: &BlobId, candidate: &Candidate) -> f64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(blob.as_bytes()).update(candidate.id.as_bytes());
    let mut draw = [0; 8];
    draw.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    // With 52 bits half a step more is still exact, and keeps it away from 0 and 1.
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
        fn everybody_finds_the_same_order_and_each_peer_once(
            weights in vec((0u64..1000, 0u64..5), 1..20),
            number in any::<u64>(),
            turn in any::<usize>(),
        ) {
            let all: Vec<_> =
                weights.iter().zip(0..).map(|((weight, domain), n)| candidate(n, *weight, *domain)).collect();
            let mut turned = all.clone();
            turned.rotate_left(turn % all.len());
            let found = order(number, &all);
            prop_assert_eq!(&found, &order(number, &turned));
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
        fn one_that_leaves_moves_nothing_else(count in 2u64..20, gone in any::<u64>(), number in any::<u64>()) {
            let all: Vec<_> = (0..count).map(|n| candidate(n, 100 + n, n)).collect();
            let mut fewer = all.clone();
            let gone = fewer.remove((gone % count) as usize).id;
            let mut expected = order(number, &all);
            expected.retain(|id| *id != gone);
            prop_assert_eq!(order(number, &fewer), expected);
        }

        #[test]
        fn one_without_weight_comes_last(count in 1u64..20, number in any::<u64>()) {
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
