//! The document store: small JSON documents under keys, with compare-and-swap over several of them.
//!
//! Images, snapshots, mirrors, leases and members are documents.
//!
//! ```text
//! Documents ─┬─ SqliteDocuments ── catalog.db
//!            ├─ RemoteDocuments ═══ TLS ═══► server ── CatalogStore ── SqliteDocuments
//!            └─ EtcdDocuments ═══ gRPC ═══► etcd
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `mod` | the trait [`Documents`], queries, changes, and locks that are documents |
//! | `sqlite` | documents in a database of this host |
//! | [`remote`] | documents that another process serves: client, server and wire format |
//! | `etcd` | documents in an etcd |
//! | `background` | the thread and the retries of both network clients |
//! | `ranges` | queries as ranges of keys |
//!
//! All implementations keep the same promises:
//!
//! - A read shows one moment, and so does a scan, however many documents it passes.
//! - A change is carried out as a whole or not at all, and only if every document that it relies on
//!   has the version that was read. It is durable when it returns, unless it is *relaxed*.
//! - Each change has a number, the *revision*, which is higher than all before. A document's
//!   version is the revision of its last change. So no version comes twice, even if the document
//!   was removed and created again.
//! - A document with a time to live expires when nobody has written it for that long. That changes
//!   no folder: nobody who waits for the folder is woken.

mod background;
mod etcd;
mod ranges;
pub mod remote;
mod sqlite;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

pub use etcd::EtcdDocuments;
pub use remote::{CatalogStore, RemoteDocuments};
use serde::Serialize;
use serde::de::DeserializeOwned;
pub use sqlite::SqliteDocuments;

use crate::error::{Error, Result};
use crate::net::identity::Security;
use crate::sys;

/// A document as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// Its content: JSON.
    pub value: Vec<u8>,
    /// The revision of its last change.
    pub version: u64,
}

impl Document {
    /// The value of the document, whose key is `key`.
    pub(crate) fn decode<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        serde_json::from_slice(&self.value)
            .map_err(|error| Error::corrupt(format!("the catalog's '{key}'"), error.to_string()))
    }
}

/// Selects documents by their keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Query {
    /// The document with this key.
    Key(String),
    /// All documents whose keys begin with this prefix.
    Prefix(String),
}

impl Query {
    /// A query for the document with this key.
    pub fn key(key: impl Into<String>) -> Query {
        Query::Key(key.into())
    }

    /// A query for all documents whose keys begin with this prefix.
    pub fn prefix(prefix: impl Into<String>) -> Query {
        Query::Prefix(prefix.into())
    }

    /// A key after all keys that begin with this prefix.
    pub fn after(prefix: &str) -> String {
        ranges::prefix_end(prefix)
    }
}

/// Documents as of one moment, by their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The latest revision at that moment.
    pub revision: u64,
    /// The documents that matched a query.
    pub documents: BTreeMap<String, Document>,
}

impl View {
    /// The document with this key, if a query matched it.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>> {
        self.documents.get(key).map(|document| document.decode(key)).transpose()
    }

    /// All documents whose keys begin with `prefix`, each with the rest of its key.
    pub fn under<T: DeserializeOwned>(&self, prefix: &str) -> Result<Vec<(String, T)>> {
        let begin = self.documents.range(prefix.to_owned()..);
        let inside = begin.take_while(|(key, _)| key.starts_with(prefix));
        inside.map(|(key, one)| Ok((key[prefix.len()..].to_owned(), one.decode(key)?))).collect()
    }

    /// The version of the document with this key; 0 if the view does not have it.
    pub fn version(&self, key: &str) -> u64 {
        self.documents.get(key).map_or(0, |document| document.version)
    }
}

/// A document to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Put {
    /// Its key.
    pub key: String,
    /// Its content: JSON.
    pub value: Vec<u8>,
    /// The time to live: the document expires if nobody writes it again for this long. `None`: it
    /// does not expire.
    pub seconds: Option<u32>,
}

/// A change of several documents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The versions that these documents must have; 0 for a document that must not exist.
    pub relies_on: Vec<(String, u64)>,
    /// The documents to remove, before any is written.
    pub removes: Vec<Query>,
    /// The documents to write.
    pub puts: Vec<Put>,
    /// Whether a power cut may undo the change. Heartbeats and leases are relaxed.
    pub relaxed: bool,
}

impl Change {
    /// Adds a document to write.
    pub fn put(mut self, key: impl Into<String>, value: &impl Serialize) -> Change {
        self.puts.push(Put { key: key.into(), value: encode(value), seconds: None });
        self
    }

    /// Adds a document to write, which expires if nobody writes it again for `seconds`.
    pub fn put_for(
        mut self,
        seconds: u32,
        key: impl Into<String>,
        value: &impl Serialize,
    ) -> Change {
        self.puts.push(Put { key: key.into(), value: encode(value), seconds: Some(seconds) });
        self
    }

    /// Adds documents to remove.
    pub fn remove(mut self, query: Query) -> Change {
        self.removes.push(query);
        self
    }
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("documents are plain data")
}

/// A document store. Many threads, processes and hosts use one at once.
pub trait Documents: Send + Sync {
    /// Reads the documents that match a query, as of one moment. They are all in memory at once:
    /// see [`Documents::scan`].
    fn read(&self, queries: &[Query]) -> Result<View>;

    /// Passes all documents under these prefixes to `each`, as of one moment, in the order of their
    /// keys and each once. Returns the revision of that moment. Few documents are in memory at a
    /// time, however many there are.
    ///
    /// A scan may pass a document that has expired, until the next change of any document. So the moment
    /// of a scan and all changes have one order: a change that relies on a document that the scan did
    /// not pass is carried out before the scan, which then shows it, or not at all.
    ///
    /// Fails with the error of `each` if it returns one. After any error, `each` has seen only some
    /// of the documents. `each` should be quick: a served catalog ends a scan that takes minutes.
    fn scan(
        &self,
        prefixes: &[&str],
        each: &mut dyn FnMut(&str, Document) -> Result<()>,
    ) -> Result<u64> {
        let view = self.read(&prefix_queries(prefixes))?;
        view.documents.into_iter().try_for_each(|(key, document)| each(&key, document))?;
        Ok(view.revision)
    }

    /// The last documents under `prefix` whose keys are less than `before`: at most `limit`, which
    /// is not 0, and fewer if they are long. An empty view means that there are none.
    fn last(&self, prefix: &str, before: &str, limit: usize) -> Result<View> {
        let mut view = self.read(&[Query::prefix(prefix)])?;
        view.documents.retain(|key, _| key.as_str() < before);
        let surplus = view.documents.len().saturating_sub(limit);
        view.documents = view.documents.into_iter().skip(surplus).collect();
        Ok(view)
    }

    /// The documents under `prefix` that were written after `revision`, and the number of all
    /// documents under it, as of one moment.
    ///
    /// A caller that adds them to the documents that it has read before knows all documents, unless
    /// it then has more than that number: then some were removed.
    fn changed(&self, prefix: &str, revision: u64) -> Result<Changed> {
        let mut view = self.read(&[Query::prefix(prefix)])?;
        let total = view.documents.len() as u64;
        view.documents.retain(|_, one| one.version > revision);
        Ok(Changed { view, total })
    }

    /// Carries out a change. Returns `false`, and changes nothing, if a document does not have the
    /// version that the change relies on.
    ///
    /// After an error that is not [`ErrorKind::Invalid`](crate::ErrorKind::Invalid), the change may
    /// have been carried out.
    fn commit(&self, change: &Change) -> Result<bool>;

    /// Waits until a document whose key begins with `folder` and a slash has changed after
    /// `revision`, for at most `limit`. Returns whether it saw such a change. If it did not, the
    /// next wait for the same revision does. An implementation may return early.
    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<bool>;
}

/// The documents under a prefix that were written after some revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The documents, and the latest revision.
    pub view: View,
    /// The number of all documents under the prefix.
    pub total: u64,
}

/// Acquires or renews the lock `key` for `seconds`. At most one `me` holds it at a time. Returns
/// whether `me` holds it.
pub(crate) fn try_lock(
    documents: &dyn Documents,
    key: &str,
    me: &str,
    seconds: u32,
) -> Result<bool> {
    match LockView::read(documents, key)? {
        lock if lock.is_free() || lock.is_held_by(me) => {
            documents.commit(&lock.change().put_for(seconds, key, &me))
        }
        _ => Ok(false),
    }
}

/// Renews the lock `key`, which [`try_lock`] acquired, for `seconds`. Returns whether `me` has held it
/// all the time. If it was free in between, somebody else may have held it.
pub(crate) fn renew_lock(
    documents: &dyn Documents,
    key: &str,
    me: &str,
    seconds: u32,
) -> Result<bool> {
    match LockView::read(documents, key)? {
        lock if lock.is_held_by(me) => documents.commit(&lock.change().put_for(seconds, key, &me)),
        _ => Ok(false),
    }
}

/// Releases the lock `key`, which [`try_lock`] acquired, if `me` still holds it.
pub(crate) fn unlock(documents: &dyn Documents, key: &str, me: &str) -> Result<()> {
    let lock = LockView::read(documents, key)?;
    if lock.is_held_by(me) {
        documents.commit(&lock.change().remove(Query::key(key)))?;
    }
    Ok(())
}

/// A lock, as it was read.
struct LockView<'a> {
    key: &'a str,
    holder: Option<String>,
    version: u64,
}

impl LockView<'_> {
    fn read<'a>(documents: &dyn Documents, key: &'a str) -> Result<LockView<'a>> {
        let view = documents.read(&[Query::key(key)])?;
        Ok(LockView { key, holder: view.get(key)?, version: view.version(key) })
    }

    fn is_free(&self) -> bool {
        self.holder.is_none()
    }

    fn is_held_by(&self, me: &str) -> bool {
        self.holder.as_deref() == Some(me)
    }

    /// A change that relies on what was read.
    fn change(&self) -> Change {
        let relies_on = vec![(self.key.to_owned(), self.version)];
        // A renewal may be lost with the power of the documents' host, the acquisition may not:
        // somebody else could acquire the lock while it counts as held.
        Change { relies_on, relaxed: !self.is_free(), ..Change::default() }
    }
}

/// Receives the documents of a scan.
type Each<'a> = &'a mut dyn FnMut(&str, Document) -> Result<()>;

/// Queries for the documents under these prefixes.
fn prefix_queries(prefixes: &[&str]) -> Vec<Query> {
    prefixes.iter().copied().map(Query::prefix).collect()
}

/// Collects the documents of a scan.
fn collect(scan: impl FnOnce(Each<'_>) -> Result<u64>) -> Result<View> {
    let mut documents = BTreeMap::new();
    let revision = scan(&mut |key, document| {
        documents.insert(key.to_owned(), document);
        Ok(())
    })?;
    Ok(View { revision, documents })
}

/// How long a call retries while the catalog is unreachable.
const RETRY_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest wait of one request. A [wait](Documents::wait) may return early.
const LONGEST_WAIT: Duration = Duration::from_secs(25);

/// The documents at an address: `host:port` of a served catalog, or `etcd://host:port` of an etcd,
/// with further members after commas. No request is sent.
pub fn open(address: &str, security: &Security) -> Result<Arc<dyn Documents>> {
    check_address(address)?;
    Ok(match address.starts_with(ETCD) {
        true => Arc::new(EtcdDocuments::new(address, security)?),
        false => Arc::new(RemoteDocuments::new(address, security)?),
    })
}

/// The prefix of an etcd's address.
const ETCD: &str = "etcd://";

/// A random token that is stored with a change. If the answer to the change is lost, a retry with
/// the same token tells whether the change was carried out. A heartbeat has none: it may be carried
/// out twice.
fn new_token(change: &Change) -> io::Result<Option<[u8; 16]>> {
    let is_beat = change.relaxed && change.relies_on.is_empty();
    if is_beat { Ok(None) } else { sys::random().map(Some) }
}

/// Fails unless the address has the form `host:port` or `etcd://host:port[,host:port...]`.
pub fn check_address(address: &str) -> Result<()> {
    let is_good = match address.strip_prefix(ETCD) {
        Some(all) => all.split(',').all(is_host_and_port),
        None => is_host_and_port(address),
    };
    if !is_good {
        return Err(Error::BadCatalogAddress { address: address.into() });
    }
    Ok(())
}

fn is_host_and_port(address: &str) -> bool {
    let parts = address.rsplit_once(':');
    parts.is_some_and(|(host, port)| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || ".-_[]:%".contains(c);
        !host.is_empty() && host.chars().all(is_plain) && port.parse::<u16>().is_ok_and(|p| p > 0)
    })
}

/// The folder of a key: the part before the first slash.
fn folder(key: &str) -> &str {
    key.split('/').next().unwrap_or_default()
}
