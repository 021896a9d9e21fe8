//! A rate limit for the bytes that repair reads and writes.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The longest burst after a pause, in seconds at the full rate.
const BURST_SECONDS: f64 = 0.1;

/// A limit of bytes a second that the tasks of a repair share.
pub(super) struct RateLimiter {
    rate: Option<f64>,
    /// When the bytes that were taken so far are allowed by the rate.
    booked_until: Mutex<Instant>,
}

impl RateLimiter {
    pub(super) fn new(rate: Option<u64>) -> RateLimiter {
        let rate = rate.map(|rate| rate.max(1) as f64);
        RateLimiter { rate, booked_until: Mutex::new(Instant::now()) }
    }

    /// Takes `bytes` bytes. Returns how long to wait until they are allowed.
    pub(super) fn take(&self, bytes: u64) -> Duration {
        let Some(rate) = self.rate else { return Duration::ZERO };
        self.take_seconds(bytes as f64 / rate, Instant::now())
    }

    /// Takes as many bytes as the rate allows in `seconds`. Returns how long to wait before they
    /// are allowed.
    fn take_seconds(&self, seconds: f64, now: Instant) -> Duration {
        let mut booked_until =
            self.booked_until.lock().expect("no code panics with the rate limiter locked");
        let burst = Duration::from_secs_f64(BURST_SECONDS);
        let begin = (*booked_until).max(now.checked_sub(burst).unwrap_or(now));
        *booked_until = begin + Duration::from_secs_f64(seconds.min(1e6));
        begin.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, Instant, RateLimiter};

    #[test]
    fn each_take_delays_the_next_ones() {
        let limiter = RateLimiter::new(Some(1000));
        let start = Instant::now() + Duration::from_secs(10);
        let seconds = |n: f64| Duration::from_secs_f64(n);
        assert_eq!(limiter.take_seconds(1.0, start), Duration::ZERO, "after a pause");
        let wait = limiter.take_seconds(2.0, start);
        assert_eq!(wait, seconds(0.9), "the first take, less the burst");
        assert_eq!(limiter.take_seconds(0.5, start + seconds(1.9)), seconds(1.0));
        // A long pause allows no longer burst than a short one.
        let later = start + seconds(1000.0);
        assert_eq!(limiter.take_seconds(1.0, later), Duration::ZERO);
        assert_eq!(limiter.take_seconds(1.0, later), seconds(0.9));
    }
}
