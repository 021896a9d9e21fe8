//! Room on the peers that a commit reserves before it stores anything, so that many at once do not all fail when they
//! are nearly done.
//!
//! Each peer is asked for a share by its weight. What some do not have is asked of the others, as a fragment that a
//! full peer refuses goes to another one, too. A reservation ends with the connection that it was made on, so nothing
//! is left of a client that dies.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;

use super::cluster::Cluster;
use super::connection::Connection;
use crate::cluster::placement::members::{Member, MemberState};
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::sys;

/// A peer may get more than its share: so much is reserved beyond what is needed, one part in so many.
const SLACK: u64 = 5;

/// How often what some do not have is asked of the others.
const ROUNDS: usize = 4;

/// How often it is tried, and the longest pause between two tries, times the number of the try.
const TRIES: u32 = 8;
const PAUSE: Duration = Duration::from_millis(80);

/// Any time up to the longest.
fn pause(attempt: u32) -> Duration {
    let random = sys::random::<2>().map_or(0, u16::from_le_bytes);
    PAUSE * attempt * u32::from(random) / u32::from(u16::MAX)
}

/// What is reserved on each peer, by all who share a cluster's connections.
#[derive(Default)]
pub(super) struct Reserved(Mutex<HashMap<PeerId, u64>>);

impl Reserved {
    fn lock(&self) -> MutexGuard<'_, HashMap<PeerId, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes or gives back so much, and returns what is reserved on the peer then.
    fn change(&self, peer: PeerId, change: impl FnOnce(u64) -> u64) -> u64 {
        let mut all = self.lock();
        let bytes = all.entry(peer).or_default();
        *bytes = change(*bytes);
        *bytes
    }
}

impl Cluster {
    /// Reserves room for so many bytes of blocks. Returns how much on which peer; fails, and reserves nothing, if the
    /// peers do not have it.
    ///
    /// Many who want the last room at once may each get a part of it, and none enough. All give it back then, and try
    /// again after pauses that differ.
    pub(super) async fn reserve(&self, bytes: u64) -> Result<Vec<(PeerId, u64)>> {
        for attempt in 1..TRIES {
            match self.try_reserve(bytes).await {
                Err(Error::NoRoom { .. }) => tokio::time::sleep(pause(attempt)).await,
                result => return result,
            }
        }
        self.try_reserve(bytes).await
    }

    async fn try_reserve(&self, bytes: u64) -> Result<Vec<(PeerId, u64)>> {
        let wanted = bytes + bytes / SLACK;
        let members = self.inner.members();
        let mut able: Vec<&Member> =
            members.all.iter().filter(|member| member.state == MemberState::Up).collect();
        let mut taken: Vec<(PeerId, u64)> = Vec::new();
        let (mut left, mut is_refused) = (wanted, false);
        for _ in 0..ROUNDS {
            if left == 0 || able.is_empty() {
                break;
            }
            let shares = shares(left, able.iter().map(|member| member.weight));
            let mut asked = JoinSet::new();
            for (member, share) in able.iter().zip(shares) {
                let (cluster, member) = (self.clone(), (*member).clone());
                asked.spawn(async move {
                    let answer = cluster.reserve_on(&member, share).await;
                    (member.id, share, answer)
                });
            }
            while let Some(answer) = asked.join_next().await {
                match answer {
                    Ok((peer, share, Ok(()))) => {
                        left = left.saturating_sub(share);
                        taken.push((peer, share));
                    }
                    Ok((peer, _, Err(error))) => {
                        tracing::debug!(%peer, %error, "a peer has no room for a share");
                        able.retain(|member| member.id != peer);
                        is_refused = true;
                    }
                    Err(error) => tracing::warn!(%error, "a reservation ends without an answer"),
                }
            }
        }
        if left > 0 && !is_refused {
            return Err(Error::TooFewPeers { peers: able.len() });
        }
        if left > 0 {
            self.release(&taken).await;
            return Err(Error::NoRoom { bytes, lacking: left });
        }
        Ok(taken)
    }

    async fn reserve_on(&self, member: &Member, bytes: u64) -> Result<()> {
        let reserved = &self.inner.reserved;
        let all = reserved.change(member.id, |before| before.saturating_add(bytes));
        let told = self.tell(member, all).await;
        if told.is_err() {
            reserved.change(member.id, |before| before.saturating_sub(bytes));
        }
        told
    }

    async fn tell(&self, member: &Member, bytes: u64) -> Result<()> {
        let ask = |connection: Arc<Connection>| async move { connection.reserve(bytes).await };
        self.inner.pool.ask(member, ask).await
    }

    /// Gives back what was reserved, as far as it was not used.
    pub(super) async fn release(&self, taken: &[(PeerId, u64)]) {
        let members = self.inner.members();
        for (peer, bytes) in taken {
            let all = self.inner.reserved.change(*peer, |before| before.saturating_sub(*bytes));
            if let Some(member) = members.all.iter().find(|member| member.id == *peer)
                && let Err(error) = self.tell(member, all).await
            {
                // It ends with the connection.
                tracing::debug!(%peer, %error, "a reservation is not given back");
            }
        }
    }
}

/// So many bytes by weight, each share rounded up.
fn shares(bytes: u64, weights: impl Iterator<Item = u64> + Clone) -> Vec<u64> {
    let all = weights.clone().map(|weight| u128::from(weight.max(1))).sum::<u128>().max(1);
    let share = |weight: u64| (u128::from(bytes) * u128::from(weight.max(1))).div_ceil(all) as u64;
    weights.map(share).collect()
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert, proptest};

    use super::shares;

    proptest! {
        #[test]
        fn shares_are_enough_and_not_much_more(
            bytes in any::<u64>(),
            weights in vec(any::<u64>(), 1..20),
        ) {
            let shares = shares(bytes, weights.iter().copied());
            let all: u128 = shares.iter().map(|share| u128::from(*share)).sum();
            prop_assert!(all >= bytes.into() && all <= u128::from(bytes) + weights.len() as u128);
        }
    }
}
