//! Sees to it that a guest's write waits for a bounded time only.
//!
//! While a checkpoint is stored, writes put old blocks aside: into memory, then into a file. When both
//! are full, writes wait until storing frees some of it. If storing does not get on meanwhile, because
//! the repository is away, say, the oldest checkpoint fails: the guest's writes go on, and the changes
//! go into the next checkpoint.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::mirror::cut::Progress;

/// How often it is looked at.
const TICK: Duration = Duration::from_millis(50);

/// Starts the thread. `limit` is how long writes may wait while nothing gets on.
pub(crate) fn spawn(device: Arc<Device>, limit: Duration) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name("stall".into()).spawn(move || {
        let mut watch = Watch { limit, stuck: None };
        loop {
            thread::sleep(TICK);
            if !device.mirror.was_short() {
                watch.stuck = None;
                continue;
            }
            // Those that still wait say so again.
            device.mirror.events.notify();
            if watch.look(device.mirror.cut.progress(), Instant::now()) {
                let seconds = limit.as_secs();
                let reason = format!(
                    "the guest's writes waited {seconds} s for room for old blocks and nothing was \
                     stored meanwhile; see whether the repository works, or give more room with \
                     --cow-memory or --cow-disk"
                );
                tracing::error!("{reason}");
                device.mirror.cut.fail_oldest(&reason);
                device.stats.stalls(1);
                device.mirror.events.notify();
            }
        }
    })
}

struct Watch {
    limit: Duration,
    /// How far storing was, and since when.
    stuck: Option<(Progress, Instant)>,
}

impl Watch {
    /// Takes note of writes that wait, and tells whether that has lasted too long.
    fn look(&mut self, progress: Progress, now: Instant) -> bool {
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

    use super::{Progress, Watch};

    #[test]
    fn only_a_standstill_counts() {
        let mut watch = Watch { limit: Duration::from_secs(10), stuck: None };
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let progress = |done| Progress { layers: 1, done };
        assert!(!watch.look(progress(1), at(0)));
        assert!(!watch.look(progress(1), at(9)));
        assert!(!watch.look(progress(2), at(11)), "it got on");
        assert!(!watch.look(progress(2), at(20)));
        assert!(watch.look(progress(2), at(21)));
        assert!(!watch.look(progress(2), at(22)), "the time begins anew");
    }
}
