//! Documents in an etcd, which is there even if machines are lost.
//!
//! ```text
//! /cairn/documents/KEY   a document; its version is the key's mod_revision
//! /cairn/tokens/TOKEN    the change with this token was carried out
//! ```
//!
//! A change is one transaction. A document with a time to live hangs on a lease, which is granted anew with each
//! write; a lease whose documents were all written again ends by itself.

#[cfg(test)]
pub(super) mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, DeleteOptions, Error as EtcdError,
    GetOptions, Identity, KvClient, LeaseClient, PutOptions, TlsOptions, Txn, TxnOp, TxnOpResponse,
    WatchClient, WatchOptions,
};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::background::{Background, CallError, retry, unavailable};
use super::{
    Change, Document, Documents, ETCD, LONGEST_WAIT, Put, Query, RETRY_TIMEOUT, View, new_token,
};
use crate::error::{ErrorKind, Result};
use crate::net::identity::Security;

/// Where everything is.
const BASE: &str = "/cairn/";

/// The most questions in one transaction, of which etcd takes 128 if it is not told otherwise.
const MAX_OPERATIONS: usize = 100;

/// The longest answer.
const MAX_ANSWER: usize = 64 << 20;

/// How long it is remembered that a change was carried out, and how long one lease is used for that. It lives
/// for longer than anybody asks again.
const REMEMBERED: (Duration, Duration) = (Duration::from_secs(900), Duration::from_secs(300));

/// Documents in an etcd.
pub struct EtcdDocuments {
    background: Background,
    inner: Arc<Inner>,
}

struct Inner {
    address: String,
    retry_timeout: Duration,
    kv: KvClient,
    leases: LeaseClient,
    watches: WatchClient,
    /// The lease of tokens, and when it was granted.
    tokens: Mutex<Option<(i64, Instant)>>,
}

impl EtcdDocuments {
    /// The etcd at `etcd://host:port`, where more members may follow behind commas. Nobody is asked yet.
    pub fn new(address: &str, security: &Security) -> Result<EtcdDocuments> {
        EtcdDocuments::with_retry_timeout(address, security, RETRY_TIMEOUT)
    }

    /// As [`EtcdDocuments::new`], for a caller who wants to hear of an etcd that is away after another time than ten
    /// seconds.
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
        let inner = Inner {
            address: address.into(),
            retry_timeout,
            kv: client.kv_client().max_decoding_message_size(MAX_ANSWER),
            leases: client.lease_client(),
            watches: client.watch_client(),
            tokens: Mutex::default(),
        };
        Ok(EtcdDocuments { background, inner: Arc::new(inner) })
    }
}

impl Documents for EtcdDocuments {
    fn read(&self, wanted: &[Query]) -> Result<View> {
        let (inner, wanted) = (self.inner.clone(), wanted.to_vec());
        self.background.run(async move {
            let read = || inner.in_time(inner.read(&wanted));
            retry(&inner.address, inner.retry_timeout, false, read).await
        })
    }

    fn commit(&self, change: &Change) -> Result<bool> {
        let token = new_token(change)
            .map_err(|error| unavailable(&self.inner.address, &format!("no random: {error}")))?;
        let token = token.map(|token| format!("{BASE}tokens/{:032x}", u128::from_be_bytes(token)));
        let (inner, change) = (self.inner.clone(), change.clone());
        self.background.run(async move {
            let commit = || inner.in_time(inner.commit(token.as_deref(), &change));
            retry(&inner.address, inner.retry_timeout, false, commit).await
        })
    }

    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<()> {
        let (inner, folder) = (self.inner.clone(), folder.to_owned());
        self.background.run(async move {
            let wait = || inner.wait(&folder, revision, limit.min(LONGEST_WAIT));
            retry(&inner.address, inner.retry_timeout, true, wait).await
        })
    }
}

impl Inner {
    /// Does something within the time of one try.
    async fn in_time<T>(
        &self,
        doing: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, CallError> {
        timeout(self.retry_timeout / 3, doing).await.unwrap_or_else(|_| Err(CallError::late()))
    }

    async fn read(&self, wanted: &[Query]) -> Result<View, CallError> {
        let mut view = View::default();
        // Who asks for nothing wants to know the revision.
        let nothing = [Query::key("")];
        let asked = if wanted.is_empty() { &nothing[..] } else { wanted };
        for some in asked.chunks(MAX_OPERATIONS) {
            let get = |wanted: &Query| {
                // What comes later is read as of the same moment.
                let options = GetOptions::new().with_revision(view.revision as i64);
                match wanted {
                    Query::Key(key) => TxnOp::get(document(key), Some(options)),
                    Query::Prefix(prefix) => {
                        let begin = document(prefix);
                        let options = options.with_range(behind(&begin));
                        TxnOp::get(begin, Some(options))
                    }
                }
            };
            let gets: Vec<TxnOp> = some.iter().map(get).collect();
            let answer = self.kv.clone().txn(Txn::new().and_then(gets)).await?;
            if view.revision == 0 {
                view.revision = answer.header().map_or(0, |header| header.revision()) as u64;
            }
            for response in answer.op_responses() {
                let TxnOpResponse::Get(mut found) = response else { continue };
                for found in found.take_kvs() {
                    let version = found.mod_revision() as u64;
                    let (key, value) = found.into_key_value();
                    let key = String::from_utf8_lossy(&key[document("").len()..]).into_owned();
                    view.documents.insert(key, Document { value, version });
                }
            }
        }
        if wanted.is_empty() {
            view.documents.clear();
        }
        Ok(view)
    }

    async fn commit(&self, token: Option<&str>, change: &Change) -> Result<bool, CallError> {
        let mut compares = Vec::new();
        for (key, version) in &change.relies_on {
            // No document has a higher one.
            let Ok(version) = i64::try_from(*version) else { return Ok(false) };
            compares.push(Compare::mod_revision(document(key), CompareOp::Equal, version));
        }
        // Of several for one key the last one counts.
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
                // Those of one change end at the same time.
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
                if is_without_lease(&error) {
                    self.tokens.lock().await.take();
                }
                return Err(error.into());
            }
        };
        // If its token is there, an earlier try has carried it out.
        let is_there = |response: &TxnOpResponse| matches!(response, TxnOpResponse::Get(found) if found.count() > 0);
        Ok(answer.succeeded() || answer.op_responses().iter().any(is_there))
    }

    async fn grant(&self, seconds: i64) -> Result<i64, CallError> {
        Ok(self.leases.clone().grant(seconds, None).await?.id())
    }

    /// A lease that ends when nobody asks for a token any more.
    async fn token_lease(&self) -> Result<i64, CallError> {
        let mut tokens = self.tokens.lock().await;
        match *tokens {
            Some((lease, since)) if since.elapsed() < REMEMBERED.1 => Ok(lease),
            _ => {
                let since = Instant::now();
                let lease = self.grant(REMEMBERED.0.as_secs() as i64).await?;
                *tokens = Some((lease, since));
                Ok(lease)
            }
        }
    }

    async fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<(), CallError> {
        // The folder, and all behind its slash, and a few others, which do no harm.
        let (begin, end) = (document(folder), document(&format!("{folder}0")));
        let from = i64::try_from(revision).unwrap_or(i64::MAX).saturating_add(1);
        let options = WatchOptions::new().with_range(end).with_start_revision(from);
        let mut watches = self.watches.clone();
        let watch = async { Ok(watches.watch(begin, Some(options)).await?) };
        let mut watch = self.in_time(watch).await?;
        let changed = async {
            while let Some(message) = watch.message().await? {
                // One that is cancelled begins in a past that is forgotten: much has changed since.
                if message.canceled() || !message.events().is_empty() {
                    return Ok(());
                }
            }
            Err(CallError::Transient("it has ended a watch".into()))
        };
        timeout(limit, changed).await.unwrap_or(Ok(()))
    }
}

/// The key of a document.
fn document(key: &str) -> String {
    format!("{BASE}documents/{key}")
}

/// The first key that is behind all that begin with this one, which is not empty.
fn behind(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    // No byte of a text is 255.
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

/// What is deleted: a key, or all from one key to another. What is put is left out, since a transaction may not
/// touch a key twice.
fn removes(change: &Change, puts: &BTreeMap<String, &Put>) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
    let mut all = Vec::new();
    for wanted in &change.removes {
        match wanted {
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
                    // The next key there is.
                    begin = [kept, &[0]].concat();
                }
                all.push((begin, Some(behind(&prefix))));
            }
        }
    }
    all
}

/// Whether a lease has ended before it was used.
fn is_without_lease(error: &EtcdError) -> bool {
    matches!(error, EtcdError::GRpcStatus(status) if status.code() as i32 == NOT_FOUND)
}

// Codes of gRPC.
const INVALID_ARGUMENT: i32 = 3;
const NOT_FOUND: i32 = 5;
const PERMISSION_DENIED: i32 = 7;
const RESOURCE_EXHAUSTED: i32 = 8;
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
            RESOURCE_EXHAUSTED => CallError::Permanent(ErrorKind::Unavailable, reason),
            _ => CallError::Transient(reason),
        }
    }
}
