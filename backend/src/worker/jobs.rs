//! The path of one request: planned, submitted, completed.

use std::io;

use vm_memory::{Bytes, GuestAddress};

use super::queue::{Chain, Outcome};
use super::{Command, Worker};
use crate::mapping::Buffer;
use crate::memory::{GuestMap, OutsideMemory};
use crate::mirror::claims::WriteKind;
use crate::mirror::files::data_sync::RunningSync;
use crate::mirror::files::disk_file::is_medium_error;
use crate::mirror::layout::{BLOCK_BYTES, SECTOR_BYTES, Span};
use crate::mirror::{BlockCopy, Permit, Plan};
use crate::request::{RequestKind, Segment};
use crate::uring::{Completion, Io, MAX_IOVECS, Memory};

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
    /// The first half of a write that can write only whole blocks: reads them.
    ReadForWrite {
        chain: Chain,
        permit: Permit,
        span: Span,
        data: Vec<Segment>,
    },
    /// The same for a part of a request that zeroes `span`, by the request's key.
    ReadForZeros {
        key: usize,
        span: Span,
    },
    /// One operation of a request that has several, by the request's key.
    Part(usize),
    /// A sync of the mirror's data, for the running flush.
    Sync(RunningSync),
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
        let offset = self.context.disk.mirror.io_span(span).offset;
        self.ring.start(Io::Read { offset, memory }, tag)
    }

    fn submit_write(&mut self, job: Job, memory: Option<Memory>, permit: Permit) -> io::Result<()> {
        match (job, memory) {
            (Job::Write { chain, span, data }, Some(memory)) => {
                let mirror = &self.context.disk.mirror;
                if mirror.write_kind(span) == WriteKind::ReadModifyWrite {
                    let io = Io::Read { offset: mirror.io_span(span).offset, memory };
                    return self.ring.start(io, Tag::ReadForWrite { chain, permit, span, data });
                }
                self.gather_and_write(chain, permit, (span, &data), memory)
            }
            (Job::Zero { chain, span }, _) => {
                let mirror = &self.context.disk.mirror;
                let operations = zeroing(span, mirror.layout().covered(span).span());
                let left = operations.len();
                let key = self.parts.insert(SplitRequest { chain, permit, left, result: Ok(()) });
                for operation in operations {
                    self.submit_zeros(operation, key)?;
                }
                Ok(())
            }
            _ => unreachable!("a read has no permit, and a write has memory"),
        }
    }

    /// Writes the guest's data. If `memory` is a buffer, the data is copied into it first. The buffer
    /// may have more blocks than `span`, with their content.
    fn gather_and_write(
        &mut self,
        chain: Chain,
        permit: Permit,
        (span, data): (Span, &[Segment]),
        mut memory: Memory,
    ) -> io::Result<()> {
        let mirror = &self.context.disk.mirror;
        let io_span = mirror.io_span(span);
        if let Memory::Pooled(buffer) = &mut memory {
            let part = &mut buffer[(span.offset - io_span.offset) as usize..][..span.len as usize];
            let map = self.queue.as_ref().map(|queue| queue.map()).ok_or(OutsideMemory);
            if map.and_then(|map| gather(map, data, part)).is_err() {
                drop(memory);
                mirror.complete(permit, false);
                mirror.notify();
                self.end(chain, Outcome::Failed);
                return Ok(());
            }
            zero_behind_end(buffer, io_span, mirror.layout().size());
        }
        self.ring.start(Io::Write { offset: io_span.offset, memory }, Tag::Write { chain, permit })
    }

    /// Submits a part of the request with this key that makes a span read as zeros.
    fn submit_zeros(&mut self, operation: ZeroOperation, key: usize) -> io::Result<()> {
        let mirror = &self.context.disk.mirror;
        let span = match operation {
            ZeroOperation::Punch(span) => return self.ring.start(Io::Punch(span), Tag::Part(key)),
            ZeroOperation::Write(span) => span,
        };
        let io_span = mirror.io_span(span);
        let memory = Memory::Buffer(Buffer::zeroed(io_span.len as usize));
        match mirror.write_kind(span) {
            WriteKind::Plain => {
                self.ring.start(Io::Write { offset: span.offset, memory }, Tag::Part(key))
            }
            WriteKind::ReadModifyWrite => {
                let io = Io::Read { offset: io_span.offset, memory };
                self.ring.start(io, Tag::ReadForZeros { key, span })
            }
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
                let skip = span.offset - self.context.disk.mirror.io_span(span).offset;
                let result = match (result, &io) {
                    (Ok(()), Io::Read { memory: Memory::Pooled(buffer), .. }) => self
                        .map()
                        .ok_or(OutsideMemory)
                        .and_then(|map| scatter(map, &data, &buffer[skip as usize..]))
                        .map_err(|OutsideMemory| io::ErrorKind::InvalidInput.into()),
                    (result, _) => result,
                };
                // Also after a failure, because a part may have been written.
                if let Some(map) = self.map() {
                    map.mark_filled(&data);
                }
                self.finish(chain, result, span.len as u32);
            }
            Tag::Write { chain, permit } => {
                self.context.disk.mirror.complete(permit, result.is_ok());
                self.written(chain, result)?;
            }
            Tag::ReadForWrite { chain, permit, span, data } => {
                let Io::Read { memory, .. } = io else {
                    unreachable!("blocks are read into memory")
                };
                if result.is_ok() {
                    return self.gather_and_write(chain, permit, (span, &data), memory);
                }
                drop(memory);
                self.context.disk.mirror.complete(permit, false);
                self.context.disk.mirror.notify();
                return self.written(chain, result);
            }
            Tag::ReadForZeros { key, span } => {
                let Io::Read { offset, memory: Memory::Buffer(mut buffer) } = io else {
                    unreachable!("blocks are read into a buffer")
                };
                if result.is_err() {
                    return self.finish_part(key, result);
                }
                buffer[(span.offset - offset) as usize..][..span.len as usize].fill(0);
                let layout = self.context.disk.mirror.layout();
                zero_behind_end(&mut buffer, layout.blocks(span).span(), layout.size());
                let io = Io::Write { offset, memory: Memory::Buffer(buffer) };
                return self.ring.start(io, Tag::Part(key));
            }
            Tag::Part(key) => return self.finish_part(key, result),
            Tag::Sync(sync) => return self.finish_flush(&sync.end(result)),
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

    /// Ends an operation of the request with this key. After the last one the request is answered.
    fn finish_part(&mut self, key: usize, result: io::Result<()>) -> io::Result<()> {
        let parts = &mut self.parts[key];
        parts.left -= 1;
        if result.is_err() {
            parts.result = result;
        }
        if parts.left > 0 {
            return Ok(());
        }
        let SplitRequest { chain, permit, result, .. } = self.parts.remove(key);
        self.context.disk.mirror.complete(permit, result.is_ok());
        self.written(chain, result)
    }

    /// Handles a copy that was read into memory. It stays there, or goes on to the spill file.
    fn copy_read(
        &mut self,
        copy: BlockCopy,
        key: usize,
        memory: Memory,
        read: io::Result<()>,
    ) -> io::Result<()> {
        let file = match read {
            Ok(()) if copy.is_spilled() => copy.spill_file(),
            read => return self.finish_copy(copy, key, memory, read),
        };
        match file {
            Ok(None) => self.finish_copy(copy, key, memory, Ok(())),
            Ok(Some(file)) => {
                self.counters().spilled.add(1);
                let offset = self.context.disk.mirror.copy_source(&copy).offset;
                self.ring.start(Io::Spill { file, offset, memory }, Tag::Spill(copy, key))
            }
            Err(error) => self.finish_copy(copy, key, memory, Err(error)),
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
        // enough. If another thread syncs it, the flusher waits for that.
        if self.context.flusher.is_current()
            && let Some(sync) = self.context.disk.data_sync.try_begin()
        {
            return self.ring.start(Io::Sync, Tag::Sync(sync));
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
        let outcome = if written.is_ok() { Outcome::Ok(len as u32) } else { Outcome::Failed };
        self.end(chain, outcome);
    }

    /// Answers a request whose operations have ended.
    pub(super) fn finish(&mut self, chain: Chain, result: io::Result<()>, written: u32) {
        match result {
            Ok(()) => self.end(chain, Outcome::Ok(written)),
            Err(error) => {
                if let Some(requests) = self.io_errors.count(self.now) {
                    tracing::error!(%error, requests, "I/O on the mirror failed");
                }
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

/// One operation of a request that makes a span read as zeros.
enum ZeroOperation {
    /// Writes zeros.
    Write(Span),
    /// Makes whole blocks a hole.
    Punch(Span),
}

/// The operations that make `span` read as zeros: a hole for the blocks that it covers completely,
/// and writes of zeros for the rest.
fn zeroing(span: Span, covered: Span) -> Vec<ZeroOperation> {
    let zeros = |from: u64, to: u64| {
        (from < to).then(|| ZeroOperation::Write(Span { offset: from, len: to - from }))
    };
    if covered.len == 0 {
        return zeros(span.offset, span.end()).into_iter().collect();
    }
    debug_assert!(covered.offset - span.offset < BLOCK_BYTES);
    let head = zeros(span.offset, covered.offset);
    let tail = zeros(covered.end(), span.end());
    head.into_iter().chain([ZeroOperation::Punch(covered)]).chain(tail).collect()
}

/// Zeros the part of `blocks`, with the content `buffer`, that is behind the end of the disk. Blocks
/// that were read may hold anything there.
fn zero_behind_end(buffer: &mut [u8], blocks: Span, disk_size: u64) {
    if blocks.end() > disk_size {
        buffer[(disk_size - blocks.offset) as usize..].fill(0);
    }
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
