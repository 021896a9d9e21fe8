//! Serving a peer's fragments to clients.
//!
//! ```text
//! connection ──► read ──► put ─────────► one thread stores: as many as wait, one sync for all
//!     ▲            │                                       │
//!     │            └──► get, have, usage ──► threads       │
//!     └───────────── answers, in any order ◄───────────────┘
//! ```
//!
//! What requests and answers hold in memory is bounded for all connections together: a request is read only
//! when there is room for it, and the room is free again when its answer is sent. `limits` sees to it that nobody
//! keeps it from the others.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::super::fragment::{Fragment, MAX_CONTENT};
use super::super::frames::{Frames, READ_AHEAD, read_body, read_header};
use super::super::identity::{Role, Security};
use super::super::wire::{
    Answer, GET, HAVE, HEADER, Header, Hello, LIST, MAX_BODY, MAX_LISTED, OLDEST, RECORDS, Request,
    VERSION,
};
use super::limits::{Limits, Memory, Place, Stranger};
use super::store::{PeerStore, Room};
use crate::error::{Error, ErrorKind, Result};

/// Connections at a time.
const MAX_CONNECTIONS: usize = 1024;

/// Fragments in one answer: with their descriptions they fit into it.
const MAX_FRAGMENTS: usize = 6;

/// Memory of an entry of a list.
const LISTED: usize = 160;

/// How long a connection may be silent.
const IDLE: Duration = Duration::from_secs(600);

/// How long a client may take for its first words.
const GREETING: Duration = Duration::from_secs(10);

/// More fragments are waited for while some come within this time, so many times, and until there are so many.
const GATHER: Duration = Duration::from_millis(5);
const TIMES: usize = 8;
const MANY: usize = 64;

/// How long nothing comes before the table is told of little.
const QUIET: Duration = Duration::from_secs(1);

/// Bytes of fragments that are written together.
const BATCH: usize = 8 << 20;

/// Bytes of fragments that wait for one sync at most.
const GROUP: usize = 64 << 20;

/// An answer, and the memory that is free when it is sent.
struct Outgoing {
    number: u64,
    answer: Answer,
    _memory: Memory,
}

impl Outgoing {
    fn new(number: u64, answer: Answer, mut memory: Memory) -> Outgoing {
        memory.answered(answer_units(&answer));
        Outgoing { number, answer, _memory: memory }
    }
}

type Answers = mpsc::UnboundedSender<Outgoing>;

/// A fragment on its way in.
struct Put {
    fragment: Fragment,
    /// What its client has reserved.
    room: Arc<Room>,
    number: u64,
    answers: Answers,
    memory: Memory,
}

/// Serves connections until `stop` ends.
pub async fn serve(
    listener: TcpListener,
    store: Arc<PeerStore>,
    security: Security,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let limits = Limits::new();
    // Bounded by the memory that each of them holds.
    let (puts, waiting) = mpsc::unbounded_channel();
    let (own, runtime) = (store.clone(), Handle::current());
    let storing = move || keep(&own, waiting, &runtime);
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
            // Beyond the limit it is closed at once.
            Ok(_) if connections.len() >= MAX_CONNECTIONS => {}
            Ok((stream, address)) => {
                let (store, puts, security) = (store.clone(), puts.clone(), security.clone());
                let stranger = limits.stranger();
                connections.spawn(async move {
                    let _ = stream.set_nodelay(true);
                    if let Err(error) = client(stream, stranger, &security, &store, &puts).await {
                        tracing::debug!(%address, %error, "a connection ends");
                    }
                });
            }
            Err(error) => {
                // Out of descriptors, most likely: that may pass.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    connections.shutdown().await;
    drop(puts);
    tokio::task::spawn_blocking(move || storing.join()).await?.map_err(|_| {
        // What it had not answered, nobody relies on.
        io::Error::other("the thread that stores has panicked")
    })
}

/// Serves one client as long as it keeps within the limits.
async fn client(
    stream: TcpStream,
    mut stranger: Stranger,
    security: &Security,
    store: &Arc<PeerStore>,
    puts: &mpsc::UnboundedSender<Put>,
) -> io::Result<()> {
    let greeted = async {
        let (mut reader, mut writer, role) = security.accept(stream, &Role::ALL).await?;
        let is_welcome = greet(&mut reader, &mut writer, store).await?;
        io::Result::Ok(is_welcome.then_some((reader, writer, role)))
    };
    let greeted = tokio::select! {
        greeted = greeted => greeted?,
        () = stranger.ended() => return Err(io::Error::other("it has not said who it is")),
    };
    let Some((reader, writer, role)) = greeted else { return Ok(()) };
    let place = stranger.into_place();
    let (reader, writer) = (place.count(reader), place.count(writer));
    tokio::select! {
        served = connection(reader, writer, role, &place, store, puts) => served,
        () = place.ended() => Err(io::Error::other("it keeps memory from others")),
    }
}

/// Answers one client.
async fn connection(
    reader: impl AsyncRead + Unpin,
    writer: impl AsyncWrite + Unpin + Send + 'static,
    role: Option<Role>,
    place: &Place,
    store: &Arc<PeerStore>,
    puts: &mpsc::UnboundedSender<Put>,
) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(READ_AHEAD, reader);
    let room = Arc::new(Room::new(store.clone()));
    let (answers, outgoing) = mpsc::unbounded_channel();
    let mut sending = JoinSet::new();
    sending.spawn(send(writer, outgoing));
    loop {
        let header = tokio::select! {
            header = read_header(&mut reader, IDLE) => header?,
            // The client takes no answers any more.
            _ = sending.join_next() => return Ok(()),
        };
        let Some(header) = header else { break };
        let header = header.map_err(io::Error::other)?;
        let mut memory = place.take(units(&header)).await?;
        let body = read_body(&mut reader, &header).await?;
        memory.received();
        match Request::from_bytes(header.kind, &body) {
            Ok(Request::Put(fragment)) => {
                let (number, answers) = (header.number, answers.clone());
                let room = room.clone();
                let put = Put { fragment, room, number, answers, memory };
                // It ends after the last connection, unless it has panicked.
                puts.send(put).map_err(|_| io::Error::other("nothing can be stored"))?;
            }
            Ok(request) => {
                let (store, room, answers) = (store.clone(), room.clone(), answers.clone());
                tokio::task::spawn_blocking(move || {
                    let answer =
                        allow(role, &request).and_then(|()| answer(&store, &room, request));
                    let answer = answer.unwrap_or_else(|error| Answer::failed(&error));
                    drop(room);
                    // The client may have gone.
                    let _ = answers.send(Outgoing::new(header.number, answer, memory));
                });
            }
            // Where the next frame starts is clear, but not what this client means by it.
            Err(error) => {
                let (number, answer) = (header.number, Answer::failed(&error));
                let _ = answers.send(Outgoing::new(number, answer, memory));
                break;
            }
        }
    }
    drop(answers);
    // What was asked before is answered, as long as the client listens.
    while sending.join_next().await.is_some() {}
    Ok(())
}

/// Whether this role may ask for that. Whoever has got hold of a peer's keys must not delete what others hold.
fn allow(role: Option<Role>, request: &Request) -> Result<()> {
    match (role, request) {
        (Some(Role::Peer), Request::Delete { .. }) => {
            Err(Error::BadArgument("a peer may not delete what another peer holds".into()))
        }
        _ => Ok(()),
    }
}

/// The memory of a request and its answer, in units.
fn units(header: &Header) -> usize {
    // Its answer may be as long as can be.
    let bytes = match header.kind {
        GET | RECORDS => MAX_BODY,
        HAVE => 4 * header.len,
        LIST => MAX_LISTED * LISTED,
        _ => 0,
    };
    (HEADER + header.len).max(bytes).div_ceil(1024) + 1
}

/// The memory of an answer, in units.
fn answer_units(answer: &Answer) -> usize {
    match answer {
        Answer::Fragments(fragments) => {
            fragments.iter().map(|one| one.block.len().div_ceil(1024) + 2).sum::<usize>() + 1
        }
        Answer::Held(held) => held.iter().map(Vec::len).sum::<usize>() / 16 + held.len() / 256 + 2,
        Answer::Listed(all) => (all.len() * LISTED).div_ceil(1024) + 1,
        _ => 2,
    }
}

/// Agrees on a version. Returns whether there is one.
async fn greet(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    store: &PeerStore,
) -> io::Result<bool> {
    let Some(header) = read_header(reader, GREETING).await? else { return Ok(false) };
    let header = header.map_err(io::Error::other)?;
    if header.len > 1024 {
        return Ok(false);
    }
    let body = read_body(reader, &header).await?;
    let answer = match Request::from_body(header.kind, &body) {
        Ok(Request::Hello(Hello { oldest, newest })) if oldest <= VERSION && newest >= OLDEST => {
            Answer::Welcome(newest.min(VERSION), store.id())
        }
        Ok(Request::Hello(Hello { oldest, newest })) => Answer::Failed(
            ErrorKind::Invalid,
            format!(
                "this peer speaks versions {OLDEST} to {VERSION} of the protocol, the client {oldest} \
                 to {newest}; update the older one"
            ),
        ),
        Ok(_) => Answer::Failed(ErrorKind::Invalid, "a client begins with a hello".into()),
        Err(error) => Answer::failed(&error),
    };
    let is_welcome = matches!(answer, Answer::Welcome(..));
    let mut frames = Frames::default();
    frames.push(header.number, answer.to_parts());
    frames.send(writer).await?;
    Ok(is_welcome)
}

/// Sends answers, many with one system call. Their memory is free when they are sent.
async fn send(
    mut writer: impl AsyncWrite + Unpin,
    mut outgoing: mpsc::UnboundedReceiver<Outgoing>,
) -> io::Result<()> {
    let mut frames = Frames::default();
    let mut held = Vec::new();
    while let Some(first) = outgoing.recv().await {
        let mut next = Some(first);
        while let Some(Outgoing { number, answer, _memory }) = next.take() {
            frames.push(number, answer.to_parts());
            held.push(_memory);
            if !frames.are_many() {
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
        Request::Get(blob) => {
            let mut fragments = store.get(&blob)?;
            // A blob has several only if it was encoded in several ways: one is as good as another.
            let mut room = MAX_CONTENT;
            fragments.retain(|one| {
                let fits = one.block.len() <= room;
                room -= if fits { one.block.len() } else { 0 };
                fits
            });
            fragments.truncate(MAX_FRAGMENTS);
            Answer::Fragments(fragments)
        }
        Request::Have { renew, blobs } => Answer::Held(store.have(&blobs, renew)?),
        Request::Usage => Answer::Usage(store.usage()?),
        Request::Delete { idle, fragments } => Answer::Deleted(store.delete(&fragments, idle)?),
        Request::Records(after) => Answer::Fragments(store.records(&after)?),
        Request::List(after) => Answer::Listed(store.list(&after)?),
        Request::Reserve(bytes) => {
            room.reserve(bytes)?;
            Answer::Reserved
        }
        Request::Hello(_) | Request::Put(_) => {
            return Err(Error::BadArgument("a connection has one hello".into()));
        }
    })
}

/// Waits for something to store. The table is told meanwhile what is durable: of much at once, of little when nothing
/// comes for a while.
fn next_put(
    store: &PeerStore,
    waiting: &mut mpsc::UnboundedReceiver<Put>,
    runtime: &Handle,
) -> Option<Put> {
    let settle = |much| {
        if let Err(error) = store.settle(much) {
            tracing::warn!(%error, "the table of fragments cannot be written; it is tried again");
        }
    };
    settle(true);
    match runtime.block_on(async { timeout(QUIET, waiting.recv()).await }) {
        Ok(next) => next,
        Err(_) => {
            settle(false);
            waiting.blocking_recv()
        }
    }
}

/// Stores what comes, until nobody is left who could send more.
fn keep(store: &PeerStore, mut waiting: mpsc::UnboundedReceiver<Put>, runtime: &Handle) {
    let mut next = waiting.blocking_recv();
    let mut last = 0;
    while next.is_some() {
        // To sync costs the same for one and for many. One that comes alone does not wait.
        if last > 1 {
            gather(&waiting);
        }
        let mut group = Vec::new();
        let mut bytes = 0;
        while let Some(first) = next.take() {
            bytes += first.fragment.block.len();
            let mut batch = vec![first];
            let mut len = 0;
            while len < BATCH
                && let Ok(more) = waiting.try_recv()
            {
                len += more.fragment.block.len();
                batch.push(more);
            }
            bytes += len;
            put(store, batch, &mut group);
            if bytes < GROUP {
                next = waiting.try_recv().ok();
            }
        }
        let flushed = store.flush();
        last = group.len();
        for (number, answers, memory) in group {
            let answer = match &flushed {
                Ok(()) => Answer::Stored,
                Err(error) => Answer::failed(error),
            };
            // The client may have gone.
            let _ = answers.send(Outgoing::new(number, answer, memory));
        }
        next = next_put(store, &mut waiting, runtime);
    }
}

/// Waits for more while it comes.
fn gather(waiting: &mpsc::UnboundedReceiver<Put>) {
    let mut before = waiting.len();
    for _ in 0..TIMES {
        if before >= MANY {
            return;
        }
        thread::sleep(GATHER);
        let now = waiting.len();
        if now == before {
            return;
        }
        before = now;
    }
}

/// Writes a batch. What was taken joins the group that is to be synced.
fn put(store: &PeerStore, batch: Vec<Put>, group: &mut Vec<(u64, Answers, Memory)>) {
    let mut fragments = Vec::with_capacity(batch.len());
    let mut rooms = Vec::with_capacity(batch.len());
    let mut rest = Vec::with_capacity(batch.len());
    for Put { fragment, room, number, answers, memory } in batch {
        fragments.push(fragment);
        rooms.push(room);
        rest.push((number, answers, memory));
    }
    let results = store.put_in(&fragments, |at| Some(&*rooms[at]));
    for (at, (number, answers, memory)) in rest.into_iter().enumerate() {
        let error = match &results {
            Ok(results) => results[at].as_ref().err(),
            Err(error) => Some(error),
        };
        match error {
            None => group.push((number, answers, memory)),
            Some(error) => {
                let answer = Answer::failed(error);
                let _ = answers.send(Outgoing::new(number, answer, memory));
            }
        }
    }
}
