//! Accepts hypervisors, one after the other, or two while a guest migrates.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use vhost::vhost_user::{BackendReqHandler, Error};

use super::file_closer::FileCloser;
use super::{Handler, is_refusal, skip_drain};
use crate::guest::GuestState;
use crate::guest::ring_ownership::ConnectionId;
use crate::local_disk::LocalDisk;
use crate::sys::{self, UnixSocket};
use crate::worker::{Mailbox, ParkedRequests};

/// The most connections that are served at the same time. A further one waits until one ends.
const MAX_CONNECTIONS: usize = 2;

/// Ends [`serve`]: it has the sockets to shut down.
#[derive(Clone, Default)]
pub(crate) struct StopHandle(Arc<(Mutex<ConnectionTable>, Condvar)>);

#[derive(Default)]
struct ConnectionTable {
    stopped: bool,
    listener: Option<UnixListener>,
    streams: HashMap<u64, UnixStream>,
    next_id: u64,
}

impl StopHandle {
    fn state(&self) -> MutexGuard<'_, ConnectionTable> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all connections, and accepts no more.
    pub(crate) fn stop(&self) {
        let mut state = self.state();
        state.stopped = true;
        if let Some(listener) = state.listener.take() {
            sys::shutdown(&listener);
        }
        for stream in state.streams.values() {
            // Fails if the peer has gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.0.1.notify_all();
    }

    /// Waits until one more connection can be served. Returns `false` if no more are accepted.
    fn await_slot(&self) -> bool {
        let full =
            |state: &mut ConnectionTable| !state.stopped && state.streams.len() >= MAX_CONNECTIONS;
        let state = self.0.1.wait_while(self.state(), full);
        !state.unwrap_or_else(PoisonError::into_inner).stopped
    }

    /// Adds a connection. Returns `None` if no more are accepted.
    fn enter(&self, stream: &UnixStream) -> io::Result<Option<ConnectionId>> {
        let mut state = self.state();
        if state.stopped {
            return Ok(None);
        }
        let id = state.next_id;
        state.next_id += 1;
        state.streams.insert(id, stream.try_clone()?);
        Ok(Some(ConnectionId(id)))
    }

    /// Closes a connection, because the peer may wait for an answer.
    fn leave(&self, id: ConnectionId) {
        if let Some(stream) = self.state().streams.remove(&id.0) {
            // Fails if the peer has gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.0.1.notify_all();
    }
}

/// Serves hypervisors until it is stopped, or until the only one has gone.
pub(crate) fn serve(
    socket: UnixSocket,
    (disk, guest): (&Arc<LocalDisk>, &Arc<GuestState>),
    workers: &[Mailbox],
    queue_size: u16,
    stop: &StopHandle,
) -> io::Result<()> {
    let closer = FileCloser::start()?;
    let handler = |id, migratable| {
        let shared = (disk.clone(), guest.clone());
        Handler::new(id, migratable, shared, workers.to_vec(), queue_size, closer.clone())
    };
    let listener = match socket {
        UnixSocket::Stream(stream) => {
            if let Some(id) = stop.enter(&stream)? {
                connection(stream, id, handler(id, false), guest, stop);
            }
            return Ok(());
        }
        UnixSocket::Listener(listener) => listener,
    };
    stop.state().listener = Some(listener.try_clone()?);
    thread::scope(|scope| {
        while stop.await_slot() {
            let accepted = listener
                .accept()
                .and_then(|(stream, _)| Ok(stop.enter(&stream)?.map(|id| (stream, id))));
            let spawned = match accepted {
                Ok(Some((stream, id))) => {
                    let handler = handler(id, true);
                    let serve = move || connection(stream, id, handler, guest, stop);
                    let spawned =
                        thread::Builder::new().name("vhost".into()).spawn_scoped(scope, serve);
                    spawned.map(drop).inspect_err(|_| stop.leave(id))
                }
                Ok(None) => return,
                Err(_) if stop.state().stopped => return,
                Err(error) => Err(error),
            };
            if let Err(error) = spawned {
                // Most likely the process is out of descriptors or threads, which is transient.
                tracing::warn!(%error, "cannot accept a connection");
                thread::sleep(Duration::from_millis(100));
            }
        }
    });
    Ok(())
}

/// Serves one hypervisor until it disconnects.
fn connection(
    stream: UnixStream,
    id: ConnectionId,
    handler: Handler,
    guest: &GuestState,
    stop: &StopHandle,
) {
    tracing::info!("a hypervisor is connected");
    guest.connection_opened();
    let handler = Arc::new(Mutex::new(handler));
    let lock = || handler.lock().unwrap_or_else(PoisonError::into_inner);
    let peer = stream.try_clone();
    let mut requests = BackendReqHandler::from_stream(stream, handler.clone());
    let end = loop {
        let handled = match &peer {
            Ok(peer) if skip_drain::is_next(peer) => skip_drain::serve(peer, &mut lock()),
            Ok(peer) => {
                guest.config_channels.watch(id, peer);
                requests.handle_request()
            }
            Err(error) => break Err(io::Error::new(error.kind(), error.to_string())),
        };
        match handled {
            Ok(()) => {}
            Err(error) if is_refusal(&error) => tracing::debug!(%error, "a message is refused"),
            Err(Error::ReqHandlerError(error)) => break Err(error),
            Err(Error::Disconnected | Error::PartialMessage) => break Ok(()),
            Err(Error::SocketBroken(error) | Error::SocketConnect(error)) => {
                tracing::debug!(%error, "the connection broke");
                break Ok(());
            }
            Err(error) => break Err(io::Error::other(error.to_string())),
        }
    };
    lock().stop_all(ParkedRequests::Leave);
    guest.config_channels.remove(id);
    guest.connection_closed();
    stop.leave(id);
    match end {
        Ok(()) => tracing::info!("the hypervisor has disconnected"),
        Err(error) => tracing::error!(%error, "the hypervisor's connection is closed"),
    }
}
