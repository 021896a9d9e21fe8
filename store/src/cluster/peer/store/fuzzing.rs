//! Segments of a peer whose table is lost.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::group::{Entries, Key, LogPosition, decode};
use super::log::scan_file;
use crate::durable::segment::ALIGNMENT;
use crate::encoding::fragment::{Description, encode};
use crate::encoding::redundancy::Redundancy;
use crate::id::{BlobId, PeerId};

const NUMBER: u64 = 1;

/// The most groups.
const GROUPS: u8 = 4;

/// The first byte is the number of groups. Each of these has a byte for the number of its fragments, and for each of
/// them one for its length and one for its content. The rest are flips: two bytes that say where in which page, and
/// one that says which bits.
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
    file.write_all_at(&bytes, 0).expect("the file is in memory");
    let (found, end) = scan_file(file, &key, NUMBER, 0).expect("the file is in memory");
    let mut last = 0;
    for one in &found {
        let (start, len) = (one.place.offset as usize, one.description.block_len());
        let block = &bytes[start..start + len];
        assert!(one.description.matches(one.index.into(), block), "a block has its checksum");
        // Flips that hit a block make none: whatever has a record was written as it is.
        let is_it = |(description, index, content): &&(Description, u8, Vec<u8>)| {
            *description == one.description && *index == one.index && content == block
        };
        assert!(written.iter().any(|one| is_it(&one)), "nothing is found that was not written");
        assert!(one.place.offset >= last && one.place.segment == NUMBER, "no two overlap");
        last = one.end();
    }
    assert!(end >= last, "the next group overwrites nothing");
    let is_whole = flips.len() < 3;
    assert!(
        !is_whole || found.len() == written.len(),
        "every fragment of a whole segment is found"
    );
}

/// A fragment. Some hold what looks like a record: of this peer at another place, or of another peer at this one.
fn fragment(key: &Key, before: &[u8], len: u8, seed: u8) -> (Description, u8, Vec<u8>) {
    let mut content = vec![seed; usize::from(len) * 64 + 1];
    if seed >= 0x80 {
        let (inner, _) = encode(&BlobId::of(b"x"), b"x", Redundancy::NONE);
        let entries = Entries::new(std::iter::once((&inner, 0)));
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

/// Appends a group.
fn append(key: &Key, bytes: &mut Vec<u8>, fragments: &[(Description, u8, Vec<u8>)]) {
    let entries = Entries::new(fragments.iter().map(|(one, index, _)| (one, *index)));
    let at = LogPosition { segment: NUMBER, offset: bytes.len() as u64 };
    let record = entries.record(key, at);
    let (len, known) = decode(key, at, &record).expect("a record is read as it was written");
    assert_eq!((len, known.len()), (record.len(), fragments.len()));
    bytes.extend(record);
    for (known, (_, _, block)) in known.iter().zip(fragments) {
        assert_eq!(known.place.offset, bytes.len() as u64);
        bytes.extend(block);
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    }
}
