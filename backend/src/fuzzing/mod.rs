//! Entry points for the fuzzer: one for each kind of input that this process reads and that it has
//! not just written itself.
//!
//! Each takes arbitrary bytes and asserts what must hold for any bytes. If a format has checksums
//! or fields that random bytes never hit, the input selects bits to flip in a valid example. An
//! empty input leaves the example valid.
//!
//! `make fuzz` searches for a long time and with knowledge of the code. The tests here are a short
//! version.

mod copies;
mod epoch;
mod ledger;
mod map;
mod messages;
mod request;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::sys;

pub use copies::copies;
pub use epoch::epoch;
pub use ledger::ledger;
pub use map::map;
pub use messages::messages;
pub use request::request;

/// Flips bits. Each flip has three bytes: two for the position and one for the bits.
fn flip(bytes: &mut [u8], flips: &[u8]) {
    for [low, high, mask] in flips.as_chunks().0 {
        let at = usize::from(u16::from_le_bytes([*low, *high])) % bytes.len();
        bytes[at] ^= mask;
    }
}

/// A file of `len` bytes in memory, with these parts at their offsets.
fn file_of(len: u64, pieces: &[(u64, &[u8])]) -> File {
    let file = sys::shared_memory(len).expect("memory");
    for (offset, bytes) in pieces {
        file.write_all_at(bytes, *offset).expect("memory");
    }
    file
}

/// A path with which the file can be opened.
fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// The next bytes of the input; zeros after its end.
fn take<const N: usize>(data: &mut &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    let (head, rest) = data.split_at(N.min(data.len()));
    bytes[..head.len()].copy_from_slice(head);
    *data = rest;
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{ProptestConfig, any, proptest};

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn epoch(data in vec(any::<u8>(), 0..200)) {
            super::epoch(&data);
        }

        #[test]
        fn copies(data in vec(any::<u8>(), 0..200)) {
            super::copies(&data);
        }

        #[test]
        fn ledger(data in vec(any::<u8>(), 0..200)) {
            super::ledger(&data);
        }

        #[test]
        fn map(data in vec(any::<u8>(), 0..200)) {
            super::map(&data);
        }

        #[test]
        fn messages(data in vec(any::<u8>(), 0..200)) {
            super::messages(&data);
        }

        #[test]
        fn request(data in vec(any::<u8>(), 0..400)) {
            super::request(&data);
        }
    }
}
