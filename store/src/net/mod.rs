//! Connections between machines: frames, identity and TLS, batched reads.

mod batched_reader;
pub(crate) mod frames;
pub mod identity;
