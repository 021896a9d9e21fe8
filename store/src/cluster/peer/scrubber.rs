//! The thread that scrubs a peer's fragments, so slowly that nobody notices.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::PeerStore;
use super::store::{ScrubPause, ScrubRound};
use crate::clock::now;
use crate::error::{Error, Result};

/// The interval in which all fragments are read once, unless it is set otherwise.
pub const DEFAULT_SCRUB_INTERVAL: Duration = Duration::from_secs(14 * 24 * 3600);

/// A round that is late reads at most this many times as fast as one that is not.
const MAX_HURRY: f64 = 4.0;

/// The longest time for which a step waits for requests to end.
const MAX_PATIENCE: Duration = Duration::from_millis(200);

/// How often the progress is saved. After a kill, what was read since is read again.
const SAVE_INTERVAL: Duration = Duration::from_secs(60);

/// The pause after a failure of the table.
const RETRY_PAUSE: Duration = Duration::from_secs(60);

/// A thread that reads and verifies all fragments of a peer once in an interval. It ends when this
/// is dropped.
pub struct Scrubber {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Scrubber {
    /// Starts the thread. It continues the round that an earlier process began.
    pub fn start(store: Arc<PeerStore>, interval: Duration) -> Result<Scrubber> {
        let (stop, stopped) = channel::<()>();
        let run = move || {
            let pause =
                |time: Duration| stopped.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
            scrub(&store, interval, &pause);
        };
        let thread = thread::Builder::new().name("scrub".into()).spawn(run);
        let thread = thread.map_err(|e| Error::io("starting", "a thread".as_ref(), e))?;
        Ok(Scrubber { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Scrubber {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Scrubs until `pause` says to stop.
fn scrub(store: &PeerStore, interval: Duration, pause: ScrubPause<'_>) {
    let mut saved = Instant::now();
    loop {
        let wait = step(store, interval, pause).unwrap_or_else(|error| {
            tracing::warn!(%error, "the scrub failed; will retry");
            RETRY_PAUSE
        });
        if saved.elapsed() >= SAVE_INTERVAL {
            save(store);
            saved = Instant::now();
        }
        if !pause(wait) {
            break;
        }
    }
    save(store);
}

fn save(store: &PeerStore) {
    if let Err(error) = store.save_scrub() {
        tracing::warn!(%error, "failed to save the progress of the scrub");
    }
}

/// Begins a round if one is due, and reads the next fragments. Returns the pause until the next
/// step.
fn step(store: &PeerStore, interval: Duration, pause: ScrubPause<'_>) -> Result<Duration> {
    let round = match store.scrub_round() {
        Some(round) if !round.is_over => round,
        last => {
            let wait = last.map_or(Duration::ZERO, |last| until_next(&last, now(), interval));
            if !wait.is_zero() {
                return Ok(wait);
            }
            store.begin_scrub(now())?;
            return Ok(Duration::ZERO);
        }
    };
    let patience = pace(&round, now(), interval, 1 << 20).min(MAX_PATIENCE);
    let bytes = store.scrub_step(now(), patience, pause)?;
    Ok(pace(&round, now(), interval, bytes))
}

/// The time until the round after a finished one begins. A wall clock that was set back does not
/// delay it by more than an interval.
fn until_next(last: &ScrubRound, now: u64, interval: Duration) -> Duration {
    match now.checked_sub(last.started) {
        Some(since) => interval.saturating_sub(Duration::from_secs(since)),
        None => interval,
    }
}

/// The pause after `bytes` were read, so that the round ends when its interval does. A late round
/// catches up, but not at any speed. A wall clock that is wrong changes the speed within the same
/// limits.
fn pace(round: &ScrubRound, now: u64, interval: Duration, bytes: u64) -> Duration {
    let usual = round.total as f64 / interval.as_secs_f64();
    let left = round.total.saturating_sub(round.done) as f64;
    let time = interval.as_secs_f64() - now.saturating_sub(round.started) as f64;
    let wanted = if time > 0.0 { left / time } else { f64::INFINITY };
    let rate = wanted.clamp(usual, usual * MAX_HURRY);
    let seconds = bytes as f64 / rate;
    // Without fragments the rate is 0, and so is the number of bytes.
    Duration::try_from_secs_f64(seconds).unwrap_or_default().min(interval)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{ScrubRound, pace, until_next};

    const DAY: u64 = 24 * 3600;
    const INTERVAL: Duration = Duration::from_secs(14 * DAY);
    const MIB: u64 = 1 << 20;
    const START: u64 = 1_800_000_000;

    fn round(done: u64) -> ScrubRound {
        ScrubRound { started: START, total: 14 * 24 * 1024 * MIB, done, is_over: false }
    }

    /// The seconds that a GiB takes, after some days with this many GiB done.
    fn seconds(days: f64, done: u64) -> u64 {
        let now = START + (days * DAY as f64) as u64;
        pace(&round(done * 1024 * MIB), now, INTERVAL, 1024 * MIB).as_secs_f64().round() as u64
    }

    #[test]
    fn a_round_is_spread_over_its_interval_and_catches_up_within_limits() {
        assert_eq!(seconds(0.0, 0), 3600, "a day has 24 GiB");
        assert_eq!(seconds(7.0, 7 * 24), 3600);
        assert_eq!(seconds(7.0, 0), 1800, "half of the time is left for all of it");
        assert_eq!(seconds(13.9, 0), 900, "four times as fast, not more");
        assert_eq!(seconds(20.0, 0), 900, "it is late");
        assert_eq!(seconds(1.0, 13 * 24), 3600, "it is early, and does not rest for days");
        let full = ScrubRound { done: 99 << 60, ..round(0) };
        assert_eq!(pace(&full, START, INTERVAL, MIB).as_secs(), 3, "3600 / 1024");
        let empty = ScrubRound { total: 0, ..round(0) };
        assert!(pace(&empty, START, INTERVAL, 0) <= INTERVAL);
        assert!(pace(&empty, START, INTERVAL, MIB) <= INTERVAL);
    }

    #[test]
    fn a_wrong_wall_clock_neither_stops_the_scrub_nor_lets_it_run_at_full_speed() {
        let pause = |now| pace(&round(0), now, INTERVAL, 1024 * MIB).as_secs_f64().round() as u64;
        assert_eq!(pause(0), 3600, "decades late");
        assert_eq!(pause(START * 3), 900, "decades early");
        let last = ScrubRound { is_over: true, ..round(0) };
        assert_eq!(until_next(&last, START + 13 * DAY, INTERVAL), Duration::from_secs(DAY));
        assert_eq!(until_next(&last, START * 3, INTERVAL), Duration::ZERO);
        assert_eq!(until_next(&last, 0, INTERVAL), INTERVAL, "not in decades");
    }
}
