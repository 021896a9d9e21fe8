//! Whether and how a blob is made smaller before it is cut into blocks.

use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;

use zstd::bulk::{Compressor, Decompressor};

use crate::error::Error;

/// How blobs are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Compression {
    /// With zstd if a sample shrinks, else not.
    #[default]
    Auto,
    /// With zstd: smaller, and slower.
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

/// How something was compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Codec {
    None,
    Zstd,
    Lz4,
}

impl Codec {
    /// As it is stored.
    pub(crate) fn number(self) -> u8 {
        match self {
            Codec::None => 0,
            Codec::Zstd => 1,
            Codec::Lz4 => 2,
        }
    }

    /// As it was stored, if this version knows it.
    pub(crate) fn new(number: u8) -> Option<Codec> {
        [Codec::None, Codec::Zstd, Codec::Lz4].into_iter().find(|one| one.number() == number)
    }
}

/// The fastest one: what goes to peers is written once and seldom read.
const LEVEL: i32 = 1;

/// Pieces of a sample, and their length.
const PIECES: usize = 3;
const PIECE: usize = 4096;

thread_local! {
    /// To make one takes longer than to use it.
    static COMPRESSOR: RefCell<Option<Compressor<'static>>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Compresses content; nothing if that does not save at least an eighth.
pub(crate) fn compress(content: &[u8], how: Compression) -> Option<(Codec, Vec<u8>)> {
    match how {
        Compression::None => None,
        Compression::Auto => {
            let pays = sample(content).is_none_or(|sample| lz4(&sample).is_some());
            pays.then(|| zstd(content)).flatten().map(|bytes| (Codec::Zstd, bytes))
        }
        Compression::Zstd => zstd(content).map(|bytes| (Codec::Zstd, bytes)),
        Compression::Lz4 => lz4(content).map(|bytes| (Codec::Lz4, bytes)),
    }
}

/// Pieces from the start, the middle and the end; nothing if they would be most of it.
fn sample(content: &[u8]) -> Option<Vec<u8>> {
    if content.len() < 2 * PIECES * PIECE {
        return None;
    }
    let step = (content.len() - PIECE) / (PIECES - 1);
    Some(
        (0..PIECES)
            .flat_map(|piece| &content[piece * step..piece * step + PIECE])
            .copied()
            .collect(),
    )
}

/// The longest that pays.
fn worth(len: usize) -> usize {
    len - len.div_ceil(8)
}

fn zstd(content: &[u8]) -> Option<Vec<u8>> {
    COMPRESSOR.with_borrow_mut(|compressor| {
        if compressor.is_none() {
            *compressor = Compressor::new(LEVEL).ok();
        }
        // It ends when the room ends.
        let mut bytes = vec![0; worth(content.len())];
        let len = compressor.as_mut()?.compress_to_buffer(content, &mut bytes[..]).ok()?;
        bytes.truncate(len);
        Some(bytes)
    })
}

fn lz4(content: &[u8]) -> Option<Vec<u8>> {
    let bytes = lz4_flex::block::compress(content);
    (bytes.len() <= worth(content.len())).then_some(bytes)
}

/// Decompresses to exactly this length. What would be longer is refused, and takes no memory.
pub(crate) fn decompress(codec: Codec, bytes: &[u8], content: &mut [u8]) -> Result<(), String> {
    let len = match codec {
        Codec::None => return Err("it is not compressed".into()),
        Codec::Zstd => DECOMPRESSOR.with_borrow_mut(|decompressor| {
            if decompressor.is_none() {
                *decompressor = Decompressor::new().ok();
            }
            let decompressor = decompressor.as_mut().ok_or("there is no memory")?;
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

    use super::{Codec, Compression, compress, decompress};

    #[test]
    fn what_is_written_is_read_back() {
        for text in ["auto", "zstd", "lz4", "none"] {
            assert_eq!(text.parse::<Compression>().unwrap().to_string(), text);
        }
        for text in ["", "gzip", "Zstd", "zstd=3"] {
            assert!(text.parse::<Compression>().is_err(), "{text}");
        }
    }

    #[test]
    fn auto_skips_what_does_not_shrink() {
        let mut noise = vec![0; 256 << 10];
        blake3::Hasher::new().update(b"noise").finalize_xof().fill(&mut noise);
        for how in [Compression::Auto, Compression::Zstd, Compression::Lz4, Compression::None] {
            assert_eq!(compress(&noise, how), None, "{how}");
        }
        let text = b"a line of a log, and another one\n".repeat(8000);
        for how in [Compression::Auto, Compression::Zstd, Compression::Lz4] {
            assert!(compress(&text, how).unwrap().1.len() < text.len() / 8, "{how}");
        }
        assert_eq!(compress(&text, Compression::None), None);
    }

    proptest! {
        #[test]
        fn the_length_is_exact_or_it_is_refused(
            pattern in vec(any::<u8>(), 1..50),
            repeat in 20usize..2000,
            wrong in -50isize..50,
        ) {
            let content = pattern.repeat(repeat);
            for how in [Compression::Zstd, Compression::Lz4] {
                let Some((codec, bytes)) = compress(&content, how) else { continue };
                let mut found = vec![0; content.len().saturating_add_signed(wrong)];
                let done = decompress(codec, &bytes, &mut found);
                prop_assert_eq!(done.is_ok(), wrong == 0);
                prop_assert!(wrong != 0 || found == content);
            }
        }

        #[test]
        fn garbage_is_refused_or_fills_the_buffer_and_no_more(
            bytes in vec(any::<u8>(), 0..200),
            len in 0usize..5000,
        ) {
            let mut found = vec![0; len];
            for codec in [Codec::Zstd, Codec::Lz4] {
                let _ = decompress(codec, &bytes, &mut found);
            }
        }
    }
}
