//! The load of a guest, and its latencies.

mod gate;
mod pattern;

pub(crate) use gate::Gate;
pub(crate) use pattern::{Kind, Pattern, Span};

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Result;

use crate::io::{Op, Queue};

/// The times of one unit of work: a request, or a write and the flush after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) begin: Instant,
    pub(crate) end: Instant,
}

impl Sample {
    pub(crate) fn nanoseconds(&self) -> u64 {
        (self.end - self.begin).as_nanos() as u64
    }
}

/// The state that the loads of a measurement share with the measuring thread.
#[derive(Default)]
pub(crate) struct Watch {
    stop: AtomicBool,
    done: AtomicU64,
    pub(crate) gate: Gate,
}

impl Watch {
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// The number of completed units of work.
    pub(crate) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }
}

/// Keeps `depth` units of work in flight until it is stopped or the pattern ends. Then it waits for
/// the remaining ones.
///
/// A unit begins when its slot is free, so the time at a closed gate is part of its latency.
pub(crate) fn drive(
    queue: &mut dyn Queue,
    depth: usize,
    pattern: &mut Pattern,
    watch: &Watch,
) -> Result<Vec<Sample>> {
    let mut samples = Vec::with_capacity(1 << 18);
    let mut begins = vec![Instant::now(); depth];
    // Slots whose write is complete and whose flush is in flight.
    let mut half_done = vec![false; depth];
    let mut free: Vec<usize> = (0..depth).rev().collect();
    let mut done = Vec::with_capacity(depth);
    loop {
        let stopping = watch.stop.load(Ordering::Relaxed);
        if watch.gate.is_closed() && !stopping {
            if free.len() == depth {
                watch.gate.wait_until_open();
            }
        } else if !stopping {
            while let Some(slot) = free.pop() {
                let Some(op) = pattern.next() else {
                    free.push(slot);
                    break;
                };
                queue.submit(slot, op)?;
            }
        }
        if free.len() == depth {
            if stopping || pattern.is_over() {
                return Ok(samples);
            }
            continue;
        }
        queue.reap(1, &mut done)?;
        let now = Instant::now();
        let mut ended = 0;
        for slot in done.drain(..) {
            if pattern.flushes() && !half_done[slot] {
                half_done[slot] = true;
                queue.submit(slot, Op::Flush)?;
                continue;
            }
            half_done[slot] = false;
            samples.push(Sample { begin: begins[slot], end: now });
            begins[slot] = now;
            free.push(slot);
            ended += 1;
        }
        watch.done.fetch_add(ended, Ordering::Relaxed);
    }
}

/// Writes `span` once, in order, and flushes it.
pub(crate) fn write_once(queue: &mut dyn Queue, depth: usize, span: Span) -> Result<()> {
    const STEP: usize = 256 << 10;
    drive(queue, depth, &mut Pattern::once(span, STEP), &Watch::default())?;
    queue.submit(0, Op::Flush)?;
    queue.reap(1, &mut Vec::new())
}
