//! What peers and their clients say to each other.
//!
//! A connection carries frames in both directions:
//!
//! ```text
//! 0            4      6      8                16
//! ┌────────────┬──────┬──────┬────────────────┬─────────┐
//! │ body bytes │ kind │ zero │ request number │ body    │
//! └────────────┴──────┴──────┴────────────────┴─────────┘
//! ```
//!
//! All numbers are little endian. The client begins with a [`Hello`], and the server answers with the version that
//! both know and its own id, or refuses in words. Then requests come in any number, and each has one answer with its
//! number, in any order. Every length is bounded before memory is taken for it.

use bytes::Bytes;

use crate::encoding::fragment::{Description, Fragment, Kind, MAX_CONTENT};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, PeerId};

/// The version of this protocol, and the oldest one that is still understood. Version 1 was never released.
pub const VERSION: u16 = 2;
/// See [`VERSION`].
pub const OLDEST: u16 = 2;

/// The longest body: blocks, their descriptions, and some.
pub const MAX_BODY: usize = MAX_CONTENT + 8192;

/// The most fragments that are put at once. Their blocks have no more bytes than the longest content.
pub const MAX_PUT: usize = 16;
const _: () = assert!(LEAD + MAX_PUT * (1 + Description::LONGEST) <= MAX_BODY - MAX_CONTENT);

/// The most blobs in one question.
pub const MAX_ASKED: usize = 4096;

/// The most fragments of all those blobs in one answer: what is beyond is left out.
pub const MAX_HELD: usize = 65536;

/// The most fragments that are deleted at once.
pub const MAX_DELETED: usize = 1024;

/// The most fragments in one page of a list.
pub const MAX_LISTED: usize = 4096;

/// Bytes of all fragments in an answer.
pub(crate) const MAX_FRAGMENTS_LEN: usize = MAX_BODY - 2;

/// The longest reason in words.
const MAX_TEXT: usize = 4096;

const MAGIC: &[u8; 4] = b"CRNW";

/// The first words of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The oldest version that it knows,
    pub oldest: u16,
    /// and the newest.
    pub newest: u16,
}

/// Which fragment it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FragmentId {
    /// The blob's name.
    pub blob: BlobId,
    /// The name of the description.
    pub encoding: BlobId,
    /// Which block it is.
    pub index: u8,
}

/// One fragment that a peer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The name of its description.
    pub encoding: BlobId,
    /// Blocks that are enough.
    pub data: u8,
    /// Blocks beside them.
    pub parity: u8,
    /// Which block it is.
    pub index: u8,
    /// What the blob is for.
    pub kind: Kind,
    /// Bytes of the block.
    pub len: u32,
}

/// How much a peer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that it may hold.
    pub capacity: u64,
    /// Bytes that the disk takes for the blocks that it holds.
    pub used: u64,
    /// Bytes that are kept free for clients that have reserved them.
    pub reserved: u64,
    /// How many fragments.
    pub fragments: u64,
}

/// What a client asks of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The first one of a connection.
    Hello(Hello),
    /// Take these fragments: one to [`MAX_PUT`]. Answered when they are durable.
    Put(Vec<Fragment>),
    /// Give all fragments of this blob.
    Get(BlobId),
    /// What is there of each of these blobs?
    Have {
        /// Whether the age of what is there begins again.
        renew: bool,
        /// At most [`MAX_ASKED`].
        blobs: Vec<BlobId>,
    },
    /// How much is there?
    Usage,
    /// Delete fragments.
    Delete {
        /// Only those that were not stored or renewed within so many seconds, by the peer's clock.
        idle: u32,
        /// At most [`MAX_DELETED`].
        fragments: Vec<FragmentId>,
    },
    /// Give fragments of records, those of the first blobs behind this one.
    Records(BlobId),
    /// Which fragments are there of the first blobs behind this one?
    List(BlobId),
    /// Keep so many bytes free for what this connection puts, instead of what it has reserved before.
    Reserve(u64),
}

/// What a peer answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To a hello: the version that is spoken, and who speaks.
    Welcome(u16, PeerId),
    /// All the fragments are durable.
    Stored,
    /// Not all of them are.
    Refused {
        /// For each fragment: what kind of failure, or nothing if it is durable.
        which: Vec<Option<ErrorKind>>,
        /// Why, for one of them.
        reason: String,
    },
    /// The fragments of a blob.
    Fragments(Vec<Fragment>),
    /// For each blob that was asked for, what is there.
    Held(Vec<Vec<Held>>),
    /// How much there is.
    Usage(Usage),
    /// The fragments are deleted, and the disk has so many bytes again.
    Deleted(u64),
    /// A page of fragments in the order of their blobs, all of a blob or none. An empty one is the end.
    Listed(Vec<(BlobId, Held)>),
    /// The room is reserved.
    Reserved,
    /// The request was not carried out.
    Failed(ErrorKind, String),
}

pub(crate) const HELLO: u16 = 1;
pub(crate) const PUT: u16 = 2;
pub(crate) const GET: u16 = 3;
pub(crate) const HAVE: u16 = 4;
const USAGE: u16 = 5;
const DELETE: u16 = 6;
pub(crate) const RECORDS: u16 = 7;
pub(crate) const LIST: u16 = 8;
const RESERVE: u16 = 9;
const WELCOME: u16 = 101;
const STORED: u16 = 102;
const FRAGMENTS: u16 = 103;
const HELD: u16 = 104;
const USED: u16 = 105;
const FAILED: u16 = 106;
const DELETED: u16 = 107;
const LISTED: u16 = 108;
const RESERVED: u16 = 109;
const REFUSED: u16 = 110;

/// Kinds of failures, as they are sent.
pub(crate) const KINDS: [ErrorKind; 5] = [
    ErrorKind::Invalid,
    ErrorKind::NotFound,
    ErrorKind::Conflict,
    ErrorKind::Corrupt,
    ErrorKind::Unavailable,
];

fn wrong(what: &str) -> Error {
    Error::corrupt("a message", what)
}

impl Request {
    /// Its kind and its body.
    pub fn to_body(&self) -> (u16, Vec<u8>) {
        match self {
            Request::Hello(Hello { oldest, newest }) => {
                let numbers = [oldest.to_le_bytes(), newest.to_le_bytes()].concat();
                (HELLO, [&MAGIC[..], &numbers].concat())
            }
            Request::Put(_) => {
                let (kind, parts) = self.to_parts();
                (kind, parts.concat())
            }
            Request::Get(blob) => (GET, blob.as_bytes().to_vec()),
            Request::Have { renew, blobs } => {
                let mut body = vec![u8::from(*renew)];
                blobs.iter().for_each(|blob| body.extend_from_slice(blob.as_bytes()));
                (HAVE, body)
            }
            Request::Usage => (USAGE, Vec::new()),
            Request::Delete { idle, fragments } => {
                let mut body = idle.to_le_bytes().to_vec();
                for FragmentId { blob, encoding, index } in fragments {
                    body.extend_from_slice(blob.as_bytes());
                    body.extend_from_slice(encoding.as_bytes());
                    body.push(*index);
                }
                (DELETE, body)
            }
            Request::Records(after) => (RECORDS, after.as_bytes().to_vec()),
            Request::List(after) => (LIST, after.as_bytes().to_vec()),
            Request::Reserve(bytes) => (RESERVE, bytes.to_le_bytes().to_vec()),
        }
    }

    /// The same without joining it: blocks are shared.
    pub fn to_parts(&self) -> (u16, Vec<Bytes>) {
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

    /// Reads it back.
    pub fn from_body(kind: u16, body: &[u8]) -> Result<Request> {
        Request::from_bytes(kind, &Bytes::copy_from_slice(body))
    }

    /// The same; a block is a part of the body, and not copied.
    pub fn from_bytes(kind: u16, whole: &Bytes) -> Result<Request> {
        let mut body = Body(whole, whole);
        let request = match kind {
            HELLO => {
                if body.take::<4>()? != *MAGIC {
                    return Err(wrong("a hello of another protocol"));
                }
                let (oldest, newest) = (body.u16()?, body.u16()?);
                Request::Hello(Hello { oldest, newest })
            }
            PUT => Request::Put(body.fragments()?),
            GET => Request::Get(body.blob()?),
            HAVE => {
                let renew = body.flag()?;
                let (ids, rest) = body.0.as_chunks::<32>();
                if ids.len() > MAX_ASKED || !rest.is_empty() {
                    return Err(wrong("a question about too many blobs"));
                }
                body.0 = rest;
                let blobs = ids.iter().map(|id| BlobId::from_bytes(*id)).collect();
                Request::Have { renew, blobs }
            }
            USAGE => Request::Usage,
            DELETE => {
                let idle = body.take().map(u32::from_le_bytes)?;
                let mut fragments = Vec::new();
                while !body.0.is_empty() {
                    if fragments.len() == MAX_DELETED {
                        return Err(wrong("a deletion of too many fragments"));
                    }
                    let (blob, encoding, [index]) = (body.blob()?, body.blob()?, body.take()?);
                    fragments.push(FragmentId { blob, encoding, index });
                }
                Request::Delete { idle, fragments }
            }
            RECORDS => Request::Records(body.blob()?),
            LIST => Request::List(body.blob()?),
            RESERVE => Request::Reserve(body.u64()?),
            _ => return Err(wrong("a request of a kind that is not known here")),
        };
        body.end().map(|()| request)
    }
}

impl Answer {
    /// The answer that tells why a request failed.
    pub fn failed(error: &Error) -> Answer {
        Answer::Failed(error.kind(), reason_of(error))
    }

    /// Its kind and its body.
    pub fn to_body(&self) -> (u16, Vec<u8>) {
        let mut body = Vec::new();
        let kind = match self {
            Answer::Welcome(version, peer) => {
                body.extend_from_slice(&version.to_le_bytes());
                body.extend_from_slice(peer.as_bytes());
                WELCOME
            }
            Answer::Stored => STORED,
            Answer::Refused { which, reason } => {
                body.push(which.len() as u8);
                body.extend(which.iter().map(|kind| kind.map_or(0, |kind| 1 + number_of(kind))));
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

    /// The same without joining it: blocks are shared.
    pub fn to_parts(&self) -> (u16, Vec<Bytes>) {
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

    /// Reads it back.
    pub fn from_body(kind: u16, body: &[u8]) -> Result<Answer> {
        Answer::from_bytes(kind, &Bytes::copy_from_slice(body))
    }

    /// The same; blocks are parts of the body, and not copied.
    pub fn from_bytes(kind: u16, whole: &Bytes) -> Result<Answer> {
        let mut body = Body(whole, whole);
        let answer = match kind {
            WELCOME => Answer::Welcome(body.u16()?, PeerId::from_bytes(body.take()?)),
            STORED => Answer::Stored,
            REFUSED => {
                let [count] = body.take()?;
                let which = (0..count).map(|_| match body.take()? {
                    [0] => Ok(None),
                    [kind] => kind_of(kind - 1).map(Some),
                });
                let which = which.collect::<Result<Vec<_>>>()?;
                if which.len() > MAX_PUT || which.iter().all(Option::is_none) {
                    return Err(wrong("a refusal of nothing"));
                }
                Answer::Refused { which, reason: read_reason(std::mem::take(&mut body.0))? }
            }
            FRAGMENTS => {
                let count = body.u16()?;
                Answer::Fragments((0..count).map(|_| body.fragment()).collect::<Result<_>>()?)
            }
            HELD => {
                let mut all = Vec::new();
                while !body.0.is_empty() {
                    if all.len() == MAX_ASKED {
                        return Err(wrong("more answers than there were questions"));
                    }
                    let [count] = body.take()?;
                    all.push((0..count).map(|_| body.held()).collect::<Result<_>>()?);
                }
                Answer::Held(all)
            }
            USED => {
                let (capacity, used) = (body.u64()?, body.u64()?);
                let (reserved, fragments) = (body.u64()?, body.u64()?);
                Answer::Usage(Usage { capacity, used, reserved, fragments })
            }
            DELETED => Answer::Deleted(body.u64()?),
            LISTED => {
                let mut all = Vec::new();
                while !body.0.is_empty() {
                    if all.len() == MAX_LISTED {
                        return Err(wrong("a page that is too long"));
                    }
                    all.push((body.blob()?, body.held()?));
                }
                Answer::Listed(all)
            }
            RESERVED => Answer::Reserved,
            FAILED => {
                let (kind, reason) = read_failure(std::mem::take(&mut body.0))?;
                Answer::Failed(kind, reason)
            }
            _ => return Err(wrong("an answer of a kind that is not known here")),
        };
        body.end().map(|()| answer)
    }
}

/// Why something failed, in as many words as are sent at most.
pub(crate) fn reason_of(error: &Error) -> String {
    error.to_string().chars().take(MAX_TEXT / 4).collect()
}

/// A failure as peers and catalogs send it.
pub(crate) fn failure_body(kind: ErrorKind, reason: &str) -> Vec<u8> {
    [&[number_of(kind)], reason.as_bytes()].concat()
}

/// Reads it back.
pub(crate) fn read_failure(body: &[u8]) -> Result<(ErrorKind, String)> {
    let (kind, text) = body.split_first().ok_or_else(|| wrong("it is cut off"))?;
    Ok((kind_of(*kind)?, read_reason(text)?))
}

fn number_of(kind: ErrorKind) -> u8 {
    KINDS.iter().position(|one| *one == kind).expect("all are listed") as u8
}

fn kind_of(number: u8) -> Result<ErrorKind> {
    KINDS.get(usize::from(number)).copied().ok_or_else(|| wrong("an unknown failure"))
}

fn read_reason(text: &[u8]) -> Result<String> {
    if text.len() > MAX_TEXT {
        return Err(wrong("a reason of too many words"));
    }
    let text = std::str::from_utf8(text).map_err(|_| wrong("a reason without words"))?;
    Ok(text.to_owned())
}

/// What tells of a block: its index and its description, which says how long it is.
fn write_head(body: &mut Vec<u8>, fragment: &Fragment) {
    body.push(fragment.index);
    fragment.description.write(body);
}

/// Bytes of a put from which it is known where its blocks begin: how many there are, and the bytes of all heads.
pub(crate) const LEAD: usize = 4;

/// Where the blocks of a put begin, if it is one.
pub(crate) fn blocks_at(lead: &[u8; LEAD]) -> usize {
    let [_, _, heads @ ..] = *lead;
    LEAD + usize::from(u16::from_le_bytes(heads))
}

/// Bytes of a fragment in a body.
pub(crate) fn fragment_len(description: &Description) -> usize {
    1 + description.to_bytes().len() + description.block_len()
}

fn write_held(body: &mut Vec<u8>, held: &Held) {
    let Held { encoding, data, parity, index, kind, len } = held;
    body.extend_from_slice(encoding.as_bytes());
    body.extend_from_slice(&[*data, *parity, *index, *kind as u8]);
    body.extend_from_slice(&len.to_le_bytes());
}

/// What is left of a body, and the whole of it.
struct Body<'a>(&'a [u8], &'a Bytes);

impl Body<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk().ok_or_else(|| wrong("it is cut off"))?;
        self.0 = rest;
        Ok(*head)
    }

    fn u16(&mut self) -> Result<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn head(&mut self) -> Result<(Description, u8)> {
        let [index] = self.take()?;
        let (description, rest) = Description::from_bytes(self.0)?;
        self.0 = rest;
        if usize::from(index) >= description.width() {
            return Err(wrong("a block that does not exist"));
        }
        Ok((description, index))
    }

    fn block(&mut self, (description, index): (Description, u8)) -> Result<Fragment> {
        let (block, rest) = self
            .0
            .split_at_checked(description.block_len())
            .ok_or_else(|| wrong("it is cut off"))?;
        self.0 = rest;
        Ok(Fragment { description, index, block: self.1.slice_ref(block) })
    }

    /// One whose block is behind its head.
    fn fragment(&mut self) -> Result<Fragment> {
        let head = self.head()?;
        self.block(head)
    }

    /// Those of a put: all heads, then all blocks.
    fn fragments(&mut self) -> Result<Vec<Fragment>> {
        let (count, len) = (usize::from(self.u16()?), usize::from(self.u16()?));
        if !(1..=MAX_PUT).contains(&count) {
            return Err(wrong("a put of nothing, or of too many fragments"));
        }
        let behind = self.0.len().checked_sub(len);
        let heads = (0..count).map(|_| self.head()).collect::<Result<Vec<_>>>()?;
        if behind != Some(self.0.len()) {
            return Err(wrong("heads that are as long as they do not say"));
        }
        heads.into_iter().map(|head| self.block(head)).collect()
    }

    fn held(&mut self) -> Result<Held> {
        let encoding = self.blob()?;
        let [data, parity, index] = self.take()?;
        let kind = if self.flag()? { Kind::Record } else { Kind::Content };
        let len = self.take().map(u32::from_le_bytes)?;
        Ok(Held { encoding, data, parity, index, kind, len })
    }

    fn blob(&mut self) -> Result<BlobId> {
        self.take().map(BlobId::from_bytes)
    }

    fn flag(&mut self) -> Result<bool> {
        match self.take()? {
            [0] => Ok(false),
            [1] => Ok(true),
            _ => Err(wrong("neither yes nor no")),
        }
    }

    /// Nothing may be behind a message.
    fn end(self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(wrong("there is more than a message")) }
    }
}

#[cfg(test)]
mod tests;
