//! `ConnectionPool`: one connection to each peer, opened on demand and kept.
//!
//! A peer that cannot be reached is left alone for 1 s, then 2 s, doubling to 30 s. Without this
//! back-off, every read and write would pay for another failed attempt.
//!
//! | limit | value |
//! |---|---|
//! | opening a connection, with TLS and hello | [`CONNECT_TIMEOUT`] |
//! | silence of a peer that owes an answer | [`SILENCE_LIMIT`] |
//! | one answer, while the peer answers others | [`ANSWER_LIMIT`] |
//! | a connection without requests | `IDLE_LIMIT` in `net::connection` |
//!
//! A client of a thousand peers may have as many connections. So the pool raises the process's limit
//! of open files as far as the system permits.

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
use crate::sys;

/// How long a peer that owes an answer may be silent.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// How long one answer may take while the peer answers other requests.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// How long opening a connection may take, with TLS and hello.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The first and the longest back-off of a peer that could not be reached.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// The state of the connection to a peer.
#[derive(Default)]
enum ConnectionState {
    #[default]
    NotConnected,
    /// The connection is open to this address.
    Open(Arc<Connection>, String),
    /// The peer is left alone until this time, for this reason.
    BackedOff(Instant, String),
}

#[derive(Default)]
struct PeerConnection {
    state: tokio::sync::Mutex<ConnectionState>,
    /// Failures since its last answer.
    failures: AtomicU32,
}

impl PeerConnection {
    /// Counts a failure. Returns the state that leaves the peer alone for a while.
    fn back_off(&self, reason: &str) -> ConnectionState {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).min(5);
        ConnectionState::BackedOff(
            Instant::now() + (BACKOFF.0 * (1 << failures)).min(BACKOFF.1),
            reason.into(),
        )
    }
}

/// The connections to all peers.
pub(crate) struct ConnectionPool {
    security: Security,
    all: Mutex<HashMap<PeerId, Arc<PeerConnection>>>,
}

impl ConnectionPool {
    pub(crate) fn new(security: Security) -> Arc<ConnectionPool> {
        if let Err(error) = sys::raise_open_files() {
            tracing::debug!(%error, "cannot read how many files this process may open");
        }
        Arc::new(ConnectionPool { security, all: Mutex::default() })
    }

    fn peer(&self, id: PeerId) -> Arc<PeerConnection> {
        let mut all = self.all.lock().expect("no code panics with the pool locked");
        all.entry(id).or_default().clone()
    }

    /// Drops the connections of peers that are not members any more. Ends the back-off of peers
    /// that are back.
    pub(crate) fn update(&self, before: &[Member], members: &[Member]) {
        let before: HashMap<_, _> = before.iter().map(|member| (member.id, member)).collect();
        let now: HashMap<_, _> = members.iter().map(|member| (member.id, member)).collect();
        let mut all = self.all.lock().expect("no code panics with the pool locked");
        all.retain(|id, _| now.contains_key(id));
        for (id, peer) in &*all {
            let (before, now) = (before.get(id), now[id]);
            let is_back = now.state != MemberState::Down
                && before.is_none_or(|before| {
                    before.state == MemberState::Down || before.address != now.address
                });
            // If the state is locked, another task is connecting.
            if is_back && let Ok(mut state) = peer.state.try_lock() {
                peer.failures.store(0, Ordering::Relaxed);
                if matches!(*state, ConnectionState::BackedOff(..)) {
                    *state = ConnectionState::NotConnected;
                }
            }
        }
    }

    /// Ends the back-off of a member.
    pub(crate) fn wake(&self, member: &Member) {
        // If the state is locked, another task is connecting.
        if let Ok(mut state) = self.peer(member.id).state.try_lock()
            && matches!(*state, ConnectionState::BackedOff(..))
        {
            *state = ConnectionState::NotConnected;
        }
    }

    /// Asks a member, within [`SILENCE_LIMIT`] and [`ANSWER_LIMIT`]. If a connection that existed
    /// before has ended, it is opened again, once.
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
                // The peer is answering other requests.
                Err(_) if begin.elapsed() < ANSWER_LIMIT && has_answered_recently(&peer) => {}
                Err(_) => {
                    let reason = "it does not answer in time";
                    // Requests that time out together count as one failure.
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

    /// The connection to a member, and whether it is new. A task of its own connects, so the result
    /// is kept even if the caller has given up.
    async fn connection(
        self: &Arc<ConnectionPool>,
        peer: &Arc<PeerConnection>,
        member: &Member,
    ) -> Result<(Arc<Connection>, bool)> {
        // The common case: there is a connection.
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
        // One task connects at a time. The others use its result.
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
                // At the address of a peer there may be another peer. With TLS, the certificate
                // proves the id.
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

/// Whether the peer has sent something recently.
fn has_answered_recently(peer: &PeerConnection) -> bool {
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
    fn a_peer_that_stays_away_is_asked_less_often() {
        let peer = PeerConnection::default();
        let mut last = Duration::ZERO;
        for _ in 0..10 {
            let ConnectionState::BackedOff(until, _) = peer.back_off("it is gone") else {
                panic!("the peer is not backed off")
            };
            let time = until.duration_since(Instant::now());
            let (least, most) = (last.min(BACKOFF.1), BACKOFF.1);
            assert!(time + Duration::from_millis(100) > least && time <= most, "{time:?}");
            last = time * 2;
        }
        assert!(last > BACKOFF.1);
    }
}
