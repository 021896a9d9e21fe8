//! The content of a stamped sector: which write left it there, and proof that it is whole.
//!
//! ```text
//! 0        8         16        24       32                                   512
//! │ magic  │ sector  │ write   │ seed   │ words that follow from the above    │
//! ```
//!
//! Every byte follows from sector, write and seed, so one flipped bit is found.

use seeded_rng::Rng;

pub(crate) const SECTOR: usize = 512;
const MAGIC: u64 = 0x4e52_4941_4354_534d;

/// The number of a write in a run. The imported image counts as write 0.
pub(crate) type WriteId = u64;

/// What a sector holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Zeros,
    Write(WriteId),
    /// Neither zeros nor a whole stamp of this sector and run.
    Garbage(String),
}

/// Stamps `sector`, the bytes of which are `bytes`.
pub(crate) fn stamp(bytes: &mut [u8], sector: u64, write: WriteId, seed: u64) {
    assert_eq!(bytes.len(), SECTOR);
    let (head, body) = bytes.split_at_mut(32);
    for (place, word) in head.chunks_exact_mut(8).zip([MAGIC, sector, write, seed]) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    body_of(sector, write, seed).fill(body);
}

/// Stamps a whole range that starts at `first`.
pub(crate) fn stamp_range(bytes: &mut [u8], first: u64, write: WriteId, seed: u64) {
    for (sector, bytes) in (first..).zip(bytes.chunks_exact_mut(SECTOR)) {
        stamp(bytes, sector, write, seed);
    }
}

/// What the bytes of `sector` say.
pub(crate) fn read(bytes: &[u8], sector: u64, seed: u64) -> Content {
    assert_eq!(bytes.len(), SECTOR);
    if bytes.iter().all(|&byte| byte == 0) {
        return Content::Zeros;
    }
    let word = |at: usize| {
        u64::from_le_bytes(bytes[at * 8..at * 8 + 8].try_into().expect("eight bytes are eight"))
    };
    if word(0) != MAGIC {
        return Content::Garbage("no stamp".into());
    }
    if word(3) != seed {
        return Content::Garbage(format!("the stamp of another run, seed {}", word(3)));
    }
    if word(1) != sector {
        return Content::Garbage(format!("the stamp of sector {}, write {}", word(1), word(2)));
    }
    let mut expected = [0; SECTOR - 32];
    body_of(sector, word(2), seed).fill(&mut expected);
    match expected == bytes[32..] {
        true => Content::Write(word(2)),
        false => Content::Garbage(format!("the stamp of write {} with other bytes", word(2))),
    }
}

fn body_of(sector: u64, write: WriteId, seed: u64) -> Rng {
    Rng::new(seed ^ sector.rotate_left(40) ^ write.rotate_left(20))
}
