//! The connections of each peer to a catalog: few.
//!
//! A peer needs one connection, for its heartbeats. One more than [`MAX_CONNECTIONS`] ends the
//! oldest of the same peer. So a peer that comes back after a failure of the network is served,
//! although the catalog has not noticed that its earlier connections are gone.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::oneshot;

use crate::id::PeerId;

/// The connections that the catalog keeps of one peer.
pub(super) const MAX_CONNECTIONS: usize = 4;

/// The connections of all peers, the oldest first.
#[derive(Default)]
pub(super) struct PeerConnections {
    all: Mutex<HashMap<PeerId, VecDeque<Entry>>>,
}

struct Entry {
    number: u64,
    /// Dropping it ends the connection.
    _end: oneshot::Sender<()>,
}

/// A connection of a peer. It leaves the others when this is dropped.
pub(super) struct PeerConnection {
    connections: Arc<PeerConnections>,
    peer: PeerId,
    number: u64,
    ended: oneshot::Receiver<()>,
}

impl PeerConnections {
    fn lock(&self) -> MutexGuard<'_, HashMap<PeerId, VecDeque<Entry>>> {
        self.all.lock().expect("no code panics with this lock held")
    }

    /// Adds a connection of this peer. If the peer has too many, its oldest one ends.
    pub(super) fn add(self: &Arc<PeerConnections>, peer: PeerId) -> PeerConnection {
        let (end, ended) = oneshot::channel();
        let mut all = self.lock();
        let own = all.entry(peer).or_default();
        let number = own.back().map_or(0, |newest| newest.number + 1);
        if own.len() >= MAX_CONNECTIONS {
            own.pop_front();
        }
        own.push_back(Entry { number, _end: end });
        drop(all);
        PeerConnection { connections: self.clone(), peer, number, ended }
    }
}

impl PeerConnection {
    /// Returns when the connection must end.
    pub(super) async fn ended(&mut self) {
        // Nothing is ever sent: the sender is dropped.
        let _ = (&mut self.ended).await;
    }
}

impl Drop for PeerConnection {
    fn drop(&mut self) {
        let mut all = self.connections.lock();
        if let Some(own) = all.get_mut(&self.peer) {
            own.retain(|entry| entry.number != self.number);
            if own.is_empty() {
                all.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::oneshot::error::TryRecvError;

    use super::{MAX_CONNECTIONS, PeerConnection, PeerConnections};
    use crate::id::PeerId;

    fn is_open(connection: &mut PeerConnection) -> bool {
        connection.ended.try_recv() == Err(TryRecvError::Empty)
    }

    #[test]
    fn one_connection_too_many_ends_the_oldest_of_the_same_peer() {
        let connections = Arc::new(PeerConnections::default());
        let [greedy, other] = [1, 2].map(|n| PeerId::from_bytes([n; 16]));
        let mut honest = connections.add(other);
        let mut all: Vec<_> = (0..10).map(|_| connections.add(greedy)).collect();
        let open: Vec<_> = all.iter_mut().map(is_open).collect();
        let ended = open.len() - MAX_CONNECTIONS;
        assert!(open[..ended].iter().all(|open| !open) && open[ended..].iter().all(|open| *open));
        assert!(is_open(&mut honest), "a peer does not end the connections of another");
        all.drain(..all.len() - 1);
        let mut more: Vec<_> = (1..MAX_CONNECTIONS).map(|_| connections.add(greedy)).collect();
        assert!(all.iter_mut().chain(&mut more).all(is_open), "places are free again");
        drop((all, more, honest));
        assert!(connections.lock().is_empty());
    }
}
