//! A group of blobs that are written together, and the record that describes it.
//!
//! The record precedes the blobs in their segment, so that the index can be rebuilt from the
//! segments alone.
//!
//! | offset | length | content |
//! |---:|---:|---|
//! | 0 | 8 | `CRNGROUP` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | *n*, from 1 to 256 |
//! | 16 | 8 | the segment's number |
//! | 24 | 48 × *n* | name (32), offset (8), length (4), zero (4) of each blob |
//! | 24 + 48 × *n* | 32 | BLAKE3 hash of all bytes before it |

use std::sync::Arc;

use super::index::Slot;
use crate::durable::segment;
use crate::durable::segment::{ALIGNMENT, Segment};
use crate::geometry::MAX_CHUNK_SIZE;
use crate::id::BlobId;

const MAGIC: &[u8; 8] = b"CRNGROUP";
const VERSION: u32 = 1;
const HEADER_LEN: usize = 24;
const ENTRY_LEN: usize = 48;
const CHECKSUM_LEN: usize = 32;

/// The most blobs in a group. It bounds the record's length.
pub(super) const MAX_BLOBS: usize = 256;

/// The length of the longest record, in bytes.
pub(super) const MAX_RECORD_LEN: usize = record_len(MAX_BLOBS);

/// Returns the length of the record of this many blobs, in bytes, rounded up to whole blocks.
pub(super) const fn record_len(blobs: usize) -> usize {
    (HEADER_LEN + blobs * ENTRY_LEN + CHECKSUM_LEN).next_multiple_of(ALIGNMENT)
}

/// The record of a group in its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// The offset of the record.
    pub(super) record: u64,
    /// The length of the record, in bytes.
    pub(super) record_len: u32,
}

impl Group {
    /// The group of this many blobs whose record is at this offset.
    pub(super) fn new(record: u64, blobs: usize) -> Group {
        let record_len = u32::try_from(record_len(blobs)).expect("a record is short");
        Group { record, record_len }
    }
}

/// A blob that is written but not yet durable.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) id: BlobId,
    pub(super) slot: Slot,
    pub(super) group: Group,
    pub(super) segment: Arc<Segment>,
}

/// Returns the slots of the blobs of a group and the end of the group. The blobs follow the record,
/// each at the start of a block.
pub(super) fn place(segment: u64, start: u64, lens: &[usize]) -> (Vec<Slot>, u64) {
    let first = start + record_len(lens.len()) as u64;
    let (offsets, end) = segment::place(first, lens.iter().copied());
    let slot = |(offset, len): (u64, &usize)| {
        let len = u32::try_from(*len).expect("the length of a blob fits into 32 bits");
        Slot { segment, offset, len }
    };
    (offsets.into_iter().zip(lens).map(slot).collect(), end)
}

/// Encodes the record of a group.
pub(super) fn encode(
    segment: u64,
    blobs: impl ExactSizeIterator<Item = (BlobId, Slot)>,
) -> Vec<u8> {
    let len = record_len(blobs.len());
    let count = u32::try_from(blobs.len()).expect("a group has at most MAX_BLOBS blobs");
    let mut bytes = Vec::with_capacity(len);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&count.to_le_bytes());
    bytes.extend_from_slice(&segment.to_le_bytes());
    for (id, slot) in blobs {
        bytes.extend_from_slice(id.as_bytes());
        bytes.extend_from_slice(&slot.offset.to_le_bytes());
        bytes.extend_from_slice(&slot.len.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
    }
    let checksum = blake3::hash(&bytes);
    bytes.extend_from_slice(checksum.as_bytes());
    bytes.resize(len, 0);
    bytes
}

/// Decodes the record at the start of `bytes`, which begin at offset `start` of the segment.
/// Returns the blobs that it names, or `None` if there is no valid record.
///
/// A guest can write bytes that look like a record. So the caller must verify the content of each
/// blob.
pub(super) fn decode(segment: u64, start: u64, bytes: &[u8]) -> Option<Vec<(BlobId, Slot)>> {
    let u32_at = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let count = u32_at(12)? as usize;
    if !bytes.starts_with(MAGIC)
        || u32_at(8)? != VERSION
        || u64_at(16)? != segment
        || !(1..=MAX_BLOBS).contains(&count)
    {
        return None;
    }
    let end = HEADER_LEN + count * ENTRY_LEN;
    if blake3::hash(bytes.get(..end)?).as_bytes() != bytes.get(end..end + CHECKSUM_LEN)? {
        return None;
    }
    let entry = |at: usize| {
        let id = BlobId::from_bytes(bytes.get(at..at + 32)?.try_into().ok()?);
        Some((id, Slot { segment, offset: u64_at(at + 32)?, len: u32_at(at + 40)? }))
    };
    let blobs: Vec<_> =
        (0..count).map(|n| entry(HEADER_LEN + n * ENTRY_LEN)).collect::<Option<_>>()?;
    // The slots must be those of a group that starts here, and no blob may exceed the largest
    // length.
    let lens: Vec<_> = blobs.iter().map(|(_, slot)| slot.len as usize).collect();
    let is_valid = lens.iter().all(|len| *len <= MAX_CHUNK_SIZE as usize)
        && place(segment, start, &lens).0.iter().eq(blobs.iter().map(|(_, slot)| slot));
    is_valid.then_some(blobs)
}
