//! One io_uring on a data file and on spill files, owned by one thread.
//!
//! An operation is handed over as a whole. The ring's table owns the operation and its buffers
//! until the kernel's completion arrives, and only then returns it. That ownership is the safety
//! argument of every unsafe block here. Dropping the ring waits for the operations in flight.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use slab::Slab;

use crate::mapping::Buffer;
use crate::memory::GuestMap;
use crate::mirror::cow::buffer_pool::PooledBuffer;
use crate::mirror::files::disk_file::DiskFile;
use crate::mirror::layout::Span;

/// The most pieces of memory that the kernel takes for one operation.
pub(crate) const MAX_IOVECS: usize = libc::UIO_MAXIOV as usize;

/// Memory that stays in place while the kernel uses it.
pub(crate) enum Memory {
    /// The guest's memory, through a map that keeps it mapped.
    Guest { iovecs: Vec<libc::iovec>, _map: Arc<GuestMap> },
    /// A small buffer of zeros.
    Buffer(Buffer),
    /// A buffer of a bounded pool: a copy, or a bounce buffer of an unaligned request.
    Pooled(PooledBuffer),
}

/// An operation on the ring's files.
pub(crate) enum Io {
    Read {
        offset: u64,
        memory: Memory,
    },
    Write {
        offset: u64,
        memory: Memory,
    },
    /// Writes to the spill file of a layer.
    Spill {
        file: Arc<DiskFile>,
        offset: u64,
        memory: Memory,
    },
    /// Turns a span into zeros without allocating space.
    Punch(Span),
    /// Makes completed writes durable.
    Sync,
}

struct Entry<T> {
    io: Io,
    /// The iovecs that remain: those of the guest's memory, or the single iovec of a buffer. Short
    /// transfers shorten them.
    iovecs: Vec<libc::iovec>,
    /// The number of bytes that earlier, short transfers have moved.
    done: u64,
    tag: T,
}

/// A finished operation, with everything that was handed over.
pub(crate) struct Completion<T> {
    pub(crate) io: Io,
    pub(crate) tag: T,
    pub(crate) result: io::Result<()>,
}

/// What [`Ring::reap`] returns.
pub(crate) enum Reaped<T> {
    /// An operation has ended.
    Done(Completion<T>),
    /// A polled descriptor is ready. `id` is the id of the poll. The poll goes on, unless it has
    /// `ended`.
    Ready { id: u32, ended: bool },
    /// The signal with this id was sent, or has failed.
    Signalled { id: u32 },
}

/// Marks the user data of polls. The low bits are the id of the poll.
const POLL_FLAG: u64 = 1 << 63;
/// Marks the user data of signals. The low bits are the id of the signal.
const SIGNAL_FLAG: u64 = 1 << 61;
/// The user data of operations whose completions are ignored.
const SILENT_DATA: u64 = 1 << 62;

/// The data file, by its registered index.
const DISK_FILE: types::Fixed = types::Fixed(0);

/// The number of operations that are submitted at once. The kernel holds back the first one until
/// it has prepared the last one: with a larger batch the disk waits, with a smaller one there are
/// more system calls.
const SUBMIT_BATCH: usize = 4;

/// The value that signals an event descriptor.
static EVENT_VALUE: u64 = 1;

/// A ring and its operations in flight, each with a tag of the caller.
pub(crate) struct Ring<T> {
    ring: IoUring,
    entries: Slab<Entry<T>>,
}

impl<T> Ring<T> {
    /// Creates a ring for operations on the data file `file`, which must outlive it.
    pub(crate) fn new(file: RawFd, depth: u32) -> io::Result<Ring<T>> {
        let ring = IoUring::builder()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(depth.next_power_of_two() * 4)
            .build(depth.next_power_of_two())
            .or_else(|_| IoUring::new(depth.next_power_of_two()))?;
        ring.submitter().register_files(&[file])?;
        Ok(Ring { ring, entries: Slab::new() })
    }

    /// The number of operations that are not complete.
    pub(crate) fn in_flight(&self) -> usize {
        self.entries.len()
    }

    /// Queues an operation. The kernel gets it when a batch is queued, and with the next
    /// [`Ring::enter`] at the latest.
    pub(crate) fn start(&mut self, io: Io, tag: T) -> io::Result<()> {
        let (iovecs, io) = match io {
            Io::Read { offset, mut memory } => {
                (take_iovecs(&mut memory), Io::Read { offset, memory })
            }
            Io::Write { offset, mut memory } => {
                (take_iovecs(&mut memory), Io::Write { offset, memory })
            }
            Io::Spill { file, offset, mut memory } => {
                (take_iovecs(&mut memory), Io::Spill { file, offset, memory })
            }
            other => (Vec::new(), other),
        };
        let key = self.entries.insert(Entry { io, iovecs, done: 0, tag });
        self.issue(key)?;
        if self.ring.submission().len() >= SUBMIT_BATCH {
            ignore_transient(self.ring.submit())?;
        }
        Ok(())
    }

    fn issue(&mut self, key: usize) -> io::Result<()> {
        let entry = &self.entries[key];
        let sqe = match &entry.io {
            Io::Read { offset, .. } => {
                opcode::Readv::new(DISK_FILE, entry.iovecs.as_ptr(), entry.iovecs.len() as u32)
                    .offset(offset + entry.done)
                    .build()
            }
            Io::Write { offset, .. } => {
                opcode::Writev::new(DISK_FILE, entry.iovecs.as_ptr(), entry.iovecs.len() as u32)
                    .offset(offset + entry.done)
                    .build()
            }
            Io::Spill { file, offset, .. } => {
                let file = types::Fd(file.raw_fd());
                opcode::Writev::new(file, entry.iovecs.as_ptr(), entry.iovecs.len() as u32)
                    .offset(offset + entry.done)
                    .build()
            }
            Io::Punch(span) => opcode::Fallocate::new(DISK_FILE, span.len)
                .offset(span.offset)
                .mode(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
                .build(),
            Io::Sync => opcode::Fsync::new(DISK_FILE).flags(types::FsyncFlags::DATASYNC).build(),
        };
        self.push(sqe.user_data(key as u64))
    }

    /// Reports each time that the event descriptor `fd` is signalled. Nobody needs to read it.
    pub(crate) fn poll(&mut self, fd: RawFd, id: u32) -> io::Result<()> {
        let sqe = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).multi(true).build();
        self.push(sqe.user_data(POLL_FLAG | u64::from(id)))
    }

    /// Ends a poll.
    pub(crate) fn cancel_poll(&mut self, id: u32) -> io::Result<()> {
        self.cancel(POLL_FLAG | u64::from(id))
    }

    /// Signals an event descriptor. It must stay open until the next [`Ring::submit_all`], or until
    /// the kernel has received what was queued in another way. A descriptor that blocks keeps the
    /// signal in flight.
    pub(crate) fn signal(&mut self, fd: RawFd, id: u32) -> io::Result<()> {
        let one = (&raw const EVENT_VALUE).cast();
        let sqe = opcode::Write::new(types::Fd(fd), one, size_of_val(&EVENT_VALUE) as u32).build();
        self.push(sqe.user_data(SIGNAL_FLAG | u64::from(id)))
    }

    /// Gives up a signal that is in flight.
    pub(crate) fn cancel_signal(&mut self, id: u32) -> io::Result<()> {
        self.cancel(SIGNAL_FLAG | u64::from(id))
    }

    fn cancel(&mut self, user_data: u64) -> io::Result<()> {
        let sqe = opcode::AsyncCancel::new(user_data).build();
        self.push(sqe.user_data(SILENT_DATA))
    }

    fn push(&mut self, sqe: squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: `self.entries` owns what the entry points to (the iovecs and, through `io`,
            // the memory that they name, and a spill file) until its completion is reaped. Otherwise it
            // is static.
            if unsafe { self.ring.submission().push(&sqe) }.is_ok() {
                return Ok(());
            }
            ignore_transient(self.ring.submit())?;
        }
    }

    /// Submits everything that is queued, and waits at most `limit` for a completion.
    pub(crate) fn enter(&mut self, limit: Option<Duration>) -> io::Result<()> {
        if !self.ring.completion().is_empty() {
            return ignore_transient(self.ring.submit());
        }
        let result = match limit {
            Some(limit) if limit.is_zero() => self.ring.submit(),
            Some(limit) => {
                let time = types::Timespec::from(limit);
                let args = types::SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(1, &args)
            }
            None => self.ring.submit_and_wait(1),
        };
        ignore_transient(result)
    }

    /// Whether there is something to reap, or the kernel has more completions to add. Needs no
    /// system call.
    pub(crate) fn has_completions(&mut self) -> bool {
        self.ring.submission().taskrun() || !self.ring.completion().is_empty()
    }

    /// Submits everything that is queued. After that, descriptors that it names may be closed.
    pub(crate) fn submit_all(&mut self) -> io::Result<()> {
        while !self.ring.submission().is_empty() {
            ignore_transient(self.ring.submit())?;
        }
        Ok(())
    }

    /// The next completion, if there is one.
    pub(crate) fn reap(&mut self) -> io::Result<Option<Reaped<T>>> {
        loop {
            let Some(cqe) = self.ring.completion().next() else { return Ok(None) };
            let data = cqe.user_data();
            if data == SILENT_DATA {
                continue;
            }
            if data & POLL_FLAG != 0 {
                let ended = !cqueue::more(cqe.flags());
                return Ok(Some(Reaped::Ready { id: data as u32, ended }));
            }
            if data & SIGNAL_FLAG != 0 {
                return Ok(Some(Reaped::Signalled { id: data as u32 }));
            }
            let key = data as usize;
            match self.advance(key, cqe.result()) {
                Some(result) => {
                    let Entry { mut io, iovecs, tag, .. } = self.entries.remove(key);
                    if let Io::Read { memory: Memory::Guest { iovecs: kept, .. }, .. }
                    | Io::Write { memory: Memory::Guest { iovecs: kept, .. }, .. } = &mut io
                    {
                        *kept = iovecs;
                    }
                    return Ok(Some(Reaped::Done(Completion { io, tag, result })));
                }
                None => self.issue(key)?,
            }
        }
    }

    /// Interprets the kernel's result. Returns `None` for a short transfer that goes on.
    fn advance(&mut self, key: usize, result: i32) -> Option<io::Result<()>> {
        let entry = &mut self.entries[key];
        if result < 0 {
            let error = io::Error::from_raw_os_error(-result);
            return match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => None,
                _ => Some(Err(error)),
            };
        }
        if matches!(entry.io, Io::Punch(_) | Io::Sync) {
            return Some(Ok(()));
        }
        let mut moved = result as usize;
        entry.done += moved as u64;
        while let Some(first) = entry.iovecs.first_mut() {
            if first.iov_len > moved {
                // SAFETY: `moved` is less than the length, so the result is inside the same memory.
                first.iov_base = unsafe { first.iov_base.cast::<u8>().add(moved) }.cast();
                first.iov_len -= moved;
                break;
            }
            moved -= first.iov_len;
            entry.iovecs.remove(0);
        }
        match (entry.iovecs.is_empty(), result) {
            (true, _) => Some(Ok(())),
            (false, 0) => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            (false, _) => None,
        }
    }
}

/// Ignores transient errors of entering the kernel: a signal, a time limit, completions that have
/// to be reaped first, or a shortage of memory.
fn ignore_transient(result: io::Result<usize>) -> io::Result<()> {
    match result {
        Ok(_) => Ok(()),
        Err(error) => match error.raw_os_error() {
            Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
            _ => Err(error),
        },
    }
}

fn take_iovecs(memory: &mut Memory) -> Vec<libc::iovec> {
    let (base, len) = match memory {
        Memory::Guest { iovecs, .. } => return std::mem::take(iovecs),
        Memory::Buffer(buffer) => (buffer.as_mut_ptr(), buffer.len()),
        Memory::Pooled(buffer) => (buffer.as_mut_ptr(), buffer.len()),
    };
    vec![libc::iovec { iov_base: base.cast(), iov_len: len }]
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        // Buffers are freed below, so nothing may be using them.
        while !self.entries.is_empty() {
            if self.enter(None).is_err() {
                // The kernel may still write into the buffers, so leaking them is the only safe
                // way.
                std::mem::forget(std::mem::take(&mut self.entries));
                return;
            }
            while let Ok(Some(_)) = self.reap() {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::{Io, Memory, Reaped, Ring};
    use crate::mapping::Buffer;

    fn finish(ring: &mut Ring<u32>) -> super::Completion<u32> {
        loop {
            ring.enter(None).unwrap();
            if let Some(Reaped::Done(done)) = ring.reap().unwrap() {
                return done;
            }
        }
    }

    #[test]
    fn what_was_written_is_read_back_with_its_tag() {
        let file = tempfile::tempfile().unwrap();
        let mut ring = Ring::new(file.as_raw_fd(), 8).unwrap();
        let mut buffer = Buffer::zeroed(8192);
        buffer.fill(0x5a);
        ring.start(Io::Write { offset: 4096, memory: Memory::Buffer(buffer) }, 7).unwrap();
        let done = finish(&mut ring);
        assert_eq!(done.tag, 7);
        done.result.unwrap();
        ring.start(Io::Read { offset: 4096, memory: Memory::Buffer(Buffer::zeroed(8192)) }, 8)
            .unwrap();
        let done = finish(&mut ring);
        let Io::Read { memory: Memory::Buffer(buffer), .. } = done.io else {
            panic!("another operation")
        };
        assert!(buffer.iter().all(|byte| *byte == 0x5a));
        assert_eq!(ring.in_flight(), 0);
    }

    #[test]
    fn a_read_beyond_the_end_is_an_error_not_old_memory() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let mut ring = Ring::new(file.as_raw_fd(), 8).unwrap();
        ring.start(Io::Read { offset: 0, memory: Memory::Buffer(Buffer::zeroed(8192)) }, 1)
            .unwrap();
        assert!(finish(&mut ring).result.is_err());
    }

    #[test]
    fn more_operations_than_entries_are_all_done() {
        let file = tempfile::tempfile().unwrap();
        let mut ring = Ring::new(file.as_raw_fd(), 2).unwrap();
        for tag in 0..20 {
            let offset = u64::from(tag) * 4096;
            ring.start(Io::Write { offset, memory: Memory::Buffer(Buffer::zeroed(4096)) }, tag)
                .unwrap();
        }
        let mut tags: Vec<u32> = (0..20).map(|_| finish(&mut ring).tag).collect();
        tags.sort_unstable();
        assert_eq!(tags, (0..20).collect::<Vec<_>>());
    }
}
