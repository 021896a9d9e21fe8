//! Blobs that are written together, and the record that a segment keeps of them.
//!
//! The record comes before the blobs in their segment, so that the index can be made again from the
//! segments alone.
//!
//! | offset | length | is |
//! |---:|---:|---|
//! | 0 | 8 | `CRNGROUP` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | *n* |
//! | 16 | 8 | the segment's number |
//! | 24 | 48 × *n* | name (32), offset (8), length (4), zero (4) of each blob |
//! | 24 + 48 × *n* | 32 | BLAKE3 of all before |

use std::sync::Arc;

use super::index::Slot;
use crate::durable::segment;
use crate::durable::segment::{ALIGNMENT, Segment};
use crate::geometry::MAX_CHUNK_SIZE;
use crate::id::BlobId;

const MAGIC: &[u8; 8] = b"CRNGROUP";
const VERSION: u32 = 1;
const HEADER: usize = 24;
const ENTRY: usize = 48;
const CHECKSUM: usize = 32;

/// The most blobs of a group, which bounds the record's length.
pub(super) const MAX_BLOBS: usize = 256;

/// The longest record.
pub(super) const MAX_RECORD: usize = record_len(MAX_BLOBS);

/// The length of a record, in whole blocks.
pub(super) const fn record_len(blobs: usize) -> usize {
    (HEADER + blobs * ENTRY + CHECKSUM).next_multiple_of(ALIGNMENT)
}

/// A blob that is written and not yet durable.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) id: BlobId,
    pub(super) slot: Slot,
    pub(super) segment: Arc<Segment>,
}

/// Where the blobs of a group are: right behind its record, each at the start of a block. And where the
/// group ends.
pub(super) fn place(segment: u64, start: u64, lens: &[usize]) -> (Vec<Slot>, u64) {
    let first = start + record_len(lens.len()) as u64;
    let (offsets, end) = segment::place(first, lens.iter().copied());
    let slot = |(offset, len): (u64, &usize)| {
        let len = u32::try_from(*len).expect("a blob is small");
        Slot { segment, offset, len }
    };
    (offsets.into_iter().zip(lens).map(slot).collect(), end)
}

/// The record of a group.
pub(super) fn encode(
    segment: u64,
    blobs: impl ExactSizeIterator<Item = (BlobId, Slot)>,
) -> Vec<u8> {
    let len = record_len(blobs.len());
    let count = u32::try_from(blobs.len()).expect("a group is small");
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

/// The blobs of a record at the start of `bytes`, which are at `start` of the segment, if a record is
/// there.
///
/// A guest can write what looks like one. So whoever uses this checks each blob's content.
pub(super) fn decode(segment: u64, start: u64, bytes: &[u8]) -> Option<Vec<(BlobId, Slot)>> {
    let number = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let wide = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let count = number(12)? as usize;
    if !bytes.starts_with(MAGIC)
        || number(8)? != VERSION
        || wide(16)? != segment
        || !(1..=MAX_BLOBS).contains(&count)
    {
        return None;
    }
    let end = HEADER + count * ENTRY;
    if blake3::hash(bytes.get(..end)?).as_bytes() != bytes.get(end..end + CHECKSUM)? {
        return None;
    }
    let entry = |at: usize| {
        let id = BlobId::from_bytes(bytes.get(at..at + 32)?.try_into().ok()?);
        Some((id, Slot { segment, offset: wide(at + 32)?, len: number(at + 40)? }))
    };
    let blobs: Vec<_> = (0..count).map(|n| entry(HEADER + n * ENTRY)).collect::<Option<_>>()?;
    // They lie where a group's blobs lie, and are no longer than blobs are.
    let lens: Vec<_> = blobs.iter().map(|(_, slot)| slot.len as usize).collect();
    let placed = lens.iter().all(|len| *len <= MAX_CHUNK_SIZE as usize)
        && place(segment, start, &lens).0.iter().eq(blobs.iter().map(|(_, slot)| slot));
    placed.then_some(blobs)
}
