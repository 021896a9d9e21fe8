//! How a blob is protected from the loss of peers.

use std::fmt;
use std::str::FromStr;

use super::compression::Compression;
use crate::error::Error;

/// The most fragments of a blob. Few clusters have more failure domains than this.
pub(crate) const MAX_WIDTH: usize = 32;

/// How a blob is spread over peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Redundancy {
    /// Whole copies, each on a peer of its own.
    Replicas(u8),
    /// Data blocks, and parity blocks that are computed from them. Any `data` of all blocks are
    /// enough to read the blob.
    ReedSolomon {
        /// Blocks that the content is cut into.
        data: u8,
        /// Parity blocks, which is also the number of losses that a blob survives.
        parity: u8,
    },
}

impl Redundancy {
    /// One copy. The loss of its peer loses the blob.
    pub const NONE: Redundancy = Redundancy::Replicas(1);

    /// The default for an image that is created in a cluster of this many peers.
    pub fn for_peers(peers: usize) -> Redundancy {
        match peers {
            8.. => Redundancy::ReedSolomon { data: 4, parity: 4 },
            3.. => Redundancy::Replicas(3),
            2 => Redundancy::Replicas(2),
            _ => Redundancy::NONE,
        }
    }

    /// The number of peers that hold a part of a blob.
    pub fn width(self) -> usize {
        match self {
            Redundancy::Replicas(copies) => copies.into(),
            Redundancy::ReedSolomon { data, parity } => usize::from(data) + usize::from(parity),
        }
    }

    /// The number of peers that are enough to read a blob.
    pub fn needed(self) -> usize {
        match self {
            Redundancy::Replicas(_) => 1,
            Redundancy::ReedSolomon { data, .. } => data.into(),
        }
    }

    /// The number of peers whose loss a blob survives.
    pub fn survives(self) -> usize {
        self.width() - self.needed()
    }

    /// The redundancy of tree nodes and records. These are small and are read one after the other,
    /// so they are stored as copies, which survive as many losses.
    pub fn of_small_blobs(self) -> Redundancy {
        Redundancy::Replicas(self.survives() as u8 + 1)
    }
}

/// How the blobs of an image are stored on peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StoragePolicy {
    /// How a blob is spread over peers.
    pub redundancy: Redundancy,
    /// How a blob is compressed before that.
    pub compression: Compression,
}

impl StoragePolicy {
    /// The policy for tree nodes and records: see [`Redundancy::of_small_blobs`].
    pub fn of_small_blobs(&self) -> StoragePolicy {
        StoragePolicy { redundancy: self.redundancy.of_small_blobs(), ..*self }
    }
}

impl Default for StoragePolicy {
    /// One copy, compressed if a sample shrinks.
    fn default() -> StoragePolicy {
        StoragePolicy { redundancy: Redundancy::NONE, compression: Compression::Auto }
    }
}

impl From<Redundancy> for StoragePolicy {
    /// This redundancy, without compression.
    fn from(redundancy: Redundancy) -> StoragePolicy {
        StoragePolicy { redundancy, compression: Compression::None }
    }
}

impl fmt::Display for Redundancy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Redundancy::Replicas(1) => write!(f, "none"),
            Redundancy::Replicas(copies) => write!(f, "replicas={copies}"),
            Redundancy::ReedSolomon { data, parity } => write!(f, "rs={data}+{parity}"),
        }
    }
}

impl FromStr for Redundancy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Redundancy, Error> {
        let number = |text: &str| text.parse::<u8>().ok().filter(|number| *number > 0);
        let parsed = match text.split_once('=') {
            None if text == "none" => Some(Redundancy::NONE),
            Some(("replicas", copies)) => number(copies).map(Redundancy::Replicas),
            Some(("rs", blocks)) => blocks.split_once('+').and_then(|(data, parity)| {
                let (data, parity) = (number(data)?, number(parity)?);
                // With one data block, each parity block would be a copy.
                (data >= 2).then_some(Redundancy::ReedSolomon { data, parity })
            }),
            _ => None,
        };
        parsed.filter(|one| one.width() <= MAX_WIDTH).ok_or_else(|| Error::BadName {
            what: "a redundancy",
            name: text.into(),
            rule: "it is none, replicas=N or rs=K+M, for up to 32 peers, with K at least 2",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Redundancy;

    #[test]
    fn the_text_of_a_redundancy_parses_to_it() {
        for text in ["none", "replicas=2", "replicas=32", "rs=4+4", "rs=2+1", "rs=16+16"] {
            assert_eq!(text.parse::<Redundancy>().unwrap().to_string(), text);
        }
        assert_eq!("replicas=1".parse::<Redundancy>().unwrap(), Redundancy::NONE);
        for text in
            ["", "rs", "rs=4", "rs=1+1", "rs=0+4", "rs=4+0", "rs=300+1", "rs=31+2", "rs=4+4+4"]
        {
            assert!(text.parse::<Redundancy>().is_err(), "{text}");
        }
        for text in ["replicas", "replicas=0", "replicas=33", "replicas=-1", "None", " none"] {
            assert!(text.parse::<Redundancy>().is_err(), "{text}");
        }
    }

    #[test]
    fn tree_nodes_survive_as_many_losses_as_chunks() {
        for text in ["none", "replicas=3", "rs=4+4", "rs=8+2"] {
            let redundancy: Redundancy = text.parse().unwrap();
            assert_eq!(redundancy.of_small_blobs().survives(), redundancy.survives(), "{text}");
        }
    }

    #[test]
    fn the_default_needs_no_more_peers_than_the_cluster_has() {
        for peers in 1..20 {
            assert!(Redundancy::for_peers(peers).width() <= peers);
        }
    }
}
