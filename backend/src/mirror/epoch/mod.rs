//! Epochs and layers: which writes a checkpoint holds, and what protects them until they are
//! stored.
//!
//! | module | is |
//! |---|---|
//! | [`manager`] | the current epoch, tickets, freezing, the list of layers |
//! | [`layer`] | a frozen epoch and its selective copy-on-write |
//! | [`chunk_state`] | the states of a chunk in an epoch |
//! | [`layer_state`] | the states of an epoch and its layer |
//! | [`record`] | an epoch in shared memory |
//! | [`recovery`] | the epochs that a killed process left |

pub(crate) mod chunk_state;
pub(crate) mod layer;
pub(crate) mod layer_state;
pub(crate) mod manager;
pub(crate) mod record;
pub(crate) mod recovery;

/// The number of the time span between two checkpoints, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Epoch(pub(crate) u64);
