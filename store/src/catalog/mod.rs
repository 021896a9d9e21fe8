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
//! | `index` | the counts of an image's snapshots; finding a snapshot by its name |
//! | `images` | creating and listing images and snapshots |
//! | `collection` | the numbers of collections; commits and readers; what a collection must keep |
//! | `readers` | snapshots that are being read |
//! | `available` | the index of *available* snapshots |
//! | `removal` | removing images and snapshots |
//! | `removal_summary` | one record for all removed snapshots of an image; which records are needed |
//! | `edits` | labels, pins, metadata and obsolete marks of snapshots |
//! | `policies` | retention policies |
//! | `forgetting` | forgetting mirrors |
//! | `mirrors` | attaching mirrors; the lease of an image's writer and its fence |
//! | `holder` | an attached mirror, and what its operations check |
//! | `attachments` | the operations of an attached mirror: reserve, begin, publish, fail, release |
//! | `verified` | when snapshots were last verified |
//! | `records` | records of snapshots, and rebuilding a lost catalog from them |
//! | `mirror_records` | records of mirrors |

mod attachments;
mod available;
mod collection;
mod documents;
mod edits;
#[cfg(test)]
mod edits_tests;
#[cfg(test)]
mod ephemeral_tests;
mod forgetting;
mod holder;
mod images;
mod index;
#[cfg(test)]
mod index_tests;
mod mirror_records;
mod mirrors;
mod policies;
mod readers;
mod records;
mod removal;
mod removal_summary;
mod revived;
#[cfg(test)]
mod tests;
mod verified;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

pub(crate) use self::available::Available;
pub(crate) use self::collection::{
    CollectionRoots, CommitBasis, LEASED_SECONDS, MarkedRoot, RootOwner, commit_key,
};
pub use self::collection::{CompletedCollection, SpaceHolder};
pub(crate) use self::documents::StoredSummary;
pub use self::edits::{MAX_LABELS, SnapshotEdit};
pub use self::forgetting::MirrorUse;
pub(crate) use self::forgetting::UnusedRule;
pub(crate) use self::holder::{Holder, Published};
pub(crate) use self::images::{Draft, FirstSnapshot, Referrer};
pub(crate) use self::mirror_records::MirrorReference;
pub use self::mirrors::LEASE_SECONDS;
pub use self::policies::AppliedPolicy;
pub(crate) use self::readers::reader_key;
pub use self::records::Rebuilt;
pub(crate) use self::records::{Record, RecordSubject, Records, recorded_redundancy};
pub(crate) use self::removal::{PruneCheck, Refused};
pub(crate) use self::removal_summary::{MAX_RANGES, RecordsInUse, RemovalSummary};
pub use self::verified::VerifiedTimes;
pub(crate) use self::verified::{VerificationBasis, Verified};

use self::documents::{ImageDocument, SCHEMA, SCHEMA_VERSION, image, image_key};
use crate::documents::{Change, Documents, Query, View};
use crate::error::{Error, Result};
use crate::id::ImageId;
use crate::name::ImageName;

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

    /// Reads documents. Fails if they are of another version than this program's.
    fn read(&self, queries: &[Query]) -> Result<View> {
        let mut queries = queries.to_vec();
        queries.push(Query::key(SCHEMA));
        let view = self.documents.read(&queries)?;
        check_schema(&view)?;
        Ok(view)
    }

    /// Reads the image and the documents that `queries` selects by the image's id, as of one
    /// moment.
    fn read_image(
        &self,
        name: &ImageName,
        queries: impl Fn(&ImageId) -> Vec<Query>,
    ) -> Result<(View, ImageDocument)> {
        loop {
            let id = self.image_id(name)?;
            let view = self.read(&with_image(name, queries(&id)))?;
            let document = image(&view, name)?;
            if document.id == id {
                return Ok((view, document));
            }
            // Another image got the name between the two reads.
        }
    }

    fn image_id(&self, name: &ImageName) -> Result<ImageId> {
        Ok(image(&self.read(&[Query::Key(image_key(name))])?, name)?.id)
    }

    /// Carries out the change that `decide` returns for a view of these documents. The change
    /// relies on the documents that are queried by key, not on those that are queried by prefix.
    fn change<T>(
        &self,
        queries: &[Query],
        decide: impl Fn(&View) -> Result<(Change, T)>,
    ) -> Result<T> {
        self.retry(|| self.try_change(queries, |view| decide(view).map(Some)))
    }

    /// Tries a change once. Returns `None` if a document that it relies on has changed, or if
    /// `decide` returns `None`.
    fn try_change<T>(
        &self,
        queries: &[Query],
        decide: impl Fn(&View) -> Result<Option<(Change, T)>>,
    ) -> Result<Option<T>> {
        let view = self.read(queries)?;
        let Some((mut change, value)) = decide(&view)? else { return Ok(None) };
        if change.puts.is_empty() && change.removes.is_empty() {
            return Ok(Some(value));
        }
        if view.version(SCHEMA) == 0 {
            change = change.put(SCHEMA, &SCHEMA_VERSION);
        }
        change.relies_on.push((SCHEMA.to_owned(), view.version(SCHEMA)));
        change.relies_on.extend(queries.iter().filter_map(|one| match one {
            Query::Key(key) => Some((key.clone(), view.version(key))),
            Query::Prefix(_) => None,
        }));
        Ok(self.documents.commit(&change)?.then_some(value))
    }

    /// Repeats an operation until it returns a value.
    fn retry<T>(&self, attempt: impl Fn() -> Result<Option<T>>) -> Result<T> {
        let begin = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            if let Some(value) = attempt()? {
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

/// Fails if the documents are of another version than this program's. Every change relies on the
/// version, so a process that was started before an upgrade of the documents changes nothing after
/// it.
fn check_schema(view: &View) -> Result<()> {
    match view.get::<u64>(SCHEMA)? {
        Some(found) => Error::check_format("the catalog".as_ref(), found, SCHEMA_VERSION),
        None => Ok(()),
    }
}

fn with_image(name: &ImageName, mut queries: Vec<Query>) -> Vec<Query> {
    queries.push(Query::Key(image_key(name)));
    queries
}
