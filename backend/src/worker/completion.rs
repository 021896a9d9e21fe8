//! What follows the end of an operation: the next operation of its request, or the answer.

use std::io;

use super::Worker;
use super::guest_data::scatter;
use super::jobs::{CopyingWrite, Job};
use super::queue::{Chain, Outcome};
use super::submit::{SplitRequest, Tag, zero_behind_end};
use crate::memory::OutsideMemory;
use crate::mirror::BlockCopy;
use crate::mirror::files::disk_file::is_medium_error;
use crate::uring::{Completion, Io, Memory};

impl Worker {
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
