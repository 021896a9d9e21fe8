//! What repair asks of peers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

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

/// Peers that can be asked. None of them is trusted: what they give is verified.
pub trait Peers: Send + Sync + 'static {
    /// What a peer has of each of these blobs. To ask does not renew their age.
    fn have(
        &self,
        peer: PeerId,
        blobs: &[BlobId],
    ) -> impl Future<Output = Result<Vec<Vec<Held>>>> + Send;

    /// The fragments of a blob that a peer has.
    fn get(&self, peer: PeerId, blob: BlobId)
    -> impl Future<Output = Result<Vec<Fragment>>> + Send;

    /// Gives a peer a fragment. It is durable there when this returns.
    fn put(&self, peer: PeerId, fragment: Fragment) -> impl Future<Output = Result<()>> + Send;

    /// Deletes a fragment, unless somebody has stored or asked for it (with renewal) within so many seconds. Returns
    /// whether that gave space back.
    fn delete(
        &self,
        peer: PeerId,
        fragment: FragmentId,
        idle: u32,
    ) -> impl Future<Output = Result<bool>> + Send;
}

/// Peers over the network.
pub struct ConnectedPeers {
    pool: Arc<ConnectionPool>,
    members: BTreeMap<PeerId, Member>,
}

impl ConnectedPeers {
    /// These peers. Nobody is asked yet.
    pub fn new(members: impl IntoIterator<Item = Member>, security: Security) -> ConnectedPeers {
        let members = members.into_iter().map(|member| (member.id, member)).collect();
        ConnectedPeers { pool: ConnectionPool::new(security), members }
    }

    /// The fragments of the first blobs behind this one: see [`Connection::list`].
    pub(crate) async fn list(&self, peer: &PeerId, after: BlobId) -> Result<Vec<(BlobId, Held)>> {
        let list = |connection: Arc<Connection>| async move { connection.list(&after).await };
        self.pool.ask(self.member(peer)?, list).await
    }

    /// Deletes fragments that nobody has stored or asked for within so many seconds: see [`Connection::delete`].
    pub(crate) async fn delete_idle(
        &self,
        peer: &PeerId,
        fragments: &[FragmentId],
        idle: u32,
    ) -> Result<u64> {
        let delete =
            |connection: Arc<Connection>| async move { connection.delete(fragments, idle).await };
        self.pool.ask(self.member(peer)?, delete).await
    }

    fn member(&self, peer: &PeerId) -> Result<&Member> {
        self.members.get(peer).ok_or_else(|| Error::Peer {
            peer: peer.to_string(),
            kind: ErrorKind::Unavailable,
            reason: "it is not known where it is".into(),
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
            reason: "it takes too long to delete something".into(),
        };
        let deleted = timeout(DELETION_TIMEOUT, self.delete_idle(&peer, &[fragment], idle)).await;
        deleted.map_err(late)?.map(|bytes| bytes > 0)
    }
}
