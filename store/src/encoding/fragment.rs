//! Fragments: the parts of a blob that peers store.
//!
//! ```text
//! content ─► compressed, if that saves at least an eighth ─► cut into k blocks ─► m parity blocks
//!                                                                 └──────┬───────────┘
//!                         description: k, m, lengths, the blob's name, the checksum of each block
//! ```
//!
//! A fragment is one block and the description of the whole encoding:
//!
//! - A process that has a fragment can tell a damaged block from a good one by its checksum.
//! - Blocks of two encodings of one blob never mix, because their descriptions have different
//!   hashes.
//! - A checksum does not protect against forgery; the blob's name does. So the reader compares the
//!   decoded content with the blob's name.
//! - A checksum costs a tenth of a BLAKE3 hash, and every process that a block passes verifies it.
//!
//! ```text
//! 0        4         5      6   7   8        12               16            48
//! ┌────────┬─────────┬──────┬───┬───┬────────┬────────────────┬─────────────┬─────────────────┐
//! │ "CRNF" │ version │ form │ k │ m │ length │ encoded length │ blob's name │ k + m checksums │
//! └────────┴─────────┴──────┴───┴───┴────────┴────────────────┴─────────────┴─────────────────┘
//! ```
//!
//! A checksum is XXH3 with 64 bits (8 bytes), without a seed.
//!
//! The form has the codec in its low four bits (0 none, 1 zstd, 2 lz4) and the [`Kind`] in its high
//! four bits (0 content, 1 record).
//!
//! A copy is an encoding with k = 1 and m = 0. All copies are the same block.

use std::sync::Arc;

use bytes::Bytes;
use twox_hash::XxHash3_64;

use super::compression::{Codec, compress, decompress};
use super::redundancy::{MAX_WIDTH, Redundancy, StoragePolicy};
use super::reed_solomon;
use crate::buffers::Buffer;
use crate::error::{Error, Result};
use crate::id::BlobId;

const MAGIC: &[u8; 4] = b"CRNF";
/// Version 1 was never released.
const VERSION: u8 = 2;
const HEADER: usize = 48;
const CHECKSUM: usize = 8;

/// The longest content of a blob, in bytes.
pub const MAX_CONTENT: usize = 4 << 20;

/// What a blob is used for. The kind is stored beside the content and not derived from it: a guest
/// that writes bytes that look like a record has stored content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A chunk, or a node of a tree.
    Content,
    /// The record of a snapshot. A lost catalog is rebuilt from records.
    Record,
}

/// Describes one encoding of a blob and its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The blob's name: the hash of its plain content.
    pub blob: BlobId,
    /// Bytes of the plain content.
    pub len: u32,
    /// Bytes of the content after compression, which is cut into blocks.
    encoded_len: u32,
    kind: Kind,
    codec: Codec,
    data: u8,
    parity: u8,
    /// Shared, because a description is cloned several times for each of its fragments.
    checksums: Arc<[[u8; CHECKSUM]]>,
}

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
}

impl Plain {
    /// Copies the content, padded for this redundancy.
    ///
    /// # Panics
    ///
    /// If the content is empty or longer than [`MAX_CONTENT`].
    pub(crate) fn new(content: &[u8], redundancy: Redundancy) -> Plain {
        assert!(!content.is_empty() && content.len() <= MAX_CONTENT, "{} bytes", content.len());
        let len = content.len();
        let mut bytes = Buffer::new(len.next_multiple_of(redundancy.needed()), 0);
        bytes[..len].copy_from_slice(content);
        bytes[len..].fill(0);
        Plain { bytes: bytes.share(), len }
    }

    /// The content.
    pub(crate) fn content(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
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

/// Cuts a blob into blocks, computes parity, and describes them.
///
/// # Panics
///
/// If the content is empty or longer than [`MAX_CONTENT`].
pub fn encode(
    blob: &BlobId,
    content: &[u8],
    policy: impl Into<StoragePolicy>,
) -> (Description, Blocks) {
    let policy = policy.into();
    cut(Kind::Content, blob, &Plain::new(content, policy.redundancy), &policy)
}

/// Encodes the record of a snapshot, like [`encode`].
pub fn encode_record(
    blob: &BlobId,
    content: &[u8],
    policy: impl Into<StoragePolicy>,
) -> (Description, Blocks) {
    let policy = policy.into();
    cut(Kind::Record, blob, &Plain::new(content, policy.redundancy), &policy)
}

/// Encodes content that was copied for the policy's redundancy.
pub(crate) fn cut(
    kind: Kind,
    blob: &BlobId,
    plain: &Plain,
    policy: &StoragePolicy,
) -> (Description, Blocks) {
    let (data, parity) = match policy.redundancy {
        Redundancy::Replicas(_) => (1, 0),
        Redundancy::ReedSolomon { data, parity } => (data, parity),
    };
    let compressed = compress(plain.content(), policy.compression);
    let (codec, plain_len) = (compressed.as_ref().map_or(Codec::None, |one| one.0), plain.len);
    let smaller = compressed.map(|(_, bytes)| Plain::new(&bytes, policy.redundancy));
    let plain = smaller.as_ref().unwrap_or(plain);
    let padded = plain.bytes.clone();
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
        blob: *blob,
        len: plain_len as u32,
        encoded_len: plain.len as u32,
        kind,
        codec,
        data,
        parity,
        checksums,
    };
    (description, blocks)
}

fn checksum(block: &[u8]) -> [u8; CHECKSUM] {
    XxHash3_64::oneshot(block).to_le_bytes()
}

impl Description {
    /// Bytes of the longest description.
    pub(crate) const LONGEST: usize = HEADER + MAX_WIDTH * CHECKSUM;

    /// What the blob is used for.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The number of blocks.
    pub fn width(&self) -> usize {
        self.checksums.len()
    }

    /// The number of blocks that are enough to decode the blob.
    pub fn needed(&self) -> usize {
        self.data.into()
    }

    /// Bytes of each block.
    pub fn block_len(&self) -> usize {
        (self.encoded_len as usize).div_ceil(self.data.into())
    }

    /// Whether `block` has the length and the checksum of the block with this index.
    pub fn matches(&self, index: usize, block: &[u8]) -> bool {
        block.len() == self.block_len()
            && self.checksums.get(index).is_some_and(|wanted| checksum(block) == *wanted)
    }

    /// The hash of the description. Fragments of one encoding have the same.
    pub fn id(&self) -> BlobId {
        BlobId::of(&self.to_bytes())
    }

    /// The bytes of the description, as they are sent and stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.checksums.len() * CHECKSUM);
        self.write(&mut bytes);
        bytes
    }

    /// Appends the bytes of the description.
    pub(crate) fn write(&self, bytes: &mut Vec<u8>) {
        bytes.reserve_exact(HEADER + self.checksums.len() * CHECKSUM);
        bytes.extend_from_slice(MAGIC);
        let form = (self.kind as u8) << 4 | self.codec.number();
        bytes.extend_from_slice(&[VERSION, form, self.data, self.parity]);
        bytes.extend_from_slice(&self.len.to_le_bytes());
        bytes.extend_from_slice(&self.encoded_len.to_le_bytes());
        bytes.extend_from_slice(self.blob.as_bytes());
        bytes.extend_from_slice(self.checksums.as_flattened());
    }

    /// Decodes the description at the start of `bytes`. Also returns the bytes after it.
    pub fn from_bytes(bytes: &[u8]) -> Result<(Description, &[u8])> {
        let wrong = |reason: &str| Error::corrupt("a fragment's description", reason);
        let (header, rest) =
            bytes.split_at_checked(HEADER).ok_or_else(|| wrong("it is too short"))?;
        if &header[..4] != MAGIC {
            return Err(wrong("it has another magic"));
        }
        let kind = match header[5] >> 4 {
            0 => Some(Kind::Content),
            1 => Some(Kind::Record),
            _ => None,
        };
        let (Some(kind), Some(codec), VERSION) = (kind, Codec::new(header[5] & 15), header[4])
        else {
            return Err(wrong("it has an unknown version, kind or codec"));
        };
        let (data, parity) = (header[6], header[7]);
        let word =
            |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let (len, encoded_len) = (word(8), word(12));
        let width = usize::from(data) + usize::from(parity);
        let is_code =
            if data == 1 { parity == 0 } else { data > 1 && parity > 0 && width <= MAX_WIDTH };
        // Compressed content is always shorter.
        let is_encoded = match codec {
            Codec::None => encoded_len == len,
            _ => (1..len).contains(&encoded_len),
        };
        if !is_code || len == 0 || len as usize > MAX_CONTENT || !is_encoded {
            return Err(wrong("its numbers are invalid"));
        }
        let (checksums, rest) =
            rest.split_at_checked(width * CHECKSUM).ok_or_else(|| wrong("it is too short"))?;
        let blob = BlobId::from_bytes(header[16..HEADER].try_into().expect("32 bytes"));
        let checksums = checksums.as_chunks().0.into();
        Ok((Description { blob, len, encoded_len, kind, codec, data, parity, checksums }, rest))
    }

    /// Decodes the content from enough blocks, each at its index, and compares it with the blob's
    /// name. It uses the first blocks that are enough, and fails if one of these is wrong.
    pub fn decode<B: AsRef<[u8]>>(&self, blocks: &[Option<B>], content: &mut [u8]) -> Result<()> {
        let wrong = |reason: &str| Error::corrupt(format!("blob {}", self.blob), reason);
        let data = usize::from(self.data);
        if blocks.len() != self.width() || content.len() != self.len as usize {
            return Err(wrong("the blocks do not fit its description"));
        }
        let computed;
        let data_blocks: Vec<&[u8]> = if blocks[..data].iter().all(Option::is_some) {
            blocks[..data].iter().flatten().map(AsRef::as_ref).collect()
        } else {
            computed = self.reconstruct(blocks, true)?;
            computed[..data].iter().flatten().map(AsRef::as_ref).collect()
        };
        let join = |mut to: &mut [u8]| -> Result<()> {
            for block in data_blocks {
                let (here, behind) = to.split_at_mut(to.len().min(self.block_len()));
                let (block, padding) = block
                    .split_at_checked(here.len())
                    .ok_or_else(|| wrong("a block is too short"))?;
                here.copy_from_slice(block);
                // A wrong parity block may change nothing but the padding.
                if padding.iter().any(|byte| *byte != 0) {
                    return Err(wrong("its padding is not zero"));
                }
                to = behind;
            }
            Ok(())
        };
        if self.codec == Codec::None {
            join(content)?;
        } else {
            let mut encoded = Buffer::new(self.encoded_len as usize, 0);
            join(&mut encoded)?;
            decompress(self.codec, &encoded, content).map_err(|reason| wrong(&reason))?;
        }
        match BlobId::of(content) == self.blob {
            true => Ok(()),
            false => Err(wrong("the decoded content has another hash")),
        }
    }

    /// Computes a lost block from enough others.
    pub fn rebuild<B: AsRef<[u8]>>(&self, blocks: &[Option<B>], index: usize) -> Result<Vec<u8>> {
        let wrong = |reason: &str| Error::corrupt(format!("blob {}", self.blob), reason);
        if blocks.len() != self.width() || index >= blocks.len() {
            return Err(wrong("the blocks do not fit its description"));
        }
        let block = match &blocks[index] {
            Some(block) => block.as_ref().to_vec(),
            None => self.reconstruct(blocks, index < self.data.into())?[index]
                .take()
                .ok_or_else(|| wrong("a block is missing"))?,
        };
        if self.matches(index, &block) {
            Ok(block)
        } else {
            Err(wrong("a block has another checksum"))
        }
    }

    /// Computes all blocks, or only the data blocks, from enough of them.
    fn reconstruct<B: AsRef<[u8]>>(
        &self,
        blocks: &[Option<B>],
        only_data: bool,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        let wrong = |reason: String| Error::corrupt(format!("blob {}", self.blob), reason);
        if self.parity == 0 {
            return Err(wrong("its only block is missing".into()));
        }
        // Only as many blocks as are needed are copied.
        let mut left = self.needed();
        let mut all: Vec<_> = blocks
            .iter()
            .map(|block| {
                let block = block.as_ref().filter(|_| left > 0)?;
                left -= 1;
                Some(block.as_ref().to_vec())
            })
            .collect();
        let code = reed_solomon::code(self.data, self.parity);
        let done =
            if only_data { code.reconstruct_data(&mut all) } else { code.reconstruct(&mut all) };
        done.map_err(|error| wrong(format!("it cannot be decoded: {error}")))?;
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
    use proptest::sample::subsequence;

    use super::{BlobId, Bytes, Description, Redundancy, StoragePolicy, encode, encode_record};

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
            prop_assert!(description.encoded_len <= description.len);
            let shrinks = pattern.len() > 100 && repeat > 3 && how != 3 && pattern.len() < 4000;
            prop_assert!(!shrinks || description.encoded_len < description.len, "it is compressed");
            prop_assert_eq!(description.matches(0, blocks.get(0)), true);
        }

        #[test]
        fn a_damaged_description_is_refused_or_differs(
            content in vec(any::<u8>(), 1..100),
            which in 0usize..6,
            record in any::<bool>(),
            flip in any::<(usize, u8)>(),
        ) {
            let (blob, policy) = (BlobId::of(&content), redundancies()[which]);
            let (description, _) = match record {
                true => encode_record(&blob, &content, policy),
                false => encode(&blob, &content, policy),
            };
            let mut bytes = description.to_bytes();
            bytes.extend_from_slice(b"behind");
            let (again, rest) = Description::from_bytes(&bytes).unwrap();
            prop_assert_eq!((again.id(), rest), (description.id(), &b"behind"[..]));
            prop_assert_eq!(&again, &description);
            prop_assert!(Description::from_bytes(&bytes[..bytes.len() - 7]).is_err(), "cut off");
            let at = flip.0 % (bytes.len() - 6);
            bytes[at] ^= flip.1;
            if let Ok((other, _)) = Description::from_bytes(&bytes) {
                prop_assert_eq!(other == description, flip.1 == 0);
                prop_assert!(other.width() <= 32 && other.block_len() <= super::MAX_CONTENT);
            }
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
