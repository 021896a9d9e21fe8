//! The client of a served catalog.

use std::sync::{Arc, Mutex as SyncMutex, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::timeout;

use super::connection::Connection;
use super::scan::{ScanPage, ScanPages};
use super::wire::{Answer, MAX_QUERIES, MAX_REQUEST, Request, check_key};
use crate::documents::background::{Background, CallError, no_random, retry, unavailable};
use crate::documents::{
    Change, Changed, Documents, Each, LONGEST_WAIT, Query, RETRY_TIMEOUT, View, collect, new_token,
    prefix_queries,
};
use crate::error::{Error, ErrorKind, Result};
use crate::id::CatalogId;
use crate::net::frame::Message;
use crate::net::identity::Security;

/// The documents of a served catalog. It connects at the first call, and again after a connection
/// is lost.
pub struct RemoteDocuments {
    background: Background,
    link: Arc<CatalogLink>,
}

struct CatalogLink {
    address: String,
    security: Security,
    retry_timeout: Duration,
    /// The id of the last catalog at this address. Another catalog has other documents.
    catalog: SyncMutex<Option<CatalogId>>,
    connection: Mutex<Option<Arc<Connection>>>,
}

impl RemoteDocuments {
    /// The catalog at `host:port`. No request is sent.
    pub fn new(address: &str, security: &Security) -> Result<RemoteDocuments> {
        RemoteDocuments::with_retry_timeout(address, security, RETRY_TIMEOUT)
    }

    /// The catalog at `address`, like [`RemoteDocuments::new`]. A call to an unreachable catalog
    /// fails after `retry_timeout` instead of ten seconds.
    pub fn with_retry_timeout(
        address: &str,
        security: &Security,
        retry_timeout: Duration,
    ) -> Result<RemoteDocuments> {
        let link = CatalogLink {
            address: address.into(),
            security: security.clone(),
            retry_timeout,
            catalog: SyncMutex::default(),
            connection: Mutex::default(),
        };
        Ok(RemoteDocuments { background: Background::start(address)?, link: Arc::new(link) })
    }

    /// Sends a request, with retries. The server may take `wait` longer than usual to answer.
    fn ask(&self, request: &Request, wait: Duration) -> Result<Answer> {
        let request = message(request)?;
        let link = self.link.clone();
        self.background.run(async move {
            let ask = || link.ask(&request, wait);
            retry(&link.address, link.retry_timeout, !wait.is_zero(), ask).await
        })
    }

    /// Passes the documents that match a query to `each`, like [`Documents::scan`]. Retries until
    /// the first page comes. Later, `each` has seen some documents.
    fn scan_queries(&self, queries: &[Query], each: Each<'_>) -> Result<u64> {
        let request = message(&Request::Scan(queries.to_vec()))?;
        let link = self.link.clone();
        let begin = async move {
            let begin = || link.begin_scan(&request);
            retry(&link.address, link.retry_timeout, false, begin).await
        };
        let (mut pages, mut page) = self.background.run(begin)?;
        loop {
            match page {
                ScanPage::End(revision) => return Ok(revision),
                ScanPage::Documents(documents) => {
                    documents.into_iter().try_for_each(|(key, document)| each(&key, document))?;
                }
            }
            let next = async move {
                let next = pages.next().await;
                (pages, next)
            };
            let (kept, next) = self.background.run(next);
            pages = kept;
            page = next.map_err(|error| self.broken_off(error))?;
        }
    }

    /// The error of a scan that passed some documents.
    fn broken_off(&self, error: CallError) -> Error {
        let (kind, reason) = match error {
            CallError::Transient(reason) => (ErrorKind::Unavailable, reason),
            CallError::Permanent(kind, reason) => (kind, reason),
        };
        let reason = format!("a listing broke off: {reason}; try again");
        Error::Catalog { address: self.link.address.clone(), kind, reason }
    }

    fn unexpected(&self) -> Error {
        unavailable(&self.link.address, "its answer does not match the request")
    }
}

/// A request as it is sent.
fn message(request: &Request) -> Result<Message> {
    let (kind, body) = request.to_body();
    if body.len() > MAX_REQUEST {
        let what = "a request to the catalog, in bytes,";
        return Err(Error::TooLarge { what, actual: body.len(), limit: MAX_REQUEST });
    }
    Ok((kind, vec![body.into()]))
}

impl Documents for RemoteDocuments {
    fn read(&self, queries: &[Query]) -> Result<View> {
        if queries.len() > MAX_QUERIES {
            let what = "a read of the catalog, in keys and prefixes,";
            return Err(Error::TooLarge { what, actual: queries.len(), limit: MAX_QUERIES });
        }
        queries.iter().try_for_each(|(Query::Key(key) | Query::Prefix(key))| check_key(key))?;
        match self.ask(&Request::Read(queries.to_vec()), Duration::ZERO)? {
            Answer::View(view) => Ok(view),
            Answer::TooLarge => collect(|each| self.scan_queries(queries, each)),
            _ => Err(self.unexpected()),
        }
    }

    fn scan(&self, prefixes: &[&str], each: Each<'_>) -> Result<u64> {
        prefixes.iter().try_for_each(|prefix| check_key(prefix))?;
        self.scan_queries(&prefix_queries(prefixes), each)
    }

    fn commit(&self, change: &Change) -> Result<bool> {
        let removed = change.removes.iter().map(|(Query::Key(key) | Query::Prefix(key))| key);
        let put = change.puts.iter().map(|put| &put.key);
        let relied_on = change.relies_on.iter().map(|(key, _)| key);
        removed.chain(put).chain(relied_on).try_for_each(|key| check_key(key))?;
        let token = new_token(change)
            .map_err(|error| unavailable(&self.link.address, &no_random(&error)))?;
        match self.ask(&Request::Commit(token, change.clone()), Duration::ZERO)? {
            Answer::Committed(carried_out) => Ok(carried_out),
            _ => Err(self.unexpected()),
        }
    }

    fn last(&self, prefix: &str, before: &str, limit: usize) -> Result<View> {
        [prefix, before].into_iter().try_for_each(check_key)?;
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        match self.ask(&Request::Last(prefix.into(), before.into(), limit), Duration::ZERO)? {
            Answer::View(view) => Ok(view),
            _ => Err(self.unexpected()),
        }
    }

    fn changed(&self, prefix: &str, revision: u64) -> Result<Changed> {
        check_key(prefix)?;
        match self.ask(&Request::Changed(prefix.into(), revision), Duration::ZERO)? {
            Answer::Changed(changed) => Ok(changed),
            // All documents of the prefix count as changed.
            Answer::TooLarge => {
                let view = self.read(&[Query::prefix(prefix)])?;
                Ok(Changed { total: view.documents.len() as u64, view })
            }
            _ => Err(self.unexpected()),
        }
    }

    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<bool> {
        check_key(folder)?;
        let limit = limit.min(LONGEST_WAIT);
        match self.ask(&Request::Wait(folder.into(), revision, limit.as_millis() as u32), limit)? {
            Answer::Waited(changed) => Ok(changed),
            _ => Err(self.unexpected()),
        }
    }
}

impl CatalogLink {
    /// Sends a request once. Each attempt has a third of the time, so that a connection that does
    /// not answer is replaced while time remains.
    async fn ask(&self, request: &Message, wait: Duration) -> Result<Answer, CallError> {
        let connection = match timeout(self.retry_timeout / 3, self.connection()).await {
            Ok(connection) => connection?,
            Err(_) => return Err(CallError::Transient("the connection timed out".into())),
        };
        match timeout(self.retry_timeout / 3 + wait, connection.ask(request.clone())).await {
            Ok(answer) => answer,
            Err(_) => {
                connection.close();
                Err(CallError::timed_out())
            }
        }
    }

    /// Connects for a scan, and waits for its first page.
    async fn begin_scan(&self, request: &Message) -> Result<(ScanPages, ScanPage), CallError> {
        let open = ScanPages::open(&self.address, &self.security, self.retry_timeout);
        let mut pages = match timeout(self.retry_timeout / 3, open).await {
            Ok(pages) => pages?,
            Err(_) => return Err(CallError::Transient("the connection timed out".into())),
        };
        self.check_catalog(pages.catalog())?;
        pages.send(request.clone()).await?;
        let first = pages.next().await?;
        Ok((pages, first))
    }

    /// Fails if another catalog answered at this address before: the request may have been carried
    /// out there. Later requests use the new catalog. What they rely on was read from it, because
    /// no version of a document comes in two catalogs.
    fn check_catalog(&self, catalog: CatalogId) -> Result<(), CallError> {
        let mut known = self.catalog.lock().unwrap_or_else(PoisonError::into_inner);
        match known.replace(catalog) {
            Some(before) if before != catalog => {
                let reason = format!(
                    "it is catalog {catalog}, but was {before} before; start it with the right \
                     directory, or restore the catalog with `cairn catalog rebuild`"
                );
                tracing::error!(address = self.address, %reason, "another catalog answers");
                Err(CallError::Permanent(ErrorKind::Unavailable, reason))
            }
            _ => Ok(()),
        }
    }

    async fn connection(&self) -> Result<Arc<Connection>, CallError> {
        // One task connects at a time; the others wait for the lock and use its connection.
        let mut connection = self.connection.lock().await;
        if let Some(connection) = connection.as_ref().filter(|found| !found.is_lost()) {
            return Ok(connection.clone());
        }
        let opened = Connection::open(&self.address, &self.security).await?;
        self.check_catalog(opened.catalog())?;
        let opened = Arc::new(opened);
        *connection = Some(opened.clone());
        Ok(opened)
    }
}
