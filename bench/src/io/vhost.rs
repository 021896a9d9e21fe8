//! A vhost-user disk, used without a virtual machine.

use std::mem::MaybeUninit;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};

use super::{Connection, Memory, Op, Queue, Shape};

/// The longest time of a request. One that takes longer counts as lost.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The most completions of one call.
const BATCH: usize = 64;

pub(crate) struct VhostDisk {
    // Dropped before the driver, which owns the memory of the rings.
    queues: Vec<VhostQueue>,
    _driver: Blkio,
}

impl VhostDisk {
    pub(crate) fn connect(socket: &Path, shape: Shape) -> Result<VhostDisk> {
        Self::try_connect(socket, shape)
            .with_context(|| format!("connecting to {} as a guest", socket.display()))
    }

    fn try_connect(socket: &Path, shape: Shape) -> Result<VhostDisk> {
        let mut driver = Blkio::new("virtio-blk-vhost-user")?;
        driver.set_str("path", socket.to_str().context("the path is not UTF-8")?)?;
        driver.connect()?;
        driver.set_i32("num-queues", shape.queues as i32)?;
        let mut queues = Vec::new();
        for mut queue in driver.start()?.queues {
            queue.set_completion_fd_enabled(!shape.polls);
            let memory = Memory::new(shape.depth, shape.longest)?;
            driver.map_mem_region(&memory.region())?;
            queues.push(VhostQueue { queue, memory, in_flight: 0, polls: shape.polls });
        }
        Ok(VhostDisk { queues, _driver: driver })
    }
}

impl Connection for VhostDisk {
    fn queues(&mut self) -> Vec<&mut dyn Queue> {
        self.queues.iter_mut().map(|queue| queue as &mut dyn Queue).collect()
    }
}

struct VhostQueue {
    queue: Blkioq,
    memory: Memory,
    in_flight: usize,
    polls: bool,
}

impl Queue for VhostQueue {
    fn submit(&mut self, slot: usize, op: Op) -> Result<()> {
        let none = ReqFlags::empty();
        match op {
            Op::Read { offset, len } => {
                self.queue.read(offset, self.memory.slot(slot, len), len, slot, none);
            }
            Op::Write { offset, len } => {
                self.memory.stamp(slot, len);
                self.queue.write(offset, self.memory.slot(slot, len), len, slot, none);
            }
            Op::Flush => self.queue.flush(slot, none),
        }
        self.in_flight += 1;
        Ok(())
    }

    #[allow(unsafe_code)]
    fn reap(&mut self, min: usize, done: &mut Vec<usize>) -> Result<()> {
        let mut ended = [const { MaybeUninit::<Completion>::uninit() }; BATCH];
        let mut timeout = TIMEOUT;
        let min = min.min(self.in_flight);
        let begin = Instant::now();
        let count = loop {
            // A call that waits for completions asks for an interrupt.
            let wanted = if self.polls { 0 } else { min };
            let count = self
                .queue
                .do_io(&mut ended, wanted, Some(&mut timeout), None)
                .with_context(|| format!("waiting for {} requests", self.in_flight))?;
            if count >= min {
                break count;
            }
            if begin.elapsed() > TIMEOUT {
                bail!("{} requests were not completed in time", self.in_flight);
            }
        };
        for completion in ended.into_iter().take(count) {
            // SAFETY: do_io has initialised the first `count` completions.
            let completion = unsafe { completion.assume_init() };
            if completion.ret != 0 {
                let error = std::io::Error::from_raw_os_error(-completion.ret);
                bail!("a request failed: {error}");
            }
            done.push(completion.user_data);
        }
        self.in_flight -= count;
        Ok(())
    }
}
