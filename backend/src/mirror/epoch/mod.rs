//! Epochs and layers: which writes a checkpoint holds, and what protects them until they are stored.

pub(crate) mod layer;
pub(crate) mod manager;
pub(crate) mod record;
pub(crate) mod recovery;

/// The number of the time span between two checkpoints, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Epoch(pub(crate) u64);
