//! The writes of the guest before, during and after a checkpoint.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::load::Sample;
use crate::stats::Latency;

/// The length of an interval. A guest that completes no write for this long is silent.
pub(super) const INTERVAL: Duration = Duration::from_millis(100);

/// The first part of storing a checkpoint, in which most chunks are not stored.
const FIRST: Duration = Duration::from_secs(2);

/// The times of the phases.
pub(super) struct Phases {
    pub(super) begin: Instant,
    pub(super) asked: Instant,
    pub(super) stable: Instant,
    pub(super) merged: Instant,
    pub(super) end: Instant,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Timeline {
    pub(super) before: Latency,
    /// The latency of writes that were in flight between the request and the end of the merge.
    pub(super) during: Latency,
    pub(super) after: Latency,
    pub(super) iops_before: f64,
    /// Writes per second from the request to stable.
    pub(super) iops_during: f64,
    /// Writes per second in the first two seconds after the request.
    pub(super) iops_first: f64,
    pub(super) iops_after: f64,
    /// The number of intervals after the request in which no write was completed.
    pub(super) silent: usize,
    /// For each interval: seconds since the request, and writes per second.
    pub(super) intervals: Vec<(f64, f64)>,
}

impl Timeline {
    pub(super) fn new(samples: &[Sample], phases: &Phases) -> Timeline {
        let Phases { begin, asked, stable, merged, end } = *phases;
        let latency = |keep: &dyn Fn(&&Sample) -> bool| {
            Latency::of(samples.iter().filter(keep).map(Sample::nanoseconds).collect())
        };
        let iops = |from: Instant, to: Instant| {
            let count = samples.iter().filter(|s| s.end > from && s.end <= to).count();
            count as f64 / to.duration_since(from).as_secs_f64().max(1e-9)
        };
        let intervals = intervals(samples, phases);
        Timeline {
            before: latency(&|s| s.end > begin && s.end <= asked),
            during: latency(&|s| s.end > asked && s.begin <= merged),
            after: latency(&|s| s.begin > merged && s.end <= end),
            iops_before: iops(begin, asked),
            iops_during: iops(asked, stable),
            iops_first: iops(asked, stable.min(asked + FIRST)),
            iops_after: iops(merged, end),
            silent: intervals.iter().filter(|(at, rate)| *at >= 0.0 && *rate == 0.0).count(),
            intervals,
        }
    }
}

/// Writes per second in whole intervals before and after the request. A write that ends exactly
/// between two intervals belongs to the earlier one.
fn intervals(samples: &[Sample], phases: &Phases) -> Vec<(f64, f64)> {
    let count = |span: Duration| (span.as_nanos() / INTERVAL.as_nanos()) as usize;
    let before = count(phases.asked - phases.begin);
    let after = count(phases.end - phases.asked);
    let mut counts = vec![0u64; before + after];
    let first = phases.asked - INTERVAL * before as u32 + Duration::from_nanos(1);
    for sample in samples {
        let since = sample.end.checked_duration_since(first);
        if let Some(count) = since.and_then(|since| counts.get_mut(count(since))) {
            *count += 1;
        }
    }
    let step = INTERVAL.as_secs_f64();
    let place = |at: usize| (at as f64 - before as f64) * step;
    counts.iter().enumerate().map(|(at, &count)| (place(at), count as f64 / step)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Phases, Timeline};
    use crate::load::Sample;

    #[test]
    fn a_write_that_lasts_for_a_pause_causes_silent_intervals_and_the_worst_latency() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        let mut samples: Vec<Sample> =
            (0..1000).map(|ms| Sample { begin: at(ms), end: at(ms + 1) }).collect();
        samples.push(Sample { begin: at(1000), end: at(1450) });
        samples.extend((1450..2000).map(|ms| Sample { begin: at(ms), end: at(ms + 1) }));
        let phases = Phases {
            begin: at(0),
            asked: at(1000),
            stable: at(1500),
            merged: at(1500),
            end: at(2000),
        };
        let timeline = Timeline::new(&samples, &phases);
        assert_eq!(timeline.silent, 4);
        assert_eq!(timeline.before.max, 1000.0);
        assert_eq!(timeline.during.max, 450_000.0);
        assert_eq!(timeline.after.max, 1000.0);
        assert_eq!(timeline.iops_before, 1000.0);
        assert_eq!(timeline.intervals.len(), 20);
    }
}
