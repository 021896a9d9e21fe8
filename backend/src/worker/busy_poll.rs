//! Polls for the guest's next request instead of sleeping, for as long as that is effective.
//!
//! A guest that sends one request after the other is quick with the next one. A worker that is
//! awake when it comes saves two context switches. If the guest takes longer than the limit,
//! polling gains nothing. So the worker polls only after a request that came within the limit.

use std::time::{Duration, Instant};

/// The number of polls between two readings of the clock.
const SPINS_PER_CLOCK_READ: u32 = 32;

pub(super) struct BusyPoll {
    limit: Duration,
    /// Whether the last request came within the limit.
    is_effective: bool,
    /// The time when the worker last ran out of work.
    since: Option<Instant>,
}

impl BusyPoll {
    /// Polls for at most `limit`, and not at all if that is zero.
    pub(super) fn new(limit: Duration) -> BusyPoll {
        BusyPoll { limit, is_effective: false, since: None }
    }

    /// Whether to poll. If not, the time until the next kick tells whether polling would have been
    /// effective.
    pub(super) fn is_wanted(&mut self) -> bool {
        if self.limit.is_zero() {
            return false;
        }
        if !self.is_effective {
            self.since = Some(Instant::now());
        }
        self.is_effective
    }

    /// Polls until `is_there` returns true, or until the limit.
    pub(super) fn run(&mut self, mut is_there: impl FnMut() -> bool) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..SPINS_PER_CLOCK_READ {
                if is_there() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= self.limit {
                self.is_effective = false;
                self.since = Some(start);
                return false;
            }
        }
    }

    /// Handles a kick of the guest.
    pub(super) fn kicked(&mut self, now: Instant) {
        if let Some(since) = self.since.take() {
            self.is_effective = now.saturating_duration_since(since) < self.limit;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::BusyPoll;

    #[test]
    fn it_looks_only_while_that_pays() {
        let limit = Duration::from_millis(1);
        let mut poll = BusyPoll::new(limit);
        assert!(!poll.is_wanted(), "nothing is known yet");
        poll.kicked(Instant::now());
        assert!(poll.is_wanted(), "the guest was quick");
        assert!(poll.run(|| true));
        assert!(poll.is_wanted());
        assert!(!poll.run(|| false));
        assert!(!poll.is_wanted(), "the guest was slow");
        poll.kicked(Instant::now() + Duration::from_secs(1));
        assert!(!poll.is_wanted(), "and still is");
        assert!(!BusyPoll::new(Duration::ZERO).is_wanted());
    }
}
