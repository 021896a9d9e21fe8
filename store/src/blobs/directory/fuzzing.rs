//! The fuzz target for the scan of a segment whose index is lost.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::group::{decode, encode, place};
use super::index::{Found, Slot};
use super::scan::scan_file;
use crate::durable::segment::ALIGNMENT;
use crate::id::BlobId;

/// The number of the segment.
const SEGMENT: u64 = 1;

/// The most groups in the segment.
const MAX_GROUPS: u8 = 4;

/// Builds a segment from the input, flips bits in it, scans it, and checks what the scan reports.
///
/// The input has these parts, in order:
///
/// 1. one byte: the number of groups;
/// 2. for each group, one byte for the number of its blobs, and for each blob one byte for its
///    length and one for its content;
/// 3. bit flips of three bytes each: the block, the position in the block, and the mask.
pub(crate) fn segment(data: &[u8], file: &File) {
    let mut input = data.iter().copied();
    let mut next = || input.next().unwrap_or(0);
    let mut bytes = Vec::new();
    let mut written = Vec::new();
    for _ in 0..next() % (MAX_GROUPS + 1) {
        let blobs: Vec<Vec<u8>> = (0..next() % 4 + 1).map(|_| content(next(), next())).collect();
        written.extend(append(&mut bytes, &blobs));
    }
    let flips: Vec<u8> = input.collect();
    let len = bytes.len();
    for [block, at, mask] in flips.as_chunks().0.iter().filter(|_| len > 0) {
        // A record starts at the start of a block, so a flip hits one of a block's first 256 bytes.
        let at = usize::from(*block) * ALIGNMENT + usize::from(*at);
        bytes[at % len] ^= mask;
    }
    let is_undamaged = flips.len() < 3;
    file.write_all_at(&bytes, 0).expect("the file is in memory");
    let mut found: Vec<(BlobId, Slot)> = Vec::new();
    let mut segments = 0;
    let report = &mut |one| {
        match one {
            Found::Segment { number, end } => {
                assert_eq!((number, end), (SEGMENT, bytes.len() as u64));
                segments += 1;
            }
            Found::Blob { id, slot, .. } => found.push((id, slot)),
        }
        Ok(())
    };
    scan_file(file, Path::new("segment"), SEGMENT, report).expect("the file is in memory");
    assert_eq!(segments, 1);
    let mut end = 0;
    for (id, slot) in &found {
        let content = &bytes[slot.offset as usize..][..slot.len as usize];
        assert_eq!(BlobId::of(content), *id, "the name of a blob is the hash of its content");
        assert_eq!((slot.segment, slot.offset % ALIGNMENT as u64), (SEGMENT, 0));
        assert!(slot.offset >= end, "no two blobs overlap");
        end = slot.end();
    }
    assert!(!is_undamaged || found == written, "every blob of an undamaged segment is found");
    // A record that is decoded and encoded again decodes to the same blobs.
    for start in (0..bytes.len()).step_by(ALIGNMENT) {
        let Some(blobs) = decode(SEGMENT, start as u64, &bytes[start..]) else { continue };
        let again = encode(SEGMENT, blobs.iter().copied());
        assert_eq!(decode(SEGMENT, start as u64, &again), Some(blobs));
    }
}

/// Appends a group and returns the slots of its blobs.
fn append(bytes: &mut Vec<u8>, blobs: &[Vec<u8>]) -> Vec<(BlobId, Slot)> {
    let lens: Vec<_> = blobs.iter().map(Vec::len).collect();
    let (slots, end) = place(SEGMENT, bytes.len() as u64, &lens);
    let ids = blobs.iter().map(|content| BlobId::of(content));
    let entries: Vec<_> = ids.zip(slots).collect();
    bytes.extend(encode(SEGMENT, entries.iter().copied()));
    for content in blobs {
        bytes.extend(content);
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    }
    assert_eq!(bytes.len() as u64, end);
    entries
}

/// Returns the content of a blob. Some contents look like a group record, as a guest could write
/// it.
fn content(len: u8, seed: u8) -> Vec<u8> {
    let len = usize::from(len) * 64;
    if seed >= 0x80 {
        let inner = vec![seed; 100];
        let start = u64::from(seed - 0x80) * ALIGNMENT as u64;
        let (slots, _) = place(SEGMENT, start, &[inner.len()]);
        let mut bytes = encode(SEGMENT, std::iter::once((BlobId::of(&inner), slots[0])));
        bytes.extend(inner);
        bytes.truncate(len);
        return bytes;
    }
    vec![seed; len]
}
