//! Whether and how a blob is made smaller before it is cut into blocks.

use std::fmt;
use std::str::FromStr;

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
