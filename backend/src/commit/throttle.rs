//! Limits how fast checkpoints are stored, so that the guest comes first.
//!
//! While the guest is idle, checkpoints are stored at full speed. While the guest's queues are
//! busy, storing does one operation of one chunk at a time. Going slower would not help: the longer
//! storing takes, the more writes of the guest have to make copies. `--commit-rate` limits the rate
//! in either case.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::counters::Counters;

/// A guest that has sent nothing for this long is idle.
const GUEST_IDLE_AFTER: Duration = Duration::from_millis(5);

/// The longest time for which a limited rate may be exceeded.
const MAX_BURST: Duration = Duration::from_millis(100);

pub(crate) struct CommitThrottle {
    /// Bytes per second; 0 means no limit.
    rate: u64,
    /// The time at which the bytes that were admitted so far are within the rate.
    due: Mutex<Option<Instant>>,
    guest: Mutex<Guest>,
    /// Held by the one operation that uses the disk while the guest is busy.
    exclusive: Mutex<()>,
}

/// What was last seen of the guest.
struct Guest {
    requests: u64,
    active: Option<Instant>,
}

impl CommitThrottle {
    /// Limits the rate to `rate` bytes per second, or not at all if `rate` is 0.
    pub(crate) fn new(rate: u64) -> CommitThrottle {
        let guest = Guest { requests: 0, active: None };
        CommitThrottle {
            rate,
            due: Mutex::default(),
            guest: Mutex::new(guest),
            exclusive: Mutex::default(),
        }
    }

    /// Admits `bytes` more bytes. Returns how long the caller has to wait before it stores them.
    pub(crate) fn delay(&self, bytes: u64) -> Duration {
        if self.rate == 0 {
            return Duration::ZERO;
        }
        let now = Instant::now();
        let mut due = lock(&self.due);
        let from = due.map_or(now, |due| due.max(now - MAX_BURST));
        *due = Some(from + Duration::from_secs_f64(bytes as f64 / self.rate as f64));
        from.saturating_duration_since(now)
    }

    /// Whether the guest is using its disk.
    pub(crate) fn is_guest_busy(&self, counters: &Counters) -> bool {
        let (requests, in_flight) = counters.load();
        let now = Instant::now();
        let mut guest = lock(&self.guest);
        if in_flight > 0 || guest.requests != requests {
            guest.requests = requests;
            guest.active = Some(now);
        }
        guest.active.is_some_and(|active| now.duration_since(active) < GUEST_IDLE_AFTER)
    }

    /// Runs an operation on the disk. While the guest is busy, only one operation runs at a time.
    pub(crate) fn run<T>(&self, counters: &Counters, operation: impl FnOnce() -> T) -> T {
        if !self.is_guest_busy(counters) {
            return operation();
        }
        let _exclusive = lock(&self.exclusive);
        operation()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics with a lock of the throttle held")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{CommitThrottle, GUEST_IDLE_AFTER};
    use crate::counters::{Class, Counters};

    #[test]
    fn a_rate_is_kept_over_time_with_a_short_burst() {
        let throttle = CommitThrottle::new(1_000_000);
        let (begin, mut delay) = (Instant::now(), Duration::ZERO);
        for _ in 0..10 {
            delay = throttle.delay(1_000_000);
        }
        // Time that has passed meanwhile counts.
        let end = delay + begin.elapsed();
        assert!(delay.as_secs_f64() <= 9.01 && end.as_secs_f64() >= 8.8, "{delay:?}, {end:?}");
        assert_eq!(CommitThrottle::new(0).delay(u64::MAX), Duration::ZERO);
    }

    #[test]
    fn a_guest_is_busy_with_requests_under_way_and_shortly_after() {
        let (throttle, counters) = (CommitThrottle::new(0), Counters::new(1));
        assert!(!throttle.is_guest_busy(&counters));
        counters.queues[0].taken.add(1);
        assert!(throttle.is_guest_busy(&counters));
        std::thread::sleep(2 * GUEST_IDLE_AFTER);
        assert!(throttle.is_guest_busy(&counters), "it still waits");
        let begin = Instant::now();
        counters.queues[0].answer(Class::Read, Duration::ZERO);
        assert!(throttle.is_guest_busy(&counters) || begin.elapsed() >= GUEST_IDLE_AFTER);
        std::thread::sleep(2 * GUEST_IDLE_AFTER);
        assert!(!throttle.is_guest_busy(&counters));
    }
}
