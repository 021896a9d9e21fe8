//! Documents that one process serves to all over the network.
//!
//! ```text
//! Served ──► Connection ═══ frames ═══► serve ──► CatalogStore: a database in a directory of its own
//!   └─ asks again when a connection is lost          └─ knows by its token what was carried out before
//! ```
//!
//! A change whose answer is lost may have been carried out. So each carries a random token, which is stored in the
//! same transaction: who asks again with it is told the truth.

mod client;
mod connection;
mod server;
mod store;
#[cfg(test)]
pub(super) mod tests;
pub mod wire;

pub use client::RemoteDocuments;
pub use server::serve;
pub use store::CatalogStore;
