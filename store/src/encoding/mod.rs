//! The encoding of a blob as fragments, and back. All functions are pure.
//!
//! ```text
//! content ─► frames, compressed ─► k blocks ─► reed_solomon: m parity blocks ─► fragments
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `redundancy` | [`Redundancy`]: copies or Reed-Solomon blocks; [`StoragePolicy`] of an image |
//! | `compression` | [`Compression`]: whether and how content is compressed |
//! | `frames` | the frames of a blob's content, each of which can be read alone |
//! | `reed_solomon` | parity over GF(2⁸), on any processor |
//! | [`fragment`] | a block and the description of its encoding; cutting content into blocks |
//! | `description` | the description of an encoding: its bytes, verifying, decoding, rebuilding |
//! | `part` | reading a part of a blob's content |
//! | `seal` | proof that a client or a supervisor made a description |

pub(crate) mod compression;
mod description;
pub mod fragment;
pub(crate) mod frames;
mod part;
pub(crate) mod redundancy;
pub(crate) mod reed_solomon;
pub(crate) mod seal;

pub use compression::Compression;
pub(crate) use description::SEAL_BYTES;
pub use description::{MAX_STORED, Seal};
pub use frames::{ContentHash, FRAME_BYTES};
pub use redundancy::{Redundancy, StoragePolicy};
pub use seal::{SealKeyId, SealKeys};
