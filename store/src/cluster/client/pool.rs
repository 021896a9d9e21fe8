//! The ways to the peers: one connection to each, made when it is wanted and kept.
//!
//! A peer that cannot be reached is left alone for a second, then for two, and so on: to try again and again costs
//! every write and read a little.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::connection::Connection;
use crate::cluster::placement::members::{Member, MemberState};
use crate::error::{Error, ErrorKind, Result};
use crate::id::PeerId;
use crate::net::identity::Security;

/// How long a peer may be silent while it is asked something.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// How long an answer may take in all: others may be answered meanwhile.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// How long a connection may take to be made, with all that belongs to it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a peer that could not be reached is left alone at first, and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// What is known of the way to a peer.
#[derive(Default)]
enum ConnectionState {
    #[default]
    NotConnected,
    /// There is one, to this address.
    Open(Arc<Connection>, String),
    /// It is left alone until then, for this reason.
    BackedOff(Instant, String),
}

#[derive(Default)]
struct PeerConnection {
    state: tokio::sync::Mutex<ConnectionState>,
    /// Failures since it has last answered.
    failures: AtomicU32,
}

impl PeerConnection {
    /// The peer is left alone for a while.
    fn back_off(&self, reason: &str) -> ConnectionState {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).min(5);
        ConnectionState::BackedOff(
            Instant::now() + (BACKOFF.0 * (1 << failures)).min(BACKOFF.1),
            reason.into(),
        )
    }
}

/// The ways to all peers.
pub(crate) struct ConnectionPool {
    security: Security,
    all: Mutex<HashMap<PeerId, Arc<PeerConnection>>>,
}

impl ConnectionPool {
    pub(crate) fn new(security: Security) -> Arc<ConnectionPool> {
        Arc::new(ConnectionPool { security, all: Mutex::default() })
    }

    fn peer(&self, id: PeerId) -> Arc<PeerConnection> {
        let mut all = self.all.lock().expect("no code panics with the ways locked");
        all.entry(id).or_default().clone()
    }

    /// Forgets peers that are no members any more. One that is said to be up is not left alone any longer.
    pub(crate) fn update(&self, before: &[Member], members: &[Member]) {
        let before: HashMap<_, _> = before.iter().map(|member| (member.id, member)).collect();
        let now: HashMap<_, _> = members.iter().map(|member| (member.id, member)).collect();
        let mut all = self.all.lock().expect("no code panics with the ways locked");
        all.retain(|id, _| now.contains_key(id));
        for (id, peer) in &*all {
            let (before, now) = (before.get(id), now[id]);
            let is_back = now.state != MemberState::Down
                && before.is_none_or(|before| {
                    before.state == MemberState::Down || before.address != now.address
                });
            // Who holds it tries to connect just now.
            if is_back && let Ok(mut state) = peer.state.try_lock() {
                peer.failures.store(0, Ordering::Relaxed);
                if matches!(*state, ConnectionState::BackedOff(..)) {
                    *state = ConnectionState::NotConnected;
                }
            }
        }
    }

    /// A member is not left alone any longer.
    pub(crate) fn wake(&self, member: &Member) {
        // Who holds it tries to connect just now.
        if let Ok(mut state) = self.peer(member.id).state.try_lock()
            && matches!(*state, ConnectionState::BackedOff(..))
        {
            *state = ConnectionState::NotConnected;
        }
    }

    /// Asks a member, within a time. A connection that was there before may have ended since: then it is made
    /// again, once.
    pub(crate) async fn ask<T, F: Future<Output = Result<T>>>(
        self: &Arc<ConnectionPool>,
        member: &Member,
        question: impl Fn(Arc<Connection>) -> F,
    ) -> Result<T> {
        let peer = self.peer(member.id);
        let begin = Instant::now();
        let asked = async {
            let (connection, is_new) = self.connection(&peer, member).await?;
            match question(connection.clone()).await {
                Err(_) if !is_new && connection.is_lost() => {
                    question(self.connection(&peer, member).await?.0).await
                }
                result => result,
            }
        };
        tokio::pin!(asked);
        loop {
            match timeout(SILENCE_LIMIT, &mut asked).await {
                Ok(result) => {
                    if result.is_ok() {
                        peer.failures.store(0, Ordering::Relaxed);
                    }
                    return result;
                }
                // It works on what others have asked.
                Err(_) if begin.elapsed() < ANSWER_LIMIT && is_heard(&peer) => {}
                Err(_) => {
                    let reason = "it does not answer in time";
                    // Many are asked at once and fail together: that is one failure.
                    if let Ok(mut state) = peer.state.try_lock()
                        && !matches!(*state, ConnectionState::BackedOff(..))
                    {
                        *state = peer.back_off(reason);
                    }
                    return Err(unavailable(member, reason));
                }
            }
        }
    }

    /// The connection to a member, and whether it is new. What comes of a try is remembered, also if who asked
    /// has given up meanwhile.
    async fn connection(
        self: &Arc<ConnectionPool>,
        peer: &Arc<PeerConnection>,
        member: &Member,
    ) -> Result<(Arc<Connection>, bool)> {
        // Mostly there is one.
        if let Ok(state) = peer.state.try_lock()
            && let ConnectionState::Open(connection, address) = &*state
            && !connection.is_lost()
            && *address == member.address
        {
            return Ok((connection.clone(), false));
        }
        let (pool, peer, member) = (self.clone(), peer.clone(), member.clone());
        let connected = tokio::spawn(async move { pool.connect(&peer, &member).await });
        connected.await.unwrap_or_else(|error| {
            Err(Error::Internal { doing: "connecting to a peer", reason: error.to_string() })
        })
    }

    async fn connect(
        &self,
        peer: &PeerConnection,
        member: &Member,
    ) -> Result<(Arc<Connection>, bool)> {
        // One at a time: the others use what this one finds.
        let mut state = peer.state.lock().await;
        match &*state {
            ConnectionState::Open(connection, address)
                if !connection.is_lost() && *address == member.address =>
            {
                return Ok((connection.clone(), false));
            }
            ConnectionState::BackedOff(until, reason) if Instant::now() < *until => {
                return Err(unavailable(member, reason));
            }
            _ => {}
        }
        let opened =
            match timeout(CONNECT_TIMEOUT, Connection::open(&member.address, &self.security)).await
            {
                // Behind an address that was a peer's there may be another, with another disk.
                Ok(Ok(connection)) if connection.peer() != member.id => {
                    let reason = format!("it is {}, not {}", connection.peer(), member.id);
                    Err(unavailable(member, &reason))
                }
                Ok(opened) => opened,
                Err(_) => Err(unavailable(member, "it cannot be reached in time")),
            };
        match opened {
            Ok(connection) => {
                let connection = Arc::new(connection);
                *state = ConnectionState::Open(connection.clone(), member.address.clone());
                Ok((connection, true))
            }
            Err(error) => {
                *state = peer.back_off(&error.to_string());
                Err(error)
            }
        }
    }
}

/// Whether something came from the peer lately.
fn is_heard(peer: &PeerConnection) -> bool {
    match peer.state.try_lock().as_deref() {
        Ok(ConnectionState::Open(connection, _)) => {
            !connection.is_lost() && connection.silence() < SILENCE_LIMIT
        }
        _ => false,
    }
}

fn unavailable(member: &Member, reason: &str) -> Error {
    let (peer, kind) = (member.address.clone(), ErrorKind::Unavailable);
    Error::Peer { peer, kind, reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::{BACKOFF, ConnectionState, Duration, Instant, PeerConnection};

    #[test]
    fn a_peer_that_stays_away_is_asked_less_and_less() {
        let peer = PeerConnection::default();
        let mut last = Duration::ZERO;
        for _ in 0..10 {
            let ConnectionState::BackedOff(until, _) = peer.back_off("it is gone") else {
                panic!("it is away")
            };
            let time = until.duration_since(Instant::now());
            let (least, most) = (last.min(BACKOFF.1), BACKOFF.1);
            assert!(time + Duration::from_millis(100) > least && time <= most, "{time:?}");
            last = time * 2;
        }
        assert!(last > BACKOFF.1);
    }
}
