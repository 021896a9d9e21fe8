//! Accepts one hypervisor after the other.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use vhost::vhost_user::{BackendReqHandler, Error};

use super::Handler;
use crate::device::Device;
use crate::worker::Mailbox;

/// Where hypervisors come from.
pub(crate) enum Source {
    /// Each connection is one; the next waits until it ends.
    Listener(UnixListener),
    /// There is just this one.
    Stream(UnixStream),
}

/// The socket to shut down in order to end [`serve`].
#[derive(Clone, Default)]
pub(crate) struct Stop(Arc<Mutex<StopState>>);

#[derive(Default)]
struct StopState {
    stopped: bool,
    listener: Option<UnixListener>,
    stream: Option<UnixStream>,
}

impl Stop {
    fn state(&self) -> std::sync::MutexGuard<'_, StopState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connection there is and accepts no other.
    pub(crate) fn stop(&self) {
        let mut state = self.state();
        state.stopped = true;
        if let Some(listener) = state.listener.take() {
            crate::sys::shutdown(&listener);
        }
        if let Some(stream) = state.stream.take() {
            // Fails when the peer has gone already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Closes the present connection for good: the peer may wait for an answer.
    fn leave(&self) {
        if let Some(stream) = self.state().stream.take() {
            // Fails when the peer has gone already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Remembers the present connection; `false` if it is too late for one.
    fn enter(&self, stream: &UnixStream) -> io::Result<bool> {
        let mut state = self.state();
        state.stream = Some(stream.try_clone()?);
        Ok(!state.stopped)
    }
}

/// Serves hypervisors until stopped, or until the only one has gone.
pub(crate) fn serve(
    source: Source,
    device: &Arc<Device>,
    workers: &[Mailbox],
    queue_size: u16,
    stop: &Stop,
) -> io::Result<()> {
    let listener = match source {
        Source::Stream(stream) => return connection(stream, device, workers, queue_size, stop),
        Source::Listener(listener) => listener,
    };
    stop.state().listener = Some(listener.try_clone()?);
    loop {
        if stop.state().stopped {
            return Ok(());
        }
        match listener.accept() {
            Ok((stream, _)) => {
                if let Err(error) = connection(stream, device, workers, queue_size, stop) {
                    tracing::error!(%error, "a connection could not be served");
                }
            }
            Err(_) if stop.state().stopped => return Ok(()),
            Err(error) => {
                // Out of descriptors, most likely: that may pass.
                tracing::warn!(%error, "a connection could not be accepted");
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Serves one hypervisor until it goes.
fn connection(
    stream: UnixStream,
    device: &Arc<Device>,
    workers: &[Mailbox],
    queue_size: u16,
    stop: &Stop,
) -> io::Result<()> {
    if !stop.enter(&stream)? {
        return Ok(());
    }
    tracing::info!("a hypervisor is connected");
    device.connected.store(true, Ordering::SeqCst);
    let handler = Handler::new(device.clone(), workers.to_vec(), queue_size);
    let handler = Arc::new(Mutex::new(handler));
    let mut requests = BackendReqHandler::from_stream(stream, handler.clone());
    let end = loop {
        match requests.handle_request() {
            Ok(()) => {}
            Err(Error::ReqHandlerError(error)) => break Err(error),
            Err(Error::Disconnected | Error::PartialMessage) => break Ok(()),
            Err(Error::SocketBroken(error) | Error::SocketConnect(error)) => {
                tracing::debug!(%error, "the connection broke");
                break Ok(());
            }
            Err(error) => break Err(io::Error::other(error.to_string())),
        }
    };
    handler.lock().unwrap_or_else(PoisonError::into_inner).stop_all();
    stop.leave();
    device.connected.store(false, Ordering::SeqCst);
    match end {
        Ok(()) => tracing::info!("the hypervisor has disconnected"),
        Err(error) => tracing::error!(%error, "the hypervisor's connection is closed"),
    }
    Ok(())
}
