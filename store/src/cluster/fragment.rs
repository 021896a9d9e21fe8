//! A blob in parts: what peers store of it.
//!
//! ```text
//! content ──► encoded (compressed, where that pays) ──► cut into k blocks ──► m parity blocks
//!                                                            └──────┬───────────────┘
//!                         description: k, m, lengths, the content's name, the hash of each block
//! ```
//!
//! Each fragment carries the whole description. So whoever has one knows what belongs to it, can tell a wrong
//! block by its hash, and never mixes the blocks of two encodings of one blob: their descriptions have different
//! names. That all blocks together are the content is for the reader to verify, by the content's name.
//!
//! ```text
//! 0        4         5       6   7   8           12              16             48
//! ┌────────┬─────────┬───────┬───┬───┬───────────┬───────────────┬──────────────┬──────────────────────┐
//! │ "CRNF" │ version │ form  │ k │ m │ length    │ encoded length│ blob's name  │ k + m hashes of 32   │
//! └────────┴─────────┴───────┴───┴───┴───────────┴───────────────┴──────────────┴──────────────────────┘
//! ```
//!
//! The form is the codec in the low four bits and the [`Kind`] in the high ones.
//!
//! A copy is the one block of k = 1 and m = 0, however many peers have it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use reed_solomon_erasure::galois_8::ReedSolomon;

use super::redundancy::Redundancy;
use crate::error::{Error, Result};
use crate::id::BlobId;

const MAGIC: &[u8; 4] = b"CRNF";
const VERSION: u8 = 1;
const HEADER: usize = 48;
const HASH: usize = 32;

/// The longest content of a blob.
pub const MAX_CONTENT: usize = 4 << 20;

/// What a blob is for. It is said by whoever stores it, beside its content: a guest that writes what looks like
/// a record has stored content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A chunk, or a node of a tree.
    Content,
    /// The record of a snapshot: names are restored from these.
    Record,
}

/// What the blocks of one encoding of a blob are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The blob's name: the hash of its plain content.
    pub blob: BlobId,
    /// Bytes of the plain content.
    pub len: u32,
    /// Bytes of what was cut into blocks.
    encoded_len: u32,
    kind: Kind,
    data: u8,
    parity: u8,
    hashes: Vec<[u8; HASH]>,
}

/// What a peer holds of a blob: one block, and the description of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// What the block belongs to.
    pub description: Description,
    /// Which one it is.
    pub index: u8,
    /// Its content.
    pub block: Vec<u8>,
}

/// The blocks of a blob, the first ones borrowed from its content where that is possible.
pub struct Blocks<'a> {
    data: Vec<Cow<'a, [u8]>>,
    parity: Vec<Vec<u8>>,
}

impl Blocks<'_> {
    /// The block with this index.
    pub fn get(&self, index: usize) -> &[u8] {
        match self.data.get(index) {
            Some(block) => block,
            None => &self.parity[index - self.data.len()],
        }
    }
}

/// Cuts a blob into blocks, computes parity, and describes them.
///
/// # Panics
///
/// If the content is empty or longer than [`MAX_CONTENT`].
pub fn encode<'a>(
    blob: &BlobId,
    content: &'a [u8],
    redundancy: Redundancy,
) -> (Description, Blocks<'a>) {
    encode_as(Kind::Content, blob, content, redundancy)
}

/// As [`encode`], for the record of a snapshot.
pub fn encode_record<'a>(
    blob: &BlobId,
    content: &'a [u8],
    redundancy: Redundancy,
) -> (Description, Blocks<'a>) {
    encode_as(Kind::Record, blob, content, redundancy)
}

fn encode_as<'a>(
    kind: Kind,
    blob: &BlobId,
    content: &'a [u8],
    redundancy: Redundancy,
) -> (Description, Blocks<'a>) {
    assert!(!content.is_empty() && content.len() <= MAX_CONTENT, "{} bytes", content.len());
    let (data, parity) = match redundancy {
        Redundancy::Replicas(_) => (1, 0),
        Redundancy::ReedSolomon { data, parity } => (data, parity),
    };
    let block = content.len().div_ceil(data.into());
    let blocks = (0..usize::from(data)).map(|index| {
        let (from, to) = (index * block, (index + 1) * block);
        match content.get(from..to) {
            Some(whole) => Cow::Borrowed(whole),
            None => {
                let mut padded = content.get(from..).unwrap_or_default().to_vec();
                padded.resize(block, 0);
                Cow::Owned(padded)
            }
        }
    });
    let mut blocks = Blocks { data: blocks.collect(), parity: Vec::new() };
    if parity > 0 {
        blocks.parity = vec![vec![0; block]; parity.into()];
        code(data, parity)
            .encode_sep(&blocks.data, &mut blocks.parity)
            .expect("the blocks are as many and as long as the code wants them");
    }
    let hash = |index| *blake3::hash(blocks.get(index)).as_bytes();
    let description = Description {
        blob: *blob,
        len: content.len() as u32,
        encoded_len: content.len() as u32,
        kind,
        data,
        parity,
        hashes: (0..usize::from(data) + usize::from(parity)).map(hash).collect(),
    };
    (description, blocks)
}

impl Description {
    /// What the blob is for.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// How many blocks there are.
    pub fn width(&self) -> usize {
        self.hashes.len()
    }

    /// How many are enough.
    pub fn needed(&self) -> usize {
        self.data.into()
    }

    /// Bytes of each block.
    pub fn block_len(&self) -> usize {
        (self.encoded_len as usize).div_ceil(self.data.into())
    }

    /// Whether these are the bytes of a block.
    pub fn matches(&self, index: usize, block: &[u8]) -> bool {
        block.len() == self.block_len()
            && self.hashes.get(index).is_some_and(|hash| blake3::hash(block).as_bytes() == hash)
    }

    /// The name of a block: the hash of its content.
    pub fn block(&self, index: usize) -> Option<BlobId> {
        self.hashes.get(index).map(|hash| BlobId::from_bytes(*hash))
    }

    /// The description's own name: equal for fragments that belong together.
    pub fn id(&self) -> BlobId {
        BlobId::of(&self.to_bytes())
    }

    /// As it is sent and stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.hashes.len() * HASH);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&[VERSION, (self.kind as u8) << 4, self.data, self.parity]);
        bytes.extend_from_slice(&self.len.to_le_bytes());
        bytes.extend_from_slice(&self.encoded_len.to_le_bytes());
        bytes.extend_from_slice(self.blob.as_bytes());
        self.hashes.iter().for_each(|hash| bytes.extend_from_slice(hash));
        bytes
    }

    /// Reads the description at the start of `bytes`, and returns what is behind it.
    pub fn from_bytes(bytes: &[u8]) -> Result<(Description, &[u8])> {
        let wrong = |reason: &str| Error::corrupt("a fragment's description", reason);
        let (header, rest) =
            bytes.split_at_checked(HEADER).ok_or_else(|| wrong("it is too short"))?;
        if &header[..4] != MAGIC {
            return Err(wrong("it does not begin like one"));
        }
        let kind = match header[5] {
            0x00 => Some(Kind::Content),
            0x10 => Some(Kind::Record),
            _ => None,
        };
        let Some(kind) = kind.filter(|_| header[4] == VERSION) else {
            return Err(wrong("it is of a kind that this version does not know"));
        };
        let (data, parity) = (header[6], header[7]);
        let word =
            |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let (len, encoded_len) = (word(8), word(12));
        let width = usize::from(data) + usize::from(parity);
        let is_code = if data == 1 { parity == 0 } else { data > 1 && parity > 0 && width <= 32 };
        // Without compression there is nothing that would make them differ.
        if !is_code || len == 0 || len as usize > MAX_CONTENT || encoded_len != len {
            return Err(wrong("its numbers make no sense"));
        }
        let (hashes, rest) =
            rest.split_at_checked(width * HASH).ok_or_else(|| wrong("it is too short"))?;
        let blob = BlobId::from_bytes(header[16..HEADER].try_into().expect("32 bytes"));
        let hashes = hashes.as_chunks().0.to_vec();
        Ok((Description { blob, len, encoded_len, kind, data, parity, hashes }, rest))
    }

    /// Puts the content together from enough blocks, each at its index, and verifies it by its name. The blocks
    /// that were not there are there afterwards, but for parity.
    pub fn decode(&self, blocks: &mut [Option<Vec<u8>>], content: &mut [u8]) -> Result<()> {
        let wrong = |reason: &str| Error::corrupt(format!("blob {}", self.blob), reason);
        let data = usize::from(self.data);
        if blocks.len() != self.width() || content.len() != self.len as usize {
            return Err(wrong("the blocks are not those of this blob"));
        }
        if blocks[..data].iter().any(Option::is_none) {
            if self.parity == 0 {
                return Err(wrong("its only block is missing"));
            }
            code(self.data, self.parity)
                .reconstruct_data(blocks)
                .map_err(|error| wrong(&format!("it cannot be put together: {error}")))?;
        }
        for (to, block) in content.chunks_mut(self.block_len()).zip(blocks[..data].iter().flatten())
        {
            let len = to.len();
            to.copy_from_slice(block.get(..len).ok_or_else(|| wrong("a block is too short"))?);
        }
        match BlobId::of(content) == self.blob {
            true => Ok(()),
            false => Err(wrong("the blocks are right, but together they are something else")),
        }
    }

    /// Computes a block that is lost from enough others.
    pub fn rebuild(&self, blocks: &mut [Option<Vec<u8>>], index: usize) -> Result<Vec<u8>> {
        let wrong = |reason: &str| Error::corrupt(format!("blob {}", self.blob), reason);
        if blocks.len() != self.width() || index >= blocks.len() {
            return Err(wrong("the blocks are not those of this blob"));
        }
        if blocks[index].is_none() {
            if self.parity == 0 {
                return Err(wrong("its only block is missing"));
            }
            code(self.data, self.parity)
                .reconstruct(blocks)
                .map_err(|error| wrong(&format!("a block cannot be computed: {error}")))?;
        }
        let block = blocks[index].take().ok_or_else(|| wrong("a block is missing"))?;
        if self.matches(index, &block) { Ok(block) } else { Err(wrong("a block has another hash")) }
    }
}

/// The code for so many blocks. Making one takes a while, so they are kept.
fn code(data: u8, parity: u8) -> Arc<ReedSolomon> {
    type Codes = HashMap<(u8, u8), Arc<ReedSolomon>>;
    static CODES: LazyLock<Mutex<Codes>> = LazyLock::new(Mutex::default);
    let mut codes = CODES.lock().expect("no code panics with the codes locked");
    let code = codes.entry((data, parity)).or_insert_with(|| {
        let code = ReedSolomon::new(data.into(), parity.into());
        Arc::new(code.expect("there are 2 to 32 blocks"))
    });
    code.clone()
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
    use proptest::sample::subsequence;

    use super::{BlobId, Description, Redundancy, encode};

    fn redundancies() -> Vec<Redundancy> {
        let texts = ["none", "replicas=3", "rs=2+1", "rs=3+2", "rs=4+4", "rs=8+4"];
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    proptest! {
        #[test]
        fn any_k_blocks_are_enough(
            content in vec(any::<u8>(), 1..5000),
            which in 0usize..6,
            order in subsequence((0..12).collect::<Vec<usize>>(), 12),
            turn in 0usize..12,
        ) {
            let redundancy = redundancies()[which];
            let blob = BlobId::of(&content);
            let (description, blocks) = encode(&blob, &content, redundancy);
            prop_assert_eq!(description.needed(), redundancy.needed());
            let width = description.width();
            let mut kept = vec![None; width];
            for index in (0..width).map(|n| order[(n + turn) % width] % width).take(width) {
                if kept.iter().flatten().count() < description.needed() {
                    kept[index] = Some(blocks.get(index).to_vec());
                }
            }
            let mut found = vec![0; content.len()];
            description.decode(&mut kept.clone(), &mut found).unwrap();
            prop_assert_eq!(&found, &content);
            for index in 0..width {
                let rebuilt = description.rebuild(&mut kept.clone(), index).unwrap();
                prop_assert_eq!(&rebuilt[..], blocks.get(index));
                prop_assert!(description.matches(index, &rebuilt));
            }
            if description.needed() > 1 {
                let last = kept.iter().rposition(Option::is_some).unwrap();
                kept[last] = None;
                prop_assert!(description.decode(&mut kept, &mut found).is_err(), "one too few");
            }
        }

        #[test]
        fn a_description_is_read_back_or_refused(
            content in vec(any::<u8>(), 1..100),
            which in 0usize..6,
            flip in any::<(usize, u8)>(),
        ) {
            let (description, _) = encode(&BlobId::of(&content), &content, redundancies()[which]);
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
    fn blocks_that_are_something_else_together_are_refused() {
        let (description, blocks) = encode(&BlobId::of(b"another"), b"content", Redundancy::NONE);
        assert!(description.matches(0, blocks.get(0)));
        let mut found = [0; 7];
        description.decode(&mut [Some(blocks.get(0).to_vec())], &mut found).unwrap_err();
        description.decode(&mut [None], &mut found).unwrap_err();
        description.rebuild(&mut [None], 0).unwrap_err();
        assert!(!description.matches(0, b"c0ntent") && !description.matches(1, blocks.get(0)));
    }
}
