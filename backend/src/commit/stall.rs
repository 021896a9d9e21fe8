//! Limits how long a guest's write waits for copy-on-write space.
//!
//! While a checkpoint is stored, writes preserve old blocks in memory, and then in a file. When
//! both are full, writes wait until storing frees some space. If storing makes no progress, for
//! example because the repository is unavailable, the newest checkpoint that has copies fails. Then the
//! guest's writes go on, and the changes go into the next checkpoint.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::counters::Counters;
use crate::local_disk::LocalDisk;
use crate::mirror::epoch::manager::StoreProgress;

/// How often the thread checks for a stall.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// For how long no write has to report a lack of space until none waits for it any more. A worker
/// needs some time to plan a waiting write again.
const QUIET: Duration = Duration::from_secs(1);

/// Starts the thread. `limit` is how long writes may wait while storing makes no progress.
pub(crate) fn spawn(
    disk: Arc<LocalDisk>,
    counters: Arc<Counters>,
    limit: Duration,
) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name("stall".into()).spawn(move || {
        let mut detector = StallDetector::new(limit);
        loop {
            thread::sleep(POLL_INTERVAL);
            let is_waiting = disk.mirror.take_cow_exhausted();
            if is_waiting {
                // Writes that still wait set the flag again.
                disk.mirror.notify();
            }
            if detector.observe(is_waiting, disk.mirror.store_progress(), Instant::now()) {
                let seconds = limit.as_secs();
                let reason = format!(
                    "the guest's writes waited {seconds} s for space for old blocks, and nothing was \
                     stored meanwhile; check that the repository works, or allow more space with \
                     --cow-memory or --cow-disk"
                );
                tracing::error!("{reason}");
                counters.stalls(1);
                disk.mirror.fail_newest(&reason);
                disk.trim_copies();
            }
        }
    })
}

struct StallDetector {
    limit: Duration,
    /// When a write was last seen to wait.
    waited: Option<Instant>,
    /// The progress that was seen last, and since when it has not changed.
    stuck: Option<(StoreProgress, Instant)>,
}

impl StallDetector {
    fn new(limit: Duration) -> StallDetector {
        StallDetector { limit, waited: None, stuck: None }
    }

    /// Call this all the time, with whether a write was seen to wait since the last call. Returns
    /// whether writes have waited for too long without progress.
    fn observe(&mut self, is_waiting: bool, progress: StoreProgress, now: Instant) -> bool {
        if is_waiting {
            self.waited = Some(now);
        }
        if self.waited.is_none_or(|waited| now.saturating_duration_since(waited) > QUIET) {
            self.stuck = None;
            return false;
        }
        match self.stuck {
            Some((before, since)) if before == progress => {
                let over = now.saturating_duration_since(since) >= self.limit;
                if over {
                    *self = StallDetector::new(self.limit);
                }
                over
            }
            _ => {
                self.stuck = Some((progress, now));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{StallDetector, StoreProgress};

    const LIMIT: Duration = Duration::from_secs(10);

    fn progress(done: u64) -> StoreProgress {
        StoreProgress { ended: 1, done }
    }

    #[test]
    fn only_a_lack_of_progress_is_a_stall() {
        let mut detector = StallDetector::new(LIMIT);
        let start = Instant::now();
        let mut observe = |seconds, progress| {
            detector.observe(true, progress, start + Duration::from_secs(seconds))
        };
        for second in 0..11 {
            assert!(!observe(second, progress(second / 5)), "{second}: there was progress");
        }
        for second in 11..20 {
            assert!(!observe(second, progress(2)), "{second}");
        }
        assert!(observe(20, progress(2)));
        assert!(!observe(21, progress(2)), "the time starts again");
        assert!(!observe(31, StoreProgress { ended: 2, done: 2 }), "a layer has ended");
    }

    #[test]
    fn a_moment_in_which_no_write_is_seen_to_wait_is_no_progress() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut detector = StallDetector::new(LIMIT);
        let stalled = (0..=10_000)
            .step_by(500)
            .find(|millis| detector.observe(millis % 1000 == 0, progress(1), at(*millis)));
        assert_eq!(stalled, Some(10_000));
        // Writes that were seen to wait twice, and not in between, have not waited for so long.
        let mut detector = StallDetector::new(LIMIT);
        assert!(!detector.observe(true, progress(1), at(0)));
        assert!((50..9_990).step_by(50).all(|at_| !detector.observe(false, progress(1), at(at_))));
        assert!(!detector.observe(true, progress(1), at(10_000)));
    }
}
