//! The encoding of a blob as fragments, and back. All functions are pure.
//!
//! ```text
//! content ─► compression ─► k blocks ─► reed_solomon: m parity blocks ─► fragments
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `redundancy` | [`Redundancy`]: copies or Reed-Solomon blocks; [`StoragePolicy`] of an image |
//! | `compression` | [`Compression`]: whether and how content is compressed |
//! | `reed_solomon` | parity over GF(2⁸), on any processor |
//! | [`fragment`] | the description of an encoding; cutting, verifying, decoding, rebuilding |

pub(crate) mod compression;
pub mod fragment;
pub(crate) mod redundancy;
pub(crate) mod reed_solomon;

pub use compression::Compression;
pub use redundancy::{Redundancy, StoragePolicy};
