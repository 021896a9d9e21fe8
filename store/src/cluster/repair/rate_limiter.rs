//! Not faster than allowed.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How much may be done at once after a time of rest.
const BURST: f64 = 0.1;

/// A limit for bytes per second, shared by all who take some.
pub(super) struct RateLimiter {
    rate: Option<f64>,
    /// When all that was taken is paid for.
    paid: Mutex<Instant>,
}

impl RateLimiter {
    pub(super) fn new(rate: Option<u64>) -> RateLimiter {
        let rate = rate.map(|rate| rate.max(1) as f64);
        RateLimiter { rate, paid: Mutex::new(Instant::now()) }
    }

    /// Takes so many bytes. Returns how long to wait until they are allowed.
    pub(super) fn take(&self, bytes: u64) -> Duration {
        let Some(rate) = self.rate else { return Duration::ZERO };
        self.book(bytes as f64 / rate, Instant::now())
    }

    /// Books what takes so many seconds. Returns how long to wait before it is begun.
    fn book(&self, seconds: f64, now: Instant) -> Duration {
        let mut paid = self.paid.lock().expect("no code panics with the pace locked");
        let burst = Duration::from_secs_f64(BURST);
        let begin = (*paid).max(now.checked_sub(burst).unwrap_or(now));
        *paid = begin + Duration::from_secs_f64(seconds.min(1e6));
        begin.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, Instant, RateLimiter};

    #[test]
    fn what_is_taken_is_paid_for_by_those_who_come_later() {
        let throttle = RateLimiter::new(Some(1000));
        let start = Instant::now() + Duration::from_secs(10);
        let seconds = |n: f64| Duration::from_secs_f64(n);
        assert_eq!(throttle.book(1.0, start), Duration::ZERO, "after a rest");
        let wait = throttle.book(2.0, start);
        assert_eq!(wait, seconds(0.9), "less what a rest allows");
        assert_eq!(throttle.book(0.5, start + seconds(1.9)), seconds(1.0));
        // A long rest allows no more than a short one.
        let later = start + seconds(1000.0);
        assert_eq!(throttle.book(1.0, later), Duration::ZERO);
        assert_eq!(throttle.book(1.0, later), seconds(0.9));
    }
}
