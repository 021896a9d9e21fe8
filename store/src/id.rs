//! Ids of chunks, tree nodes, blobs, peers, catalogs, images and mirrors: fixed numbers of bytes.

use std::fmt;
use std::str::FromStr;

/// A text that is not a valid id.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' cannot be {what}: {rule}")]
pub struct InvalidId {
    what: &'static str,
    text: String,
    rule: &'static str,
}

/// Declares an id of `$len` bytes, written in hexadecimal.
macro_rules! byte_id {
    ($(#[$doc:meta])* $name:ident, $len:literal, $what:literal, $rule:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name([u8; $len]);

        impl $name {
            /// The id with these bytes.
            pub const fn from_bytes(bytes: [u8; $len]) -> Self {
                Self(bytes)
            }

            /// The id's bytes.
            pub const fn as_bytes(&self) -> &[u8; $len] {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                let mut bytes = [0; $len];
                if parse_hex(text, &mut bytes) {
                    Ok(Self(bytes))
                } else {
                    Err(InvalidId { what: $what, text: text.into(), rule: $rule })
                }
            }
        }
    };
}

byte_id!(
    /// The name of a chunk: the BLAKE3 of its plain content.
    ChunkId, 32, "a chunk's id", "it has 64 hexadecimal digits"
);
byte_id!(
    /// The name of a tree node: the BLAKE3 of its canonical bytes.
    NodeId, 32, "a node's id", "it has 64 hexadecimal digits"
);
byte_id!(
    /// The name of a blob, whatever it holds: the BLAKE3 of its content.
    BlobId, 32, "a blob's id", "it has 64 hexadecimal digits"
);
byte_id!(
    /// The id of a peer: random bytes in its certificate, or, without TLS, in its data directory.
    PeerId, 16, "a peer's id", "it has 32 hexadecimal digits"
);
byte_id!(
    /// The id of a served catalog: random bytes in its data directory.
    CatalogId, 16, "a catalog's id", "it has 32 hexadecimal digits"
);
byte_id!(
    /// The id of an image: random bytes, chosen when the image is created. An image that is created
    /// again under the same name is another image.
    ImageId, 16, "an image's id", "it has 32 hexadecimal digits"
);
byte_id!(
    /// The serial number of a certificate: random bytes.
    CertificateSerial, 16, "a serial number", "it has 32 hexadecimal digits"
);
byte_id!(
    /// The id of a mirror: random bytes, chosen when the mirror is created.
    MirrorId, 16, "a mirror's id", "it has 32 hexadecimal digits"
);
byte_id!(
    /// The id of a commit or a reader that the catalog knows for as long as it is renewed: random
    /// bytes.
    LeaseId, 16, "a lease's id", "it has 32 hexadecimal digits"
);

impl BlobId {
    /// The name of this content.
    pub fn of(content: &[u8]) -> Self {
        Self(*blake3::hash(content).as_bytes())
    }
}

impl ChunkId {
    /// The name of this content.
    pub fn of(content: &[u8]) -> Self {
        Self(*blake3::hash(content).as_bytes())
    }
}

impl From<ChunkId> for BlobId {
    fn from(id: ChunkId) -> Self {
        Self(id.0)
    }
}

impl From<NodeId> for BlobId {
    fn from(id: NodeId) -> Self {
        Self(id.0)
    }
}

fn parse_hex(text: &str, bytes: &mut [u8]) -> bool {
    fn digit(byte: u8) -> Option<u8> {
        char::from(byte).to_digit(16).and_then(|d| u8::try_from(d).ok())
    }
    text.len() == bytes.len() * 2
        && text.as_bytes().chunks_exact(2).zip(bytes).all(|(pair, byte)| {
            match (digit(pair[0]), digit(pair[1])) {
                (Some(high), Some(low)) => {
                    *byte = high << 4 | low;
                    true
                }
                _ => false,
            }
        })
}

#[cfg(test)]
mod tests {
    use super::{ChunkId, MirrorId};

    #[test]
    fn a_chunk_is_named_by_the_blake3_of_its_content() {
        let name = ChunkId::of(b"").to_string();
        assert_eq!(name, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
    }

    #[test]
    fn the_text_of_an_id_parses_to_it() {
        let id = MirrorId::from_bytes(*b"\x00\x01\xfeabcdefghijklm");
        assert_eq!(id.to_string().parse::<MirrorId>().unwrap(), id);
    }

    #[test]
    fn ids_of_the_wrong_length_or_alphabet_are_refused() {
        for bad in ["", "00", &"0".repeat(31), &"g".repeat(32), &"é".repeat(16)] {
            assert!(bad.parse::<MirrorId>().is_err(), "{bad}");
        }
    }
}
