//! The wall clock, and the clock of lifetimes.

use std::panic::{RefUnwindSafe, UnwindSafe};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::Result;
use crate::process::boot_id;
use crate::sys::time_since_boot;

/// Seconds since 1970, UTC. Somebody may set this clock back or forward at any time.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Returns the time in milliseconds.
pub(crate) trait Now: Fn() -> i64 + Send + Sync + UnwindSafe + RefUnwindSafe {}

impl<F: Fn() -> i64 + Send + Sync + UnwindSafe + RefUnwindSafe> Now for F {}

/// A clock that nobody can set: the time since the boot of this host's kernel. All processes of a
/// host read the same time. Times of different boots cannot be compared.
pub(crate) struct BootClock {
    boot: String,
    now_ms: Box<dyn Now>,
}

impl BootClock {
    /// The clock of this host.
    pub(crate) fn of_this_host() -> Result<BootClock> {
        let now_ms = || i64::try_from(time_since_boot().as_millis()).unwrap_or(i64::MAX);
        Ok(BootClock { boot: boot_id()?, now_ms: Box::new(now_ms) })
    }

    /// A clock that shows what a test wants.
    #[cfg(test)]
    pub(crate) fn of_test(boot: &str, now_ms: impl Now + 'static) -> Self {
        BootClock { boot: boot.into(), now_ms: Box::new(now_ms) }
    }

    /// The id of the boot in which this clock's times count.
    pub(crate) fn boot(&self) -> &str {
        &self.boot
    }

    /// Milliseconds since the boot.
    pub(crate) fn now_ms(&self) -> i64 {
        (self.now_ms)()
    }
}
