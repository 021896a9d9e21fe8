//! Measures one workload on one disk.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use super::testbed::{Contender, Testbed};
use super::workload::Workload;
use crate::io::Shape;
use crate::load::{Sample, Watch, drive};
use crate::proc;
use crate::stats::{Latency, median};

/// The time window of a measurement.
pub(super) struct Window {
    /// How long the load runs before the measurement.
    before: Duration,
    /// How long the measurement lasts.
    during: Duration,
}

impl Window {
    pub(super) fn new(quick: bool) -> Window {
        let (before, during) = if quick { (150, 700) } else { (250, 1250) };
        Window { before: Duration::from_millis(before), during: Duration::from_millis(during) }
    }
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Figure {
    pub(super) iops: f64,
    pub(super) latency: Latency,
    /// CPU time of the server for each request, in microseconds.
    pub(super) cpu_us: f64,
}

impl Figure {
    pub(super) fn median(rounds: &[Figure]) -> Figure {
        let latencies: Vec<Latency> = rounds.iter().map(|figure| figure.latency).collect();
        Figure {
            iops: median(rounds.iter().map(|figure| figure.iops)),
            latency: Latency::median(&latencies),
            cpu_us: median(rounds.iter().map(|figure| figure.cpu_us)),
        }
    }
}

pub(super) fn measure(
    testbed: &mut Testbed,
    contender: Contender,
    workload: Workload,
    queues: usize,
    slice: u64,
    window: &Window,
) -> Result<Figure> {
    let shape =
        Shape { queues, depth: workload.depth, longest: workload.len, polls: workload.polls };
    let mut connection = testbed.connect(contender, shape)?;
    let (areas, pid) = (testbed.areas, testbed.pid(contender));
    let watch = Watch::default();
    thread::scope(|scope| {
        let watch = &watch;
        let mut threads = Vec::new();
        for (at, queue) in connection.queues().into_iter().enumerate() {
            let mut pattern = workload.pattern(&areas, slice, at, queues);
            threads.push(scope.spawn(move || drive(queue, workload.depth, &mut pattern, watch)));
        }
        thread::sleep(window.before);
        let (begin, cpu_before) = (Instant::now(), proc::cpu_time(pid));
        thread::sleep(window.during);
        let (end, cpu_after) = (Instant::now(), proc::cpu_time(pid));
        watch.stop();
        let mut samples = Vec::new();
        for thread in threads {
            samples.push(thread.join().expect("a load does not panic")?);
        }
        figure(&samples, begin, end, cpu_after? - cpu_before?)
    })
}

fn figure(queues: &[Vec<Sample>], begin: Instant, end: Instant, cpu: Duration) -> Result<Figure> {
    // A queue that has written all of its fresh area ends before the others.
    let last = |queue: &Vec<Sample>| queue.last().map_or(end, |sample| sample.end);
    let end = queues.iter().map(last).min().map_or(end, |earliest| earliest.min(end));
    let latencies: Vec<u64> = queues
        .iter()
        .flatten()
        .filter(|sample| sample.end > begin && sample.end <= end)
        .map(Sample::nanoseconds)
        .collect();
    let count = latencies.len() as f64;
    let time = end.checked_duration_since(begin).filter(|time| !time.is_zero());
    let time = time.context("the load ended before the measurement began")?;
    Ok(Figure {
        iops: count / time.as_secs_f64(),
        latency: Latency::of(latencies),
        cpu_us: cpu.as_secs_f64() * 1e6 / count.max(1.0),
    })
}
