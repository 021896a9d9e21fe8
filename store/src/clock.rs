//! The wall clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Seconds since 1970, UTC.
pub fn now() -> u64 {
    since_epoch().as_secs()
}

/// Milliseconds since 1970, UTC.
pub(crate) fn now_ms() -> i64 {
    i64::try_from(since_epoch().as_millis()).unwrap_or(i64::MAX)
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
