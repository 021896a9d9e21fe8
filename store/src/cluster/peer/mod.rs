//! A peer: a process that keeps fragments for others.

#[cfg(test)]
mod delete_tests;
mod filter;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod group;
mod limits;
mod log;
#[cfg(test)]
mod model_tests;
mod pending;
mod reading;
mod reclaim;
#[cfg(test)]
mod served_tests;
mod server;
mod store;
mod storing;
mod table;
#[cfg(test)]
mod tests;

pub use server::serve;
pub use store::{PeerStore, Room};

use super::fragment::Kind;
use crate::id::BlobId;

/// Which fragment it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FragmentId {
    /// The blob's name.
    pub blob: BlobId,
    /// The name of the description.
    pub encoding: BlobId,
    /// Which block it is.
    pub index: u8,
}

/// One fragment that a peer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The name of its description.
    pub encoding: BlobId,
    /// Blocks that are enough.
    pub data: u8,
    /// Blocks beside them.
    pub parity: u8,
    /// Which block it is.
    pub index: u8,
    /// What the blob is for.
    pub kind: Kind,
    /// Bytes of the block.
    pub len: u32,
}

/// How much a peer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that it may hold.
    pub capacity: u64,
    /// Bytes that the disk takes for the blocks that it holds.
    pub used: u64,
    /// Bytes that are kept free for clients that have reserved them.
    pub reserved: u64,
    /// How many fragments.
    pub fragments: u64,
}
