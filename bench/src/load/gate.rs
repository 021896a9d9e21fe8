//! A gate that stops a load.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

/// Stops a load of one thread between its requests. It is initially open.
#[derive(Default)]
pub(crate) struct Gate {
    closed: AtomicBool,
    /// Whether the load waits and has no request in flight.
    waiting: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Closes the gate, and returns when no request is in flight.
    pub(crate) fn close(&self) {
        let mut waiting = self.lock();
        self.closed.store(true, Ordering::SeqCst);
        while !*waiting {
            waiting = self.changed.wait(waiting).expect("no thread panics with the gate locked");
        }
    }

    pub(crate) fn open(&self) {
        let _waiting = self.lock();
        self.closed.store(false, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// The load calls this at a closed gate, when it has no request in flight.
    pub(super) fn wait_until_open(&self) {
        let mut waiting = self.lock();
        *waiting = true;
        self.changed.notify_all();
        while self.is_closed() {
            waiting = self.changed.wait(waiting).expect("no thread panics with the gate locked");
        }
        *waiting = false;
    }

    /// The load calls this at its end. It will have no request in flight again.
    pub(crate) fn leave(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.waiting.lock().expect("no thread panics with the gate locked")
    }
}
