//! Reserves space on the peers before a commit stores anything, so that many commits at once do not
//! all fail when they are nearly done.
//!
//! 1. Each peer that is up is asked for a share by its weight.
//! 2. The client asks the other peers for the shares that full peers refuse. A fragment that a full
//!    peer refuses goes to another peer, too.
//! 3. A client that cannot reserve enough space releases everything and retries after a random
//!    pause. Without the release, many clients could each hold a part of the last space, and none
//!    enough.
//!
//! A reservation belongs to a connection and ends with it, so a client that dies leaves none.

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

/// A peer may get more than its share of the fragments, so one part in `SLACK_DIVISOR` is reserved
/// beyond what is needed.
const SLACK_DIVISOR: u64 = 5;

/// The rounds in which refused shares are asked of other peers.
const MAX_ROUNDS: usize = 4;

/// The attempts to reserve.
const MAX_ATTEMPTS: u32 = 8;

/// The longest pause before an attempt, for each attempt that failed.
const MAX_PAUSE: Duration = Duration::from_millis(80);

/// A random pause, at most [`MAX_PAUSE`] times the number of the attempt.
fn pause(attempt: u32) -> Duration {
    let random = sys::random::<2>().map_or(0, u16::from_le_bytes);
    MAX_PAUSE * attempt * u32::from(random) / u32::from(u16::MAX)
}

/// The bytes that are reserved on each peer, by all users of a cluster's connections together.
#[derive(Default)]
pub(super) struct Reserved(Mutex<HashMap<PeerId, u64>>);

impl Reserved {
    fn lock(&self) -> MutexGuard<'_, HashMap<PeerId, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the bytes that are reserved on a peer, and returns the result.
    fn change(&self, peer: PeerId, change: impl FnOnce(u64) -> u64) -> u64 {
        let mut all = self.lock();
        let bytes = all.entry(peer).or_default();
        *bytes = change(*bytes);
        *bytes
    }
}

/// The bytes that each peer keeps free.
pub(crate) type Reservation = Vec<(PeerId, u64)>;

impl Cluster {
    /// Reserves space for `bytes` bytes of blocks. Returns how much is reserved on which peer. If
    /// the peers do not have enough space it fails and reserves nothing.
    ///
    /// Clients that want the last space at the same time may each get a part of it, and none
    /// enough. Each of them releases its part and retries after a random pause.
    pub(super) async fn reserve(&self, bytes: u64) -> Result<Reservation> {
        for attempt in 1..MAX_ATTEMPTS {
            match self.try_reserve(bytes).await {
                Err(Error::NoRoom { .. }) => tokio::time::sleep(pause(attempt)).await,
                result => return result,
            }
        }
        self.try_reserve(bytes).await
    }

    async fn try_reserve(&self, bytes: u64) -> Result<Reservation> {
        let wanted = bytes + bytes / SLACK_DIVISOR;
        let members = self.inner.members();
        let mut able: Vec<&Member> =
            members.all.iter().filter(|member| member.state == MemberState::Up).collect();
        let mut taken = Reservation::new();
        let (mut left, mut is_refused) = (wanted, false);
        for _ in 0..MAX_ROUNDS {
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
                        tracing::debug!(%peer, %error, "a peer refused a share of a reservation");
                        able.retain(|member| member.id != peer);
                        is_refused = true;
                    }
                    Err(error) => tracing::warn!(%error, "a reservation task panicked"),
                }
            }
        }
        if left > 0 && !is_refused {
            self.release(&taken).await;
            return Err(Error::TooFewPeers { needed: 1, peers: able.len() });
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
        let answer = self.set_reserved(member, all).await;
        if answer.is_err() {
            reserved.change(member.id, |before| before.saturating_sub(bytes));
        }
        answer
    }

    async fn set_reserved(&self, member: &Member, bytes: u64) -> Result<()> {
        let ask = |connection: Arc<Connection>| async move { connection.reserve(bytes).await };
        self.inner.pool.ask(member, ask).await
    }

    /// Releases what was reserved and not used.
    pub(super) async fn release(&self, taken: &[(PeerId, u64)]) {
        let members = self.inner.members();
        for (peer, bytes) in taken {
            let all = self.inner.reserved.change(*peer, |before| before.saturating_sub(*bytes));
            if let Some(member) = members.all.iter().find(|member| member.id == *peer)
                && let Err(error) = self.set_reserved(member, all).await
            {
                // The reservation ends with the connection anyway.
                tracing::debug!(%peer, %error, "failed to release a reservation");
            }
        }
    }
}

/// Divides `bytes` by weight. Each share is rounded up.
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
        fn shares_add_up_to_at_least_the_bytes_and_little_more(
            bytes in any::<u64>(),
            weights in vec(any::<u64>(), 1..20),
        ) {
            let shares = shares(bytes, weights.iter().copied());
            let all: u128 = shares.iter().map(|share| u128::from(*share)).sum();
            prop_assert!(all >= bytes.into() && all <= u128::from(bytes) + weights.len() as u128);
        }
    }
}
