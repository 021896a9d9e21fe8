//! What an export writes: chunks of data, and ranges of zeros.

use std::ops::Range;

use cairn_store::{ChunkId, ChunkIndex, Repository, Result, Snapshot};

/// The most chunks of zeros in one job. It bounds the time of a job.
const MAX_ZEROS: u64 = 1 << 12;

/// A part of the disk to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    /// One chunk if there is data, otherwise any number of them.
    pub(crate) chunks: Range<u64>,
    /// The data; `None` for zeros.
    pub(crate) data: Option<ChunkId>,
    /// Whether space was allocated for it in a new file.
    pub(crate) is_allocated: bool,
}

impl Job {
    fn data(index: ChunkIndex, id: ChunkId) -> Job {
        Job { data: Some(id), ..Job::zeros(index.0..index.0 + 1) }
    }

    fn zeros(chunks: Range<u64>) -> Job {
        Job { chunks, data: None, is_allocated: false }
    }
}

/// The chunks with data from `from` on, for a file that reads as zeros where nothing is written.
pub(crate) fn data(
    repository: &Repository,
    snapshot: &Snapshot,
    from: u64,
) -> impl Iterator<Item = Result<Job>> + Send + use<> {
    let chunks = repository.chunks(&snapshot.root, snapshot.geometry);
    let chunks = chunks.starting_at(ChunkIndex(from));
    chunks.map(|chunk| chunk.map(|(index, id)| Job::data(index, id)))
}

/// The whole disk, for a device that has other content.
pub(crate) fn whole(
    repository: &Repository,
    snapshot: &Snapshot,
) -> impl Iterator<Item = Result<Job>> + Send + use<> {
    let count = snapshot.geometry.chunk_count();
    let mut jobs = data(repository, snapshot, 0).peekable();
    let mut at = 0;
    std::iter::from_fn(move || {
        let end = match jobs.peek() {
            Some(Ok(job)) => job.chunks.start,
            Some(Err(_)) => return jobs.next(),
            None => count,
        };
        if at < end {
            let chunks = at..end.min(at + MAX_ZEROS);
            at = chunks.end;
            return Some(Ok(Job::zeros(chunks)));
        }
        at = end + 1;
        jobs.next()
    })
}

/// The chunks of `new` that differ from `base`.
pub(crate) fn differences(
    repository: &Repository,
    base: &Snapshot,
    new: &Snapshot,
) -> Result<impl Iterator<Item = Result<Job>> + Send + use<>> {
    let count = new.geometry.chunk_count();
    let jobs = repository.differences(base, new)?.map(|one| {
        one.map(|one| Job { data: one.new, ..Job::zeros(one.index.0..one.index.0 + 1) })
    });
    // Beyond the end of the new disk there is nothing to write.
    Ok(jobs.take_while(move |job| !job.as_ref().is_ok_and(|job| job.chunks.start >= count)))
}
