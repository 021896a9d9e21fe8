//! The protocol between clients and peers.
//!
//! After the handshake (`net::handshake`), a client sends any number of requests. Each
//! request has one answer, and answers come in any order. `docs/formats.md` describes the bytes.

mod refusal;

use std::io;

use bytes::Bytes;
use tokio::io::AsyncRead;

use crate::encoding::fragment::{Description, Fragment, Kind, MAX_CONTENT};
use crate::error::{Error, ErrorKind, Result};
use crate::id::BlobId;
use crate::net::frame::{Header, Message, read_aligned_body, read_body};
use crate::net::message::{FAILED, MessageReader, failure_body, malformed, reason_of};

pub use self::refusal::Refusal;

/// The longest body in bytes: the blocks of the longest content, and space for their descriptions.
pub const MAX_BODY: usize = MAX_CONTENT + 8192;

/// The most fragments in one put. Their blocks together have at most [`MAX_CONTENT`] bytes.
pub const MAX_PUT: usize = 16;
const _: () = assert!(LEAD + MAX_PUT * (1 + Description::LONGEST) <= MAX_BODY - MAX_CONTENT);

/// The most blobs in one `have` request.
pub const MAX_ASKED: usize = 4096;

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

/// A request from a client to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Store 1 to [`MAX_PUT`] fragments. The peer answers when they are durable.
    Put(Vec<Fragment>),
    /// Send the fragments of a blob.
    Get(BlobId),
    /// Send one fragment.
    GetFragment(FragmentId),
    /// Report the fragments of each of these blobs.
    Have {
        /// Whether to reset the idle timer of the fragments.
        renew: bool,
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
    /// The fragments of each requested blob, in the order of the request.
    Held(Vec<Vec<Held>>),
    /// How much the peer holds.
    Usage(Usage),
    /// The time on the peer's clock.
    Clock(PeerTime),
    /// The fragments are deleted, and this many bytes of the disk are free again.
    Deleted(u64),
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
const STORED: u16 = 102;
const FRAGMENTS: u16 = 103;
const HELD: u16 = 104;
const USED: u16 = 105;
const DELETED: u16 = 107;
const LISTED: u16 = 108;
const RESERVED: u16 = 109;
const REFUSED: u16 = 110;
const TIME: u16 = 111;

impl Request {
    /// Encodes the request. Returns its kind and its body.
    pub fn to_body(&self) -> (u16, Vec<u8>) {
        match self {
            Request::Put(_) => {
                let (kind, parts) = self.to_parts();
                (kind, parts.concat())
            }
            Request::Get(blob) => (GET, blob.as_bytes().to_vec()),
            Request::GetFragment(fragment) => {
                let mut body = Vec::new();
                write_id(&mut body, fragment);
                (GET_FRAGMENT, body)
            }
            Request::Clock => (CLOCK, Vec::new()),
            Request::Have { renew, blobs } => {
                let mut body = vec![u8::from(*renew)];
                blobs.iter().for_each(|blob| body.extend_from_slice(blob.as_bytes()));
                (HAVE, body)
            }
            Request::Usage => (USAGE, Vec::new()),
            Request::Delete { deadline: PeerTime(deadline), idle, fragments } => {
                let mut body = deadline.to_le_bytes().to_vec();
                body.extend_from_slice(&idle.to_le_bytes());
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
            Request::Put(fragments) => {
                let mut heads = Vec::with_capacity(LEAD + fragments.len() * 128);
                heads.extend_from_slice(&(fragments.len() as u16).to_le_bytes());
                heads.extend_from_slice(&[0; 2]);
                fragments.iter().for_each(|fragment| write_head(&mut heads, fragment));
                let len = (heads.len() - LEAD) as u16;
                heads[2..LEAD].copy_from_slice(&len.to_le_bytes());
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
            PUT => Request::Put(body.fragments()?),
            GET => Request::Get(body.blob()?),
            HAVE => {
                let renew = body.flag()?;
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
                let mut fragments = Vec::new();
                while !body.is_empty() {
                    if fragments.len() == MAX_DELETED {
                        return Err(malformed("a delete request for too many fragments"));
                    }
                    fragments.push(body.fragment_id()?);
                }
                Request::Delete { deadline, idle, fragments }
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
            Answer::Deleted(bytes) => {
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
            DELETED => Answer::Deleted(body.u64()?),
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

/// Writes a fragment's head: the block's index and the description, which gives the block's length.
fn write_head(body: &mut Vec<u8>, fragment: &Fragment) {
    body.push(fragment.index);
    fragment.description.write(body);
}

/// Bytes at the start of a put that say where its blocks begin: the number of fragments, and the
/// length of all heads.
const LEAD: usize = 4;

/// The offset of the first block in a put.
fn blocks_at(lead: &[u8; LEAD]) -> usize {
    let [_, _, heads @ ..] = *lead;
    LEAD + usize::from(u16::from_le_bytes(heads))
}

/// Reads the body of a request. The first block of a put begins at the start of a page, and so do
/// the others if their lengths are multiples of a page: direct I/O takes them without a copy.
pub(crate) async fn read_request_body(
    reader: &mut (impl AsyncRead + Unpin),
    header: &Header,
) -> io::Result<Bytes> {
    match header.kind {
        PUT if header.len >= LEAD => read_aligned_body(reader, header, blocks_at).await,
        _ => read_body(reader, header).await,
    }
}

/// The length of a fragment in a body, in bytes.
pub(crate) fn fragment_len(description: &Description) -> usize {
    1 + description.to_bytes().len() + description.block_len()
}

fn write_id(body: &mut Vec<u8>, FragmentId { blob, encoding, index }: &FragmentId) {
    body.extend_from_slice(blob.as_bytes());
    body.extend_from_slice(encoding.as_bytes());
    body.push(*index);
}

fn write_held(body: &mut Vec<u8>, held: &Held) {
    let Held { encoding, data, parity, index, kind, len } = held;
    body.extend_from_slice(encoding.as_bytes());
    body.extend_from_slice(&[*data, *parity, *index, *kind as u8]);
    body.extend_from_slice(&len.to_le_bytes());
}

/// Readers for the parts of messages that only this protocol has.
impl MessageReader<'_> {
    fn head(&mut self) -> Result<(Description, u8)> {
        let index = self.u8()?;
        let (description, rest) = Description::from_bytes(self.rest())?;
        self.slice(self.rest().len() - rest.len())?;
        if usize::from(index) >= description.width() {
            return Err(malformed("a block index out of range"));
        }
        Ok((description, index))
    }

    fn block(&mut self, (description, index): (Description, u8)) -> Result<Fragment> {
        let block = self.share(description.block_len())?;
        Ok(Fragment { description, index, block })
    }

    /// Reads a fragment whose block follows its head.
    fn fragment(&mut self) -> Result<Fragment> {
        let head = self.head()?;
        self.block(head)
    }

    /// Reads the fragments of a put: all heads, then all blocks.
    fn fragments(&mut self) -> Result<Vec<Fragment>> {
        let (count, len) = (usize::from(self.u16()?), usize::from(self.u16()?));
        if !(1..=MAX_PUT).contains(&count) {
            return Err(malformed("a put with no fragment or too many"));
        }
        let blocks_len = self.rest().len().checked_sub(len);
        let heads = (0..count).map(|_| self.head()).collect::<Result<Vec<_>>>()?;
        if blocks_len != Some(self.rest().len()) {
            return Err(malformed("heads whose length differs from the stated one"));
        }
        heads.into_iter().map(|head| self.block(head)).collect()
    }

    fn held(&mut self) -> Result<Held> {
        let encoding = self.blob()?;
        let [data, parity, index] = self.array()?;
        let kind = if self.flag()? { Kind::Record } else { Kind::Content };
        let len = self.u32()?;
        Ok(Held { encoding, data, parity, index, kind, len })
    }

    fn fragment_id(&mut self) -> Result<FragmentId> {
        Ok(FragmentId { blob: self.blob()?, encoding: self.blob()?, index: self.u8()? })
    }

    fn blob(&mut self) -> Result<BlobId> {
        self.array().map(BlobId::from_bytes)
    }
}

#[cfg(test)]
mod tests;
