//! The device's features, each through a real frontend.

mod frontend;
mod support;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use cairn_agent::Request;
use frontend::{
    BASE, DATA, GET_ID, Guest, HEADER, IN, OK, OUT, STATUS, Setup, USED, WRITABLE, await_change,
};
use support::backend::{Backend, IMAGE, Options, Site};
use support::device::Shape;
use support::repository;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::vhost_user::{VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const SIZE: u64 = 4 << 20;
const CHUNK: u32 = 64 << 10;

/// Feature bits.
const SIZE_MAX: u64 = 1 << 1;
const FLUSH: u64 = 1 << 9;
const CONFIG_WCE: u64 = 1 << 11;
const LOG_ALL: u64 = 1 << 26;
const EVENT_IDX: u64 = 1 << 29;

/// The offset of the caching mode in the configuration space.
const WRITEBACK: u32 = 32;

fn site() -> Site {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, SIZE);
    site
}

/// A backend and a guest that is connected to it.
fn connected() -> (Site, Backend, Guest) {
    let site = site();
    let backend = Backend::start(&Options::new(&site));
    let guest = Guest::connect(&backend.options.socket);
    (site, backend, guest)
}

/// A backend and a guest that has turned the write cache off and has written.
fn write_through() -> (Site, Backend, Guest) {
    let (site, backend, mut guest) = connected();
    assert!(set_config(&mut guest, WRITEBACK, &[0]));
    write(&mut guest, 8, 7);
    (site, backend, guest)
}

/// Kills the backend, and starts the next one.
fn killed_and_started(backend: Backend) -> Backend {
    let options = backend.options.clone();
    backend.kill();
    Backend::start(&options)
}

/// The features that a driver usually accepts.
fn driver_features(guest: &Guest) -> u64 {
    guest.frontend.get_features().unwrap() & !EVENT_IDX
}

fn config(guest: &mut Guest, offset: u32, len: u32) -> Vec<u8> {
    let flags = VhostUserConfigFlags::WRITABLE;
    let answer = guest.frontend.get_config(offset, len, flags, &vec![0; len as usize]);
    answer.expect("read the configuration").1
}

fn set_config(guest: &mut Guest, offset: u32, bytes: &[u8]) -> bool {
    guest.frontend.set_config(offset, VhostUserConfigFlags::WRITABLE, bytes).is_ok()
}

fn write(guest: &mut Guest, sector: u64, fill: u8) {
    guest.put(DATA, &[fill; 4096]);
    assert_eq!(guest.request(OUT, sector, &[(DATA, 4096, 0)]), OK);
}

fn read(guest: &mut Guest, sector: u64) -> u8 {
    assert_eq!(guest.request(IN, sector, &[(DATA, 4096, WRITABLE)]), OK);
    let data = guest.get(DATA, 4096);
    assert!(data.iter().all(|byte| *byte == data[0]));
    data[0]
}

#[test]
fn the_limits_of_requests_are_announced() {
    let site = site();
    let backend = Backend::start(&Options::new(&site).with(&["--queue-size", "128"]));
    let mut guest = Guest::connect(&backend.options.socket);
    assert_ne!(guest.frontend.get_features().unwrap() & SIZE_MAX, 0);
    let words = config(&mut guest, 8, 8);
    assert_eq!(words[..4], (4u32 << 20).to_le_bytes(), "the longest segment");
    assert_eq!(words[4..], 126u32.to_le_bytes(), "the most segments");
    assert_eq!(config(&mut guest, 20, 4), 512u32.to_le_bytes(), "the block size");
    assert_eq!(config(&mut guest, 24, 4), [3, 0, 8, 0], "physical blocks and the least request");
    assert_eq!(config(&mut guest, 28, 4), (CHUNK / 512).to_le_bytes(), "the best request");
    assert_eq!(config(&mut guest, 44, 4), 8u32.to_le_bytes(), "the granularity of discards");
}

#[test]
fn a_write_is_durable_when_it_is_answered_in_write_through_mode_only() {
    for cached in [true, false] {
        let (site, backend, mut guest) = connected();
        assert_ne!(guest.frontend.get_features().unwrap() & CONFIG_WCE, 0);
        assert_eq!(config(&mut guest, WRITEBACK, 1), [1], "cached unless the guest says otherwise");
        assert!(set_config(&mut guest, WRITEBACK, &[u8::from(cached)]));
        assert_eq!(config(&mut guest, WRITEBACK, 1), [u8::from(cached)]);
        write(&mut guest, 8, 7);
        drop(guest);
        backend.kill_with_host();

        let backend = Backend::start(&Options::new(&site));
        let mut guest = Guest::connect(&backend.options.socket);
        // The data is in the mirror in both cases. The map has it only after a flush.
        assert_eq!(read(&mut guest, 8), if cached { 0 } else { 7 });
    }
}

/// Hypervisors do not repeat the mode when they reconnect, and the guest does not notice the
/// reconnection.
#[test]
fn write_through_mode_outlives_the_backend() {
    /// How the connection ends.
    #[derive(Clone, Copy)]
    enum End {
        Kill,
        Stop,
        Alone,
    }
    for end in [End::Kill, End::Stop, End::Alone] {
        let (_site, backend, mut guest) = write_through();
        let options = backend.options.clone();
        let backend = match end {
            End::Kill => killed_and_started(backend),
            End::Stop => {
                backend.terminate();
                Backend::start(&options)
            }
            End::Alone => backend,
        };
        guest.connect_again(&options.socket).expect("connect again");
        write(&mut guest, 16, 9);
        drop(guest);
        backend.kill_with_host();

        let backend = Backend::start(&options);
        let mut guest = Guest::connect(&backend.options.socket);
        assert_eq!([read(&mut guest, 8), read(&mut guest, 16)], [7, 9]);
    }
}

/// Whether a write survives the host without a flush.
fn is_write_through(site: &Site, mut guest: Guest, backend: Backend) -> bool {
    write(&mut guest, 16, 9);
    drop(guest);
    backend.kill_with_host();
    let backend = Backend::start(&Options::new(site));
    read(&mut Guest::connect(&backend.options.socket), 16) == 9
}

#[test]
fn write_through_mode_outlives_the_backend_when_the_used_index_has_wrapped_to_0() {
    let (site, backend, mut guest) = connected();
    guest.frontend.get_vring_base(0).unwrap();
    let last = 65535u16;
    for ring in [guest.setup.available, guest.setup.used] {
        guest.put(ring + 2, &last.to_le_bytes());
    }
    (guest.available, guest.used) = (last, last);
    guest.set_up_queue(Setup { base: last, ..guest.setup }).unwrap();
    assert!(set_config(&mut guest, WRITEBACK, &[0]));
    write(&mut guest, 8, 7);
    assert_eq!(guest.used, 0);
    let backend = killed_and_started(backend);
    guest.connect_again(&backend.options.socket).expect("connect again");
    assert!(is_write_through(&site, guest, backend));
}

#[test]
fn write_through_mode_outlives_the_backend_whichever_queue_starts_first() {
    let site = site();
    let backend = Backend::start(&Options::new(&site));
    let unused = Setup {
        table: DATA + 0x4_0000,
        available: DATA + 0x4_1000,
        used: DATA + 0x4_2000,
        ..Setup::default()
    };
    let second = Setup { queue: 1, ..Setup::default() };
    let mut guest = Guest::connect_with(&backend.options.socket, second).unwrap();
    guest.set_up_queue(unused).unwrap();
    assert!(set_config(&mut guest, WRITEBACK, &[0]));
    write(&mut guest, 8, 7);
    let backend = killed_and_started(backend);
    guest.introduce_again(&backend.options.socket).expect("connect again");
    guest.set_up_queue(unused).unwrap();
    guest.set_up_queue(Setup { base: guest.used, ..second }).unwrap();
    assert!(is_write_through(&site, guest, backend));
}

/// QEMU shows the guest the mode that was last written, whatever happens to the device, and never
/// reads it again.
#[test]
fn write_through_mode_outlives_a_reboot_under_the_same_hypervisor() {
    let (site, backend, mut guest) = write_through();
    guest.frontend.get_vring_base(0).unwrap();
    let features = driver_features(&guest);
    // The firmware cannot flush. The operating system can, and believes that it need not.
    guest.frontend.set_features(features & !FLUSH & !CONFIG_WCE).unwrap();
    guest.restart();
    write(&mut guest, 8, 7);
    guest.frontend.get_vring_base(0).unwrap();
    guest.frontend.set_features(features).unwrap();
    guest.restart();
    assert_eq!(config(&mut guest, WRITEBACK, 1), [0]);
    assert!(is_write_through(&site, guest, backend));
}

/// QEMU reads the configuration when the device is made, and not when it connects again. So it
/// shows the next driver the mode that the one before has written.
#[test]
fn write_through_mode_outlives_a_backend_that_ends_while_the_guest_reboots() {
    for written_again in [None, Some(1)] {
        let (site, backend, mut guest) = write_through();
        guest.frontend.get_vring_base(0).unwrap();
        let backend = killed_and_started(backend);
        guest.introduce_again(&backend.options.socket).expect("connect again");
        if let Some(mode) = written_again {
            assert!(set_config(&mut guest, WRITEBACK, &[mode]));
        }
        guest.restart();
        assert_eq!(is_write_through(&site, guest, backend), written_again.is_none());
    }
}

/// When a disk has grown, QEMU reads the whole configuration and takes over only the capacity.
#[test]
fn write_through_mode_outlives_a_read_of_the_configuration_that_the_device_has_asked_for() {
    let (site, backend, mut guest) = write_through();
    guest.frontend.get_vring_base(0).unwrap();
    let backend = killed_and_started(backend);
    guest.introduce_again(&backend.options.socket).expect("connect again");
    let mut channel = guest.open_channel();
    let store = repository::open(&site.store());
    store.catalog().resize(&repository::image(IMAGE), 2 * SIZE).expect("the image grows");
    backend.control().ask(&Request::Resize).expect("ask the disk to grow");
    await_change(&mut channel);
    assert_eq!(config(&mut guest, 0, 8), (2 * SIZE / 512).to_le_bytes());
    config(&mut guest, 0, 60);
    guest.restart();
    assert!(is_write_through(&site, guest, backend));
}

#[test]
fn a_new_guest_begins_with_a_write_cache_unless_it_cannot_flush() {
    let (site, backend, guest) = write_through();
    drop(guest);
    let mut guest = Guest::connect(&backend.options.socket);
    assert_eq!(config(&mut guest, WRITEBACK, 1), [1], "the next guest");
    let features = driver_features(&guest);
    guest.frontend.set_features(features & !FLUSH).unwrap();
    assert_eq!(config(&mut guest, WRITEBACK, 1), [0], "it can set the mode, but cannot flush");
    guest.frontend.set_features(features).unwrap();
    assert_eq!(config(&mut guest, WRITEBACK, 1), [1]);
    assert!(!is_write_through(&site, guest, backend));
}

#[test]
fn a_driver_that_cannot_flush_gets_write_through() {
    let (site, backend, mut guest) = connected();
    let features = driver_features(&guest);
    guest.frontend.get_vring_base(0).unwrap();
    guest.frontend.set_features(features & !FLUSH & !CONFIG_WCE).unwrap();
    guest.restart();
    assert!(is_write_through(&site, guest, backend));
}

/// The oldest drivers accept no feature at all.
#[test]
fn a_driver_without_any_feature_gets_write_through() {
    let (site, backend, guest) = connected();
    guest.frontend.get_vring_base(0).unwrap();
    guest.frontend.set_features(0).unwrap();
    // The last message enables the queue, and needs a feature. Without the feature it is enabled.
    assert!(guest.set_up_queue(guest.setup).is_err());
    assert!(is_write_through(&site, guest, backend));
}

#[test]
fn nothing_else_of_the_configuration_can_be_written() {
    let (_site, _backend, mut guest) = connected();
    for (offset, bytes) in [(0, &[1][..]), (WRITEBACK, &[2]), (WRITEBACK, &[1, 1]), (33, &[0])] {
        assert!(!set_config(&mut guest, offset, bytes), "{offset}: {bytes:?}");
        assert!(guest.works(0, 1), "{offset}: {bytes:?}: the guest has a disk no more");
    }
    let features = driver_features(&guest);
    guest.frontend.set_features(features & !CONFIG_WCE).unwrap();
    assert!(!set_config(&mut guest, WRITEBACK, &[0]), "the driver has not negotiated it");
    assert!(guest.works(0, 1));
}

/// A hypervisor tells the features of a driver when the driver is ready, and a driver may set the
/// mode before that.
#[test]
fn the_caching_mode_can_be_written_before_the_first_ring_starts() {
    let (site, backend, mut guest) = connected();
    let features = driver_features(&guest);
    guest.frontend.get_vring_base(0).unwrap();
    // The firmware's features.
    guest.frontend.set_features(features & !CONFIG_WCE).unwrap();
    assert!(set_config(&mut guest, WRITEBACK, &[0]));
    guest.frontend.set_features(features).unwrap();
    guest.restart();
    assert!(is_write_through(&site, guest, backend));
}

#[test]
fn sixty_four_queues_of_a_thousand_entries_serve() {
    let site = site();
    let options = Options { queues: 64, ..Options::new(&site).with(&["--queue-size", "1024"]) };
    let mut backend = Backend::start(&options);
    let (table, used) = (DATA + 0x4_0000, DATA + 0x5_0000);
    let setup = Setup { size: 1024, table, used, ..Setup::default() };
    let mut guest = Guest::connect_with(&options.socket, setup).expect("a ring of 1024 entries");
    assert_eq!(config(&mut guest, 34, 2), 64u16.to_le_bytes());
    drop(guest);
    let shape = Shape { queues: 64, depth: 2, longest: 4096, ..Shape::default() };
    let mut device = backend.device(shape);
    for (at, queue) in (0..).zip(&mut device.queues) {
        queue.write(at * 4096, &[at as u8 + 1; 4096]).expect("write");
    }
    // Each reads what another one wrote.
    for (at, queue) in (0..64).rev().zip(&mut device.queues) {
        assert_eq!(queue.read(at * 4096, 4096).expect("read"), [at as u8 + 1; 4096]);
    }
    let status = backend.control().status();
    assert_eq!(status.queues.len(), 64);
    for queue in status.queues {
        assert_eq!((queue.reads, queue.writes, queue.in_flight), (1, 1, 0), "{queue:?}");
        assert!(queue.read_latency.count == 1 && queue.read_latency.max_us > 0, "{queue:?}");
    }
    backend.assert_alive();
}

#[test]
fn a_device_that_is_reset_starts_from_nothing() {
    let (_site, _backend, mut guest) = connected();
    let protocol = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::RESET_DEVICE;
    guest.frontend.set_protocol_features(protocol).unwrap();
    assert!(set_config(&mut guest, WRITEBACK, &[0]));
    write(&mut guest, 8, 4);
    guest.frontend.reset_device().unwrap();
    assert_eq!(config(&mut guest, WRITEBACK, 1), [0], "the hypervisor still shows this mode");
    guest.offer(0);
    assert!(guest.wait_used(Duration::from_millis(200)).is_none(), "its rings are gone");
    let features = driver_features(&guest);
    guest.frontend.set_features(features).unwrap();
    guest.restart();
    assert_eq!(read(&mut guest, 8), 4);
}

/// The hypervisor's dirty log.
struct Log(File);

impl Log {
    const LEN: u64 = 4096;

    fn new() -> Log {
        Log(support::sys::memfd(Log::LEN))
    }

    fn region(&self) -> VhostUserDirtyLogRegion {
        let (mmap_size, mmap_handle) = (Log::LEN, self.0.as_raw_fd());
        VhostUserDirtyLogRegion { mmap_size, mmap_offset: 0, mmap_handle }
    }

    /// The addresses of the pages that have changed since the last call.
    fn take(&self) -> Vec<u64> {
        let mut bits = vec![0; Log::LEN as usize];
        self.0.read_exact_at(&mut bits, 0).unwrap();
        self.0.write_all_at(&[0; Log::LEN as usize], 0).unwrap();
        let is_set = |page: &u64| bits[(page / 8) as usize] & 1 << (page % 8) != 0;
        (0..Log::LEN * 8).filter(is_set).map(|page| page * 4096).collect()
    }
}

#[test]
fn what_the_device_writes_is_logged_while_a_guest_migrates() {
    let (_site, _backend, mut guest) = connected();
    let features = driver_features(&guest);
    assert_ne!(features & LOG_ALL, 0);
    let protocol = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::LOG_SHMFD;
    guest.frontend.set_protocol_features(protocol).unwrap();
    guest.frontend.set_features(features & !LOG_ALL).unwrap();
    let log = Log::new();
    guest.frontend.set_log_base(0, Some(log.region())).unwrap();
    write(&mut guest, 0, 5);
    assert!(log.take().is_empty(), "not before it is wanted");

    guest.frontend.set_features(features).unwrap();
    log.take();
    // A write changes the status and the used ring; a read its data too, to the last byte.
    write(&mut guest, 8, 6);
    assert_eq!(log.take(), [USED, STATUS]);
    let part = (DATA + 4096 - 512, 1024, WRITABLE);
    assert_eq!(guest.request(IN, 8, &[part]), OK);
    assert_eq!(log.take(), [USED, STATUS, DATA, DATA + 4096]);
    // Through a bounce buffer, because the address is odd.
    assert_eq!(guest.request(IN, 8, &[(DATA + 0x2001, 512, WRITABLE)]), OK);
    assert_eq!(log.take(), [USED, STATUS, DATA + 0x2000]);
    assert_eq!(guest.request(GET_ID, 0, &[(DATA + 0x5000, 20, WRITABLE)]), OK);
    assert_eq!(log.take(), [USED, STATUS, DATA + 0x5000]);

    // Memory that is added later.
    let start = BASE + (16 << 20);
    let file = FileOffset::new(support::sys::memfd(1 << 20), 0);
    let range = (GuestAddress(start), 1 << 20, Some(file));
    let added = GuestMemoryMmap::<()>::from_ranges_with_files([range]).unwrap();
    let region = added.iter().next().unwrap();
    let region = VhostUserMemoryRegionInfo::from_guest_region(region).unwrap();
    guest.frontend.add_mem_region(&region).unwrap();
    log.take();
    assert_eq!(guest.request(IN, 8, &[(start + 0x3000, 4096, WRITABLE)]), OK);
    assert_eq!(log.take(), [USED, STATUS, start + 0x3000]);

    guest.frontend.set_features(features & !LOG_ALL).unwrap();
    log.take();
    assert_eq!(read(&mut guest, 8), 6);
    assert!(log.take().is_empty(), "no more when it is over");
    assert_ne!(HEADER, STATUS);
}

/// A hypervisor may change the memory at any time of a migration. Requests that complete meanwhile
/// are logged, too.
#[test]
fn nothing_is_written_without_a_log_while_the_memory_changes() {
    let (_site, _backend, mut guest) = connected();
    let features = driver_features(&guest);
    let protocol = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::LOG_SHMFD;
    guest.frontend.set_protocol_features(protocol).unwrap();
    let log = Log::new();
    guest.frontend.set_log_base(0, Some(log.region())).unwrap();
    guest.frontend.set_features(features).unwrap();
    write(&mut guest, 0, 5);
    log.take();
    let regions: Vec<_> = guest
        .memory
        .iter()
        .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap())
        .collect();
    let (tell, told) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let frontend = guest.frontend.clone();
        let changes = scope.spawn(move || {
            let mut count = 0;
            while told.try_recv() == Err(mpsc::TryRecvError::Empty) {
                frontend.set_mem_table(&regions).unwrap();
                count += 1;
            }
            count
        });
        let mut unlogged = Vec::new();
        for round in 0..3000 {
            assert_eq!(guest.request(IN, 0, &[(DATA, 4096, WRITABLE)]), OK);
            // The used index may be read before its page is marked.
            let mut marked = log.take();
            if !marked.contains(&DATA) {
                thread::sleep(Duration::from_millis(20));
                marked.extend(log.take());
            }
            if !marked.contains(&DATA) {
                unlogged.push(round);
            }
        }
        drop(tell);
        let changes: u32 = changes.join().unwrap();
        assert!(changes > 10, "the memory changed {changes} times");
        assert!(unlogged.is_empty(), "{} of 3000 reads are not in the log", unlogged.len());
    });
}

#[test]
fn a_second_hypervisor_takes_over_when_the_first_has_stopped() {
    let site = site();
    let backend = Backend::start(&Options::new(&site));
    let mut first = Guest::connect(&backend.options.socket);
    write(&mut first, 0, 1);
    let (tell, told) = mpsc::channel();
    let socket = backend.options.socket.clone();
    let second = thread::spawn(move || {
        let mut second = Guest::connect_with(&socket, Setup::default()).expect("it may connect");
        tell.send(()).unwrap();
        let seen = [read(&mut second, 0), read(&mut second, 8)];
        (second, seen)
    });
    // The second hypervisor prepares itself, and waits.
    assert!(told.recv_timeout(Duration::from_millis(500)).is_err());
    write(&mut first, 8, 2);
    first.frontend.get_vring_base(0).unwrap();
    let (mut second, seen) = second.join().unwrap();
    assert_eq!(seen, [1, 2]);

    // The other way round: the guest migrates back.
    let back = thread::spawn(move || {
        first.restart();
        read(&mut first, 16)
    });
    thread::sleep(Duration::from_millis(200));
    write(&mut second, 16, 3);
    drop(second);
    assert_eq!(back.join().unwrap(), 3);
}

#[test]
fn an_inherited_connection_cannot_migrate() {
    // Nobody can connect a second time to a socket that was handed over.
    let site = site();
    let (ours, theirs) = UnixStream::pair().unwrap();
    support::sys::inherit(theirs.as_raw_fd());
    let options = Options::new(&site).with(&["--fd", &theirs.as_raw_fd().to_string()]);
    let _backend = Backend::start(&Options { without_socket_path: true, ..options });
    let guest = Guest::over(ours, Setup::default()).expect("connect");
    assert_eq!(guest.frontend.get_features().unwrap() & LOG_ALL, 0);
}
