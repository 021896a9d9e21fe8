//! A client's connection to one peer: the protocol's requests as calls.

use std::ops::Range;
use std::time::Duration;

use tokio::time::timeout;

use crate::cluster::protocol::{
    Answer, DeletedFragments, FragmentId, FragmentPart, Held, MAX_ASKED, MAX_BODY, MAX_DELETED,
    MAX_FETCHED, MAX_LISTED, MAX_PUT, PeerTime, Refusal, Request, StampBound, Usage,
};
use crate::collection::CollectionNumber;
use crate::encoding::fragment::{Fragment, Kind};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, PeerId};
use crate::net::connection;
use crate::net::handshake::{HandshakeError, PEER_PROTOCOL};
use crate::net::identity::{Role, Security};

/// How long opening a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection to a peer. When it is lost, every request fails, including those in flight.
pub struct Connection {
    address: String,
    inner: connection::Connection,
}

impl Connection {
    /// Connects to the peer that listens at this address.
    pub async fn open(address: &str, security: &Security) -> Result<Connection> {
        let open =
            connection::Connection::open(address, security, Role::Peer, &PEER_PROTOCOL, MAX_BODY);
        let opened = timeout(CONNECT_TIMEOUT, open).await;
        let opened = opened.unwrap_or_else(|late| Err(HandshakeError::Io(late.into())));
        match opened {
            Ok(inner) => Ok(Connection { address: address.into(), inner }),
            Err(HandshakeError::Io(error)) => Err(unavailable(address, &error.to_string())),
            Err(HandshakeError::Refused(kind, reason)) => {
                Err(Error::Peer { peer: address.into(), kind, reason })
            }
            Err(HandshakeError::Closed | HandshakeError::OtherProtocol) => {
                Err(unavailable(address, "it does not answer like a peer"))
            }
            Err(HandshakeError::OtherIdentity(reason)) => Err(unavailable(address, &reason)),
        }
    }

    /// The peer at the other end.
    pub fn peer(&self) -> PeerId {
        PeerId::from_bytes(self.inner.server())
    }

    /// Whether the connection is lost.
    pub fn is_lost(&self) -> bool {
        self.inner.is_lost()
    }

    /// The time since the peer's last answer.
    pub(crate) fn silence(&self) -> Duration {
        self.inner.silence()
    }

    async fn ask(&self, request: Request) -> Result<Answer> {
        let asked = self.inner.ask(request.to_parts()).await;
        let (kind, body) =
            asked.map_err(|_| unavailable(&self.address, "the connection is lost"))?;
        // An invalid answer counts as a wrong answer. The next one may be right.
        let answer = Answer::from_bytes(kind, &body)
            .unwrap_or_else(|error| Answer::Failed(ErrorKind::Corrupt, error.to_string()));
        match answer {
            Answer::Failed(kind, reason) => {
                Err(Error::Peer { peer: self.address.clone(), kind, reason })
            }
            answer => Ok(answer),
        }
    }

    fn unexpected(&self) -> Error {
        unavailable(&self.address, "the answer does not match the request")
    }

    /// Stores a fragment on the peer, with at least this stamp. It is durable when this returns.
    pub async fn put(&self, fragment: Fragment, stamp: CollectionNumber) -> Result<()> {
        self.put_all(vec![fragment], stamp).await?.pop().unwrap_or_else(|| Err(self.unexpected()))
    }

    /// Stores 1 to [`MAX_PUT`] fragments on the peer, with at least this stamp. Their blocks together have at most
    /// [`MAX_STORED`](crate::encoding::MAX_STORED) bytes. Returns for each whether it is durable.
    pub async fn put_all(
        &self,
        fragments: Vec<Fragment>,
        stamp: CollectionNumber,
    ) -> Result<Vec<Result<()>>> {
        let count = fragments.len();
        debug_assert!((1..=MAX_PUT).contains(&count));
        match self.ask(Request::Put { stamp, fragments }).await? {
            Answer::Stored => Ok((0..count).map(|_| Ok(())).collect()),
            Answer::Refused { which, reason } if which.len() == count => {
                let failed = |refusal| {
                    let (peer, reason) = (self.address.clone(), reason.clone());
                    match refusal {
                        Refusal::Full => Error::PeerRefusedFull { peer, reason },
                        Refusal::Failed(kind) => Error::Peer { peer, kind, reason },
                    }
                };
                Ok(which
                    .into_iter()
                    .map(|one| one.map_or(Ok(()), |refusal| Err(failed(refusal))))
                    .collect())
            }
            _ => Err(self.unexpected()),
        }
    }

    /// The peer's fragments of a blob, as many as an answer can have. They are not verified: see
    /// [`Fragment::is_of`].
    pub async fn fetch(&self, blob: &BlobId) -> Result<Vec<Fragment>> {
        match self.ask(Request::Get(*blob)).await? {
            Answer::Fragments(fragments) if fragments.len() <= MAX_FETCHED => Ok(fragments),
            Answer::Fragments(all) => {
                let reason = format!(
                    "it sent {} fragments of a blob, and may send {MAX_FETCHED}",
                    all.len()
                );
                Err(Error::Peer { peer: self.address.clone(), kind: ErrorKind::Corrupt, reason })
            }
            _ => Err(self.unexpected()),
        }
    }

    /// One of the peer's fragments; `None` if the peer does not have it. It is not verified: see
    /// [`Fragment::is_of`].
    pub async fn fetch_fragment(&self, id: &FragmentId) -> Result<Option<Fragment>> {
        match self.ask(Request::GetFragment(*id)).await? {
            Answer::Fragments(mut all) if all.len() <= 1 => Ok(all.pop()),
            _ => Err(self.unexpected()),
        }
    }

    /// The parts of the peer's fragments of a blob that hold some bytes of its content, in whole
    /// frames. They are not verified: see [`Description::open`].
    ///
    /// [`Description::open`]: crate::encoding::fragment::Description::open
    pub async fn fetch_range(&self, blob: &BlobId, range: Range<u32>) -> Result<Vec<FragmentPart>> {
        let (offset, len) = (range.start, range.end.saturating_sub(range.start));
        match self.ask(Request::GetRange { blob: *blob, offset, len }).await? {
            Answer::Parts(parts) if parts.iter().all(|one| one.description.blob == *blob) => {
                Ok(parts)
            }
            _ => Err(self.unexpected()),
        }
    }

    /// The peer's fragments of each of these blobs, at most [`MAX_ASKED`]. With `renew` the peer
    /// resets their idle timers, and raises their stamps to this number.
    pub async fn have(
        &self,
        blobs: &[BlobId],
        renew: Option<CollectionNumber>,
    ) -> Result<Vec<Vec<Held>>> {
        debug_assert!(blobs.len() <= MAX_ASKED);
        match self.ask(Request::Have { renew, blobs: blobs.to_vec() }).await? {
            Answer::Held(held) if held.len() == blobs.len() => Ok(held),
            _ => Err(self.unexpected()),
        }
    }

    /// How much the peer holds and may hold.
    pub async fn usage(&self) -> Result<Usage> {
        match self.ask(Request::Usage).await? {
            Answer::Usage(usage) => Ok(usage),
            _ => Err(self.unexpected()),
        }
    }

    /// Deletes fragments, at most [`MAX_DELETED`], that were not stored or renewed for `idle`
    /// seconds and whose stamp is within a bound. Returns what was deleted.
    ///
    /// The peer does not begin the deletion after `deadline`, however long the request is on its way.
    pub async fn delete(
        &self,
        fragments: &[FragmentId],
        idle: u32,
        bound: StampBound,
        deadline: PeerTime,
    ) -> Result<DeletedFragments> {
        self.ask_to_delete(deadline, idle, bound, false, fragments).await
    }

    /// What [`Connection::delete`] would delete.
    pub async fn deletable(
        &self,
        fragments: &[FragmentId],
        idle: u32,
        bound: StampBound,
    ) -> Result<DeletedFragments> {
        self.ask_to_delete(PeerTime(0), idle, bound, true, fragments).await
    }

    async fn ask_to_delete(
        &self,
        deadline: PeerTime,
        idle: u32,
        bound: StampBound,
        is_dry: bool,
        fragments: &[FragmentId],
    ) -> Result<DeletedFragments> {
        debug_assert!(fragments.len() <= MAX_DELETED);
        let asked = fragments.len();
        let fragments = fragments.to_vec();
        match self.ask(Request::Delete { deadline, idle, bound, is_dry, fragments }).await? {
            Answer::Deleted(deleted) if deleted.fragments as usize <= asked => Ok(deleted),
            _ => Err(self.unexpected()),
        }
    }

    /// The time on the peer's clock.
    pub async fn clock(&self) -> Result<PeerTime> {
        match self.ask(Request::Clock).await? {
            Answer::Clock(time) => Ok(time),
            _ => Err(self.unexpected()),
        }
    }

    /// A page of fragments of records, in the order of their blobs, starting after this blob. It is
    /// empty if there are no more.
    pub async fn records(&self, after: &BlobId) -> Result<Vec<Fragment>> {
        let is_right = |one: &Fragment| {
            one.description.kind() == Kind::Record
                && one.description.blob > *after
                && one.description.matches(one.index.into(), &one.block)
        };
        match self.ask(Request::Records(*after)).await? {
            Answer::Fragments(all)
                if all.iter().all(is_right) && all.is_sorted_by_key(|one| one.description.blob) =>
            {
                Ok(all)
            }
            Answer::Fragments(_) => Err(self.wrong_page()),
            _ => Err(self.unexpected()),
        }
    }

    /// A page of about `most` fragments, in the order of their blobs, starting after this blob. It is
    /// empty if there are no more.
    pub async fn list(&self, after: &BlobId, most: usize) -> Result<Vec<(BlobId, Held)>> {
        let most = most.min(MAX_LISTED) as u16;
        match self.ask(Request::List { after: *after, most }).await? {
            Answer::Listed(all)
                if all.first().is_none_or(|(blob, _)| blob > after)
                    && all.is_sorted_by_key(|(blob, _)| *blob) =>
            {
                Ok(all)
            }
            Answer::Listed(_) => Err(self.wrong_page()),
            _ => Err(self.unexpected()),
        }
    }

    /// Reserves `bytes` bytes for the puts of this connection. This replaces the connection's
    /// previous reservation. The reservation ends with the connection.
    pub async fn reserve(&self, bytes: u64) -> Result<()> {
        match self.ask(Request::Reserve(bytes)).await? {
            Answer::Reserved => Ok(()),
            _ => Err(self.unexpected()),
        }
    }

    /// The error for a page that is out of order. Accepting it could make a loop over pages
    /// endless.
    fn wrong_page(&self) -> Error {
        let reason = "it sent a page that is out of order";
        Error::Peer { peer: self.address.clone(), kind: ErrorKind::Corrupt, reason: reason.into() }
    }
}

fn unavailable(peer: &str, reason: &str) -> Error {
    Error::Peer { peer: peer.into(), kind: ErrorKind::Unavailable, reason: reason.into() }
}
