//! Lazy restart: fetches chunks from the repository when the guest needs them, and fetches blocks
//! again that the local disk has lost.
//!
//! A chunk is fetched once, however many requests wait for it. Its content is written only to
//! blocks that are absent and that nobody else is writing. If the repository fails, the fetch is
//! retried at growing intervals until the retry timeout. Then the waiting requests fail. The
//! failure is remembered for a moment; after that the chunk can be requested again.
//!
//! A chunk of the mirror that could not be read is *suspect*. It is scrubbed block by block, and
//! blocks that cannot be read become absent if the repository has their content. The request that
//! found the chunk is then planned again, like any request that needs absent blocks.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use cairn_store::ChunkIndex;

use crate::counters::Counters;
use crate::image::Image;
use crate::local_disk::LocalDisk;
use crate::mapping::Buffer;
use crate::mirror::files::disk_file::is_medium_error;
use crate::mirror::layout::{BLOCK_BYTES, Blocks};

/// The number of chunks that are fetched at the same time.
const FETCH_THREADS: usize = 4;

/// The most chunks that wait to be fetched. Requests can ask for any number of chunks. Those beyond
/// this number are asked for again after each event.
const MAX_WAITING: usize = 4096;

/// How long a failure is remembered.
const FAILURE_TTL: Duration = Duration::from_millis(500);

/// The delay before the first retry. Each further delay is twice as long.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(50);

/// The longest delay between two tries.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(2);

#[derive(Clone, Copy)]
enum FetchState {
    Requested { since: Instant, delay: Duration },
    Failed(Instant),
}

/// What a thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    Fetch(ChunkIndex),
    Scrub(ChunkIndex),
}

#[derive(Default)]
struct Tasks {
    queue: VecDeque<Task>,
    /// Chunks that are to be scrubbed.
    suspects: HashSet<ChunkIndex>,
    /// Chunks whose fetch is retried, and when.
    retries: Vec<(Instant, ChunkIndex)>,
    states: HashMap<ChunkIndex, FetchState>,
}

/// The chunks that requests wait for.
struct FetchQueue {
    /// How long a request may wait for a chunk that cannot be fetched.
    retry_timeout: Duration,
    tasks: Mutex<Tasks>,
    added: Condvar,
}

impl FetchQueue {
    fn new(retry_timeout: Duration) -> FetchQueue {
        FetchQueue { retry_timeout, tasks: Mutex::default(), added: Condvar::new() }
    }

    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().expect("no code panics with the fetch queue locked")
    }

    fn request(&self, chunk: ChunkIndex) -> bool {
        let mut tasks = self.tasks();
        match tasks.states.get(&chunk) {
            Some(FetchState::Requested { .. }) => return true,
            Some(FetchState::Failed(when)) if when.elapsed() < FAILURE_TTL => return false,
            _ => {}
        }
        if tasks.queue.len() + tasks.retries.len() >= MAX_WAITING {
            return true;
        }
        let state = FetchState::Requested { since: Instant::now(), delay: FIRST_RETRY_DELAY };
        tasks.states.insert(chunk, state);
        tasks.queue.push_back(Task::Fetch(chunk));
        self.added.notify_one();
        true
    }

    fn mark_suspect(&self, chunk: ChunkIndex) {
        let mut tasks = self.tasks();
        if tasks.suspects.insert(chunk) {
            tasks.queue.push_back(Task::Scrub(chunk));
            self.added.notify_one();
        }
    }

    fn is_suspect(&self, chunk: ChunkIndex) -> bool {
        self.tasks().suspects.contains(&chunk)
    }

    fn scrubbed(&self, chunk: ChunkIndex) {
        self.tasks().suspects.remove(&chunk);
    }

    /// Waits for the next task.
    fn next(&self) -> Task {
        let mut tasks = self.tasks();
        loop {
            let now = Instant::now();
            let due = tasks.retries.iter().position(|(when, _)| *when <= now);
            if let Some(at) = due {
                return Task::Fetch(tasks.retries.swap_remove(at).1);
            }
            if let Some(task) = tasks.queue.pop_front() {
                return task;
            }
            let soonest = tasks.retries.iter().map(|(when, _)| *when).min();
            tasks = match soonest {
                Some(when) => {
                    let left = when.saturating_duration_since(now);
                    self.added.wait_timeout(tasks, left).expect("as in `tasks`").0
                }
                None => self.added.wait(tasks).expect("as in `tasks`"),
            };
        }
    }

    fn fetched(&self, chunk: ChunkIndex) {
        self.tasks().states.remove(&chunk);
    }

    /// Handles a failed try, whatever its reason: a repository may come back, and a damaged one may
    /// be restored. Returns `true` if the chunk is given up.
    fn failed(&self, chunk: ChunkIndex) -> bool {
        let mut tasks = self.tasks();
        let now = Instant::now();
        if let Some(FetchState::Requested { since, delay }) = tasks.states.get_mut(&chunk)
            && now + *delay <= *since + self.retry_timeout
        {
            let when = now + *delay;
            *delay = (*delay * 2).min(MAX_RETRY_DELAY);
            tasks.retries.push((when, chunk));
            self.added.notify_one();
            return false;
        }
        // Old failures are removed here, so that the table stays small.
        tasks.states.retain(|_, state| match state {
            FetchState::Requested { .. } => true,
            FetchState::Failed(when) => when.elapsed() < FAILURE_TTL,
        });
        tasks.states.insert(chunk, FetchState::Failed(now));
        true
    }
}

/// Why a chunk did not become present.
#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error(transparent)]
    Repository(#[from] cairn_store::Error),
    #[error("writing the chunk to the mirror: {0}")]
    Mirror(#[from] io::Error),
}

/// Fetches and scrubs chunks in background threads.
pub(crate) struct Fetcher {
    disk: Arc<LocalDisk>,
    image: Arc<Image>,
    counters: Arc<Counters>,
    queue: FetchQueue,
}

impl Fetcher {
    pub(crate) fn new(
        disk: Arc<LocalDisk>,
        image: Arc<Image>,
        counters: Arc<Counters>,
        retry_timeout: Duration,
    ) -> Fetcher {
        Fetcher { disk, image, counters, queue: FetchQueue::new(retry_timeout) }
    }

    /// Starts the threads.
    pub(crate) fn spawn(self: &Arc<Fetcher>) -> io::Result<()> {
        for index in 0..FETCH_THREADS {
            let fetcher = self.clone();
            thread::Builder::new().name(format!("fetch-{index}")).spawn(move || fetcher.run())?;
        }
        Ok(())
    }

    fn run(&self) {
        let mut buffer = Buffer::zeroed(self.disk.mirror.layout().chunk_size());
        loop {
            match self.queue.next() {
                Task::Fetch(chunk) => self.fetch(chunk, &mut buffer),
                Task::Scrub(chunk) => {
                    self.scrub(chunk, &mut buffer);
                    self.queue.scrubbed(chunk);
                }
            }
            self.disk.mirror.notify();
        }
    }

    /// Requests a chunk, if not too many wait already. Returns `false` if the chunk failed a moment
    /// ago. An event tells when the request should be planned again.
    pub(crate) fn request(&self, chunk: ChunkIndex) -> bool {
        self.queue.request(chunk)
    }

    /// Requests that a chunk is scrubbed. An event tells when that is done.
    pub(crate) fn mark_suspect(&self, chunk: ChunkIndex) {
        self.queue.mark_suspect(chunk);
    }

    /// Whether a chunk is to be scrubbed.
    pub(crate) fn is_suspect(&self, chunk: ChunkIndex) -> bool {
        self.queue.is_suspect(chunk)
    }

    fn fetch(&self, chunk: ChunkIndex, buffer: &mut Buffer) {
        let Err(error) = self.fill(chunk, buffer) else { return self.queue.fetched(chunk) };
        self.counters.fetch_errors(1);
        let chunk_number = chunk.0;
        if self.queue.failed(chunk) {
            tracing::error!(%error, chunk_number, "cannot fetch a chunk");
        } else {
            tracing::warn!(%error, chunk_number, "cannot fetch a chunk; retrying");
        }
    }

    fn fill(&self, chunk: ChunkIndex, buffer: &mut Buffer) -> Result<(), FetchError> {
        let mirror = &self.disk.mirror;
        let all = mirror.layout().blocks_of(chunk);
        let (found, runs) = loop {
            if mirror.presence().all(all) {
                return Ok(());
            }
            let invalidations = mirror.invalidations();
            let found = self.image.read_parent(chunk, buffer)?;
            let runs = mirror.begin_fill(chunk);
            if mirror.invalidations() == invalidations {
                break (found, runs);
            }
            // A block that is absent now may have been written in between, and its content may be
            // in a newer parent.
            mirror.end_fill(chunk, &runs, 0);
        };
        if found {
            self.counters.fetched_chunks(1);
            self.counters.fetched_bytes(buffer.len() as u64);
        }
        let mut landed = 0;
        let result = runs.iter().try_for_each(|run| {
            self.write_run(all, *run, found.then_some(&**buffer))?;
            landed += 1;
            Ok(())
        });
        mirror.end_fill(chunk, &runs, landed);
        result.map_err(FetchError::Mirror)
    }

    /// Writes one run of a chunk. Without content it punches a hole, because the space of an absent
    /// block may hold the remains of a write that failed.
    fn write_run(&self, all: Blocks, run: Blocks, content: Option<&[u8]>) -> io::Result<()> {
        let Some(content) = content else { return self.disk.data.punch(run.span()) };
        let from = ((run.first - all.first) * BLOCK_BYTES) as usize;
        self.disk.data.write(&content[from..from + run.span().len as usize], run.span().offset)
    }

    /// Reads each block of a chunk, and invalidates the blocks that the mirror cannot return and
    /// the repository can.
    fn scrub(&self, chunk: ChunkIndex, buffer: &mut Buffer) {
        let mirror = &self.disk.mirror;
        let all = mirror.layout().blocks_of(chunk);
        let mut bad = Vec::new();
        for block in (all.first..all.end()).filter(|block| mirror.presence().get(*block)) {
            let block_buffer = &mut buffer[..BLOCK_BYTES as usize];
            let mut read = || self.disk.data.read(block_buffer, block * BLOCK_BYTES);
            // A second try: a transient error is no reason to invalidate anything.
            if let Err(error) = read().or_else(|_| read()) {
                bad.push((block, error));
            }
        }
        if bad.is_empty() {
            return;
        }
        self.counters.bad_blocks(bad.len() as u64);
        let parent = self.image.read_parent(chunk, buffer);
        for (block, error) in bad {
            let offset = block * BLOCK_BYTES;
            match &parent {
                Ok(_) if is_medium_error(&error) && mirror.invalidate(block) => {
                    tracing::warn!(%error, offset, "a bad block of the mirror is fetched again");
                }
                Ok(_) => {
                    let advice = "the repository does not have its content: write it again, or go \
                                  back to a snapshot";
                    tracing::error!(%error, offset, advice, "a bad block of the mirror");
                }
                Err(cause) => {
                    tracing::error!(
                        %error, offset, %cause,
                        "cannot fetch the content of a bad block of the mirror"
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use cairn_store::ChunkIndex;

    use super::{FetchQueue, MAX_WAITING, Task};

    const CHUNK: ChunkIndex = ChunkIndex(7);

    /// A guest can ask for its whole disk, and forget that it did.
    #[test]
    fn a_bounded_number_of_chunks_waits_to_be_fetched() {
        let queue = FetchQueue::new(Duration::from_secs(60));
        let all = 2 * MAX_WAITING as u64;
        let request_all = || assert!((0..all).all(|chunk| queue.request(ChunkIndex(chunk))));
        request_all();
        assert_eq!(queue.tasks().states.len(), MAX_WAITING);
        // Those that are retried count too.
        for _ in 0..MAX_WAITING {
            let Task::Fetch(chunk) = queue.next() else { panic!("nothing is scrubbed") };
            assert!(!queue.failed(chunk));
        }
        request_all();
        assert_eq!(queue.tasks().states.len(), MAX_WAITING);
        // Each one that is fetched makes room for another.
        let Task::Fetch(chunk) = queue.next() else { panic!("nothing is scrubbed") };
        queue.fetched(chunk);
        assert!(queue.request(ChunkIndex(all)) && queue.request(ChunkIndex(all + 1)));
        let tasks = queue.tasks();
        assert!(tasks.states.contains_key(&ChunkIndex(all)));
        assert!(!tasks.states.contains_key(&ChunkIndex(all + 1)));
    }

    #[test]
    fn a_fetch_is_retried_until_the_retry_timeout() {
        let queue = FetchQueue::new(Duration::from_secs(2));
        let start = Instant::now();
        assert!(queue.request(CHUNK));
        let mut tries = 0;
        loop {
            assert_eq!(queue.next(), Task::Fetch(CHUNK));
            assert!(queue.request(CHUNK), "it may still come");
            tries += 1;
            if queue.failed(CHUNK) {
                break;
            }
        }
        let took = start.elapsed();
        assert!((2..8).contains(&tries), "{tries} tries");
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert!(!queue.request(CHUNK), "the failure is the answer");
    }
}
