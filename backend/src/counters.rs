//! Counters since the start, for `cairn stats` and `cairn status`.
//!
//! Each worker has its own [`QueueCounters`], which no other thread writes. Counting is a load and
//! a store, and no cache line moves between processors.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cairn_agent::{Latency, QueueStatus, Stats};

/// A counter with a single writer.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds `amount`. Only the thread that owns the counter may call this.
    pub(crate) fn add(&self, amount: u64) {
        self.0.store(self.get() + amount, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The classes of requests that have separate latency histograms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Read,
    Write,
    Flush,
    /// Discards, writes of zeros, and chains that are not requests.
    Other,
}

/// The number of buckets for each doubling of the time.
const BUCKETS_PER_DOUBLING: u32 = 4;
/// The number of doublings, starting at a microsecond.
const DOUBLINGS: u32 = 27;
const BUCKETS: usize = (BUCKETS_PER_DOUBLING * DOUBLINGS) as usize;

/// A histogram of request latencies. A bucket is about 25 percent wide.
struct Histogram {
    buckets: [Counter; BUCKETS],
    longest: Counter,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: std::array::from_fn(|_| Counter::default()), longest: Counter::default() }
    }
}

impl Histogram {
    fn add(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.buckets[bucket_of(us)].add(1);
        if us > self.longest.get() {
            self.longest.0.store(us, Ordering::Relaxed);
        }
    }

    fn read(&self) -> Latency {
        let counts: Vec<u64> = self.buckets.iter().map(Counter::get).collect();
        let total: u64 = counts.iter().sum();
        let longest = self.longest.get();
        // The upper end of the bucket that holds the percentile.
        let at = |share: f64| {
            let rank = (total as f64 * share).ceil() as u64;
            let mut seen = 0;
            let bucket = counts.iter().position(|count| {
                seen += count;
                seen >= rank
            });
            end_of(bucket.unwrap_or(0)).min(longest)
        };
        Latency { count: total, p50_us: at(0.5), p99_us: at(0.99), max_us: longest }
    }
}

/// The bucket of a time in microseconds.
fn bucket_of(us: u64) -> usize {
    let us = us.max(1);
    let doubling = us.ilog2();
    // The two bits below the highest one.
    let step = if doubling >= 2 { us >> (doubling - 2) & 3 } else { us << (2 - doubling) & 3 };
    ((doubling * BUCKETS_PER_DOUBLING) as usize + step as usize).min(BUCKETS - 1)
}

/// The upper end of a bucket, in microseconds.
fn end_of(bucket: usize) -> u64 {
    let (doubling, step) =
        (bucket as u32 / BUCKETS_PER_DOUBLING, bucket as u64 % u64::from(BUCKETS_PER_DOUBLING));
    ((1u64 << doubling) * (5 + step)).div_ceil(4) - 1
}

/// The counters of one virtqueue.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct QueueCounters {
    pub(crate) reads: Counter,
    pub(crate) writes: Counter,
    pub(crate) flushes: Counter,
    pub(crate) discards: Counter,
    pub(crate) errors: Counter,
    pub(crate) read_bytes: Counter,
    pub(crate) written_bytes: Counter,
    pub(crate) copies: Counter,
    pub(crate) copied_bytes: Counter,
    pub(crate) spilled: Counter,
    pub(crate) parked: Counter,
    /// Requests that were popped.
    pub(crate) taken: Counter,
    /// Requests that were left in flight for the next owner of the queue.
    pub(crate) left: Counter,
    /// Requests that were answered.
    answered: Counter,
    latencies: [Histogram; 3],
}

impl QueueCounters {
    /// Counts a request that was answered.
    pub(crate) fn answer(&self, class: Class, time: Duration) {
        self.answered.add(1);
        match class {
            Class::Read => self.latencies[0].add(time),
            Class::Write => self.latencies[1].add(time),
            Class::Flush => self.latencies[2].add(time),
            Class::Other => {}
        }
    }

    /// Requests that were popped and not answered or left.
    pub(crate) fn in_flight(&self) -> u64 {
        // In this order, so that the result is never negative.
        let ended = self.answered.get() + self.left.get();
        self.taken.get().saturating_sub(ended)
    }

    pub(crate) fn read(&self, queue: usize) -> QueueStatus {
        let [read_latency, write_latency, flush_latency] =
            self.latencies.each_ref().map(Histogram::read);
        QueueStatus {
            queue: queue as u32,
            in_flight: self.in_flight(),
            reads: self.reads.get(),
            writes: self.writes.get(),
            flushes: self.flushes.get(),
            discards: self.discards.get(),
            errors: self.errors.get(),
            read_latency,
            write_latency,
            flush_latency,
        }
    }
}

macro_rules! shared {
    ($($name:ident),+ $(,)?) => {
        /// The counters of all other threads.
        #[derive(Default)]
        struct Shared {
            $($name: AtomicU64),+
        }

        impl Counters {
            $(
                pub(crate) fn $name(&self, amount: u64) {
                    self.shared.$name.fetch_add(amount, Ordering::Relaxed);
                }
            )+
        }
    };
}

shared!(
    fetched_chunks,
    fetched_bytes,
    fetch_errors,
    bad_blocks,
    checkpoints,
    stable,
    failed,
    stalls
);

/// All counters of a disk.
pub(crate) struct Counters {
    pub(crate) queues: Vec<QueueCounters>,
    shared: Shared,
}

impl Counters {
    pub(crate) fn new(queues: usize) -> Counters {
        let queues = (0..queues).map(|_| QueueCounters::default()).collect();
        Counters { queues, shared: Shared::default() }
    }

    /// The values of all counters, at about the same moment.
    pub(crate) fn read(&self) -> Stats {
        let sum =
            |of: fn(&QueueCounters) -> &Counter| self.queues.iter().map(|q| of(q).get()).sum();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            reads: sum(|queue| &queue.reads),
            writes: sum(|queue| &queue.writes),
            flushes: sum(|queue| &queue.flushes),
            discards: sum(|queue| &queue.discards),
            errors: sum(|queue| &queue.errors),
            read_bytes: sum(|queue| &queue.read_bytes),
            written_bytes: sum(|queue| &queue.written_bytes),
            copies: sum(|queue| &queue.copies),
            copied_bytes: sum(|queue| &queue.copied_bytes),
            spilled: sum(|queue| &queue.spilled),
            parked: sum(|queue| &queue.parked),
            fetched_chunks: load(&self.shared.fetched_chunks),
            fetched_bytes: load(&self.shared.fetched_bytes),
            fetch_errors: load(&self.shared.fetch_errors),
            bad_blocks: load(&self.shared.bad_blocks),
            checkpoints: load(&self.shared.checkpoints),
            stable: load(&self.shared.stable),
            failed: load(&self.shared.failed),
            stalls: load(&self.shared.stalls),
        }
    }

    /// The number of requests so far, and the number in flight.
    pub(crate) fn load(&self) -> (u64, u64) {
        let taken = self.queues.iter().map(|queue| queue.taken.get()).sum();
        (taken, self.queues.iter().map(QueueCounters::in_flight).sum())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{BUCKETS, Histogram, bucket_of, end_of};

    #[test]
    fn a_bucket_holds_the_times_up_to_its_end() {
        for us in (0..100_000).chain([u64::MAX]) {
            let bucket = bucket_of(us);
            assert!(us <= end_of(bucket) || bucket == BUCKETS - 1, "{us} in {bucket}");
            assert!(bucket < 8 || us > end_of(bucket - 1), "{us} in {bucket}");
        }
    }

    #[test]
    fn percentiles_are_right_within_a_bucket() {
        let histogram = Histogram::default();
        (1..=1000).for_each(|us| histogram.add(Duration::from_micros(us)));
        let latency = histogram.read();
        assert_eq!((latency.count, latency.max_us), (1000, 1000));
        assert!((500..=640).contains(&latency.p50_us), "{latency:?}");
        assert!((990..=1000).contains(&latency.p99_us), "{latency:?}");
        assert_eq!(Histogram::default().read().p99_us, 0);
    }
}
