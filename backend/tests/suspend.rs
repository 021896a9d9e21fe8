//! What becomes of requests that wait for the repository when a hypervisor stops their ring. They are
//! completed, or stay in the record of requests in flight, as the hypervisor has negotiated.

mod frontend;
mod support;
mod survivor;

use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use frontend::{
    DATA, Entry, FLUSH, GET_VRING_BASE_INFLIGHT, GET_VRING_BASE_SKIP_DRAIN, Guest, HEADER, IN,
    IOERR, NEXT, OK, OUT, Raw, STATUS, TABLE, UNTOUCHED, WRITABLE,
};
use seeded_rng::Rng;
use support::backend::{Backend, IMAGE, Options, Site};
use support::repository;
use support::rng::{Repeat, number_from_env};
use survivor::{BLOCK, Manner, Survivor};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vmm_sys_util::eventfd::EventFd;

const CHUNK: u32 = 64 << 10;
const SIZE: u64 = 8 << 20;
const CONTENT: u8 = 7;

/// A stop that waits for the repository takes five seconds.
const AT_ONCE: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(20);

/// A disk whose content is in the repository only, and a repository that can be out of reach.
struct Target {
    backend: Backend,
    data: PathBuf,
    away: PathBuf,
    _site: Site,
}

impl Target {
    fn new(options: &[&str]) -> Target {
        let site = Site::new();
        repository::import(&site.store(), IMAGE, CHUNK, &[CONTENT; SIZE as usize]);
        let backend = Backend::start(&Options::new(&site).with(options));
        let (data, away) = (site.repository().join("segments"), site.path("away"));
        Target { backend, data, away, _site: site }
    }

    fn take_away(&self) {
        fs::rename(&self.data, &self.away).expect("take the data away");
    }

    fn give_back(&self) {
        fs::rename(&self.away, &self.data).expect("bring the data back");
    }

    fn connect(&self, protocol_features: u64) -> Guest {
        Guest::connect_with_ledger(&self.backend.options.socket, protocol_features)
    }

    fn wait_for_in_flight(&self, count: u64) {
        let deadline = Instant::now() + LIMIT;
        let in_flight = || self.backend.control().status().queues[0].in_flight;
        while in_flight() != count {
            assert!(Instant::now() < deadline, "{} in flight, not {count}", in_flight());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A guest whose read of the first block waits, as head 0, after a write that was completed.
    fn waiting_guest(&self, protocol_features: u64) -> Guest {
        let mut guest = self.connect(protocol_features);
        guest.put(DATA, &[1; 4096]);
        assert_eq!(guest.request(OUT, SIZE / 512 - 8, &[(DATA, 4096, 0)]), OK);
        self.take_away();
        guest.put(DATA, &[0; 4096]);
        guest.header(IN, 0);
        guest.chain(&[(HEADER, 16, 0), (DATA, 4096, WRITABLE), (STATUS, 1, WRITABLE)]);
        guest.offer(0);
        self.wait_for_in_flight(1);
        guest
    }
}

fn heads(guest: &Guest) -> Vec<u16> {
    guest.ledger.as_ref().expect("it keeps one").heads()
}

/// How a hypervisor stops a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    GetVringBase,
    SkipDrain,
}

/// Stops the ring. Returns the next available index, and how long that took.
fn stop(guest: &mut Guest, message: Message, disable_first: bool) -> (u32, Duration) {
    let begin = Instant::now();
    if disable_first {
        // QEMU disables all rings before it stops the first one.
        guest.ask(|frontend| frontend.set_vring_enable(0, false)).expect("disable the ring");
    }
    let base = match message {
        Message::GetVringBase => guest.ask(|frontend| frontend.get_vring_base(0)).expect("stop"),
        Message::SkipDrain => guest.skip_drain().expect("stop"),
    };
    (base, begin.elapsed())
}

/// The ways of a hypervisor that can leave requests in flight.
const LEAVING: [(u64, Message); 2] = [
    (GET_VRING_BASE_INFLIGHT, Message::GetVringBase),
    (GET_VRING_BASE_INFLIGHT | GET_VRING_BASE_SKIP_DRAIN, Message::SkipDrain),
];

#[test]
fn a_read_that_waits_stays_in_flight_and_is_answered_when_the_ring_starts_again() {
    for (features, message) in LEAVING {
        for disable_first in [true, false] {
            let target = Target::new(&[]);
            let mut guest = target.waiting_guest(features);
            let (base, time) = stop(&mut guest, message, disable_first);
            assert!(time < AT_ONCE, "{message:?} took {time:?}");
            assert_eq!(base, 2, "both chains were popped");
            assert_eq!(heads(&guest), [0], "the read is in flight");

            // A suspended device leaves the guest's memory alone.
            target.give_back();
            std::thread::sleep(Duration::from_millis(500));
            assert_eq!(guest.wait_used(Duration::ZERO), None, "nothing is answered");
            assert_eq!((guest.status(), guest.get(DATA, 4096)), (UNTOUCHED, vec![0; 4096]));

            guest.start_at(base as u16);
            assert_eq!(guest.wait_used(LIMIT).map(|(head, _)| head), Some(0));
            assert_eq!((guest.status(), guest.get(DATA, 4096)), (OK, vec![CONTENT; 4096]));
            assert_eq!(heads(&guest), [0; 0], "nothing is in flight");
            assert!(guest.works(64, 9), "the ring serves");
        }
    }
}

#[test]
fn a_ring_that_was_only_disabled_goes_on_with_the_read_that_waited() {
    let target = Target::new(&[]);
    let mut guest = target.waiting_guest(GET_VRING_BASE_INFLIGHT);
    let begin = Instant::now();
    guest.ask(|frontend| frontend.set_vring_enable(0, false)).expect("disable the ring");
    assert!(begin.elapsed() < AT_ONCE, "it took {:?}", begin.elapsed());
    target.give_back();
    guest.ask(|frontend| frontend.set_vring_enable(0, true)).expect("enable the ring");
    assert_eq!(guest.wait_used(LIMIT).map(|(head, _)| head), Some(0));
    assert_eq!((guest.status(), guest.get(DATA, 4096)), (OK, vec![CONTENT; 4096]));
}

#[test]
fn a_second_hypervisor_answers_the_read_that_the_first_one_left() {
    let target = Target::new(&[]);
    let mut guest = target.waiting_guest(LEAVING[1].0);
    let (base, _) = stop(&mut guest, Message::SkipDrain, true);
    // The first one stays connected until the migration is complete.
    let _first = guest.frontend.clone();
    guest.ledger = guest.ledger.as_ref().map(frontend::Ledger::migrate);
    guest.introduce_again(&target.backend.options.socket).expect("a second connection");
    guest.start_at(base as u16);
    target.give_back();
    assert_eq!(guest.wait_used(LIMIT).map(|(head, _)| head), Some(0));
    assert_eq!((guest.status(), guest.get(DATA, 4096)), (OK, vec![CONTENT; 4096]));
    assert_eq!(heads(&guest), [0; 0], "nothing is in flight");
}

/// The guest has given its buffers to other uses.
#[test]
fn after_a_reset_of_the_device_a_read_that_was_left_is_not_executed() {
    let target = Target::new(&[]);
    let mut guest = target.waiting_guest(GET_VRING_BASE_INFLIGHT | 1 << 13);
    guest.ask(|frontend| frontend.set_vring_enable(0, false)).expect("disable the ring");
    let begin = Instant::now();
    guest.ask(|frontend| frontend.reset_device()).expect("reset");
    assert!(begin.elapsed() < AT_ONCE, "it took {:?}", begin.elapsed());
    target.give_back();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!((guest.status(), guest.get(DATA, 4096)), (UNTOUCHED, vec![0; 4096]));
}

#[test]
fn without_the_features_a_stop_gives_a_read_that_waits_five_seconds_and_then_an_error() {
    for disable_first in [true, false] {
        let target = Target::new(&[]);
        let mut guest = target.waiting_guest(0);
        let (base, time) = stop(&mut guest, Message::GetVringBase, disable_first);
        assert!(time > Duration::from_secs(4), "it took {time:?}");
        assert_eq!(base, 2);
        assert_eq!(guest.wait_used(Duration::ZERO).map(|(head, _)| head), Some(0));
        assert_eq!(guest.status(), IOERR);
        assert_eq!(heads(&guest), [0; 0], "nothing is in flight");
    }
}

/// A hypervisor that does not migrate the record of requests in flight wants all of them completed.
#[test]
fn with_skip_drain_the_other_message_still_completes_a_read_that_waits() {
    for (disable_first, comes_back) in [(true, true), (true, false), (false, true)] {
        let target = Target::new(&[]);
        let mut guest = target.waiting_guest(LEAVING[1].0);
        let (base, time) = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(1));
                if comes_back {
                    target.give_back();
                }
            });
            stop(&mut guest, Message::GetVringBase, disable_first)
        });
        assert!(time > Duration::from_millis(800), "it took {time:?}");
        assert_eq!(base, 2);
        assert_eq!(guest.wait_used(Duration::ZERO).map(|(head, _)| head), Some(0));
        assert_eq!(guest.status(), if comes_back { OK } else { IOERR });
        if comes_back {
            assert_eq!(guest.get(DATA, 4096), [CONTENT; 4096]);
        }
        assert_eq!(heads(&guest), [0; 0], "nothing is in flight");
    }
}

/// QEMU tells the addresses of each ring again when a guest begins to migrate.
#[test]
fn a_ring_that_is_told_its_addresses_again_goes_on_with_the_read_that_waits() {
    let target = Target::new(&[]);
    let mut guest = target.waiting_guest(0);
    let rings = guest.rings(guest.setup);
    let begin = Instant::now();
    guest.ask(|frontend| frontend.set_vring_addr(0, &rings)).expect("the same addresses");
    assert!(begin.elapsed() < AT_ONCE, "it took {:?}", begin.elapsed());
    target.give_back();
    assert_eq!(guest.wait_used(LIMIT).map(|(head, _)| head), Some(0));
    assert_eq!((guest.status(), guest.get(DATA, 4096)), (OK, vec![CONTENT; 4096]));
}

#[test]
fn a_ring_that_is_moved_or_gets_another_kick_goes_on_with_the_read_that_waits() {
    let target = Target::new(&[]);
    let mut guest = target.waiting_guest(GET_VRING_BASE_INFLIGHT);
    let begin = Instant::now();
    let used = DATA + 0x4_0000;
    guest.put(used, &guest.get(guest.setup.used, 1024));
    guest.setup.used = used;
    let rings = guest.rings(guest.setup);
    guest.ask(|frontend| frontend.set_vring_addr(0, &rings)).expect("other addresses");
    guest.kick = EventFd::new(libc::EFD_NONBLOCK).expect("an event");
    let kick = guest.kick.try_clone().expect("an event");
    guest.ask(|frontend| frontend.set_vring_kick(0, &kick)).expect("another kick");
    assert!(begin.elapsed() < AT_ONCE, "it took {:?}", begin.elapsed());
    assert_eq!(heads(&guest), [0], "the read is in flight");
    target.give_back();
    assert_eq!(guest.wait_used(LIMIT).map(|(head, _)| head), Some(0));
    assert_eq!((guest.status(), guest.get(DATA, 4096)), (OK, vec![CONTENT; 4096]));
    assert!(guest.works(64, 9), "the ring serves");
}

#[test]
fn a_stop_of_a_suspended_ring_takes_no_request_that_came_later() {
    // A worker that takes it needs some luck.
    for _ in 0..4 {
        let target = Target::new(&[]);
        let mut guest = target.waiting_guest(LEAVING[1].0);
        guest.ask(|frontend| frontend.set_vring_enable(0, false)).expect("disable the ring");
        target.give_back();
        let (header, status) = (HEADER + 0x100, STATUS + 8);
        guest.put(header, &[FLUSH as u8, 0, 0, 0]);
        guest.entry(TABLE, 8, Entry { address: header, len: 16, flags: NEXT, next: 9 });
        guest.entry(TABLE, 9, Entry { address: status, len: 1, flags: WRITABLE, next: 0 });
        guest.offer(8);
        let (base, _) = stop(&mut guest, Message::GetVringBase, false);
        assert_eq!(base, 2);
        assert_eq!(guest.wait_used(Duration::ZERO).map(|(head, _)| head), Some(0), "the read");
        assert_eq!(guest.wait_used(Duration::ZERO), None, "nothing else is answered");
        guest.start_at(base as u16);
        assert_eq!(guest.wait_used(LIMIT).map(|(head, _)| head), Some(8));
    }
}

#[test]
fn a_skip_drain_message_that_was_not_negotiated_or_is_malformed_ends_the_connection() {
    let target = Target::new(&[]);
    let both = GET_VRING_BASE_INFLIGHT | GET_VRING_BASE_SKIP_DRAIN;
    let state = |index: u32| [index, 0].map(u32::to_ne_bytes).concat();
    for (features, flags, size, payload) in [
        (GET_VRING_BASE_INFLIGHT, 1, 8, state(0)),
        (both, 1, 8, state(9999)),
        (both, 1, 4, state(0)),
        (both, 1, u32::MAX, state(0)),
        (both, 2, 8, state(0)),
        (both, 1 | 4, 8, state(0)),
    ] {
        let mut raw = Raw::connect(&target.backend.options.socket);
        raw.send(16, 1, 8, &u64::to_ne_bytes(features));
        raw.send(45, flags, size, &payload);
        let got = raw.0.read(&mut [0; 64]);
        // Bytes that nobody has read make the end of the connection a reset.
        assert!(!matches!(got, Ok(1..)), "{features:x} {flags} {size}: it was answered");
    }
    assert!(target.connect(both).works(64, 9), "another hypervisor is served");
}

/// Under load a stop meets requests in every state: parked, in the kernel's hands, copied, flushed.
#[test]
fn stops_at_any_moment_lose_and_repeat_no_request() {
    for write_through in [false, true] {
        stop_at_any_moment(write_through);
    }
}

fn stop_at_any_moment(write_through: bool) {
    let seed = number_from_env("CAIRN_SEED").unwrap_or(1);
    let _repeat = Repeat(seed);
    let mut rng = Rng::new(seed);
    let site = Site::new();
    repository::create(&site.store(), IMAGE, CHUNK, SIZE);
    let options = Options::new(&site);
    let backend = Backend::start(&options);
    let mut first = Survivor::new(Manner::UsedIndex, SIZE as usize / BLOCK, Rng::new(seed));
    first.connect(&options.socket).expect("connect");
    first.run(Duration::from_millis(500));
    first.finish(LIMIT);
    backend.control().stable_checkpoint();
    backend.terminate();

    // Another mirror, without local data.
    let options = Options::named(&site, "other");
    let backend = Backend::start(&options);
    let (segments, away) = (site.repository().join("segments"), site.path("away"));
    let mut guest =
        Survivor::new(Manner::SkipDrain, SIZE as usize / BLOCK, Rng::new(rng.next_u64()));
    (guest.acked, guest.sent) = (first.acked, first.sent);
    if write_through {
        // A guest that cannot flush.
        guest.declined_features |= 1 << 9;
        guest.flush_share = 0;
    }
    guest.connect(&options.socket).expect("connect");
    let mut left = 0;
    for round in 0..60 {
        let is_away = rng.chance(50);
        if is_away {
            fs::rename(&segments, &away).expect("take the data away");
        }
        if round % 10 == 5 {
            // Writes of the next epoch copy old blocks first.
            backend.control().checkpoint().expect("a checkpoint");
        }
        guest.run(Duration::from_millis(rng.below(30)));
        let (bases, count) = guest.suspend();
        left += count;
        if is_away {
            fs::rename(&away, &segments).expect("bring the data back");
        }
        guest.resume(&bases);
    }
    guest.finish(LIMIT);
    guest.check_all();
    assert!(left > 0, "no request was left");
    backend.terminate();
}
