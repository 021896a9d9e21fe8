//! Small documents under names, with compare-and-swap over several of them.
//!
//! The catalog, the peers' membership and the leases are kept in this form, whatever keeps it: a database in a
//! directory of this host, a process that serves one over the network, or an existing consensus engine. All
//! keep the same promises:
//!
//! - A read shows one moment.
//! - A change is carried out as a whole or not at all, and only if every document that it relies on is still as
//!   it was read. It is durable when it returns.
//! - Each change has a number, the *revision*, higher than all before. A document's version is the revision of
//!   its last change, so no version comes twice, not even after the document was removed and made again.
//! - A document with a time to live is gone when nobody has written it for that long.

mod background;
mod etcd;
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

/// What a read asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Query {
    /// The document with this key.
    Key(String),
    /// All documents whose keys begin like this.
    Prefix(String),
}

impl Query {
    /// The document with this key.
    pub fn key(key: impl Into<String>) -> Query {
        Query::Key(key.into())
    }

    /// All documents whose keys begin like this.
    pub fn prefix(prefix: impl Into<String>) -> Query {
        Query::Prefix(prefix.into())
    }
}

/// Documents at one moment, by their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The revision that was the last one then.
    pub revision: u64,
    /// What was asked for, as far as it is there.
    pub documents: BTreeMap<String, Document>,
}

impl View {
    /// The document with this key, if it was asked for and is there.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>> {
        self.documents.get(key).map(|document| decode(key, document)).transpose()
    }

    /// All documents whose keys begin like this, with the rest of their keys.
    pub fn under<T: DeserializeOwned>(&self, prefix: &str) -> Result<Vec<(String, T)>> {
        let begin = self.documents.range(prefix.to_owned()..);
        let inside = begin.take_while(|(key, _)| key.starts_with(prefix));
        inside.map(|(key, one)| Ok((key[prefix.len()..].to_owned(), decode(key, one)?))).collect()
    }

    /// The version of the document with this key; 0 if it is not there.
    pub fn version(&self, key: &str) -> u64 {
        self.documents.get(key).map_or(0, |document| document.version)
    }
}

fn decode<T: DeserializeOwned>(key: &str, document: &Document) -> Result<T> {
    serde_json::from_slice(&document.value)
        .map_err(|error| Error::corrupt(format!("the catalog's '{key}'"), error.to_string()))
}

/// A document to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Put {
    /// Its key.
    pub key: String,
    /// Its content: JSON.
    pub value: Vec<u8>,
    /// How long it stays if nobody writes it again; for good without.
    pub seconds: Option<u32>,
}

/// A change of several documents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The versions that these documents must have; 0 for none.
    pub relies_on: Vec<(String, u64)>,
    /// What is removed, before anything is written.
    pub removes: Vec<Query>,
    /// What is written.
    pub puts: Vec<Put>,
    /// It may be lost with the power, if it is not in the way of anything: a heartbeat.
    pub relaxed: bool,
}

impl Change {
    /// Writes a document.
    pub fn put(mut self, key: impl Into<String>, value: &impl Serialize) -> Change {
        self.puts.push(Put { key: key.into(), value: encode(value), seconds: None });
        self
    }

    /// Writes a document that is gone when nobody has written it again for so long.
    pub fn put_for(
        mut self,
        seconds: u32,
        key: impl Into<String>,
        value: &impl Serialize,
    ) -> Change {
        self.puts.push(Put { key: key.into(), value: encode(value), seconds: Some(seconds) });
        self
    }

    /// Removes documents.
    pub fn remove(mut self, what: Query) -> Change {
        self.removes.push(what);
        self
    }
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("documents are plain data")
}

/// A place for documents. Many threads, processes and hosts use one at once.
pub trait Documents: Send + Sync {
    /// The documents that are asked for, as of one moment.
    fn read(&self, wanted: &[Query]) -> Result<View>;

    /// Carries out a change. Returns whether it was: not if a document is not as the change relies on.
    ///
    /// After an error that is not [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) it may have been carried out
    /// all the same.
    fn commit(&self, change: &Change) -> Result<bool>;

    /// Returns when a document whose key begins with `folder` and a slash has changed after `revision`, at the
    /// latest after `limit`. Who returns early for no reason does no harm.
    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<()>;
}

/// Takes or keeps a document that one at a time holds, for so many seconds. Returns whether it is ours.
pub(crate) fn try_lock(
    documents: &dyn Documents,
    key: &str,
    me: &str,
    seconds: u32,
) -> Result<bool> {
    let Some(change) = change_own(documents, key, me)? else { return Ok(false) };
    documents.commit(&change.put_for(seconds, key, &me))
}

/// Gives up what [`try_lock`] has taken, if it is still ours.
pub(crate) fn unlock(documents: &dyn Documents, key: &str, me: &str) -> Result<()> {
    if let Some(change) = change_own(documents, key, me)? {
        documents.commit(&change.remove(Query::key(key)))?;
    }
    Ok(())
}

/// A change that relies on a document as it is, unless somebody else holds it.
fn change_own(documents: &dyn Documents, key: &str, me: &str) -> Result<Option<Change>> {
    let view = documents.read(&[Query::key(key)])?;
    let holder: Option<String> = view.get(key)?;
    if holder.is_some_and(|holder| holder != me) {
        return Ok(None);
    }
    let relies_on = vec![(key.to_owned(), view.version(key))];
    Ok(Some(Change { relies_on, relaxed: true, ..Change::default() }))
}

/// How long a call goes on trying while the catalog is away.
const RETRY_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest wait at a stretch. To return early does no harm.
const LONGEST_WAIT: Duration = Duration::from_secs(25);

/// The documents at an address: `host:port` of a catalog that is served, or `etcd://host:port` of an etcd, where
/// more of its members may follow behind commas. Nobody is asked yet.
pub fn open(address: &str, security: &Security) -> Result<Arc<dyn Documents>> {
    check_address(address)?;
    Ok(match address.starts_with(ETCD) {
        true => Arc::new(EtcdDocuments::new(address, security)?),
        false => Arc::new(RemoteDocuments::new(address, security)?),
    })
}

/// What the address of an etcd begins with.
const ETCD: &str = "etcd://";

/// A random token, by which it is known whether a change was carried out when its answer is lost. A heartbeat has
/// none: it may well be heard twice.
fn new_token(change: &Change) -> io::Result<Option<[u8; 16]>> {
    let is_beat = change.relaxed && change.relies_on.is_empty();
    if is_beat { Ok(None) } else { sys::random().map(Some) }
}

/// Fails if no catalog can have this address: `host:port`, or `etcd://host:port`, where there may be more of them
/// behind commas.
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

/// The folder that a key is in: what comes before the first slash.
fn folder(key: &str) -> &str {
    key.split('/').next().unwrap_or_default()
}
