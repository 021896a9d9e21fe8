//! The parts of the bodies of messages: heads, fragments, ids, stamps.

use std::io;

use bytes::Bytes;
use tokio::io::AsyncRead;

use super::{FragmentId, FragmentPart, HAVE, Held, MAX_BODY, MAX_HAVE_BODY, MAX_PUT, PUT};
use crate::collection::CollectionNumber;
use crate::encoding::fragment::{Description, Fragment, Kind};
use crate::encoding::{SEAL_BYTES, Seal};
use crate::error::Result;
use crate::id::BlobId;
use crate::net::frame::{Header, read_aligned_body, read_body};
use crate::net::message::{MessageReader, malformed};

/// Writes a fragment's head: the block's index and the description, which gives the block's length.
pub(super) fn write_head(body: &mut Vec<u8>, fragment: &Fragment) {
    body.push(fragment.index);
    fragment.description.write(body);
}

/// Bytes at the start of a put: the number of fragments, the length of all heads, which says where
/// the blocks begin, and the stamp.
pub(super) const LEAD: usize = 12;

/// The offset of the first block in a put.
pub(super) fn blocks_at(lead: &[u8; LEAD]) -> usize {
    LEAD + usize::from(u16::from_le_bytes([lead[2], lead[3]]))
}

/// The longest body of requests of a kind, in bytes. A longer one is refused before it is read.
pub(crate) fn longest_body(kind: u16) -> usize {
    match kind {
        HAVE => MAX_HAVE_BODY,
        _ => MAX_BODY,
    }
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
    1 + description.bytes_len() + description.block_len()
}

pub(super) fn write_id(body: &mut Vec<u8>, FragmentId { blob, encoding, index }: &FragmentId) {
    body.extend_from_slice(blob.as_bytes());
    body.extend_from_slice(encoding.as_bytes());
    body.push(*index);
}

pub(super) fn write_held(body: &mut Vec<u8>, held: &Held) {
    let Held { encoding, data, parity, index, kind, len, seal } = held;
    body.extend_from_slice(encoding.as_bytes());
    body.extend_from_slice(&[*data, *parity, *index, *kind as u8]);
    body.extend_from_slice(&len.to_le_bytes());
    body.extend_from_slice(seal.as_bytes());
}

/// Readers for the parts of messages that only this protocol has.
impl MessageReader<'_> {
    pub(super) fn head(&mut self) -> Result<(Description, u8)> {
        let index = self.u8()?;
        let (description, rest) = Description::from_bytes(self.rest())?;
        self.slice(self.rest().len() - rest.len())?;
        if usize::from(index) >= description.width() {
            return Err(malformed("a block index out of range"));
        }
        Ok((description, index))
    }

    pub(super) fn block(&mut self, (description, index): (Description, u8)) -> Result<Fragment> {
        let block = self.share(description.block_len())?;
        Ok(Fragment { description, index, block })
    }

    /// Reads a fragment whose block follows its head.
    pub(super) fn fragment(&mut self) -> Result<Fragment> {
        let head = self.head()?;
        self.block(head)
    }

    /// Reads a part of a fragment.
    pub(super) fn part(&mut self) -> Result<FragmentPart> {
        let (description, index) = self.head()?;
        let (offset, len) = (self.u32()?, self.u32()? as usize);
        let end = (offset as usize).checked_add(len);
        if end.is_none_or(|end| end > description.block_len()) {
            return Err(malformed("a part that is not in its block"));
        }
        Ok(FragmentPart { description, index, offset, bytes: self.share(len)? })
    }

    pub(super) fn stamp(&mut self) -> Result<CollectionNumber> {
        match CollectionNumber(self.u64()?) {
            stamp if stamp > CollectionNumber::MAX => Err(malformed("a stamp out of range")),
            stamp => Ok(stamp),
        }
    }

    /// Reads a put: the stamp, all heads, then all blocks.
    pub(super) fn put(&mut self) -> Result<(CollectionNumber, Vec<Fragment>)> {
        let (count, len) = (usize::from(self.u16()?), usize::from(self.u16()?));
        let stamp = self.stamp()?;
        if !(1..=MAX_PUT).contains(&count) {
            return Err(malformed("a put with no fragment or too many"));
        }
        let blocks_len = self.rest().len().checked_sub(len);
        let heads = (0..count).map(|_| self.head()).collect::<Result<Vec<_>>>()?;
        if blocks_len != Some(self.rest().len()) {
            return Err(malformed("heads whose length differs from the stated one"));
        }
        let fragments = heads.into_iter().map(|head| self.block(head)).collect::<Result<_>>()?;
        Ok((stamp, fragments))
    }

    pub(super) fn held(&mut self) -> Result<Held> {
        let encoding = self.blob()?;
        let [data, parity, index] = self.array()?;
        let kind = if self.flag()? { Kind::Record } else { Kind::Content };
        let (len, seal) = (self.u32()?, Seal::from_bytes(self.array::<SEAL_BYTES>()?));
        Ok(Held { encoding, data, parity, index, kind, len, seal })
    }

    pub(super) fn fragment_id(&mut self) -> Result<FragmentId> {
        Ok(FragmentId { blob: self.blob()?, encoding: self.blob()?, index: self.u8()? })
    }

    pub(super) fn blob(&mut self) -> Result<BlobId> {
        self.array().map(BlobId::from_bytes)
    }
}
