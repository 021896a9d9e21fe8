//! How those who wait learn that planning again may succeed.
//!
//! Nobody waits for a particular thing. A worker that parked requests, and a thread that waits in the
//! background, are woken by any event and look again. An event is cheap while nobody waits.
//!
//! No wake-up is lost: a worker reads the event count, plans, finds that it must wait, raises its
//! flag, and sleeps only if the count is still the same; an event raises the count first and looks at
//! the flags then. With sequential consistency one of the two sees the other.

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
    /// Events for workers that each have a way to be woken.
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

    /// How many events there were. Read before planning.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// Something changed that somebody may wait for.
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

    /// Whether worker `index` may sleep: no event since it read `seen`. If so its wake-up will be
    /// called at the next event.
    pub(crate) fn may_sleep(&self, index: usize, seen: u64) -> bool {
        self.workers[index].waits.store(true, Ordering::SeqCst);
        self.count() == seen
    }

    /// Blocks a background thread until there was an event since `seen`, or `limit` has passed.
    pub(crate) fn wait(&self, seen: u64, limit: Duration) {
        self.threads.fetch_add(1, Ordering::SeqCst);
        let guard = self.lock.lock().expect("no code panics with the event lock held");
        if self.count() == seen {
            drop(self.changed.wait_timeout(guard, limit).expect("as above"));
        }
        self.threads.fetch_sub(1, Ordering::SeqCst);
    }
}
