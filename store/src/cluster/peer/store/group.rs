//! A group: fragments that are written together, and the record of them in the segment.
//!
//! The record precedes the blocks in their segment. The blocks follow in the same order, each at
//! the start of a page. So a peer can find its fragments from the segments alone.
//!
//! | offset | length | is |
//! |---:|---:|---|
//! | 0 | 8 | `CRNPEERG` |
//! | 8 | 4 | version, 2 |
//! | 12 | 4 | *n*, the number of fragments |
//! | 16 | 8 | the segment's number |
//! | 24 | 8 | the record's offset in the segment |
//! | 32 | 4 | *l*, the bytes of the entries |
//! | 36 | *l* | *n* entries: the block's index (1), the stamp (8), and the fragment's description |
//! | 36 + *l* | 32 | keyed BLAKE3 of everything before, with a key derived from the peer's id |
//!
//! A guest decides what blocks contain. It does not know the key, so nothing that it writes is
//! taken for a record.

use crate::collection::CollectionNumber;
use crate::durable::segment;
use crate::durable::segment::ALIGNMENT;
use crate::encoding::MAX_STORED;
use crate::encoding::fragment::Description;
use crate::id::PeerId;

const MAGIC: &[u8; 8] = b"CRNPEERG";
/// Version 1 was never released.
const VERSION: u32 = 2;
const HEADER_BYTES: usize = 36;
const CHECKSUM_BYTES: usize = 32;
/// Bytes of an entry before the description.
const ENTRY_BYTES: usize = 9;

/// The most fragments in a group.
pub(super) const MAX_GROUP: usize = 256;

/// The longest record in bytes: a full group of fragments with the longest description.
pub(super) const MAX_RECORD: usize =
    (HEADER_BYTES + MAX_GROUP * (ENTRY_BYTES + Description::LONGEST) + CHECKSUM_BYTES)
        .next_multiple_of(ALIGNMENT);

/// The bits of a position's number that hold the page in the segment.
const PAGE_BITS: u32 = 24;

/// The position of a block in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct LogPosition {
    pub(super) segment: u64,
    pub(super) offset: u64,
}

impl LogPosition {
    /// The position as one number, in the order of the log.
    pub(super) fn number(self) -> i64 {
        ((self.segment << PAGE_BITS) | (self.offset / ALIGNMENT as u64)) as i64
    }

    /// The position with this number.
    pub(super) fn from_number(number: i64) -> LogPosition {
        let page = number & ((1 << PAGE_BITS) - 1);
        LogPosition {
            segment: (number >> PAGE_BITS) as u64,
            offset: page as u64 * ALIGNMENT as u64,
        }
    }

    /// The offset after a block of this length at this position, in whole pages.
    pub(super) fn end_of_block(self, len: usize) -> u64 {
        self.offset + len.next_multiple_of(ALIGNMENT) as u64
    }
}

/// A fragment in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KnownFragment {
    pub(super) description: Description,
    pub(super) index: u8,
    pub(super) place: LogPosition,
    pub(super) stamp: CollectionNumber,
}

impl KnownFragment {
    /// Whether both are the same fragment, at whatever position.
    pub(super) fn is_like(&self, other: &KnownFragment) -> bool {
        self.index == other.index && self.description == other.description
    }

    /// The offset after its block.
    pub(super) fn end(&self) -> u64 {
        self.place.end_of_block(self.description.block_len())
    }

    /// The bytes that its block takes on the disk.
    pub(super) fn space(&self) -> u64 {
        self.end() - self.place.offset
    }
}

/// The key of this peer's records.
#[derive(Clone)]
pub(super) struct Key([u8; 32]);

impl Key {
    pub(super) fn of(peer: &PeerId) -> Key {
        Key(blake3::derive_key("cairn 2026-11-16 the records of a peer's log", peer.as_bytes()))
    }

    fn checksum(&self, bytes: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.0, bytes)
    }
}

/// The encoded entries of a record.
pub(super) struct Entries {
    bytes: Vec<u8>,
    count: u32,
}

impl Entries {
    pub(super) fn new<'a>(
        all: impl Iterator<Item = (&'a Description, u8, CollectionNumber)>,
    ) -> Entries {
        let (mut bytes, mut count) = (Vec::new(), 0);
        for (description, index, stamp) in all {
            bytes.push(index);
            bytes.extend_from_slice(&stamp.0.to_le_bytes());
            description.write(&mut bytes);
            count += 1;
        }
        Entries { bytes, count }
    }

    /// The length of the record in bytes, in whole pages.
    pub(super) fn record_len(&self) -> usize {
        (HEADER_BYTES + self.bytes.len() + CHECKSUM_BYTES).next_multiple_of(ALIGNMENT)
    }

    /// The record for this position.
    pub(super) fn record(&self, key: &Key, at: LogPosition) -> Vec<u8> {
        let mut record = Vec::with_capacity(self.record_len());
        record.extend_from_slice(MAGIC);
        record.extend_from_slice(&VERSION.to_le_bytes());
        record.extend_from_slice(&self.count.to_le_bytes());
        record.extend_from_slice(&at.segment.to_le_bytes());
        record.extend_from_slice(&at.offset.to_le_bytes());
        record.extend_from_slice(&(self.bytes.len() as u32).to_le_bytes());
        record.extend_from_slice(&self.bytes);
        record.extend_from_slice(key.checksum(&record).as_bytes());
        record.resize(self.record_len(), 0);
        record
    }
}

/// Decodes the record at the start of `bytes`, which are at this position. Returns the record's
/// length and its fragments; `None` if there is no record. The blocks are not verified.
pub(super) fn decode(
    key: &Key,
    at: LogPosition,
    bytes: &[u8],
) -> Option<(usize, Vec<KnownFragment>)> {
    let number = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let wide = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let (count, len) = (number(12)? as usize, number(32)? as usize);
    if !bytes.starts_with(MAGIC)
        || number(8)? != VERSION
        || (wide(16)?, wide(24)?) != (at.segment, at.offset)
        || !(1..=MAX_GROUP).contains(&count)
    {
        return None;
    }
    let end = HEADER_BYTES.checked_add(len)?;
    let checksum: [u8; CHECKSUM_BYTES] =
        bytes.get(end..end.checked_add(CHECKSUM_BYTES)?)?.try_into().ok()?;
    if key.checksum(&bytes[..end]) != checksum {
        return None;
    }
    let mut rest = &bytes[HEADER_BYTES..end];
    let mut entries = Vec::with_capacity(count);
    for _ in 0..count {
        let ([index, stamp @ ..], tail) = rest.split_first_chunk::<ENTRY_BYTES>()?;
        let stamp = CollectionNumber(u64::from_le_bytes(*stamp)).min(CollectionNumber::MAX);
        let (description, tail) = Description::from_bytes(tail).ok()?;
        if usize::from(*index) >= description.width() || description.block_len() > MAX_STORED {
            return None;
        }
        entries.push((description, *index, stamp));
        rest = tail;
    }
    let record_len = (end + CHECKSUM_BYTES).next_multiple_of(ALIGNMENT);
    let lens = entries.iter().map(|(description, ..)| description.block_len());
    let (offsets, _) = segment::place(at.offset + record_len as u64, lens);
    let known = |((description, index, stamp), offset)| {
        let place = LogPosition { segment: at.segment, offset };
        KnownFragment { description, index, place, stamp }
    };
    rest.is_empty().then(|| (record_len, entries.into_iter().zip(offsets).map(known).collect()))
}
