//! What repair asks of peers.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::fragment::Fragment;
use super::super::identity::Security;
use super::super::members::Member;
use super::super::peer::{FragmentId, Held};
use super::super::ways::Ways;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, PeerId};

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

    /// Deletes a fragment.
    fn delete(&self, peer: PeerId, fragment: FragmentId)
    -> impl Future<Output = Result<()>> + Send;
}

/// Peers over the network.
pub struct Connected {
    ways: Arc<Ways>,
    members: BTreeMap<PeerId, Member>,
}

impl Connected {
    /// These peers. Nobody is asked yet.
    pub fn new(members: impl IntoIterator<Item = Member>, security: Security) -> Connected {
        let members = members.into_iter().map(|member| (member.id, member)).collect();
        Connected { ways: Ways::new(security), members }
    }

    fn member(&self, peer: &PeerId) -> Result<&Member> {
        self.members.get(peer).ok_or_else(|| Error::Peer {
            peer: peer.to_string(),
            kind: ErrorKind::Unavailable,
            reason: "it is not known where it is".into(),
        })
    }
}

impl Peers for Connected {
    async fn have(&self, peer: PeerId, blobs: &[BlobId]) -> Result<Vec<Vec<Held>>> {
        let member = self.member(&peer)?;
        self.ways.ask(member, |connection| async move { connection.have(blobs, false).await }).await
    }

    async fn get(&self, peer: PeerId, blob: BlobId) -> Result<Vec<Fragment>> {
        let member = self.member(&peer)?;
        self.ways.ask(member, |connection| async move { connection.fetch(&blob).await }).await
    }

    async fn put(&self, peer: PeerId, fragment: Fragment) -> Result<()> {
        let member = self.member(&peer)?;
        let put = |connection: Arc<super::super::Connection>| {
            let fragment = fragment.clone();
            async move { connection.put(fragment).await }
        };
        self.ways.ask(member, put).await
    }

    async fn delete(&self, peer: PeerId, fragment: FragmentId) -> Result<()> {
        let member = self.member(&peer)?;
        let delete = |connection: Arc<super::super::Connection>| async move {
            connection.delete(&[fragment], 0).await.map(drop)
        };
        self.ways.ask(member, delete).await
    }
}
