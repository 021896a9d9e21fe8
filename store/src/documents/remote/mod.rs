//! Documents that one process serves over the network.
//!
//! ```text
//! RemoteDocuments ─► Connection ═══ frames ═══► serve ─► CatalogStore ─► SqliteDocuments
//!   └─ retries when a connection is lost          └─ recognises a retry by its token
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `client` | [`RemoteDocuments`]: connects, retries, checks the catalog's id |
//! | `connection` | one connection of a client, and what its errors mean |
//! | `scan` | the pages of a listing, on the client |
//! | [`wire`] | requests and answers as bytes |
//! | `server` | [`serve`]: connections and limits |
//! | `permissions` | what each role may read and change |
//! | `allowance` | how much each role may send and receive |
//! | `peer_connections` | the connections of each peer |
//! | `serve_scan` | the pages of a listing, on the server |
//! | `waits` | the requests that wait for a change |
//! | `store` | [`CatalogStore`]: the data directory of a catalog |
//!
//! A change whose answer is lost may have been carried out. So each change carries a random token,
//! which is stored in the same transaction. A retry with a known token returns the result of the
//! first attempt and does nothing.

#[cfg(test)]
mod admission_tests;
mod allowance;
mod client;
mod connection;
mod peer_connections;
mod permissions;
mod scan;
#[cfg(test)]
mod scan_tests;
mod serve_scan;
mod server;
#[cfg(test)]
mod stall_tests;
mod store;
#[cfg(test)]
pub(super) mod tests;
mod waits;
pub mod wire;

pub use client::RemoteDocuments;
pub use server::serve;
pub use store::CatalogStore;
