//! Where immutable bytes are kept under the name of their content.

mod dir;
mod stage;
mod temp;
#[cfg(test)]
mod tests;

pub(crate) use dir::DirBlobs;
pub(crate) use temp::{TempDir, sync_dir};

use crate::error::Result;
use crate::id::BlobId;

/// A place for blobs. Implementations are shared between threads, and several processes may use one
/// place at once.
pub trait Blobs: Send + Sync {
    /// Reads a blob into the start of `buf` and returns its length.
    ///
    /// What it returns has the name that was asked for, or it fails. A blob longer than `buf` is
    /// corrupt: the caller knows how long it can be.
    fn get(&self, id: &BlobId, buf: &mut [u8]) -> Result<usize>;

    /// Takes a blob and returns how many bytes that adds: 0 if it is there already.
    ///
    /// The blob can be read at once through this object, by everybody when it is durable, and it is
    /// certainly durable after the next [`Blobs::flush`].
    fn put(&self, id: &BlobId, content: &[u8]) -> Result<u64>;

    /// Whether the blob is there. The next [`Blobs::flush`] covers a yes as if it had been put.
    fn contains(&self, id: &BlobId) -> Result<bool>;

    /// Returns when everybody can read what was put before this call, and a crash of this process
    /// cannot take it away. Cheaper than [`Blobs::flush`]: the host's death still can.
    fn settle(&self) -> Result<()>;

    /// Returns when everything put, or found to be there, before this call is durable.
    fn flush(&self) -> Result<()>;
}
