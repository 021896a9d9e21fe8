//! The way of a request from the queue to the ring: accepted, planned, parked.

use std::io;

use super::Worker;
use super::guest_data::scatter;
use super::queue::{Chain, Outcome};
use super::submit::Tag;
use crate::memory::{GuestMap, OutsideMemory};
use crate::mirror::Plan;
use crate::mirror::layout::{SECTOR_BYTES, Span};
use crate::request::{RequestKind, Segment};
use crate::uring::{Io, MAX_IOVECS, Memory};

/// A request that is not submitted. It holds nothing but its chain.
pub(super) enum Job {
    Read {
        chain: Chain,
        span: Span,
        data: Vec<Segment>,
        /// Whether the read has met a bad block before.
        is_retry: bool,
    },
    Write {
        chain: Chain,
        span: Span,
        data: Vec<Segment>,
    },
    /// A discard or a write of zeros.
    Zero {
        chain: Chain,
        span: Span,
    },
}

impl Job {
    pub(super) fn into_chain(self) -> Chain {
        match self {
            Job::Read { chain, .. } | Job::Write { chain, .. } | Job::Zero { chain, .. } => chain,
        }
    }
}

/// A write that waits for its own copies.
pub(super) struct CopyingWrite {
    pub(super) job: Job,
    pub(super) left: usize,
}

/// Why there is no memory for a request.
enum NoMemory {
    /// The guest named memory that it does not have.
    Outside,
    /// All bounce buffers are in use.
    Later,
}

impl Worker {
    /// Accepts a request that was popped.
    pub(super) fn accept(&mut self, chain: Chain, kind: RequestKind) -> io::Result<()> {
        let layout = self.context.disk.mirror.layout();
        let counters = self.counters();
        counters.taken.add(1);
        let writes = matches!(
            kind,
            RequestKind::Write { .. }
                | RequestKind::Discard { .. }
                | RequestKind::WriteZeroes { .. }
        );
        if writes && self.context.disk.read_only {
            self.end(chain, Outcome::Failed);
            return Ok(());
        }
        match kind {
            RequestKind::Read { sector, data, len } => match layout.span(sector, len) {
                Some(span) => {
                    counters.reads.add(1);
                    counters.read_bytes.add(len);
                    return self.plan(Job::Read { chain, span, data, is_retry: false });
                }
                None => self.end(chain, Outcome::Failed),
            },
            RequestKind::Write { sector, data, len } => match layout.span(sector, len) {
                Some(span) => {
                    counters.writes.add(1);
                    counters.written_bytes.add(len);
                    return self.plan(Job::Write { chain, span, data });
                }
                None => self.end(chain, Outcome::Failed),
            },
            RequestKind::Flush => {
                counters.flushes.add(1);
                return self.flush(chain);
            }
            RequestKind::GetId { data } => self.get_id(chain, &data),
            RequestKind::Discard { sector, sectors }
            | RequestKind::WriteZeroes { sector, sectors } => {
                let Some(span) = layout.span(sector, u64::from(sectors) * SECTOR_BYTES) else {
                    self.end(chain, Outcome::Failed);
                    return Ok(());
                };
                counters.discards.add(1);
                // A discard is a hint: blocks that it covers only partly stay as they are.
                let span = if matches!(kind, RequestKind::Discard { .. }) {
                    let blocks = layout.covered(span).span();
                    Span {
                        len: blocks.len.min(layout.size().saturating_sub(blocks.offset)),
                        ..blocks
                    }
                } else {
                    span
                };
                if span.len == 0 {
                    self.end(chain, Outcome::Ok(0));
                } else {
                    return self.plan(Job::Zero { chain, span });
                }
            }
        }
        Ok(())
    }

    /// Submits a request if it can go on, and parks it otherwise.
    pub(super) fn plan(&mut self, job: Job) -> io::Result<()> {
        let context = self.context.clone();
        let memory = match self.memory_of(&job) {
            Ok(memory) => memory,
            Err(NoMemory::Outside) => {
                self.end(job.into_chain(), Outcome::Failed);
                return Ok(());
            }
            Err(NoMemory::Later) => return self.park(job),
        };
        let plan = match &job {
            Job::Read { span, is_retry, .. } => {
                let mut chunks = context.disk.mirror.layout().chunks(*span);
                if *is_retry && chunks.any(|chunk| context.fetcher.is_suspect(chunk)) {
                    drop(memory);
                    return self.park(job);
                }
                let missing = context.disk.mirror.plan_read(*span);
                if missing.is_empty() {
                    return self.submit_read(job, memory);
                }
                Plan::Fill(missing)
            }
            Job::Write { span, .. } | Job::Zero { span, .. } => {
                context.disk.mirror.plan_write(&mut self.epoch_handle, self.index, *span)
            }
        };
        match plan {
            Plan::Direct(permit) => return self.submit_write(job, memory, permit),
            Plan::Fill(chunks) => {
                // Requests all of them first, and then checks whether one is known to fail.
                let refused =
                    chunks.into_iter().filter(|chunk| !context.fetcher.request(*chunk)).count();
                if refused > 0 {
                    return self.refuse(job, memory);
                }
            }
            Plan::Copy(copies) => {
                let left = copies.len();
                let key = self.copying.insert(CopyingWrite { job, left });
                for (copy, buffer) in copies {
                    let span = context.disk.mirror.copy_source(&copy);
                    let io = Io::Read { offset: span.offset, memory: Memory::Pooled(buffer) };
                    self.ring.start(io, Tag::Copy(copy, key))?;
                    self.counters().copies.add(1);
                    self.counters().copied_bytes.add(span.len);
                }
                return Ok(());
            }
            Plan::RecordIntent(span) => {
                if !context.flusher.record_intent(span) {
                    return self.refuse(job, memory);
                }
            }
            Plan::Wait => {}
        }
        self.park(job)
    }

    /// Fails a request for which something that it needs cannot be done.
    fn refuse(&mut self, job: Job, memory: Option<Memory>) -> io::Result<()> {
        self.end(job.into_chain(), Outcome::Failed);
        // Other requests may wait for the memory that this one had. (A request that is parked waits
        // for an event, and that event wakes the others too.)
        drop(memory);
        self.context.disk.mirror.notify();
        Ok(())
    }

    pub(super) fn park(&mut self, job: Job) -> io::Result<()> {
        self.counters().parked.add(1);
        self.parked.push(job);
        Ok(())
    }

    fn get_id(&mut self, chain: Chain, data: &[Segment]) {
        let id = self.context.serial;
        let available: usize = data.iter().map(|segment| segment.len as usize).sum();
        let len = id.len().min(available);
        let written =
            self.map().ok_or(OutsideMemory).and_then(|map| scatter(map, data, &id[..len]));
        let outcome = if written.is_ok() { Outcome::Ok(len as u32) } else { Outcome::Failed };
        self.end(chain, outcome);
    }

    pub(super) fn map(&self) -> Option<&GuestMap> {
        self.queue.as_ref().map(|queue| queue.map().as_ref())
    }

    /// The memory for a request's data: the guest's own memory, or a bounce buffer if direct I/O
    /// cannot use that. Guests can need many bounce buffers at once, so they are bounded for the
    /// whole disk.
    fn memory_of(&self, job: &Job) -> Result<Option<Memory>, NoMemory> {
        let (Job::Read { span, data, .. } | Job::Write { span, data, .. }) = job else {
            return Ok(None);
        };
        let map = self.queue.as_ref().ok_or(NoMemory::Outside)?.map();
        let iovecs = map.iovecs(data).map_err(|OutsideMemory| NoMemory::Outside)?;
        let alignment = self.context.disk.data.alignment();
        let io_span = self.context.disk.mirror.io_span(*span);
        let direct = io_span == *span
            && iovecs.len() <= MAX_IOVECS
            && iovecs.iter().all(|iovec| {
                (iovec.iov_base as usize).is_multiple_of(alignment.memory)
                    && (iovec.iov_len as u64).is_multiple_of(alignment.offset)
            });
        if direct {
            return Ok(Some(Memory::Guest { iovecs, _map: map.clone() }));
        }
        let buffer =
            self.context.bounce_buffers.take(io_span.len as usize).ok_or(NoMemory::Later)?;
        Ok(Some(Memory::Pooled(buffer)))
    }
}
