//! The control socket of the host and the proxy for the guest. Messages are JSON objects, one per
//! line.
//!
//! Both use the messages of `cairn_agent`; a guest may use fewer of them. The proxy serves only the
//! disk of this process, so a guest cannot name another disk. The time, the line length, the number
//! of connections, and the rates of a guest's checkpoints and of its queries of the catalog are
//! bounded, and no connection can delay the operator's or the disk.

pub(crate) mod catalog_lane;
pub(crate) mod session;

use std::os::unix::net::UnixListener as StdListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{io, thread};

use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::sync::mpsc;

use self::catalog_lane::CatalogLanes;
use crate::commit::Commits;
use crate::counters::Counters;
use crate::grow::Grower;
use crate::guest::GuestState;
use crate::image::Image;
use crate::local_disk::LocalDisk;
use crate::log_limit::LogLimit;
use crate::mirror::epoch::manager::MAX_LAYERS;
use crate::rate_limit::RateLimit;
use crate::sys::VsockListener;
use crate::vhost::server::StopHandle;

/// The most connections of one kind at the same time.
const MAX_CONNECTIONS: usize = 64;

/// The peer of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The operator, through the control socket.
    Host,
    /// The guest, through vsock.
    Guest,
}

/// The sockets on which requests arrive.
#[derive(Default)]
pub(crate) struct Listeners {
    pub(crate) control: Option<StdListener>,
    /// The unix socket to which a hypervisor forwards the guest's vsock connections.
    pub(crate) proxy: Option<StdListener>,
    /// The kernel's vsock, and the context id of the guest that may use it.
    pub(crate) vsock: Option<(VsockListener, u32)>,
}

/// The number of checkpoints that a guest may take at once, after a time without any. As many can wait
/// to become stable, but the last of them only if the operator takes it.
pub(crate) const CHECKPOINT_BURST: u32 = MAX_LAYERS as u32;

/// What is needed to answer requests.
pub(crate) struct ControlContext {
    pub(crate) commits: Arc<Commits>,
    pub(crate) image: Arc<Image>,
    pub(crate) disk: Arc<LocalDisk>,
    pub(crate) guest: Arc<GuestState>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) grower: Arc<Grower>,
    pub(crate) catalog: CatalogLanes,
    /// Whether the guest may mark its snapshots as obsolete.
    pub(crate) guest_may_remove: bool,
    /// The limit of the guest's checkpoints, over all its connections.
    pub(crate) guest_checkpoints: Mutex<RateLimit>,
}

/// Starts the thread that answers requests and handles signals. On a signal it triggers `stop`. From
/// the return of this call on, no signal ends the process uncleanly.
pub(crate) fn spawn(
    listeners: Listeners,
    context: Arc<ControlContext>,
    stop: StopHandle,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let signals = {
        let _runtime = runtime.enter();
        Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        }
    };
    thread::Builder::new().name("control".into()).spawn(move || {
        if let Err(error) = runtime.block_on(run(listeners, context, signals, stop.clone())) {
            tracing::error!(%error, "the control thread failed");
            stop.stop();
        }
    })?;
    Ok(())
}

/// The signals that stop the process.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

async fn run(
    listeners: Listeners,
    context: Arc<ControlContext>,
    mut signals: Signals,
    stop: StopHandle,
) -> io::Result<()> {
    for (listener, origin) in [(listeners.control, Origin::Host), (listeners.proxy, Origin::Guest)]
    {
        if let Some(listener) = listener {
            listener.set_nonblocking(true)?;
            tokio::spawn(accept(UnixListener::from_std(listener)?, origin, context.clone()));
        }
    }
    if let Some((listener, guest)) = listeners.vsock {
        tokio::spawn(accept_vsock(listener, guest, context));
    }
    signals.next().await;
    tracing::info!("stopping");
    stop.stop();
    // A second signal ends the process at once.
    signals.next().await;
    tracing::error!("stopped by a second signal, uncleanly");
    std::process::exit(1);
}

async fn accept(listener: UnixListener, origin: Origin, context: Arc<ControlContext>) {
    let mut slots = Slots::new(origin);
    loop {
        match listener.accept().await {
            Ok((stream, _)) => slots.admit(stream, &context),
            Err(error) => {
                // Most likely the process is out of descriptors: wait until other connections end.
                tracing::warn!(%error, ?origin, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// The kernel's vsock listener accepts connections of all guests. Only the guest of this disk is
/// admitted.
async fn accept_vsock(listener: VsockListener, guest: u32, context: Arc<ControlContext>) {
    let (sender, mut receiver) = mpsc::channel(1);
    // Accepting blocks. The thread ends with the process.
    let accepting = thread::Builder::new().name("vsock".into()).spawn(move || {
        let mut log = LogLimit::new(Instant::now());
        loop {
            match listener.accept() {
                Ok((peer, _)) if peer != guest => {
                    if let Some(count) = log.count(Instant::now()) {
                        tracing::warn!(peer, count, "refused connections of other guests");
                    }
                }
                Ok((_, stream)) => {
                    if sender.blocking_send(stream).is_err() {
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a vsock connection");
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
    });
    if let Err(error) = accepting {
        tracing::error!(%error, "cannot start the vsock thread");
        return;
    }
    let mut slots = Slots::new(Origin::Guest);
    while let Some(stream) = receiver.recv().await {
        match UnixStream::from_std(stream) {
            Ok(stream) => slots.admit(stream, &context),
            Err(error) => tracing::warn!(%error, "cannot use a vsock connection"),
        }
    }
}

/// The connections that one listener may serve at the same time.
struct Slots {
    origin: Origin,
    free: Arc<Semaphore>,
    log: LogLimit,
}

impl Slots {
    fn new(origin: Origin) -> Slots {
        let free = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        Slots { origin, free, log: LogLimit::new(Instant::now()) }
    }

    /// Serves a connection if a slot is free, and closes it otherwise.
    fn admit(&mut self, stream: UnixStream, context: &Arc<ControlContext>) {
        let origin = self.origin;
        let Ok(slot) = self.free.clone().try_acquire_owned() else {
            if let Some(count) = self.log.count(Instant::now()) {
                tracing::warn!(?origin, count, "refused connections: there are too many");
            }
            return;
        };
        let context = context.clone();
        tokio::spawn(async move {
            let _slot = slot;
            if let Err(error) = session::serve(stream, origin, &context).await {
                tracing::debug!(%error, ?origin, "a connection ended");
            }
        });
    }
}
