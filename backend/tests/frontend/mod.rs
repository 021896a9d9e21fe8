//! A hypervisor and a guest whose every byte the test chooses: memory, rings and messages are built
//! by hand.
//!
//! ```text
//! BASE ┬ 0x0000  nothing
//!      ├ 0x1000  descriptor table     (up to 256 entries)
//!      ├ 0x2000  available ring
//!      ├ 0x3000  used ring
//!      ├ 0x4000  indirect table
//!      ├ 0x5000  request header
//!      ├ 0x6000  status byte
//!      └ 0x10000 data
//! ```
#![allow(dead_code, reason = "each test program uses its own part")]

pub(crate) mod target;

use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use crate::support::sys;

pub(crate) const BASE: u64 = 0x10_0000;
pub(crate) const MEMORY: u64 = 2 << 20;
pub(crate) const TABLE: u64 = BASE + 0x1000;
pub(crate) const AVAILABLE: u64 = BASE + 0x2000;
pub(crate) const USED: u64 = BASE + 0x3000;
pub(crate) const INDIRECT: u64 = BASE + 0x4000;
pub(crate) const HEADER: u64 = BASE + 0x5000;
pub(crate) const STATUS: u64 = BASE + 0x6000;
pub(crate) const DATA: u64 = BASE + 0x1_0000;

/// A descriptor of a chain: address, length, flags.
pub(crate) type Part = (u64, u32, u16);

/// Flags of a descriptor.
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITABLE: u16 = 2;
pub(crate) const TABLE_FOLLOWS: u16 = 4;

/// The last part of a request: its status.
pub(crate) const END: Part = (STATUS, 1, WRITABLE);

/// Kinds of requests.
pub(crate) const IN: u32 = 0;
pub(crate) const OUT: u32 = 1;
pub(crate) const FLUSH: u32 = 4;
pub(crate) const GET_ID: u32 = 8;
pub(crate) const DISCARD: u32 = 11;
pub(crate) const WRITE_ZEROES: u32 = 13;

/// Statuses of requests.
pub(crate) const OK: u8 = 0;
pub(crate) const IOERR: u8 = 1;
pub(crate) const UNSUPP: u8 = 2;
/// What the status byte holds before a request.
pub(crate) const UNTOUCHED: u8 = 0xee;

const TIME_LIMIT: Duration = Duration::from_secs(20);

/// How a queue is set up. The default is valid.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    /// The index of the queue.
    pub(crate) queue: usize,
    pub(crate) size: u16,
    /// Guest addresses of the rings.
    pub(crate) table: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
    pub(crate) base: u16,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup { queue: 0, size: 64, table: TABLE, available: AVAILABLE, used: USED, base: 0 }
    }
}

/// Protocol features of a hypervisor that keeps the record of requests in flight.
pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;
pub(crate) const GET_VRING_BASE_INFLIGHT: u64 = 1 << 20;
pub(crate) const GET_VRING_BASE_SKIP_DRAIN: u64 = 1 << 23;

/// The record of requests in flight that a hypervisor keeps.
pub(crate) struct Ledger {
    description: VhostUserInflight,
    file: File,
}

impl Ledger {
    /// The heads that are in flight on queue 0.
    pub(crate) fn heads(&self) -> Vec<u16> {
        let mut bytes = vec![0; self.description.mmap_size as usize];
        self.file.read_exact_at(&mut bytes, 0).expect("read the ledger");
        let entries = bytes[16..].chunks(16).take(usize::from(self.description.queue_size));
        (0..).zip(entries).filter(|(_, entry)| entry[0] != 0).map(|(head, _)| head).collect()
    }

    /// The record of another hypervisor to which the guest has migrated.
    pub(crate) fn migrate(&self) -> Ledger {
        let mut bytes = vec![0; self.description.mmap_size as usize];
        self.file.read_exact_at(&mut bytes, 0).expect("read the ledger");
        let file = sys::memfd(self.description.mmap_size);
        file.write_all_at(&bytes, 0).expect("write the ledger");
        Ledger { description: self.description, file }
    }
}

/// A connected guest with one queue.
pub(crate) struct Guest {
    pub(crate) frontend: Frontend,
    /// The protocol features that it wants beyond the usual ones.
    protocol_features: u64,
    pub(crate) ledger: Option<Ledger>,
    /// The connection of the frontend.
    stream: UnixStream,
    pub(crate) memory: GuestMemoryMmap,
    pub(crate) kick: EventFd,
    call: EventFd,
    pub(crate) setup: Setup,
    pub(crate) available: u16,
    pub(crate) used: u16,
}

/// Runs `work`, which uses `stream`, and breaks the connection if it takes too long.
fn watched<T>(stream: &UnixStream, work: impl FnOnce() -> T) -> T {
    let (done, waiting) = channel::<()>();
    let stream = stream.try_clone().expect("duplicate a socket");
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if waiting.recv_timeout(TIME_LIMIT) == Err(RecvTimeoutError::Timeout) {
                let _ = stream.shutdown(Shutdown::Both);
            }
        });
        let result = work();
        drop(done);
        result
    })
}

impl Guest {
    /// Connects with a valid queue.
    pub(crate) fn connect(socket: &Path) -> Guest {
        Guest::connect_with(socket, Setup::default()).expect("connect with a good setup")
    }

    pub(crate) fn connect_with(socket: &Path, setup: Setup) -> vhost::Result<Guest> {
        Guest::over(UnixStream::connect(socket).expect("connect to the backend"), setup)
    }

    /// Connects over a socket that is connected already.
    pub(crate) fn over(stream: UnixStream, setup: Setup) -> vhost::Result<Guest> {
        let kept = stream.try_clone().expect("duplicate a socket");
        watched(&kept, || Guest::handshake(stream, setup))
    }

    /// Connects as a hypervisor that keeps the record of requests in flight, and wants these
    /// protocol features.
    pub(crate) fn connect_with_ledger(socket: &Path, protocol_features: u64) -> Guest {
        let stream = UnixStream::connect(socket).expect("connect to the backend");
        let features = INFLIGHT_SHMFD | protocol_features;
        let mut guest = Guest::introduced(stream, Setup::default(), features).expect("connect");
        let wanted = VhostUserInflight::new(0, 0, 1, guest.setup.size);
        let (description, file) = guest.frontend.get_inflight_fd(&wanted).expect("a ledger");
        guest.ledger = Some(Ledger { description, file });
        guest.start_at(0);
        guest
    }

    /// Starts the queue with the ledger, memory and rings as they are.
    pub(crate) fn start_at(&mut self, base: u16) {
        let ledger = self.ledger.as_ref().expect("it keeps one");
        self.frontend
            .set_inflight_fd(&ledger.description, ledger.file.as_raw_fd())
            .expect("the backend takes the ledger");
        self.set_up_queue(Setup { base, ..self.setup }).expect("start the queue");
    }

    /// Sends GET_VRING_BASE_SKIP_DRAIN for queue 0. Returns the next available index.
    pub(crate) fn skip_drain(&mut self) -> std::io::Result<u32> {
        self.stream.set_read_timeout(Some(TIME_LIMIT))?;
        let words = [45, 1, 8, 0, 0].map(u32::to_ne_bytes);
        self.stream.write_all(&words.concat())?;
        let mut answer = [0; 20];
        self.stream.read_exact(&mut answer)?;
        let (answer, _) = answer.as_chunks::<4>();
        let [request, flags, size, index, base] =
            answer.try_into().map(|words: [_; 5]| words.map(u32::from_ne_bytes)).expect("five");
        assert_eq!((request, flags, size, index), (45, 1 | 4, 8, 0), "a reply to the message");
        Ok(base)
    }

    /// Starts the queue again after GET_VRING_BASE, with rings as new.
    pub(crate) fn restart(&mut self) {
        self.put(self.setup.available, &[0; 4]);
        self.put(self.setup.used, &[0; 4]);
        (self.available, self.used) = (0, 0);
        self.set_up_queue(self.setup).expect("start the queue again");
    }

    /// Connects to the next backend, with memory and rings as they are.
    pub(crate) fn connect_again(&mut self, socket: &Path) -> vhost::Result<()> {
        self.introduce_again(socket)?;
        watched(&self.stream, || self.set_up_queue(Setup { base: self.used, ..self.setup }))
    }

    /// Connects to the next backend, and starts no queue.
    pub(crate) fn introduce_again(&mut self, socket: &Path) -> vhost::Result<()> {
        let stream = UnixStream::connect(socket).expect("connect to the backend");
        let kept = stream.try_clone().expect("duplicate a socket");
        watched(&kept, || {
            self.stream = stream.try_clone().expect("duplicate a socket");
            self.frontend = introduce(stream, &self.memory, self.protocol_features)?;
            Ok(())
        })
    }

    fn handshake(stream: UnixStream, setup: Setup) -> vhost::Result<Guest> {
        let guest = Guest::introduced(stream, setup, 0)?;
        guest.set_up_queue(setup)?;
        Ok(guest)
    }

    /// A guest that is known to the backend, and whose queue does not run.
    fn introduced(
        stream: UnixStream,
        setup: Setup,
        protocol_features: u64,
    ) -> vhost::Result<Guest> {
        let file = sys::memfd(MEMORY);
        let range = (GuestAddress(BASE), MEMORY as usize, Some(FileOffset::new(file, 0)));
        let memory = GuestMemoryMmap::from_ranges_with_files([range]).expect("map the memory");
        let kept = stream.try_clone().expect("duplicate a socket");
        let mut frontend = introduce(stream, &memory, protocol_features)?;
        // Hypervisors read the configuration when the device is made, and only then.
        frontend.get_config(0, 60, VhostUserConfigFlags::WRITABLE, &[0; 60])?;
        let kick = EventFd::new(libc::EFD_NONBLOCK).expect("an event");
        let call = EventFd::new(libc::EFD_NONBLOCK).expect("an event");
        let (available, used) = (setup.base, 0);
        Ok(Guest {
            frontend,
            protocol_features,
            ledger: None,
            stream: kept,
            memory,
            kick,
            call,
            setup,
            available,
            used,
        })
    }

    /// A duplicate of the connection to the backend.
    pub(crate) fn connection(&self) -> UnixStream {
        self.stream.try_clone().expect("duplicate a socket")
    }

    /// Opens a channel on which the hypervisor gets messages of the device.
    pub(crate) fn open_channel(&mut self) -> UnixStream {
        let protocol = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ;
        let offered = self.frontend.get_protocol_features().expect("the features");
        assert!(offered.contains(VhostUserProtocolFeatures::BACKEND_REQ));
        self.frontend.set_protocol_features(protocol).expect("they were offered");
        let (channel, theirs) = UnixStream::pair().expect("a channel");
        channel.set_read_timeout(Some(TIME_LIMIT)).expect("set a timeout");
        self.frontend.set_backend_request_fd(&theirs).expect("the backend takes the channel");
        channel
    }

    /// Sends a message whose answer may never come. Breaks the connection then.
    pub(crate) fn ask<T>(
        &mut self,
        message: impl FnOnce(&mut Frontend) -> vhost::Result<T>,
    ) -> vhost::Result<T> {
        watched(&self.stream, || message(&mut self.frontend))
    }

    pub(crate) fn set_up_queue(&self, setup: Setup) -> vhost::Result<()> {
        let frontend = &mut self.frontend.clone();
        frontend.set_vring_num(setup.queue, setup.size)?;
        frontend.set_vring_base(setup.queue, setup.base)?;
        frontend.set_vring_addr(setup.queue, &self.rings(setup))?;
        frontend.set_vring_call(setup.queue, &self.call)?;
        frontend.set_vring_kick(setup.queue, &self.kick)?;
        frontend.set_vring_enable(setup.queue, true)
    }

    /// The addresses of the rings as the protocol wants them: in this process.
    pub(crate) fn rings(&self, setup: Setup) -> VringConfigData {
        let region = self.memory.iter().next().expect("there is one region");
        let here = region.as_ptr() as u64;
        let address = |guest: u64| here.wrapping_add(guest.wrapping_sub(BASE));
        VringConfigData {
            queue_max_size: setup.size,
            queue_size: setup.size,
            flags: 0,
            desc_table_addr: address(setup.table),
            used_ring_addr: address(setup.used),
            avail_ring_addr: address(setup.available),
            log_addr: None,
        }
    }

    pub(crate) fn put(&self, address: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(address)).expect("inside the memory");
    }

    pub(crate) fn get(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(address)).expect("inside the memory");
        bytes
    }

    fn get_u16(&self, address: u64) -> u16 {
        let bytes = self.get(address, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    pub(crate) fn status(&self) -> u8 {
        self.get(STATUS, 1)[0]
    }

    /// Writes the header of a request, and overwrites the status of the last one.
    pub(crate) fn header(&self, kind: u32, sector: u64) {
        let mut header = [0; 16];
        header[0..4].copy_from_slice(&kind.to_le_bytes());
        header[8..16].copy_from_slice(&sector.to_le_bytes());
        self.put(HEADER, &header);
        self.put(STATUS, &[UNTOUCHED]);
    }

    /// Writes the range of a discard or of a write of zeros: its data, which has 16 bytes at
    /// [`DATA`].
    pub(crate) fn range(&self, sector: u64, count: u32, flags: u32) {
        let mut range = [0; 16];
        range[0..8].copy_from_slice(&sector.to_le_bytes());
        range[8..12].copy_from_slice(&count.to_le_bytes());
        range[12..16].copy_from_slice(&flags.to_le_bytes());
        self.put(DATA, &range);
    }

    /// Writes the entry `index` of the table at `table`.
    pub(crate) fn entry(&self, table: u64, index: u16, descriptor: Entry) {
        let mut bytes = [0; 16];
        bytes[0..8].copy_from_slice(&descriptor.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&descriptor.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&descriptor.flags.to_le_bytes());
        bytes[14..16].copy_from_slice(&descriptor.next.to_le_bytes());
        self.put(table + u64::from(index) * 16, &bytes);
    }

    /// Writes a chain of (address, length, flags) to the entries from 0 on.
    pub(crate) fn chain(&self, parts: &[Part]) {
        self.chain_at(TABLE, parts);
    }

    pub(crate) fn chain_at(&self, table: u64, parts: &[Part]) {
        for (index, &(address, len, flags)) in (0..).zip(parts) {
            let more = usize::from(index) + 1 < parts.len();
            let flags = if more { flags | NEXT } else { flags };
            self.entry(table, index, Entry { address, len, flags, next: index + 1 });
        }
    }

    /// Makes the chain at `head` available and kicks.
    pub(crate) fn offer(&mut self, head: u16) {
        let slot = u64::from(self.available % self.setup.size.max(1));
        self.put(self.setup.available + 4 + slot * 2, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.publish(self.available);
    }

    /// Sets the index of the available ring to any value, and kicks.
    pub(crate) fn publish(&mut self, index: u16) {
        // The ring's entry must be there before the index is.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.put(self.setup.available + 2, &index.to_le_bytes());
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.kick.write(1).expect("kick");
    }

    /// Waits for the next used entry: its head and length.
    pub(crate) fn wait_used(&mut self, limit: Duration) -> Option<(u32, u32)> {
        let deadline = Instant::now() + limit;
        while self.get_u16(self.setup.used + 2) == self.used {
            if Instant::now() > deadline {
                return None;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        let slot = u64::from(self.used % self.setup.size);
        let entry = self.get(self.setup.used + 4 + slot * 8, 8);
        self.used = self.used.wrapping_add(1);
        let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().expect("four"));
        Some((word(0), word(4)))
    }

    /// Offers the chain at entry 0 and waits for its status. `None` when it never comes back.
    pub(crate) fn try_request(&mut self, limit: Duration) -> Option<u8> {
        self.offer(0);
        self.wait_used(limit).map(|_| self.status())
    }

    /// A request made of the usual parts: header, `data`, status.
    pub(crate) fn request(&mut self, kind: u32, sector: u64, data: &[Part]) -> u8 {
        self.header(kind, sector);
        let mut parts = vec![(HEADER, 16, 0)];
        parts.extend(data);
        parts.push((STATUS, 1, WRITABLE));
        self.chain(&parts);
        self.try_request(TIME_LIMIT).unwrap_or_else(|| {
            panic!("a request of kind {kind} at sector {sector} with {data:x?} was lost")
        })
    }

    /// Writes and reads back, as a valid guest does. Returns `false` if the queue does not serve.
    pub(crate) fn works(&mut self, sector: u64, fill: u8) -> bool {
        self.works_within(TIME_LIMIT, sector, fill)
    }

    /// Does [`Guest::works`] for a queue that may not serve, with a timeout.
    pub(crate) fn works_within(&mut self, timeout: Duration, sector: u64, fill: u8) -> bool {
        self.put(DATA, &[fill; 4096]);
        self.header(OUT, sector);
        self.chain(&[(HEADER, 16, 0), (DATA, 4096, 0), (STATUS, 1, WRITABLE)]);
        if self.try_request(timeout) != Some(OK) {
            return false;
        }
        self.put(DATA, &[0; 4096]);
        self.header(IN, sector);
        self.chain(&[(HEADER, 16, 0), (DATA, 4096, WRITABLE), (STATUS, 1, WRITABLE)]);
        let status = self.try_request(timeout);
        status == Some(OK) && self.get(DATA, 4096) == [fill; 4096]
    }
}

/// Waits for the message that the configuration has changed.
pub(crate) fn await_change(channel: &mut UnixStream) {
    let mut message = [0; 12];
    channel.read_exact(&mut message).expect("a message of the device");
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
}

/// Negotiates features, and shares the guest's memory with the backend. The backend must offer
/// `protocol_features`.
fn introduce(
    stream: UnixStream,
    memory: &GuestMemoryMmap,
    protocol_features: u64,
) -> vhost::Result<Frontend> {
    let mut frontend = Frontend::from_stream(stream, 16);
    frontend.set_owner()?;
    let features = frontend.get_features()?;
    // Without EVENT_IDX, so that every kick counts.
    frontend.set_features(features & !(1 << 29))?;
    let wanted = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::REPLY_ACK;
    let offered = frontend.get_protocol_features()?;
    let known = protocol_features & VhostUserProtocolFeatures::all().bits();
    assert_eq!(offered.bits() & known, known, "{offered:?} was offered");
    let more = VhostUserProtocolFeatures::from_bits_retain(protocol_features);
    frontend.set_protocol_features(offered & wanted | more)?;
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    let regions: Vec<_> = memory
        .iter()
        .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).expect("a file"))
        .collect();
    frontend.set_mem_table(&regions)?;
    Ok(frontend)
}

/// An entry of a descriptor table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

/// Sends messages without the checks of a library.
pub(crate) struct Raw(pub(crate) UnixStream);

impl Raw {
    pub(crate) fn connect(socket: &Path) -> Raw {
        let stream = UnixStream::connect(socket).expect("connect to the backend");
        stream.set_read_timeout(Some(TIME_LIMIT)).expect("set a timeout");
        stream.set_write_timeout(Some(TIME_LIMIT)).expect("set a timeout");
        Raw(stream)
    }

    /// Sends a message. Errors are ignored, because the backend may close the connection at any
    /// time.
    pub(crate) fn send(&mut self, request: u32, flags: u32, size: u32, payload: &[u8]) {
        let mut message = Vec::new();
        for word in [request, flags, size] {
            message.extend(word.to_le_bytes());
        }
        message.extend(payload);
        let _ = self.0.write_all(&message);
    }

    /// Returns what comes back soon, if anything does.
    pub(crate) fn answer(&mut self) -> Vec<u8> {
        let mut bytes = [0; 4096];
        let len = self.0.read(&mut bytes).unwrap_or(0);
        bytes[..len].to_vec()
    }
}
