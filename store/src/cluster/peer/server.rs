//! The server of a peer.
//!
//! ```text
//! connection ──► read ──► put ─────────► one thread stores: as many as wait, one sync for all
//!     ▲            │                                       │
//!     │            └──► get, have, usage ──► threads       │
//!     └───────────── answers, in any order ◄───────────────┘
//! ```
//!
//! The memory of requests and answers is bounded for all connections together. A request is read
//! only when there is memory for it and for its answer. The memory is free when the answer is sent.
//! `net::limits` ensures that no client keeps it from the others.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::group_commit::{Put, ReplyTo, store_puts};
use super::store::{PeerStore, Room};
use crate::cluster::protocol::{
    Answer, GET, GET_FRAGMENT, GET_RANGE, HAVE, LIST, MAX_BODY, MAX_HAVE_BODY, MAX_LISTED, RECORDS,
    Request, longest_body, read_request_body,
};
use crate::error::Result;
use crate::net::admission::{Admission, MAX_CONNECTIONS, Unauthenticated};
use crate::net::frame::{HEADER, Header, OutgoingFrames, READ_AHEAD_BYTES, read_header};
use crate::net::handshake::{PEER_PROTOCOL, greet};
use crate::net::identity::{Role, Secured, Security};
use crate::net::limits::{ClientSlot, Limits, Memory};
use crate::net::message::malformed;

/// The roles that a peer serves. A peer has no business with another peer: a stolen peer key must
/// not read or delete what others hold.
const CALLERS: [Role; 2] = [Role::Client, Role::Supervisor];

/// Memory for requests and answers, in KiB.
const MEMORY_KIB: usize = 64 << 10;

/// The memory of one entry of a list, in bytes.
const LISTED_ENTRY_BYTES: usize = 192;

/// The memory of a `have` request and its answer, in bytes for each byte of the request.
const HAVE_FACTOR: usize = 4;

/// The memory that one connection may hold, in KiB.
const CONNECTION_KIB: usize = MEMORY_KIB / 4;

// The greatest memory of a request, in KiB, with its header.
const _: () = assert!(MAX_BODY / 1024 + 3 <= CONNECTION_KIB);
const _: () = assert!(HAVE_FACTOR * MAX_HAVE_BODY / 1024 + 3 <= CONNECTION_KIB);
const _: () = assert!(MAX_LISTED * LISTED_ENTRY_BYTES / 1024 + 3 <= CONNECTION_KIB);

/// How long a connection may be silent.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// An answer, and the memory that is free when the answer is sent.
pub(super) struct Outgoing {
    number: u64,
    answer: Answer,
    _memory: Memory,
}

impl Outgoing {
    pub(super) fn new(number: u64, answer: Answer, mut memory: Memory) -> Outgoing {
        memory.answered(answer_kib(&answer));
        Outgoing { number, answer, _memory: memory }
    }
}

pub(super) type Answers = mpsc::UnboundedSender<Outgoing>;

/// Serves connections until `stop` ends.
pub async fn serve(
    listener: TcpListener,
    store: Arc<PeerStore>,
    security: Security,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let (limits, admission) = (Limits::new(MEMORY_KIB), Admission::new(MAX_CONNECTIONS));
    // The channel is bounded by the memory that each put holds.
    let (puts, waiting) = mpsc::unbounded_channel();
    let (own, runtime) = (store.clone(), Handle::current());
    let storing = move || store_puts(&own, waiting, &runtime);
    let storing = thread::Builder::new().name("store".into()).spawn(storing)?;
    let mut watching = JoinSet::new();
    watching.spawn(limits.clone().watch());
    let mut connections = JoinSet::new();
    tokio::pin!(stop);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            () = &mut stop => break,
        };
        match accepted {
            Ok((stream, address)) => {
                let (store, puts, security) = (store.clone(), puts.clone(), security.clone());
                let (limits, unauthenticated) = (limits.clone(), admission.admit(address.ip()));
                connections.spawn(async move {
                    let _ = stream.set_nodelay(true);
                    if let Err(error) =
                        client(stream, unauthenticated, &limits, &security, &store, &puts).await
                    {
                        tracing::debug!(%address, %error, "a connection ended with an error");
                    }
                });
            }
            Err(error) => {
                // Most likely the process is out of file descriptors. That may pass.
                tracing::warn!(%error, "failed to accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    connections.shutdown().await;
    drop(puts);
    tokio::task::spawn_blocking(move || storing.join()).await?.map_err(|_| {
        // No client relies on puts that were not answered.
        io::Error::other("the thread that stores fragments panicked")
    })
}

/// Serves one client while it stays within the limits.
async fn client(
    stream: TcpStream,
    unauthenticated: Unauthenticated,
    limits: &Arc<Limits>,
    security: &Security,
    store: &Arc<PeerStore>,
    puts: &mpsc::UnboundedSender<Put>,
) -> io::Result<()> {
    let greeted = async {
        let Secured { mut reader, mut writer, remote } = security.accept(stream, &CALLERS).await?;
        let is_welcome =
            greet(&mut reader, &mut writer, &PEER_PROTOCOL, store.id().as_bytes()).await?;
        io::Result::Ok(is_welcome.then_some((reader, writer, remote)))
    };
    let Some(((reader, writer, remote), admitted)) = unauthenticated.complete(greeted).await?
    else {
        return Ok(());
    };
    let slot = limits.slot();
    let (reader, writer) = (slot.count(reader), slot.count(writer));
    let served = async {
        tokio::select! {
            served = connection(reader, writer, &slot, store, puts) => served,
            () = slot.ended() => Err(io::Error::other("it holds memory and does not move")),
            () = remote.revoked() => Err(io::Error::other("the client's certificate is revoked")),
        }
    };
    admitted.serve(served).await
}

/// Reads the requests of one client, and sends the answers.
async fn connection(
    reader: impl AsyncRead + Unpin,
    writer: impl AsyncWrite + Unpin + Send + 'static,
    slot: &ClientSlot,
    store: &Arc<PeerStore>,
    puts: &mpsc::UnboundedSender<Put>,
) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(READ_AHEAD_BYTES, reader);
    let room = Arc::new(Room::new(store.clone()));
    let (answers, outgoing) = mpsc::unbounded_channel();
    let mut sending = JoinSet::new();
    sending.spawn(send(writer, outgoing));
    loop {
        let header = tokio::select! {
            header = read_header(&mut reader, IDLE_TIMEOUT, MAX_BODY) => header?,
            // The client does not take answers any more.
            _ = sending.join_next() => return Ok(()),
        };
        let Some(header) = header else { break };
        let header = header.and_then(checked).map_err(io::Error::other)?;
        let mut memory = slot.take(request_kib(&header)).await?;
        let body = read_request_body(&mut reader, &header).await?;
        memory.received();
        match Request::from_bytes(header.kind, &body) {
            Ok(Request::Put { stamp, fragments }) => {
                let reply_to = ReplyTo { number: header.number, answers: answers.clone(), memory };
                let put = Put { stamp, fragments, room: room.clone(), reply_to };
                // The receiver ends after the last connection, unless its thread panicked.
                puts.send(put)
                    .map_err(|_| io::Error::other("the thread that stores fragments has ended"))?;
            }
            Ok(request) => {
                let (store, room, answers) = (store.clone(), room.clone(), answers.clone());
                tokio::task::spawn_blocking(move || {
                    let _serving = store.serving();
                    let answer = answer(&store, &room, request);
                    let answer = answer.unwrap_or_else(|error| Answer::failed(&error));
                    drop(room);
                    // The client may have disconnected.
                    let _ = answers.send(Outgoing::new(header.number, answer, memory));
                });
            }
            // The next frame could be found, but a client that sends an invalid request cannot be
            // trusted to send valid ones.
            Err(error) => {
                let (number, answer) = (header.number, Answer::failed(&error));
                let _ = answers.send(Outgoing::new(number, answer, memory));
                break;
            }
        }
    }
    drop(answers);
    // Earlier requests are answered as long as the client takes answers.
    while sending.join_next().await.is_some() {}
    Ok(())
}

/// A header, if its request can be legal.
fn checked(header: Header) -> Result<Header> {
    match header.len <= longest_body(header.kind) {
        true => Ok(header),
        false => Err(malformed("a request that is too long")),
    }
}

/// The memory of a request and its answer, in KiB. It is at most [`CONNECTION_KIB`], because a
/// connection never gets more.
fn request_kib(header: &Header) -> usize {
    // The answer may have the greatest possible length.
    let bytes = match header.kind {
        GET | GET_RANGE | GET_FRAGMENT | RECORDS => MAX_BODY,
        HAVE => HAVE_FACTOR * header.len,
        LIST => MAX_LISTED * LISTED_ENTRY_BYTES,
        _ => 0,
    };
    (HEADER + header.len).max(bytes).div_ceil(1024) + 1
}

/// The memory of an answer, in KiB.
fn answer_kib(answer: &Answer) -> usize {
    match answer {
        Answer::Fragments(fragments) => {
            fragments.iter().map(|one| one.block.len().div_ceil(1024) + 4).sum::<usize>() + 1
        }
        Answer::Parts(parts) => {
            parts.iter().map(|one| one.bytes.len().div_ceil(1024) + 4).sum::<usize>() + 1
        }
        Answer::Held(held) => held.iter().map(Vec::len).sum::<usize>() / 12 + held.len() / 256 + 2,
        Answer::Listed(all) => (all.len() * LISTED_ENTRY_BYTES).div_ceil(1024) + 1,
        _ => 2,
    }
}

/// Sends answers, many with one system call. Their memory is free when they are sent.
async fn send(
    mut writer: impl AsyncWrite + Unpin,
    mut outgoing: mpsc::UnboundedReceiver<Outgoing>,
) -> io::Result<()> {
    let mut frames = OutgoingFrames::default();
    let mut held = Vec::new();
    while let Some(first) = outgoing.recv().await {
        let mut next = Some(first);
        while let Some(Outgoing { number, answer, _memory }) = next.take() {
            frames.push(number, answer.to_parts());
            held.push(_memory);
            if !frames.is_full() {
                next = outgoing.try_recv().ok();
            }
        }
        frames.send(&mut writer).await?;
        held.clear();
    }
    Ok(())
}

fn answer(store: &PeerStore, room: &Room, request: Request) -> Result<Answer> {
    Ok(match request {
        Request::Get(blob) => Answer::Fragments(store.get(&blob)?),
        Request::Have { renew, blobs } => Answer::Held(store.have(&blobs, renew)?),
        Request::Usage => Answer::Usage(store.usage()?),
        Request::GetFragment(id) => Answer::Fragments(store.get_fragment(&id)?),
        Request::Clock => Answer::Clock(store.clock()),
        Request::GetRange { blob, offset, len } => {
            Answer::Parts(store.get_range(&blob, offset, len)?)
        }
        Request::Delete { deadline, idle, bound, is_dry: false, fragments } => {
            Answer::Deleted(store.delete_before(deadline, &fragments, idle, bound)?)
        }
        Request::Delete { idle, bound, is_dry: true, fragments, .. } => {
            Answer::Deleted(store.deletable(&fragments, idle, bound)?)
        }
        Request::Records(after) => Answer::Fragments(store.records(&after)?),
        Request::List { after, most } => Answer::Listed(store.list(&after, most.into())?),
        Request::Reserve(bytes) => {
            room.reserve(bytes)?;
            Answer::Reserved
        }
        Request::Put { .. } => unreachable!("puts go to the thread that stores fragments"),
    })
}
