//! The description of an encoding: how a blob was cut into blocks.
//!
//! | offset | length | is |
//! |---:|---:|---|
//! | 0 | 4 | `CRNF` |
//! | 4 | 1 | version, 3 |
//! | 5 | 1 | low 4 bits: codec; high 4 bits: [`Kind`] |
//! | 6 | 1 | *k*, data blocks |
//! | 7 | 1 | *m*, parity blocks |
//! | 8 | 4 | bytes of the content |
//! | 12 | 4 | stored bytes, which were cut into blocks |
//! | 16 | 32 | the blob's name |
//! | 48 | 32 | BLAKE3 of the stored bytes |
//! | 80 | 4 | the id of the key that the content is encrypted with; 0 for none |
//! | 84 | 2 | *e*, bytes of the encryption header; 0 without a key |
//! | 86 | 2 | zero |
//! | 88 | *e* | the encryption header |
//! | | 32 × *f* | with *f* > 1 frames: the chaining value of each |
//! | | 4 × *f* | with *f* > 1 frames and a codec or a key: the stored bytes of each |
//! | | 8 × (*k* + *m*) | XXH3 of each block, 64 bits without a seed |
//! | | 20 | the seal, which is not a part of the encoding's identity |
//!
//! The hash of the stored bytes lets a process verify an encoding that it cannot decrypt. Without
//! codec and key it is the blob's name.

use std::fmt;
use std::sync::Arc;

use twox_hash::XxHash3_64;

use super::compression::Codec;
use super::frames::{
    ChainingValue, ContentHash, FRAME_BYTES, frame_count, frame_range, open_frame,
};
use super::redundancy::MAX_WIDTH;
use super::reed_solomon;
use crate::buffers::Buffer;
use crate::error::{Error, Result};
use crate::id::BlobId;

const MAGIC: &[u8; 4] = b"CRNF";
/// Versions 1 and 2 were never released.
const VERSION: u8 = 3;
const HEADER: usize = 88;
const CHECKSUM: usize = 8;
const VALUE: usize = size_of::<ChainingValue>();
const FRAME_LEN: usize = 4;

/// Bytes of a seal: the id of the key (4), and the code.
pub(crate) const SEAL_BYTES: usize = 20;

/// The longest encryption header, in bytes.
const MAX_ENCRYPTION_HEADER: usize = 64;

/// The longest content of a blob, in bytes.
pub const MAX_CONTENT: usize = 4 << 20;

/// The most stored bytes of a blob. Encryption adds a tag to each frame, and padding.
pub const MAX_STORED: usize = MAX_CONTENT + 8192;

/// The most frames of a blob.
const MAX_FRAMES: usize = MAX_CONTENT / FRAME_BYTES;

/// What a blob is used for. The kind is stored beside the content and not derived from it: a guest
/// that writes bytes that look like a record has stored content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A chunk, or a node of a tree.
    Content,
    /// The record of a snapshot. A lost catalog is rebuilt from records.
    Record,
}

/// A message authentication code, and the id of its key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Seal([u8; SEAL_BYTES]);

impl Seal {
    /// The seal of a description that nobody has sealed.
    pub const NONE: Seal = Seal([0; SEAL_BYTES]);

    /// The seal with these bytes.
    pub(crate) fn from_bytes(bytes: [u8; SEAL_BYTES]) -> Seal {
        Seal(bytes)
    }

    /// The id of the key.
    pub(super) fn key(&self) -> u32 {
        u32::from_le_bytes([self.0[0], self.0[1], self.0[2], self.0[3]])
    }

    /// The bytes of the seal, as they are sent and stored.
    pub(crate) fn as_bytes(&self) -> &[u8; SEAL_BYTES] {
        &self.0
    }
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Seal({:08x})", self.key())
    }
}

/// How the stored bytes are encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Encryption {
    /// The id of the key; 0 if they are not encrypted.
    key: u32,
    header: Option<Arc<[u8]>>,
}

impl Encryption {
    pub(super) const NONE: Encryption = Encryption { key: 0, header: None };

    fn header(&self) -> &[u8] {
        self.header.as_deref().unwrap_or_default()
    }
}

/// The tables of a description, except the chaining values.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tables {
    pub(super) checksums: Vec<[u8; CHECKSUM]>,
    /// Stored bytes of each frame; empty if there is one frame, or neither codec nor key.
    pub(super) frames: Vec<u32>,
}

/// Describes one encoding of a blob and its blocks.
///
/// Two descriptions are equal if they describe the same encoding, whatever their seals are.
#[derive(Clone, Debug)]
pub struct Description {
    /// The blob's name: the hash of its plain content.
    pub blob: BlobId,
    /// Bytes of the plain content.
    pub len: u32,
    /// Bytes that are cut into blocks: the content after compression.
    pub(super) stored_len: u32,
    pub(super) stored_hash: BlobId,
    pub(super) kind: Kind,
    pub(super) codec: Codec,
    pub(super) encryption: Encryption,
    pub(super) data: u8,
    pub(super) parity: u8,
    /// The chaining value of each frame; empty for content of one frame.
    pub(super) subtrees: Arc<[ChainingValue]>,
    /// Shared, because a description is cloned several times for each of its fragments.
    pub(super) tables: Arc<Tables>,
    /// The seal. It need not be valid.
    pub seal: Seal,
}

impl PartialEq for Description {
    fn eq(&self, other: &Description) -> bool {
        let identity = |one: &Description| {
            let Description { blob, len, stored_len, stored_hash, kind, codec, .. } = *one;
            (blob, len, stored_len, stored_hash, kind, codec, one.data, one.parity)
        };
        identity(self) == identity(other)
            && self.encryption == other.encryption
            && self.subtrees == other.subtrees
            && self.tables == other.tables
    }
}

impl Eq for Description {}

pub(super) fn checksum(block: &[u8]) -> [u8; CHECKSUM] {
    XxHash3_64::oneshot(block).to_le_bytes()
}

impl Description {
    /// Bytes of the longest description, with its seal.
    pub(crate) const LONGEST: usize = HEADER
        + MAX_ENCRYPTION_HEADER
        + MAX_FRAMES * (VALUE + FRAME_LEN)
        + MAX_WIDTH * CHECKSUM
        + SEAL_BYTES;

    /// What the blob is used for.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The number of blocks.
    pub fn width(&self) -> usize {
        self.tables.checksums.len()
    }

    /// The number of blocks that are enough to decode the blob.
    pub fn needed(&self) -> usize {
        self.data.into()
    }

    /// Bytes of each block.
    pub fn block_len(&self) -> usize {
        (self.stored_len as usize).div_ceil(self.data.into())
    }

    /// Whether `block` has the length and the checksum of the block with this index.
    pub fn matches(&self, index: usize, block: &[u8]) -> bool {
        block.len() == self.block_len()
            && self.tables.checksums.get(index).is_some_and(|wanted| checksum(block) == *wanted)
    }

    /// The hash of the description without its seal. Fragments of one encoding have the same.
    pub fn id(&self) -> BlobId {
        let mut bytes = Vec::with_capacity(self.bytes_len());
        self.write_identity(&mut bytes);
        BlobId::of(&bytes)
    }

    /// Bytes of the description with its seal.
    pub(crate) fn bytes_len(&self) -> usize {
        HEADER
            + self.encryption.header().len()
            + self.subtrees.len() * VALUE
            + self.tables.frames.len() * FRAME_LEN
            + self.width() * CHECKSUM
            + SEAL_BYTES
    }

    /// The bytes of the description, as they are sent and stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.bytes_len());
        self.write(&mut bytes);
        bytes
    }

    /// Appends the bytes of the description.
    pub(crate) fn write(&self, bytes: &mut Vec<u8>) {
        self.write_identity(bytes);
        bytes.extend_from_slice(self.seal.as_bytes());
    }

    fn write_identity(&self, bytes: &mut Vec<u8>) {
        bytes.reserve_exact(self.bytes_len());
        bytes.extend_from_slice(MAGIC);
        let form = (self.kind as u8) << 4 | self.codec.number();
        bytes.extend_from_slice(&[VERSION, form, self.data, self.parity]);
        bytes.extend_from_slice(&self.len.to_le_bytes());
        bytes.extend_from_slice(&self.stored_len.to_le_bytes());
        bytes.extend_from_slice(self.blob.as_bytes());
        bytes.extend_from_slice(self.stored_hash.as_bytes());
        let header = self.encryption.header();
        bytes.extend_from_slice(&self.encryption.key.to_le_bytes());
        bytes.extend_from_slice(&(header.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(header);
        bytes.extend_from_slice(self.subtrees.as_flattened());
        self.tables.frames.iter().for_each(|len| bytes.extend_from_slice(&len.to_le_bytes()));
        bytes.extend_from_slice(self.tables.checksums.as_flattened());
    }

    /// Decodes the description at the start of `bytes`. Also returns the bytes after it.
    pub fn from_bytes(bytes: &[u8]) -> Result<(Description, &[u8])> {
        let wrong = |reason: &str| Error::corrupt("a fragment's description", reason);
        let mut rest = bytes;
        let mut take = |len: usize| {
            let (taken, behind) = rest.split_at_checked(len)?;
            rest = behind;
            Some(taken)
        };
        let mut take = |len: usize| take(len).ok_or_else(|| wrong("it is too short"));
        let header = take(HEADER)?;
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
        let hash =
            |at: usize| BlobId::from_bytes(header[at..at + 32].try_into().expect("32 bytes"));
        let (len, stored_len, key) = (word(8), word(12), word(80));
        let (blob, stored_hash) = (hash(16), hash(48));
        let extra = usize::from(u16::from_le_bytes([header[84], header[85]]));
        let width = usize::from(data) + usize::from(parity);
        let is_code =
            if data == 1 { parity == 0 } else { data > 1 && parity > 0 && width <= MAX_WIDTH };
        let is_plain = key == 0 && codec == Codec::None;
        let is_stored = match key {
            0 if is_plain => stored_len == len && stored_hash == blob,
            // Compressed content is always shorter.
            0 => (1..len).contains(&stored_len),
            _ => (1..=MAX_STORED as u32).contains(&stored_len),
        };
        if !is_code
            || len == 0
            || len as usize > MAX_CONTENT
            || !is_stored
            || extra > if key == 0 { 0 } else { MAX_ENCRYPTION_HEADER }
            || header[86..] != [0; 2]
        {
            return Err(wrong("its numbers are invalid"));
        }
        let extra = take(extra)?;
        let frames = match frame_count(len as usize) {
            1 => 0,
            frames => frames,
        };
        let subtrees = take(frames * VALUE)?.as_chunks().0.into();
        let frames = if is_plain { 0 } else { frames };
        let frames = take(frames * FRAME_LEN)?.as_chunks().0;
        let frames: Vec<u32> = frames.iter().map(|len| u32::from_le_bytes(*len)).collect();
        let is_frame = |(frame, stored): (usize, &u32)| {
            let plain = frame_range(frame, len as usize).len();
            *stored > 0 && (key != 0 || *stored as usize <= plain)
        };
        let total: u64 = frames.iter().map(|len| u64::from(*len)).sum();
        let are_frames = total == u64::from(stored_len) && frames.iter().enumerate().all(is_frame);
        if !frames.is_empty() && !are_frames {
            return Err(wrong("the lengths of its frames are invalid"));
        }
        let checksums = take(width * CHECKSUM)?.as_chunks().0.to_vec();
        let seal = Seal::from_bytes(take(SEAL_BYTES)?.try_into().expect("the length of a seal"));
        let header = (key != 0).then(|| extra.into());
        let (encryption, tables) =
            (Encryption { key, header }, Arc::new(Tables { checksums, frames }));
        let description = Description {
            blob,
            len,
            stored_len,
            stored_hash,
            kind,
            codec,
            encryption,
            data,
            parity,
            subtrees,
            tables,
            seal,
        };
        Ok((description, rest))
    }

    /// This description with the checksums of the parity blocks of another one.
    #[cfg(test)]
    pub(crate) fn with_parity_of(&self, other: &Description) -> Description {
        let mut checksums = self.tables.checksums.clone();
        let parity = self.needed()..self.width();
        checksums[parity.clone()].copy_from_slice(&other.tables.checksums[parity]);
        let tables = Tables { checksums, frames: self.tables.frames.clone() };
        Description { tables: Arc::new(tables), ..self.clone() }
    }

    /// This description, as if the content were encrypted with a key.
    #[cfg(test)]
    pub(super) fn encrypted_with(&self, key: u32, header: &[u8]) -> Description {
        let encryption = Encryption { key, header: Some(header.into()) };
        Description { encryption, ..self.clone() }
    }

    /// The description with another seal.
    pub(crate) fn with_seal(self, seal: Seal) -> Description {
        Description { seal, ..self }
    }

    /// Decodes the content from enough blocks, each at its index, and compares it with the blob's
    /// name. It uses the first blocks that are enough, and fails if one of these is wrong.
    pub fn decode<B: AsRef<[u8]>>(&self, blocks: &[Option<B>], content: &mut [u8]) -> Result<()> {
        if content.len() != self.len as usize {
            return Err(self.wrong("the blocks do not fit its description"));
        }
        self.check_readable()?;
        if self.codec == Codec::None {
            self.join(blocks, content)?;
        } else {
            let mut stored = Buffer::new(self.stored_len as usize, 0);
            self.join(blocks, &mut stored)?;
            for (frame, content) in content.chunks_mut(FRAME_BYTES).enumerate() {
                let stored = &stored[self.stored_frame(frame)];
                open_frame(self.codec, stored, content).map_err(|reason| self.wrong(&reason))?;
            }
        }
        match BlobId::of(content) == self.blob {
            true => Ok(()),
            false => Err(self.wrong("the decoded content has another hash")),
        }
    }

    /// Decodes the stored bytes from enough blocks, like [`Description::decode`], and compares them
    /// with their hash. This needs no key for the content. It proves nothing unless the description
    /// is sealed.
    pub fn verify_stored<B: AsRef<[u8]>>(&self, blocks: &[Option<B>]) -> Result<()> {
        let mut stored = Buffer::new(self.stored_len as usize, 0);
        self.join(blocks, &mut stored)?;
        match BlobId::of(&stored) == self.stored_hash {
            true => Ok(()),
            false => Err(self.wrong("the stored bytes have another hash")),
        }
    }

    /// Whether everything in the description is right: what content and blocks give, all of which are
    /// right. Only the seal is left out.
    pub(crate) fn describes<B: AsRef<[u8]>>(&self, content: &[u8], blocks: &[Option<B>]) -> bool {
        let hash = ContentHash { name: self.blob, subtrees: self.subtrees.clone() };
        let are_right = (0..).zip(blocks).all(|(index, block)| {
            block.as_ref().is_some_and(|block| self.matches(index, block.as_ref()))
        });
        are_right && ContentHash::of(content) == hash && self.verify_stored(blocks).is_ok()
    }

    /// Joins enough blocks to the stored bytes.
    fn join<B: AsRef<[u8]>>(&self, blocks: &[Option<B>], mut to: &mut [u8]) -> Result<()> {
        let data = usize::from(self.data);
        if blocks.len() != self.width() {
            return Err(self.wrong("the blocks do not fit its description"));
        }
        let computed;
        let data_blocks: Vec<&[u8]> = if blocks[..data].iter().all(Option::is_some) {
            blocks[..data].iter().flatten().map(AsRef::as_ref).collect()
        } else {
            computed = self.reconstruct(blocks, true)?;
            computed[..data].iter().flatten().map(AsRef::as_ref).collect()
        };
        for block in data_blocks {
            let (here, behind) = to.split_at_mut(to.len().min(self.block_len()));
            let (block, padding) = block
                .split_at_checked(here.len())
                .ok_or_else(|| self.wrong("a block is too short"))?;
            here.copy_from_slice(block);
            // A wrong parity block may change nothing but the padding.
            if padding.iter().any(|byte| *byte != 0) {
                return Err(self.wrong("its padding is not zero"));
            }
            to = behind;
        }
        Ok(())
    }

    /// Fails if the content is encrypted.
    pub(super) fn check_readable(&self) -> Result<()> {
        match self.encryption.key {
            0 => Ok(()),
            key => {
                let reason = format!("it is encrypted with the key {key:08x}, which is not there");
                Err(self.wrong(&reason))
            }
        }
    }

    pub(super) fn wrong(&self, reason: &str) -> Error {
        Error::corrupt(format!("blob {}", self.blob), reason)
    }

    /// Computes a lost block from enough others.
    pub fn rebuild<B: AsRef<[u8]>>(&self, blocks: &[Option<B>], index: usize) -> Result<Vec<u8>> {
        if blocks.len() != self.width() || index >= blocks.len() {
            return Err(self.wrong("the blocks do not fit its description"));
        }
        let block = match &blocks[index] {
            Some(block) => block.as_ref().to_vec(),
            None => self.reconstruct(blocks, index < self.data.into())?[index]
                .take()
                .ok_or_else(|| self.wrong("a block is missing"))?,
        };
        if self.matches(index, &block) {
            Ok(block)
        } else {
            Err(self.wrong("a block has another checksum"))
        }
    }

    /// Computes all blocks, or only the data blocks, from enough of them.
    fn reconstruct<B: AsRef<[u8]>>(
        &self,
        blocks: &[Option<B>],
        only_data: bool,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        if self.parity == 0 {
            return Err(self.wrong("its only block is missing"));
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
        done.map_err(|error| self.wrong(&format!("it cannot be decoded: {error}")))?;
        Ok(all)
    }
}
