//! A guest whose rings are invalid, or never run empty. The process lives, the disk serves, and the
//! hypervisor's messages are answered.

mod frontend;
mod support;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use frontend::target::{SIZE, Target};
use frontend::{
    AVAILABLE, BASE, DATA, END, Entry, GET_ID, Guest, HEADER, IN, INDIRECT, MEMORY, NEXT, OK, Part,
    Setup, TABLE, TABLE_FOLLOWS, USED, WRITABLE, WRITE_ZEROES,
};
use support::backend::{Backend, IMAGE, Options, Site};
use support::device::{BLOCK, Shape};
use support::repository;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::GuestMemoryBackend;

#[test]
fn no_available_index_harms_the_process() {
    let mut target = Target::new();
    for jump in [65, 1000, 32767, 40000, 65535] {
        let mut guest = target.guest();
        assert!(guest.works(8, 1));
        guest.publish(guest.available.wrapping_add(jump));
        std::thread::sleep(Duration::from_millis(20));
        target.still_serves(guest, &format!("a jump by {jump}"));
    }
    for head in [64, 255, 9999, 65535] {
        let mut guest = target.guest();
        guest.offer(head);
        guest.wait_used(Duration::from_millis(20));
        target.still_serves(guest, &format!("head {head}"));
    }
}

#[test]
fn a_guest_that_breaks_its_ring_again_and_again_writes_few_log_lines() {
    let mut target = Target::new();
    let mut guest = target.guest();
    for _ in 0..100 {
        guest.offer(9999);
        std::thread::sleep(Duration::from_millis(2));
        stop_queue(&mut guest);
        guest.restart();
    }
    let log = target.backend.log();
    let lines = log.lines().filter(|line| line.contains("broke a virtqueue")).count();
    assert!((1..10).contains(&lines), "{lines} lines: {log}");
    target.still_serves(guest, "a ring that was broken 100 times");
}

#[test]
fn no_place_of_the_rings_harms_the_process() {
    let mut target = Target::new();
    let good = Setup::default();
    let outside = BASE + MEMORY;
    let setups = [
        Setup { used: outside, ..good },
        Setup { used: outside - 8, ..good },
        Setup { used: 0, ..good },
        Setup { used: USED + 1, ..good },
        Setup { table: outside, ..good },
        Setup { table: outside - 16, ..good },
        Setup { table: TABLE + 3, ..good },
        Setup { available: u64::MAX - 3, ..good },
        Setup { available: outside - 2, ..good },
        Setup { available: TABLE, used: TABLE, ..good },
        Setup { size: 0, ..good },
        Setup { size: 3, ..good },
        Setup { size: 65535, ..good },
        Setup { size: 32768, ..good },
        Setup { base: 5000, ..good },
    ];
    let socket = target.backend.options.socket.clone();
    for setup in setups {
        if let Ok(guest) = Guest::connect_with(&socket, setup) {
            for _ in 0..3 {
                guest.kick.write(1).expect("kick");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let guest = target.guest();
        target.still_serves(guest, &format!("{setup:x?}"));
    }
    // The rings of a running queue are moved away.
    let mut guest = target.guest();
    assert!(guest.works(8, 3));
    let _ = guest.frontend.set_vring_addr(0, &guest.rings(Setup { used: outside, ..good }));
    target.still_serves(guest, "rings moved while running");
}
/// A backend whose disk has content that is in the repository only, and the repository's data is
/// out of reach until [`Unfetchable::give_back`]. So reads wait.
struct Unfetchable {
    target: Target,
    data: PathBuf,
    away: PathBuf,
}

impl Unfetchable {
    fn new() -> Unfetchable {
        let site = Site::new();
        repository::import(&site.store(), IMAGE, 64 << 10, &[7; SIZE as usize]);
        let backend = Backend::start(&Options::new(&site));
        let (data, away) = (site.repository().join("segments"), site.path("away"));
        fs::rename(&data, &away).expect("take the data away");
        Unfetchable { target: Target::with(site, backend), data, away }
    }

    fn give_back(&self) {
        fs::rename(&self.away, &self.data).expect("bring the data back");
    }

    /// The requests in flight on queue 0.
    fn in_flight(&self) -> u64 {
        self.target.backend.control().status().queues[0].in_flight
    }

    fn wait_for_in_flight(&self, count: u64) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.in_flight() != count {
            assert!(Instant::now() < deadline, "{} in flight, not {count}", self.in_flight());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Ends the queue as a hypervisor does, and returns how long that took.
fn stop_queue(guest: &mut Guest) -> Duration {
    let begin = Instant::now();
    guest.ask(|frontend| frontend.get_vring_base(0)).expect("the queue stops");
    begin.elapsed()
}

/// Shares the guest's memory once more, as a hypervisor does that changes it, and returns how long
/// that took.
fn share_memory_again(guest: &mut Guest) -> Duration {
    let region = guest.memory.iter().next().expect("there is one region");
    let region = VhostUserMemoryRegionInfo::from_guest_region(region).expect("a file");
    let begin = Instant::now();
    guest.ask(|frontend| frontend.set_mem_table(&[region])).expect("the backend takes the memory");
    begin.elapsed()
}

#[test]
fn a_chain_that_is_offered_again_while_it_is_in_flight_breaks_the_ring() {
    let mut slow = Unfetchable::new();
    let mut guest = slow.target.guest();
    guest.header(IN, 0);
    guest.chain(&[(HEADER, 16, 0), (DATA, 4096, WRITABLE), END]);
    guest.offer(0);
    slow.wait_for_in_flight(1);
    for _ in 0..1000 {
        guest.offer(0);
        std::thread::sleep(Duration::from_micros(50));
    }
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(slow.in_flight(), 1, "each head is in flight at most once");
    assert!(slow.target.backend.log().contains("broke a virtqueue"));
    // What is in flight is answered, once, and nothing more.
    slow.give_back();
    assert_eq!(guest.wait_used(Duration::from_secs(20)).map(|(head, _)| head), Some(0));
    assert_eq!(guest.status(), OK);
    assert!(guest.wait_used(Duration::from_millis(200)).is_none(), "the ring is broken");
    assert!(stop_queue(&mut guest) < Duration::from_secs(6));
    guest.restart();
    slow.target.still_serves(guest, "a head that was offered twice");
}

#[test]
fn no_more_chains_are_in_flight_than_the_queue_has_entries() {
    let mut slow = Unfetchable::new();
    let mut guest = slow.target.guest();
    guest.header(IN, 0);
    // Chains that share everything but their heads.
    for head in 0..64 {
        let table = Entry { address: INDIRECT, len: 48, flags: TABLE_FOLLOWS, next: 0 };
        guest.entry(TABLE, head, table);
    }
    guest.chain_at(INDIRECT, &[(HEADER, 16, 0), (DATA, 4096, WRITABLE), END]);
    for round in 0..20 {
        for head in 0..64 {
            guest.offer(head);
        }
        let expected = Duration::from_millis(if round == 0 { 200 } else { 10 });
        std::thread::sleep(expected);
    }
    slow.wait_for_in_flight(64);
    // The requests get five seconds, and then they fail.
    assert!(stop_queue(&mut guest) < Duration::from_secs(7));
    slow.give_back();
    guest.restart();
    slow.target.still_serves(guest, "more chains than entries");
}

/// The used ring and the available ring are one. So each answer of the device offers another chain.
#[test]
fn a_ring_that_never_runs_empty_does_not_hide_the_hypervisors_messages() {
    let valid: &[Part] = &[(HEADER, 16, 0), (DATA, 20, WRITABLE), END];
    let invalid: &[Part] = &[(HEADER, 16, 0)];
    for (attack, chain) in [("requests", valid), ("chains that are no requests", invalid)] {
        let mut target = Target::new();
        let mut guest = target.guest();
        assert!(guest.works(8, 1));
        stop_queue(&mut guest);
        guest.header(GET_ID, 0);
        guest.chain_at(INDIRECT, chain);
        // An entry of the used ring is a number of heads to the available ring.
        for head in 0..64 {
            let len = chain.len() as u32 * 16;
            guest.entry(
                TABLE,
                head,
                Entry { address: INDIRECT, len, flags: TABLE_FOLLOWS, next: 0 },
            );
        }
        guest.put(AVAILABLE, &[0; 1024]);
        guest.put(AVAILABLE + 2, &32u16.to_le_bytes());
        guest.set_up_queue(Setup { used: AVAILABLE, ..Setup::default() }).expect("a valid queue");
        guest.kick.write(1).expect("kick");
        let index = |guest: &Guest| guest.get(AVAILABLE + 2, 2);
        std::thread::sleep(Duration::from_millis(100));
        let (before, begin) = (index(&guest), Instant::now());
        while index(&guest) == before {
            assert!(begin.elapsed() < Duration::from_secs(5), "the worker has nothing to do");
        }

        assert!(share_memory_again(&mut guest) < Duration::from_secs(6), "{attack}");
        assert!(stop_queue(&mut guest) < Duration::from_secs(6), "{attack}");
        guest.put(AVAILABLE, &[0; 1024]);
        guest.restart();
        target.still_serves(guest, attack);
    }
}
/// Each request covers every chunk of every checkpoint, so planning a full queue takes a long time.
#[test]
fn a_queue_full_of_long_requests_does_not_hide_the_hypervisors_messages() {
    const CHUNK: u64 = 64 << 10;
    const SIZE: u64 = 32 << 20;
    const CHECKPOINTS: u8 = 15;
    const ENTRIES: u16 = 1024;
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK as u32, SIZE);
    let entries = ENTRIES.to_string();
    // Storing makes no progress, so all checkpoints wait.
    let options = ["--queue-size", &entries, "--commit-rate", "1"];
    let backend = Backend::start(&Options::new(&site).with(&options));
    let shape = Shape { depth: 64, longest: BLOCK, ..Shape::default() };
    let mut device = backend.device(shape);
    assert!(device.max_write_zeroes() >= SIZE);
    for round in 1..=CHECKPOINTS {
        device.write_blocks(CHUNK, round);
        backend.control().checkpoint().expect("a checkpoint");
    }
    drop(device);

    let (table, used) = (DATA + 0x4_0000, DATA + 0x5_0000);
    let setup = Setup { size: ENTRIES, table, used, ..Setup::default() };
    let mut guest = Guest::connect_with(&backend.options.socket, setup).expect("a long ring");
    guest.header(WRITE_ZEROES, 0);
    guest.range(0, (SIZE / 512) as u32, 0);
    guest.chain_at(INDIRECT, &[(HEADER, 16, 0), (DATA, 16, 0), END]);
    for head in 0..ENTRIES {
        let entry = Entry { address: INDIRECT, len: 48, flags: TABLE_FOLLOWS, next: 0 };
        guest.entry(table, head, entry);
        guest.put(AVAILABLE + 4 + 2 * u64::from(head), &head.to_le_bytes());
    }
    guest.publish(ENTRIES);
    let mut target = Target::with(site, backend);
    let mut control = target.backend.control();
    let begin = Instant::now();
    while control.status().queues[0].in_flight == 0 {
        assert!(begin.elapsed() < Duration::from_secs(5), "no request is served");
    }
    assert_eq!(control.status().pending.len(), usize::from(CHECKPOINTS));
    let took = share_memory_again(&mut guest);
    assert!(took < Duration::from_secs(6), "the memory changed after {took:?}");
    assert!(control.status().queues[0].in_flight > 0, "the queue was not full for long enough");
    target.backend.assert_alive();
}

/// The guest replaces its chains in flight by one table with as many entries as a table can have.
#[test]
fn chains_in_flight_that_become_long_cost_the_next_process_no_memory() {
    let mut slow = Unfetchable::new();
    let mut guest = slow.target.guest();
    // From the first answer on, the ledger has the chains in flight.
    assert_eq!(guest.request(GET_ID, 0, &[(DATA, 20, WRITABLE)]), OK);
    guest.header(IN, 0);
    guest.chain_at(INDIRECT, &[(HEADER, 16, 0), (DATA, 4096, WRITABLE), END]);
    let table = |address, len| Entry { address, len, flags: TABLE_FOLLOWS, next: 0 };
    for head in 0..64 {
        guest.entry(TABLE, head, table(INDIRECT, 48));
        guest.offer(head);
    }
    slow.wait_for_in_flight(64);
    // Entry 0 is the header, entry 1 follows itself.
    guest.entry(DATA, 0, Entry { address: HEADER, len: 16, flags: NEXT, next: 1 });
    guest.entry(DATA, 1, Entry { address: DATA, len: 1, flags: WRITABLE | NEXT, next: 1 });
    for head in 0..64 {
        guest.entry(TABLE, head, table(DATA, 65535 * 16));
    }
    let options = slow.target.backend.options.clone();
    slow.target.backend.terminate();
    slow.target.backend = Backend::start(&options);
    let before = slow.target.backend.peak_memory();
    guest.connect_again(&options.socket).expect("connect again");
    for head in 0..64 {
        let answer = guest.wait_used(Duration::from_secs(20));
        assert_eq!(answer.map(|(head, _)| head), Some(head), "each is answered in its turn");
    }
    let peak = slow.target.backend.peak_memory();
    assert!(peak < before + (16 << 20), "{peak} bytes, and {before} without a guest");
    slow.give_back();
    slow.target.still_serves(guest, "long chains");
}
