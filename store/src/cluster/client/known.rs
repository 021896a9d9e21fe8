//! Asks the peers which blobs they already have, so that these blobs are not sent again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::task::JoinSet;

use super::cluster::Cluster;
use super::connection::Connection;
use crate::cluster::placement::matching;
use crate::cluster::placement::members::RankedMembers;
use crate::cluster::protocol::Held;
use crate::collection::CollectionNumber;
use crate::encoding::redundancy::{Redundancy, StoragePolicy};
use crate::error::ErrorKind;
use crate::id::BlobId;

/// The most blobs in one query. The answer must fit into a message.
const QUERY_BATCH: usize = 1024;

/// For each member, by index, the indexes of the blobs that it is asked about.
type Queries = BTreeMap<usize, Vec<usize>>;

impl Cluster {
    /// Returns, for each blob, whether it is already stored with the policy's redundancy. Asks the
    /// peers that would get the fragments, resets the idle timers of the fragments that they have, and
    /// raises their stamps.
    ///
    /// `true` means that all fragments of one encoding are durable, each on a different peer that
    /// has just answered, and that a client or a supervisor has sealed the encoding. A peer cannot
    /// make others believe that it has content that nobody stored.
    ///
    /// `false` may be wrong: a fragment can be on a peer that was not asked.
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
        // Most blobs are unknown to all peers. So first one peer is asked for each blob, without
        // renewal, and then all peers of the blobs of which that peer has a fragment.
        let mut queries = Queries::new();
        for (number, places) in places.iter().enumerate() {
            places.iter().take(1).for_each(|at| queries.entry(*at).or_default().push(number));
        }
        let first = self.held(&members, blobs, queries, None).await;
        let mut queries = Queries::new();
        for (number, places) in places.iter().enumerate().filter(|(n, _)| !first[*n].is_empty()) {
            places.iter().for_each(|at| queries.entry(*at).or_default().push(number));
        }
        let held = self.held(&members, blobs, queries, Some(self.inner.stamp())).await;
        let seals = &self.inner.seals;
        let is_known = |(blob, mut held): (&BlobId, Vec<(usize, Held)>)| {
            held.retain(|(_, one)| one.is_sealed(blob, seals));
            is_whole(&held, policy.redundancy)
        };
        blobs.iter().zip(held).map(is_known).collect()
    }

    /// Returns, for each blob, the fragments that the queried members hold, with the index of the
    /// member. With `renew`, the members reset the idle timers of these fragments, and raise their stamps. A member that
    /// fails counts as one that holds nothing.
    async fn held(
        &self,
        members: &Arc<RankedMembers>,
        blobs: &[BlobId],
        queries: Queries,
        renew: Option<CollectionNumber>,
    ) -> Vec<Vec<(usize, Held)>> {
        let mut tasks = JoinSet::new();
        for (at, numbers) in queries {
            for numbers in numbers.chunks(QUERY_BATCH) {
                let names: Arc<[BlobId]> = numbers.iter().map(|number| blobs[*number]).collect();
                let (inner, members, numbers) =
                    (self.inner.clone(), members.clone(), numbers.to_vec());
                tasks.spawn(async move {
                    let have = |connection: Arc<Connection>| {
                        let names = names.clone();
                        async move { connection.have(&names, renew).await }
                    };
                    (at, numbers, inner.pool.ask(&members.all[at], have).await)
                });
            }
        }
        let mut held = vec![Vec::new(); blobs.len()];
        while let Some(answer) = tasks.join_next().await {
            match answer {
                Ok((at, numbers, Ok(answer))) => {
                    for (number, fragments) in numbers.into_iter().zip(answer) {
                        held[number].extend(fragments.into_iter().map(|one| (at, one)));
                    }
                }
                Ok((at, numbers, Err(error))) => {
                    tracing::debug!(%error, "a peer did not report which fragments it has");
                    if error.kind() == ErrorKind::Corrupt {
                        self.inner.mark_suspect(&members.all[at], &blobs[numbers[0]]);
                    }
                }
                Err(error) => tracing::warn!(%error, "a query ended without an answer"),
            }
        }
        held
    }
}

/// Returns whether one encoding with this redundancy is complete, with each fragment on a different
/// peer.
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

/// Returns whether each index below `width` can be assigned a different peer that holds it.
fn is_spread(held: &[(usize, u8)], width: u8) -> bool {
    let mut peers: BTreeMap<usize, u32> = BTreeMap::new();
    // The indexes come from the peers and may be out of range.
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
    use crate::encoding::Seal;
    use crate::encoding::fragment::Kind;

    fn held(name: &[u8], data: u8, parity: u8, index: u8) -> Held {
        let (kind, len, seal) = (Kind::Content, 1, Seal::NONE);
        Held { encoding: BlobId::of(name), data, parity, index, kind, len, seal }
    }

    #[test]
    fn only_all_of_one_encoding_counts() {
        let code = Redundancy::ReedSolomon { data: 2, parity: 1 };
        let mut all: Vec<_> = (0..3).map(|n| (n, held(b"one", 2, 1, n as u8))).collect();
        assert!(is_whole(&all, code));
        assert!(!is_whole(&all, Redundancy::ReedSolomon { data: 2, parity: 2 }));
        assert!(!is_whole(&all, Redundancy::Replicas(2)));
        all[1].1.encoding = BlobId::of(b"other");
        assert!(!is_whole(&all, code), "fragments of two encodings do not add up");
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
