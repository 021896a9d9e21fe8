//! The peers as repair uses them: a trait, and its implementation over connections.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::cluster::client::connection::Connection;
use crate::cluster::client::pool::ConnectionPool;
use crate::cluster::placement::members::Member;
use crate::cluster::protocol::{DeletedFragments, FragmentId, Held, StampBound};
use crate::collection::CollectionNumber;
use crate::encoding::SealKeys;
use crate::encoding::fragment::Fragment;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, PeerId};
use crate::net::identity::Security;

/// How long a deletion may take, with the connection that it may have to make. A peer that takes
/// longer counts as down, and refuses the request if it gets to it later.
pub const DELETION_TIMEOUT: Duration = Duration::from_secs(10);

/// Confirms that the caller may delete: that it holds the repair lease by a renewal which was requested
/// after this call, and which lasts for longer than [`DELETION_TIMEOUT`].
pub type DeletionPermit = Arc<dyn Fn() -> PermitFuture + Send + Sync>;

/// See [`DeletionPermit`].
pub type PermitFuture = Pin<Box<dyn Future<Output = bool> + Send>>;

/// Permits all deletions.
#[cfg(test)]
pub(crate) fn permit_all() -> DeletionPermit {
    Arc::new(|| Box::pin(async { true }))
}

/// Peers that repair can ask. Repair does not trust them: it verifies what they send.
pub trait Peers: Send + Sync + 'static {
    /// The keys for seals.
    fn seals(&self) -> &SealKeys;

    /// The fragments that a peer has of each of these blobs. The question does not reset their idle
    /// timers.
    fn have(
        &self,
        peer: PeerId,
        blobs: &[BlobId],
    ) -> impl Future<Output = Result<Vec<Vec<Held>>>> + Send;

    /// A page of about `most` of a peer's fragments, in the order of their blobs, starting after this
    /// blob: all fragments of a blob or none. It is empty if there are no more.
    fn list(
        &self,
        peer: PeerId,
        after: BlobId,
        most: usize,
    ) -> impl Future<Output = Result<Vec<(BlobId, Held)>>> + Send;

    /// Fetches a fragment; `None` if the peer does not have it.
    fn get(
        &self,
        peer: PeerId,
        fragment: FragmentId,
    ) -> impl Future<Output = Result<Option<Fragment>>> + Send;

    /// Stores a fragment on a peer. It is durable when this returns.
    fn put(&self, peer: PeerId, fragment: Fragment) -> impl Future<Output = Result<()>> + Send;

    /// Deletes those of the fragments that no client has stored, or asked for with renewal, within
    /// `idle` seconds. Returns the bytes that are free again on the peer's disk.
    fn delete(
        &self,
        peer: PeerId,
        fragments: &[FragmentId],
        idle: u32,
    ) -> impl Future<Output = Result<u64>> + Send;
}

/// Peers over network connections.
pub struct ConnectedPeers {
    pool: Arc<ConnectionPool>,
    members: BTreeMap<PeerId, Member>,
    permit: DeletionPermit,
    seals: SealKeys,
    /// The stamp of what is stored.
    stamp: CollectionNumber,
}

impl ConnectedPeers {
    /// Peers with these addresses. No peer is contacted yet. `permit` is asked before each deletion.
    /// `stamp` is the current collection number.
    pub fn new(
        members: impl IntoIterator<Item = Member>,
        security: Security,
        permit: DeletionPermit,
        stamp: CollectionNumber,
    ) -> ConnectedPeers {
        let members = members.into_iter().map(|member| (member.id, member)).collect();
        let seals = security.seals().clone();
        ConnectedPeers { pool: ConnectionPool::new(security), members, permit, seals, stamp }
    }

    /// A page of a peer's records, starting after this blob: see [`Connection::records`].
    pub(crate) async fn records(&self, peer: &PeerId, after: BlobId) -> Result<Vec<Fragment>> {
        let records = |connection: Arc<Connection>| async move { connection.records(&after).await };
        self.pool.ask(self.member(peer)?, records).await
    }

    /// What [`ConnectedPeers::delete_within`] would delete.
    pub(crate) async fn deletable(
        &self,
        peer: PeerId,
        fragments: &[FragmentId],
        bound: StampBound,
    ) -> Result<DeletedFragments> {
        let ask = |connection: Arc<Connection>| async move {
            connection.deletable(fragments, 0, bound).await
        };
        self.pool.ask(self.member(&peer)?, ask).await
    }

    /// Deletes fragments as [`Peers::delete`] does, if their stamp is within a bound. There is no other
    /// way to delete from here.
    ///
    /// It is done under the lease. The peer's clock is read before the permit is asked for. The peer
    /// begins no deletion later than [`DELETION_TIMEOUT`] after that, so the lease that is renewed in
    /// between is still held then. It does not matter how long this process, or its machine, is stopped
    /// at any point.
    pub(crate) async fn delete_within(
        &self,
        peer: PeerId,
        fragments: &[FragmentId],
        idle: u32,
        bound: StampBound,
    ) -> Result<DeletedFragments> {
        let delete = |connection: Arc<Connection>| async move {
            let end = connection.clock().await?.after(DELETION_TIMEOUT);
            match (self.permit)().await {
                true => connection.delete(fragments, idle, bound, end).await,
                false => Err(Error::LeaseLost),
            }
        };
        let asked = self.pool.ask(self.member(&peer)?, delete);
        let late = |_| unavailable(&peer, "a deletion takes too long");
        timeout(DELETION_TIMEOUT, asked).await.map_err(late)?
    }

    fn member(&self, peer: &PeerId) -> Result<&Member> {
        self.members.get(peer).ok_or_else(|| unavailable(peer, "its address is unknown"))
    }
}

impl Peers for ConnectedPeers {
    fn seals(&self) -> &SealKeys {
        &self.seals
    }

    async fn have(&self, peer: PeerId, blobs: &[BlobId]) -> Result<Vec<Vec<Held>>> {
        let member = self.member(&peer)?;
        self.pool.ask(member, |connection| async move { connection.have(blobs, None).await }).await
    }

    async fn list(&self, peer: PeerId, after: BlobId, most: usize) -> Result<Vec<(BlobId, Held)>> {
        let list = |connection: Arc<Connection>| async move { connection.list(&after, most).await };
        self.pool.ask(self.member(&peer)?, list).await
    }

    async fn get(&self, peer: PeerId, fragment: FragmentId) -> Result<Option<Fragment>> {
        let get =
            |connection: Arc<Connection>| async move { connection.fetch_fragment(&fragment).await };
        self.pool.ask(self.member(&peer)?, get).await
    }

    async fn put(&self, peer: PeerId, fragment: Fragment) -> Result<()> {
        let (member, stamp) = (self.member(&peer)?, self.stamp);
        let put = |connection: Arc<Connection>| {
            let fragment = fragment.clone();
            async move { connection.put(fragment, stamp).await }
        };
        self.pool.ask(member, put).await
    }

    async fn delete(&self, peer: PeerId, fragments: &[FragmentId], idle: u32) -> Result<u64> {
        Ok(self.delete_within(peer, fragments, idle, StampBound::ANY).await?.bytes)
    }
}

fn unavailable(peer: &PeerId, reason: &str) -> Error {
    let (peer, kind) = (peer.to_string(), ErrorKind::Unavailable);
    Error::Peer { peer, kind, reason: reason.into() }
}
