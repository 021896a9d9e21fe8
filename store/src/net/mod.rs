//! Connections between machines. The protocols of peers and of catalogs are both built on this
//! module.
//!
//! ```text
//! connection   one connection, many requests     which answer belongs to which request
//!     │
//! message      numbers, texts, failures          what a body consists of
//! frame        header and body                   where a message begins and ends
//! handshake    hello ──► welcome or refusal      which protocol, which version
//! identity     TLS 1.3 with roles, or plain TCP  which process is at the other end
//! admission    few strangers, many clients       which connections a server keeps
//! limits       memory, and a minimum speed       what each client uses of a server
//! batched_reader                                 fewer wake-ups on plain TCP
//! ```

pub(crate) mod admission;
mod batched_reader;
pub(crate) mod connection;
pub(crate) mod frame;
pub(crate) mod handshake;
pub mod identity;
pub(crate) mod limits;
pub(crate) mod message;
