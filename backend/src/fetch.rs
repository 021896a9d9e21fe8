//! Lazy restart: brings chunks from the repository when the guest needs them, also those that the mirror
//! has lost to a bad block.
//!
//! A chunk is wanted once however many requests wait for it. What arrives is written only to blocks
//! that are absent and that nobody else is writing. A chunk that cannot be had now is tried again, at
//! growing intervals, for as long as a guest's request may wait. After that those who wait get an error; it
//! is the answer for a moment, then the chunk may be asked for again.
//!
//! A chunk of the mirror that could not be read is *suspects*: it is scrubbed block by block, and what is
//! unreadable is absent from then on, if the repository has it. The request that found it is then planned
//! again, as any other that needs what is absent.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use cairn_store::ChunkIndex;

use crate::device::Device;
use crate::mapping::Buffer;
use crate::mirror::layout::{BLOCK_BYTES, Blocks};

/// Chunks that are fetched at the same time.
const FETCH_THREADS: usize = 4;

/// How long a failure is the answer.
const FAILURE_TTL: Duration = Duration::from_millis(500);

/// How long to wait before the second try; then twice as long each time,
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(50);

/// up to this.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(2);

#[derive(Clone, Copy)]
enum FetchState {
    Wanted { since: Instant, delay: Duration },
    Failed(Instant),
}

/// What a thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    Fetch(ChunkIndex),
    Scrub(ChunkIndex),
}

#[derive(Default)]
struct FetchQueue {
    queue: VecDeque<Task>,
    /// Chunks to be scrubbed.
    suspects: HashSet<ChunkIndex>,
    /// Chunks to be tried again, and when.
    later: Vec<(Instant, ChunkIndex)>,
    states: HashMap<ChunkIndex, FetchState>,
}

/// The chunks that the guest waits for.
pub(crate) struct Fetcher {
    /// How long a request may wait for a chunk that cannot be had.
    retry_timeout: Duration,
    wanted: Mutex<FetchQueue>,
    arrived: Condvar,
}

impl Fetcher {
    pub(crate) fn new(retry_timeout: Duration) -> Fetcher {
        Fetcher { retry_timeout, wanted: Mutex::default(), arrived: Condvar::new() }
    }

    fn wanted(&self) -> MutexGuard<'_, FetchQueue> {
        self.wanted.lock().expect("no code panics with the fetch queue locked")
    }

    /// Asks for a chunk. `false` if it is known not to come. An event tells when it is worth to
    /// plan again.
    pub(crate) fn want(&self, chunk: ChunkIndex) -> bool {
        let mut wanted = self.wanted();
        match wanted.states.get(&chunk) {
            Some(FetchState::Wanted { .. }) => return true,
            Some(FetchState::Failed(when)) if when.elapsed() < FAILURE_TTL => return false,
            _ => {}
        }
        let state = FetchState::Wanted { since: Instant::now(), delay: FIRST_RETRY_DELAY };
        wanted.states.insert(chunk, state);
        wanted.queue.push_back(Task::Fetch(chunk));
        self.arrived.notify_one();
        true
    }

    /// Asks for a chunk to be scrubbed. An event tells when it was.
    pub(crate) fn mark_suspect(&self, chunk: ChunkIndex) {
        let mut wanted = self.wanted();
        if wanted.suspects.insert(chunk) {
            wanted.queue.push_back(Task::Scrub(chunk));
            self.arrived.notify_one();
        }
    }

    /// Whether a chunk is to be scrubbed.
    pub(crate) fn is_suspect(&self, chunk: ChunkIndex) -> bool {
        self.wanted().suspects.contains(&chunk)
    }

    fn scrubbed(&self, chunk: ChunkIndex) {
        self.wanted().suspects.remove(&chunk);
    }

    fn next(&self) -> Task {
        let mut wanted = self.wanted();
        loop {
            let now = Instant::now();
            let due = wanted.later.iter().position(|(when, _)| *when <= now);
            if let Some(at) = due {
                return Task::Fetch(wanted.later.swap_remove(at).1);
            }
            if let Some(task) = wanted.queue.pop_front() {
                return task;
            }
            let soonest = wanted.later.iter().map(|(when, _)| *when).min();
            wanted = match soonest {
                Some(when) => {
                    let left = when.saturating_duration_since(now);
                    self.arrived.wait_timeout(wanted, left).expect("as in `wanted`").0
                }
                None => self.arrived.wait(wanted).expect("as in `wanted`"),
            };
        }
    }

    fn arrived(&self, chunk: ChunkIndex) {
        self.wanted().states.remove(&chunk);
    }

    /// A try has failed, for whatever reason: a repository may come back, a damaged one be restored. Returns
    /// whether the chunk is given up.
    fn failed(&self, chunk: ChunkIndex) -> bool {
        let mut wanted = self.wanted();
        let now = Instant::now();
        if let Some(FetchState::Wanted { since, delay }) = wanted.states.get_mut(&chunk)
            && now + *delay <= *since + self.retry_timeout
        {
            let when = now + *delay;
            *delay = (*delay * 2).min(MAX_RETRY_DELAY);
            wanted.later.push((when, chunk));
            self.arrived.notify_one();
            return false;
        }
        // Old failures are forgotten here, so that the table stays small.
        wanted.states.retain(|_, state| match state {
            FetchState::Wanted { .. } => true,
            FetchState::Failed(when) => when.elapsed() < FAILURE_TTL,
        });
        wanted.states.insert(chunk, FetchState::Failed(now));
        true
    }
}

/// Starts the threads that serve the device's fetches.
pub(crate) fn spawn(device: &Arc<Device>) -> io::Result<()> {
    for index in 0..FETCH_THREADS {
        let device = device.clone();
        thread::Builder::new().name(format!("fetch-{index}")).spawn(move || {
            let mut buffer = Buffer::zeroed(device.mirror.layout().chunk_size());
            loop {
                match device.fetcher.next() {
                    Task::Fetch(chunk) => fetch(&device, chunk, &mut buffer),
                    Task::Scrub(chunk) => {
                        scrub(&device, chunk, &mut buffer);
                        device.fetcher.scrubbed(chunk);
                    }
                }
                device.mirror.notify();
            }
        })?;
    }
    Ok(())
}

/// Why a chunk did not become present.
#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error(transparent)]
    Repository(#[from] cairn_store::Error),
    #[error("writing it to the mirror: {0}")]
    Mirror(#[from] io::Error),
}

fn fetch(device: &Device, chunk: ChunkIndex, buffer: &mut Buffer) {
    let Err(error) = fill(device, chunk, buffer) else { return device.fetcher.arrived(chunk) };
    device.stats.fetch_errors(1);
    let chunk_number = chunk.0;
    if device.fetcher.failed(chunk) {
        tracing::error!(%error, chunk_number, "a chunk cannot be fetched");
    } else {
        tracing::warn!(%error, chunk_number, "a chunk is fetched again later");
    }
}

fn fill(device: &Device, chunk: ChunkIndex, buffer: &mut Buffer) -> Result<(), FetchError> {
    let all = device.mirror.layout().blocks_of(chunk);
    let (found, runs) = loop {
        if device.mirror.presence().all(all) {
            return Ok(());
        }
        let invalidations = device.mirror.invalidations();
        let found = device.read_parent(chunk, buffer)?;
        let runs = device.mirror.begin_fill(chunk);
        if device.mirror.invalidations() == invalidations {
            break (found, runs);
        }
        // A block that is absent now may have been written, and be in a newer parent.
        device.mirror.end_fill(chunk, &runs, 0);
    };
    if found {
        device.stats.fetched_chunks(1);
        device.stats.fetched_bytes(buffer.len() as u64);
    }
    let mut landed = 0;
    let result = runs.iter().try_for_each(|run| {
        write_run(device, all, *run, found.then_some(&**buffer))?;
        landed += 1;
        Ok(())
    });
    device.mirror.end_fill(chunk, &runs, landed);
    result.map_err(FetchError::Mirror)
}

/// Writes one run of a chunk, or makes it a hole: an absent block's place may hold the remains of a
/// write that failed.
fn write_run(device: &Device, all: Blocks, run: Blocks, content: Option<&[u8]>) -> io::Result<()> {
    let Some(content) = content else { return device.disk.punch(run.span()) };
    let from = ((run.first - all.first) * BLOCK_BYTES) as usize;
    device.disk.write(&content[from..from + run.span().len as usize], run.span().offset)
}

/// Makes the blocks of a chunk absent that the mirror cannot give and the repository can.
fn scrub(device: &Device, chunk: ChunkIndex, buffer: &mut Buffer) {
    let all = device.mirror.layout().blocks_of(chunk);
    let mut bad = Vec::new();
    for block in (all.first..all.end()).filter(|block| device.mirror.presence().get(*block)) {
        let mut read =
            || device.disk.read(&mut buffer[..BLOCK_BYTES as usize], block * BLOCK_BYTES);
        // Once more: what passes by itself is no reason to forget anything.
        if let Err(error) = read().or_else(|_| read()) {
            bad.push((block, error));
        }
    }
    if bad.is_empty() {
        return;
    }
    device.stats.bad_blocks(bad.len() as u64);
    let elsewhere = device.read_parent(chunk, buffer);
    for (block, error) in bad {
        let offset = block * BLOCK_BYTES;
        match &elsewhere {
            Ok(_) if is_medium_error(&error) && device.mirror.invalidate(block) => {
                tracing::warn!(%error, offset, "a bad block of the mirror is fetched again");
            }
            Ok(_) => {
                let advice =
                    "its content is nowhere else: write it again, or go back to a snapshot";
                tracing::error!(%error, offset, advice, "a bad block of the mirror");
            }
            Err(cause) => {
                tracing::error!(%error, offset, %cause, "a bad block of the mirror cannot be fetched again");
            }
        }
    }
}

/// Whether a read failed because the disk does not have the data any more.
pub(crate) fn is_medium_error(error: &io::Error) -> bool {
    // The block layer's words for a device's error, a medium's, and two kinds of wrong checksums.
    let codes = [libc::EIO, libc::ENODATA, libc::EILSEQ, libc::EBADMSG];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use cairn_store::ChunkIndex;

    use super::{Fetcher, Task};

    const CHUNK: ChunkIndex = ChunkIndex(7);

    #[test]
    fn a_chunk_is_tried_again_for_until_the_retry_timeout() {
        let fetcher = Fetcher::new(Duration::from_secs(2));
        let start = Instant::now();
        assert!(fetcher.want(CHUNK));
        let mut tries = 0;
        loop {
            assert_eq!(fetcher.next(), Task::Fetch(CHUNK));
            assert!(fetcher.want(CHUNK), "it may still come");
            tries += 1;
            if fetcher.failed(CHUNK) {
                break;
            }
        }
        let took = start.elapsed();
        assert!((2..8).contains(&tries), "{tries} tries");
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert!(!fetcher.want(CHUNK), "the failure is the answer");
    }
}
