//! A guest that survives its backend: its memory, its rings and its requests stay.
//!
//! It has two queues, each with several requests in flight at any time, every one in a slot of its
//! own. A slot owns blocks of the disk that no other slot touches. It writes whole blocks and parts
//! of them, and stamps each sector with its next version; some versions are zeros. So every read
//! has just one right answer, and so has every sector of a checkpoint up to the writes that were in
//! flight when it was taken.
//!
//! ```text
//! memory ┬ queue 0: descriptors, available ring, used ring, headers and statuses   (64 KiB)
//!        ├ queue 1
//!        └ data, a page for each slot
//! ```
#![allow(dead_code, reason = "each test program uses its own part")]

use std::fs::File;
use std::io::{Read, Write};
use std::ops::{Range, RangeInclusive};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use seeded_rng::Rng;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use crate::support::sys;

pub(crate) const BLOCK: usize = 4096;
pub(crate) const SECTOR: usize = 512;
/// Sectors of a block.
const PER_BLOCK: usize = BLOCK / SECTOR;
/// Versions that are multiples of this are zeros.
const ZEROS: u32 = 8;
pub(crate) const QUEUES: usize = 2;
/// Requests in flight on each queue.
pub(crate) const DEPTH: usize = 20;

const SIZE: u16 = 64;
const QUEUE: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADERS: u64 = 0x3000;
const DATA: u64 = QUEUES as u64 * QUEUE;
const MEMORY: u64 = DATA + (QUEUES * DEPTH * BLOCK) as u64;
const BASE: u64 = 0x10_0000;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITABLE: u16 = 2;

/// What a hypervisor does for its backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// Keeps the ledger, and gives the used index as the base, as QEMU does.
    UsedIndex,
    /// Keeps the ledger, and gives the available index as the base, as Cloud Hypervisor does.
    AvailableIndex,
    /// Keeps the ledger, and can stop rings without a drain.
    SkipDrain,
    /// Knows nothing of ledgers.
    NoLedger,
}

/// The protocol features of [`Manner::SkipDrain`].
const SKIP_DRAIN: u64 = 1 << 20 | 1 << 23;

/// Sectors are counted from the guest's first one.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Write { sectors: Range<usize>, version: u32 },
    Read { block: usize },
    Flush { number: u64 },
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// The request is about to become visible to the backend.
    Sent,
    Answered,
}

pub(crate) type Observer = Box<dyn FnMut(Moment, &Request)>;

struct Slot {
    request: Option<(Request, Instant)>,
}

struct Queue {
    available: u16,
    used: u16,
    slots: Vec<Slot>,
    kick: EventFd,
    call: EventFd,
}

pub(crate) struct Survivor {
    memory: GuestMemoryMmap,
    manner: Manner,
    ledger: Option<(VhostUserInflight, File)>,
    frontend: Option<Frontend>,
    /// The connection of the frontend.
    stream: Option<UnixStream>,
    queues: Vec<Queue>,
    rng: Rng,
    flushes: u64,
    /// Features of the device that it does not use.
    pub(crate) declined_features: u64,
    /// How many of 100 requests are flushes.
    pub(crate) flush_share: u64,
    /// The part of its blocks that it uses. The first `QUEUES * DEPTH` are number 0, and so on.
    pub(crate) part: Range<u64>,
    /// The first block of the disk that it uses.
    pub(crate) first_sector: u64,
    /// Called for each request.
    pub(crate) observer: Observer,
    /// For each sector the version of the last write that was answered.
    pub(crate) acked: Vec<u32>,
    /// For each sector the version of the last write that was sent.
    pub(crate) sent: Vec<u32>,
    /// Whether new requests are sent.
    pub(crate) is_busy: bool,
    pub(crate) completed: u64,
    pub(crate) slowest: Duration,
}

impl Survivor {
    /// A guest for a disk of `blocks`, all zero, that is not connected.
    pub(crate) fn new(manner: Manner, blocks: usize, rng: Rng) -> Survivor {
        let file = sys::memfd(MEMORY);
        let range = (GuestAddress(BASE), MEMORY as usize, Some(FileOffset::new(file, 0)));
        let event = || EventFd::new(libc::EFD_NONBLOCK).expect("an event");
        let queue = |_| Queue {
            available: 0,
            used: 0,
            slots: (0..DEPTH).map(|_| Slot { request: None }).collect(),
            kick: event(),
            call: event(),
        };
        Survivor {
            memory: GuestMemoryMmap::from_ranges_with_files([range]).expect("map the memory"),
            manner,
            ledger: None,
            frontend: None,
            stream: None,
            queues: (0..QUEUES).map(queue).collect(),
            rng,
            flushes: 0,
            // Without EVENT_IDX, every kick counts.
            declined_features: 1 << 29,
            flush_share: 3,
            part: 0..(blocks / (QUEUES * DEPTH)) as u64,
            first_sector: 0,
            observer: Box::new(|_, _| {}),
            acked: vec![0; blocks * PER_BLOCK],
            sent: vec![0; blocks * PER_BLOCK],
            is_busy: true,
            completed: 0,
            slowest: Duration::ZERO,
        }
    }

    /// Connects to a backend, the first or a later one. Fails if the backend ends meanwhile.
    pub(crate) fn connect(&mut self, socket: &Path) -> Result<(), String> {
        self.frontend = None;
        let deadline = Instant::now() + Duration::from_secs(10);
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => return Err(error.to_string()),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("set a timeout");
        self.handshake(stream).map_err(|error| error.to_string())
    }

    fn handshake(&mut self, stream: UnixStream) -> vhost::Result<()> {
        self.stream = Some(stream.try_clone().expect("duplicate a socket"));
        let mut frontend = Frontend::from_stream(stream, QUEUES as u64);
        frontend.set_owner()?;
        let features = frontend.get_features()?;
        frontend.set_features(features & !self.declined_features)?;
        let mut wanted = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK;
        wanted.set(VhostUserProtocolFeatures::INFLIGHT_SHMFD, self.manner != Manner::NoLedger);
        let offered = frontend.get_protocol_features()?;
        assert!(offered.contains(wanted), "{offered:?} was offered");
        if self.manner == Manner::SkipDrain {
            wanted |= VhostUserProtocolFeatures::from_bits_retain(SKIP_DRAIN);
        }
        frontend.set_protocol_features(wanted)?;
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let regions: Vec<_> = self
            .memory
            .iter()
            .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).expect("a file"))
            .collect();
        frontend.set_mem_table(&regions)?;
        if self.manner != Manner::NoLedger && self.ledger.is_none() {
            let wanted = VhostUserInflight::new(0, 0, QUEUES as u16, SIZE);
            self.ledger = Some(frontend.get_inflight_fd(&wanted)?);
        }
        self.frontend = Some(frontend);
        let bases: Vec<_> = (0..QUEUES)
            .map(|index| match self.manner {
                Manner::AvailableIndex => self.queues[index].available,
                _ => self.get(index as u64 * QUEUE + USED + 2),
            })
            .collect();
        self.start_queues(&bases)
    }

    /// Starts all queues, each with the next available index.
    fn start_queues(&mut self, bases: &[u16]) -> vhost::Result<()> {
        let mut frontend = self.frontend.clone().expect("connected");
        if let Some((ledger, file)) = &self.ledger {
            frontend.set_inflight_fd(ledger, file.as_raw_fd())?;
        }
        let here = self.memory.iter().next().expect("there is one region").as_ptr() as u64;
        for (index, queue) in self.queues.iter_mut().enumerate() {
            let at = index as u64 * QUEUE;
            frontend.set_vring_num(index, SIZE)?;
            frontend.set_vring_base(index, bases[index])?;
            let rings = VringConfigData {
                queue_max_size: SIZE,
                queue_size: SIZE,
                flags: 0,
                desc_table_addr: here + at,
                used_ring_addr: here + at + USED,
                avail_ring_addr: here + at + AVAILABLE,
                log_addr: None,
            };
            frontend.set_vring_addr(index, &rings)?;
            queue.kick = EventFd::new(libc::EFD_NONBLOCK).expect("an event");
            queue.call = EventFd::new(libc::EFD_NONBLOCK).expect("an event");
            frontend.set_vring_call(index, &queue.call)?;
            frontend.set_vring_kick(index, &queue.kick)?;
            frontend.set_vring_enable(index, true)?;
        }
        Ok(())
    }

    /// Stops all queues without a drain, as QEMU does when the guest migrates. Checks that the
    /// ledger has exactly the requests that were popped and not answered, and that the device
    /// leaves the memory alone. Returns the next available indices, and how many requests are left.
    pub(crate) fn suspend(&mut self) -> (Vec<u16>, usize) {
        let mut frontend = self.frontend.clone().expect("connected");
        for index in 0..QUEUES {
            frontend.set_vring_enable(index, false).expect("disable a queue");
        }
        let bases: Vec<_> = (0..QUEUES).map(|index| self.skip_drain(index)).collect();
        let memory = self.whole_memory();
        std::thread::sleep(Duration::from_millis(10));
        assert!(memory == self.whole_memory(), "a suspended device wrote to the memory");
        let mut left = 0;
        for (index, base) in bases.iter().enumerate() {
            self.reap(index);
            let popped = self.popped(index, *base);
            assert_eq!(self.ledger_heads(index), popped, "queue {index}, next is {base}");
            left += popped.len();
        }
        (bases, left)
    }

    /// Starts all queues again after [`Survivor::suspend`].
    pub(crate) fn resume(&mut self, bases: &[u16]) {
        self.start_queues(bases).expect("start the queues again");
    }

    /// Sends GET_VRING_BASE_SKIP_DRAIN. Returns the next available index.
    fn skip_drain(&mut self, index: usize) -> u16 {
        let stream = self.stream.as_mut().expect("connected");
        let message = [45, 1, 8, index as u32, 0].map(u32::to_ne_bytes).concat();
        stream.write_all(&message).expect("send a message");
        let mut answer = [0; 20];
        stream.read_exact(&mut answer).expect("an answer");
        u16::from_ne_bytes([answer[16], answer[17]])
    }

    fn whole_memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY as usize];
        self.memory.read_slice(&mut bytes, GuestAddress(BASE)).expect("inside the memory");
        bytes
    }

    /// The heads of the requests that were popped and not answered, if `base` is popped next.
    fn popped(&self, queue: usize, base: u16) -> Vec<u16> {
        let available = self.queues[queue].available;
        let ring = queue as u64 * QUEUE + AVAILABLE + 4;
        let waiting: Vec<u16> = (0..available.wrapping_sub(base))
            .map(|ahead| self.get(ring + u64::from(base.wrapping_add(ahead) % SIZE) * 2))
            .collect();
        let slots = (0..).step_by(3).zip(&self.queues[queue].slots);
        let unanswered = slots.filter(|(_, slot)| slot.request.is_some()).map(|(head, _)| head);
        unanswered.filter(|head| !waiting.contains(head)).collect()
    }

    /// The heads of a queue's requests in the ledger.
    fn ledger_heads(&self, queue: usize) -> Vec<u16> {
        let (description, file) = self.ledger.as_ref().expect("it keeps one");
        let len = description.mmap_size as usize / QUEUES;
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, (queue * len) as u64).expect("read the ledger");
        let entries = bytes[16..].chunks(16).take(usize::from(SIZE));
        (0..).zip(entries).filter(|(_, entry)| entry[0] != 0).map(|(head, _)| head).collect()
    }

    fn put<T: vm_memory::ByteValued>(&self, address: u64, value: T) {
        self.memory.write_obj(value, GuestAddress(BASE + address)).expect("inside the memory");
    }

    fn get<T: vm_memory::ByteValued>(&self, address: u64) -> T {
        self.memory.read_obj(GuestAddress(BASE + address)).expect("inside the memory")
    }

    /// Handles answers and sends more. Returns whether nothing is in flight.
    pub(crate) fn turn(&mut self) -> bool {
        let mut idle = true;
        for queue in 0..QUEUES {
            self.reap(queue);
            let mut sent = false;
            for slot in 0..DEPTH {
                if self.is_busy && self.queues[queue].slots[slot].request.is_none() {
                    self.send(queue, slot);
                    sent = true;
                }
                idle &= self.queues[queue].slots[slot].request.is_none();
            }
            if sent {
                // No backend may be there to receive it.
                let _ = self.queues[queue].kick.write(1);
            }
        }
        idle
    }

    /// Runs for this long.
    pub(crate) fn run(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.turn();
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Sends nothing more, and waits until everything is answered.
    pub(crate) fn finish(&mut self, limit: Duration) {
        self.is_busy = false;
        let deadline = Instant::now() + limit;
        while !self.turn() {
            let lost = || -> Vec<_> {
                let slots = self.queues.iter().flat_map(|queue| &queue.slots);
                slots.filter_map(|slot| slot.request.as_ref()).collect()
            };
            assert!(Instant::now() < deadline, "requests are lost: {:?}", lost());
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn data(queue: usize, slot: usize) -> u64 {
        DATA + ((queue * DEPTH + slot) * BLOCK) as u64
    }

    fn blocks(&self) -> usize {
        self.acked.len() / PER_BLOCK
    }

    /// Sends a random request to a block of the slot.
    fn send(&mut self, queue: usize, slot: usize) {
        let own = queue * DEPTH + slot;
        let number = self.rng.between(self.part.start, self.part.end - 1) as usize;
        let block = number * QUEUES * DEPTH + own;
        let request = match self.rng.below(100) {
            kind if kind < self.flush_share => {
                self.flushes += 1;
                Request::Flush { number: self.flushes }
            }
            0..30 => Request::Read { block },
            _ => {
                let mut sectors = block * PER_BLOCK..(block + 1) * PER_BLOCK;
                if self.rng.chance(30) {
                    sectors.start += self.rng.below(PER_BLOCK as u64) as usize;
                    sectors.end -= self.rng.below(sectors.len() as u64) as usize;
                }
                let last = self.sent[sectors.clone()].iter().max().expect("a sector");
                let version = match self.rng.chance(10) {
                    true => (last + 1).next_multiple_of(ZEROS),
                    false => last + 1 + u32::from(is_zeros(last + 1)),
                };
                self.sent[sectors.clone()].fill(version);
                Request::Write { sectors, version }
            }
        };
        self.offer(queue, slot, request);
    }

    /// Puts a write's data into the slot's page. Returns its kind and the length of the data.
    fn prepare(&self, page: u64, sectors: &Range<usize>, version: u32) -> (u32, u32) {
        let whole = sectors.len() == PER_BLOCK;
        let (kind, bytes) = if is_zeros(version) {
            let first = self.first_sector + sectors.start as u64;
            let len = (sectors.len() as u64).to_le_bytes();
            let kind =
                if whole && version.is_multiple_of(2 * ZEROS) { DISCARD } else { WRITE_ZEROES };
            (kind, [first.to_le_bytes(), len].concat())
        } else {
            (OUT, sectors.clone().flat_map(|at| stamp(at, version).repeat(SECTOR / 8)).collect())
        };
        self.memory.write_slice(&bytes, GuestAddress(BASE + page)).expect("inside the memory");
        (kind, bytes.len() as u32)
    }

    /// Makes a request available, without a kick.
    fn offer(&mut self, queue: usize, slot: usize, request: Request) {
        (self.observer)(Moment::Sent, &request);
        let at = queue as u64 * QUEUE;
        let header = at + HEADERS + slot as u64 * 32;
        let page = Survivor::data(queue, slot);
        let (kind, sector, data) = match &request {
            Request::Write { sectors, version } => {
                let (kind, len) = self.prepare(page, sectors, *version);
                // Requests that have it in their data leave it out here.
                let sector = if kind == OUT { self.first_sector + sectors.start as u64 } else { 0 };
                (kind, sector, Some((page, len, 0u16)))
            }
            Request::Read { block } => {
                let sector = self.first_sector + (block * PER_BLOCK) as u64;
                (IN, sector, Some((page, BLOCK as u32, WRITABLE)))
            }
            Request::Flush { .. } => (FLUSH, 0, None),
        };
        self.put(header, kind);
        self.put(header + 8, sector);
        self.put(header + 16, 0xffu8);
        let head = slot as u16 * 3;
        let status = (header + 16, 1, WRITABLE);
        let parts: Vec<_> = [(header, 16, 0)].into_iter().chain(data).chain([status]).collect();
        for (index, (address, len, flags)) in parts.iter().enumerate() {
            let entry = at + (u64::from(head) + index as u64) * 16;
            let more = if index + 1 < parts.len() { NEXT } else { 0 };
            self.put(entry, BASE + address);
            self.put(entry + 8, *len);
            self.put(entry + 12, flags | more);
            self.put(entry + 14, head + index as u16 + 1);
        }
        self.queues[queue].slots[slot].request = Some((request, Instant::now()));
        let available = self.queues[queue].available;
        self.put(at + AVAILABLE + 4 + u64::from(available % SIZE) * 2, head);
        fence(Ordering::SeqCst);
        self.queues[queue].available = available.wrapping_add(1);
        self.put(at + AVAILABLE + 2, self.queues[queue].available);
    }

    fn reap(&mut self, queue: usize) {
        let at = queue as u64 * QUEUE;
        while self.get::<u16>(at + USED + 2) != self.queues[queue].used {
            fence(Ordering::SeqCst);
            let used = self.queues[queue].used;
            let head: u32 = self.get(at + USED + 4 + u64::from(used % SIZE) * 8);
            self.queues[queue].used = used.wrapping_add(1);
            let slot = head as usize / 3;
            assert_eq!(head % 3, 0, "head {head} was never sent");
            let (request, since) = self.queues[queue].slots[slot]
                .request
                .take()
                .unwrap_or_else(|| panic!("head {head} of queue {queue} was answered twice"));
            let status: u8 = self.get(at + HEADERS + slot as u64 * 32 + 16);
            assert_eq!(status, 0, "{request:?} failed");
            self.completed += 1;
            self.slowest = self.slowest.max(since.elapsed());
            (self.observer)(Moment::Answered, &request);
            match request {
                Request::Write { sectors, version } => self.acked[sectors].fill(version),
                Request::Read { block } => {
                    let mut bytes = vec![0; BLOCK];
                    let data = GuestAddress(BASE + Survivor::data(queue, slot));
                    self.memory.read_slice(&mut bytes, data).expect("inside the memory");
                    for (at, bytes) in bytes.chunks(SECTOR).enumerate() {
                        let sector = block * PER_BLOCK + at;
                        let wanted = self.acked[sector];
                        let found = &bytes[..8];
                        let right = holds(sector, bytes, wanted..=wanted);
                        assert!(right, "sector {sector}: {found:?}, not version {wanted}");
                    }
                }
                Request::Flush { .. } => {}
            }
        }
    }

    /// Reads the whole disk while nothing else is in flight.
    pub(crate) fn check_all(&mut self) {
        assert!(self.turn(), "something is in flight");
        for block in 0..self.blocks() {
            let own = block % (QUEUES * DEPTH);
            let (queue, slot) = (own / DEPTH, own % DEPTH);
            self.offer(queue, slot, Request::Read { block });
            self.queues[queue].kick.write(1).expect("kick");
            let deadline = Instant::now() + Duration::from_secs(10);
            while !self.turn() {
                assert!(Instant::now() < deadline, "a read is lost");
            }
        }
    }
}

fn is_zeros(version: u32) -> bool {
    version.is_multiple_of(ZEROS)
}

/// The byte that fills a sector.
pub(crate) fn stamp(sector: usize, version: u32) -> [u8; 8] {
    match is_zeros(version) {
        true => [0; 8],
        false => (u64::from(version) << 32 | sector as u64).to_le_bytes(),
    }
}

/// Whether a sector holds one of these versions.
pub(crate) fn holds(sector: usize, bytes: &[u8], versions: RangeInclusive<u32>) -> bool {
    let (words, _) = bytes.as_chunks::<8>();
    let first = words[0];
    let version = match (u64::from_le_bytes(first) >> 32) as u32 {
        0 => versions.end() / ZEROS * ZEROS,
        version => version,
    };
    let right = stamp(sector, version);
    versions.contains(&version) && words.iter().all(|word| *word == right)
}
