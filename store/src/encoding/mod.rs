//! How a blob is cut into fragments and put together again. Pure.

pub(crate) mod compression;
pub mod fragment;
pub(crate) mod redundancy;
pub(crate) mod reed_solomon;

pub use compression::Compression;
pub use redundancy::{Redundancy, StoragePolicy};
