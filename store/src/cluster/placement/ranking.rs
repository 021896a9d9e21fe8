//! The first places of a blob's ranking, without a sort of all peers.
//!
//! A blob needs a few places of many, so the rest of the order is computed only when a place is
//! refused. The result is that of [`rank`]: both draw one score for each peer, but [`Ranking::first`]
//! keeps only the best of each failure domain, and sorts only what it returns.

use std::cmp::Ordering;
use std::collections::HashMap;

use super::{Candidate, rank, score};
use crate::id::BlobId;

/// If the places asked for need more rounds over the failure domains than this, everything is
/// sorted.
const MOST_ROUNDS: usize = 4;

/// Candidates that are prepared for many rankings.
#[derive(Debug)]
pub struct Ranking {
    candidates: Vec<Candidate>,
    /// The failure domain of each candidate, as a number.
    domains: Vec<usize>,
    /// The number of failure domains.
    domain_count: usize,
    /// How many candidates with a weight the first rounds have: one round, two rounds, and so on.
    in_rounds: Vec<usize>,
}

/// A candidate that is among the best of its domain.
#[derive(Clone, Copy)]
struct Scored {
    round: usize,
    score: f64,
    at: usize,
}

impl Ranking {
    /// Prepares the candidates.
    pub fn new(candidates: Vec<Candidate>) -> Ranking {
        let mut numbers: HashMap<&str, usize> = HashMap::new();
        let mut domains = Vec::with_capacity(candidates.len());
        for one in &candidates {
            let next = numbers.len();
            domains.push(*numbers.entry(&one.domain).or_insert(next));
        }
        let domain_count = numbers.len();
        let mut sizes = vec![0; domain_count];
        let with_weight = candidates.iter().zip(&domains).filter(|(one, _)| one.weight > 0);
        with_weight.for_each(|(_, domain)| sizes[*domain] += 1);
        let up_to = |rounds: usize| sizes.iter().map(|size| rounds.min(*size)).sum();
        let in_rounds = (1..=MOST_ROUNDS).map(up_to).collect();
        Ranking { candidates, domains, domain_count, in_rounds }
    }

    /// The candidates, in the order in which they were given.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// The failure domain of the candidate at this position, as a number.
    pub(super) fn domain(&self, at: usize) -> usize {
        self.domains[at]
    }

    /// All candidates for a blob: their positions, best first.
    pub fn all(&self, blob: &BlobId) -> Vec<usize> {
        rank(blob, &self.candidates)
    }

    /// The first `count` candidates for a blob, or all if there are fewer.
    pub fn first(&self, blob: &BlobId, count: usize) -> Vec<usize> {
        let rounds = 1 + self.in_rounds.partition_point(|inside| *inside < count);
        if rounds > MOST_ROUNDS || count == 0 {
            let mut all = self.all(blob);
            all.truncate(count);
            return all;
        }
        let mut best = self.best_of_domains(blob, rounds);
        if best.len() > count {
            best.select_nth_unstable_by(count - 1, |one, other| self.compare(one, other));
            best.truncate(count);
        }
        best.sort_unstable_by(|one, other| self.compare(one, other));
        best.into_iter().map(|one| one.at).collect()
    }

    /// The best candidates with a weight of each domain, at most `rounds` of each.
    fn best_of_domains(&self, blob: &BlobId, rounds: usize) -> Vec<Scored> {
        let mut best: Vec<Option<Scored>> = vec![None; self.domain_count * rounds];
        for (at, (candidate, domain)) in self.candidates.iter().zip(&self.domains).enumerate() {
            if candidate.weight == 0 {
                continue;
            }
            let mut next = Scored { round: 0, score: score(blob, candidate), at };
            for (round, known) in best[domain * rounds..][..rounds].iter_mut().enumerate() {
                next.round = round;
                match known {
                    Some(known) if self.compare_scores(known, &next).is_lt() => {}
                    Some(known) => std::mem::swap(known, &mut next),
                    None => {
                        *known = Some(next);
                        break;
                    }
                }
            }
        }
        best.into_iter().flatten().collect()
    }

    /// The order of the ranking.
    fn compare(&self, one: &Scored, other: &Scored) -> Ordering {
        one.round.cmp(&other.round).then_with(|| self.compare_scores(one, other))
    }

    /// The better score first. The ids decide between equal ones.
    fn compare_scores(&self, one: &Scored, other: &Scored) -> Ordering {
        let id = |one: &Scored| &self.candidates[one.at].id;
        other.score.total_cmp(&one.score).then_with(|| id(one).cmp(id(other)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert_eq, proptest};

    use super::{Candidate, Ranking};
    use crate::id::{BlobId, PeerId};

    proptest! {
        /// Also with few domains, domains of one peer, and peers without a weight.
        #[test]
        fn the_first_places_are_those_of_the_full_order(
            peers in vec((0u64..4, 0u64..12), 1..80),
            domains in 1u64..12,
            number in any::<u64>(),
        ) {
            let candidate = |(at, (weight, domain)): (usize, &(u64, u64))| Candidate {
                id: PeerId::from_bytes([at as u8; 16]),
                weight: *weight,
                domain: (domain % domains).to_string(),
            };
            let ranking = Ranking::new(peers.iter().enumerate().map(candidate).collect());
            let blob = BlobId::of(&number.to_le_bytes());
            let all = ranking.all(&blob);
            for count in 0..=peers.len() + 1 {
                let expected = &all[..count.min(all.len())];
                prop_assert_eq!(ranking.first(&blob, count), expected, "the first {}", count);
            }
        }
    }
}
