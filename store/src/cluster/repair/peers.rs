//! The peers as repair uses them: a trait, and its implementation over connections.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::timeout;

use crate::cluster::client::connection::Connection;
use crate::cluster::client::pool::ConnectionPool;
use crate::cluster::placement::members::Member;
use crate::cluster::protocol::{FragmentId, Held};
use crate::encoding::fragment::Fragment;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, PeerId};
use crate::net::identity::Security;

/// How long a deletion may take. A peer that takes longer counts as down.
pub const DELETION_TIMEOUT: Duration = Duration::from_secs(10);

/// Peers that repair can ask. Repair does not trust them: it verifies what they send.
pub trait Peers: Send + Sync + 'static {
    /// The fragments that a peer has of each of these blobs. The question does not reset their idle
    /// timers.
    fn have(
        &self,
        peer: PeerId,
        blobs: &[BlobId],
    ) -> impl Future<Output = Result<Vec<Vec<Held>>>> + Send;

    /// Fetches a peer's fragments of a blob.
    fn get(&self, peer: PeerId, blob: BlobId)
    -> impl Future<Output = Result<Vec<Fragment>>> + Send;

    /// Stores a fragment on a peer. It is durable when this returns.
    fn put(&self, peer: PeerId, fragment: Fragment) -> impl Future<Output = Result<()>> + Send;

    /// Deletes a fragment, unless a client has stored it, or asked for it with renewal, within
    /// `idle` seconds. Returns whether this freed space.
    fn delete(
        &self,
        peer: PeerId,
        fragment: FragmentId,
        idle: u32,
    ) -> impl Future<Output = Result<bool>> + Send;
}

/// Peers over network connections.
pub struct ConnectedPeers {
    pool: Arc<ConnectionPool>,
    members: BTreeMap<PeerId, Member>,
}

impl ConnectedPeers {
    /// Peers with these addresses. No peer is contacted yet.
    pub fn new(members: impl IntoIterator<Item = Member>, security: Security) -> ConnectedPeers {
        let members = members.into_iter().map(|member| (member.id, member)).collect();
        ConnectedPeers { pool: ConnectionPool::new(security), members }
    }

    /// A page of a peer's fragments, starting after this blob: see [`Connection::list`].
    pub(crate) async fn list(&self, peer: &PeerId, after: BlobId) -> Result<Vec<(BlobId, Held)>> {
        let list = |connection: Arc<Connection>| async move { connection.list(&after).await };
        self.pool.ask(self.member(peer)?, list).await
    }

    /// Deletes fragments that no client has stored or renewed within `idle` seconds: see
    /// [`Connection::delete`].
    pub(crate) async fn delete_idle(
        &self,
        peer: &PeerId,
        fragments: &[FragmentId],
        idle: u32,
    ) -> Result<u64> {
        let until = Instant::now() + DELETION_TIMEOUT;
        let delete = |connection: Arc<Connection>| async move {
            connection.delete(fragments, idle, until).await
        };
        self.pool.ask(self.member(peer)?, delete).await
    }

    fn member(&self, peer: &PeerId) -> Result<&Member> {
        self.members.get(peer).ok_or_else(|| Error::Peer {
            peer: peer.to_string(),
            kind: ErrorKind::Unavailable,
            reason: "its address is unknown".into(),
        })
    }
}

impl Peers for ConnectedPeers {
    async fn have(&self, peer: PeerId, blobs: &[BlobId]) -> Result<Vec<Vec<Held>>> {
        let member = self.member(&peer)?;
        self.pool.ask(member, |connection| async move { connection.have(blobs, false).await }).await
    }

    async fn get(&self, peer: PeerId, blob: BlobId) -> Result<Vec<Fragment>> {
        let member = self.member(&peer)?;
        self.pool.ask(member, |connection| async move { connection.fetch(&blob).await }).await
    }

    async fn put(&self, peer: PeerId, fragment: Fragment) -> Result<()> {
        let member = self.member(&peer)?;
        let put = |connection: Arc<Connection>| {
            let fragment = fragment.clone();
            async move { connection.put(fragment).await }
        };
        self.pool.ask(member, put).await
    }

    async fn delete(&self, peer: PeerId, fragment: FragmentId, idle: u32) -> Result<bool> {
        let late = |_| Error::Peer {
            peer: peer.to_string(),
            kind: ErrorKind::Unavailable,
            reason: "a deletion takes too long".into(),
        };
        let deleted = timeout(DELETION_TIMEOUT, self.delete_idle(&peer, &[fragment], idle)).await;
        deleted.map_err(late)?.map(|bytes| bytes > 0)
    }
}
