//! A proxy between a client and a peer that holds up what the client sends (tests).

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::sync::watch;
use tokio::time::timeout;

use super::protocol::{DELETE, MAX_BODY};
use crate::net::frame::{HEADER, Header};
use crate::testing::own_port;

/// How long an event may take that must come.
const EVENT_TIMEOUT: Duration = Duration::from_secs(60);

/// What a proxy holds up until it is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stall {
    /// Everything, the handshake included.
    All,
    /// Requests to delete.
    Deletions,
}

/// The number of requests that were held up, and how many of these the peer has answered.
type Counts = (u64, u64);

/// A proxy in front of a peer, on a thread of its own. The thread ends with the process.
pub(crate) struct StallingProxy {
    pub(crate) address: String,
    released: watch::Sender<bool>,
    counts: watch::Receiver<Counts>,
}

/// One direction of a connection through the proxy.
struct Direction {
    from: OwnedReadHalf,
    to: OwnedWriteHalf,
    /// The numbers of the connection's requests that were held up.
    stalled: Arc<Mutex<HashSet<u64>>>,
    counts: Arc<watch::Sender<Counts>>,
}

impl StallingProxy {
    pub(crate) fn start(peer: &str, stall: Stall) -> StallingProxy {
        let listener = own_port();
        let address = listener.local_addr().unwrap().to_string();
        listener.set_nonblocking(true).unwrap();
        let (released, release) = watch::channel(false);
        let (counted, counts) = watch::channel((0, 0));
        let (peer, counted) = (peer.to_owned(), Arc::new(counted));
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let proxy = async move {
            let listener = TcpListener::from_std(listener).unwrap();
            while let Ok((client, _)) = listener.accept().await {
                let Ok(peer) = TcpStream::connect(&peer).await else { continue };
                let ((from_client, to_client), (from_peer, to_peer)) =
                    (client.into_split(), peer.into_split());
                let stalled = Arc::<Mutex<HashSet<u64>>>::default();
                let direction = |from, to| {
                    let (stalled, counts) = (stalled.clone(), counted.clone());
                    Direction { from, to, stalled, counts }
                };
                let requests = direction(from_client, to_peer);
                tokio::spawn(requests.forward_requests(stall, release.clone()));
                tokio::spawn(direction(from_peer, to_client).forward_answers());
            }
        };
        thread::spawn(move || runtime.block_on(proxy));
        StallingProxy { address, released, counts }
    }

    /// Lets everything pass from now on, also what was held up.
    pub(crate) fn release(&self) {
        self.released.send_replace(true);
    }

    /// Waits until this many requests were held up.
    pub(crate) async fn wait_for_stalled(&self, count: u64) {
        self.wait_for(|counts| counts.0 >= count).await;
    }

    /// Waits until the peer has answered this many of the requests that were held up.
    pub(crate) async fn wait_for_answers(&self, count: u64) {
        self.wait_for(|counts| counts.1 >= count).await;
    }

    async fn wait_for(&self, has: impl FnMut(&Counts) -> bool) {
        let mut counts = self.counts.clone();
        let waited = timeout(EVENT_TIMEOUT, counts.wait_for(has)).await;
        waited.expect("it happens in time").expect("the proxy runs");
    }
}

impl Direction {
    async fn forward_requests(
        mut self,
        stall: Stall,
        mut release: watch::Receiver<bool>,
    ) -> io::Result<()> {
        loop {
            let (header, frame) = self.read().await?;
            if stall == Stall::All || header.kind == DELETE {
                self.stalled.lock().unwrap().insert(header.number);
                self.counts.send_modify(|counts| counts.0 += 1);
                release.wait_for(|is_released| *is_released).await.map_err(io::Error::other)?;
            }
            self.to.write_all(&frame).await?;
        }
    }

    async fn forward_answers(mut self) -> io::Result<()> {
        loop {
            let (header, frame) = self.read().await?;
            let was_stalled = self.stalled.lock().unwrap().remove(&header.number);
            // The client may be gone. What the peer did counts.
            self.counts.send_modify(|counts| counts.1 += u64::from(was_stalled));
            let _ = self.to.write_all(&frame).await;
        }
    }

    async fn read(&mut self) -> io::Result<(Header, Vec<u8>)> {
        let mut head = [0; HEADER];
        self.from.read_exact(&mut head).await?;
        let header = Header::from_bytes(&head, MAX_BODY).map_err(io::Error::other)?;
        let mut frame = head.to_vec();
        frame.resize(HEADER + header.len, 0);
        self.from.read_exact(&mut frame[HEADER..]).await?;
        Ok((header, frame))
    }
}
