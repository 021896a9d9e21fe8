//! The clock by which a peer measures how long a fragment has been idle.
//!
//! It counts the seconds for which the peer has run since its data directory was created, over all
//! processes. The wall clock is not asked: it may be decades late until the network sets it, and
//! then every fragment that was stored before would count as idle for decades.
//!
//! **The clock never overestimates.** A process continues at the time that the table has, which is
//! at most the time at which the previous process ended. Between two readings in one process, the
//! clock advances by the time that has passed. So the difference between now and a stamp is at most
//! the time that has really passed since. After a kill, stamps may be later than the clock: their
//! fragments count as fresh. Time in which the peer does not run does not count either.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The table has a time that is at most this many seconds old after each change of the table.
const SAVE_SECONDS: u64 = 60;

/// Returns the time since a fixed moment of this process.
pub(super) type Elapsed = Box<dyn Fn() -> Duration + Send + Sync>;

/// The time since this call.
pub(super) fn since_now() -> Elapsed {
    let start = Instant::now();
    Box::new(move || start.elapsed())
}

/// The running time of a peer.
pub(super) struct RunningTime {
    /// The seconds of earlier processes.
    base: u64,
    elapsed: Elapsed,
    /// The time in the table.
    saved: AtomicU64,
}

impl RunningTime {
    /// Continues at `base`, which is the time in the table.
    pub(super) fn new(base: u64, elapsed: Elapsed) -> RunningTime {
        RunningTime { base, elapsed, saved: AtomicU64::new(base) }
    }

    /// Seconds for which the peer has run.
    pub(super) fn now(&self) -> u64 {
        self.base.saturating_add((self.elapsed)().as_secs())
    }

    /// The time that the table should get with its next change; `None` if it has a recent one.
    pub(super) fn unsaved(&self) -> Option<u64> {
        let now = self.now();
        (now >= self.saved.load(Ordering::Relaxed).saturating_add(SAVE_SECONDS)).then_some(now)
    }

    /// Notes that the table has this time.
    pub(super) fn set_saved(&self, time: u64) {
        self.saved.fetch_max(time, Ordering::Relaxed);
    }
}
