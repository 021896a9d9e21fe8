//! Copies chunks from the repository to a disk, with many reads in flight.
//!
//! ```text
//! walk over the tree ─► queue ─► workers: read, verify, write ─► disk
//!                                   │
//!                                   └─► the main thread syncs, and saves how far the copy is
//! ```
//!
//! The walk is ahead of the workers by a bounded number of chunks, so that reading a tree node does
//! not delay them. The memory is bounded by the number of workers, each with one chunk.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use cairn_store::{ChunkIndex, Geometry, Repository, Result};

use super::disk::Disk;
use super::jobs::Job;
use crate::buffer::AlignedBuffer;
use crate::failure::{Doing, Outcome};
use crate::progress::Progress;

/// How many jobs the walk is ahead. Their names take 64 KiB.
const QUEUE: usize = 1024;

/// The most bytes of chunks in memory.
const MEMORY: u64 = 16 << 20;

/// The most chunks whose space is allocated together.
const RUN: usize = 64;

/// The fewest bytes for which space is allocated. For less it is not worth it.
const LEAST_ALLOCATED: u64 = 1 << 20;

/// The least and the most reads in flight.
const WORKERS: (u64, u64) = (4, 32);

/// How often the disk is synced, and how far the copy is saved.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);

/// The number of reads in flight for chunks of this size.
pub(super) fn workers(geometry: Geometry) -> usize {
    let workers = MEMORY / u64::from(geometry.chunk_size());
    workers.clamp(WORKERS.0, WORKERS.1) as usize
}

/// What is copied, and where to.
pub(crate) struct Copy<'a> {
    pub(crate) repository: &'a Repository,
    pub(crate) geometry: Geometry,
    pub(crate) disk: &'a Disk,
}

/// Which jobs are taken and not finished.
#[derive(Default)]
struct Underway {
    /// The first chunks of the jobs.
    first: BTreeSet<u64>,
    /// The end of the last job that was taken.
    taken: u64,
}

impl Underway {
    /// The chunks below this one are written.
    fn written(&self) -> u64 {
        self.first.first().copied().unwrap_or(self.taken)
    }
}

/// The jobs that wait; `None` after a worker has failed.
struct Queue {
    jobs: Mutex<Option<Receiver<Result<Job>>>>,
    underway: Mutex<Underway>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Queue {
    /// Takes the next job. Jobs are taken in their order.
    fn take(&self) -> Option<Result<Job>> {
        let jobs = lock(&self.jobs);
        let job = jobs.as_ref()?.recv().ok()?;
        if let Ok(job) = &job {
            let mut underway = lock(&self.underway);
            underway.first.insert(job.chunks.start);
            underway.taken = job.chunks.end;
        }
        Some(job)
    }

    fn finish(&self, job: &Job) {
        lock(&self.underway).first.remove(&job.chunks.start);
    }
}

impl Copy<'_> {
    /// Does all jobs, which are in the order of their chunks. From time to time, and after a failure,
    /// syncs the disk and calls `save` with the number of the first chunk that may not be durable.
    pub(crate) fn run(
        &self,
        jobs: impl Iterator<Item = Result<Job>> + Send,
        save: &mut dyn FnMut(u64) -> Outcome,
        doing: &(impl Fn() -> String + Sync),
    ) -> Outcome {
        let progress = Progress::new(self.geometry.size());
        let (sender, receiver) = sync_channel(QUEUE);
        let queue = Queue { jobs: Mutex::new(Some(receiver)), underway: Mutex::default() };
        let mut saved = 0;
        let mut save = || -> Outcome {
            let written = lock(&queue.underway).written();
            if written > saved {
                self.disk.sync().doing(doing)?;
                save(written)?;
                saved = written;
            }
            Ok(())
        };
        // When a worker fails, the others find no queue and end.
        let work = || {
            let worked = self.work(&queue, &progress, doing);
            worked.inspect_err(|_| *lock(&queue.jobs) = None)
        };
        let work = &work;
        let copied = thread::scope(|scope| {
            scope.spawn(move || feed(jobs, self.disk, self.geometry, &sender));
            let (done, ended) = channel::<()>();
            let workers: Vec<_> = (0..workers(self.geometry))
                .map(|_| {
                    let done = done.clone();
                    scope.spawn(move || {
                        let _done = done;
                        work()
                    })
                })
                .collect();
            drop(done);
            let mut saving = Ok(());
            while ended.recv_timeout(SAVE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                saving = save();
                if saving.is_err() {
                    *lock(&queue.jobs) = None;
                    break;
                }
            }
            let outcomes = workers.into_iter().map(|one| one.join().expect("no worker panics"));
            // All of them have ended before the first failure is reported.
            outcomes.collect::<Vec<_>>().into_iter().collect::<Outcome>().and(saving)
        });
        if copied.is_err() {
            // The first failure is the one that matters.
            let _ = save();
        }
        copied
    }

    fn work(&self, queue: &Queue, progress: &Progress, doing: impl Fn() -> String) -> Outcome {
        let mut buffer = AlignedBuffer::new(self.geometry.chunk_size() as usize);
        while let Some(job) = queue.take() {
            let job = job.doing(&doing)?;
            let start = self.geometry.offset_of(ChunkIndex(job.chunks.start));
            let end = self.geometry.offset_of(ChunkIndex(job.chunks.end)).min(self.geometry.size());
            if let Some(id) = &job.data {
                self.repository.read_chunk(id, buffer.bytes()).doing(&doing)?;
                let inside = &buffer.bytes()[..(end - start) as usize];
                self.disk.write(inside, start, job.is_allocated).doing(&doing)?;
            } else {
                self.disk.zero(start..end).doing(&doing)?;
            }
            queue.finish(&job);
            progress.set(self.geometry.offset_of(ChunkIndex(job.chunks.end)));
        }
        Ok(())
    }
}

/// Hands out the jobs. Allocates the space of adjacent chunks together: then writes of several threads
/// to a new file need not wait for each other, and the file has few fragments.
fn feed(
    jobs: impl Iterator<Item = Result<Job>>,
    disk: &Disk,
    geometry: Geometry,
    queue: &SyncSender<Result<Job>>,
) {
    let mut run: Vec<Job> = Vec::new();
    let hand_out = |run: &mut Vec<Job>| {
        if let [first, .., last] = &run[..] {
            let [start, end] = [first.chunks.start, last.chunks.end].map(ChunkIndex);
            let range = geometry.offset_of(start)..geometry.offset_of(end).min(geometry.size());
            let is_long = range.end - range.start >= LEAST_ALLOCATED;
            let is_allocated = is_long && disk.allocate(range);
            run.iter_mut().for_each(|job| job.is_allocated = is_allocated);
        }
        run.drain(..).try_for_each(|job| queue.send(Ok(job)))
    };
    for job in jobs {
        let continues = |job: &Job| {
            let last = run.last();
            job.data.is_some()
                && run.len() < RUN
                && last.is_none_or(|last| last.chunks.end == job.chunks.start)
        };
        if !job.as_ref().is_ok_and(continues) && hand_out(&mut run).is_err() {
            return;
        }
        let sent = match job {
            Ok(job) if job.data.is_some() => {
                run.push(job);
                Ok(())
            }
            other => queue.send(other),
        };
        if sent.is_err() {
            return;
        }
    }
    let _ = hand_out(&mut run);
}
