//! Serving a catalog's documents.
//!
//! ```text
//! connection ──► read, commit ──► a few threads ──► answers, in any order
//!            └─► wait ──► told by one task, which looks what has changed for all who wait
//! ```
//!
//! What is held in memory is bounded for all connections together, and how many of them there are, above all of
//! those who have not made themselves known.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWrite, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::store::CatalogStore;
use super::wire::{Answer, MAX_ANSWER, MAX_REQUEST, Request, Token};
use crate::documents::{Change, Documents, Query, folder};
use crate::error::{Error, ErrorKind, Result};
use crate::net::frame::{OutgoingFrames, read_body, read_header};
use crate::net::handshake::{CATALOG_PROTOCOL, greet};
use crate::net::identity::{Role, Security};

/// Memory for requests and answers, in units of a KiB.
const MEMORY: usize = 256 << 10;

/// Connections at a time.
const MAX_CONNECTIONS: usize = 4096;

/// Connections at a time whose clients have not made themselves known.
const MAX_NEWCOMERS: usize = 64;

/// Requests of one connection at a time.
const MAX_REQUESTS: usize = 256;

/// Requests that are carried out at a time. An answer that finds no room waits as one of them.
const WORKERS: usize = 4;

/// How long a connection may be silent.
const IDLE: Duration = Duration::from_secs(600);

/// The longest wait. A client that wants to wait longer asks again.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// How often is looked for changes by other processes.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What a peer may change: what it is, and what it has found out. The names are not its own.
const FOLDERS_OF_PEERS: [&str; 5] = ["members", "alive", "suspects", "leader", "health"];

struct Server {
    store: Arc<CatalogStore>,
    security: Security,
    memory: Arc<Semaphore>,
    working: Semaphore,
    newcomers: Arc<Semaphore>,
    folders: watch::Sender<HashMap<String, u64>>,
    look: Notify,
}

/// An answer, and what is free again when it is sent.
struct Outgoing {
    number: u64,
    body: (u16, Vec<u8>),
    _room: Option<OwnedSemaphorePermit>,
    _slot: OwnedSemaphorePermit,
}

/// Serves connections until `stop` ends.
pub async fn serve(
    listener: TcpListener,
    store: Arc<CatalogStore>,
    security: Security,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let server = Arc::new(Server {
        store,
        security,
        memory: Arc::new(Semaphore::new(MEMORY)),
        working: Semaphore::new(WORKERS),
        newcomers: Arc::new(Semaphore::new(MAX_NEWCOMERS)),
        folders: watch::Sender::new(HashMap::new()),
        look: Notify::new(),
    });
    let mut connections = JoinSet::new();
    let own = server.clone();
    connections.spawn(async move { own.look_for_changes().await });
    tokio::pin!(stop);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            () = &mut stop => break,
        };
        match accepted {
            Ok((stream, address)) => {
                let newcomer = server.newcomers.clone().try_acquire_owned();
                // Beyond the limits it is closed at once.
                let Some(newcomer) = newcomer.ok().filter(|_| connections.len() <= MAX_CONNECTIONS)
                else {
                    continue;
                };
                let server = server.clone();
                connections.spawn(async move {
                    if let Err(error) = server.connection(stream, newcomer).await {
                        tracing::debug!(%address, %error, "a connection ends");
                    }
                });
            }
            Err(error) => {
                // Out of descriptors, most likely: that may pass.
                tracing::warn!(%error, "a connection could not be accepted");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
    connections.shutdown().await;
    Ok(())
}

impl Server {
    /// Tells those who wait what has changed.
    async fn look_for_changes(self: &Arc<Server>) {
        loop {
            if self.folders.receiver_count() == 0 {
                self.look.notified().await;
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
                Ok(Err(error)) => tracing::warn!(%error, "changes cannot be looked for"),
                Err(error) => tracing::warn!(%error, "changes cannot be looked for"),
            }
            // A change that was made here is told at once.
            let _ = timeout(POLL_INTERVAL, self.look.notified()).await;
        }
    }

    /// Serves one client.
    async fn connection(
        self: &Arc<Server>,
        stream: TcpStream,
        newcomer: OwnedSemaphorePermit,
    ) -> io::Result<()> {
        let _ = stream.set_nodelay(true);
        let (reader, writer, role) = self.security.accept(stream, &Role::ALL).await?;
        let (mut reader, mut writer) = (BufReader::new(reader), writer);
        let id = self.store.id();
        if !greet(&mut reader, &mut writer, &CATALOG_PROTOCOL, id.as_bytes()).await? {
            return Ok(());
        }
        drop(newcomer);
        let slots = Arc::new(Semaphore::new(MAX_REQUESTS));
        let (answers, outgoing) = mpsc::unbounded_channel();
        let mut sending = JoinSet::new();
        sending.spawn(send(writer, outgoing));
        // They end with the connection.
        let mut answering = JoinSet::new();
        loop {
            let header = tokio::select! {
                header = read_header(&mut reader, IDLE, MAX_REQUEST) => header?,
                // The client takes no answers any more.
                _ = sending.join_next() => return Ok(()),
            };
            let Some(header) = header else { break };
            let header = header.map_err(io::Error::other)?;
            let slot = slots.clone().acquire_owned().await.map_err(io::Error::other)?;
            let room = self.room(header.len).await?;
            let body = read_body(&mut reader, &header).await?;
            let number = header.number;
            match Request::from_body(header.kind, &body) {
                Ok(request) => {
                    let (server, answers) = (self.clone(), answers.clone());
                    answering.spawn(async move {
                        let (body, _room) = server.answer(request, role, room).await;
                        // The client may have gone.
                        let _ = answers.send(Outgoing { number, body, _room, _slot: slot });
                    });
                }
                // Where the next frame starts is clear, but not what this client means by it.
                Err(error) => {
                    let body = Answer::failed(&error).to_body();
                    let _ = answers.send(Outgoing { number, body, _room: Some(room), _slot: slot });
                    break;
                }
            }
            while answering.try_join_next().is_some() {}
        }
        drop(answers);
        // What was asked before is answered, as long as the client listens.
        while answering.join_next().await.is_some() {}
        while sending.join_next().await.is_some() {}
        Ok(())
    }

    /// Room in memory for so many bytes.
    async fn room(&self, bytes: usize) -> io::Result<OwnedSemaphorePermit> {
        let units = (bytes.div_ceil(1024) + 1) as u32;
        self.memory.clone().acquire_many_owned(units).await.map_err(io::Error::other)
    }

    /// The answer to a request, and its room in memory. `room` is the request's.
    async fn answer(
        self: &Arc<Server>,
        request: Request,
        role: Option<Role>,
        room: OwnedSemaphorePermit,
    ) -> ((u16, Vec<u8>), Option<OwnedSemaphorePermit>) {
        if let Request::Wait(folder, revision, milliseconds) = &request {
            let limit = Duration::from_millis((*milliseconds).into());
            self.wait(folder, *revision, limit).await;
            return (Answer::Waited.to_body(), Some(room));
        }
        let _worker = self.working.acquire().await;
        let server = self.clone();
        let work = move || server.work(request, role);
        let worked = tokio::task::spawn_blocking(work).await;
        let body = worked.unwrap_or_else(|_| {
            Answer::Failed(ErrorKind::Unavailable, "it has panicked".into()).to_body()
        });
        // First the one, then the other: who holds room must not wait for more.
        drop(room);
        let room = self.room(body.1.len()).await.ok();
        (body, room)
    }

    /// Returns when something in this folder has changed after this revision, or after a time.
    async fn wait(&self, folder: &str, revision: u64, limit: Duration) {
        let mut folders = self.folders.subscribe();
        self.look.notify_one();
        let changed = folders.wait_for(|all| all.get(folder).is_some_and(|last| *last > revision));
        let _ = timeout(limit.min(MAX_WAIT), changed).await;
    }

    /// Carries out a request.
    fn work(&self, request: Request, role: Option<Role>) -> (u16, Vec<u8>) {
        let answer = match request {
            Request::Read(wanted) => self.store.documents().read(&wanted).map(Answer::View),
            Request::Commit(token, change) => {
                self.commit(token.as_ref(), &change, role).map(Answer::Committed)
            }
            Request::Wait(..) => unreachable!("waits are answered without a worker"),
        };
        let body = answer.unwrap_or_else(|error| Answer::failed(&error)).to_body();
        match body.1.len() {
            len if len > MAX_ANSWER => {
                let reason = format!("the answer has {len} bytes, which is too much; ask for less");
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
            self.look.notify_one();
        }
        Ok(carried_out)
    }
}

/// Fails if a change is not a peer's to make.
fn check_peer(change: &Change) -> Result<()> {
    let own = |key: &str| FOLDERS_OF_PEERS.contains(&folder(key));
    let removed = change.removes.iter().find(|wanted| match wanted {
        Query::Key(key) => !own(key),
        // Without a slash it would be of other folders, too.
        Query::Prefix(prefix) => !own(prefix) || !prefix.contains('/'),
    });
    let removed = removed.map(|(Query::Key(key) | Query::Prefix(key))| key);
    let put = change.puts.iter().map(|put| &put.key).find(|key| !own(key));
    match removed.or(put) {
        None => Ok(()),
        Some(key) => {
            let folders = FOLDERS_OF_PEERS.join(", ");
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
        while let Some(Outgoing { number, body: (kind, body), _room, _slot }) = next.take() {
            frames.push(number, (kind, vec![body.into()]));
            held.push((_room, _slot));
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
    fn a_peer_changes_what_is_its_own_and_no_names() {
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
