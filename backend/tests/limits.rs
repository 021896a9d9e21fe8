//! Limits on what a guest or a hypervisor can make the process use up, lose or wait for.

mod frontend;
mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use cairn_store::{Consistency, MirrorId, MirrorOwner, Mode, NewSnapshot};
use frontend::{
    AVAILABLE, DATA, DISCARD, Entry, Guest, HEADER, IN, INDIRECT, OK, OUT, Part, Raw, STATUS,
    Setup, TABLE, TABLE_FOLLOWS, USED, WRITABLE,
};
use support::backend::{Backend, IMAGE, Options, Site};
use support::control::Control;
use support::device::{Device, Shape};
use support::repository;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo};
use vm_memory::GuestMemoryBackend;
use vmm_sys_util::eventfd::EventFd;

const CHUNK: u32 = 64 << 10;

fn site(size: u64) -> Site {
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, size);
    site
}

#[test]
fn a_refused_connection_is_closed() {
    let site = site(4 << 20);
    let backend = Backend::start(&Options::new(&site));
    let mut raw = Raw::connect(&backend.options.socket);
    raw.send(3, 1, 0, &[]);
    raw.send(1, 1, 0, &[]);
    assert!(raw.answer().len() >= 20);
    // GET_VRING_BASE of a ring that does not exist: the hypervisor waits for an answer.
    raw.send(11, 1, 8, &9999u64.to_le_bytes());
    raw.0.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let got = raw.0.read(&mut [0; 64]);
    assert!(matches!(got, Ok(0)), "the peer never sees the end of the connection: {got:?}");
}

#[test]
fn a_pending_snapshot_of_a_lost_mirror_does_not_stop_the_next_one() {
    let site = site(4 << 20);
    let store = repository::open(&site.store());
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([9; 16]), "/gone").unwrap();
    let snapshot = repository::snapshot(&site.store(), IMAGE, 1);
    let attachment = store.attach(&owner, &snapshot, Mode::ReadWrite).unwrap();
    let number = attachment.reserve(1).unwrap().start;
    let new = NewSnapshot {
        number,
        label: None,
        metadata: cairn_store::Metadata::default(),
        is_from_guest: false,
        size: attachment.geometry().size(),
        consistency: Consistency::Crash,
        time: 0,
        dirty_bytes: 0,
        pause_us: 0,
    };
    attachment.begin(&new).unwrap();
    // Its host dies here, and the lease ends.
    attachment.release(None).unwrap();
    let mut backend = Backend::start(&Options::new(&site));
    backend.assert_alive();
    let left = repository::snapshot(&site.store(), IMAGE, number);
    assert_eq!(left.state, cairn_store::SnapshotState::Failed);
}

#[test]
fn memory_that_is_replaced_does_not_end_a_queue() {
    let site = site(4 << 20);
    let backend = Backend::start(&Options::new(&site));
    let mut guest = Guest::connect(&backend.options.socket);
    let features = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
    guest.frontend.set_protocol_features(features).unwrap();
    assert!(guest.works(8, 1));
    let region = guest.memory.iter().next().unwrap();
    let region = VhostUserMemoryRegionInfo::from_guest_region(region).unwrap();
    guest.frontend.remove_mem_region(&region).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    guest.frontend.add_mem_region(&region).unwrap();
    assert!(guest.works(8, 2), "{}", backend.log());
}

#[test]
fn a_discard_longer_than_announced_is_refused() {
    let size = 64u64 << 30;
    let site = site(size);
    let backend = Backend::start(&Options::new(&site));
    let mut guest = Guest::connect(&backend.options.socket);
    guest.range(0, (size / 512) as u32, 0);
    guest.header(DISCARD, 0);
    guest.chain(&[(HEADER, 16, 0), (DATA, 16, 0), (STATUS, 1, WRITABLE)]);
    let begin = Instant::now();
    let status = guest.try_request(Duration::from_secs(60));
    assert_eq!(status, Some(1), "an I/O error");
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
}

/// 32 reads of 64 MiB each into an odd address: none of them can use direct I/O.
#[test]
fn memory_for_unaligned_requests_is_bounded() {
    let site = site(128 << 20);
    let backend = Backend::start(&Options::new(&site));
    let mut guest = Guest::connect(&backend.options.socket);
    let mut parts: Vec<Part> = vec![(HEADER, 16, 0)];
    parts.extend((0..64).map(|_| (DATA + 1, 1 << 20, WRITABLE)));
    parts.push((STATUS, 1, WRITABLE));
    guest.header(IN, 0);
    guest.chain_at(INDIRECT, &parts);
    let len = 16 * parts.len() as u32;
    for head in 0..32 {
        let entry = Entry { address: INDIRECT, len, flags: TABLE_FOLLOWS, next: 0 };
        guest.entry(TABLE, head, entry);
    }
    for head in 0..32 {
        guest.offer(head);
    }
    let status = format!("/proc/{}/status", backend.pid());
    let mut peak = 0;
    for request in 0..32 {
        let used = guest.wait_used(Duration::from_secs(60));
        assert!(used.is_some(), "request {request} is answered");
        let status = std::fs::read_to_string(&status).expect("the process is alive");
        let line = status.lines().find(|line| line.starts_with("VmHWM")).expect("a peak");
        let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        peak = peak.max(kib >> 10);
    }
    assert!(peak < 256, "{peak} MiB");
}

/// Adds `count` pages of memory that follow each other, each as a region of its own. Returns the
/// number of those that were accepted.
fn add_pages(guest: &mut Guest, start: u64, count: u64) -> u64 {
    let features = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
    guest.frontend.set_protocol_features(features).unwrap();
    let file = support::sys::memfd(count * 4096);
    let region = |page: u64| VhostUserMemoryRegionInfo {
        guest_phys_addr: start + page * 4096,
        memory_size: 4096,
        userspace_addr: page * 4096,
        mmap_offset: page * 4096,
        mmap_handle: file.as_raw_fd(),
    };
    let mut is_added = |page| guest.frontend.add_mem_region(&region(page)).is_ok();
    (0..count).take_while(|page| is_added(*page)).count() as u64
}

#[test]
fn more_memory_regions_than_announced_are_refused() {
    let site = site(4 << 20);
    let backend = Backend::start(&Options::new(&site));
    let mut guest = Guest::connect(&backend.options.socket);
    assert_eq!(add_pages(&mut guest, 1 << 32, 600), 508, "and the one that it began with");
    drop(guest);
    assert!(Guest::connect(&backend.options.socket).works(0, 1));
}

/// Protocol features with which a hypervisor can share memory of every kind.
fn share_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
}

/// A message that shares a part of a file: memory, the dirty log, or the record of requests in flight.
#[derive(Clone, Copy, Debug)]
enum Share {
    Region,
    Table,
    Log,
    Record,
}

const SHARES: [Share; 4] = [Share::Region, Share::Table, Share::Log, Share::Record];

/// Shares `len` bytes of a file with a new connection whose queue does not run, as all the memory
/// beside that of the guest, or as all of it.
fn share(backend: &Backend, kind: Share, file: &File, len: u64) -> vhost::Result<Guest> {
    let mut guest = Guest::connect(&backend.options.socket);
    guest.frontend.set_protocol_features(share_features()).expect("they are offered");
    guest.frontend.get_vring_base(0).expect("the queue stops");
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: 1 << 32,
        memory_size: len,
        userspace_addr: 1 << 32,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    let log =
        VhostUserDirtyLogRegion { mmap_size: len, mmap_offset: 0, mmap_handle: file.as_raw_fd() };
    guest.ask(|frontend| match kind {
        Share::Region => frontend.add_mem_region(&region).map(drop),
        Share::Table => frontend.set_mem_table(&[region]).map(drop),
        Share::Log => frontend.set_log_base(0, Some(log)),
        Share::Record => {
            let queues = if len > 4096 { u16::MAX } else { 1 };
            let record = VhostUserInflight::new(len, 0, queues, 64);
            frontend.set_inflight_fd(&record, file.as_raw_fd())
        }
    })?;
    Ok(guest)
}

/// The kernel maps whole huge pages, and does not unmap a part of one.
#[test]
fn a_part_of_a_huge_page_is_refused_and_does_not_stay_mapped() {
    let file = match support::sys::memfd_of_huge_pages(4 << 20) {
        Ok(file) => file,
        Err(error) => {
            eprintln!("skipped: there are no huge pages here: {error}");
            return;
        }
    };
    let site = site(4 << 20);
    let mut backend = Backend::start(&Options::new(&site));
    for kind in SHARES {
        assert!(share(&backend, kind, &file, 4096).is_err(), "{kind:?}");
        backend.assert_alive();
    }
    assert!(Guest::connect(&backend.options.socket).works(0, 1));
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", backend.pid())).expect("read");
    assert!(!maps.contains("huge-pages"), "{maps}");
}

/// The kernel ends a process that touches memory for which there is no page.
#[test]
fn a_record_of_requests_in_flight_for_which_there_is_no_space_is_refused() {
    let site = site(4 << 20);
    let full = site.path("full");
    std::fs::create_dir(&full).expect("a place to mount");
    let _mounted = match support::sys::mount_tmpfs(&full, 1 << 20) {
        Ok(mounted) => mounted,
        Err(error) => {
            eprintln!("skipped: a small file system cannot be mounted here: {error}");
            return;
        }
    };
    let record = File::options().read(true).write(true).create_new(true).open(full.join("record"));
    let record = record.expect("create a file");
    record.set_len(4096).expect("a sparse file");
    let mut filler = File::create(full.join("filler")).expect("create a file");
    while filler.write_all(&[0; 4096]).is_ok() {}
    let mut backend = Backend::start(&Options::new(&site));
    assert!(share(&backend, Share::Record, &record, 4096).is_err());
    backend.assert_alive();
    assert!(Guest::connect(&backend.options.socket).works(0, 1));
}

#[test]
fn a_record_of_requests_in_flight_needs_a_file_that_can_be_written_and_need_not_grow() {
    let site = site(4 << 20);
    let mut backend = Backend::start(&Options::new(&site));
    let file = support::sys::memfd(4096);
    support::sys::seal_length(&file);
    let mut guest = share(&backend, Share::Record, &file, 4096).expect("it need not grow");
    guest.restart();
    assert!(guest.works(0, 1));
    drop(guest);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let read_only = File::open(path).expect("open for reading");
    assert!(share(&backend, Share::Record, &read_only, 4096).is_err());
    backend.assert_alive();
    assert!(Guest::connect(&backend.options.socket).works(0, 1));
}

/// The file is sparse, so the hypervisor pays nothing for its length.
#[test]
fn more_shared_memory_than_a_guest_can_need_is_refused() {
    const TIB: u64 = 1 << 40;
    let file = support::sys::memfd(16 * TIB);
    let site = site(4 << 20);
    let mut backend = Backend::start(&Options::new(&site));
    for kind in SHARES {
        assert!(share(&backend, kind, &file, 16 * TIB).is_err(), "{kind:?}");
        backend.assert_alive();
    }
    // Each is short enough by itself.
    let mut guest = share(&backend, Share::Region, &file, 5 * TIB).expect("5 TiB");
    let region = |at: u64| VhostUserMemoryRegionInfo {
        guest_phys_addr: at * TIB,
        memory_size: 5 * TIB,
        userspace_addr: at * TIB,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    assert!(guest.ask(|frontend| frontend.add_mem_region(&region(16))).is_err());
    let mut guest = Guest::connect(&backend.options.socket);
    let table = [region(16), region(32)];
    assert!(guest.ask(|frontend| frontend.set_mem_table(&table)).is_err());
    assert!(Guest::connect(&backend.options.socket).works(0, 1));
    let mapped = backend.memory("VmSize:");
    assert!(mapped < 4 * TIB, "{mapped} bytes");
}

/// The kernel takes 1024 parts at most.
#[test]
fn a_request_whose_every_segment_is_in_two_regions_is_served() {
    const START: u64 = 1 << 32;
    let site = site(4 << 20);
    let backend = Backend::start(&Options::new(&site));
    let mut guest = Guest::connect(&backend.options.socket);
    assert_eq!(add_pages(&mut guest, START, 8), 8);
    for (kind, flags) in [(OUT, 0), (IN, WRITABLE)] {
        let mut parts: Vec<Part> = vec![(HEADER, 16, 0)];
        parts.extend((0..1024).map(|part| (START + 4096 * (part % 6 + 1) - 512, 1024, flags)));
        parts.push((STATUS, 1, WRITABLE));
        guest.header(kind, 0);
        guest.chain_at(DATA, &parts);
        let len = 16 * parts.len() as u32;
        guest.entry(TABLE, 0, Entry { address: DATA, len, flags: TABLE_FOLLOWS, next: 0 });
        assert_eq!(guest.try_request(Duration::from_secs(20)), Some(OK), "kind {kind}");
    }
}

/// An event descriptor that nobody reads, and whose count is at its end.
#[test]
fn an_interrupt_that_blocks_holds_up_nobody_and_does_not_pile_up() {
    const FULL: u64 = u64::MAX - 1;
    let site = site(4 << 20);
    let backend = Backend::start(&Options::new(&site));
    let mut guest = Guest::connect(&backend.options.socket);
    // Writing to it blocks while it is full.
    let call = EventFd::new(0).expect("an event");
    // The first interrupt fits, the next ones do not.
    call.write(FULL - 1).expect("fill the event");
    guest.ask(|frontend| frontend.set_vring_call(0, &call)).expect("another interrupt");
    for sector in 0..50 {
        assert!(guest.works(sector * 8, 5), "sector {sector}");
    }
    assert_eq!(call.read().expect("read the event"), FULL);
    std::thread::sleep(Duration::from_millis(300));
    let stop = |guest: &mut Guest| {
        let begin = Instant::now();
        guest.ask(|frontend| frontend.get_vring_base(0)).expect("stop");
        assert!(begin.elapsed() < Duration::from_secs(8), "it took {:?}", begin.elapsed());
    };
    stop(&mut guest);
    // One more, so that reading does not block.
    call.write(1).expect("write the event");
    let late = call.read().expect("read the event") - 1;
    assert!((1..=3).contains(&late), "{late} interrupts after the first of 100 requests");

    // Full from the start.
    let call = EventFd::new(0).expect("an event");
    call.write(FULL).expect("fill the event");
    guest.restart();
    guest.ask(|frontend| frontend.set_vring_call(0, &call)).expect("another interrupt");
    assert!(guest.works(8, 6), "requests are served");
    stop(&mut guest);
    guest.restart();
    guest.ask(|frontend| frontend.set_vring_call(0, &call)).expect("another interrupt");
    drop(guest);
    assert!(Guest::connect(&backend.options.socket).works(8, 7), "the next hypervisor is served");
    backend.terminate();
}

#[test]
fn a_running_guest_is_refused_when_the_live_state_is_gone_whichever_queue_it_used() {
    let site = site(4 << 20);
    let options = Options::new(&site);
    let backend = Backend::start(&options);
    let mut guest = Guest::connect(&options.socket);
    assert!(guest.works(8, 1));
    backend.kill_with_host();
    drop(guest);
    let backend = Backend::start(&options);
    // Queue 0 of the guest was never used, queue 1 was.
    let guest = Guest::connect(&options.socket);
    let second = Setup {
        used: USED + 0x800,
        available: AVAILABLE + 0x800,
        table: TABLE + 0x800,
        size: 32,
        ..Setup::default()
    };
    guest.put(second.used + 2, &7u16.to_le_bytes());
    let frontend = guest.frontend.clone();
    frontend.set_vring_num(1, 32).unwrap();
    frontend.set_vring_base(1, 7).unwrap();
    let result = frontend.set_vring_addr(1, &guest.rings(second));
    assert!(result.is_err(), "{}", backend.log());
}

/// A disk with room for 1 MiB of old blocks, whose writes wait two seconds for more room.
struct LittleRoom {
    device: Device,
    control: Control,
    _backend: Backend,
    // Dropped after the process that uses it.
    site: Site,
}

impl LittleRoom {
    const SIZE: u64 = 8 << 20;

    fn new() -> LittleRoom {
        let site = site(LittleRoom::SIZE);
        let room = ["--cow-memory", "1", "--cow-disk", "0", "--cow-stall", "2"];
        let backend = Backend::start(&Options::new(&site).with(&room));
        let (device, control) = (backend.device(Shape::default()), backend.control());
        LittleRoom { device, control, _backend: backend, site }
    }

    /// Overwrites a part of the disk, and returns how long that took.
    fn fill(&mut self, fill: u8, part: Range<u64>) -> Duration {
        let start = Instant::now();
        for at in part.step_by(64 << 10) {
            self.device.queues[0].write(at, &[fill; 64 << 10]).expect("write");
        }
        start.elapsed()
    }

    /// Takes a checkpoint that waits, and returns its number.
    fn checkpoint(&mut self) -> u64 {
        self.control.checkpoint().expect("it is accepted").number
    }

    fn export(&self, number: u64) -> Vec<u8> {
        repository::export(&self.site.store(), IMAGE, number)
    }
}

#[test]
fn a_write_waits_for_space_for_a_bounded_time_only() {
    let mut disk = LittleRoom::new();
    let mut content = vec![1; LittleRoom::SIZE as usize];
    disk.fill(1, 0..LittleRoom::SIZE);
    let silent = repository::silence_catalog(&disk.site);
    let lost = disk.checkpoint();
    let took = disk.fill(2, 0..2 << 20);
    assert!(took > Duration::from_secs(1), "{took:?}: there was room for all of it");
    assert!(took < Duration::from_secs(30), "{took:?}: it waited for the repository");
    assert_eq!(disk.control.stats().stalls, 1);
    disk.fill(3, 0..2 << 20);
    assert_eq!(disk.control.stats().stalls, 1, "nothing is copied any more");
    content[..2 << 20].fill(3);

    drop(silent);
    let number = disk.control.stable_checkpoint();
    let left = repository::snapshot(&disk.site.store(), IMAGE, lost);
    assert_eq!(left.state, cairn_store::SnapshotState::Failed);
    let reason = left.reason.expect("a reason");
    assert!(reason.contains("--cow-memory"), "{reason}");
    let last_failed = disk.control.status().last_failed.expect("a checkpoint failed");
    assert_eq!((last_failed.number, last_failed.reason), (lost, reason));
    assert!(disk.export(number) == content, "the next one is complete");
}

/// The first checkpoint of an outage has no copies. The second one has all of them.
#[test]
fn a_lack_of_space_costs_no_checkpoint_that_could_be_stored() {
    const HALF: u64 = LittleRoom::SIZE / 2;
    let mut disk = LittleRoom::new();
    disk.fill(1, 0..HALF);
    let silent = repository::silence_catalog(&disk.site);
    let kept = disk.checkpoint();
    disk.fill(2, HALF..2 * HALF);
    let lost = disk.checkpoint();
    assert_eq!(disk.control.stats().stalls, 0, "nothing was copied");
    disk.fill(3, HALF..2 * HALF);
    assert_eq!(disk.control.stats().stalls, 1, "one checkpoint has all the copies");
    drop(silent);
    let last = disk.control.stable_checkpoint();
    let snapshot = |number| repository::snapshot(&disk.site.store(), IMAGE, number).state;
    use cairn_store::SnapshotState::{Failed, Stable};
    assert_eq!([kept, lost, last].map(snapshot), [Stable, Failed, Stable]);
    let half = |fill: u8| vec![fill; HALF as usize];
    for (number, content) in [(kept, [half(1), half(0)]), (last, [half(1), half(3)])] {
        assert!(disk.export(number) == content.concat(), "{number}");
    }
}

#[test]
fn storing_keeps_to_its_rate() {
    const SIZE: u64 = 12 << 20;
    let site = site(SIZE);
    let backend = Backend::start(&Options::new(&site).with(&["--commit-rate", "4000000"]));
    let mut device = backend.device(Shape::default());
    for at in (0..SIZE).step_by(1 << 20) {
        device.queues[0].write(at, &[1; 1 << 20]).expect("write");
    }
    let start = Instant::now();
    backend.control().stable_checkpoint();
    let took = start.elapsed().as_secs_f64();
    // The first batch is not delayed.
    assert!((1.5..12.0).contains(&took), "{took} s for 12 MiB at 4 MB/s");
}
