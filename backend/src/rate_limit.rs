//! Limits how often a guest may do what costs others.
//!
//! Each checkpoint adds a snapshot to the catalog, for as long as the operator keeps it. Without a
//! limit, one guest could fill the catalog of all. And each query loads the catalog, which serves all
//! disks.

use std::time::{Duration, Instant};

/// A token bucket: it holds `burst` tokens, and gains one in each interval.
pub(crate) struct RateLimit {
    burst: u32,
    interval: Duration,
    /// When the bucket was or will be full.
    full_at: Instant,
}

impl RateLimit {
    /// A full bucket. An interval of zero means that there is no limit.
    pub(crate) fn new(burst: u32, interval: Duration, now: Instant) -> RateLimit {
        RateLimit { burst, interval, full_at: now }
    }

    /// Takes a token. Returns the time until there is one, if there is none.
    pub(crate) fn take(&mut self, now: Instant) -> Result<(), Duration> {
        let full_at = self.full_at.max(now) + self.interval;
        let missing = full_at - now;
        match missing.checked_sub(self.interval * self.burst).filter(|wait| !wait.is_zero()) {
            Some(wait) => Err(wait),
            None => {
                self.full_at = full_at;
                Ok(())
            }
        }
    }

    /// The interval in which one token is gained.
    pub(crate) fn interval(&self) -> Duration {
        self.interval
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::RateLimit;

    const BURST: u32 = 16;
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn after_a_burst_one_token_is_gained_in_each_interval() {
        let begin = Instant::now();
        let mut limit = RateLimit::new(BURST, SECOND, begin);
        for _ in 0..BURST {
            assert_eq!(limit.take(begin), Ok(()));
        }
        assert_eq!(limit.take(begin), Err(SECOND));
        let later = begin + Duration::from_millis(300);
        assert_eq!(limit.take(later), Err(Duration::from_millis(700)), "a refusal takes nothing");
        assert_eq!(limit.take(begin + SECOND), Ok(()));
        assert_eq!(limit.take(begin + SECOND), Err(SECOND));
        let rested = begin + SECOND * 100;
        assert_eq!((0..100).filter(|_| limit.take(rested).is_ok()).count(), BURST as usize);
    }

    #[test]
    fn an_interval_of_zero_is_no_limit() {
        let begin = Instant::now();
        let mut limit = RateLimit::new(BURST, Duration::ZERO, begin);
        assert!((0..1000).all(|_| limit.take(begin).is_ok()));
    }

    proptest! {
        #[test]
        fn no_time_has_more_than_a_burst_and_one_for_each_interval(
            pauses in prop::collection::vec(0u64..3000, 1..200)
        ) {
            let begin = Instant::now();
            let mut limit = RateLimit::new(BURST, SECOND, begin);
            let mut now = begin;
            let mut taken: Vec<Instant> = Vec::new();
            for pause in pauses {
                now += Duration::from_millis(pause);
                match limit.take(now) {
                    Ok(()) => taken.push(now),
                    Err(wait) => prop_assert!(wait <= SECOND),
                }
            }
            for (at, first) in taken.iter().enumerate() {
                for (count, last) in (1u64..).zip(&taken[at..]) {
                    prop_assert!(count <= u64::from(BURST) + (*last - *first).as_secs());
                }
            }
        }
    }
}
