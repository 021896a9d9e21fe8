//! A client's connection to a server: many requests at once, answered in any order.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::sleep;

use super::frame::{Message, OutgoingFrames, READ_AHEAD_BYTES, read_body, read_header};
use super::handshake::{HandshakeError, Protocol, introduce};
use super::identity::{Identity, Reader, Remote, Role, Secured, Security, Writer};
use crate::error::Result;
use crate::id::PeerId;

/// The most requests that wait to be sent.
const QUEUED_REQUESTS: usize = 16;

/// How long a connection stays open without a request. A server closes silent connections later, so
/// no request meets a server that is just closing the connection.
const IDLE_LIMIT: Duration = Duration::from_secs(300);

/// The number of the request on an [`AnswerStream`].
const STREAM_NUMBER: u64 = 1;

/// The kind and the body of an answer.
pub(crate) type RawAnswer = (u16, Bytes);

/// The connection ended, or was closed, before the answer came.
#[derive(Debug)]
pub(crate) struct ConnectionLost;

/// The requests that wait for their answers, by number. `None` when the connection is lost.
type Waiting = Mutex<Option<HashMap<u64, oneshot::Sender<RawAnswer>>>>;

/// A connection. When it is lost, every request fails, including those in flight.
pub(crate) struct Connection {
    server: [u8; 16],
    requests: mpsc::Sender<(Message, oneshot::Sender<RawAnswer>)>,
    shared: Arc<Shared>,
    task: AbortHandle,
}

struct Shared {
    waiting: Waiting,
    opened: Instant,
    /// Milliseconds from `opened` to the last answer.
    last_answer_ms: AtomicU64,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Option<HashMap<u64, oneshot::Sender<RawAnswer>>>> {
        self.waiting.lock().expect("no code panics with this lock held")
    }

    /// The time since the last answer.
    fn silence(&self) -> Duration {
        let last = Duration::from_millis(self.last_answer_ms.load(Ordering::Relaxed));
        self.opened.elapsed().saturating_sub(last)
    }

    /// Returns when no request has been waiting for an answer for `limit`.
    async fn idle(&self, limit: Duration) {
        loop {
            sleep(limit / 4).await;
            let is_waiting = self.waiting().as_ref().is_some_and(|waiting| !waiting.is_empty());
            if !is_waiting && self.silence() >= limit {
                return;
            }
        }
    }

    /// Marks the connection as lost. Every waiting request fails.
    fn lose(&self) {
        self.waiting().take();
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    /// Connects to the server at `address`, which must have this role. Its answers have at most
    /// `max_answer` bytes. A server with the certificate of a peer must be that peer. The connection
    /// ends when the server's certificate is revoked, and when it is idle for minutes.
    pub(crate) async fn open(
        address: &str,
        security: &Security,
        role: Role,
        protocol: &Protocol,
        max_answer: usize,
    ) -> Result<Connection, HandshakeError> {
        let server = (address, security, role, protocol);
        Connection::open_until_idle(server, max_answer, IDLE_LIMIT).await
    }

    async fn open_until_idle(
        (address, security, role, protocol): (&str, &Security, Role, &Protocol),
        max_answer: usize,
        idle_limit: Duration,
    ) -> Result<Connection, HandshakeError> {
        let (reader, writer, remote, server) = connect(address, security, role, protocol).await?;
        let (requests, queue) = mpsc::channel(QUEUED_REQUESTS);
        let shared = Arc::new(Shared {
            waiting: Mutex::new(Some(HashMap::new())),
            opened: Instant::now(),
            last_answer_ms: AtomicU64::new(0),
        });
        let own = shared.clone();
        let task = tokio::spawn(async move {
            // Both halves end together: one alone would keep the connection open.
            tokio::select! {
                () = send(writer, queue, &own) => {}
                () = receive(reader, max_answer, &own) => {}
                () = remote.revoked() => {}
                () = own.idle(idle_limit) => {}
            }
            own.lose();
        });
        Ok(Connection { server, requests, shared, task: task.abort_handle() })
    }

    /// The id of the server.
    pub(crate) fn server(&self) -> [u8; 16] {
        self.server
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.shared.waiting().is_none()
    }

    /// The time since the last answer.
    pub(crate) fn silence(&self) -> Duration {
        self.shared.silence()
    }

    /// Closes the connection.
    pub(crate) fn close(&self) {
        self.task.abort();
        self.shared.lose();
    }

    /// Sends a request and waits for its answer.
    pub(crate) async fn ask(&self, request: Message) -> Result<RawAnswer, ConnectionLost> {
        let (sender, answer) = oneshot::channel();
        self.requests.send((request, sender)).await.map_err(|_| ConnectionLost)?;
        answer.await.map_err(|_| ConnectionLost)
    }
}

/// A connection for one request that has many answers. The server can send another answer when this
/// side has received those before it.
pub(crate) struct AnswerStream {
    server: [u8; 16],
    max_answer: usize,
    reader: BufReader<Reader>,
    writer: Writer,
}

impl AnswerStream {
    /// Connects like [`Connection::open`].
    pub(crate) async fn open(
        address: &str,
        security: &Security,
        role: Role,
        protocol: &Protocol,
        max_answer: usize,
    ) -> Result<AnswerStream, HandshakeError> {
        let (reader, writer, _, server) = connect(address, security, role, protocol).await?;
        Ok(AnswerStream { server, max_answer, reader, writer })
    }

    /// The id of the server.
    pub(crate) fn server(&self) -> [u8; 16] {
        self.server
    }

    /// Sends the request.
    pub(crate) async fn send(&mut self, request: Message) -> io::Result<()> {
        let mut frames = OutgoingFrames::default();
        frames.push(STREAM_NUMBER, request);
        frames.send(&mut self.writer).await
    }

    /// Waits for the next answer, which must begin within `limit`.
    pub(crate) async fn next(&mut self, limit: Duration) -> Result<RawAnswer, ConnectionLost> {
        match read_header(&mut self.reader, limit, self.max_answer).await {
            Ok(Some(Ok(header))) if header.number == STREAM_NUMBER => {
                let body = read_body(&mut self.reader, &header).await;
                body.map(|body| (header.kind, body)).map_err(|_| ConnectionLost)
            }
            _ => Err(ConnectionLost),
        }
    }
}

/// Connects to a server with this role, and performs the handshake. Also returns who the server is,
/// and its id.
async fn connect(
    address: &str,
    security: &Security,
    role: Role,
    protocol: &Protocol,
) -> Result<(BufReader<Reader>, Writer, Remote, [u8; 16]), HandshakeError> {
    let stream = connect_tcp(address).await.map_err(HandshakeError::Io)?;
    let secured = security.connect(stream, role).await.map_err(HandshakeError::Io)?;
    let Secured { reader, mut writer, remote } = secured;
    let mut reader = BufReader::with_capacity(READ_AHEAD_BYTES, reader);
    let server = introduce(&mut reader, &mut writer, protocol).await?;
    if let Some(Identity::Peer(id)) = remote.identity()
        && *id.as_bytes() != server
    {
        let said = PeerId::from_bytes(server);
        let reason = format!("it says that it is {said}, but its certificate is that of {id}");
        return Err(HandshakeError::OtherIdentity(reason));
    }
    Ok((reader, writer, remote, server))
}

async fn connect_tcp(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    // If nothing listens on a local port, the kernel may connect the socket to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::Error::new(io::ErrorKind::ConnectionRefused, "nothing listens there"));
    }
    Ok(stream)
}

/// Sends requests, many with one system call, until no sender is left.
async fn send(
    mut writer: Writer,
    mut queue: mpsc::Receiver<(Message, oneshot::Sender<RawAnswer>)>,
    shared: &Shared,
) {
    let mut number = 0;
    let mut frames = OutgoingFrames::default();
    while let Some(first) = queue.recv().await {
        let mut next = Some(first);
        while let Some((request, answer)) = next.take() {
            // The caller may have given up.
            if answer.is_closed() {
                next = queue.try_recv().ok();
                continue;
            }
            number += 1;
            match &mut *shared.waiting() {
                Some(waiting) => drop(waiting.insert(number, answer)),
                None => return,
            }
            frames.push(number, request);
            if !frames.is_full() {
                next = queue.try_recv().ok();
            }
        }
        if frames.send(&mut writer).await.is_err() {
            return;
        }
    }
}

/// Receives answers and passes them to their callers until the connection ends.
async fn receive(mut reader: BufReader<Reader>, max_answer: usize, shared: &Shared) {
    const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
    while let Ok(Some(Ok(header))) = read_header(&mut reader, FOREVER, max_answer).await {
        let Ok(body) = read_body(&mut reader, &header).await else { return };
        let elapsed = shared.opened.elapsed().as_millis() as u64;
        shared.last_answer_ms.store(elapsed, Ordering::Relaxed);
        let sender = match &mut *shared.waiting() {
            Some(waiting) => waiting.remove(&header.number),
            None => return,
        };
        match sender {
            // The caller may have given up.
            Some(sender) => drop(sender.send((header.kind, body))),
            None => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use tokio::net::TcpListener;
    use tokio::time::sleep;

    use super::Connection;
    use crate::net::frame::{OutgoingFrames, read_body, read_header};
    use crate::net::handshake::{PEER_PROTOCOL, greet};
    use crate::net::identity::{Role, Security};

    const MAX: usize = 1024;
    const LIMIT: Duration = Duration::from_millis(400);

    /// A server that answers each request after `delay`, and never closes a connection.
    async fn serve(listener: TcpListener, delay: Duration) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let (mut reader, mut writer) = stream.split();
        assert!(greet(&mut reader, &mut writer, &PEER_PROTOCOL, &[7; 16]).await.unwrap());
        let mut frames = OutgoingFrames::default();
        while let Ok(Some(Ok(header))) = read_header(&mut reader, 60 * LIMIT, MAX).await {
            let body = read_body(&mut reader, &header).await.unwrap();
            sleep(delay).await;
            frames.push(header.number, (header.kind, vec![body]));
            frames.send(&mut writer).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_client_closes_a_connection_that_is_idle_and_keeps_one_that_waits() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let served = tokio::spawn(serve(listener, 3 * LIMIT));
        let server = (address.as_str(), &Security::INSECURE, Role::Peer, &PEER_PROTOCOL);
        let connection = Connection::open_until_idle(server, MAX, LIMIT).await.unwrap();
        let (kind, body) = connection.ask((9, vec![b"x"[..].into()])).await.unwrap();
        assert_eq!((kind, &body[..]), (9, &b"x"[..]), "a slow answer arrives");
        let begin = Instant::now();
        while !connection.is_lost() {
            assert!(begin.elapsed() < Duration::from_secs(60), "an idle connection stays open");
            sleep(LIMIT / 10).await;
        }
        served.await.unwrap();
    }
}
