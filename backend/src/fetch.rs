//! Lazy restart: brings chunks from the repository when the guest needs them.
//!
//! A chunk is wanted once however many requests wait for it. What arrives is written only to blocks
//! that are absent and that nobody else is writing. A chunk that cannot be had is remembered for a
//! moment, so that those who wait get an error, and tried again after it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use cairn_store::ChunkIndex;

use crate::device::Device;
use crate::mapping::Buffer;
use crate::mirror::layout::{BLOCK, Blocks};

/// Chunks that are fetched at the same time.
const THREADS: usize = 4;

/// How long a failure is the answer.
const FAILURE: Duration = Duration::from_millis(500);

#[derive(Clone, Copy)]
enum State {
    Wanted,
    Failed(Instant),
}

#[derive(Default)]
struct Wanted {
    queue: VecDeque<ChunkIndex>,
    states: HashMap<ChunkIndex, State>,
}

/// The chunks that the guest waits for.
#[derive(Default)]
pub(crate) struct Fetcher {
    wanted: Mutex<Wanted>,
    arrived: Condvar,
}

impl Fetcher {
    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().expect("no code panics with the fetch queue locked")
    }

    /// Asks for a chunk. `false` if it is known not to come. An event tells when it is worth to
    /// plan again.
    pub(crate) fn want(&self, chunk: ChunkIndex) -> bool {
        let mut wanted = self.wanted();
        match wanted.states.get(&chunk) {
            Some(State::Wanted) => return true,
            Some(State::Failed(when)) if when.elapsed() < FAILURE => return false,
            _ => {}
        }
        wanted.states.insert(chunk, State::Wanted);
        wanted.queue.push_back(chunk);
        self.arrived.notify_one();
        true
    }

    fn next(&self) -> ChunkIndex {
        let mut wanted = self.wanted();
        loop {
            match wanted.queue.pop_front() {
                Some(chunk) => return chunk,
                None => wanted = self.arrived.wait(wanted).expect("as in `wanted`"),
            }
        }
    }

    fn done(&self, chunk: ChunkIndex, ok: bool) {
        let mut wanted = self.wanted();
        if ok {
            wanted.states.remove(&chunk);
        } else {
            // Old failures are forgotten here, so that the table stays small.
            wanted.states.retain(|_, state| match state {
                State::Wanted => true,
                State::Failed(when) => when.elapsed() < FAILURE,
            });
            wanted.states.insert(chunk, State::Failed(Instant::now()));
        }
    }
}

/// Starts the threads that serve the device's fetches.
pub(crate) fn spawn(device: &Arc<Device>) -> io::Result<()> {
    for index in 0..THREADS {
        let device = device.clone();
        thread::Builder::new().name(format!("fetch-{index}")).spawn(move || {
            let mut buffer = Buffer::zeroed(device.mirror.layout().chunk_size());
            loop {
                let chunk = device.fetcher.next();
                let result = fill(&device, chunk, &mut buffer);
                if let Err(error) = &result {
                    device.stats.fetch_errors(1);
                    tracing::error!(%error, chunk = chunk.0, "a chunk cannot be fetched");
                }
                device.fetcher.done(chunk, result.is_ok());
                device.mirror.events.notify();
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

fn fill(device: &Device, chunk: ChunkIndex, buffer: &mut Buffer) -> Result<(), FetchError> {
    let all = device.mirror.layout().blocks_of(chunk);
    if device.mirror.presence.all(all) {
        return Ok(());
    }
    let found = device.read_parent(chunk, buffer)?;
    if found {
        device.stats.fetched_chunks(1);
        device.stats.fetched_bytes(buffer.len() as u64);
    }
    let runs = device.mirror.begin_fill(chunk);
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
    let from = ((run.first - all.first) * BLOCK) as usize;
    device.disk.write(&content[from..from + run.span().len as usize], run.span().offset)
}
