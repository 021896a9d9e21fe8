//! The catalog: images, snapshots, mirrors and leases, as documents.
//!
//! ```text
//! operation ─► read the documents ─► decide ─► commit, if they are unchanged ─► done
//!                     ▲                             │ a document has changed
//!                     └─────────────────────────────┘
//! ```
//!
//! So each operation is atomic, and the same code runs over SQLite, a served catalog and etcd.
//!
//! | file | holds |
//! |---|---|
//! | `documents` | the documents, their fields and their keys |
//! | `images` | creating, listing and removing images and snapshots |
//! | `mirrors` | attaching mirrors; the lease of an image's writer and its fence |
//! | `attachments` | the operations of an attached mirror: reserve, begin, publish, fail, release |
//! | `records` | records of snapshots, and rebuilding a lost catalog from them |

mod attachments;
mod documents;
mod images;
mod mirrors;
mod records;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

pub(crate) use self::attachments::{Holder, Published};
pub(crate) use self::images::{Available, Draft, FirstSnapshot, Referrer};
pub use self::mirrors::LEASE_SECONDS;
pub use self::records::Rebuilt;
pub(crate) use self::records::Record;

use crate::documents::{Change, Documents, Query, View};
use crate::error::{Error, Result};

/// How long a change that conflicts with other changes is retried.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Images, snapshots, mirrors and leases. It is reached through
/// [`Repository::catalog`](crate::Repository::catalog).
pub struct Catalog {
    documents: Arc<dyn Documents>,
}

impl Catalog {
    pub(crate) fn new(documents: Arc<dyn Documents>) -> Self {
        Self { documents }
    }

    fn read(&self, queries: &[Query]) -> Result<View> {
        self.documents.read(queries)
    }

    /// Carries out the change that `decide` returns for a view of these documents. The change
    /// relies on the documents that are queried by key, not on those that are queried by prefix.
    fn change<T>(
        &self,
        queries: &[Query],
        decide: impl Fn(&View) -> Result<(Change, T)>,
    ) -> Result<T> {
        let begin = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            let view = self.documents.read(queries)?;
            let (mut change, value) = decide(&view)?;
            if change.puts.is_empty() && change.removes.is_empty() {
                return Ok(value);
            }
            change.relies_on.extend(queries.iter().filter_map(|one| match one {
                Query::Key(key) => Some((key.clone(), view.version(key))),
                Query::Prefix(_) => None,
            }));
            if self.documents.commit(&change)? {
                return Ok(value);
            }
            if begin.elapsed() > RETRY_TIMEOUT {
                return Err(Error::Contended);
            }
            thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}
