//! Raw files with io_uring and direct I/O, which show the speed of the machine.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::Error;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail};
use io_uring::{IoUring, cqueue, opcode, squeue, types};

use super::{Connection, Memory, Op, Queue, Shape};

/// A queue on one or more files. It belongs to the thread that uses it first.
pub(crate) struct RingQueue {
    // Dropped before the memory, because dropping the ring ends all requests.
    ring: IoUring<squeue::Entry, cqueue::Entry>,
    memory: Memory,
    files: Vec<File>,
    in_flight: usize,
    enabled: bool,
}

impl RingQueue {
    pub(crate) fn new(files: Vec<File>, depth: usize, longest: usize) -> Result<RingQueue> {
        let entries = (depth as u32).next_power_of_two().max(8);
        // SINGLE_ISSUER and DEFER_TASKRUN bind a ring to one thread. The ring is created before the
        // thread that uses it. So it is created disabled, and belongs to the thread that enables
        // it.
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_r_disabled()
            .build(entries)
            .context("creating a ring")?;
        let fds: Vec<i32> = files.iter().map(|file| file.as_raw_fd()).collect();
        ring.submitter().register_files(&fds).context("registering the files")?;
        let memory = Memory::new(depth, longest)?;
        Ok(RingQueue { ring, memory, files, in_flight: 0, enabled: false })
    }

    /// Prepares a request to one of the files. See [`Queue::submit`].
    pub(crate) fn submit_to(&mut self, file: usize, slot: usize, op: Op) -> Result<()> {
        if !self.enabled {
            self.ring.submitter().register_enable_rings().context("enabling the ring")?;
            self.enabled = true;
        }
        assert!(file < self.files.len(), "there are {} files", self.files.len());
        let fd = types::Fixed(file as u32);
        let entry = match op {
            Op::Read { offset, len } => {
                opcode::Read::new(fd, self.memory.slot(slot, len), len as u32)
                    .offset(offset)
                    .build()
            }
            Op::Write { offset, len } => {
                self.memory.stamp(slot, len);
                self.write_entry(fd, slot, offset, len)
            }
            Op::Flush => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        };
        self.push(entry.user_data(slot as u64))
    }

    /// Prepares a write of the data that an earlier read left in the slot.
    pub(crate) fn write_back(
        &mut self,
        file: usize,
        slot: usize,
        offset: u64,
        len: usize,
    ) -> Result<()> {
        let entry = self.write_entry(types::Fixed(file as u32), slot, offset, len);
        self.push(entry.user_data(slot as u64))
    }

    fn write_entry(&self, fd: types::Fixed, slot: usize, offset: u64, len: usize) -> squeue::Entry {
        opcode::Write::new(fd, self.memory.slot(slot, len), len as u32).offset(offset).build()
    }

    fn push(&mut self, entry: squeue::Entry) -> Result<()> {
        // SAFETY: the entry points into `memory`, which outlives the ring. A slot is not used again
        // before its request is complete.
        unsafe { self.ring.submission().push(&entry) }
            .context("submitting more requests than the ring has entries")?;
        self.in_flight += 1;
        Ok(())
    }
}

/// A file with as many queues as a guest would have.
pub(crate) struct RawDisk(Vec<RingQueue>);

impl RawDisk {
    pub(crate) fn open(file: &File, shape: Shape) -> Result<RawDisk> {
        let queue = |_| RingQueue::new(vec![file.try_clone()?], shape.depth, shape.longest);
        Ok(RawDisk((0..shape.queues).map(queue).collect::<Result<_>>()?))
    }
}

impl Connection for RawDisk {
    fn queues(&mut self) -> Vec<&mut dyn Queue> {
        self.0.iter_mut().map(|queue| queue as &mut dyn Queue).collect()
    }
}

impl Queue for RingQueue {
    fn submit(&mut self, slot: usize, op: Op) -> Result<()> {
        self.submit_to(0, slot, op)
    }

    fn reap(&mut self, min: usize, done: &mut Vec<usize>) -> Result<()> {
        self.ring.submit_and_wait(min.min(self.in_flight)).context("waiting for the ring")?;
        for completion in self.ring.completion() {
            if completion.result() < 0 {
                bail!("a request failed: {}", Error::from_raw_os_error(-completion.result()));
            }
            self.in_flight -= 1;
            done.push(completion.user_data() as usize);
        }
        Ok(())
    }
}
