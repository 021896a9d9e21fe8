//! A peer: a process that keeps fragments for others.

#[cfg(test)]
mod served_tests;
mod server;
mod store;
#[cfg(test)]
mod tests;

pub use server::serve;
pub use store::{Held, PeerStore, Usage};
