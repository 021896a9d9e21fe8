//! The server of a catalog's documents.
//!
//! ```text
//! connection ──► read, commit ──► a few threads ──► answers, in any order
//!            ├─► scan ──► a thread of its own ──► many answers
//!            └─► wait ──► one task polls the database for all waiting requests
//! ```
//!
//! The memory of requests and answers is bounded for all connections together. A request is read
//! only when there is memory for it and for its answer. The memory is free when the answer is sent.
//! `net::limits` ensures that no client keeps it from the others. `net::admission` bounds the
//! connections.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::allowance::{Allowance, message_kib};
use super::peer_connections::PeerConnections;
use super::permissions;
use super::serve_scan::{ScanLimits, ScanStep, Scans};
use super::store::CatalogStore;
use super::waits::Waits;
use super::wire::{Answer, Request, Token};
use crate::documents::{Change, Documents, Query};
use crate::error::{ErrorKind, Result};
use crate::net::admission::{Admission, MAX_CONNECTIONS, Unauthenticated};
use crate::net::frame::{OutgoingFrames, read_body, read_header};
use crate::net::handshake::{CATALOG_PROTOCOL, greet};
use crate::net::identity::{Identity, Secured, Security};
use crate::net::limits::{ClientSlot, Limits, Memory};

/// Memory for requests and answers, in KiB.
const MEMORY_KIB: usize = 256 << 10;

/// Requests that are carried out at a time.
const WORKERS: usize = 4;

/// How long a connection may be silent.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// The longest wait. A client that wants to wait longer sends another request.
const MAX_WAIT: Duration = Duration::from_secs(30);

pub(super) struct Server {
    store: Arc<CatalogStore>,
    security: Security,
    limits: Arc<Limits>,
    peers: Arc<PeerConnections>,
    workers: Arc<Semaphore>,
    scans: Scans,
    waits: Waits,
}

/// The kind and the body of an answer.
type Body = (u16, Vec<u8>);

/// An answer, and the permits that are released when it is sent.
pub(super) struct Outgoing {
    number: u64,
    body: Body,
    _held: Held,
}

/// What an answer occupies until it is sent.
struct Held {
    /// The memory of the request and its answer. The pages of a scan have none.
    _memory: Option<Memory>,
    /// The place among the requests of the connection, or among the pages of a scan.
    _slot: OwnedSemaphorePermit,
}

impl Outgoing {
    /// The last answer to a request.
    fn last(number: u64, body: Body, memory: Option<Memory>, slot: OwnedSemaphorePermit) -> Self {
        let memory = memory.map(|mut memory| {
            memory.answered(message_kib(body.1.len()));
            memory
        });
        Outgoing { number, body, _held: Held { _memory: memory, _slot: slot } }
    }

    /// A page of a scan.
    fn page(number: u64, body: Body, slot: OwnedSemaphorePermit) -> Self {
        Outgoing { number, body, _held: Held { _memory: None, _slot: slot } }
    }
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
    let server = Arc::new(Server::new(store, security, scan_limits));
    let mut connections = JoinSet::new();
    connections.spawn(server.limits.clone().watch());
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
    pub(super) fn new(store: Arc<CatalogStore>, security: Security, scans: ScanLimits) -> Server {
        Server {
            store,
            security,
            limits: Limits::new(MEMORY_KIB),
            peers: Arc::default(),
            workers: Arc::new(Semaphore::new(WORKERS)),
            scans: Scans::new(scans),
            waits: Waits::default(),
        }
    }

    #[cfg(test)]
    pub(super) fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    /// Serves one client while it stays within the limits, until its certificate is revoked.
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
                let slot = self.limits.slot();
                let (reader, writer) = (slot.count(reader), slot.count(writer));
                let mut of_peer = caller.and_then(Identity::peer).map(|id| self.peers.add(id));
                let has_newer = async {
                    match &mut of_peer {
                        Some(one) => one.ended().await,
                        None => pending().await,
                    }
                };
                let served = async {
                    tokio::select! {
                        served = self.connection(reader, writer, &slot, caller) => served,
                        () = slot.ended() => {
                            Err(io::Error::other("it holds memory and does not move"))
                        }
                        () = has_newer => {
                            Err(io::Error::other("the peer has too many newer connections"))
                        }
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
        client: &ClientSlot,
        caller: Option<Identity>,
    ) -> io::Result<()> {
        let mut reader = BufReader::new(reader);
        let allowance = Allowance::of(caller);
        let slots = Arc::new(Semaphore::new(allowance.requests));
        let (answers, outgoing) = mpsc::unbounded_channel();
        let mut sending = JoinSet::new();
        sending.spawn(send(writer, outgoing));
        // The tasks in this set end with the connection.
        let mut answering = JoinSet::new();
        loop {
            let header = tokio::select! {
                header = read_header(&mut reader, IDLE_TIMEOUT, allowance.request) => header?,
                // Sending has failed: the client does not take answers any more.
                _ = sending.join_next() => return Ok(()),
            };
            let Some(header) = header else { break };
            let header = header.map_err(io::Error::other)?;
            let slot = slots.clone().acquire_owned().await.map_err(io::Error::other)?;
            let mut memory = client.take(allowance.request_kib(&header)).await?;
            let body = read_body(&mut reader, &header).await?;
            memory.received();
            let number = header.number;
            match Request::from_body(header.kind, &body) {
                Ok(request) => {
                    let (server, answers) = (self.clone(), answers.clone());
                    answering.spawn(async move {
                        let may = permissions::check(caller, &request);
                        let (body, memory) = match (may, request) {
                            (Err(error), _) => (Answer::failed(&error).to_body(), Some(memory)),
                            (Ok(()), Request::Scan(queries)) => {
                                return server.scan(queries, number, memory, slot, &answers).await;
                            }
                            (Ok(()), request) => {
                                server.answer(request, memory, allowance.answer).await
                            }
                        };
                        // This fails if the client has disconnected.
                        let _ = answers.send(Outgoing::last(number, body, memory, slot));
                    });
                }
                // The next frame could be found, but this client does not speak the protocol.
                Err(error) => {
                    let body = Answer::failed(&error).to_body();
                    let _ = answers.send(Outgoing::last(number, body, Some(memory), slot));
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

    /// The answer to a request, and the memory of both.
    async fn answer(
        self: &Arc<Server>,
        request: Request,
        memory: Memory,
        max_answer: usize,
    ) -> (Body, Option<Memory>) {
        if let Request::Wait(folder, revision, milliseconds) = &request {
            let limit = Duration::from_millis((*milliseconds).into());
            let changed = self.waits.wait(folder, *revision, limit.min(MAX_WAIT)).await;
            return (Answer::Waited(changed).to_body(), Some(memory));
        }
        let worker = self.workers.clone().acquire_owned().await;
        let server = self.clone();
        // The work goes on if the client disconnects, so it owns what it occupies.
        let work = move || {
            let body = server.work(request, max_answer);
            drop(worker);
            (body, Some(memory))
        };
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
            let reason = "the request panicked".into();
            (Answer::Failed(ErrorKind::Unavailable, reason).to_body(), None)
        })
    }

    /// Answers a scan with its pages and its end.
    pub(super) async fn scan(
        &self,
        queries: Vec<Query>,
        number: u64,
        memory: Memory,
        slot: OwnedSemaphorePermit,
        answers: &mpsc::UnboundedSender<Outgoing>,
    ) {
        // Sending fails if the client has disconnected.
        let send = |outgoing| drop(answers.send(outgoing));
        let end = match self.scans.start(self.store.documents(), queries).await {
            Ok(mut scan) => loop {
                match scan.next().await {
                    ScanStep::Page(page, sent) => {
                        send(Outgoing::page(number, page.to_body(), sent));
                    }
                    ScanStep::End(answer) if scan.pages_are_sent().await => break answer,
                    // Only the end of the connection frees the memory of the pages.
                    ScanStep::End(_) => return memory.end_connection(),
                }
            },
            Err(error) => Answer::Failed(ErrorKind::Unavailable, error.to_string()),
        };
        let last = Outgoing::last(number, end.to_body(), Some(memory), slot);
        send(last);
    }

    /// Carries out a request. The answer has at most `max_answer` bytes.
    fn work(&self, request: Request, max_answer: usize) -> Body {
        let answer = match request {
            Request::Read(queries) => {
                let view = self.store.documents().read_within(&queries, max_answer);
                view.map(|view| view.map_or(Answer::TooLarge, Answer::View))
            }
            Request::Commit(token, change) => {
                self.commit(token.as_ref(), &change).map(Answer::Committed)
            }
            Request::Last(prefix, before, limit) => {
                let (documents, limit) = (self.store.documents(), limit as usize);
                documents.last_within(&prefix, &before, limit, max_answer / 2).map(Answer::View)
            }
            Request::Changed(prefix, revision) => {
                let changed = self.store.documents().changed_within(&prefix, revision, max_answer);
                changed.map(|changed| changed.map_or(Answer::TooLarge, Answer::Changed))
            }
            Request::Wait(..) | Request::Scan(_) => {
                unreachable!("waits and scans are answered without a worker")
            }
        };
        let body = answer.unwrap_or_else(|error| Answer::failed(&error)).to_body();
        // Versions and lengths may make the message longer than the documents.
        if body.1.len() > max_answer { Answer::TooLarge.to_body() } else { body }
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
        while let Some(Outgoing { number, body: (kind, body), _held }) = next.take() {
            frames.push(number, (kind, vec![body.into()]));
            held.push(_held);
            if !frames.is_full() {
                next = outgoing.try_recv().ok();
            }
        }
        frames.send(&mut writer).await?;
        held.clear();
    }
    Ok(())
}
