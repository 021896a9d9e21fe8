//! A guest and a hypervisor that send invalid data. The process lives, the disk serves, and nothing
//! outside the disk or the guest's memory is touched.
//!
//! After each attack a valid request must work on the same connection. If the backend gave up the
//! connection or the queue, it must work on a new one.

mod frontend;
mod support;

use std::fs;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use frontend::target::{SIZE, Target};
use frontend::{
    AVAILABLE, BASE, DATA, DISCARD, END, Entry, FLUSH, GET_ID, Guest, HEADER, IN, INDIRECT, IOERR,
    MEMORY, NEXT, OK, OUT, Part, Raw, STATUS, TABLE, TABLE_FOLLOWS, UNSUPP, UNTOUCHED, USED,
    WRITABLE, WRITE_ZEROES,
};
use seeded_rng::Rng;
use support::device::Shape;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::GuestMemoryBackend;

const SECTORS: u64 = SIZE / 512;

/// Chains for which any answer is acceptable, even none, as long as the disk goes on serving.
#[test]
fn no_chain_of_descriptors_harms_the_process() {
    let mut target = Target::new();
    let mut guest = target.guest();
    let outside = BASE + MEMORY;
    let chains: &[(&str, &[Part])] = &[
        ("no status", &[(HEADER, 16, 0)]),
        ("a status that is not writable", &[(HEADER, 16, 0), (DATA, 512, 0), (STATUS, 1, 0)]),
        ("nothing but lengths of zero", &[(HEADER, 0, 0), (DATA, 0, WRITABLE)]),
        ("one empty descriptor", &[(0, 0, 0)]),
        ("nothing but a status", &[END]),
        ("a status of no length", &[(HEADER, 16, 0), (DATA, 512, WRITABLE), (STATUS, 0, WRITABLE)]),
        ("a status outside", &[(HEADER, 16, 0), (DATA, 512, WRITABLE), (outside, 1, WRITABLE)]),
        ("a status at the end of all", &[(HEADER, 16, 0), (u64::MAX, 1, WRITABLE)]),
        ("a header at address 0", &[(0, 16, 0), (DATA, 512, WRITABLE), END]),
        ("a header that wraps around", &[(u64::MAX - 7, 16, 0), (DATA, 512, WRITABLE), END]),
        ("a header that leaves the memory", &[(outside - 8, 16, 0), END]),
        ("data outside", &[(HEADER, 16, 0), (outside, 512, WRITABLE), END]),
        ("data that leaves", &[(HEADER, 16, 0), (outside - 512, 1024, WRITABLE), END]),
        ("data that wraps around", &[(HEADER, 16, 0), (u64::MAX - 511, 1024, WRITABLE), END]),
        ("data of 4 GiB", &[(HEADER, 16, 0), (DATA, !511, WRITABLE), END]),
        ("writable before readable", &[(DATA, 512, WRITABLE), (HEADER, 16, 0), END]),
        ("readable last", &[(HEADER, 16, 0), END, (DATA, 512, 0)]),
        ("data onto the header", &[(HEADER, 16, 0), (HEADER, 512, WRITABLE), END]),
        ("data onto the status", &[(HEADER, 16, 0), (STATUS, 512, WRITABLE), END]),
        ("data onto the table", &[(HEADER, 16, 0), (TABLE, 4096, WRITABLE), END]),
        ("data onto the available ring", &[(HEADER, 16, 0), (AVAILABLE, 512, WRITABLE), END]),
        ("data onto the used ring", &[(HEADER, 16, 0), (USED, 512, WRITABLE), END]),
        ("an unknown flag", &[(HEADER, 16, 0x8000), (DATA, 512, WRITABLE | 0x100), END]),
    ];
    for (attack, chain) in chains {
        for kind in [IN, OUT, FLUSH, GET_ID, DISCARD, WRITE_ZEROES, 99] {
            guest.header(kind, 0);
            guest.chain(chain);
            guest.try_request(Duration::from_millis(20));
            guest = target.still_serves(guest, &format!("{attack}, kind {kind}"));
        }
    }
}

#[test]
fn no_loop_of_descriptors_holds_a_worker() {
    let mut target = Target::new();
    let mut guest = target.guest();
    let data = Entry { address: DATA, len: 512, flags: WRITABLE | NEXT, next: 0 };
    for (attack, next) in [("itself", [0, 0, 0]), ("a ring", [1, 2, 0]), ("beyond", [1, 2, 9999])] {
        guest.header(IN, 0);
        let header = Entry { address: HEADER, len: 16, flags: NEXT, next: next[0] };
        guest.entry(TABLE, 0, header);
        guest.entry(TABLE, 1, Entry { next: next[1], ..data });
        guest.entry(TABLE, 2, Entry { next: next[2], ..data });
        guest.try_request(Duration::from_millis(20));
        guest = target.still_serves(guest, attack);
    }
}

#[test]
fn no_indirect_table_harms_the_process() {
    let mut target = Target::new();
    let mut guest = target.guest();
    let table = |address, len, flags| [(address, len, TABLE_FOLLOWS | flags)];
    let inner: &[Part] = &[(HEADER, 16, 0), (DATA, 512, WRITABLE), END];

    guest.header(IN, 0);
    guest.chain_at(INDIRECT, inner);
    guest.chain(&table(INDIRECT, 48, 0));
    assert_eq!(guest.try_request(Duration::from_secs(5)), Some(OK), "a right indirect table");

    let outside = BASE + MEMORY;
    let attacks = [
        ("a length of no whole entries", table(INDIRECT, 47, 0)),
        ("an empty table", table(INDIRECT, 0, 0)),
        ("a table outside", table(outside, 48, 0)),
        ("a table that leaves the memory", table(outside - 16, 48, 0)),
        ("a table that wraps around", table(u64::MAX - 15, 48, 0)),
        ("a table of 4 GiB", table(INDIRECT, !15, 0)),
        ("a writable table", table(INDIRECT, 48, WRITABLE)),
        ("a table and a next one", table(INDIRECT, 48, NEXT)),
    ];
    for (attack, chain) in attacks {
        guest.header(IN, 0);
        guest.chain_at(INDIRECT, inner);
        guest.chain(&chain);
        guest.try_request(Duration::from_millis(20));
        guest = target.still_serves(guest, attack);
    }

    guest.header(IN, 0);
    guest.chain_at(INDIRECT, &[(HEADER, 16, 0), (INDIRECT, 48, TABLE_FOLLOWS), END]);
    guest.chain(&table(INDIRECT, 48, 0));
    guest.try_request(Duration::from_millis(20));
    guest = target.still_serves(guest, "a table in a table");

    guest.header(IN, 0);
    guest.chain_at(INDIRECT, inner);
    guest.entry(INDIRECT, 1, Entry { address: DATA, len: 512, flags: WRITABLE | NEXT, next: 0 });
    guest.chain(&table(INDIRECT, 48, 0));
    guest.try_request(Duration::from_millis(20));
    target.still_serves(guest, "a loop in a table");
}

#[test]
fn wrong_requests_are_answered_with_an_error() {
    let mut target = Target::new();
    let mut guest = target.guest();
    let far = [SECTORS, SECTORS - 1, u64::MAX, u64::MAX - 1, u64::MAX / 512, 1 << 55, 1 << 63];
    for sector in far {
        let status = guest.request(IN, sector, &[(DATA, 1024, WRITABLE)]);
        assert_eq!(status, IOERR, "read at {sector}");
        let status = guest.request(OUT, sector, &[(DATA, 1024, 0)]);
        assert_eq!(status, IOERR, "write at {sector}");
    }
    for len in [1, 100, 511, 513, 1000] {
        assert_eq!(guest.request(IN, 0, &[(DATA, len, WRITABLE)]), IOERR, "read of {len} bytes");
        assert_eq!(guest.request(OUT, 0, &[(DATA, len, 0)]), IOERR, "write of {len} bytes");
    }
    for kind in [2, 3, 5, 7, 10, 14, 99, u32::MAX] {
        assert_eq!(guest.request(kind, 0, &[]), UNSUPP, "kind {kind}");
        assert_eq!(guest.request(kind, 0, &[(DATA, 512, WRITABLE)]), UNSUPP, "kind {kind}");
    }
    for kind in [DISCARD, WRITE_ZEROES] {
        let ranges = [
            (SECTORS, 1),
            (SECTORS - 1, 2),
            (0, u32::MAX),
            (u64::MAX, 1),
            (u64::MAX - 1, 8),
            (1 << 55, 8),
        ];
        for (sector, count) in ranges {
            let status = range_request(&mut guest, kind, sector, count, 0);
            assert_eq!(status, IOERR, "kind {kind}, {count} sectors from {sector} on");
        }
        let status = range_request(&mut guest, kind, 0, 8, 0xffff_fff0);
        assert_ne!(status, OK, "kind {kind} with unknown flags");
        for len in [0, 8, 15, 17] {
            let status = guest.request(kind, 0, &[(DATA, len, 0)]);
            assert_ne!(status, OK, "kind {kind} with a range of {len} bytes");
        }
    }
    guest.header(IN, 0);
    guest.chain(&[(HEADER, 8, 0), (DATA, 512, WRITABLE), END]);
    assert_eq!(guest.try_request(Duration::from_secs(5)), Some(IOERR), "a short header");
    target.still_serves(guest, "wrong requests");
}

fn range_request(guest: &mut Guest, kind: u32, sector: u64, count: u32, flags: u32) -> u8 {
    guest.range(sector, count, flags);
    guest.request(kind, 0, &[(DATA, 16, 0)])
}

#[test]
fn a_write_that_leaves_the_disk_writes_nothing_and_an_id_stays_in_its_buffer() {
    let mut target = Target::new();
    let mut guest = target.guest();
    guest.put(DATA, &[7; 1024]);
    assert_eq!(guest.request(OUT, SECTORS - 1, &[(DATA, 1024, 0)]), IOERR);
    assert_eq!(guest.request(IN, SECTORS - 1, &[(DATA, 512, WRITABLE)]), OK);
    assert_eq!(guest.get(DATA, 512), [0; 512], "half of the refused write is on the disk");

    for len in [0, 1, 10, 20, 21, 100, 4096] {
        guest.put(DATA, &[UNTOUCHED; 8192]);
        let status = guest.request(GET_ID, 0, &[(DATA, len, WRITABLE)]);
        assert!(status == OK || len != 20, "GET_ID with {len} bytes: {status}");
        let rest = guest.get(DATA + u64::from(len), 512);
        assert_eq!(rest, [UNTOUCHED; 512], "GET_ID wrote beyond a buffer of {len} bytes");
    }
    // A request that is split into single bytes is still a request.
    guest.header(OUT, 3);
    guest.put(DATA, &[9; 512]);
    let mut parts: Vec<_> = (0..16).map(|at| (HEADER + at, 1, 0)).collect();
    parts.extend([(DATA, 500, 0), (DATA + 500, 12, 0), END]);
    guest.chain(&parts);
    assert_eq!(guest.try_request(Duration::from_secs(5)), Some(OK));
    target.still_serves(guest, "odd requests");
}

#[test]
fn no_message_harms_the_process() {
    let mut target = Target::new();
    let socket = target.backend.options.socket.clone();
    let (version, reply) = (1, 1 | 8);
    let mut rng = Rng::new(4);
    let mut config = vec![0; 12 + 256];
    let mut messages = vec![
        ("an unknown request", 200, reply, 0, vec![]),
        ("a length of 4 GiB", 2, version, u32::MAX, vec![0; 64]),
        ("a length without a body", 2, version, 8, vec![]),
        ("another version", 1, 3, 0, vec![]),
        ("memory without files", 5, reply, 40, [1u32.to_le_bytes().as_slice(), &[0; 36]].concat()),
        ("a thousand regions", 5, reply, 8, 1000u64.to_le_bytes().to_vec()),
        ("a kick of queue 255", 12, reply, 8, 0x1ffu64.to_le_bytes().to_vec()),
        ("a base of queue 9999", 11, version, 8, 9999u64.to_le_bytes().to_vec()),
        ("features that were not offered", 2, reply, 8, u64::MAX.to_le_bytes().to_vec()),
    ];
    for (offset, size) in [(0u32, 4096u32), (u32::MAX, 8), (1 << 20, 256), (60, 256), (0, 0)] {
        config[0..4].copy_from_slice(&offset.to_le_bytes());
        config[4..8].copy_from_slice(&size.to_le_bytes());
        messages.push(("a wrong part of the configuration", 24, version, 268, config.clone()));
    }
    for _ in 0..60 {
        let mut noise = vec![0; rng.between(0, 300) as usize];
        rng.fill(&mut noise);
        let size = noise.len() as u32;
        messages.push(("noise", rng.below(48) as u32, rng.pick(&[1, 9, 5]), size, noise));
    }
    for (attack, request, flags, size, payload) in messages {
        let mut raw = Raw::connect(&socket);
        raw.send(3, version, 0, &[]);
        raw.send(1, version, 0, &[]);
        assert!(raw.answer().len() >= 20, "before {attack}: the features");
        raw.send(request, flags, size, &payload);
        drop(raw);
        target.backend.assert_alive();
    }
    let guest = target.guest();
    target.still_serves(guest, "wrong messages");
}

#[test]
fn a_hypervisor_may_come_and_go() {
    let mut target = Target::new();
    for round in 1..=50 {
        let mut guest = target.guest();
        assert!(guest.works(round * 8, round as u8), "round {round}");
        if round % 3 == 0 {
            // The guest disconnects with a request in flight.
            guest.header(IN, 0);
            guest.chain(&[(HEADER, 16, 0), (DATA, 1 << 20, WRITABLE), END]);
            guest.offer(0);
        }
    }
    let guest = target.guest();
    target.still_serves(guest, "50 connections");
}

#[test]
fn a_second_hypervisor_does_not_disturb_the_first() {
    let target = Target::new();
    let mut device = target.backend.device(Shape::default());
    let mut others: Vec<Raw> =
        (0..3).map(|_| Raw::connect(&target.backend.options.socket)).collect();
    for other in &mut others {
        other.send(3, 1, 0, &[]);
        other.send(1, 1, 0, &[]);
    }
    let mut slow = 0;
    for round in 0..20 {
        let begin = Instant::now();
        device.queues[0].write(round * 4096, &[round as u8; 4096]).expect("the first one writes");
        slow += u32::from(begin.elapsed() > Duration::from_secs(1));
    }
    // The machine may stall once.
    assert!(slow < 2, "the first one waits for the second, {slow} times");
    drop(others);
    drop(device);
    let mut device = target.backend.device(Shape::default());
    assert_eq!(device.queues[0].read(4096, 512).expect("read"), [1; 512]);
}

/// A descriptor that is always ready would keep the worker busy for ever.
#[test]
fn a_kick_that_cannot_be_waited_for_is_refused() {
    let mut target = Target::new();
    let zero = fs::File::options().read(true).write(true).open("/dev/zero").expect("open");
    for file in [support::sys::memfd(4096), zero] {
        let mut guest = target.guest();
        let kick = support::sys::as_event(file);
        assert!(guest.ask(|frontend| frontend.set_vring_kick(0, &kick)).is_err());
        target.still_serves(guest, "a kick that is always ready");
    }
}

/// The end of such a socket waits until its peer has read everything.
#[test]
fn a_descriptor_that_takes_long_to_close_holds_up_nobody() {
    let target = Target::new();
    for (round, message) in (1..).zip(["interrupt", "kick", "error", "memory", "record"]) {
        let mut guest = target.guest();
        let (socket, _peer) = support::sys::lingering_socket();
        let socket = support::sys::as_event(socket);
        let fd = socket.as_raw_fd();
        let protocol = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        guest.frontend.set_protocol_features(protocol).expect("they are offered");
        let region = guest.memory.iter().next().expect("there is one region");
        let region = VhostUserMemoryRegionInfo::from_guest_region(region).expect("a file");
        let region = VhostUserMemoryRegionInfo { mmap_handle: fd, ..region };
        let record = VhostUserInflight::new(4096, 0, 1, 64);
        // The backend has the last descriptor.
        target.backend.while_stopped(|| {
            let frontend = &mut guest.frontend;
            frontend.set_hdr_flags(VhostUserHeaderFlag::empty());
            let sent = match message {
                "interrupt" => frontend.set_vring_call(0, &socket),
                "kick" => frontend.set_vring_kick(0, &socket),
                "error" => frontend.set_vring_err(0, &socket),
                "memory" => frontend.set_mem_table(&[region]).map(drop),
                _ => frontend.set_inflight_fd(&record, fd),
            };
            sent.expect("send a message");
            drop(socket);
        });
        let begin = Instant::now();
        let stopped = guest.ask(|frontend| frontend.get_vring_base(0));
        assert_eq!(stopped.is_ok(), message == "error", "{message}: {stopped:?}");
        drop(guest);
        assert!(target.guest().works(8, round), "after: {message}");
        assert!(begin.elapsed() < Duration::from_secs(6), "{message}: {:?}", begin.elapsed());
    }
}

/// The backend would keep the connection open by itself.
#[test]
fn a_kick_that_is_the_hypervisors_end_of_the_connection_is_refused() {
    let target = Target::new();
    let mut guest = target.guest();
    let kick = support::sys::as_event(guest.connection());
    let begin = Instant::now();
    assert!(guest.ask(|frontend| frontend.set_vring_kick(0, &kick)).is_err());
    drop(kick);
    drop(guest);
    assert!(target.guest().works(8, 1));
    assert!(begin.elapsed() < Duration::from_secs(6), "it took {:?}", begin.elapsed());
}
