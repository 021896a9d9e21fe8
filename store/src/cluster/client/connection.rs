//! A client's connection to one peer: many requests at once, answered in any order.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::cluster::protocol::{
    Answer, Hello, MAX_ASKED, MAX_DELETED, MAX_PUT, OLDEST, Request, VERSION,
};
use crate::cluster::protocol::{FragmentId, Held, Usage};
use crate::encoding::fragment::{Fragment, Kind};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, PeerId};
use crate::net::frames::{Frames, READ_AHEAD, read_body, read_header};
use crate::net::identity::{Reader, Role, Security, Writer};

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(5);

/// Requests that wait to be sent.
const QUEUE: usize = 16;

/// Those who wait for answers, by the number of their request.
type Waiting = Arc<Mutex<Option<HashMap<u64, oneshot::Sender<Answer>>>>>;

/// A connection. When it is lost, every request fails, those under way too.
pub struct Connection {
    address: String,
    peer: PeerId,
    requests: mpsc::Sender<(Request, oneshot::Sender<Answer>)>,
    waiting: Waiting,
    heard: Arc<Heard>,
}

/// When something came from the peer.
struct Heard {
    begin: Instant,
    /// Milliseconds since then.
    last: AtomicU64,
}

impl Heard {
    fn renew(&self) {
        self.last.store(self.begin.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn silence(&self) -> Duration {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        self.begin.elapsed().saturating_sub(last)
    }
}

impl Connection {
    /// Connects to the peer that listens at this address.
    pub async fn open(address: &str, security: &Security) -> Result<Connection> {
        let failed = |error: io::Error| unavailable(address, &error.to_string());
        let stream = timeout(CONNECT, TcpStream::connect(address)).await;
        let stream = stream.map_err(io::Error::from).and_then(|stream| stream).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let (reader, writer) = security.connect(stream, Role::Peer).await.map_err(failed)?;
        let (mut reader, mut writer) = (BufReader::with_capacity(READ_AHEAD, reader), writer);
        let hello = Request::Hello(Hello { oldest: OLDEST, newest: VERSION });
        let mut frames = Frames::default();
        frames.push(0, hello.to_parts());
        frames.send(&mut writer).await.map_err(failed)?;
        let peer = match next(&mut reader, CONNECT).await.map_err(failed)? {
            Some((0, Answer::Welcome(version, peer))) if (OLDEST..=VERSION).contains(&version) => {
                peer
            }
            Some((_, Answer::Failed(kind, reason))) => {
                return Err(Error::Peer { peer: address.into(), kind, reason });
            }
            _ => return Err(unavailable(address, "it does not answer like a peer")),
        };
        let waiting = Waiting::new(Mutex::new(Some(HashMap::new())));
        let (requests, queue) = mpsc::channel(QUEUE);
        let heard = Arc::new(Heard { begin: Instant::now(), last: AtomicU64::new(0) });
        let (own, hears) = (waiting.clone(), heard.clone());
        tokio::spawn(async move {
            // Both halves go together: one alone would keep the connection.
            tokio::select! {
                () = send(writer, queue, &own) => {}
                () = receive(reader, &own, &hears) => {}
            }
            lose(&own);
        });
        Ok(Connection { address: address.into(), peer, requests, waiting, heard })
    }

    /// Who is at the other end.
    pub fn peer(&self) -> PeerId {
        self.peer
    }

    /// Whether it is lost.
    pub fn is_lost(&self) -> bool {
        self.waiting.lock().expect("no code panics with this lock held").is_none()
    }

    /// How long nothing has come from the peer.
    pub(crate) fn silence(&self) -> Duration {
        self.heard.silence()
    }

    async fn ask(&self, request: Request) -> Result<Answer> {
        let lost = || unavailable(&self.address, "the connection is lost");
        let (sender, answer) = oneshot::channel();
        self.requests.send((request, sender)).await.map_err(|_| lost())?;
        match answer.await.map_err(|_| lost())? {
            Answer::Failed(kind, reason) => {
                Err(Error::Peer { peer: self.address.clone(), kind, reason })
            }
            answer => Ok(answer),
        }
    }

    fn unexpected(&self) -> Error {
        unavailable(&self.address, "the answer is not one to the question")
    }

    /// Gives the peer a fragment. It is durable there when this returns.
    pub async fn put(&self, fragment: Fragment) -> Result<()> {
        self.put_all(vec![fragment]).await?.pop().unwrap_or_else(|| Err(self.unexpected()))
    }

    /// The same for several, of which there are at most [`MAX_PUT`], with no more bytes than the longest content. Tells
    /// of each whether it is durable.
    pub async fn put_all(&self, fragments: Vec<Fragment>) -> Result<Vec<Result<()>>> {
        let count = fragments.len();
        debug_assert!((1..=MAX_PUT).contains(&count));
        match self.ask(Request::Put(fragments)).await? {
            Answer::Stored => Ok((0..count).map(|_| Ok(())).collect()),
            Answer::Refused { which, reason } if which.len() == count => {
                let failed = |kind| {
                    let (peer, reason) = (self.address.clone(), reason.clone());
                    Error::Peer { peer, kind, reason }
                };
                Ok(which
                    .into_iter()
                    .map(|one| one.map_or(Ok(()), |kind| Err(failed(kind))))
                    .collect())
            }
            _ => Err(self.unexpected()),
        }
    }

    /// What the peer has of a blob: fragments whose blocks are what their descriptions say.
    pub async fn get(&self, blob: &BlobId) -> Result<Vec<Fragment>> {
        let mut fragments = self.fetch(blob).await?;
        let sent = fragments.len();
        fragments.retain(|one| one.is_of(blob));
        if sent > 0 && fragments.is_empty() {
            let reason = "it has sent something else than the blob that it was asked for";
            let (peer, kind) = (self.address.clone(), ErrorKind::Corrupt);
            return Err(Error::Peer { peer, kind, reason: reason.into() });
        }
        Ok(fragments)
    }

    /// The same without looking: see [`Fragment::is_of`].
    pub async fn fetch(&self, blob: &BlobId) -> Result<Vec<Fragment>> {
        match self.ask(Request::Get(*blob)).await? {
            Answer::Fragments(fragments) => Ok(fragments),
            _ => Err(self.unexpected()),
        }
    }

    /// What the peer has of each of these blobs, of which there are at most [`MAX_ASKED`]. With `renew` it does not
    /// take what is there for idle.
    pub async fn have(&self, blobs: &[BlobId], renew: bool) -> Result<Vec<Vec<Held>>> {
        debug_assert!(blobs.len() <= MAX_ASKED);
        match self.ask(Request::Have { renew, blobs: blobs.to_vec() }).await? {
            Answer::Held(held) if held.len() == blobs.len() => Ok(held),
            _ => Err(self.unexpected()),
        }
    }

    /// How much the peer holds.
    pub async fn usage(&self) -> Result<Usage> {
        match self.ask(Request::Usage).await? {
            Answer::Usage(usage) => Ok(usage),
            _ => Err(self.unexpected()),
        }
    }

    /// Deletes fragments, at most [`MAX_DELETED`], that were not stored or renewed within so many seconds. Returns the
    /// bytes that the peer's disk has again.
    pub async fn delete(&self, fragments: &[FragmentId], idle: u32) -> Result<u64> {
        debug_assert!(fragments.len() <= MAX_DELETED);
        match self.ask(Request::Delete { idle, fragments: fragments.to_vec() }).await? {
            Answer::Deleted(bytes) => Ok(bytes),
            _ => Err(self.unexpected()),
        }
    }

    /// Fragments of the first records behind this blob, in the order of their blobs. Nothing if there are no more.
    pub async fn records(&self, after: &BlobId) -> Result<Vec<Fragment>> {
        let is_right = |one: &Fragment| {
            one.description.kind() == Kind::Record
                && one.description.blob > *after
                && one.description.matches(one.index.into(), &one.block)
        };
        match self.ask(Request::Records(*after)).await? {
            Answer::Fragments(all)
                if all.iter().all(is_right) && all.is_sorted_by_key(|one| one.description.blob) =>
            {
                Ok(all)
            }
            Answer::Fragments(_) => Err(self.wrong_page()),
            _ => Err(self.unexpected()),
        }
    }

    /// The fragments of the first blobs behind this one, in the order of the blobs. Nothing if there are no more.
    pub async fn list(&self, after: &BlobId) -> Result<Vec<(BlobId, Held)>> {
        match self.ask(Request::List(*after)).await? {
            Answer::Listed(all)
                if all.first().is_none_or(|(blob, _)| blob > after)
                    && all.is_sorted_by_key(|(blob, _)| *blob) =>
            {
                Ok(all)
            }
            Answer::Listed(_) => Err(self.wrong_page()),
            _ => Err(self.unexpected()),
        }
    }

    /// Reserves so much room for what is put through this connection, instead of what it has reserved before. It
    /// ends with the connection.
    pub async fn reserve(&self, bytes: u64) -> Result<()> {
        match self.ask(Request::Reserve(bytes)).await? {
            Answer::Reserved => Ok(()),
            _ => Err(self.unexpected()),
        }
    }

    /// Whoever goes through pages would never come to an end.
    fn wrong_page(&self) -> Error {
        let reason = "it has sent something else than the next page";
        Error::Peer { peer: self.address.clone(), kind: ErrorKind::Corrupt, reason: reason.into() }
    }
}

fn unavailable(peer: &str, reason: &str) -> Error {
    Error::Peer { peer: peer.into(), kind: ErrorKind::Unavailable, reason: reason.into() }
}

/// The next answer, and the number of its request; nothing if there will be none.
async fn next(reader: &mut BufReader<Reader>, idle: Duration) -> io::Result<Option<(u64, Answer)>> {
    let Some(header) = read_header(reader, idle).await? else { return Ok(None) };
    let header = header.map_err(io::Error::other)?;
    let body = read_body(reader, &header).await?;
    // One that makes no sense is a wrong answer, and the next one may be right.
    let answer = Answer::from_bytes(header.kind, &body)
        .unwrap_or_else(|error| Answer::Failed(ErrorKind::Corrupt, error.to_string()));
    Ok(Some((header.number, answer)))
}

/// Sends requests, many with one system call, until nobody is left who could ask.
async fn send(
    mut writer: Writer,
    mut queue: mpsc::Receiver<(Request, oneshot::Sender<Answer>)>,
    waiting: &Waiting,
) {
    let mut number = 0;
    let mut frames = Frames::default();
    while let Some(first) = queue.recv().await {
        let mut next = Some(first);
        while let Some((request, answer)) = next.take() {
            // Who asked may have given up.
            if answer.is_closed() {
                next = queue.try_recv().ok();
                continue;
            }
            number += 1;
            match &mut *waiting.lock().expect("no code panics with this lock held") {
                Some(waiting) => drop(waiting.insert(number, answer)),
                None => return,
            }
            frames.push(number, request.to_parts());
            if !frames.are_many() {
                next = queue.try_recv().ok();
            }
        }
        if frames.send(&mut writer).await.is_err() {
            return;
        }
    }
}

/// Hands out answers until the connection ends.
async fn receive(mut reader: BufReader<Reader>, waiting: &Waiting, heard: &Heard) {
    const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
    while let Ok(Some((number, answer))) = next(&mut reader, FOREVER).await {
        heard.renew();
        let asker = match &mut *waiting.lock().expect("no code panics with this lock held") {
            Some(waiting) => waiting.remove(&number),
            None => return,
        };
        match asker {
            // Who asked may have given up.
            Some(asker) => drop(asker.send(answer)),
            None => return,
        }
    }
}

/// Everybody who waits learns that there will be no answer.
fn lose(waiting: &Waiting) {
    waiting.lock().expect("no code panics with this lock held").take();
}
