//! Which hypervisor runs the disk's virtqueues.
//!
//! Two hypervisors can be connected at the same time, while a guest migrates from one to the other
//! on this host. The second one prepares itself, and its rings start when the last ring of the
//! first one has stopped.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// How long a hypervisor waits until another one has stopped its rings.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);

/// Identifies a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ConnectionId(pub(crate) u64);

#[derive(Default)]
pub(crate) struct RingOwnership {
    owner: Mutex<Option<ConnectionId>>,
    released: Condvar,
}

impl RingOwnership {
    /// Waits until no other connection runs a ring. Returns whether that happened in time.
    pub(crate) fn acquire(&self, id: ConnectionId) -> bool {
        let owner = self.owner.lock().expect("no code panics with the owner locked");
        let taken = |owner: &mut Option<ConnectionId>| owner.is_some_and(|other| other != id);
        let (mut owner, _) =
            self.released.wait_timeout_while(owner, ACQUIRE_TIMEOUT, taken).expect("as above");
        if taken(&mut owner) {
            return false;
        }
        *owner = Some(id);
        true
    }

    /// Lets another connection run rings, if this one did.
    pub(crate) fn release(&self, id: ConnectionId) {
        let mut owner = self.owner.lock().expect("no code panics with the owner locked");
        if *owner == Some(id) {
            *owner = None;
            self.released.notify_all();
        }
    }
}
