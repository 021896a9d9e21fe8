//! The heartbeat of a peer, which keeps it up for the rest of the cluster.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::PeerStore;
use crate::clock::now;
use crate::cluster::membership::{
    Announcement, HEARTBEAT_INTERVAL, PeerStats, leave, send_heartbeat,
};
use crate::documents::Documents;
use crate::error::{Error, Result};

/// How long the catalog may take to answer a peer that starts, until the peer logs that it waits.
const LOG_AFTER: Duration = Duration::from_secs(1);

/// Carries out an operation on the catalog at this address. Logs soon that the process waits for it:
/// the operation is tried again for some seconds before it fails.
pub fn log_waiting<T>(catalog: &str, operation: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        let (done, ended) = channel::<()>();
        scope.spawn(move || {
            if ended.recv_timeout(LOG_AFTER) == Err(RecvTimeoutError::Timeout) {
                tracing::warn!("waiting for the catalog at {catalog}, which does not answer");
            }
        });
        let result = operation();
        drop(done);
        result
    })
}

/// A thread that sends a peer's heartbeats to the catalog. When this is dropped, the peer is down
/// at once.
pub struct Heartbeat {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    /// Makes the peer a member of the catalog at this address, and sends its heartbeats. The peer continues while the catalog is
    /// away. After a failure, `open` opens the catalog's address again, and the peer joins whatever
    /// catalog it finds there.
    pub fn start(
        catalog: String,
        mut documents: Arc<dyn Documents>,
        open: impl Fn() -> Result<Arc<dyn Documents>> + Send + 'static,
        announcement: Announcement,
        store: Arc<PeerStore>,
    ) -> Result<Heartbeat> {
        let (stop, stopped) = channel();
        let run = move || {
            let (mut is_first, mut was_sent) = (true, true);
            loop {
                let send = || {
                    let stats = stats(&store)?;
                    send_heartbeat(&*documents, &announcement, &stats, now())
                };
                let sent = match is_first {
                    true => log_waiting(&catalog, send),
                    false => send(),
                };
                is_first = false;
                match &sent {
                    Err(error) if was_sent => {
                        tracing::warn!(%error, "failed to send a heartbeat to the catalog")
                    }
                    Ok(()) if !was_sent => tracing::info!("the catalog receives heartbeats again"),
                    _ => {}
                }
                was_sent = sent.is_ok();
                if !was_sent && let Ok(new) = open() {
                    documents = new;
                }
                if stopped.recv_timeout(HEARTBEAT_INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
            if let Err(error) = leave(&*documents, &announcement.id) {
                tracing::debug!(%error, "failed to remove the heartbeat from the catalog");
            }
        };
        let thread = thread::Builder::new().name("heartbeat".into()).spawn(run);
        let thread = thread.map_err(|e| Error::io("starting", "a thread".as_ref(), e))?;
        Ok(Heartbeat { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn stats(store: &PeerStore) -> Result<PeerStats> {
    let usage = store.usage()?;
    let scrub = store.scrub_status();
    Ok(PeerStats {
        capacity: usage.capacity,
        used: usage.used,
        reserved: usage.reserved,
        fragments: usage.fragments,
        load: load(),
        scrubbed: scrub.scrubbed,
        bad: scrub.bad,
    })
}

/// The kernel's load average over one minute, times 100.
fn load() -> u64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split(' ').next().and_then(|word| word.parse::<f64>().ok());
    first.map_or(0, |load| (load * 100.0) as u64)
}
