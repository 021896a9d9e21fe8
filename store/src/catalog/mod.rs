//! The names: images, snapshots, mirrors and leases, as documents.
//!
//! Every change reads the documents that it depends on, decides, and is carried out only if they are still the
//! same; else it begins again. So each is atomic, whoever else is at work and wherever the documents are.

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

/// How long a change that others forestall is tried again.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest pause between two tries.
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

    fn read(&self, wanted: &[Query]) -> Result<View> {
        self.documents.read(wanted)
    }

    /// Carries out what is decided on a view of these documents. It relies on those that are asked for by their
    /// keys, not on those under prefixes.
    fn change<T>(
        &self,
        wanted: &[Query],
        decide: impl Fn(&View) -> Result<(Change, T)>,
    ) -> Result<T> {
        let begin = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            let view = self.documents.read(wanted)?;
            let (mut change, value) = decide(&view)?;
            if change.puts.is_empty() && change.removes.is_empty() {
                return Ok(value);
            }
            change.relies_on.extend(wanted.iter().filter_map(|one| match one {
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
