//! Documents in an etcd, which survives the loss of machines.
//!
//! | key in etcd | is |
//! |---|---|
//! | `/cairn/documents/KEY` | a document; its version is the key's `mod_revision` |
//! | `/cairn/tokens/WRITER/TOKEN` | a mark that the change with this token was carried out |
//!
//! WRITER is the id of a peer, or else the role, so that etcd can restrict a peer to its own tokens.
//!
//! A change is one transaction. A document with a time to live is attached to an etcd lease. Each
//! write gets a lease of its own. The lease of an overwritten document expires by itself.

#[cfg(test)]
mod auth_tests;
mod scan;
#[cfg(test)]
pub(super) mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, DeleteOptions, Error as EtcdError,
    GetOptions, Identity, KeyValue, KvClient, LeaseClient, PutOptions, TlsOptions, Txn, TxnOp,
    TxnOpResponse, WatchClient, WatchOptions,
};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::background::{Background, CallError, no_random, retry, unavailable};
use super::{
    Change, Document, Documents, ETCD, Each, LONGEST_WAIT, Put, Query, RETRY_TIMEOUT, View,
    collect, new_token, prefix_queries,
};
use crate::error::{ErrorKind, Result};
use crate::net::identity::Security;

/// The prefix of all keys in etcd.
const BASE: &str = "/cairn/";

/// The most reads in one transaction. By default, etcd allows 128 operations.
const MAX_OPERATIONS: usize = 100;

/// The longest answer, in bytes.
const MAX_ANSWER: usize = 64 << 20;

/// The time to live of the lease that tokens are attached to.
const TOKEN_LEASE_TTL: Duration = Duration::from_secs(900);

/// How long one lease gets further tokens. So each token lives for at least ten minutes, which is
/// longer than any client retries.
const TOKEN_LEASE_USE: Duration = Duration::from_secs(300);

/// Documents in an etcd.
pub struct EtcdDocuments {
    background: Background,
    inner: Arc<Inner>,
}

struct Inner {
    address: String,
    retry_timeout: Duration,
    /// The prefix of the tokens of this process.
    tokens: String,
    kv: KvClient,
    leases: LeaseClient,
    watches: WatchClient,
    /// The lease that tokens are attached to, and when it was granted.
    token_lease: Mutex<Option<(i64, Instant)>>,
}

impl EtcdDocuments {
    /// The etcd at `etcd://host:port`, with further members after commas. No request is sent.
    pub fn new(address: &str, security: &Security) -> Result<EtcdDocuments> {
        EtcdDocuments::with_retry_timeout(address, security, RETRY_TIMEOUT)
    }

    /// The etcd at `address`, like [`EtcdDocuments::new`]. A call to an unreachable etcd fails
    /// after `retry_timeout` instead of ten seconds.
    pub fn with_retry_timeout(
        address: &str,
        security: &Security,
        retry_timeout: Duration,
    ) -> Result<EtcdDocuments> {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(retry_timeout / 3)
            .with_keep_alive(Duration::from_secs(5), Duration::from_secs(5))
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if let Some(keys) = security.etcd()? {
            let tls = TlsOptions::new()
                .ca_certificate(Certificate::from_pem(&keys.authority))
                .identity(Identity::from_pem(&keys.certificate, &keys.key));
            options = options.with_tls(tls);
        }
        let members = address.strip_prefix(ETCD).unwrap_or(address);
        let members: Vec<String> = members.split(',').map(str::to_owned).collect();
        let background = Background::start(address)?;
        let client = background.run(async move { Client::connect(members, Some(options)).await });
        let client = client.map_err(|error| unavailable(address, &error.to_string()))?;
        let writer = security.identity().map_or("insecure".into(), |identity| {
            identity.peer().map_or(identity.role().name().into(), |id| id.to_string())
        });
        let inner = Inner {
            address: address.into(),
            retry_timeout,
            tokens: format!("{BASE}tokens/{writer}/"),
            kv: client.kv_client().max_decoding_message_size(MAX_ANSWER),
            leases: client.lease_client(),
            watches: client.watch_client(),
            token_lease: Mutex::default(),
        };
        Ok(EtcdDocuments { background, inner: Arc::new(inner) })
    }
}

impl Documents for EtcdDocuments {
    fn read(&self, queries: &[Query]) -> Result<View> {
        let (inner, own) = (self.inner.clone(), queries.to_vec());
        let read = self.background.run(async move {
            let read = || inner.in_time(inner.read(&own));
            retry(&inner.address, inner.retry_timeout, false, read).await
        });
        match read? {
            Some(view) => Ok(view),
            None => collect(|each| self.scan_queries(queries, each)),
        }
    }

    fn scan(&self, prefixes: &[&str], each: Each<'_>) -> Result<u64> {
        self.scan_queries(&prefix_queries(prefixes), each)
    }

    fn commit(&self, change: &Change) -> Result<bool> {
        let token = new_token(change)
            .map_err(|error| unavailable(&self.inner.address, &no_random(&error)))?;
        let (inner, change) = (self.inner.clone(), change.clone());
        let token =
            token.map(|token| format!("{}{:032x}", inner.tokens, u128::from_be_bytes(token)));
        self.background.run(async move {
            let commit = || inner.in_time(inner.commit(token.as_deref(), &change));
            retry(&inner.address, inner.retry_timeout, false, commit).await
        })
    }

    fn last(&self, prefix: &str, before: &str, limit: usize) -> Result<View> {
        self.last_documents(prefix, before, limit)
    }

    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<bool> {
        let (inner, folder) = (self.inner.clone(), folder.to_owned());
        self.background.run(async move {
            let wait = || inner.wait(&folder, revision, limit.min(LONGEST_WAIT));
            retry(&inner.address, inner.retry_timeout, true, wait).await
        })
    }
}

impl Inner {
    /// Runs `call` with the timeout of one attempt.
    async fn in_time<T>(
        &self,
        call: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, CallError> {
        timeout(self.retry_timeout / 3, call).await.unwrap_or_else(|_| Err(CallError::timed_out()))
    }

    /// Reads documents; `None` if they do not fit into one answer.
    async fn read(&self, queries: &[Query]) -> Result<Option<View>, CallError> {
        let mut view = View::default();
        // A read without queries asks for the revision. This key never exists.
        let no_document = [Query::key("")];
        let asked = if queries.is_empty() { &no_document[..] } else { queries };
        for some in asked.chunks(MAX_OPERATIONS) {
            let get = |query: &Query| {
                // Later transactions read as of the revision of the first one.
                let options = GetOptions::new().with_revision(view.revision as i64);
                match query {
                    Query::Key(key) => TxnOp::get(document(key), Some(options)),
                    Query::Prefix(prefix) => {
                        let begin = document(prefix);
                        let options = options.with_range(prefix_end(&begin));
                        TxnOp::get(begin, Some(options))
                    }
                }
            };
            let gets: Vec<TxnOp> = some.iter().map(get).collect();
            let answer = match self.kv.clone().txn(Txn::new().and_then(gets)).await {
                Err(error) if is_too_large(&error) => return Ok(None),
                answer => answer?,
            };
            if view.revision == 0 {
                view.revision = answer.header().map_or(0, |header| header.revision()) as u64;
            }
            for response in answer.op_responses() {
                let TxnOpResponse::Get(mut found) = response else { continue };
                view.documents.extend(found.take_kvs().into_iter().map(read_document));
            }
        }
        if queries.is_empty() {
            view.documents.clear();
        }
        Ok(Some(view))
    }

    async fn commit(&self, token: Option<&str>, change: &Change) -> Result<bool, CallError> {
        let mut compares = Vec::new();
        for (key, version) in &change.relies_on {
            // Versions in etcd have 63 bits, so no document has this one.
            let Ok(version) = i64::try_from(*version) else { return Ok(false) };
            compares.push(Compare::mod_revision(document(key), CompareOp::Equal, version));
        }
        // The last put of a key replaces the others.
        let puts: BTreeMap<String, &Put> =
            change.puts.iter().map(|put| (document(&put.key), put)).collect();
        let mut operations: Vec<TxnOp> = removes(change, &puts)
            .into_iter()
            .map(|(begin, end)| {
                let range = end.map(|end| DeleteOptions::new().with_range(end));
                TxnOp::delete(begin, range)
            })
            .collect();
        let mut leases = HashMap::new();
        for (key, Put { value, seconds, .. }) in puts {
            let mut options = PutOptions::new();
            if let Some(seconds) = *seconds {
                // Documents of one change with the same time to live share a lease.
                let lease = match leases.get(&seconds) {
                    Some(lease) => *lease,
                    None => self.grant(seconds.max(1).into()).await?,
                };
                leases.insert(seconds, lease);
                options = options.with_lease(lease);
            }
            operations.push(TxnOp::put(key, value.clone(), Some(options)));
        }
        let mut otherwise = Vec::new();
        if let Some(token) = token {
            let lease = self.token_lease().await?;
            compares.push(Compare::mod_revision(token, CompareOp::Equal, 0));
            operations.push(TxnOp::put(token, "", Some(PutOptions::new().with_lease(lease))));
            otherwise.push(TxnOp::get(token, None));
        }
        let txn = Txn::new().when(compares).and_then(operations).or_else(otherwise);
        let answer = match self.kv.clone().txn(txn).await {
            Ok(answer) => answer,
            Err(error) => {
                if is_lease_expired(&error) {
                    self.token_lease.lock().await.take();
                }
                return Err(error.into());
            }
        };
        // If the token exists, an earlier attempt carried the change out.
        let is_there = |response: &TxnOpResponse| matches!(response, TxnOpResponse::Get(found) if found.count() > 0);
        Ok(answer.succeeded() || answer.op_responses().iter().any(is_there))
    }

    async fn grant(&self, seconds: i64) -> Result<i64, CallError> {
        Ok(self.leases.clone().grant(seconds, None).await?.id())
    }

    /// A lease that expires when no client retries the change of its tokens any more.
    async fn token_lease(&self) -> Result<i64, CallError> {
        let mut current = self.token_lease.lock().await;
        match *current {
            Some((lease, since)) if since.elapsed() < TOKEN_LEASE_USE => Ok(lease),
            _ => {
                let since = Instant::now();
                let lease = self.grant(TOKEN_LEASE_TTL.as_secs() as i64).await?;
                *current = Some((lease, since));
                Ok(lease)
            }
        }
    }

    async fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<bool, CallError> {
        // '0' follows '/'. The range contains the folder and some other keys, which only cause an
        // early return.
        let (begin, end) = (document(folder), document(&format!("{folder}0")));
        let from = i64::try_from(revision).unwrap_or(i64::MAX).saturating_add(1);
        let options = WatchOptions::new().with_range(end).with_start_revision(from);
        let mut watches = self.watches.clone();
        let watch = async { Ok(watches.watch(begin, Some(options)).await?) };
        let mut watch = self.in_time(watch).await?;
        let changed = async {
            while let Some(message) = watch.message().await? {
                // etcd cancels a watch whose start revision is compacted: there were changes since.
                if message.canceled() || !message.events().is_empty() {
                    return Ok(true);
                }
            }
            Err(CallError::Transient("it ended a watch".into()))
        };
        timeout(limit, changed).await.unwrap_or(Ok(false))
    }
}

/// The key of a document in etcd.
fn document(key: &str) -> String {
    format!("{BASE}documents/{key}")
}

/// A document and its key, as etcd returns them.
fn read_document(found: KeyValue) -> (String, Document) {
    let version = found.mod_revision() as u64;
    let (key, value) = found.into_key_value();
    let key = String::from_utf8_lossy(&key[document("").len()..]).into_owned();
    (key, Document { value, version })
}

/// The end of the range of keys that begin with `prefix`, which is not empty.
fn prefix_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    // No byte of UTF-8 text is 255.
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

/// What a change deletes: each entry is one key, or a range from one key to another. The ranges
/// leave out the keys that the change puts, because an etcd transaction may not touch a key twice.
fn removes(change: &Change, puts: &BTreeMap<String, &Put>) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
    let mut all = Vec::new();
    for query in &change.removes {
        match query {
            Query::Key(key) if puts.contains_key(&document(key)) => {}
            Query::Key(key) => all.push((document(key).into_bytes(), None)),
            Query::Prefix(prefix) => {
                let prefix = document(prefix);
                let inside = puts.range(prefix.clone()..).map(|(key, _)| key);
                let mut begin = prefix.clone().into_bytes();
                for kept in inside.take_while(|key| key.starts_with(&prefix)) {
                    let kept = kept.as_bytes();
                    if *begin < *kept {
                        all.push((begin, Some(kept.to_vec())));
                    }
                    // The key that follows `kept` directly.
                    begin = [kept, &[0]].concat();
                }
                all.push((begin, Some(prefix_end(&prefix))));
            }
        }
    }
    all
}

/// Whether a lease expired before the transaction used it.
fn is_lease_expired(error: &EtcdError) -> bool {
    matches!(error, EtcdError::GRpcStatus(status) if status.code() as i32 == NOT_FOUND)
}

/// Whether an answer is longer than [`MAX_ANSWER`].
fn is_too_large(error: &EtcdError) -> bool {
    matches!(error, EtcdError::GRpcStatus(status)
        if status.code() as i32 == OUT_OF_RANGE && !is_compacted(status.message()))
}

/// Whether etcd no longer has the documents as of the revision that was asked for. Its status code
/// is that of an answer that is too long.
fn is_compacted(message: &str) -> bool {
    message.contains("compacted")
}

// Status codes of gRPC.
const INVALID_ARGUMENT: i32 = 3;
const NOT_FOUND: i32 = 5;
const PERMISSION_DENIED: i32 = 7;
const RESOURCE_EXHAUSTED: i32 = 8;
const OUT_OF_RANGE: i32 = 11;
const UNAUTHENTICATED: i32 = 16;

impl From<EtcdError> for CallError {
    fn from(error: EtcdError) -> CallError {
        let EtcdError::GRpcStatus(status) = &error else {
            return CallError::Transient(error.to_string());
        };
        let reason = status.message().to_owned();
        match status.code() as i32 {
            INVALID_ARGUMENT | PERMISSION_DENIED | UNAUTHENTICATED => {
                CallError::Permanent(ErrorKind::Invalid, reason)
            }
            OUT_OF_RANGE if is_compacted(&reason) => {
                let reason = format!("{reason}; try again");
                CallError::Permanent(ErrorKind::Unavailable, reason)
            }
            RESOURCE_EXHAUSTED => CallError::Permanent(ErrorKind::Unavailable, reason),
            _ => CallError::Transient(reason),
        }
    }
}
