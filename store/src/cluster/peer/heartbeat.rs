//! A peer's heartbeat: what keeps it a member.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};

use super::PeerStore;
use crate::clock::now;
use crate::cluster::membership::{
    Announcement, HEARTBEAT_INTERVAL, PeerStats, leave, send_heartbeat,
};
use crate::documents::Documents;
use crate::error::{Error, Result};

/// A thread that tells the catalog that a peer is there, until this is dropped. Then the peer is down at once.
pub struct Heartbeat {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    /// Makes the peer a member, and keeps it one. While the catalog is away nothing is wrong with the peer; if
    /// another one is there in its place, which `open` finds, it is a member of that.
    pub fn start(
        mut documents: Arc<dyn Documents>,
        open: impl Fn() -> Result<Arc<dyn Documents>> + Send + 'static,
        who: Announcement,
        store: Arc<PeerStore>,
    ) -> Result<Heartbeat> {
        let (stop, stopped) = channel();
        let run = move || {
            let mut was_well = true;
            loop {
                let told = stats(&store)
                    .and_then(|stats| send_heartbeat(&*documents, &who, &stats, now()));
                match &told {
                    Err(error) if was_well => tracing::warn!(%error, "the catalog cannot be told"),
                    Ok(()) if !was_well => tracing::info!("the catalog is told again"),
                    _ => {}
                }
                was_well = told.is_ok();
                if !was_well && let Ok(new) = open() {
                    documents = new;
                }
                if stopped.recv_timeout(HEARTBEAT_INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
            if let Err(error) = leave(&*documents, &who.id) {
                tracing::debug!(%error, "the catalog was not told of the end");
            }
        };
        let thread = thread::Builder::new().name("heart".into()).spawn(run);
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
    Ok(PeerStats {
        capacity: usage.capacity,
        used: usage.used,
        reserved: usage.reserved,
        fragments: usage.fragments,
        load: load(),
    })
}

/// The kernel's mean over a minute of processes that want to run, times 100.
fn load() -> u64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split(' ').next().and_then(|word| word.parse::<f64>().ok());
    first.map_or(0, |load| (load * 100.0) as u64)
}
