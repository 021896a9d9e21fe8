//! Limits the log lines of events that happen as often as a guest wants.

use std::time::{Duration, Instant};

use crate::rate_limit::RateLimit;

/// The interval in which one line is written.
const INTERVAL: Duration = Duration::from_secs(10);

/// Decides which events of one kind are logged.
pub(crate) struct LogLimit {
    limit: RateLimit,
    /// The events since the last line.
    count: u64,
}

impl LogLimit {
    pub(crate) fn new(now: Instant) -> LogLimit {
        LogLimit { limit: RateLimit::new(1, INTERVAL, now), count: 0 }
    }

    /// Counts an event. If a line is due, returns the number of events that it stands for: this one,
    /// and those since the last line.
    pub(crate) fn count(&mut self, now: Instant) -> Option<u64> {
        self.count += 1;
        self.limit.take(now).ok().map(|()| std::mem::take(&mut self.count))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{INTERVAL, LogLimit};

    #[test]
    fn each_event_is_counted_in_one_line() {
        let begin = Instant::now();
        let mut limit = LogLimit::new(begin);
        assert_eq!(limit.count(begin), Some(1));
        let soon = begin + Duration::from_millis(1);
        assert!((0..1000).all(|_| limit.count(soon).is_none()));
        assert_eq!(limit.count(begin + INTERVAL), Some(1001));
        assert_eq!(limit.count(begin + 3 * INTERVAL), Some(1));
    }
}
