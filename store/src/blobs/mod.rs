//! Where immutable bytes are kept under the name of their content.

pub(crate) mod directory;

use crate::encoding::StoragePolicy;
use crate::error::Result;
use crate::id::BlobId;

/// What went through, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Of content that was put.
    pub dirty: u64,
    /// Of blocks that were sent: with the redundancy.
    pub sent: u64,
    /// Of content that the peers had already.
    pub saved: u64,
}

/// A blob on its way in: its name and its content.
pub type NewBlob<'a> = (BlobId, &'a [u8]);

/// A place for blobs. Implementations are shared between threads, and several processes may use one
/// place at once.
pub trait Blobs: Send + Sync {
    /// Reads a blob into the start of `buf` and returns its length.
    ///
    /// What it returns has the name that was asked for, or it fails. A blob longer than `buf` is
    /// corrupt: the caller knows how long it can be.
    fn get(&self, id: &BlobId, buf: &mut [u8]) -> Result<usize>;

    /// Takes blobs, to be kept like this, and returns how many bytes that adds: those that are there already add
    /// none. Where there is one copy of everything, `policy` means nothing.
    ///
    /// They can be read at once through this object. After the next [`Blobs::flush`] they are durable,
    /// and everybody can read them. After an error any part of them may have been taken.
    /// A place that finds out later what is there counts what it takes. `policy` is for places on many machines.
    fn put(&self, blobs: &[NewBlob<'_>], policy: &StoragePolicy) -> Result<u64>;

    /// Returns when everything put before this call is durable, with the redundancy that it was put with.
    fn flush(&self) -> Result<()>;

    /// Returns when everything put before this call can be read by everybody, though it may not have its full
    /// redundancy.
    fn flush_available(&self) -> Result<()> {
        self.flush()
    }

    /// Stores a snapshot's record, durably, and returns its name; nothing where the catalog is beside the blobs,
    /// and lost with them. If `lenient`, it may have less than its redundancy.
    fn put_record(
        &self,
        _record: &[u8],
        _keep: &StoragePolicy,
        _lenient: bool,
    ) -> Result<Option<BlobId>> {
        Ok(None)
    }

    /// What went to other machines through this object so far; nothing where there are none.
    fn counters(&self) -> Option<Counters> {
        None
    }

    /// Reserves room for so many bytes of content that are kept like this, until it is released under the number that
    /// this returns. Fails if there is no room. Where one disk is the limit, nothing is reserved.
    fn reserve_space(&self, _bytes: u64, _keep: &StoragePolicy) -> Result<u64> {
        Ok(0)
    }

    /// Releases what was reserved under this number.
    fn release_space(&self, _number: u64) {}

    /// Forgets what is known to be there without asking: it may be gone.
    fn forget_known(&self) {}

    /// All records that were ever taken.
    fn records(&self) -> Result<Vec<Vec<u8>>> {
        Ok(Vec::new())
    }
}
