//! Places that keep immutable bytes under the name of their content.
//!
//! [`directory`] is such a place on a local disk. [`ClusterBlobs`](crate::cluster::ClusterBlobs) is
//! one on many machines.

pub(crate) mod directory;

use crate::encoding::StoragePolicy;
use crate::error::Result;
use crate::id::BlobId;

/// A blob to be stored: its name and its content.
pub type NewBlob<'a> = (BlobId, &'a [u8]);

/// A place for blobs. Threads share one object, and several processes may use one place at once.
pub trait Blobs: Send + Sync {
    /// Reads a blob into the start of `buf` and returns its length.
    ///
    /// The content has the name that was asked for; otherwise the call fails. A blob longer than
    /// `buf` is corrupt: the caller knows the largest length.
    fn get(&self, id: &BlobId, buf: &mut [u8]) -> Result<usize>;

    /// Accepts blobs and returns how many bytes they add. A blob that is stored already adds none.
    ///
    /// This object can read them at once. After the next [`Blobs::flush`] they are durable, and
    /// everybody can read them. After an error, any part of them may have been accepted. A place
    /// that stores one copy of everything ignores `policy`. A place that learns later which blobs
    /// exist counts all that it accepts.
    fn put(&self, blobs: &[NewBlob<'_>], policy: &StoragePolicy) -> Result<u64>;

    /// Returns when everything that was put before this call is durable, with its full redundancy.
    fn flush(&self) -> Result<()>;
}
