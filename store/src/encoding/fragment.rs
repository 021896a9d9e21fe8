//! Fragments: the parts of a blob that peers store.
//!
//! ```text
//! content ─► frames, each compressed ─► cut into k blocks ─► m parity blocks
//!                                            └──────┬───────────┘
//!            description: k, m, lengths, the blob's name, the checksum of each block, a seal
//! ```
//!
//! A fragment is one block and the [`Description`] of the whole encoding:
//!
//! - A process that has a fragment can tell a damaged block from a good one by its checksum.
//! - Blocks of two encodings of one blob never mix, because their descriptions have different
//!   hashes.
//! - A checksum does not protect against forgery; the blob's name does. So the reader compares the
//!   decoded content with the blob's name.
//! - A checksum costs a tenth of a BLAKE3 hash, and every process that a block passes verifies it.
//!
//! A copy is an encoding with k = 1 and m = 0. All copies are the same block.

use std::sync::Arc;

use bytes::Bytes;

use super::compression::Codec;
use super::description::{Encryption, Seal, Tables, checksum};
use super::frames::{ContentHash, compress};
use super::redundancy::{Redundancy, StoragePolicy};
use super::reed_solomon;
use crate::buffers::Buffer;
use crate::id::BlobId;

pub use super::description::{Description, Kind, MAX_CONTENT};

/// What a peer stores of a blob: one block, and the description of the whole encoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// The encoding that the block belongs to.
    pub description: Description,
    /// The index of the block.
    pub index: u8,
    /// The bytes of the block.
    pub block: Bytes,
}

impl Fragment {
    /// Whether this is a fragment of `blob` whose block matches its description.
    pub fn is_of(&self, blob: &BlobId) -> bool {
        self.description.blob == *blob && self.description.matches(self.index.into(), &self.block)
    }
}

/// A blob's content, copied once and padded, so that its data blocks are slices of it.
#[derive(Clone)]
pub(crate) struct Plain {
    /// Padded with zeros to whole blocks.
    bytes: Bytes,
    len: usize,
    hash: ContentHash,
}

impl Plain {
    /// Copies the content, padded for this redundancy.
    ///
    /// # Panics
    ///
    /// If the content is empty or longer than [`MAX_CONTENT`].
    pub(crate) fn new(hash: ContentHash, content: &[u8], redundancy: Redundancy) -> Plain {
        assert!(!content.is_empty() && content.len() <= MAX_CONTENT, "{} bytes", content.len());
        Plain { bytes: pad(content, redundancy), len: content.len(), hash }
    }

    /// The content.
    pub(crate) fn content(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Copies bytes, and pads them with zeros to whole blocks.
fn pad(bytes: &[u8], redundancy: Redundancy) -> Bytes {
    let len = bytes.len();
    let mut padded = Buffer::new(len.next_multiple_of(redundancy.needed()), 0);
    padded[..len].copy_from_slice(bytes);
    padded[len..].fill(0);
    padded.share()
}

/// The blocks of a blob: data blocks and parity blocks.
#[derive(Clone)]
pub struct Blocks {
    data: Bytes,
    parity: Bytes,
    len: usize,
}

impl Blocks {
    /// The block with this index.
    pub fn get(&self, index: usize) -> &[u8] {
        let (part, at) = self.locate(index);
        &part[at..at + self.len]
    }

    /// The block with this index, shared instead of borrowed.
    pub fn share(&self, index: usize) -> Bytes {
        let (part, at) = self.locate(index);
        part.slice(at..at + self.len)
    }

    /// The buffer that holds a block, and the block's offset in it.
    fn locate(&self, index: usize) -> (&Bytes, usize) {
        let at = index * self.len;
        match at.checked_sub(self.data.len()) {
            None => (&self.data, at),
            Some(at) => (&self.parity, at),
        }
    }
}

/// Cuts a blob into blocks, computes parity, and describes them. Nobody has sealed the description.
///
/// # Panics
///
/// If the content is empty or longer than [`MAX_CONTENT`].
pub fn encode(
    blob: &BlobId,
    content: &[u8],
    policy: impl Into<StoragePolicy>,
) -> (Description, Blocks) {
    encode_kind(Kind::Content, blob, content, &policy.into())
}

/// Encodes the record of a snapshot, like [`encode`].
pub fn encode_record(
    blob: &BlobId,
    content: &[u8],
    policy: impl Into<StoragePolicy>,
) -> (Description, Blocks) {
    encode_kind(Kind::Record, blob, content, &policy.into())
}

fn encode_kind(
    kind: Kind,
    blob: &BlobId,
    content: &[u8],
    policy: &StoragePolicy,
) -> (Description, Blocks) {
    let hash = ContentHash { name: *blob, ..ContentHash::of(content) };
    cut(kind, &Plain::new(hash, content, policy.redundancy), policy)
}

/// Encodes content that was copied for the policy's redundancy.
pub(crate) fn cut(kind: Kind, plain: &Plain, policy: &StoragePolicy) -> (Description, Blocks) {
    let (data, parity) = match policy.redundancy {
        Redundancy::Replicas(_) => (1, 0),
        Redundancy::ReedSolomon { data, parity } => (data, parity),
    };
    let ContentHash { name, subtrees } = plain.hash.clone();
    let compressed = compress(plain.content(), policy.compression);
    let (codec, stored_len, stored_hash, frames, padded) = match compressed {
        // Without a codec the stored bytes are the content, whose hash is the name.
        None => (Codec::None, plain.len, name, Vec::new(), plain.bytes.clone()),
        Some(found) => {
            let frames = if subtrees.is_empty() { Vec::new() } else { found.frames };
            let padded = pad(&found.bytes, policy.redundancy);
            (found.codec, found.bytes.len(), BlobId::of(&found.bytes), frames, padded)
        }
    };
    let len = padded.len() / usize::from(data);
    let mut computed = Buffer::new(len * usize::from(parity), 0);
    if parity > 0 {
        let padded: Vec<_> = padded.chunks(len).collect();
        let mut computed: Vec<_> = computed.chunks_mut(len).collect();
        reed_solomon::encode(&reed_solomon::code(data, parity), &padded, &mut computed);
    }
    let blocks = Blocks { data: padded, parity: computed.share(), len };
    let width = usize::from(data) + usize::from(parity);
    let checksums = (0..width).map(|index| checksum(blocks.get(index))).collect();
    let description = Description {
        blob: name,
        len: plain.len as u32,
        stored_len: stored_len as u32,
        stored_hash,
        kind,
        codec,
        encryption: Encryption::NONE,
        data,
        parity,
        subtrees,
        tables: Arc::new(Tables { checksums, frames }),
        seal: Seal::NONE,
    };
    (description, blocks)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
    use proptest::sample::subsequence;

    use super::{BlobId, Bytes, Description, Redundancy, StoragePolicy, encode, encode_record};
    use crate::encoding::{FRAME_BYTES, MAX_STORED, SEAL_BYTES};

    fn redundancies() -> Vec<Redundancy> {
        let texts = ["none", "replicas=3", "rs=2+1", "rs=3+2", "rs=4+4", "rs=8+4"];
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    proptest! {
        #[test]
        fn any_k_blocks_decode_the_content(
            content in vec(any::<u8>(), 1..5000),
            which in 0usize..6,
            order in subsequence((0..12).collect::<Vec<usize>>(), 12),
            rotation in 0usize..12,
        ) {
            let redundancy = redundancies()[which];
            let blob = BlobId::of(&content);
            let (description, blocks) = encode(&blob, &content, redundancy);
            prop_assert_eq!(description.needed(), redundancy.needed());
            let width = description.width();
            let mut kept = vec![None; width];
            for index in (0..width).map(|n| order[(n + rotation) % width] % width).take(width) {
                if kept.iter().flatten().count() < description.needed() {
                    kept[index] = Some(blocks.get(index).to_vec());
                }
            }
            let mut found = vec![0; content.len()];
            description.decode(&kept, &mut found).unwrap();
            prop_assert_eq!(&found, &content);
            for index in 0..width {
                let rebuilt = description.rebuild(&kept, index).unwrap();
                prop_assert_eq!(&rebuilt[..], blocks.get(index));
                prop_assert!(description.matches(index, &rebuilt));
            }
            if description.needed() > 1 {
                let last = kept.iter().rposition(Option::is_some).unwrap();
                kept[last] = None;
                prop_assert!(description.decode(&kept, &mut found).is_err(), "one too few");
            }
        }

        #[test]
        fn compressed_content_decodes_to_the_original(
            pattern in vec(any::<u8>(), 1..9000),
            repeat in 1usize..20,
            which in 0usize..6,
            how in 0usize..4,
        ) {
            let content = pattern.repeat(repeat);
            let compression = ["auto", "zstd", "lz4", "none"][how].parse().unwrap();
            let policy = StoragePolicy { redundancy: redundancies()[which], compression };
            let (description, blocks) = encode(&BlobId::of(&content), &content, policy);
            let mut found = vec![0; content.len()];
            let all: Vec<_> = (0..description.width())
                .map(|index| (index >= description.width() - description.needed()).then(|| blocks.share(index)))
                .collect();
            description.decode(&all, &mut found).unwrap();
            prop_assert_eq!(&found, &content);
            prop_assert!(description.stored_len <= description.len);
            let shrinks = pattern.len() > 100 && repeat > 3 && how != 3 && pattern.len() < 4000;
            prop_assert!(!shrinks || description.stored_len < description.len, "it is compressed");
            prop_assert_eq!(description.matches(0, blocks.get(0)), true);
        }

        #[test]
        fn a_damaged_description_is_refused_or_differs(
            content in vec(any::<u8>(), 1..100),
            repeat in 1usize..3000,
            which in 0usize..6,
            record in any::<bool>(),
            how in 0usize..2,
            key in 0u32..3,
            flip in any::<(usize, u8)>(),
        ) {
            let content = content.repeat(repeat);
            let compression = ["zstd", "none"][how].parse().unwrap();
            let (blob, policy) =
                (BlobId::of(&content), StoragePolicy { redundancy: redundancies()[which], compression });
            let (mut description, _) = match record {
                true => encode_record(&blob, &content, policy),
                false => encode(&blob, &content, policy),
            };
            // A multiple of frames without a codec has no lengths of frames, which encryption needs.
            if key > 0 && (content.len() <= FRAME_BYTES || description.stored_len < description.len) {
                description = description.encrypted_with(key, &vec![7; content.len() % 65]);
            }
            let mut bytes = description.to_bytes();
            prop_assert!(bytes.len() == description.bytes_len());
            prop_assert!(bytes.len() <= Description::LONGEST);
            bytes.extend_from_slice(b"behind");
            let (again, rest) = Description::from_bytes(&bytes).unwrap();
            prop_assert_eq!((again.id(), rest), (description.id(), &b"behind"[..]));
            prop_assert_eq!(&again, &description);
            prop_assert!(Description::from_bytes(&bytes[..bytes.len() - 7]).is_err(), "cut off");
            let at = flip.0 % (bytes.len() - 6);
            bytes[at] ^= flip.1;
            if let Ok((other, _)) = Description::from_bytes(&bytes) {
                // The seal is at the end. It is not a part of the identity.
                let is_seal = at >= description.bytes_len() - SEAL_BYTES;
                prop_assert_eq!(other == description, flip.1 == 0 || is_seal);
                prop_assert_eq!(other.id() == description.id(), flip.1 == 0 || is_seal);
                prop_assert!(!is_seal || (other.seal == description.seal) == (flip.1 == 0));
                prop_assert!(other.width() <= 32 && other.block_len() <= MAX_STORED);
            }
        }
    }

    #[test]
    fn stored_bytes_are_verified_without_the_content() {
        let content = b"a line of a log, and another one\n".repeat(8000);
        let code = Redundancy::ReedSolomon { data: 3, parity: 2 };
        for compression in ["zstd", "lz4", "none"] {
            let policy =
                StoragePolicy { redundancy: code, compression: compression.parse().unwrap() };
            let (description, blocks) = encode(&BlobId::of(&content), &content, policy);
            let description = description.encrypted_with(9, b"header");
            let mut all: Vec<_> = (0..5).map(|index| Some(blocks.get(index).to_vec())).collect();
            description.verify_stored(&all).unwrap();
            (all[0], all[2]) = (None, None);
            description.verify_stored(&all).unwrap();
            let refused = description.decode(&all, &mut vec![0; content.len()]).unwrap_err();
            assert!(refused.to_string().contains("encrypted with the key 00000009"), "{refused}");
            all[1].as_mut().unwrap()[0] ^= 1;
            description.verify_stored(&all).unwrap_err();
            all[1] = None;
            description.verify_stored(&all).unwrap_err();
        }
    }

    #[test]
    fn content_with_another_hash_is_refused() {
        let code = Redundancy::ReedSolomon { data: 2, parity: 1 };
        let (description, blocks) = encode(&BlobId::of(b"another"), b"content!", code);
        let all: Vec<_> = (0..3).map(|index| Some(blocks.share(index))).collect();
        assert!((0..3).all(|index| description.matches(index, blocks.get(index))));
        let mut found = [0; 8];
        description.decode(&all, &mut found).unwrap_err();
        assert!(!description.matches(0, b"c0nt") && !description.matches(1, blocks.get(0)));
        assert!(!description.matches(3, blocks.get(0)));
        let (copy, _) = encode(&BlobId::of(b"content!"), b"content!", Redundancy::NONE);
        copy.decode(&[Some(b"c0ntent!")], &mut found).unwrap_err();
        copy.decode(&[None::<Bytes>], &mut found).unwrap_err();
        copy.rebuild(&[None::<Bytes>], 0).unwrap_err();
    }
}
