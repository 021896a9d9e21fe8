//! Seals: proof that a client or a supervisor made a description.
//!
//! A checksum and a hash can be computed by anybody. A *seal* is a message authentication code under
//! a key that clients and supervisors have and peers do not. So a peer cannot invent an encoding of
//! content that others will store, or a record.
//!
//! A seal is not a part of an encoding's identity: the same encoding under another key has the same
//! fragments, and a key can be replaced without storing anything again.
//!
//! ```text
//! BLAKE3, keyed, of: the blob's name, the hash of the description, k, m, kind, bytes of a block
//! ```
//!
//! All of this is in the hash of the description, too. It is repeated because a peer reports it when
//! it is asked what it holds, and the seal then proves the report.

use std::fmt;

use super::description::{Description, Kind, SEAL_BYTES, Seal};
use crate::id::BlobId;

/// The id of a key. It is derived from the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SealKeyId(u32);

impl fmt::Display for SealKeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// What a seal proves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sealed {
    pub(crate) blob: BlobId,
    /// The hash of the description.
    pub(crate) encoding: BlobId,
    pub(crate) data: u8,
    pub(crate) parity: u8,
    pub(crate) kind: Kind,
    /// Bytes of a block.
    pub(crate) len: u32,
}

impl Sealed {
    /// What the seal of this description proves.
    pub(crate) fn of(description: &Description) -> Sealed {
        let data = description.needed() as u8;
        Sealed {
            blob: description.blob,
            encoding: description.id(),
            data,
            parity: description.width() as u8 - data,
            kind: description.kind(),
            len: description.block_len() as u32,
        }
    }

    fn to_bytes(self) -> [u8; 71] {
        let mut bytes = [0; 71];
        bytes[..32].copy_from_slice(self.blob.as_bytes());
        bytes[32..64].copy_from_slice(self.encoding.as_bytes());
        bytes[64..67].copy_from_slice(&[self.data, self.parity, self.kind as u8]);
        bytes[67..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }
}

/// The keys that make and verify seals.
#[derive(Clone)]
pub struct SealKeys(Verification);

#[derive(Clone)]
enum Verification {
    /// The first key makes seals, all of them verify seals.
    Keys(Vec<SealKey>),
    /// Every description counts as sealed. For plain TCP, where nothing is authentic.
    Off,
}

/// One key.
#[derive(Clone, PartialEq, Eq)]
struct SealKey {
    id: SealKeyId,
    mac: [u8; 32],
}

impl SealKey {
    fn new(secret: &[u8; 32]) -> SealKey {
        let id = blake3::derive_key("cairn 2026-11-18 the id of a key for seals", secret);
        let mac = blake3::derive_key("cairn 2026-11-18 the seal of a description", secret);
        SealKey { id: SealKeyId(u32::from_le_bytes([id[0], id[1], id[2], id[3]])), mac }
    }

    fn seal(&self, what: &Sealed) -> Seal {
        let mac = blake3::keyed_hash(&self.mac, &what.to_bytes());
        let mut bytes = [0; SEAL_BYTES];
        bytes[..4].copy_from_slice(&self.id.0.to_le_bytes());
        bytes[4..].copy_from_slice(&mac.as_bytes()[..SEAL_BYTES - 4]);
        Seal::from_bytes(bytes)
    }
}

impl SealKeys {
    /// No keys: every description counts as sealed.
    pub const OFF: SealKeys = SealKeys(Verification::Off);

    /// Keys from their secrets. The first one makes seals. Without a secret nothing counts as
    /// sealed.
    pub fn new(secrets: &[[u8; 32]]) -> SealKeys {
        SealKeys(Verification::Keys(secrets.iter().map(SealKey::new).collect()))
    }

    /// The id of the key that makes seals; `None` if there is none.
    pub fn current(&self) -> Option<SealKeyId> {
        match &self.0 {
            Verification::Off => None,
            Verification::Keys(keys) => keys.first().map(|key| key.id),
        }
    }

    /// Makes the seal of a description. Without a key, the seal proves nothing.
    pub fn seal(&self, description: &Description) -> Seal {
        match &self.0 {
            Verification::Keys(keys) if !keys.is_empty() => keys[0].seal(&Sealed::of(description)),
            _ => Seal::NONE,
        }
    }

    /// Whether a seal proves this.
    pub(crate) fn proves(&self, what: &Sealed, seal: &Seal) -> bool {
        match &self.0 {
            Verification::Off => true,
            Verification::Keys(keys) => {
                let mut keys = keys.iter().filter(|key| key.id.0 == seal.key());
                keys.any(|key| is_equal(&key.seal(what), seal))
            }
        }
    }

    /// Whether a description has a valid seal of an older key than the one that makes seals.
    pub(crate) fn is_outdated(&self, description: &Description) -> bool {
        let current = self.current();
        current.is_some_and(|current| current.0 != description.seal.key())
            && self.is_sealed(description)
    }

    /// Whether there are keys that only verify seals.
    pub(crate) fn has_old_keys(&self) -> bool {
        matches!(&self.0, Verification::Keys(keys) if keys.len() > 1)
    }

    /// Whether a description has a valid seal.
    pub fn is_sealed(&self, description: &Description) -> bool {
        matches!(self.0, Verification::Off)
            || self.proves(&Sealed::of(description), &description.seal)
    }
}

/// Compares two seals, in the same time for all of them.
fn is_equal(one: &Seal, other: &Seal) -> bool {
    let bytes = one.as_bytes().iter().zip(other.as_bytes());
    bytes.fold(0, |all, (one, other)| all | (one ^ other)) == 0
}

#[cfg(test)]
mod tests {
    use super::{Seal, SealKeys, Sealed};
    use crate::encoding::Redundancy;
    use crate::encoding::fragment::{Kind, encode, encode_record};
    use crate::id::BlobId;

    #[test]
    fn only_a_key_with_the_same_secret_verifies_a_seal() {
        let blob = BlobId::of(b"content");
        let (mut description, _) = encode(&blob, b"content", Redundancy::NONE);
        let (old, new) = (SealKeys::new(&[[1; 32]]), SealKeys::new(&[[2; 32], [1; 32]]));
        assert!(!old.is_sealed(&description), "nobody has sealed it");
        let id = description.id();
        description.seal = old.seal(&description);
        assert_eq!(description.id(), id, "a seal does not change the identity");
        assert!(old.is_sealed(&description) && new.is_sealed(&description));
        assert!(!old.is_outdated(&description) && new.is_outdated(&description));
        assert!(!old.has_old_keys() && new.has_old_keys());
        assert!(!SealKeys::new(&[[2; 32]]).is_sealed(&description));
        assert!(!SealKeys::new(&[]).is_sealed(&description));
        assert_ne!(old.current(), new.current());
        let under_old = description.seal;
        description.seal = new.seal(&description);
        assert_ne!(description.seal, under_old);
        assert!(!new.is_outdated(&description) && !old.is_outdated(&description));
        assert!(!old.is_sealed(&description), "the old key does not verify the new one");
        assert_eq!(SealKeys::new(&[]).seal(&description), Seal::NONE);
        assert!(SealKeys::OFF.is_sealed(&description));
    }

    #[test]
    fn a_seal_proves_nothing_else() {
        let keys = SealKeys::new(&[[7; 32]]);
        let blob = BlobId::of(b"content");
        let (description, _) = encode(&blob, b"content", Redundancy::NONE);
        let (record, _) = encode_record(&blob, b"content", Redundancy::NONE);
        let seal = keys.seal(&description);
        let right = Sealed::of(&description);
        assert!(keys.proves(&right, &seal));
        let others = [
            Sealed { blob: BlobId::of(b"another"), ..right },
            Sealed { encoding: BlobId::of(b"another"), ..right },
            Sealed { data: 2, ..right },
            Sealed { parity: 1, ..right },
            Sealed { kind: Kind::Record, ..right },
            Sealed { len: 8, ..right },
            Sealed::of(&record),
        ];
        for other in others {
            assert!(!keys.proves(&other, &seal), "{other:?}");
        }
        for at in 0..seal.as_bytes().len() {
            let mut bytes = *seal.as_bytes();
            bytes[at] ^= 1;
            assert!(!keys.proves(&right, &Seal::from_bytes(bytes)), "byte {at}");
        }
    }
}
