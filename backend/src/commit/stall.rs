//! Limits how long a guest's write waits for copy-on-write space.
//!
//! While a checkpoint is stored, writes preserve old blocks in memory, and then in a file. When
//! both are full, writes wait until storing frees some space. If storing makes no progress, for
//! example because the repository is unavailable, the oldest checkpoint fails. Then the guest's
//! writes go on, and the changes go into the next checkpoint.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::counters::Counters;
use crate::local_disk::LocalDisk;
use crate::mirror::epoch::manager::StoreProgress;

/// How often the thread checks for a stall.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Starts the thread. `limit` is how long writes may wait while storing makes no progress.
pub(crate) fn spawn(
    disk: Arc<LocalDisk>,
    counters: Arc<Counters>,
    limit: Duration,
) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name("stall".into()).spawn(move || {
        let mut detector = StallDetector { limit, stuck: None };
        loop {
            thread::sleep(POLL_INTERVAL);
            if !disk.mirror.take_cow_exhausted() {
                detector.stuck = None;
                continue;
            }
            // Writes that still wait set the flag again.
            disk.mirror.notify();
            if detector.observe(disk.mirror.store_progress(), Instant::now()) {
                let seconds = limit.as_secs();
                let reason = format!(
                    "the guest's writes waited {seconds} s for space for old blocks, and nothing was \
                     stored meanwhile; check that the repository works, or allow more space with \
                     --cow-memory or --cow-disk"
                );
                tracing::error!("{reason}");
                counters.stalls(1);
                disk.mirror.fail_oldest(&reason);
                disk.trim_copies();
            }
        }
    })
}

struct StallDetector {
    limit: Duration,
    /// The progress that was seen last, and since when it has not changed.
    stuck: Option<(StoreProgress, Instant)>,
}

impl StallDetector {
    /// Call this while writes wait. Returns whether there was no progress for too long.
    fn observe(&mut self, progress: StoreProgress, now: Instant) -> bool {
        match self.stuck {
            Some((before, since)) if before == progress => {
                let over = now.saturating_duration_since(since) >= self.limit;
                if over {
                    self.stuck = None;
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

    #[test]
    fn only_a_lack_of_progress_is_a_stall() {
        let mut detector = StallDetector { limit: Duration::from_secs(10), stuck: None };
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let progress = |done| StoreProgress { layers: 1, done };
        assert!(!detector.observe(progress(1), at(0)));
        assert!(!detector.observe(progress(1), at(9)));
        assert!(!detector.observe(progress(2), at(11)), "there was progress");
        assert!(!detector.observe(progress(2), at(20)));
        assert!(detector.observe(progress(2), at(21)));
        assert!(!detector.observe(progress(2), at(22)), "the time starts again");
    }
}
