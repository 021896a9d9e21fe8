//! The gate before which new writes wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

/// Stops a load of one thread, between its requests. It is open at first.
#[derive(Default)]
pub(crate) struct Gate {
    closed: AtomicBool,
    /// Whether the load waits, with nothing in flight.
    waiting: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Returns when nothing is in flight any more.
    pub(crate) fn close(&self) {
        let mut waiting = self.lock();
        self.closed.store(true, Ordering::SeqCst);
        while !*waiting {
            waiting = self.changed.wait(waiting).expect("no code panics with the gate locked");
        }
    }

    pub(crate) fn open(&self) {
        let _waiting = self.lock();
        self.closed.store(false, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// For the load: nothing is in flight.
    pub(super) fn wait_until_open(&self) {
        let mut waiting = self.lock();
        *waiting = true;
        self.changed.notify_all();
        while self.is_closed() {
            waiting = self.changed.wait(waiting).expect("no code panics with the gate locked");
        }
        *waiting = false;
    }

    /// For the load: it has ended, and nothing will be in flight again.
    pub(crate) fn leave(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.waiting.lock().expect("no code panics with the gate locked")
    }
}
