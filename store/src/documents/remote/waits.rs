//! The requests that wait for a change.
//!
//! ```text
//! one task polls the database ──► folder changed ──► the requests that wait for this folder
//! ```
//!
//! A heartbeat of a peer changes the folder `alive`. It wakes no request that waits for the members.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use crate::documents::SqliteDocuments;

/// How often the server looks for changes by other processes.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The requests that wait.
#[derive(Default)]
pub(super) struct Waits {
    /// For each folder that a request waits for, the revision of the last change that was seen.
    folders: Mutex<HashMap<String, watch::Sender<u64>>>,
    look_now: Notify,
}

impl Waits {
    fn folders(&self) -> MutexGuard<'_, HashMap<String, watch::Sender<u64>>> {
        self.folders.lock().expect("no code panics with this lock held")
    }

    /// Makes the polling task look for changes at once.
    pub(super) fn look_now(&self) {
        self.look_now.notify_one();
    }

    /// Returns when a document in `folder` has changed after `revision`, or after `limit`. Returns
    /// whether one has changed.
    pub(super) async fn wait(&self, folder: &str, revision: u64, limit: Duration) -> bool {
        let mut last = {
            let mut folders = self.folders();
            folders.entry(folder.to_owned()).or_default().subscribe()
        };
        self.look_now();
        timeout(limit, last.wait_for(|last| *last > revision)).await.is_ok()
    }

    /// Polls the database and wakes the requests whose folder has changed. Never returns.
    pub(super) async fn poll(&self, documents: &Arc<SqliteDocuments>) {
        loop {
            self.folders().retain(|_, last| last.receiver_count() > 0);
            if self.folders().is_empty() {
                self.look_now.notified().await;
            }
            let own = documents.clone();
            match tokio::task::spawn_blocking(move || own.folders()).await {
                Ok(Ok(found)) => self.wake(&found),
                Ok(Err(error)) => tracing::warn!(%error, "cannot look for changes"),
                Err(error) => tracing::warn!(%error, "cannot look for changes"),
            }
            // A change by a client of this server is found at once.
            let _ = timeout(POLL_INTERVAL, self.look_now.notified()).await;
        }
    }

    fn wake(&self, found: &HashMap<String, u64>) {
        for (folder, last) in &*self.folders() {
            let revision = found.get(folder).copied().unwrap_or(0);
            last.send_if_modified(|last| std::mem::replace(last, revision) != revision);
        }
    }
}
