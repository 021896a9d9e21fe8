//! What a deletion may delete, and what it has deleted.

use crate::collection::CollectionNumber;

/// The stamps of the fragments that a deletion may delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StampBound {
    /// Only fragments with a lower stamp are deleted; [`CollectionNumber::MAX`] for all.
    pub below: CollectionNumber,
    /// The number of the collection. Fragments whose stamp is lost get this stamp, and stay.
    pub number: CollectionNumber,
}

impl StampBound {
    /// Any stamp.
    pub const ANY: StampBound =
        StampBound { below: CollectionNumber::MAX, number: CollectionNumber::FIRST };
}

/// What was deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeletedFragments {
    /// The number of fragments.
    pub fragments: u32,
    /// The bytes of the disk that are free again.
    pub bytes: u64,
}
