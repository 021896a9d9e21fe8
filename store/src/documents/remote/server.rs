//! The server of a catalog's documents.
//!
//! ```text
//! connection ──► read, commit ──► a few threads ──► answers, in any order
//!            ├─► scan ──► a thread of its own ──► many answers
//!            └─► wait ──► one task polls the database for all waiting requests
//! ```
//!
//! The memory of all connections together is bounded. `net::admission` bounds the connections.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::permissions;
use super::serve_scan::{ScanLimits, ScanStep, Scans};
use super::store::CatalogStore;
use super::waits::Waits;
use super::wire::{Answer, MAX_ANSWER, MAX_REQUEST, Request, Token};
use crate::documents::{Change, Documents, Query};
use crate::error::{ErrorKind, Result};
use crate::net::admission::{Admission, MAX_CONNECTIONS, Unauthenticated};
use crate::net::frame::{OutgoingFrames, read_body, read_header};
use crate::net::handshake::{CATALOG_PROTOCOL, greet};
use crate::net::identity::{Identity, Secured, Security};

/// Memory for requests and answers, in KiB.
const MEMORY_KIB: usize = 256 << 10;

/// Requests of one connection at a time.
const MAX_REQUESTS: usize = 256;

/// Requests that are carried out at a time. An answer that waits for memory counts as one of them.
const WORKERS: usize = 4;

/// How long a connection may be silent.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// The longest wait. A client that wants to wait longer sends another request.
const MAX_WAIT: Duration = Duration::from_secs(30);

struct Server {
    store: Arc<CatalogStore>,
    security: Security,
    /// Free memory, in KiB.
    memory: Arc<Semaphore>,
    workers: Semaphore,
    scans: Scans,
    waits: Waits,
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
    let limits = (Admission::new(MAX_CONNECTIONS), ScanLimits::default());
    serve_within(listener, store, security, limits, stop).await
}

/// Serves connections until `stop` ends, within these limits.
pub(super) async fn serve_within(
    listener: TcpListener,
    store: Arc<CatalogStore>,
    security: Security,
    (admission, scan_limits): (Arc<Admission>, ScanLimits),
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let server = Arc::new(Server {
        store,
        security,
        memory: Arc::new(Semaphore::new(MEMORY_KIB)),
        workers: Semaphore::new(WORKERS),
        scans: Scans::new(scan_limits),
        waits: Waits::default(),
    });
    let mut connections = JoinSet::new();
    let own = server.clone();
    connections.spawn(async move { own.waits.poll(own.store.documents()).await });
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
    /// Serves one client while there is room for it, until its certificate is revoked.
    async fn client(
        self: &Arc<Server>,
        stream: TcpStream,
        unauthenticated: Unauthenticated,
    ) -> io::Result<()> {
        let _ = stream.set_nodelay(true);
        let greeted = async {
            let secured = self.security.accept(stream, &permissions::CALLERS).await?;
            let Secured { mut reader, mut writer, remote } = secured;
            let id = self.store.id();
            let is_welcome =
                greet(&mut reader, &mut writer, &CATALOG_PROTOCOL, id.as_bytes()).await?;
            io::Result::Ok(is_welcome.then_some((reader, writer, remote)))
        };
        match unauthenticated.complete(greeted).await? {
            Some(((reader, writer, remote), admitted)) => {
                let caller = remote.identity();
                let served = async {
                    tokio::select! {
                        served = self.connection(reader, writer, caller) => served,
                        () = remote.revoked() => {
                            Err(io::Error::other("the client's certificate is revoked"))
                        }
                    }
                };
                admitted.serve(served).await
            }
            None => Ok(()),
        }
    }

    /// Reads the requests of one client, and sends the answers.
    async fn connection(
        self: &Arc<Server>,
        reader: impl AsyncRead + Unpin,
        writer: impl AsyncWrite + Unpin + Send + 'static,
        caller: Option<Identity>,
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
                        let (body, _memory) = match (permissions::check(caller, &request), request)
                        {
                            (Err(error), _) => (Answer::failed(&error).to_body(), Some(memory)),
                            (Ok(()), Request::Scan(queries)) => {
                                drop(memory);
                                (server.scan(queries, number, &answers).await, None)
                            }
                            (Ok(()), request) => server.answer(request, memory).await,
                        };
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
        memory: OwnedSemaphorePermit,
    ) -> ((u16, Vec<u8>), Option<OwnedSemaphorePermit>) {
        if let Request::Wait(folder, revision, milliseconds) = &request {
            let limit = Duration::from_millis((*milliseconds).into());
            let changed = self.waits.wait(folder, *revision, limit.min(MAX_WAIT)).await;
            return (Answer::Waited(changed).to_body(), Some(memory));
        }
        let _worker = self.workers.acquire().await;
        let server = self.clone();
        let work = move || server.work(request);
        let worked = tokio::task::spawn_blocking(work).await;
        let body = worked.unwrap_or_else(|_| {
            Answer::Failed(ErrorKind::Unavailable, "the request panicked".into()).to_body()
        });
        // The request's memory is released first: a task that holds memory must not wait for more.
        drop(memory);
        let memory = self.reserve_memory(body.1.len()).await.ok();
        (body, memory)
    }

    /// Sends the pages of a scan. Returns its last answer.
    async fn scan(
        &self,
        queries: Vec<Query>,
        number: u64,
        answers: &mpsc::UnboundedSender<Outgoing>,
    ) -> (u16, Vec<u8>) {
        let mut scan = match self.scans.start(self.store.documents(), queries).await {
            Ok(scan) => scan,
            Err(error) => {
                return Answer::Failed(ErrorKind::Unavailable, error.to_string()).to_body();
            }
        };
        loop {
            match scan.next().await {
                ScanStep::Page(page, sent) => {
                    let body = page.to_body();
                    // This fails if the client has disconnected.
                    let _ = answers.send(Outgoing { number, body, _memory: None, _slot: sent });
                }
                ScanStep::End(answer) => return answer.to_body(),
            }
        }
    }

    /// Carries out a request.
    fn work(&self, request: Request) -> (u16, Vec<u8>) {
        let answer = match request {
            Request::Read(queries) => {
                let view = self.store.documents().read_within(&queries, MAX_ANSWER);
                view.map(|view| view.map_or(Answer::TooLarge, Answer::View))
            }
            Request::Commit(token, change) => {
                self.commit(token.as_ref(), &change).map(Answer::Committed)
            }
            Request::Last(prefix, before, limit) => {
                let (documents, limit) = (self.store.documents(), limit as usize);
                documents.last_within(&prefix, &before, limit, MAX_ANSWER / 2).map(Answer::View)
            }
            Request::Changed(prefix, revision) => {
                let changed = self.store.documents().changed_within(&prefix, revision, MAX_ANSWER);
                changed.map(|changed| changed.map_or(Answer::TooLarge, Answer::Changed))
            }
            Request::Wait(..) | Request::Scan(_) => {
                unreachable!("waits and scans are answered without a worker")
            }
        };
        let body = answer.unwrap_or_else(|error| Answer::failed(&error)).to_body();
        // Versions and lengths may make the message longer than the documents.
        if body.1.len() > MAX_ANSWER { Answer::TooLarge.to_body() } else { body }
    }

    fn commit(&self, token: Option<&Token>, change: &Change) -> Result<bool> {
        let documents = self.store.documents();
        let carried_out = match token {
            Some(token) => documents.commit_once(token, change),
            None => documents.commit(change),
        }?;
        if carried_out {
            self.waits.look_now();
        }
        Ok(carried_out)
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
