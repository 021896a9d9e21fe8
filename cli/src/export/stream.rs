//! An export to standard output: in order, with zeros, and with chunks read ahead.
//!
//! ```text
//! walk over the tree ─► workers: read, verify ─┐
//!         │                                    ▼
//!         └─► in order, bounded: where each chunk comes from ─► standard output
//! ```

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use cairn_store::{ChunkId, ChunkIndex, Geometry, Repository, Result, Snapshot};

use super::copy::workers;
use super::jobs::{self, Job};
use crate::failure::{Doing, Outcome};
use crate::progress::Progress;

/// A chunk that was read.
type Read = Result<Vec<u8>>;

/// A chunk to read, and where it goes.
type Request = (ChunkId, SyncSender<Read>);

/// The next chunk of the stream.
enum Next {
    Data(ChunkIndex, Receiver<Read>),
    Failed(cairn_store::Error),
}

pub(crate) fn export(
    repository: &Repository,
    snapshot: &Snapshot,
    doing: &(impl Fn() -> String + Sync),
) -> Outcome {
    // The handle of the standard library would search the data for line ends.
    let out = File::from(io::stdout().as_fd().try_clone_to_owned().doing(doing)?);
    write(repository, snapshot, out, doing)
}

fn write(
    repository: &Repository,
    snapshot: &Snapshot,
    mut out: impl Write,
    doing: &(impl Fn() -> String + Sync),
) -> Outcome {
    let geometry = snapshot.geometry;
    let ahead = workers(geometry);
    let (requests, waiting) = sync_channel::<Request>(ahead);
    let (order, ordered) = sync_channel(ahead);
    let waiting = Mutex::new(waiting);
    let progress = Progress::new(geometry.size());
    thread::scope(|scope| {
        let jobs = jobs::data(repository, snapshot, 0);
        // They end when the other ends of their channels are dropped.
        scope.spawn(move || feed(jobs, &requests, &order));
        let waiting = &waiting;
        for _ in 0..ahead {
            scope.spawn(move || read_all(repository, geometry, waiting));
        }
        let mut next = 0;
        for chunk in ordered {
            let (index, content) = match chunk {
                Next::Data(index, content) => (index, content),
                Next::Failed(error) => return Err(error).doing(doing),
            };
            write_zeros(&mut out, geometry, next..index.0).doing(doing)?;
            let content = content.recv().expect("a worker answers each request").doing(doing)?;
            out.write_all(&content[..geometry.len_of(index)]).doing(doing)?;
            next = index.0 + 1;
            progress.set(geometry.offset_of(ChunkIndex(next)));
        }
        write_zeros(&mut out, geometry, next..geometry.chunk_count()).doing(doing)
    })
}

/// Hands out the chunks, in the same order to the workers and to the writer.
fn feed(
    jobs: impl Iterator<Item = Result<Job>>,
    requests: &SyncSender<Request>,
    order: &SyncSender<Next>,
) {
    for job in jobs {
        let next = match job {
            Ok(Job { chunks, data: Some(id), .. }) => {
                let (answer, content) = sync_channel(1);
                if requests.send((id, answer)).is_err() {
                    return;
                }
                Next::Data(ChunkIndex(chunks.start), content)
            }
            Ok(_) => continue,
            Err(error) => Next::Failed(error),
        };
        if order.send(next).is_err() {
            return;
        }
    }
}

fn read_all(repository: &Repository, geometry: Geometry, waiting: &Mutex<Receiver<Request>>) {
    loop {
        let request = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((id, answer)) = request else { return };
        let mut content = vec![0; geometry.chunk_size() as usize];
        let read = repository.read_chunk(&id, &mut content).map(|()| content);
        // The writer has failed if nobody wants the answer.
        let _ = answer.send(read);
    }
}

fn write_zeros(out: &mut impl Write, geometry: Geometry, chunks: Range<u64>) -> io::Result<()> {
    if chunks.is_empty() {
        return Ok(());
    }
    let zeros = vec![0; geometry.chunk_size() as usize];
    for index in chunks {
        out.write_all(&zeros[..geometry.len_of(ChunkIndex(index))])?;
    }
    Ok(())
}
