//! Blobs that become durable together, and the record that a segment keeps of them.
//!
//! The record follows the blobs in their segment, so that the index can be made again from the
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
use super::segment::{ALIGNMENT, Segment};
use crate::id::BlobId;

const MAGIC: &[u8; 8] = b"CRNGROUP";
const VERSION: u32 = 1;
const HEADER: usize = 24;
const ENTRY: usize = 48;
const CHECKSUM: usize = 32;

/// The most blobs of a group, which bounds the record's length.
pub(super) const MAX_ENTRIES: usize = 4096;

/// The longest record.
pub(super) const MAX_RECORD: usize =
    (HEADER + MAX_ENTRIES * ENTRY + CHECKSUM).next_multiple_of(ALIGNMENT);

/// A blob that is written and not yet durable.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) id: BlobId,
    pub(super) slot: Slot,
    pub(super) segment: Arc<Segment>,
    /// A damaged blob has this name in the index.
    pub(super) replaces: bool,
}

/// The record of blobs in one segment, padded to whole blocks.
pub(super) fn encode(segment: u64, entries: &[&Entry]) -> Vec<u8> {
    let count = u32::try_from(entries.len()).expect("a group is small");
    let mut bytes = Vec::with_capacity(HEADER + entries.len() * ENTRY + CHECKSUM);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&count.to_le_bytes());
    bytes.extend_from_slice(&segment.to_le_bytes());
    for entry in entries {
        bytes.extend_from_slice(entry.id.as_bytes());
        bytes.extend_from_slice(&entry.slot.offset.to_le_bytes());
        bytes.extend_from_slice(&entry.slot.len.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
    }
    let checksum = blake3::hash(&bytes);
    bytes.extend_from_slice(checksum.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    bytes
}

/// Whether a block may be the start of a record.
pub(super) fn is_start(block: &[u8]) -> bool {
    block.starts_with(MAGIC)
}

/// The blobs of a record at the start of `bytes`, if a record of this segment is there.
///
/// A guest can write what looks like a record. So whoever uses this checks each blob's content.
pub(super) fn decode(segment: u64, bytes: &[u8]) -> Option<Vec<(BlobId, Slot)>> {
    let number = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let wide = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let count = number(12)? as usize;
    if !is_start(bytes)
        || number(8)? != VERSION
        || wide(16)? != segment
        || !(1..=MAX_ENTRIES).contains(&count)
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
    (0..count).map(|n| entry(HEADER + n * ENTRY)).collect()
}
