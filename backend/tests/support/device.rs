//! The guest's side of the disk: a vhost-user-blk client with its own memory and queues.
//!
//! A [`Queue`] is used from one thread. Its memory is cut into slots; a request in flight owns one
//! slot, and the slot's number names the request. A request that is not completed in time fails
//! the test: a lost request must not pass as a slow one.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags, iovec};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

use super::sys;

/// The smallest unit of the protocol.
pub(crate) const SECTOR: u64 = 512;

/// The unit in which the backend keeps old content.
pub(crate) const BLOCK: usize = 4096;

/// Room before a slot's data, so that it can start at an address with any alignment.
const SKEW: usize = 4096;

const TIME_LIMIT: Duration = Duration::from_secs(60);

/// How a client uses the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) queues: usize,
    /// Requests that can be in flight on each queue.
    pub(crate) depth: usize,
    /// The longest request in bytes.
    pub(crate) longest: usize,
    pub(crate) read_only: bool,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape { queues: 1, depth: 4, longest: 1 << 20, read_only: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Io {
    Read { offset: u64, len: usize },
    Write { offset: u64, len: usize },
    WriteZeroes { offset: u64, len: u64, unmap: bool },
    Discard { offset: u64, len: u64 },
    Flush,
}

/// How a request's data lies in the guest's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Bytes that the data starts away from a page boundary.
    pub(crate) skew: usize,
    /// Descriptors that it is spread over.
    pub(crate) segments: usize,
}

impl Layout {
    pub(crate) const PLAIN: Layout = Layout { skew: 0, segments: 1 };
}

/// A finished request.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) slot: usize,
    pub(crate) result: io::Result<()>,
}

pub(crate) struct Device {
    // Before `driver`, which owns the memory of the rings.
    pub(crate) queues: Vec<Queue>,
    pub(crate) capacity: u64,
    driver: Blkio,
}

impl Device {
    /// Connects, waiting for a socket that is not there yet. A backend that accepts and never
    /// answers fails the test.
    pub(crate) fn connect(socket: &Path, shape: Shape) -> Device {
        let (sender, receiver) = channel();
        let path = socket.to_path_buf();
        std::thread::spawn(move || sender.send(Device::keep_connecting(&path, shape)));
        match receiver.recv_timeout(TIME_LIMIT) {
            Ok(device) => device,
            Err(_) => panic!("no connection to {}", socket.display()),
        }
    }

    fn keep_connecting(socket: &Path, shape: Shape) -> Device {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match Device::try_connect(socket, shape) {
                Ok(device) => return device,
                Err(e) if Instant::now() < deadline => {
                    let again = [libc::ENOENT, libc::ECONNREFUSED, libc::ECONNRESET, libc::EPIPE];
                    assert!(again.contains(&e.errno().raw_os_error()), "connect: {e}");
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(e) => panic!("connect to {}: {e}", socket.display()),
            }
        }
    }

    pub(crate) fn try_connect(socket: &Path, shape: Shape) -> blkio::Result<Device> {
        let mut driver = Blkio::new("virtio-blk-vhost-user")?;
        driver.set_str("path", socket.to_str().expect("a socket path in UTF-8"))?;
        driver.set_bool("read-only", shape.read_only)?;
        driver.connect()?;
        driver.set_i32("num-queues", shape.queues as i32)?;
        let capacity = driver.get_u64("capacity")?;
        let started = driver.start()?;
        let mut queues = Vec::new();
        for queue in started.queues {
            let slot_len = shape.longest.next_multiple_of(4096) + SKEW;
            let memory = Memory::new(slot_len * shape.depth);
            driver.map_mem_region(&memory.region)?;
            queues.push(Queue {
                queue,
                memory,
                slot_len,
                free: (0..shape.depth).rev().collect(),
                depth: shape.depth,
                skews: vec![0; shape.depth],
            });
        }
        Ok(Device { queues, capacity, driver })
    }

    /// The device's feature bits as the driver reports them through its properties.
    pub(crate) fn max_discard(&self) -> u64 {
        self.driver.get_u64("max-discard-len").expect("a property of every device")
    }

    pub(crate) fn max_write_zeroes(&self) -> u64 {
        self.driver.get_u64("max-write-zeroes-len").expect("a property of every device")
    }

    /// Writes a block at each multiple of `step`, with as many requests in flight as the first queue
    /// has slots.
    pub(crate) fn write_blocks(&mut self, step: u64, fill: u8) {
        let queue = &mut self.queues[0];
        let mut offsets = (0..self.capacity).step_by(step as usize).peekable();
        while offsets.peek().is_some() || queue.in_flight() > 0 {
            while offsets.peek().is_some()
                && let Some(slot) = queue.take_slot()
            {
                let offset = offsets.next().expect("it was there a moment ago");
                queue.fill(slot, Layout::PLAIN, &[fill; BLOCK]);
                queue.submit(slot, Io::Write { offset, len: BLOCK }, Layout::PLAIN);
            }
            for done in queue.reap(1) {
                done.result.expect("a write");
            }
        }
    }

    /// The whole disk through the first queue.
    pub(crate) fn read_all(&mut self) -> Vec<u8> {
        let queue = &mut self.queues[0];
        let step = (queue.slot_len - SKEW).min(1 << 20) as u64;
        let mut disk = Vec::with_capacity(self.capacity as usize);
        while (disk.len() as u64) < self.capacity {
            let offset = disk.len() as u64;
            let len = step.min(self.capacity - offset) as usize;
            let part = queue.read(offset, len).unwrap_or_else(|e| panic!("read at {offset}: {e}"));
            disk.extend(part);
        }
        disk
    }
}

/// Memory that the backend maps too.
struct Memory {
    map: MmapRegion,
    region: MemoryRegion,
}

impl Memory {
    fn new(len: usize) -> Memory {
        let file = sys::memfd(len as u64);
        let fd = file.as_raw_fd();
        let map = MmapRegion::from_file(FileOffset::new(file, 0), len).expect("map the memory");
        let region =
            MemoryRegion { addr: map.as_ptr() as usize, iova: 0, len, fd, fd_offset: 0, flags: 0 };
        Memory { map, region }
    }
}

pub(crate) struct Queue {
    queue: Blkioq,
    memory: Memory,
    slot_len: usize,
    free: Vec<usize>,
    depth: usize,
    skews: Vec<usize>,
}

impl Queue {
    pub(crate) fn in_flight(&self) -> usize {
        self.depth - self.free.len()
    }

    /// A slot for the next request, if not all are in flight.
    pub(crate) fn take_slot(&mut self) -> Option<usize> {
        self.free.pop()
    }

    fn start_of(&self, slot: usize) -> usize {
        slot * self.slot_len + self.skews[slot]
    }

    /// Puts the data of a write into `slot`, before it is submitted.
    pub(crate) fn fill(&mut self, slot: usize, layout: Layout, data: &[u8]) {
        assert!(layout.skew <= SKEW && data.len() <= self.slot_len - SKEW);
        self.skews[slot] = layout.skew;
        let start = self.start_of(slot);
        self.memory.map.get_slice(start, data.len()).expect("inside the slot").copy_from(data);
    }

    /// The data that a read left in `slot`.
    pub(crate) fn fetch(&self, slot: usize, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        let start = self.start_of(slot);
        self.memory.map.get_slice(start, len).expect("inside the slot").copy_to(&mut data[..]);
        data
    }

    /// Makes the request visible to the device. It may be served before [`Queue::reap`] kicks.
    pub(crate) fn submit(&mut self, slot: usize, io: Io, layout: Layout) {
        let none = ReqFlags::empty();
        let (offset, len) = match io {
            Io::WriteZeroes { offset, len, unmap } => {
                let flags = if unmap { none } else { ReqFlags::NO_UNMAP };
                return self.queue.write_zeroes(offset, len, slot, flags);
            }
            Io::Discard { offset, len } => return self.queue.discard(offset, len, slot, none),
            Io::Flush => return self.queue.flush(slot, none),
            Io::Read { offset, len } | Io::Write { offset, len } => (offset, len),
        };
        self.skews[slot] = layout.skew;
        assert!(len <= self.slot_len - SKEW, "a request of {len} bytes is too long");
        assert!(self.depth * (layout.segments + 2) <= 256, "more descriptors than the ring has");
        let start = self.memory.map.as_ptr().wrapping_add(self.start_of(slot));
        let parts = segments(start, len, layout.segments);
        // As the ring has room, the list is used within the call and not kept.
        let (first, count) = (parts.as_ptr(), parts.len() as u32);
        match io {
            Io::Read { .. } => self.queue.readv(offset, first, count, slot, none),
            _ => self.queue.writev(offset, first, count, slot, none),
        }
    }

    /// Kicks the device and collects what is done, waiting for at least `min` requests.
    pub(crate) fn reap(&mut self, min: usize) -> Vec<Done> {
        let mut done = [const { MaybeUninit::<Completion>::uninit() }; 64];
        let mut timeout = TIME_LIMIT;
        let count = self
            .queue
            .do_io(&mut done, min, Some(&mut timeout), None)
            .unwrap_or_else(|e| panic!("{} requests not completed: {e}", self.in_flight()));
        done.into_iter().take(count).map(|completion| self.finish(completion)).collect()
    }

    #[allow(unsafe_code)]
    fn finish(&mut self, completion: MaybeUninit<Completion>) -> Done {
        // SAFETY: do_io initialised as many completions as it counted.
        let completion = unsafe { completion.assume_init() };
        let slot = completion.user_data;
        assert!(slot < self.depth && !self.free.contains(&slot), "slot {slot} completed twice");
        self.free.push(slot);
        let result = match completion.ret {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(-error)),
        };
        Done { slot, result }
    }

    /// One request, start to end, on a queue with nothing else in flight.
    pub(crate) fn run(&mut self, io: Io, data: &[u8]) -> io::Result<Vec<u8>> {
        assert_eq!(self.in_flight(), 0, "run() shares its queue with nobody");
        let slot = self.take_slot().expect("nothing is in flight");
        if let Io::Write { .. } = io {
            self.fill(slot, Layout::PLAIN, data);
        }
        self.submit(slot, io, Layout::PLAIN);
        let mut done = self.reap(1);
        done.pop().expect("one request was awaited").result?;
        match io {
            Io::Read { len, .. } => Ok(self.fetch(slot, len)),
            _ => Ok(Vec::new()),
        }
    }

    pub(crate) fn read(&mut self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        self.run(Io::Read { offset, len }, &[])
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.run(Io::Write { offset, len: data.len() }, data).map(drop)
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.run(Io::Flush, &[]).map(drop)
    }
}

/// Cuts `len` bytes from `start` on into `count` parts, the first ones of uneven sizes.
fn segments(start: *mut u8, len: usize, count: usize) -> Vec<iovec> {
    let count = count.clamp(1, len.max(1));
    let mut parts = Vec::with_capacity(count);
    let mut at = 0;
    for left in (1..=count).rev() {
        let even = (len - at) / left;
        let part = if left == 1 { len - at } else { (even - even / 3).max(1) };
        parts.push(iovec { iov_base: start.wrapping_add(at).cast(), iov_len: part });
        at += part;
    }
    parts
}
