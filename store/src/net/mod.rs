//! Connections between machines. Both protocols, the peers' and the catalog's, are built on this.
//!
//! ```text
//! identity    TCP or TLS 1.3, roles          who is at the other end
//! handshake   hello ──► welcome or refusal   which protocol, which version
//! frame       header and body                where a message begins and ends
//! message     numbers, texts, failures       what a body is made of
//! connection  many requests at once          which answer belongs to which request
//! ```

mod batched_reader;
pub(crate) mod connection;
pub(crate) mod frame;
pub(crate) mod handshake;
pub mod identity;
pub(crate) mod message;
