//! The protocol between clients and peers.
//!
//! After the handshake (`net::handshake`), a client sends any number of requests. Each
//! request has one answer, and answers come in any order. `docs/formats.md` describes the bytes.

mod body;
mod deletion;
mod refusal;

use std::time::Duration;

use bytes::Bytes;

use crate::collection::CollectionNumber;
use crate::encoding::MAX_STORED;
use crate::encoding::Seal;
use crate::encoding::fragment::{Description, Fragment, Kind};
use crate::encoding::seal::{SealKeys, Sealed};
use crate::error::{Error, ErrorKind, Result};
use crate::id::BlobId;
use crate::net::frame::Message;
use crate::net::message::{FAILED, MessageReader, failure_body, malformed, reason_of};

use self::body::{LEAD, write_head, write_held, write_id};

pub(crate) use self::body::{fragment_len, longest_body, read_request_body};
pub use self::deletion::{DeletedFragments, StampBound};
pub use self::refusal::Refusal;

/// The longest body in bytes: the blocks of the longest content, and space for their descriptions.
pub const MAX_BODY: usize = MAX_STORED + (64 << 10);

/// The most fragments in one put. Their blocks together have at most [`MAX_STORED`] bytes.
pub const MAX_PUT: usize = 16;
const _: () = assert!(LEAD + MAX_PUT * (1 + Description::LONGEST) <= MAX_BODY - MAX_STORED);

/// The most blobs in one `have` request.
pub const MAX_ASKED: usize = 4096;

/// The longest body of a `have` request, in bytes: the renewal, its stamp, and the blobs.
pub(crate) const MAX_HAVE_BODY: usize = 1 + 8 + MAX_ASKED * 32;

/// The most fragments in the answer to a `have` request. Further ones are left out.
pub const MAX_HELD: usize = 65536;

/// The most fragments of one blob that a peer stores, over all encodings of the blob.
pub(crate) const MAX_FRAGMENTS: usize = 64;

/// The most fragments in the answer to a get request. A peer has one fragment of each encoding of
/// the blob, seldom more, and one encoding is as good as another. A reader decodes what it gets, so
/// this bounds the work that one answer causes.
pub(crate) const MAX_FETCHED: usize = 6;

/// The most fragments in one page of records.
pub(crate) const MAX_RECORDS: usize = 1024;

/// The most fragments in one delete request.
pub const MAX_DELETED: usize = 1024;

/// The most fragments in one page of a list.
pub const MAX_LISTED: usize = 4096;

/// The most bytes of all fragments in an answer.
pub(crate) const MAX_FRAGMENTS_LEN: usize = MAX_BODY - 2;

/// Identifies a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FragmentId {
    /// The blob's name.
    pub blob: BlobId,
    /// The hash of the encoding's description.
    pub encoding: BlobId,
    /// The block's index.
    pub index: u8,
}

/// A fragment that a peer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The hash of its encoding's description.
    pub encoding: BlobId,
    /// The number of data blocks, which are enough to decode the blob.
    pub data: u8,
    /// The number of parity blocks.
    pub parity: u8,
    /// The block's index.
    pub index: u8,
    /// Whether the blob is content or a record.
    pub kind: Kind,
    /// The block's length in bytes.
    pub len: u32,
    /// The seal of its encoding's description.
    pub seal: Seal,
}

impl Held {
    /// Whether the seal proves that a client or a supervisor made this encoding of the blob.
    pub(crate) fn is_sealed(&self, blob: &BlobId, keys: &SealKeys) -> bool {
        let Held { encoding, data, parity, kind, len, .. } = *self;
        keys.proves(&Sealed { blob: *blob, encoding, data, parity, kind, len }, &self.seal)
    }
}

/// A part of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FragmentPart {
    /// The encoding that the block belongs to.
    pub description: Description,
    /// The index of the block.
    pub index: u8,
    /// The offset of the part in the block.
    pub offset: u32,
    /// The bytes of the part. They are not covered by a checksum.
    pub bytes: Bytes,
}

/// How much a peer holds and may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that the peer may hold.
    pub capacity: u64,
    /// Bytes that its blocks take on the disk.
    pub used: u64,
    /// Bytes that clients have reserved.
    pub reserved: u64,
    /// The number of fragments.
    pub fragments: u64,
}

/// A time on the clock of a peer: milliseconds since its process opened the data directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PeerTime(pub u64);

impl PeerTime {
    /// The time that is `duration` later.
    pub fn after(self, duration: Duration) -> PeerTime {
        PeerTime(self.0.saturating_add(duration.as_millis() as u64))
    }
}

/// A request from a client to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Store fragments. The peer answers when they are durable.
    Put {
        /// The collection number to stamp the fragments with.
        stamp: CollectionNumber,
        /// 1 to [`MAX_PUT`] fragments.
        fragments: Vec<Fragment>,
    },
    /// Send the fragments of a blob.
    Get(BlobId),
    /// Send the parts of fragments of a blob that hold some bytes of its content, in whole frames.
    GetRange {
        /// The blob's name.
        blob: BlobId,
        /// The offset in the content.
        offset: u32,
        /// The number of bytes.
        len: u32,
    },
    /// Send one fragment.
    GetFragment(FragmentId),
    /// Report the fragments of each of these blobs.
    Have {
        /// To reset the idle timer of the fragments, the collection number to stamp them with.
        renew: Option<CollectionNumber>,
        /// At most [`MAX_ASKED`].
        blobs: Vec<BlobId>,
    },
    /// Report how much the peer holds.
    Usage,
    /// Report the peer's clock.
    Clock,
    /// Delete fragments.
    Delete {
        /// The time on the peer's clock after which the peer refuses the request. A request can wait
        /// for long: in buffers of the network, and in a process that is stopped.
        deadline: PeerTime,
        /// The minimum idle time in seconds: only fragments that were not stored or renewed for
        /// that long, by the peer's clock, are deleted.
        idle: u32,
        /// What the stamp of a fragment must be.
        bound: StampBound,
        /// Whether the fragments are to be counted and not deleted.
        is_dry: bool,
        /// At most [`MAX_DELETED`].
        fragments: Vec<FragmentId>,
    },
    /// Send a page of fragments of records, of the first blobs after this one.
    Records(BlobId),
    /// List a page of fragments.
    List {
        /// The blob after which the page begins.
        after: BlobId,
        /// The most fragments in the page. A peer sends at least all fragments of one blob, and at
        /// most [`MAX_LISTED`].
        most: u16,
    },
    /// Reserve this many bytes for the puts of this connection. This replaces the connection's
    /// previous reservation.
    Reserve(u64),
}

/// An answer of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// All fragments of the put are durable.
    Stored,
    /// Some fragments of the put were refused.
    Refused {
        /// For each fragment why it was refused, or `None` if it is durable.
        which: Vec<Option<Refusal>>,
        /// The reason for the first refusal.
        reason: String,
    },
    /// The requested fragments.
    Fragments(Vec<Fragment>),
    /// The requested parts of fragments.
    Parts(Vec<FragmentPart>),
    /// The fragments of each requested blob, in the order of the request.
    Held(Vec<Vec<Held>>),
    /// How much the peer holds.
    Usage(Usage),
    /// The time on the peer's clock.
    Clock(PeerTime),
    /// The fragments are deleted.
    Deleted(DeletedFragments),
    /// A page of fragments in the order of their blobs: all fragments of a blob or none. An empty
    /// page is the end.
    Listed(Vec<(BlobId, Held)>),
    /// The space is reserved.
    Reserved,
    /// The request failed.
    Failed(ErrorKind, String),
}

pub(crate) const PUT: u16 = 2;
pub(crate) const GET: u16 = 3;
pub(crate) const HAVE: u16 = 4;
const USAGE: u16 = 5;
pub(crate) const DELETE: u16 = 6;
pub(crate) const RECORDS: u16 = 7;
pub(crate) const LIST: u16 = 8;
const RESERVE: u16 = 9;
pub(crate) const GET_FRAGMENT: u16 = 10;
const CLOCK: u16 = 11;
pub(crate) const GET_RANGE: u16 = 12;
const STORED: u16 = 102;
const FRAGMENTS: u16 = 103;
const HELD: u16 = 104;
const USED: u16 = 105;
const DELETED: u16 = 107;
const LISTED: u16 = 108;
const RESERVED: u16 = 109;
const REFUSED: u16 = 110;
const TIME: u16 = 111;
const PARTS: u16 = 112;

impl Request {
    /// Encodes the request. Returns its kind and its body.
    pub fn to_body(&self) -> (u16, Vec<u8>) {
        match self {
            Request::Put { .. } => {
                let (kind, parts) = self.to_parts();
                (kind, parts.concat())
            }
            Request::Get(blob) => (GET, blob.as_bytes().to_vec()),
            Request::GetRange { blob, offset, len } => {
                let mut body = blob.as_bytes().to_vec();
                body.extend_from_slice(&offset.to_le_bytes());
                body.extend_from_slice(&len.to_le_bytes());
                (GET_RANGE, body)
            }
            Request::GetFragment(fragment) => {
                let mut body = Vec::new();
                write_id(&mut body, fragment);
                (GET_FRAGMENT, body)
            }
            Request::Clock => (CLOCK, Vec::new()),
            Request::Have { renew, blobs } => {
                let mut body = vec![u8::from(renew.is_some())];
                body.extend_from_slice(&renew.unwrap_or_default().0.to_le_bytes());
                blobs.iter().for_each(|blob| body.extend_from_slice(blob.as_bytes()));
                (HAVE, body)
            }
            Request::Usage => (USAGE, Vec::new()),
            Request::Delete { deadline: PeerTime(deadline), idle, bound, is_dry, fragments } => {
                let mut body = deadline.to_le_bytes().to_vec();
                body.extend_from_slice(&idle.to_le_bytes());
                body.extend_from_slice(&bound.below.0.to_le_bytes());
                body.extend_from_slice(&bound.number.0.to_le_bytes());
                body.push(u8::from(*is_dry));
                fragments.iter().for_each(|fragment| write_id(&mut body, fragment));
                (DELETE, body)
            }
            Request::Records(after) => (RECORDS, after.as_bytes().to_vec()),
            Request::List { after, most } => {
                (LIST, [&after.as_bytes()[..], &most.to_le_bytes()].concat())
            }
            Request::Reserve(bytes) => (RESERVE, bytes.to_le_bytes().to_vec()),
        }
    }

    /// Encodes the request in parts that share the blocks instead of copying them.
    pub(crate) fn to_parts(&self) -> Message {
        match self {
            Request::Put { stamp, fragments } => {
                let len: usize = fragments.iter().map(|one| 1 + one.description.bytes_len()).sum();
                let mut heads = Vec::with_capacity(LEAD + len);
                heads.extend_from_slice(&(fragments.len() as u16).to_le_bytes());
                heads.extend_from_slice(&(len as u16).to_le_bytes());
                heads.extend_from_slice(&stamp.0.to_le_bytes());
                fragments.iter().for_each(|fragment| write_head(&mut heads, fragment));
                let blocks = fragments.iter().map(|fragment| fragment.block.clone());
                (PUT, std::iter::once(heads.into()).chain(blocks).collect())
            }
            request => {
                let (kind, body) = request.to_body();
                (kind, vec![body.into()])
            }
        }
    }

    /// Decodes a request. Blocks are copied out of `body`.
    pub fn from_body(kind: u16, body: &[u8]) -> Result<Request> {
        Request::from_bytes(kind, &Bytes::copy_from_slice(body))
    }

    /// Decodes a request. Blocks share the memory of `whole`.
    pub fn from_bytes(kind: u16, whole: &Bytes) -> Result<Request> {
        let mut body = MessageReader::new(whole);
        let request = match kind {
            PUT => {
                let (stamp, fragments) = body.put()?;
                Request::Put { stamp, fragments }
            }
            GET => Request::Get(body.blob()?),
            GET_RANGE => {
                Request::GetRange { blob: body.blob()?, offset: body.u32()?, len: body.u32()? }
            }
            HAVE => {
                let (renew, stamp) = (body.flag()?, body.stamp()?);
                if !renew && stamp != CollectionNumber::FIRST {
                    return Err(malformed("a stamp without renewal"));
                }
                let renew = renew.then_some(stamp);
                let (ids, rest) = body.rest().as_chunks::<32>();
                if ids.len() > MAX_ASKED || !rest.is_empty() {
                    return Err(malformed("a `have` request for too many blobs"));
                }
                body.slice(ids.len() * 32)?;
                let blobs = ids.iter().map(|id| BlobId::from_bytes(*id)).collect();
                Request::Have { renew, blobs }
            }
            USAGE => Request::Usage,
            GET_FRAGMENT => Request::GetFragment(body.fragment_id()?),
            CLOCK => Request::Clock,
            DELETE => {
                let (deadline, idle) = (PeerTime(body.u64()?), body.u32()?);
                let bound = StampBound { below: body.stamp()?, number: body.stamp()? };
                let is_dry = body.flag()?;
                let mut fragments = Vec::new();
                while !body.is_empty() {
                    if fragments.len() == MAX_DELETED {
                        return Err(malformed("a delete request for too many fragments"));
                    }
                    fragments.push(body.fragment_id()?);
                }
                Request::Delete { deadline, idle, bound, is_dry, fragments }
            }
            RECORDS => Request::Records(body.blob()?),
            LIST => Request::List { after: body.blob()?, most: body.u16()? },
            RESERVE => Request::Reserve(body.u64()?),
            _ => return Err(malformed("a request of an unknown kind")),
        };
        body.end().map(|()| request)
    }
}

impl Answer {
    /// The answer to a request that failed with `error`.
    pub fn failed(error: &Error) -> Answer {
        Answer::Failed(error.kind(), reason_of(error))
    }

    /// Encodes the answer. Returns its kind and its body.
    pub fn to_body(&self) -> (u16, Vec<u8>) {
        let mut body = Vec::new();
        let kind = match self {
            Answer::Stored => STORED,
            Answer::Refused { which, reason } => {
                body.push(which.len() as u8);
                body.extend(which.iter().map(|refusal| refusal.map_or(0, Refusal::number)));
                body.extend_from_slice(reason.as_bytes());
                REFUSED
            }
            Answer::Fragments(fragments) => {
                body.extend_from_slice(&(fragments.len() as u16).to_le_bytes());
                for fragment in fragments {
                    write_head(&mut body, fragment);
                    body.extend_from_slice(&fragment.block);
                }
                FRAGMENTS
            }
            Answer::Parts(parts) => {
                body.extend_from_slice(&(parts.len() as u16).to_le_bytes());
                for FragmentPart { description, index, offset, bytes } in parts {
                    body.push(*index);
                    description.write(&mut body);
                    body.extend_from_slice(&offset.to_le_bytes());
                    body.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
                    body.extend_from_slice(bytes);
                }
                PARTS
            }
            Answer::Held(all) => {
                for held in all {
                    body.push(held.len() as u8);
                    held.iter().for_each(|one| write_held(&mut body, one));
                }
                HELD
            }
            Answer::Usage(Usage { capacity, used, reserved, fragments }) => {
                [capacity, used, reserved, fragments]
                    .iter()
                    .for_each(|number| body.extend_from_slice(&number.to_le_bytes()));
                USED
            }
            Answer::Clock(PeerTime(time)) => {
                body.extend_from_slice(&time.to_le_bytes());
                TIME
            }
            Answer::Deleted(DeletedFragments { fragments, bytes }) => {
                body.extend_from_slice(&fragments.to_le_bytes());
                body.extend_from_slice(&bytes.to_le_bytes());
                DELETED
            }
            Answer::Listed(all) => {
                for (blob, held) in all {
                    body.extend_from_slice(blob.as_bytes());
                    write_held(&mut body, held);
                }
                LISTED
            }
            Answer::Reserved => RESERVED,
            Answer::Failed(kind, reason) => {
                body = failure_body(*kind, reason);
                FAILED
            }
        };
        (kind, body)
    }

    /// Encodes the answer in parts that share the blocks instead of copying them.
    pub(crate) fn to_parts(&self) -> Message {
        let Answer::Fragments(fragments) = self else {
            let (kind, body) = self.to_body();
            return (kind, vec![body.into()]);
        };
        let mut parts = vec![Bytes::copy_from_slice(&(fragments.len() as u16).to_le_bytes())];
        for fragment in fragments {
            let mut head = Vec::new();
            write_head(&mut head, fragment);
            parts.extend([head.into(), fragment.block.clone()]);
        }
        (FRAGMENTS, parts)
    }

    /// Decodes an answer. Blocks are copied out of `body`.
    pub fn from_body(kind: u16, body: &[u8]) -> Result<Answer> {
        Answer::from_bytes(kind, &Bytes::copy_from_slice(body))
    }

    /// Decodes an answer. Blocks share the memory of `whole`.
    pub fn from_bytes(kind: u16, whole: &Bytes) -> Result<Answer> {
        let mut body = MessageReader::new(whole);
        let answer = match kind {
            STORED => Answer::Stored,
            REFUSED => {
                let count = body.u8()?;
                let which = (0..count).map(|_| match body.u8()? {
                    0 => Ok(None),
                    number => Refusal::from_number(number).map(Some),
                });
                let which = which.collect::<Result<Vec<_>>>()?;
                if which.len() > MAX_PUT || which.iter().all(Option::is_none) {
                    return Err(malformed("a refusal without a refused fragment"));
                }
                Answer::Refused { which, reason: body.reason()? }
            }
            FRAGMENTS => {
                let count = body.u16()?;
                if usize::from(count) > MAX_RECORDS {
                    return Err(malformed("an answer with too many fragments"));
                }
                Answer::Fragments((0..count).map(|_| body.fragment()).collect::<Result<_>>()?)
            }
            PARTS => {
                let count = body.u16()?;
                if usize::from(count) > MAX_FETCHED {
                    return Err(malformed("an answer with too many parts"));
                }
                Answer::Parts((0..count).map(|_| body.part()).collect::<Result<_>>()?)
            }
            HELD => {
                let (mut all, mut held) = (Vec::new(), 0);
                while !body.is_empty() {
                    if all.len() == MAX_ASKED {
                        return Err(malformed("an answer about too many blobs"));
                    }
                    let count = body.u8()?;
                    held += usize::from(count);
                    if usize::from(count) > MAX_FRAGMENTS || held > MAX_HELD {
                        return Err(malformed("an answer about too many fragments"));
                    }
                    all.push((0..count).map(|_| body.held()).collect::<Result<_>>()?);
                }
                Answer::Held(all)
            }
            USED => {
                let (capacity, used) = (body.u64()?, body.u64()?);
                let (reserved, fragments) = (body.u64()?, body.u64()?);
                Answer::Usage(Usage { capacity, used, reserved, fragments })
            }
            TIME => Answer::Clock(PeerTime(body.u64()?)),
            DELETED => {
                let (fragments, bytes) = (body.u32()?, body.u64()?);
                Answer::Deleted(DeletedFragments { fragments, bytes })
            }
            LISTED => {
                let mut all = Vec::new();
                while !body.is_empty() {
                    if all.len() == MAX_LISTED {
                        return Err(malformed("a page with too many fragments"));
                    }
                    all.push((body.blob()?, body.held()?));
                }
                Answer::Listed(all)
            }
            RESERVED => Answer::Reserved,
            FAILED => {
                let (kind, reason) = body.failure()?;
                Answer::Failed(kind, reason)
            }
            _ => return Err(malformed("an answer of an unknown kind")),
        };
        body.end().map(|()| answer)
    }
}

#[cfg(test)]
mod tests;
