//! The path of one request: planned, submitted, completed.

use std::io;

use vm_memory::{Bytes, GuestAddress};

use super::queue::{Chain, Outcome};
use super::{Command, Worker};
use crate::mapping::Buffer;
use crate::memory::{GuestMap, OutsideMemory};
use crate::mirror::files::disk_file::is_medium_error;
use crate::mirror::layout::{BLOCK_BYTES, SECTOR_BYTES, Span};
use crate::mirror::{BlockCopy, Permit, Plan};
use crate::request::{RequestKind, Segment};
use crate::uring::{Completion, Io, Memory};

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

/// What a submitted operation belongs to.
pub(super) enum Tag {
    Read {
        chain: Chain,
        data: Vec<Segment>,
        span: Span,
        is_retry: bool,
    },
    Write {
        chain: Chain,
        permit: Permit,
    },
    /// One operation of a request that has several, by the request's key.
    Part(usize),
    /// A sync of the mirror's data, for the running flush.
    Sync,
    /// A copy for the write with this key.
    Copy(BlockCopy, usize),
    Spill(BlockCopy, usize),
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

/// A request that consists of several operations.
pub(super) struct SplitRequest {
    chain: Chain,
    permit: Permit,
    left: usize,
    result: io::Result<()>,
}

impl Worker {
    /// Accepts a request that was popped.
    pub(super) fn accept(&mut self, chain: Chain, kind: RequestKind) -> io::Result<()> {
        let layout = *self.context.disk.mirror.layout();
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
                    self.end(job.into_chain(), Outcome::Failed);
                    // Other requests may wait for the memory that this one had. (A request that is
                    // parked below waits for an event, and that event wakes the others too.)
                    drop(memory);
                    context.disk.mirror.notify();
                    return Ok(());
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
            Plan::RecordIntent(span) => context.flusher.record_intent(span),
            Plan::Wait => {}
        }
        self.park(job)
    }

    fn park(&mut self, job: Job) -> io::Result<()> {
        self.counters().parked.add(1);
        self.parked.push(job);
        Ok(())
    }

    fn submit_read(&mut self, job: Job, memory: Option<Memory>) -> io::Result<()> {
        let (Job::Read { chain, span, data, is_retry }, Some(memory)) = (job, memory) else {
            unreachable!("only reads are submitted without a permit, and they have memory")
        };
        let tag = Tag::Read { chain, data, span, is_retry };
        self.ring.start(Io::Read { offset: span.offset, memory }, tag)
    }

    fn submit_write(&mut self, job: Job, memory: Option<Memory>, permit: Permit) -> io::Result<()> {
        match (job, memory) {
            (Job::Write { chain, span, data }, Some(mut memory)) => {
                if let Memory::Pooled(buffer) = &mut memory
                    && self
                        .map()
                        .ok_or(OutsideMemory)
                        .and_then(|map| gather(map, &data, buffer))
                        .is_err()
                {
                    self.context.disk.mirror.complete(permit, false);
                    self.end(chain, Outcome::Failed);
                    return Ok(());
                }
                let io = Io::Write { offset: span.offset, memory };
                self.ring.start(io, Tag::Write { chain, permit })
            }
            (Job::Zero { chain, span }, _) => {
                let operations =
                    zeroing(span, self.context.disk.mirror.layout().covered(span).span());
                let left = operations.len();
                let key = self.parts.insert(SplitRequest { chain, permit, left, result: Ok(()) });
                for io in operations {
                    self.ring.start(io, Tag::Part(key))?;
                }
                Ok(())
            }
            _ => unreachable!("a read has no permit, and a write has memory"),
        }
    }

    fn map(&self) -> Option<&GuestMap> {
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
        let direct = iovecs.iter().all(|iovec| {
            (iovec.iov_base as usize).is_multiple_of(alignment.memory)
                && (iovec.iov_len as u64).is_multiple_of(alignment.offset)
        });
        if direct {
            return Ok(Some(Memory::Guest { iovecs, _map: map.clone() }));
        }
        let buffer = self.context.bounce_buffers.take(span.len as usize).ok_or(NoMemory::Later)?;
        Ok(Some(Memory::Pooled(buffer)))
    }

    /// Handles the end of an operation.
    pub(super) fn completed(&mut self, done: Completion<Tag>) -> io::Result<()> {
        let Completion { io, tag, result } = done;
        let bounced = matches!(
            (&tag, &io),
            (
                Tag::Read { .. } | Tag::Write { .. },
                Io::Read { memory: Memory::Pooled(_), .. }
                    | Io::Write { memory: Memory::Pooled(_), .. }
            )
        );
        match tag {
            Tag::Read { chain, data, span, is_retry: false }
                if result.as_ref().is_err_and(is_medium_error) =>
            {
                for chunk in self.context.disk.mirror.layout().chunks(span) {
                    self.context.fetcher.mark_suspect(chunk);
                }
                self.park(Job::Read { chain, span, data, is_retry: true })?;
            }
            Tag::Read { chain, data, span, .. } => {
                let result = match (result, &io) {
                    (Ok(()), Io::Read { memory: Memory::Pooled(buffer), .. }) => self
                        .map()
                        .ok_or(OutsideMemory)
                        .and_then(|map| scatter(map, &data, buffer))
                        .map_err(|OutsideMemory| io::ErrorKind::InvalidInput.into()),
                    (result, _) => result,
                };
                // Also after a failure, because a part may have been written.
                if let Some(map) = self.map() {
                    map.mark_all(&data);
                }
                self.finish(chain, result, span.len as u32);
            }
            Tag::Write { chain, permit } => {
                self.context.disk.mirror.complete(permit, result.is_ok());
                self.written(chain, result)?;
            }
            Tag::Part(key) => {
                let parts = &mut self.parts[key];
                parts.left -= 1;
                if result.is_err() {
                    parts.result = result;
                }
                if parts.left == 0 {
                    let SplitRequest { chain, permit, result, .. } = self.parts.remove(key);
                    self.context.disk.mirror.complete(permit, result.is_ok());
                    self.written(chain, result)?;
                }
            }
            Tag::Sync => return self.finish_flush(&result),
            Tag::Spill(copy, key) => {
                let Io::Spill { memory, .. } = io else {
                    unreachable!("a spill is written to the spill file")
                };
                return self.finish_copy(copy, key, memory, result);
            }
            Tag::Copy(copy, key) => {
                let Io::Read { memory, .. } = io else {
                    unreachable!("a copy is read from the data file")
                };
                return self.copy_read(copy, key, memory, result);
            }
        }
        if bounced {
            drop(io);
            self.context.disk.mirror.notify();
        }
        Ok(())
    }

    /// Handles a copy that was read into memory. It stays there, or goes on to the spill file.
    fn copy_read(
        &mut self,
        copy: BlockCopy,
        key: usize,
        memory: Memory,
        read: io::Result<()>,
    ) -> io::Result<()> {
        match copy.spill_offset() {
            Some(offset) if read.is_ok() => {
                self.counters().spilled.add(1);
                self.ring.start(Io::Spill { offset, memory }, Tag::Spill(copy, key))
            }
            _ => self.finish_copy(copy, key, memory, read),
        }
    }

    /// Ends a copy. After the last one, the write that needed them is planned again.
    fn finish_copy(
        &mut self,
        copy: BlockCopy,
        key: usize,
        memory: Memory,
        result: io::Result<()>,
    ) -> io::Result<()> {
        let Memory::Pooled(buffer) = memory else {
            unreachable!("copies are made into pooled buffers")
        };
        self.context.disk.mirror.finish_copy(copy, buffer, result);
        self.copying[key].left -= 1;
        if self.copying[key].left > 0 {
            return Ok(());
        }
        let CopyingWrite { job, .. } = self.copying.remove(key);
        match self.state.may_plan() {
            true => self.plan(job),
            false => self.park(job),
        }
    }

    /// Ends a write. In write-through mode the write is answered when it is durable.
    fn written(&mut self, chain: Chain, result: io::Result<()>) -> io::Result<()> {
        if result.is_ok() && self.context.guest.is_write_through() {
            return self.flush(chain);
        }
        self.finish(chain, result, 0);
        Ok(())
    }

    /// FLUSH: makes completed writes durable.
    fn flush(&mut self, chain: Chain) -> io::Result<()> {
        self.flushes.push(chain);
        self.start_flush()
    }

    /// Starts a flush for all requests that wait for one, unless a flush is running.
    fn start_flush(&mut self) -> io::Result<()> {
        if !self.flushes.start() {
            return Ok(());
        }
        // If no block has become present since the map was last written, a sync of the data is
        // enough.
        if self.context.flusher.is_current() {
            return self.ring.start(Io::Sync, Tag::Sync);
        }
        let mailbox = self.mailbox.clone();
        let done = move |result| mailbox.send(Command::Flushed(result));
        self.context.flusher.request(Box::new(done));
        Ok(())
    }

    /// Answers the requests whose flush has ended.
    pub(super) fn finish_flush(&mut self, result: &io::Result<()>) -> io::Result<()> {
        for chain in self.flushes.finish() {
            match result {
                Ok(()) => self.end(chain, Outcome::Ok(0)),
                Err(error) => self.finish(chain, Err(io::Error::from(error.kind())), 0),
            }
        }
        self.start_flush()
    }

    fn get_id(&mut self, chain: Chain, data: &[Segment]) {
        let id = self.context.serial;
        let available: usize = data.iter().map(|segment| segment.len as usize).sum();
        let len = id.len().min(available);
        let written =
            self.map().ok_or(OutsideMemory).and_then(|map| scatter(map, data, &id[..len]));
        if let Some(map) = self.map() {
            map.mark_all(data);
        }
        let outcome = if written.is_ok() { Outcome::Ok(len as u32) } else { Outcome::Failed };
        self.end(chain, outcome);
    }

    /// Answers a request whose operations have ended.
    pub(super) fn finish(&mut self, chain: Chain, result: io::Result<()>, written: u32) {
        match result {
            Ok(()) => self.end(chain, Outcome::Ok(written)),
            Err(error) => {
                tracing::error!(%error, "I/O on the mirror failed");
                self.end(chain, Outcome::Failed);
            }
        }
    }

    pub(super) fn end(&mut self, chain: Chain, outcome: Outcome) {
        let counters = self.counters();
        if !matches!(outcome, Outcome::Ok(_)) {
            counters.errors.add(1);
        }
        counters.answer(chain.class, self.now.saturating_duration_since(chain.since));
        self.queue
            .as_mut()
            .expect("a queue stays until its last chain is back")
            .complete(chain, outcome);
    }
}

/// The operations that make `span` read as zeros: a hole for the blocks that it covers completely,
/// and writes of zeros for the rest.
fn zeroing(span: Span, covered: Span) -> Vec<Io> {
    let zeros = |from: u64, to: u64| {
        (from < to).then(|| Io::Write {
            offset: from,
            memory: Memory::Buffer(Buffer::zeroed((to - from) as usize)),
        })
    };
    if covered.len == 0 {
        return zeros(span.offset, span.end()).into_iter().collect();
    }
    debug_assert!(covered.offset - span.offset < BLOCK_BYTES);
    let head = zeros(span.offset, covered.offset);
    let tail = zeros(covered.end(), span.end());
    head.into_iter().chain([Io::Punch(covered)]).chain(tail).collect()
}

/// Copies guest memory into a buffer.
fn gather(map: &GuestMap, data: &[Segment], mut buffer: &mut [u8]) -> Result<(), OutsideMemory> {
    for segment in data {
        let (piece, rest) = buffer.split_at_mut(segment.len as usize);
        map.memory().read_slice(piece, GuestAddress(segment.address)).map_err(|_| OutsideMemory)?;
        buffer = rest;
    }
    Ok(())
}

/// Copies a buffer into guest memory, as far as the buffer goes.
fn scatter(map: &GuestMap, data: &[Segment], mut buffer: &[u8]) -> Result<(), OutsideMemory> {
    for segment in data {
        let (piece, rest) = buffer.split_at(buffer.len().min(segment.len as usize));
        map.memory()
            .write_slice(piece, GuestAddress(segment.address))
            .map_err(|_| OutsideMemory)?;
        buffer = rest;
    }
    Ok(())
}
