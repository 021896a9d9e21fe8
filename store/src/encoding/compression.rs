//! Compression of frames: which codec, and the codecs.

use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;

use zstd::bulk::{Compressor, Decompressor};

use crate::error::Error;

/// How the blobs of an image are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Compression {
    /// With zstd if a sample shrinks by an eighth, otherwise not.
    #[default]
    Auto,
    /// With zstd: smaller and slower than lz4.
    Zstd,
    /// With lz4.
    Lz4,
    /// Not at all.
    None,
}

const NAMES: [(Compression, &str); 4] = [
    (Compression::Auto, "auto"),
    (Compression::Zstd, "zstd"),
    (Compression::Lz4, "lz4"),
    (Compression::None, "none"),
];

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(one, _)| one == self).map_or("", |(_, name)| name);
        f.pad(name)
    }
}

impl FromStr for Compression {
    type Err = Error;

    fn from_str(text: &str) -> Result<Compression, Error> {
        let found = NAMES.iter().find(|(_, name)| *name == text).map(|(one, _)| *one);
        found.ok_or_else(|| Error::BadName {
            what: "a compression",
            name: text.into(),
            rule: "it is auto, zstd, lz4 or none",
        })
    }
}

/// How the content of a blob was compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Codec {
    None,
    Zstd,
    Lz4,
}

impl Codec {
    /// The number of the codec in a description.
    pub(crate) fn number(self) -> u8 {
        match self {
            Codec::None => 0,
            Codec::Zstd => 1,
            Codec::Lz4 => 2,
        }
    }

    /// The codec with this number, if this version knows it.
    pub(crate) fn new(number: u8) -> Option<Codec> {
        [Codec::None, Codec::Zstd, Codec::Lz4].into_iter().find(|one| one.number() == number)
    }
}

/// The compression level of zstd: the fastest. Blobs on peers are written once and rarely read.
const ZSTD_LEVEL: i32 = 1;

/// The pieces of a sample.
const SAMPLE_PIECES: usize = 3;
/// Bytes of each piece of a sample.
const PIECE_BYTES: usize = 4096;

thread_local! {
    /// Kept, because creating one takes longer than using it.
    static COMPRESSOR: RefCell<Option<Compressor<'static>>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Whether a sample of the content shrinks by an eighth. Short content is not sampled.
pub(crate) fn shrinks(content: &[u8]) -> bool {
    sample(content).is_none_or(|sample| {
        let bytes = lz4_flex::block::compress(&sample);
        bytes.len() <= sample.len() - sample.len().div_ceil(8)
    })
}

/// Pieces from the start, the middle and the end; `None` if they would be half of the content or
/// more.
fn sample(content: &[u8]) -> Option<Vec<u8>> {
    if content.len() < 2 * SAMPLE_PIECES * PIECE_BYTES {
        return None;
    }
    let step = (content.len() - PIECE_BYTES) / (SAMPLE_PIECES - 1);
    Some(
        (0..SAMPLE_PIECES)
            .flat_map(|piece| &content[piece * step..piece * step + PIECE_BYTES])
            .copied()
            .collect(),
    )
}

/// Compresses a frame to at most `room` bytes, and appends them to `to`. Returns whether it did.
pub(crate) fn compress_frame(codec: Codec, frame: &[u8], room: usize, to: &mut Vec<u8>) -> bool {
    match codec {
        Codec::None => false,
        Codec::Zstd => COMPRESSOR.with_borrow_mut(|compressor| {
            if compressor.is_none() {
                *compressor = Compressor::new(ZSTD_LEVEL).ok();
            }
            let Some(compressor) = compressor else { return false };
            let before = to.len();
            to.resize(before + room, 0);
            // Compression stops when the buffer is full.
            let len = compressor.compress_to_buffer(frame, &mut to[before..]);
            to.truncate(before + len.as_ref().map_or(0, |len| *len));
            len.is_ok()
        }),
        Codec::Lz4 => {
            let bytes = lz4_flex::block::compress(frame);
            let fits = bytes.len() <= room;
            if fits {
                to.extend_from_slice(&bytes);
            }
            fits
        }
    }
}

/// Decompresses to exactly the length of `content`. Fails if the result would be shorter or longer,
/// without allocating memory for it.
pub(crate) fn decompress_frame(
    codec: Codec,
    bytes: &[u8],
    content: &mut [u8],
) -> Result<(), String> {
    let len = match codec {
        Codec::None => return Err("it is not compressed".into()),
        Codec::Zstd => DECOMPRESSOR.with_borrow_mut(|decompressor| {
            if decompressor.is_none() {
                *decompressor = Decompressor::new().ok();
            }
            let decompressor =
                decompressor.as_mut().ok_or("there is not enough memory to decompress it")?;
            decompressor.decompress_to_buffer(bytes, content).map_err(|error| error.to_string())
        })?,
        Codec::Lz4 => {
            lz4_flex::block::decompress_into(bytes, content).map_err(|error| error.to_string())?
        }
    };
    if len == content.len() { Ok(()) } else { Err("it is shorter than it should be".into()) }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::{Codec, Compression, compress_frame, decompress_frame};

    #[test]
    fn the_text_of_a_compression_parses_to_it() {
        for text in ["auto", "zstd", "lz4", "none"] {
            assert_eq!(text.parse::<Compression>().unwrap().to_string(), text);
        }
        for text in ["", "gzip", "Zstd", "zstd=3"] {
            assert!(text.parse::<Compression>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_buffer_of_another_length_is_refused(
            pattern in vec(any::<u8>(), 1..50),
            repeat in 20usize..2000,
            wrong in -50isize..50,
        ) {
            let content = pattern.repeat(repeat);
            for codec in [Codec::Zstd, Codec::Lz4] {
                let mut bytes = Vec::new();
                if !compress_frame(codec, &content, content.len() - 1, &mut bytes) {
                    continue;
                }
                let mut found = vec![0; content.len().saturating_add_signed(wrong)];
                let done = decompress_frame(codec, &bytes, &mut found);
                prop_assert_eq!(done.is_ok(), wrong == 0);
                prop_assert!(wrong != 0 || found == content);
            }
        }

        #[test]
        fn random_bytes_do_not_overrun_the_buffer(
            bytes in vec(any::<u8>(), 0..200),
            len in 0usize..5000,
        ) {
            let mut found = vec![0; len];
            for codec in [Codec::Zstd, Codec::Lz4] {
                let _ = decompress_frame(codec, &bytes, &mut found);
            }
        }
    }
}
