//! The client of a served catalog.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::timeout;

use super::connection::Connection;
use super::wire::{Answer, MAX_QUERIES, MAX_REQUEST, Request, check_key};
use crate::documents::background::{Background, CallError, no_random, retry, unavailable};
use crate::documents::{Change, Documents, LONGEST_WAIT, Query, RETRY_TIMEOUT, View, new_token};
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
    /// The id of the first catalog at this address. Another catalog has other documents.
    catalog: OnceLock<CatalogId>,
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
            catalog: OnceLock::new(),
            connection: Mutex::default(),
        };
        Ok(RemoteDocuments { background: Background::start(address)?, link: Arc::new(link) })
    }

    /// Sends a request, with retries. The server may take `wait` longer than usual to answer.
    fn ask(&self, request: &Request, wait: Duration) -> Result<Answer> {
        let (kind, body) = request.to_body();
        let len = body.len();
        if len > MAX_REQUEST {
            let what = "a request to the catalog, in bytes,";
            return Err(Error::TooLarge { what, actual: len, limit: MAX_REQUEST });
        }
        let request: Message = (kind, vec![body.into()]);
        let link = self.link.clone();
        self.background.run(async move {
            let ask = || link.ask(&request, wait);
            retry(&link.address, link.retry_timeout, !wait.is_zero(), ask).await
        })
    }

    fn unexpected(&self) -> Error {
        unavailable(&self.link.address, "its answer does not match the request")
    }
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
            _ => Err(self.unexpected()),
        }
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

    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<()> {
        check_key(folder)?;
        let limit = limit.min(LONGEST_WAIT);
        match self.ask(&Request::Wait(folder.into(), revision, limit.as_millis() as u32), limit)? {
            Answer::Waited => Ok(()),
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

    async fn connection(&self) -> Result<Arc<Connection>, CallError> {
        // One task connects at a time; the others wait for the lock and use its connection.
        let mut connection = self.connection.lock().await;
        if let Some(connection) = connection.as_ref().filter(|found| !found.is_lost()) {
            return Ok(connection.clone());
        }
        let opened = Connection::open(&self.address, &self.security).await?;
        let first = *self.catalog.get_or_init(|| opened.catalog());
        if opened.catalog() != first {
            let reason = format!(
                "it is catalog {}, but was {first} before; start it with the right directory",
                opened.catalog()
            );
            return Err(CallError::Permanent(ErrorKind::Unavailable, reason));
        }
        let opened = Arc::new(opened);
        *connection = Some(opened.clone());
        Ok(opened)
    }
}
