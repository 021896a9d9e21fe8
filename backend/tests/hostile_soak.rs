//! A guest and a hypervisor that do anything, for a long time: random rings, descriptors, indices and
//! messages. The process lives in bounded memory, answers every message in time, and the disk of
//! another process is not disturbed.
//!
//! `CAIRN_SEED` repeats the choices of a run, but not its timing. `CAIRN_SOAK_SECONDS` makes it that
//! long.

mod frontend;
mod support;
mod survivor;

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use frontend::{
    AVAILABLE, BASE, DATA, Entry, Guest, HEADER, INDIRECT, MEMORY, OK, OUT, Raw, STATUS, Setup,
    TABLE, USED,
};
use seeded_rng::Rng;
use support::backend::{Backend, IMAGE, Options, Site};
use support::repository;
use support::rng::{Repeat, number_from_env};
use survivor::{BLOCK, Manner, Survivor};
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::GuestMemoryBackend;

const SIZE: u64 = 8 << 20;

/// The size of the attacked disk. Only its first part is local. The rest cannot be fetched, so that
/// requests wait.
const ATTACKED_SIZE: u64 = 64 << 20;
const LOCAL_SIZE: u64 = 1 << 20;
const CHUNK: u32 = 64 << 10;

/// How long the test runs, unless the environment says otherwise.
const SHORT: Duration = Duration::from_secs(5);

/// The most time that a message may take. A queue that stops gives its requests five seconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(6);

/// The most memory that the attacked process may ever have, in bytes.
const MEMORY_LIMIT: u64 = 256 << 20;

/// The most time that a request of the other disk may take.
const NEIGHBOUR_LIMIT: Duration = Duration::from_secs(10);

/// One attack on one connection.
struct Attacker<'a> {
    rng: &'a mut Rng,
    guest: Guest,
    tally: &'a mut Tally,
    /// A sector of a chunk that cannot be fetched.
    away: Option<u64>,
}

#[derive(Default)]
struct Tally {
    connections: u64,
    messages: u64,
    slowest: Duration,
}

impl Attacker<'_> {
    /// An address that is valid, nearly valid, or anything.
    fn address(&mut self) -> u64 {
        let known = [TABLE, AVAILABLE, USED, INDIRECT, HEADER, STATUS, DATA, BASE + MEMORY, BASE];
        match self.rng.below(10) {
            0 => self.rng.next_u64(),
            1 => self.rng.pick(&known).wrapping_sub(self.rng.below(32)),
            2 => BASE + self.rng.below(MEMORY),
            _ => self.rng.pick(&known),
        }
    }

    fn sector(&mut self) -> u64 {
        let local = self.rng.below(LOCAL_SIZE / 512);
        match self.away {
            _ if self.rng.chance(3) => self.rng.pick(&[ATTACKED_SIZE / 512 - 1, u64::MAX, 1 << 55]),
            Some(sector) if self.rng.chance(50) => sector,
            _ => local,
        }
    }

    fn entry(&mut self) -> Entry {
        let lens = [0, 1, 16, 48, 512, 4096, 65536, 1 << 20, u32::MAX];
        let len =
            if self.rng.chance(90) { self.rng.pick(&lens) } else { self.rng.next_u64() as u32 };
        let limit = self.rng.pick(&[64, 64, 64, 65536]);
        let next = self.rng.below(limit) as u16;
        let limit = self.rng.pick(&[8, 8, 8, 65536]);
        let flags = self.rng.below(limit) as u16;
        Entry { address: self.address(), len, flags, next }
    }

    /// Fills some entry, header or index, without care.
    fn scribble(&mut self) {
        match self.rng.below(8) {
            0..3 => {
                let (at, entry) = (self.rng.below(64) as u16, self.entry());
                self.guest.entry(TABLE, at, entry);
            }
            3 => {
                let (at, entry) = (self.rng.below(64) as u16, self.entry());
                self.guest.entry(INDIRECT, at, entry);
            }
            4 => {
                let kind = self.rng.pick(&[0, 0, 1, 1, 4, 8, 11, 13, 99]);
                let sector = self.sector();
                self.guest.header(kind, sector);
            }
            5 => self.valid_chain(),
            6 => {
                let mut noise = [0; 64];
                self.rng.fill(&mut noise);
                let at = BASE + self.rng.below(MEMORY - 64);
                self.guest.put(at, &noise);
            }
            _ => {
                let heads: Vec<u8> = (0..64).flat_map(|_| [self.rng.below(66) as u8, 0]).collect();
                self.guest.put(AVAILABLE + 4, &heads);
            }
        }
    }

    /// Makes every head a valid read or write.
    fn valid_chain(&mut self) {
        let kind = self.rng.below(2) as u32;
        let sector = self.sector();
        self.guest.header(kind, sector);
        let flags = if kind == 0 { 2 } else { 0 };
        self.guest.chain_at(INDIRECT, &[(HEADER, 16, 0), (DATA, 4096, flags), (STATUS, 1, 2)]);
        for head in 0..64 {
            self.guest.entry(TABLE, head, Entry { address: INDIRECT, len: 48, flags: 4, next: 0 });
        }
    }

    /// Offers chains: one after the other, a ring full, or anything.
    fn offer(&mut self) {
        match self.rng.below(20) {
            0 => self.guest.publish(self.rng.next_u64() as u16),
            1..4 => {
                // As fast as the device takes them.
                let end = Instant::now() + Duration::from_millis(self.rng.below(30));
                while Instant::now() < end {
                    let used = self.guest.get(USED + 2, 2);
                    let used = u16::from_le_bytes([used[0], used[1]]);
                    self.guest.available = used.wrapping_add(60);
                    self.guest.publish(self.guest.available);
                }
            }
            4 => {
                for _ in 0..self.rng.between(1, 64) {
                    let head = self.rng.below(65) as u16;
                    self.guest.offer(head);
                }
            }
            // Heads that are most likely not in flight: others break the ring.
            _ => {
                let used = self.guest.get(USED + 2, 2);
                let used = u16::from_le_bytes([used[0], used[1]]);
                let in_flight = u64::from(self.guest.available.wrapping_sub(used));
                for _ in 0..self.rng.below(65_u64.saturating_sub(in_flight).max(1)) {
                    let head = self.guest.available % 64;
                    self.guest.offer(head);
                }
            }
        }
    }

    /// Sends a message and waits for the answer. Returns whether the connection is of use.
    fn ask<T>(
        &mut self,
        name: &str,
        message: impl FnOnce(&mut Frontend) -> vhost::Result<T>,
    ) -> bool {
        let begin = Instant::now();
        let answer = self.guest.ask(message);
        let took = begin.elapsed();
        assert!(took < ANSWER_LIMIT, "{name} was answered after {took:?}");
        self.tally.messages += 1;
        self.tally.slowest = self.tally.slowest.max(took);
        answer.is_ok()
    }

    /// Sends a random message.
    fn message(&mut self) -> bool {
        let queue = self.rng.below(2) as usize;
        let setup = match self.rng.chance(80) {
            true => Setup::default(),
            false => Setup { used: self.address(), table: self.address(), ..Setup::default() },
        };
        match self.rng.below(12) {
            0 => self.restart(),
            1 => self.ask("GET_VRING_BASE", |frontend| frontend.get_vring_base(queue)),
            2 => {
                let region = self.guest.memory.iter().next().expect("there is one region");
                let region = VhostUserMemoryRegionInfo::from_guest_region(region).expect("a file");
                self.ask("SET_MEM_TABLE", |frontend| frontend.set_mem_table(&[region]))
            }
            3 => {
                let enable = self.rng.chance(70);
                self.ask("SET_VRING_ENABLE", |frontend| frontend.set_vring_enable(queue, enable))
            }
            4 => {
                let rings = self.guest.rings(setup);
                self.ask("SET_VRING_ADDR", |frontend| frontend.set_vring_addr(queue, &rings))
            }
            5 => {
                let base = self.rng.next_u64() as u16;
                self.ask("SET_VRING_BASE", |frontend| frontend.set_vring_base(queue, base))
            }
            6 => {
                let bytes = [self.rng.below(2) as u8];
                let flags = VhostUserConfigFlags::WRITABLE;
                self.ask("SET_CONFIG", |frontend| frontend.set_config(32, flags, &bytes))
            }
            7 => {
                let cleared = 1 << self.rng.below(16) | 1 << 29;
                self.ask("SET_FEATURES", |frontend| {
                    let features = frontend.get_features()?;
                    frontend.set_features(features & !cleared)
                })
            }
            8 => {
                let kick = self.guest.kick.try_clone().expect("an event");
                self.ask("SET_VRING_KICK", |frontend| frontend.set_vring_kick(queue, &kick))
            }
            9 => {
                let size = self.rng.pick(&[0, 1, 2, 64, 256, 1024, 32768]);
                self.ask("SET_VRING_NUM", |frontend| frontend.set_vring_num(queue, size))
            }
            _ => {
                let space = [0; 60];
                let flags = VhostUserConfigFlags::WRITABLE;
                self.ask("GET_CONFIG", |frontend| frontend.get_config(0, 60, flags, &space))
            }
        }
    }

    /// Stops the queue and starts it as new.
    fn restart(&mut self) -> bool {
        if !self.ask("GET_VRING_BASE", |frontend| frontend.get_vring_base(0)) {
            return false;
        }
        for ring in [AVAILABLE, USED] {
            self.guest.put(ring, &[0; 4]);
        }
        self.guest.available = 0;
        let rings = self.guest.rings(Setup::default());
        let kick = self.guest.kick.try_clone().expect("an event");
        self.ask("the messages that start a queue", |frontend| {
            frontend.set_vring_num(0, 64)?;
            frontend.set_vring_base(0, 0)?;
            frontend.set_vring_addr(0, &rings)?;
            frontend.set_vring_kick(0, &kick)?;
            frontend.set_vring_enable(0, true)
        })
    }

    fn run(mut self) {
        self.tally.connections += 1;
        self.valid_chain();
        for _ in 0..self.rng.between(1, 60) {
            for _ in 0..self.rng.below(20) {
                self.scribble();
            }
            self.offer();
            if self.rng.chance(30) && !self.message() {
                return;
            }
        }
    }
}

/// Sends messages that no library would send.
fn send_noise(backend: &Backend, rng: &mut Rng) {
    let mut raw = Raw::connect(&backend.options.socket);
    for _ in 0..rng.between(1, 5) {
        let mut noise = vec![0; rng.between(0, 300) as usize];
        rng.fill(&mut noise);
        let size = if rng.chance(80) { noise.len() as u32 } else { rng.next_u64() as u32 };
        raw.send(rng.below(48) as u32, rng.pick(&[1, 9, 5]), size, &noise);
    }
}

/// Uses another disk as a good guest does, until it is told to stop. Returns the number of requests
/// and the time of the slowest.
fn use_other_disk(backend: &Backend, seed: u64, stop: &AtomicBool) -> (u64, Duration) {
    let mut guest = Survivor::new(Manner::UsedIndex, SIZE as usize / BLOCK, Rng::new(seed));
    guest.connect(&backend.options.socket).expect("connect");
    while !stop.load(Ordering::Relaxed) {
        guest.run(Duration::from_millis(100));
        assert!(guest.slowest < NEIGHBOUR_LIMIT, "a request took {:?}", guest.slowest);
    }
    guest.finish(Duration::from_secs(20));
    guest.check_all();
    (guest.completed, guest.slowest)
}

/// Stops the other disk's guest also if the test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn nothing_that_a_guest_does_exhausts_or_stalls_the_process() {
    let soak = number_from_env("CAIRN_SOAK_SECONDS").map_or(SHORT, Duration::from_secs);
    let seed = number_from_env("CAIRN_SEED").unwrap_or(1);
    println!("seed {seed}");
    let _repeat = Repeat(seed);
    let mut rng = Rng::new(seed);
    let (site, other_site) = (Site::new(), Site::new());
    let mut content = vec![0; ATTACKED_SIZE as usize];
    rng.fill(&mut content);
    repository::import(&site.store(), IMAGE, CHUNK, &content);
    repository::create(&other_site.store(), IMAGE, CHUNK, SIZE);
    let mut backend = Backend::start(&Options::new(&site));
    let other = Backend::start(&Options::new(&other_site));
    // What the guest does not write cannot be read.
    fs::rename(site.repository().join("segments"), site.path("away")).expect("take the data away");
    let mut guest = Guest::connect(&backend.options.socket);
    for sector in (0..LOCAL_SIZE / 512).step_by(8) {
        assert_eq!(guest.request(OUT, sector, &[(DATA, 4096, 0)]), OK);
    }
    drop(guest);
    let (start, stop, mut tally) = (Instant::now(), AtomicBool::new(false), Tally::default());
    let (completed, slowest) = std::thread::scope(|scope| {
        let neighbour = scope.spawn(|| use_other_disk(&other, seed, &stop));
        let _stop = StopOnDrop(&stop);
        let mut reported = Instant::now();
        while start.elapsed() < soak {
            let sector = rng.between(LOCAL_SIZE / 512, ATTACKED_SIZE / 512 - 8);
            // Requests that wait make each stop of the queue slow.
            let unfetchable = rng.chance(20).then_some(sector);
            let size = rng.pick(&[64, 64, 64, 64, 64, 64, 64, 2]);
            let setup = Setup { size, ..Setup::default() };
            match Guest::connect_with(&backend.options.socket, setup) {
                Ok(guest) => {
                    Attacker { rng: &mut rng, guest, tally: &mut tally, away: unfetchable }.run()
                }
                Err(error) => panic!("a good setup is refused: {error}"),
            }
            if rng.chance(20) {
                send_noise(&backend, &mut rng);
            }
            backend.assert_alive();
            let peak = backend.peak_memory();
            assert!(peak < MEMORY_LIMIT, "{peak} bytes after {:?}", start.elapsed());
            if reported.elapsed() > Duration::from_secs(30) {
                reported = Instant::now();
                println!(
                    "{:?}: {} KiB, peak {} KiB",
                    start.elapsed(),
                    backend.memory("VmRSS:") >> 10,
                    peak >> 10
                );
            }
        }
        stop.store(true, Ordering::Relaxed);
        neighbour.join().expect("the other disk was disturbed")
    });
    let Tally { connections, messages, slowest: slowest_message } = tally;
    println!(
        "{connections} connections, {messages} messages, the slowest {slowest_message:?}; memory {} \
         KiB, peak {} KiB; the other disk: {completed} requests, the slowest {slowest:?}",
        backend.memory("VmRSS:") >> 10,
        backend.peak_memory() >> 10,
    );
    assert!(connections > 5 && messages > 10 && completed > 100, "too little was tested");
    assert!(Guest::connect(&backend.options.socket).works(8, 1), "the disk serves");
    backend.terminate();
}
