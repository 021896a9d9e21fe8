//! A peer: a process that keeps fragments for others.

mod store;
#[cfg(test)]
mod tests;

pub use store::{Held, PeerStore, Usage};
