//! Starts the operations of a request on the ring.

use std::io;

use super::Worker;
use super::guest_data::gather;
use super::jobs::Job;
use super::queue::{Chain, Outcome};
use crate::mapping::Buffer;
use crate::memory::OutsideMemory;
use crate::mirror::claims::WriteKind;
use crate::mirror::files::data_sync::RunningSync;
use crate::mirror::layout::{BLOCK_BYTES, Span};
use crate::mirror::{BlockCopy, Permit};
use crate::request::Segment;
use crate::uring::{Io, Memory};

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
    /// The first half of a write of zeros to parts of blocks, in `span`: reads them, for the request
    /// with this key.
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

/// A request that consists of several operations.
pub(super) struct SplitRequest {
    pub(super) chain: Chain,
    pub(super) permit: Permit,
    pub(super) left: usize,
    pub(super) result: io::Result<()>,
}

impl Worker {
    pub(super) fn submit_read(&mut self, job: Job, memory: Option<Memory>) -> io::Result<()> {
        let (Job::Read { chain, span, data, is_retry }, Some(memory)) = (job, memory) else {
            unreachable!("only reads are submitted without a permit, and they have memory")
        };
        let tag = Tag::Read { chain, data, span, is_retry };
        let offset = self.context.disk.mirror.io_span(span).offset;
        self.ring.start(Io::Read { offset, memory }, tag)
    }

    pub(super) fn submit_write(
        &mut self,
        job: Job,
        memory: Option<Memory>,
        permit: Permit,
    ) -> io::Result<()> {
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
    pub(super) fn gather_and_write(
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
pub(super) fn zero_behind_end(buffer: &mut [u8], blocks: Span, disk_size: u64) {
    if blocks.end() > disk_size {
        buffer[(disk_size - blocks.offset) as usize..].fill(0);
    }
}
