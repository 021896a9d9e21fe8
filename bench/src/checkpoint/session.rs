//! The measurement of one contender: a checkpoint of an idle guest, then one under load.
//!
//! ```text
//!   dirty ─ checkpoint ─ stable │ dirty ─ load: warm up ─ work ─┬─ the same work ─ ... ─ after ─ end
//!          (idle guest)         │                               └─ checkpoint ─ stable ─ merged
//! ```

use std::sync::mpsc::{self, Receiver};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::Serialize;

use super::subject::{Guest, Subject};
use super::timeline::{Phases, Timeline};
use crate::io::{Connection, Shape};
use crate::load::{Kind, Pattern, Sample, Span, Watch, drive, write_once};
use crate::sys;

const DEPTH: usize = 8;
const BLOCK: usize = 4096;

/// The parameters of a measurement.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Plan {
    /// The number of dirty bytes.
    pub(super) dirty: u64,
    /// The number of writes of the workload, with and without a checkpoint.
    pub(super) work: u64,
    pub(super) warm_up: Duration,
    pub(super) after: Duration,
}

impl Plan {
    pub(super) fn new(dirty: u64, quick: bool) -> Plan {
        let work = match dirty >> 20 {
            0..=64 => 40_000,
            65..=256 => 60_000,
            257..=1024 => 120_000,
            _ => 240_000,
        };
        let (warm_up, after) = if quick { (500, 800) } else { (1000, 1500) };
        let [warm_up, after] = [warm_up, after].map(Duration::from_millis);
        Plan { dirty, work, warm_up, after }
    }
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Outcome {
    /// The pause that the server reports for each checkpoint under load, in microseconds.
    pub(super) pauses_us: Vec<f64>,
    /// The time from the request to the answer, as the client measures it, in microseconds.
    pub(super) answer_us: f64,
    /// The time from the request to stable, in seconds.
    pub(super) stable_s: f64,
    /// The time from the request until the disk is as before, in seconds.
    pub(super) merged_s: f64,
    /// The time from the request to stable with an idle guest, in seconds.
    pub(super) idle_stable_s: f64,
    pub(super) copied_bytes: Option<u64>,
    /// The time of the work without and with a checkpoint, in seconds.
    pub(super) work_s: (f64, f64),
    pub(super) timeline: Timeline,
}

impl Outcome {
    /// The time of the work with a checkpoint, relative to the time without.
    pub(super) fn slowdown(&self) -> f64 {
        self.work_s.1 / self.work_s.0
    }
}

pub(super) fn run(subject: &mut dyn Subject, plan: &Plan) -> Result<Outcome> {
    let idle_stable_s = idle(subject, plan)?;
    dirty(subject, plan)?;
    let mut connection =
        subject.connect(Shape { queues: 1, depth: DEPTH, longest: BLOCK, polls: false })?;
    let queue = connection.first();
    let watch = Watch::default();
    thread::scope(|scope| {
        let watch = &watch;
        let load = scope.spawn(move || {
            let span = Span::new(0, plan.dirty);
            let mut pattern = Pattern::random(Kind::Write, span, BLOCK, plan.dirty);
            let result = drive(queue, DEPTH, &mut pattern, watch);
            watch.gate.leave();
            result
        });
        let measured = under_load(scope, subject, plan, watch, &load);
        // After an error too, the load must not wait at the gate.
        watch.stop();
        watch.gate.open();
        let samples = load.join().expect("the load does not panic")?;
        let (begin, asked, work_s, taken) = measured?;
        Ok(outcome(plan, begin, asked, work_s, taken, idle_stable_s, &samples))
    })
}

/// The results of the checkpoint under load.
struct Taken {
    pauses_us: Vec<f64>,
    answered: Instant,
    stable: Instant,
    merged: Instant,
    copied_bytes: Option<u64>,
}

type Measured = (Instant, Instant, (f64, f64), Taken);

fn under_load<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    subject: &'scope mut dyn Subject,
    plan: &'scope Plan,
    watch: &'scope Watch,
    load: &ScopedJoinHandle<'_, Result<Vec<Sample>>>,
) -> Result<Measured> {
    subject.prepare()?;
    thread::sleep(plan.warm_up);
    let begin = Instant::now();
    let without = work(plan, watch, load)?;
    let asked = Instant::now();
    let (worked, has_worked) = mpsc::channel();
    let checkpoint = scope.spawn(move || take(subject, plan, watch, &has_worked));
    let with = work(plan, watch, load)?;
    drop(worked);
    let taken = checkpoint.join().expect("the checkpoint does not panic")?;
    Ok((begin, asked, (without, with), taken))
}

/// Waits until the guest has made the writes of the plan, and returns the time in seconds.
fn work(
    plan: &Plan,
    watch: &Watch,
    load: &ScopedJoinHandle<'_, Result<Vec<Sample>>>,
) -> Result<f64> {
    let (begin, from) = (Instant::now(), watch.done());
    while watch.done() - from < plan.work {
        if load.is_finished() {
            bail!("the load ended before its work was done");
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(begin.elapsed().as_secs_f64())
}

/// Takes the checkpoint under load. `has_worked` is closed when the work is done. Additional
/// checkpoints wait for it, because they must not extend the time of the work.
fn take(
    subject: &mut dyn Subject,
    plan: &Plan,
    watch: &Watch,
    has_worked: &Receiver<()>,
) -> Result<Taken> {
    let guest = Guest::behind(&watch.gate);
    let mut pauses_us = Vec::from_iter(subject.begin(guest)?);
    let answered = Instant::now();
    subject.store()?;
    let stable = Instant::now();
    let copied_bytes = subject.finish(guest)?;
    let merged = Instant::now();
    thread::sleep(plan.after);
    let _ = has_worked.recv();
    pauses_us.extend(subject.more_pauses()?);
    Ok(Taken { pauses_us, answered, stable, merged, copied_bytes })
}

/// Writes the whole disk once. The guest stays connected until the caller drops the connection.
fn dirty(subject: &mut dyn Subject, plan: &Plan) -> Result<Box<dyn Connection>> {
    let shape = Shape { queues: 1, depth: DEPTH, longest: 256 << 10, polls: false };
    let mut connection = subject.connect(shape)?;
    write_once(connection.first(), DEPTH, Span::new(0, plan.dirty))?;
    Ok(connection)
}

/// The time until a checkpoint of an idle guest is stable, in seconds.
fn idle(subject: &mut dyn Subject, plan: &Plan) -> Result<f64> {
    let _guest = dirty(subject, plan)?;
    subject.prepare()?;
    sys::settle();
    let asked = Instant::now();
    subject.begin(Guest::IDLE)?;
    subject.store()?;
    let time = asked.elapsed().as_secs_f64();
    subject.finish(Guest::IDLE)?;
    Ok(time)
}

fn outcome(
    plan: &Plan,
    begin: Instant,
    asked: Instant,
    work_s: (f64, f64),
    taken: Taken,
    idle_stable_s: f64,
    samples: &[Sample],
) -> Outcome {
    let since = |moment: Instant| moment.duration_since(asked).as_secs_f64();
    let end = taken.merged + plan.after;
    let phases = Phases { begin, asked, stable: taken.stable, merged: taken.merged, end };
    Outcome {
        answer_us: since(taken.answered) * 1e6,
        stable_s: since(taken.stable),
        merged_s: since(taken.merged),
        idle_stable_s,
        copied_bytes: taken.copied_bytes,
        pauses_us: taken.pauses_us,
        work_s,
        timeline: Timeline::new(samples, &phases),
    }
}
