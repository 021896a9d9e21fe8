//! The server of a catalog's documents.
//!
//! ```text
//! connection ──► read, commit ──► a few threads ──► answers, in any order
//!            └─► wait ──► one task polls the database for all waiting requests
//! ```
//!
//! The memory of all connections together is bounded. `net::admission` bounds the connections.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::store::CatalogStore;
use super::wire::{Answer, MAX_ANSWER, MAX_REQUEST, Request, Token};
use crate::documents::{Change, Documents, Query, folder};
use crate::error::{Error, ErrorKind, Result};
use crate::net::admission::{Admission, Unauthenticated};
use crate::net::frame::{OutgoingFrames, read_body, read_header};
use crate::net::handshake::{CATALOG_PROTOCOL, greet};
use crate::net::identity::{Role, Security};

/// Memory for requests and answers, in KiB.
const MEMORY_KIB: usize = 256 << 10;

/// The most authenticated connections at a time.
const MAX_CONNECTIONS: usize = 4096;

/// Requests of one connection at a time.
const MAX_REQUESTS: usize = 256;

/// Requests that are carried out at a time. An answer that waits for memory counts as one of them.
const WORKERS: usize = 4;

/// How long a connection may be silent.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// The longest wait. A client that wants to wait longer sends another request.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// How often the server looks for changes by other processes.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The folders that a peer may change: membership, and what peers observe. Images, snapshots and
/// mirrors are not in them.
const PEER_FOLDERS: [&str; 5] = ["members", "alive", "suspects", "leader", "health"];

struct Server {
    store: Arc<CatalogStore>,
    security: Security,
    /// Free memory, in KiB.
    memory: Arc<Semaphore>,
    workers: Semaphore,
    /// The revision of the last change in each folder.
    folders: watch::Sender<HashMap<String, u64>>,
    /// Makes the polling task look for changes at once.
    poll_now: Notify,
}

/// An answer, and the permits that are released when it is sent.
struct Outgoing {
    number: u64,
    body: (u16, Vec<u8>),
    _memory: Option<OwnedSemaphorePermit>,
    _slot: OwnedSemaphorePermit,
}

/// Serves connections until `stop` ends.
pub async fn serve(
    listener: TcpListener,
    store: Arc<CatalogStore>,
    security: Security,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    serve_admitted(listener, store, security, Admission::new(MAX_CONNECTIONS), stop).await
}

/// Serves connections until `stop` ends, as many as `admission` admits.
pub(super) async fn serve_admitted(
    listener: TcpListener,
    store: Arc<CatalogStore>,
    security: Security,
    admission: Arc<Admission>,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let server = Arc::new(Server {
        store,
        security,
        memory: Arc::new(Semaphore::new(MEMORY_KIB)),
        workers: Semaphore::new(WORKERS),
        folders: watch::Sender::new(HashMap::new()),
        poll_now: Notify::new(),
    });
    let mut connections = JoinSet::new();
    let own = server.clone();
    connections.spawn(async move { own.poll_for_changes().await });
    tokio::pin!(stop);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            () = &mut stop => break,
        };
        match accepted {
            Ok((stream, address)) => {
                let (server, unauthenticated) = (server.clone(), admission.admit(address.ip()));
                connections.spawn(async move {
                    if let Err(error) = server.client(stream, unauthenticated).await {
                        tracing::debug!(%address, %error, "connection closed");
                    }
                });
            }
            Err(error) => {
                // Most likely there are no free file descriptors, which may be temporary.
                tracing::warn!(%error, "cannot accept a connection");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
    connections.shutdown().await;
    Ok(())
}

impl Server {
    /// Polls the database and notifies the requests that wait for a change.
    async fn poll_for_changes(self: &Arc<Server>) {
        loop {
            if self.folders.receiver_count() == 0 {
                self.poll_now.notified().await;
            }
            let store = self.store.clone();
            match tokio::task::spawn_blocking(move || store.documents().folders()).await {
                Ok(Ok(found)) => {
                    self.folders.send_if_modified(|folders| {
                        let changed = *folders != found;
                        *folders = found;
                        changed
                    });
                }
                Ok(Err(error)) => tracing::warn!(%error, "cannot look for changes"),
                Err(error) => tracing::warn!(%error, "cannot look for changes"),
            }
            // A change by a client of this server is found at once.
            let _ = timeout(POLL_INTERVAL, self.poll_now.notified()).await;
        }
    }

    /// Serves one client while there is room for it.
    async fn client(
        self: &Arc<Server>,
        stream: TcpStream,
        unauthenticated: Unauthenticated,
    ) -> io::Result<()> {
        let _ = stream.set_nodelay(true);
        let greeted = async {
            let (mut reader, mut writer, role) = self.security.accept(stream, &Role::ALL).await?;
            let id = self.store.id();
            let is_welcome =
                greet(&mut reader, &mut writer, &CATALOG_PROTOCOL, id.as_bytes()).await?;
            io::Result::Ok(is_welcome.then_some((reader, writer, role)))
        };
        match unauthenticated.complete(greeted).await? {
            Some(((reader, writer, role), admitted)) => {
                admitted.serve(self.connection(reader, writer, role)).await
            }
            None => Ok(()),
        }
    }

    /// Reads the requests of one client, and sends the answers.
    async fn connection(
        self: &Arc<Server>,
        reader: impl AsyncRead + Unpin,
        writer: impl AsyncWrite + Unpin + Send + 'static,
        role: Option<Role>,
    ) -> io::Result<()> {
        let mut reader = BufReader::new(reader);
        let slots = Arc::new(Semaphore::new(MAX_REQUESTS));
        let (answers, outgoing) = mpsc::unbounded_channel();
        let mut sending = JoinSet::new();
        sending.spawn(send(writer, outgoing));
        // The tasks in this set end with the connection.
        let mut answering = JoinSet::new();
        loop {
            let header = tokio::select! {
                header = read_header(&mut reader, IDLE_TIMEOUT, MAX_REQUEST) => header?,
                // Sending has failed: the client does not take answers any more.
                _ = sending.join_next() => return Ok(()),
            };
            let Some(header) = header else { break };
            let header = header.map_err(io::Error::other)?;
            let slot = slots.clone().acquire_owned().await.map_err(io::Error::other)?;
            let memory = self.reserve_memory(header.len).await?;
            let body = read_body(&mut reader, &header).await?;
            let number = header.number;
            match Request::from_body(header.kind, &body) {
                Ok(request) => {
                    let (server, answers) = (self.clone(), answers.clone());
                    answering.spawn(async move {
                        let (body, _memory) = server.answer(request, role, memory).await;
                        // This fails if the client has disconnected.
                        let _ = answers.send(Outgoing { number, body, _memory, _slot: slot });
                    });
                }
                // The next frame could be found, but this client does not speak the protocol.
                Err(error) => {
                    let body = Answer::failed(&error).to_body();
                    let _memory = Some(memory);
                    let _ = answers.send(Outgoing { number, body, _memory, _slot: slot });
                    break;
                }
            }
            while answering.try_join_next().is_some() {}
        }
        drop(answers);
        // Earlier requests are answered while the client reads.
        while answering.join_next().await.is_some() {}
        while sending.join_next().await.is_some() {}
        Ok(())
    }

    /// Reserves memory for a message of this many bytes.
    async fn reserve_memory(&self, bytes: usize) -> io::Result<OwnedSemaphorePermit> {
        let units = (bytes.div_ceil(1024) + 1) as u32;
        self.memory.clone().acquire_many_owned(units).await.map_err(io::Error::other)
    }

    /// The answer to a request, and the memory reserved for it. `memory` is that of the request.
    async fn answer(
        self: &Arc<Server>,
        request: Request,
        role: Option<Role>,
        memory: OwnedSemaphorePermit,
    ) -> ((u16, Vec<u8>), Option<OwnedSemaphorePermit>) {
        if let Request::Wait(folder, revision, milliseconds) = &request {
            let limit = Duration::from_millis((*milliseconds).into());
            self.wait(folder, *revision, limit).await;
            return (Answer::Waited.to_body(), Some(memory));
        }
        let _worker = self.workers.acquire().await;
        let server = self.clone();
        let work = move || server.work(request, role);
        let worked = tokio::task::spawn_blocking(work).await;
        let body = worked.unwrap_or_else(|_| {
            Answer::Failed(ErrorKind::Unavailable, "the request panicked".into()).to_body()
        });
        // The request's memory is released first: a task that holds memory must not wait for more.
        drop(memory);
        let memory = self.reserve_memory(body.1.len()).await.ok();
        (body, memory)
    }

    /// Returns when a document in `folder` has changed after `revision`, or after `limit`.
    async fn wait(&self, folder: &str, revision: u64, limit: Duration) {
        let mut folders = self.folders.subscribe();
        self.poll_now.notify_one();
        let changed = folders.wait_for(|all| all.get(folder).is_some_and(|last| *last > revision));
        let _ = timeout(limit.min(MAX_WAIT), changed).await;
    }

    /// Carries out a request.
    fn work(&self, request: Request, role: Option<Role>) -> (u16, Vec<u8>) {
        let answer = match request {
            Request::Read(queries) => self.store.documents().read(&queries).map(Answer::View),
            Request::Commit(token, change) => {
                self.commit(token.as_ref(), &change, role).map(Answer::Committed)
            }
            Request::Wait(..) => unreachable!("waits are answered without a worker"),
        };
        let body = answer.unwrap_or_else(|error| Answer::failed(&error)).to_body();
        match body.1.len() {
            len if len > MAX_ANSWER => {
                let reason = format!(
                    "the answer has {len} bytes, and may have {MAX_ANSWER}; read fewer documents"
                );
                Answer::Failed(ErrorKind::Invalid, reason).to_body()
            }
            _ => body,
        }
    }

    fn commit(&self, token: Option<&Token>, change: &Change, role: Option<Role>) -> Result<bool> {
        if role == Some(Role::Peer) {
            check_peer(change)?;
        }
        let documents = self.store.documents();
        let carried_out = match token {
            Some(token) => documents.commit_once(token, change),
            None => documents.commit(change),
        }?;
        if carried_out {
            self.poll_now.notify_one();
        }
        Ok(carried_out)
    }
}

/// Fails if a peer may not make this change.
fn check_peer(change: &Change) -> Result<()> {
    let own = |key: &str| PEER_FOLDERS.contains(&folder(key));
    let removed = change.removes.iter().find(|query| match query {
        Query::Key(key) => !own(key),
        // A prefix without a slash can match keys in other folders.
        Query::Prefix(prefix) => !own(prefix) || !prefix.contains('/'),
    });
    let removed = removed.map(|(Query::Key(key) | Query::Prefix(key))| key);
    let put = change.puts.iter().map(|put| &put.key).find(|key| !own(key));
    match removed.or(put) {
        None => Ok(()),
        Some(key) => {
            let folders = PEER_FOLDERS.join(", ");
            let what = format!("a peer may not change '{key}', only the folders {folders}");
            Err(Error::NotPermitted { what })
        }
    }
}

/// Sends answers, many with one system call.
async fn send(
    mut writer: impl AsyncWrite + Unpin,
    mut outgoing: mpsc::UnboundedReceiver<Outgoing>,
) -> io::Result<()> {
    let mut frames = OutgoingFrames::default();
    let mut held = Vec::new();
    while let Some(first) = outgoing.recv().await {
        let mut next = Some(first);
        while let Some(Outgoing { number, body: (kind, body), _memory, _slot }) = next.take() {
            frames.push(number, (kind, vec![body.into()]));
            held.push((_memory, _slot));
            if !frames.is_full() {
                next = outgoing.try_recv().ok();
            }
        }
        frames.send(&mut writer).await?;
        held.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Change, Query, check_peer};

    #[test]
    fn a_peer_may_change_only_the_folders_of_peers() {
        let change = Change::default;
        for good in [
            change(),
            change().put("alive/x", &1).put("leader", &1).put("members/a/b", &1),
            change().remove(Query::prefix("suspects/")).remove(Query::key("health/x")),
        ] {
            check_peer(&good).unwrap();
        }
        for bad in [
            change().put("images/vm1", &1),
            change().put("alive/x", &1).put("aliveness/x", &1),
            change().remove(Query::key("images/vm1")),
            change().remove(Query::prefix("images/")),
            change().remove(Query::prefix("alive")),
            change().remove(Query::prefix("")),
            change().put("", &1),
        ] {
            assert!(check_peer(&bad).is_err(), "{bad:?}");
        }
    }
}
