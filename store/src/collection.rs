//! The numbers of collections, which stamp every blob.
//!
//! A process that stores blobs knows the number of the collection that was current when it began.
//! Each put, and each question that finds a blob present, stamps the blob with that number, durably.
//! A collection deletes only blobs that nothing refers to *and* whose stamp is below its bound. So
//! it never deletes a blob that a process has stored, or found present, since.

use serde::{Deserialize, Serialize};

/// The number of a collection.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct CollectionNumber(pub u64);

impl CollectionNumber {
    /// The number before the first collection.
    pub const FIRST: CollectionNumber = CollectionNumber(0);

    /// The stamp of a blob whose stamp is lost, and the bound of a deletion that ignores stamps. No
    /// collection has this number.
    pub const MAX: CollectionNumber = CollectionNumber(i64::MAX as u64);

    /// The number of the collection after this one.
    pub(crate) fn next(self) -> CollectionNumber {
        CollectionNumber(self.0 + 1)
    }
}
