//! Fuzzing of a peer's segments when the table is lost.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::group::{Entries, Key, LogPosition, decode};
use super::log::scan_file;
use crate::collection::CollectionNumber;
use crate::durable::segment::ALIGNMENT;
use crate::encoding::fragment::{Description, encode};
use crate::encoding::redundancy::Redundancy;
use crate::id::{BlobId, PeerId};

const NUMBER: u64 = 1;

/// The most groups in a segment.
const GROUPS: u8 = 4;

/// Writes a segment, flips some of its bits, and checks what a scan finds.
///
/// The first byte of `data` is the number of groups. Each group has a byte for the number of its
/// fragments, and for each fragment a byte for its length and a byte for its content. The rest are
/// flips: two bytes for the page and the offset in it, and one for the bits.
pub(crate) fn segment(data: &[u8], file: &File) {
    let key = Key::of(&PeerId::from_bytes([7; 16]));
    let mut input = data.iter().copied();
    let mut next = || input.next().unwrap_or(0);
    let (mut bytes, mut written) = (Vec::new(), Vec::new());
    for _ in 0..next() % (GROUPS + 1) {
        let fragments: Vec<_> =
            (0..next() % 4 + 1).map(|_| fragment(&key, &bytes, next(), next())).collect();
        append(&key, &mut bytes, &fragments);
        written.extend(fragments);
    }
    let flips: Vec<u8> = input.collect();
    let len = bytes.len();
    for [page, at, mask] in flips.as_chunks().0.iter().filter(|_| len > 0) {
        bytes[(usize::from(*page) * ALIGNMENT + usize::from(*at)) % len] ^= mask;
    }
    file.write_all_at(&bytes, 0).expect("a file in memory can be used");
    let (found, end) = scan_file(file, &key, NUMBER, 0).expect("a file in memory can be used");
    let mut last = 0;
    for one in &found {
        let (start, len) = (one.place.offset as usize, one.description.block_len());
        let block = &bytes[start..start + len];
        assert!(one.description.matches(one.index.into(), block), "a block matches its checksum");
        // Flips do not create fragments: every fragment that is found was written as it is.
        let is_it = |(description, index, content): &&(Description, u8, Vec<u8>)| {
            *description == one.description && *index == one.index && content == block
        };
        assert!(
            written.iter().any(|one| is_it(&one)),
            "only fragments that were written are found"
        );
        assert!(
            one.place.offset >= last && one.place.segment == NUMBER,
            "fragments do not overlap"
        );
        last = one.end();
    }
    assert!(end >= last, "the next group overwrites nothing");
    let is_whole = flips.len() < 3;
    assert!(
        !is_whole || found.len() == written.len(),
        "every fragment of a whole segment is found"
    );
}

/// A fragment. Some contain a forged record: of this peer for another place, or of another peer for
/// this place.
fn fragment(key: &Key, before: &[u8], len: u8, seed: u8) -> (Description, u8, Vec<u8>) {
    let mut content = vec![seed; usize::from(len) * 64 + 1];
    if seed >= 0x80 {
        let (inner, _) = encode(&BlobId::of(b"x"), b"x", Redundancy::NONE);
        let entries = Entries::new(std::iter::once((&inner, 0, CollectionNumber(7))));
        let forged = Key::of(&PeerId::from_bytes([8; 16]));
        let (key, offset) = match seed % 2 {
            0 => (key, 1 << 30),
            _ => (&forged, before.len() as u64 + u64::from(seed - 0x80) * ALIGNMENT as u64),
        };
        content = entries.record(key, LogPosition { segment: NUMBER, offset });
        content.extend(b"x");
    }
    let code = Redundancy::ReedSolomon { data: 2, parity: 1 };
    let policy = if seed.is_multiple_of(3) { code } else { Redundancy::NONE };
    let (description, blocks) = encode(&BlobId::of(&content), &content, policy);
    let block = blocks.get(0).to_vec();
    (description, 0, block)
}

/// Appends a group to a segment.
fn append(key: &Key, bytes: &mut Vec<u8>, fragments: &[(Description, u8, Vec<u8>)]) {
    let stamp = CollectionNumber(7);
    let entries = Entries::new(fragments.iter().map(|(one, index, _)| (one, *index, stamp)));
    let at = LogPosition { segment: NUMBER, offset: bytes.len() as u64 };
    let record = entries.record(key, at);
    let (len, known) = decode(key, at, &record).expect("a record decodes to itself");
    assert_eq!((len, known.len()), (record.len(), fragments.len()));
    bytes.extend(record);
    for (known, (_, _, block)) in known.iter().zip(fragments) {
        assert_eq!(known.place.offset, bytes.len() as u64);
        bytes.extend(block);
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    }
}
