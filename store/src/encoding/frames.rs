//! Frames: the parts of a blob's content that can be read alone.
//!
//! ```text
//! content   │ 64 KiB    │ 64 KiB    │ 64 KiB    │ rest │
//! subtrees  │ value 0   │ value 1   │ value 2   │ ...  │ ─► merged: the blob's name
//! stored    │ frame 0 │ frame 1│ frame 2   │ fr. 3 │      compressed one by one
//! ```
//!
//! A blob's name is the root of a BLAKE3 tree over its content. The *chaining values* of the aligned
//! subtrees of 64 KiB, one for each frame, are enough to verify one frame against that name. Each
//! frame is compressed on its own. So a reader that wants 4 KiB fetches, inflates and verifies one
//! frame.
//!
//! Content of one frame has no chaining values: its hash is the name.

use std::ops::Range;
use std::sync::Arc;

use blake3::Hasher;
use blake3::hazmat::{self, HasherExt, Mode};

use super::compression::{Codec, Compression, compress_frame, decompress_frame, shrinks};
use crate::id::BlobId;

/// Bytes of content in a frame. The last frame of a blob may have less.
pub const FRAME_BYTES: usize = 64 << 10;

/// The chaining value of a subtree.
pub(crate) type ChainingValue = hazmat::ChainingValue;

/// The name of some content, and the values from which a frame can be verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContentHash {
    pub(crate) name: BlobId,
    /// The chaining value of each frame; empty for content of one frame.
    pub(crate) subtrees: Arc<[ChainingValue]>,
}

impl ContentHash {
    /// Hashes content once, for both the name and the chaining values.
    pub fn of(content: &[u8]) -> ContentHash {
        if content.len() <= FRAME_BYTES {
            return ContentHash { name: BlobId::of(content), subtrees: Arc::default() };
        }
        let frames = content.chunks(FRAME_BYTES).enumerate();
        let subtrees: Arc<[_]> = frames.map(|(frame, bytes)| subtree(frame, bytes)).collect();
        ContentHash { name: merge(&subtrees), subtrees }
    }
}

/// The number of frames of content with this length.
pub(crate) fn frame_count(len: usize) -> usize {
    len.div_ceil(FRAME_BYTES)
}

/// The bytes of content in a frame.
pub(crate) fn frame_range(frame: usize, len: usize) -> Range<usize> {
    let start = (frame * FRAME_BYTES).min(len);
    start..(start + FRAME_BYTES).min(len)
}

/// The chaining value of a frame that is not the whole content.
fn subtree(frame: usize, bytes: &[u8]) -> ChainingValue {
    let mut hasher = Hasher::new();
    hasher.set_input_offset((frame * FRAME_BYTES) as u64).update(bytes);
    hasher.finalize_non_root()
}

/// The name that two or more chaining values give.
fn merge(subtrees: &[ChainingValue]) -> BlobId {
    let (left, right) = halves(subtrees);
    let root = hazmat::merge_subtrees_root(&merged(left), &merged(right), Mode::Hash);
    BlobId::from_bytes(*root.as_bytes())
}

fn merged(subtrees: &[ChainingValue]) -> ChainingValue {
    match subtrees {
        [one] => *one,
        more => {
            let (left, right) = halves(more);
            hazmat::merge_subtrees_non_root(&merged(left), &merged(right), Mode::Hash)
        }
    }
}

/// Splits subtrees as BLAKE3 does: the left half is the largest power of two that leaves a right one.
fn halves(subtrees: &[ChainingValue]) -> (&[ChainingValue], &[ChainingValue]) {
    subtrees.split_at(subtrees.len().next_power_of_two() / 2)
}

/// Whether a frame belongs to the blob with this name, according to chaining values that need not be
/// right: they are compared with the name, too.
pub(crate) fn is_frame_of(
    name: &BlobId,
    subtrees: &[ChainingValue],
    frame: usize,
    bytes: &[u8],
) -> bool {
    if bytes.is_empty() || bytes.len() > FRAME_BYTES {
        return false;
    }
    match subtrees {
        [] => frame == 0 && BlobId::of(bytes) == *name,
        [_] => false,
        all => {
            let wanted = all.get(frame);
            wanted.is_some_and(|wanted| *wanted == subtree(frame, bytes)) && merge(all) == *name
        }
    }
}

/// Content whose frames were compressed.
pub(crate) struct Compressed {
    pub(crate) codec: Codec,
    pub(crate) bytes: Vec<u8>,
    /// Bytes of each compressed frame. A frame that does not shrink is stored as it is.
    pub(crate) frames: Vec<u32>,
}

/// Compresses each frame of content. Returns `None` if that does not save at least an eighth.
pub(crate) fn compress(content: &[u8], how: Compression) -> Option<Compressed> {
    let codec = match how {
        Compression::None => return None,
        Compression::Auto if !shrinks(content) => return None,
        Compression::Auto | Compression::Zstd => Codec::Zstd,
        Compression::Lz4 => Codec::Lz4,
    };
    // The longest length that saves at least an eighth.
    let limit = content.len() - content.len().div_ceil(8);
    let mut bytes = Vec::with_capacity(limit);
    let mut frames = Vec::with_capacity(frame_count(content.len()));
    for frame in content.chunks(FRAME_BYTES) {
        let before = bytes.len();
        let room = (limit - before).min(frame.len() - 1);
        if !compress_frame(codec, frame, room, &mut bytes) {
            if before + frame.len() > limit {
                return None;
            }
            bytes.extend_from_slice(frame);
        }
        frames.push((bytes.len() - before) as u32);
    }
    Some(Compressed { codec, bytes, frames })
}

/// Decompresses one frame to exactly the length of `content`.
pub(crate) fn open_frame(codec: Codec, stored: &[u8], content: &mut [u8]) -> Result<(), String> {
    if stored.len() == content.len() {
        content.copy_from_slice(stored);
        return Ok(());
    }
    decompress_frame(codec, stored, content)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::{
        BlobId, Codec, Compression, ContentHash, FRAME_BYTES, compress, frame_count, frame_range,
        is_frame_of, open_frame,
    };

    fn noise(len: usize, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; len];
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
        bytes
    }

    #[test]
    fn the_name_is_the_hash_of_the_whole_content_at_every_length() {
        let all = noise(1 << 20, 1);
        let edges = (0..=16).flat_map(|frames| {
            let at = frames * FRAME_BYTES;
            [at.saturating_sub(1), at, at + 1, at + 1024, at + 5000]
        });
        for len in edges.filter(|len| (1..=all.len()).contains(len)) {
            let content = &all[..len];
            let hash = ContentHash::of(content);
            assert_eq!(hash.name, BlobId::of(content), "{len} bytes");
            let frames = frame_count(len);
            assert_eq!(hash.subtrees.len(), if frames > 1 { frames } else { 0 });
            for frame in 0..frames {
                let bytes = &content[frame_range(frame, len)];
                assert!(is_frame_of(&hash.name, &hash.subtrees, frame, bytes), "{frame} of {len}");
                let other = (frame + 1) % frames;
                assert!(frames == 1 || !is_frame_of(&hash.name, &hash.subtrees, other, bytes));
            }
            assert!(!is_frame_of(&hash.name, &hash.subtrees, frames, b""));
        }
    }

    proptest! {
        #[test]
        fn a_flipped_bit_in_a_frame_or_a_value_is_found(
            len in 1usize..300_000,
            frame in any::<usize>(),
            at in any::<usize>(),
            is_value in any::<bool>(),
        ) {
            let content = noise(len, 7);
            let hash = ContentHash::of(&content);
            let frame = frame % frame_count(len);
            let mut bytes = content[frame_range(frame, len)].to_vec();
            let mut subtrees = hash.subtrees.to_vec();
            if is_value && !subtrees.is_empty() {
                let values = subtrees.len();
                subtrees[at % values][at % 32] ^= 1;
            } else {
                let len = bytes.len();
                bytes[at % len] ^= 1;
            }
            prop_assert!(!is_frame_of(&hash.name, &subtrees, frame, &bytes));
        }

        #[test]
        fn each_frame_decompresses_alone(
            pattern in vec(any::<u8>(), 1..3000),
            len in 1usize..400_000,
            noisy in vec(any::<bool>(), 8),
            how in 0usize..3,
        ) {
            let mut content: Vec<u8> = pattern.iter().copied().cycle().take(len).collect();
            for (frame, _) in noisy.iter().enumerate().filter(|(_, noisy)| **noisy) {
                let range = frame_range(frame, len);
                let bytes = noise(range.len(), frame as u64);
                content[range].copy_from_slice(&bytes);
            }
            let how = [Compression::Auto, Compression::Zstd, Compression::Lz4][how];
            if let Some(found) = compress(&content, how) {
                prop_assert!(found.bytes.len() <= len - len.div_ceil(8));
                prop_assert_eq!(found.frames.len(), frame_count(len));
                let mut at = 0;
                for (frame, stored) in found.frames.iter().enumerate() {
                    let range = frame_range(frame, len);
                    let mut bytes = vec![0; range.len()];
                    let stored = &found.bytes[at..at + *stored as usize];
                    open_frame(found.codec, stored, &mut bytes).unwrap();
                    prop_assert_eq!(&bytes[..], &content[range]);
                    at += stored.len();
                }
                prop_assert_eq!(at, found.bytes.len());
            }
        }
    }

    #[test]
    fn content_that_does_not_shrink_is_not_compressed() {
        let noise = noise(256 << 10, 3);
        for how in [Compression::Auto, Compression::Zstd, Compression::Lz4, Compression::None] {
            assert!(compress(&noise, how).is_none(), "{how}");
        }
        let text = b"a line of a log, and another one\n".repeat(8000);
        for how in [Compression::Auto, Compression::Zstd, Compression::Lz4] {
            assert!(compress(&text, how).unwrap().bytes.len() < text.len() / 8, "{how}");
        }
        assert!(compress(&text, Compression::None).is_none());
        // Half of it shrinks: the other half is stored as it is.
        let mixed = [&text[..128 << 10], &noise[..128 << 10]].concat();
        let found = compress(&mixed, Compression::Zstd).unwrap();
        assert_eq!(found.codec, Codec::Zstd);
        assert_eq!(found.frames[2..], [FRAME_BYTES as u32; 2]);
        assert!(found.frames[0] < 4096 && found.frames[1] < 4096, "{:?}", found.frames);
    }
}
