//! Events: how waiting threads learn that planning again may succeed.
//!
//! Nobody waits for a particular event. Any event wakes the workers that have parked requests and
//! the background threads that wait, and they check again. An event is cheap while nobody waits.
//!
//! No wake-up is lost. A worker reads the event count, plans, finds that it must wait, sets its
//! flag, and sleeps only if the count is unchanged. An event increments the count first and checks
//! the flags after that. With sequential consistency at least one of the two sees the other.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// Called to wake a sleeping worker.
pub(crate) type Wake = Box<dyn Fn() + Send + Sync>;

struct Sleeper {
    waits: AtomicBool,
    wake: Wake,
}

/// The events of one mirror.
pub(crate) struct Events {
    count: AtomicU64,
    workers: Vec<Sleeper>,
    threads: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Events {
    /// `workers` has the wake-up function of each worker.
    pub(crate) fn new(workers: Vec<Wake>) -> Events {
        let workers = workers
            .into_iter()
            .map(|wake| Sleeper { waits: AtomicBool::new(false), wake })
            .collect();
        Events {
            count: AtomicU64::new(0),
            workers,
            threads: AtomicUsize::new(0),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// The number of events so far. Read it before planning.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// Signals an event: something changed that somebody may wait for.
    pub(crate) fn notify(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        for worker in &self.workers {
            if worker.waits.load(Ordering::SeqCst) && worker.waits.swap(false, Ordering::SeqCst) {
                (worker.wake)();
            }
        }
        if self.threads.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().expect("no code panics with the event lock held"));
            self.changed.notify_all();
        }
    }

    /// Whether worker `index` may sleep, because there was no event since it read `seen`. If so,
    /// the next event calls its wake-up function.
    pub(crate) fn may_sleep(&self, index: usize, seen: u64) -> bool {
        self.workers[index].waits.store(true, Ordering::SeqCst);
        self.count() == seen
    }

    /// Blocks a background thread until there is an event after `seen`, or until `limit` has
    /// passed.
    pub(crate) fn wait(&self, seen: u64, limit: Duration) {
        self.threads.fetch_add(1, Ordering::SeqCst);
        let guard = self.lock.lock().expect("no code panics with the event lock held");
        if self.count() == seen {
            drop(self.changed.wait_timeout(guard, limit).expect("as above"));
        }
        self.threads.fetch_sub(1, Ordering::SeqCst);
    }
}
