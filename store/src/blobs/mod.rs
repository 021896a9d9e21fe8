//! Stores of immutable bytes that are named by the hash of their content.
//!
//! [`directory`] stores blobs on a local disk. [`ClusterBlobs`](crate::cluster::ClusterBlobs)
//! stores them on the peers of a cluster.

pub(crate) mod directory;

use crate::collection::CollectionNumber;
use crate::encoding::{ContentHash, StoragePolicy};
use crate::error::Result;
use crate::id::{BlobId, ChunkId};

/// A blob to be stored: its content, and the hash that gives the blob its name.
#[derive(Clone, Debug)]
pub struct NewBlob<'a> {
    pub(crate) hash: ContentHash,
    pub(crate) content: &'a [u8],
}

impl<'a> NewBlob<'a> {
    /// Hashes the content.
    pub fn new(content: &'a [u8]) -> NewBlob<'a> {
        NewBlob { hash: ContentHash::of(content), content }
    }

    /// The blob's name.
    pub fn id(&self) -> BlobId {
        self.hash.name
    }

    /// The blob's name, if it is a chunk.
    pub fn chunk_id(&self) -> ChunkId {
        ChunkId::from_bytes(*self.hash.name.as_bytes())
    }
}

/// A blob store. Threads share one object, and several processes may use one store at once.
pub trait Blobs: Send + Sync {
    /// Reads a blob into the start of `buf` and returns its length.
    ///
    /// The content is verified: its hash is `id`, or the call fails. The caller knows the largest
    /// possible length, so a blob that is longer than `buf` is corrupt.
    fn get(&self, id: &BlobId, buf: &mut [u8]) -> Result<usize>;

    /// Accepts blobs and returns how many bytes they add. A blob that is already stored adds none.
    ///
    /// - This object can read the blobs at once.
    /// - After the next [`Blobs::flush`] the blobs are durable, and every process can read them.
    /// - After an error, any part of the blobs may have been accepted.
    /// - A store that keeps one copy of each blob ignores `policy`.
    /// - A store that finds out later which blobs already exist counts every blob that it accepts.
    fn put(&self, blobs: &[NewBlob<'_>], policy: &StoragePolicy) -> Result<u64>;

    /// Returns when every blob that was put before this call is durable with its full redundancy.
    fn flush(&self) -> Result<()>;

    /// Makes every later [`Blobs::put`] and [`Blobs::known`] stamp blobs with at least this number:
    /// see [`collection`](crate::collection).
    fn raise_stamp(&self, number: CollectionNumber);

    /// Returns, for each blob, whether it is durable with the redundancy of the policy. Stamps the
    /// blobs that are. `false` may be wrong.
    fn known(&self, ids: &[BlobId], policy: &StoragePolicy) -> Result<Vec<bool>>;
}
