//! What the peers have already, so that it is not sent again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::task::JoinSet;

use super::cluster::Cluster;
use super::connection::Connection;
use crate::cluster::placement::matching;
use crate::cluster::placement::members::RankedMembers;
use crate::cluster::protocol::Held;
use crate::encoding::redundancy::{Redundancy, StoragePolicy};
use crate::id::BlobId;

/// Blobs in one question: the answer must fit into a message.
const QUERY_BATCH: usize = 1024;

/// For each member, the places of the blobs that it is asked about.
type Questions = BTreeMap<usize, Vec<usize>>;

impl Cluster {
    /// For each blob, whether it is stored already with this redundancy. The peers that would get its fragments are
    /// asked, and to ask renews the age of what they have.
    ///
    /// A yes means that all fragments of one encoding are durable, each on a peer of its own that has just
    /// answered. A no may be wrong: a fragment can be elsewhere.
    pub async fn known(&self, blobs: &[BlobId], policy: &StoragePolicy) -> Vec<bool> {
        let members = self.inner.members();
        let width = policy.redundancy.width();
        if width == 0 || width > members.all.len() {
            return vec![false; blobs.len()];
        }
        let places: Vec<Vec<usize>> = blobs
            .iter()
            .map(|blob| {
                let places = members.places(blob, width);
                let live = (0..width).filter_map(|place| places.first(place));
                live.map(|place| places.member(place)).collect()
            })
            .collect();
        // Most blobs are unknown, and then one peer knows that as well as all of them.
        let mut questions = Questions::new();
        for (number, places) in places.iter().enumerate() {
            places.iter().take(1).for_each(|at| questions.entry(*at).or_default().push(number));
        }
        let first = self.held(&members, blobs, questions, false).await;
        let mut questions = Questions::new();
        for (number, places) in places.iter().enumerate().filter(|(n, _)| !first[*n].is_empty()) {
            places.iter().for_each(|at| questions.entry(*at).or_default().push(number));
        }
        let held = self.held(&members, blobs, questions, true).await;
        held.iter().map(|held| is_whole(held, policy.redundancy)).collect()
    }

    /// For each blob, which members hold what of it, as far as they are asked. With `renew` that is to stay.
    async fn held(
        &self,
        members: &Arc<RankedMembers>,
        blobs: &[BlobId],
        questions: Questions,
        renew: bool,
    ) -> Vec<Vec<(usize, Held)>> {
        let mut asked = JoinSet::new();
        for (at, numbers) in questions {
            for numbers in numbers.chunks(QUERY_BATCH) {
                let names: Arc<[BlobId]> = numbers.iter().map(|number| blobs[*number]).collect();
                let (inner, members, numbers) =
                    (self.inner.clone(), members.clone(), numbers.to_vec());
                asked.spawn(async move {
                    let have = |connection: Arc<Connection>| {
                        let names = names.clone();
                        async move { connection.have(&names, renew).await }
                    };
                    (at, numbers, inner.pool.ask(&members.all[at], have).await)
                });
            }
        }
        let mut held = vec![Vec::new(); blobs.len()];
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok((at, numbers, Ok(answer))) => {
                    for (number, fragments) in numbers.into_iter().zip(answer) {
                        held[number].extend(fragments.into_iter().map(|one| (at, one)));
                    }
                }
                Ok((_, _, Err(error))) => {
                    tracing::debug!(%error, "a peer does not tell what it has")
                }
                Err(error) => tracing::warn!(%error, "a question ends without an answer"),
            }
        }
        held
    }
}

/// Whether there is one encoding with this redundancy of which all is there, on as many peers.
fn is_whole(held: &[(usize, Held)], redundancy: Redundancy) -> bool {
    let (data, parity) = match redundancy {
        Redundancy::Replicas(_) => (1, 0),
        Redundancy::ReedSolomon { data, parity } => (data, parity),
    };
    let mut encodings: HashMap<BlobId, Vec<(usize, u8)>> = HashMap::new();
    for (peer, one) in held.iter().filter(|(_, one)| one.data == data && one.parity == parity) {
        encodings.entry(one.encoding).or_default().push((*peer, one.index));
    }
    encodings.values().any(|places| match redundancy {
        Redundancy::Replicas(copies) => {
            let mut peers: Vec<_> = places.iter().map(|(peer, _)| peer).collect();
            peers.sort_unstable();
            peers.dedup();
            peers.len() >= copies.into()
        }
        Redundancy::ReedSolomon { .. } => is_spread(places, data + parity),
    })
}

/// Whether each index below `width` can be had from a peer of its own.
fn is_spread(held: &[(usize, u8)], width: u8) -> bool {
    let mut peers: BTreeMap<usize, u32> = BTreeMap::new();
    // A peer may send any index.
    for (peer, index) in held.iter().filter(|(_, index)| *index < width) {
        *peers.entry(*peer).or_default() |= 1 << index;
    }
    let holders: Vec<u32> = peers.into_values().collect();
    matching::size(&holders) == usize::from(width)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{prop_assert_eq, proptest};

    use super::{BlobId, Held, Redundancy, is_spread, is_whole};
    use crate::encoding::fragment::Kind;

    fn held(name: &[u8], data: u8, parity: u8, index: u8) -> Held {
        Held { encoding: BlobId::of(name), data, parity, index, kind: Kind::Content, len: 1 }
    }

    #[test]
    fn only_all_of_one_encoding_counts() {
        let code = Redundancy::ReedSolomon { data: 2, parity: 1 };
        let mut all: Vec<_> = (0..3).map(|n| (n, held(b"one", 2, 1, n as u8))).collect();
        assert!(is_whole(&all, code));
        assert!(!is_whole(&all, Redundancy::ReedSolomon { data: 2, parity: 2 }));
        assert!(!is_whole(&all, Redundancy::Replicas(2)));
        all[1].1.encoding = BlobId::of(b"other");
        assert!(!is_whole(&all, code), "two encodings do not make one");
        let copies = [(0, held(b"c", 1, 0, 0)), (0, held(b"c", 1, 0, 0)), (4, held(b"c", 1, 0, 0))];
        assert!(is_whole(&copies, Redundancy::Replicas(2)));
        assert!(!is_whole(&copies, Redundancy::Replicas(3)), "a peer counts once");
        assert!(!is_whole(&[], Redundancy::NONE));
    }

    proptest! {
        #[test]
        fn each_index_needs_a_peer_of_its_own(places in vec((0usize..4, 0u8..5), 0..8)) {
            let has = |peer, index| places.contains(&(peer, index));
            let mut found = false;
            for (a, b, c) in (0..64).map(|n| (n / 16, n / 4 % 4, n % 4)) {
                found |= a != b && b != c && a != c && has(a, 0) && has(b, 1) && has(c, 2);
            }
            prop_assert_eq!(is_spread(&places, 3), found);
        }
    }
}
