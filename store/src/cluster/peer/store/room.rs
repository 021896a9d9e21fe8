//! The space that clients reserve on a peer.

use std::sync::{Arc, Mutex, MutexGuard};

use super::PeerStore;
use crate::error::{Error, Result};

/// The space that one client has reserved on a peer. The unused rest is released when this is
/// dropped.
pub struct Room {
    store: Arc<PeerStore>,
    left: Mutex<u64>,
}

impl Room {
    /// Creates an empty reservation.
    pub fn new(store: Arc<PeerStore>) -> Room {
        Room { store, left: Mutex::new(0) }
    }

    /// Sets the reservation to `bytes`. Fails if the peer does not have enough free space; the
    /// previous reservation then stays.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        let capacity = self.store.usage()?.capacity;
        let mut state = self.store.state();
        let mut left = self.left();
        let others = state.used + state.staged_bytes + state.reserved - *left;
        if others.checked_add(bytes).is_none_or(|all| all > capacity) && bytes > *left {
            return Err(Error::PeerFull { path: self.store.directory.clone(), capacity });
        }
        state.reserved = state.reserved - *left + bytes;
        *left = bytes;
        Ok(())
    }

    pub(super) fn left(&self) -> MutexGuard<'_, u64> {
        self.left.lock().expect("no thread panics with the reservation locked")
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let left = *self.left();
        self.store.state().reserved -= left;
    }
}
