//! A client's connection to a catalog: many requests at once, answered in any order.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::{CertificateError, Error as TlsError};
use tokio::io::{AsyncWriteExt, BufReader, BufWriter};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::wire::{Answer, MAX_ANSWER, OLDEST, Request, VERSION};
use crate::cluster::protocol as peers;
use crate::documents::background::Trouble;
use crate::error::ErrorKind;
use crate::id::CatalogId;
use crate::net::frames::{PROGRESS, read_body, read_header_within, write};
use crate::net::identity::{Reader, Role, Security, Writer};

/// How long a catalog may take for its first words.
const GREETING: Duration = Duration::from_secs(10);

/// Requests that wait to be sent.
const QUEUE: usize = 16;

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Trouble {
        let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<TlsError>());
        let reason = match tls {
            None => return Trouble::Passing(error.to_string()),
            Some(TlsError::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => "who listens there is no catalog; name the catalog's address".into(),
            Some(TlsError::InvalidMessage(_)) => {
                "who listens there does not speak TLS; is it started with --insecure?".into()
            }
            Some(error) => {
                format!("{error}; use the keys that `cairn keys init` made for its cluster")
            }
        };
        Trouble::Lasting(ErrorKind::Invalid, reason)
    }
}

/// The body of a request, and who waits for its answer.
type Sent = ((u16, Vec<u8>), oneshot::Sender<Answer>);

/// Those who wait for answers, by the number of their request.
type Waiting = Arc<Mutex<Option<HashMap<u64, oneshot::Sender<Answer>>>>>;

/// A connection. When it is lost, every request fails, those under way too.
pub(super) struct Connection {
    catalog: CatalogId,
    requests: mpsc::Sender<Sent>,
    waiting: Waiting,
    task: AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    /// Connects to the catalog that listens at this address.
    pub(super) async fn open(address: &str, security: &Security) -> Result<Connection, Trouble> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        // Where nobody listens, the system may have joined the two ends of this very socket.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(Trouble::Passing("nobody listens there".into()));
        }
        let (reader, writer) = security.connect(stream, Role::Catalog).await?;
        let (mut reader, mut writer) = (BufReader::new(reader), BufWriter::new(writer));
        write(&mut writer, 0, Request::Hello(OLDEST, VERSION).to_body()).await?;
        timeout(PROGRESS, writer.flush()).await.map_err(io::Error::from)??;
        let catalog = greeting(&mut reader).await?;
        let waiting = Waiting::new(Mutex::new(Some(HashMap::new())));
        let (requests, queue) = mpsc::channel(QUEUE);
        let own = waiting.clone();
        let task = tokio::spawn(async move {
            // Both halves go together: one alone would keep the connection.
            tokio::select! {
                () = send(writer, queue, &own) => {}
                () = receive(reader, &own) => {}
            }
            // Everybody who waits learns that there will be no answer.
            lock(&own).take();
        });
        Ok(Connection { catalog, requests, waiting, task: task.abort_handle() })
    }

    /// Which catalog is at the other end.
    pub(super) fn catalog(&self) -> CatalogId {
        self.catalog
    }

    /// Whether it is lost.
    pub(super) fn is_lost(&self) -> bool {
        lock(&self.waiting).is_none()
    }

    /// Ends it, for it has shown to be of no use.
    pub(super) fn end(&self) {
        self.task.abort();
        lock(&self.waiting).take();
    }

    /// The answer to a request.
    pub(super) async fn ask(&self, body: (u16, Vec<u8>)) -> Result<Answer, Trouble> {
        let lost = || Trouble::Passing("the connection is lost".into());
        let (sender, answer) = oneshot::channel();
        self.requests.send((body, sender)).await.map_err(|_| lost())?;
        match answer.await.map_err(|_| lost())? {
            Answer::Failed(kind, reason) => Err(Trouble::Lasting(kind, reason)),
            answer => Ok(answer),
        }
    }
}

fn lock(
    waiting: &Waiting,
) -> std::sync::MutexGuard<'_, Option<HashMap<u64, oneshot::Sender<Answer>>>> {
    waiting.lock().expect("no code panics with this lock held")
}

/// The catalog's first words.
async fn greeting(reader: &mut BufReader<Reader>) -> Result<CatalogId, Trouble> {
    let closed = || {
        let reason =
            "it closes the connection at once; does it expect TLS, or has it too many clients?";
        Trouble::Passing(reason.into())
    };
    let lasting = |reason: &str| Trouble::Lasting(ErrorKind::Invalid, reason.into());
    let header = read_header_within(reader, GREETING, peers::MAX_BODY).await;
    let header = match header {
        Ok(None) => return Err(closed()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Err(closed()),
        Err(error) => return Err(error.into()),
        Ok(Some(header)) => header.map_err(|_| lasting("it does not answer like a catalog"))?,
    };
    let body = read_body(reader, &header).await?;
    match Answer::from_body(header.kind, &body) {
        Ok(Answer::Welcome(version, catalog)) if (OLDEST..=VERSION).contains(&version) => {
            Ok(catalog)
        }
        Ok(Answer::Failed(kind, reason)) => Err(Trouble::Lasting(kind, reason)),
        // A peer says in its own protocol that it does not understand this one.
        Err(_) if peers::Answer::from_body(header.kind, &body).is_ok() => {
            Err(lasting("a peer listens there, not a catalog; name the catalog's address"))
        }
        _ => Err(lasting("it does not answer like a catalog")),
    }
}

/// Sends requests, as many as there are with one system call, until nobody is left who could ask.
async fn send(mut writer: BufWriter<Writer>, mut queue: mpsc::Receiver<Sent>, waiting: &Waiting) {
    let mut number = 0;
    while let Some(first) = queue.recv().await {
        let mut next = Some(first);
        while let Some((body, answer)) = next {
            number += 1;
            match &mut *lock(waiting) {
                Some(waiting) => drop(waiting.insert(number, answer)),
                None => return,
            }
            if write(&mut writer, number, body).await.is_err() {
                return;
            }
            next = queue.try_recv().ok();
        }
        if !matches!(timeout(PROGRESS, writer.flush()).await, Ok(Ok(()))) {
            return;
        }
    }
}

/// Hands out answers until the connection ends.
async fn receive(mut reader: BufReader<Reader>, waiting: &Waiting) {
    const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
    while let Ok(Some(Ok(header))) = read_header_within(&mut reader, FOREVER, MAX_ANSWER).await {
        let Ok(body) = read_body(&mut reader, &header).await else { return };
        let Ok(answer) = Answer::from_body(header.kind, &body) else { return };
        let asker = match &mut *lock(waiting) {
            Some(waiting) => waiting.remove(&header.number),
            None => return,
        };
        match asker {
            // Who asked may have given up.
            Some(asker) => drop(asker.send(answer)),
            None => return,
        }
    }
}
