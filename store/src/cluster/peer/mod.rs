//! A peer: a process that stores fragments for clients.
//!
//! ```text
//! connection ─► limits ─► server ─┬─ put ─► group_commit ─► store: log, one sync ─► answer
//!                                 └─ get, have, list, delete ─► store: table, log ─► answer
//! scrubber ─► store: reads every block once in an interval
//! heartbeat ─► catalog
//! ```
//!
//! | file | responsibility |
//! |---|---|
//! | `server` | accepts connections, reads requests, sends answers |
//! | `group_commit` | one thread that stores the fragments of many puts with one sync |
//! | `store/` | `PeerStore`: the log of segment files and the table of fragments |
//! | `scrubber` | `Scrubber`: the thread that verifies all fragments, slowly |
//! | `heartbeat` | `Heartbeat`: keeps the peer's documents in the catalog alive |

mod group_commit;
pub mod heartbeat;
pub mod scrubber;
#[cfg(test)]
mod served_tests;
mod server;
pub(crate) mod store;

pub use server::serve;
pub use store::{PeerStore, Room, ScrubPause, ScrubRound, ScrubStatus};
