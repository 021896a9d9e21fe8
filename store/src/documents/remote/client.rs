//! The client of a catalog that is served.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::timeout;

use super::connection::Connection;
use super::wire::{Answer, MAX_QUERIES, MAX_REQUEST, Request, check_key};
use crate::documents::background::{Background, CallError, retry, unavailable};
use crate::documents::{Change, Documents, LONGEST_WAIT, Query, RETRY_TIMEOUT, View, new_token};
use crate::error::{Error, ErrorKind, Result};
use crate::id::CatalogId;
use crate::net::frame::Message;
use crate::net::identity::Security;

/// Documents of a catalog elsewhere. It connects when it is first used, and again whenever that is needed.
pub struct RemoteDocuments {
    background: Background,
    link: Arc<CatalogLink>,
}

struct CatalogLink {
    address: String,
    security: Security,
    retry_timeout: Duration,
    /// Which catalog was found first. Another one at its address has other names.
    catalog: OnceLock<CatalogId>,
    connection: Mutex<Option<Arc<Connection>>>,
}

impl RemoteDocuments {
    /// The catalog at `host:port`. Nobody is asked yet.
    pub fn new(address: &str, security: &Security) -> Result<RemoteDocuments> {
        RemoteDocuments::with_retry_timeout(address, security, RETRY_TIMEOUT)
    }

    /// As [`RemoteDocuments::new`], for a caller who wants to hear of a catalog that is away after another time than ten
    /// seconds.
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

    fn ask(&self, request: &Request, longer: Duration) -> Result<Answer> {
        let (kind, body) = request.to_body();
        let len = body.len();
        if len > MAX_REQUEST {
            let what = "a request to the catalog, in bytes,";
            return Err(Error::TooLarge { what, actual: len, limit: MAX_REQUEST });
        }
        let request: Message = (kind, vec![body.into()]);
        let link = self.link.clone();
        self.background.run(async move {
            let ask = || link.ask(&request, longer);
            retry(&link.address, link.retry_timeout, !longer.is_zero(), ask).await
        })
    }

    fn unexpected(&self) -> Error {
        unavailable(&self.link.address, "the answer is not one to the question")
    }
}

impl Documents for RemoteDocuments {
    fn read(&self, wanted: &[Query]) -> Result<View> {
        if wanted.len() > MAX_QUERIES {
            let what = "a read of the catalog, in keys and prefixes,";
            return Err(Error::TooLarge { what, actual: wanted.len(), limit: MAX_QUERIES });
        }
        wanted.iter().try_for_each(|(Query::Key(key) | Query::Prefix(key))| check_key(key))?;
        match self.ask(&Request::Read(wanted.to_vec()), Duration::ZERO)? {
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
            .map_err(|error| unavailable(&self.link.address, &format!("no random: {error}")))?;
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
    /// Asks once. A third of the time is for each try, so that a connection which leads nowhere is tried anew.
    async fn ask(&self, request: &Message, longer: Duration) -> Result<Answer, CallError> {
        let connection = match timeout(self.retry_timeout / 3, self.connection()).await {
            Ok(connection) => connection?,
            Err(_) => return Err(CallError::Transient("it cannot be reached in time".into())),
        };
        match timeout(self.retry_timeout / 3 + longer, connection.ask(request.clone())).await {
            Ok(answer) => answer,
            Err(_) => {
                connection.close();
                Err(CallError::late())
            }
        }
    }

    async fn connection(&self) -> Result<Arc<Connection>, CallError> {
        // One at a time: the others use what this one finds.
        let mut connection = self.connection.lock().await;
        if let Some(connection) = connection.as_ref().filter(|found| !found.is_lost()) {
            return Ok(connection.clone());
        }
        let opened = Connection::open(&self.address, &self.security).await?;
        let first = *self.catalog.get_or_init(|| opened.catalog());
        if opened.catalog() != first {
            let reason = format!(
                "it is catalog {}, and was {first} before; start the one with the right directory",
                opened.catalog()
            );
            return Err(CallError::Permanent(ErrorKind::Unavailable, reason));
        }
        let opened = Arc::new(opened);
        *connection = Some(opened.clone());
        Ok(opened)
    }
}
