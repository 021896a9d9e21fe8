//! Documents that expire, and that this process renews: those of commits and readers.
//!
//! One thread renews all of them. It ends when there is none, and starts again with the next one.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::catalog::{Catalog, LEASED_SECONDS};
use crate::documents::Documents;
use crate::error::{Error, Result};
use crate::id::LeaseId;
use crate::sys;

/// The interval between two renewals.
const RENEW_INTERVAL: Duration = Duration::from_secs(LEASED_SECONDS as u64 / 10);

/// How long the drop of a repository waits for the renewal that is under way. A catalog may not answer.
const END_LIMIT: Duration = Duration::from_secs(2);

/// The leases of a repository's handles. When they are dropped, no thread uses the catalog any more.
pub(crate) struct Leases {
    shared: Arc<Shared>,
    /// The thread that renews, or has renewed.
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    catalog: Catalog,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    /// The keys of the documents, and whether each of them has not expired since it was created.
    held: HashMap<String, bool>,
    is_running: bool,
}

/// A document that is renewed until this is dropped, which removes it.
pub(crate) struct Lease {
    shared: Arc<Shared>,
    id: LeaseId,
    key: String,
}

impl Leases {
    pub(crate) fn new(documents: Arc<dyn Documents>) -> Leases {
        let (catalog, state, wake) = (Catalog::new(documents), Mutex::default(), Condvar::new());
        Leases { shared: Arc::new(Shared { catalog, state, wake }), thread: Mutex::default() }
    }

    /// Renews the document that `create` has just created. `key` is the key for its id.
    pub(crate) fn hold<T>(
        &self,
        key: fn(&LeaseId) -> String,
        create: impl FnOnce(&Catalog, &LeaseId) -> Result<T>,
    ) -> Result<(Lease, T)> {
        let random = sys::random().map_err(|e| Error::io("reading", "/dev/urandom".as_ref(), e))?;
        let id = LeaseId::from_bytes(random);
        let lease = Lease { shared: Arc::clone(&self.shared), key: key(&id), id };
        let created = create(&self.shared.catalog, &id)?;
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.shared.state();
        state.held.insert(lease.key.clone(), true);
        if !state.is_running {
            let shared = Arc::clone(&self.shared);
            let started =
                thread::Builder::new().name("leases".into()).spawn(move || shared.renew());
            let started = started.map_err(|e| Error::io("starting", "a thread".as_ref(), e))?;
            // The one before has left its loop.
            *thread = Some(started);
            state.is_running = true;
        }
        drop(state);
        Ok((lease, created))
    }

    /// Renews all documents at once.
    #[cfg(test)]
    pub(super) fn renew_all(&self) {
        self.shared.renew_all();
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        // Whoever holds a lease holds the repository: all of them have ended.
        self.shared.state().held.clear();
        self.shared.wake.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(thread) = thread else { return };
        let end = Instant::now() + END_LIMIT;
        while !thread.is_finished() && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Renews all documents until there are none.
    fn renew(&self) {
        let mut state = self.state();
        loop {
            let has_some = |state: &mut State| !state.held.is_empty();
            let waited = self.wake.wait_timeout_while(state, RENEW_INTERVAL, has_some);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.held.is_empty() {
                state.is_running = false;
                return;
            }
            drop(state);
            self.renew_all();
            state = self.state();
        }
    }

    fn renew_all(&self) {
        let held: Vec<String> = {
            let state = self.state();
            let held = state.held.iter().filter(|(_, is_held)| **is_held);
            held.map(|(key, _)| key.clone()).collect()
        };
        for key in held {
            match self.catalog.renew_leased(&key) {
                Ok(true) => {}
                Ok(false) => {
                    if let Some(is_held) = self.state().held.get_mut(&key) {
                        *is_held = false;
                    }
                }
                // The next renewal is early enough.
                Err(error) => tracing::debug!(%key, %error, "failed to renew a lease"),
            }
        }
    }
}

impl Lease {
    pub(crate) fn id(&self) -> &LeaseId {
        &self.id
    }

    /// Whether the document has not expired, as far as this process knows.
    pub(crate) fn is_held(&self) -> bool {
        self.shared.state().held.get(&self.key).copied().unwrap_or(false)
    }

    /// Creates the document again, which has expired. It is renewed from then on.
    pub(crate) fn create_again<T>(
        &self,
        create: impl FnOnce(&Catalog, &LeaseId) -> Result<T>,
    ) -> Result<T> {
        let created = create(&self.shared.catalog, &self.id)?;
        self.shared.state().held.insert(self.key.clone(), true);
        Ok(created)
    }

    /// Notes that the document was removed, together with another change.
    pub(crate) fn note_removed(&self) {
        self.shared.state().held.remove(&self.key);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let is_there = self.shared.state().held.remove(&self.key).is_some();
        self.shared.wake.notify_all();
        // If this fails, the document expires.
        if is_there && let Err(error) = self.shared.catalog.end_leased(&self.key) {
            tracing::debug!(key = %self.key, %error, "failed to end a lease");
        }
    }
}
