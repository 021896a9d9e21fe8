//! Clients that send invalid data to the control socket and to the guest's socket. Other clients
//! are still answered, and the disk serves.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cairn_agent::{Checkpoint, Event, Follow, MAX_LINE, Obsolete, RefusalKind, Request};
use cairn_store::{SnapshotRef, SnapshotState};
use seeded_rng::Rng;
use support::backend::{Backend, IMAGE, Options, Site};
use support::control::Control;
use support::device::Shape;
use support::repository;

struct Target {
    backend: Backend,
    site: Site,
}

impl Target {
    fn new() -> Target {
        Target::with(&[])
    }

    fn with(extra: &[&str]) -> Target {
        let site = Site::new();
        repository::create(&site.store(), IMAGE, 64 << 10, 4 << 20);
        let options = Options::new(&site).with(&["--commit-retry", "600"]).with(extra);
        Target { backend: Backend::start(&options), site }
    }

    /// Takes the repository's data away and writes, so that no checkpoint can be stored any more.
    fn hold_checkpoints(&self) {
        let (segments, away) = (self.site.repository().join("segments"), self.site.path("away"));
        fs::rename(segments, away).expect("take the data away");
        let mut device = self.backend.device(Shape::default());
        device.queues[0].write(0, &[7; 65536]).expect("write");
    }

    /// Both sockets of the protocol.
    fn sockets(&self) -> [PathBuf; 2] {
        [self.backend.options.control.clone(), self.backend.guest_socket()]
    }

    /// Checks that a valid client is answered soon, and that the disk serves.
    fn still_serves(&mut self, after: &str) {
        self.backend.assert_alive();
        for socket in self.sockets() {
            assert_answers_soon(|| Control::connect(&socket).expect("connect"), after);
        }
        let mut device = self.backend.device(Shape::default());
        device.queues[0].write(0, &[1; 4096]).unwrap_or_else(|e| panic!("after {after}: {e}"));
    }
}

/// Checks that a status arrives within a second. The machine may stall once.
fn assert_answers_soon(connect: impl Fn() -> Control, after: &str) {
    let times = [(); 2].map(|()| {
        let begin = Instant::now();
        assert_eq!(connect().status().image, IMAGE);
        begin.elapsed()
    });
    let is_soon = times.iter().any(|time| *time < Duration::from_secs(1));
    assert!(is_soon, "{times:?} for a status after {after}");
}

fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(5))).expect("set a timeout");
    stream.set_write_timeout(Some(Duration::from_secs(5))).expect("set a timeout");
    stream
}

/// Everything that the peer sends until it closes the connection or is silent.
fn hear(stream: &mut UnixStream) -> String {
    stream.set_read_timeout(Some(Duration::from_millis(500))).expect("set a timeout");
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn a_line_that_is_no_request_is_refused_in_words() {
    let mut target = Target::new();
    let lines: [&[u8]; 10] = [
        b"\n",
        b"hello\n",
        b"{}\n",
        b"{\"op\":\"format\"}\n",
        b"{\"op\":\"checkpoint\",\"lable\":\"x\"}\n",
        b"{\"op\":\"checkpoint\",\"label\":\"../../etc\"}\n",
        b"{\"op\":\"checkpoint\",\"label\":\"7\"}\n",
        b"[1,2,3]\n",
        b"\xff\xfe\x00\x01\n",
        b"\"\\ud800\"\n",
    ];
    for socket in target.sockets() {
        for line in lines {
            let mut stream = connect(&socket);
            stream.write_all(line).expect("send a line");
            let answer = hear(&mut stream);
            let text = String::from_utf8_lossy(line);
            if let Some(first) = answer.lines().next() {
                match serde_json::from_str(first) {
                    Ok(Event::Error(refusal)) => {
                        assert_eq!(refusal.kind, RefusalKind::Invalid, "{text:?}: {answer}");
                    }
                    other => panic!("{text:?} was answered with {other:?}: {answer}"),
                }
            }
        }
    }
    target.still_serves("lines that are no requests");
}

#[test]
fn a_guest_gets_only_what_is_its_own() {
    let target = Target::new();
    let mut guest = target.backend.guest();
    match guest.ask(&Request::Stats).expect("an answer") {
        Event::Error(refusal) => assert_eq!(refusal.kind, RefusalKind::Denied),
        other => panic!("a guest asked for the counters and got {other:?}"),
    }
    assert_eq!(guest.status().image, IMAGE);
    let accepted = guest.checkpoint().expect("a guest may take a checkpoint");
    assert!(guest.list().iter().any(|line| line.snapshot == accepted.snapshot));
}

#[test]
fn the_metadata_of_a_checkpoint_is_kept_and_odd_metadata_is_refused() {
    let target = Target::new();
    let set = |key: &str, value: &str| Checkpoint {
        metadata: [(key.to_owned(), value.to_owned())].into(),
        ..Checkpoint::default()
    };
    let long = "x".repeat(257);
    let mut guest = target.backend.guest();
    for (key, value) in [("a b", "x"), ("", "x"), ("a", "x\ny"), ("a", &*long)] {
        let refusal = guest.checkpoint_with(set(key, value)).expect_err("odd metadata");
        assert_eq!(refusal.kind, RefusalKind::Invalid, "{refusal:?}");
    }
    let many = (0..17).map(|key| (format!("k{key}"), String::new())).collect();
    let many = Checkpoint { metadata: many, ..Checkpoint::default() };
    assert_eq!(guest.checkpoint_with(many).expect_err("too many").kind, RefusalKind::Invalid);
    let number = guest.checkpoint_with(set("step", "4 ü")).expect("good metadata").number;
    let mut control = target.backend.control();
    let of_host = control.checkpoint_with(set("step", "5")).expect("good metadata").number;
    control.wait_until_quiet();
    let found = repository::snapshot(&target.site.store(), IMAGE, number);
    assert_eq!((found.metadata.get("step"), found.is_from_guest), (Some("4 ü"), true));
    let found = repository::snapshot(&target.site.store(), IMAGE, of_host);
    assert_eq!((found.metadata.get("step"), found.is_from_guest), (Some("5"), false));
}

/// Asks to give snapshots up, and returns their names.
fn give_up(control: &mut Control, which: Obsolete) -> Result<Vec<String>, RefusalKind> {
    match control.ask(&Request::Obsolete(which)).expect("an answer") {
        Event::Marked(marked) => Ok(marked.snapshots),
        Event::Error(refusal) => Err(refusal.kind),
        other => panic!("it was answered with {other:?}"),
    }
}

#[test]
fn a_guest_gives_up_only_what_it_has_taken_itself_and_only_if_the_host_allows_it() {
    let one = |number| Obsolete { number: Some(number), keep_last: None };
    let last = |count| Obsolete { number: None, keep_last: Some(count) };
    let target = Target::new();
    let mut guest = target.backend.guest();
    let number = guest.stable_checkpoint();
    assert_eq!(give_up(&mut guest, one(number)), Err(RefusalKind::Denied));
    assert_eq!(give_up(&mut guest, last(1)), Err(RefusalKind::Denied));

    let target = Target::with(&["--guest-may-remove"]);
    let (mut guest, mut host) = (target.backend.guest(), target.backend.control());
    let own: Vec<u64> = (0..3).map(|_| guest.stable_checkpoint()).collect();
    let of_host = host.stable_checkpoint();
    let name = |number: u64| format!("{IMAGE}@{number}");
    assert_eq!(give_up(&mut guest, one(1)), Err(RefusalKind::Denied), "it was imported");
    assert_eq!(give_up(&mut guest, one(of_host)), Err(RefusalKind::Denied));
    assert_eq!(give_up(&mut guest, one(99)), Err(RefusalKind::Invalid));
    for wrong in [last(0), Obsolete::default(), Obsolete { number: Some(1), keep_last: Some(1) }] {
        assert_eq!(give_up(&mut guest, wrong), Err(RefusalKind::Invalid), "{wrong:?}");
    }
    assert_eq!(give_up(&mut guest, one(own[0])), Ok(vec![name(own[0])]));
    assert_eq!(give_up(&mut guest, one(own[0])), Ok(vec![]), "nothing is recorded again");
    assert_eq!(give_up(&mut guest, last(1)), Ok(vec![name(own[1])]), "one was marked before");
    assert_eq!(give_up(&mut guest, last(1)), Ok(vec![]));
    let store = target.site.store();
    let is_marked = |number| repository::snapshot(&store, IMAGE, number).is_obsolete;
    let marked: Vec<u64> = (1..=of_host).filter(|number| is_marked(*number)).collect();
    assert_eq!(marked, own[..2]);
}

#[test]
fn a_guest_with_a_read_only_disk_gives_up_nothing_of_the_guest_that_writes_it() {
    let target = Target::with(&["--guest-may-remove"]);
    let number = target.backend.guest().stable_checkpoint();
    let options = Options::named(&target.site, "reader");
    let reader = Backend::start(&options.with(&["--read-only", "--guest-may-remove"]));
    let which = Obsolete { number: Some(number), keep_last: None };
    assert_eq!(give_up(&mut reader.guest(), which), Err(RefusalKind::Denied));
    assert!(!repository::snapshot(&target.site.store(), IMAGE, number).is_obsolete);
}

#[test]
fn a_label_is_given_once() {
    let target = Target::new();
    let mut control = target.backend.control();
    let labelled = || Checkpoint { label: Some("first".into()), ..Checkpoint::default() };
    let accepted = control.checkpoint_with(labelled()).expect("a free label");
    control.wait_until_quiet();
    let refusal = control.checkpoint_with(labelled()).expect_err("the label is taken");
    assert_eq!(refusal.kind, RefusalKind::Conflict, "{refusal:?}");
    let lines = control.list();
    let line = lines.iter().find(|line| line.snapshot == accepted.snapshot).expect("it is listed");
    assert_eq!((line.label.as_deref(), line.state.as_str()), (Some("first"), "stable"));
}

/// Many clients ask at once for the label of a snapshot that was removed.
#[test]
fn the_label_of_a_removed_snapshot_is_given_to_one_checkpoint() {
    let target = Target::new();
    let (store, mut control) = (target.site.store(), target.backend.control());
    let labelled = || Checkpoint { label: Some("first".into()), ..Checkpoint::default() };
    for round in 0..10 {
        let old = control.checkpoint_with(labelled()).expect("a free label").number;
        control.stable_checkpoint();
        let name = SnapshotRef::number(&repository::image(IMAGE), old);
        repository::open(&store).remove_snapshot(&name).expect("remove the snapshot");
        let accepted: Vec<u64> = std::thread::scope(|scope| {
            let ask = || {
                let mut control = target.backend.control();
                scope.spawn(move || control.checkpoint_with(labelled()))
            };
            let asked = [(); 8].map(|()| ask());
            asked.into_iter().filter_map(|one| one.join().unwrap().ok()).map(|a| a.number).collect()
        });
        assert_eq!(accepted.len(), 1, "round {round}: {accepted:?}");
        control.stable_checkpoint();
        assert_eq!(repository::snapshot(&store, IMAGE, accepted[0]).state, SnapshotState::Stable);
        let name = SnapshotRef::number(&repository::image(IMAGE), accepted[0]);
        repository::open(&store).remove_snapshot(&name).expect("remove the snapshot");
    }
}

#[test]
fn an_endless_line_is_cut_off() {
    let mut target = Target::new();
    for socket in target.sockets() {
        let mut stream = connect(&socket);
        let part = [b'x'; 64 * 1024];
        let mut sent = 0;
        // Refused or closed long before 64 MiB; a full socket buffer is fine too.
        while sent < 64 << 20 {
            match stream.write(&part) {
                Ok(len) => sent += len,
                Err(_) => break,
            }
        }
        assert!(sent < 64 << 20, "{} took {sent} bytes without a newline", socket.display());
        target.still_serves("an endless line");
    }
    let mut long = vec![b' '; MAX_LINE + 1];
    long.extend(b"{\"op\":\"status\"}\n");
    let mut stream = connect(&target.sockets()[0]);
    let _ = stream.write_all(&long);
    let answer = hear(&mut stream);
    assert!(!answer.contains("\"event\":\"status\""), "a line that is too long was obeyed");
}

#[test]
fn a_client_that_stalls_delays_nobody() {
    let mut target = Target::new();
    let mut stalled = Vec::new();
    for socket in target.sockets() {
        for text in ["", "{\"op\":\"checkp", "{\"op\":\"status\"}\n{\"op\":"] {
            let mut stream = connect(&socket);
            stream.write_all(text.as_bytes()).expect("send half a line");
            stalled.push(stream);
        }
    }
    target.still_serves("clients that stall");

    // A client that sends requests and never reads the answers.
    for socket in target.sockets() {
        let mut stream = connect(&socket);
        stream.set_write_timeout(Some(Duration::from_millis(200))).expect("set a timeout");
        for _ in 0..20_000 {
            if stream.write_all(b"{\"op\":\"list\"}\n").is_err() {
                break;
            }
        }
        stalled.push(stream);
        target.still_serves("a client that does not read");
    }
    drop(stalled);
    target.still_serves("clients that left");
}

#[test]
fn a_crowd_of_guests_keeps_no_operator_out() {
    let mut target = Target::new();
    let mut crowd: Vec<UnixStream> = Vec::new();
    for _ in 0..300 {
        // Refusing is fine: what matters is the operator.
        crowd.extend(UnixStream::connect(target.backend.guest_socket()));
    }
    assert_answers_soon(|| target.backend.control(), "a crowd has come");
    let log = target.backend.log();
    let lines = log.lines().filter(|line| line.contains("too many")).count();
    assert!((1..=2).contains(&lines), "{lines} lines for the connections that were refused");
    drop(crowd);
    std::thread::sleep(Duration::from_millis(200));
    target.still_serves("a crowd");
}

#[test]
fn a_guests_checkpoints_are_limited_and_the_operators_are_not() {
    let target = Target::new();
    let mut refusals = Vec::new();
    // Over many connections, because a guest can open as many as it wants.
    for _ in 0..60 {
        refusals.extend(target.backend.guest().checkpoint().err());
        target.backend.control().wait_until_quiet();
    }
    let limited = refusals.iter().filter(|refusal| refusal.message.contains("try again in"));
    assert!(limited.count() > 20, "{refusals:?}");
    assert!(refusals.iter().all(|refusal| refusal.kind == RefusalKind::Busy), "{refusals:?}");
    let mut control = target.backend.control();
    for _ in 0..30 {
        control.stable_checkpoint();
    }
}

#[test]
fn a_guests_queries_of_the_catalog_are_limited_and_the_operators_are_not() {
    let target = Target::new();
    let follow = Request::Follow(Follow { number: 1 });
    let begin = Instant::now();
    let mut refusals = Vec::new();
    // Over many connections, because a guest can open as many as it wants.
    for _ in 0..100 {
        for request in [&Request::List, &follow] {
            match target.backend.guest().ask(request).expect("an answer") {
                Event::Error(refusal) => refusals.push(refusal),
                Event::Snapshots(_) | Event::Stable(_) => {}
                other => panic!("{request:?} was answered with {other:?}"),
            }
        }
    }
    let allowed = 200 - refusals.len() as u64;
    assert!(allowed >= 32, "{allowed} queries were answered");
    assert!(allowed <= 32 + 10 * (begin.elapsed().as_secs() + 1), "{allowed} queries");
    for refusal in &refusals {
        assert_eq!(refusal.kind, RefusalKind::Busy, "{refusal:?}");
        assert!(refusal.message.contains("try again in"), "{refusal:?}");
    }
    let mut control = target.backend.control();
    for _ in 0..100 {
        control.list();
    }
    // What needs no catalog is not limited.
    let mut guest = target.backend.guest();
    for _ in 0..100 {
        guest.status();
    }
    std::thread::sleep(Duration::from_millis(200));
    guest.list();
}

#[test]
fn a_guest_leaves_room_for_a_checkpoint_of_the_operator() {
    let target = Target::new();
    target.hold_checkpoints();
    let mut guest = target.backend.guest();
    let refusals: Vec<_> = (0..16).filter_map(|_| guest.checkpoint().err()).collect();
    assert_eq!(refusals.len(), 1, "{refusals:?}");
    assert_eq!(refusals[0].kind, RefusalKind::Busy, "{refusals:?}");
    let mut control = target.backend.control();
    control.checkpoint().expect("the operator's checkpoint is accepted");
    let refusal = control.checkpoint().expect_err("there is no more room");
    assert_eq!(refusal.kind, RefusalKind::Busy, "{refusal:?}");
}

#[test]
fn a_client_that_leaves_while_it_waits_for_a_checkpoint_frees_its_connection() {
    let target = Target::new();
    target.hold_checkpoints();
    let number = target.backend.control().checkpoint().expect("it is accepted").number;
    let follow = format!("{{\"op\":\"follow\",\"number\":{number}}}\n");
    let checkpoint = "{\"op\":\"checkpoint\",\"wait\":\"stable\"}\n";
    for socket in target.sockets() {
        // As many as there are connections. Some send more before they leave.
        for (at, end) in (0..64).zip(["", "x", "{\"op\":\"status\"}\n"].into_iter().cycle()) {
            let request = if at < 5 { checkpoint } else { &follow };
            let mut stream = connect(&socket);
            stream.write_all(request.as_bytes()).expect("send a request");
            if at < 5 {
                stream.read_exact(&mut [0; 19]).expect("it is accepted");
            }
            stream.write_all(end.as_bytes()).expect("send more");
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        let ask = || Control::connect(&socket).and_then(|mut client| client.ask(&Request::Status));
        while let Err(error) = ask() {
            assert!(Instant::now() < deadline, "{}: {error}", socket.display());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    // A client that stays still waits for the answer.
    let mut waiting = connect(&target.sockets()[0]);
    waiting.write_all(follow.as_bytes()).expect("send a request");
    assert_eq!(hear(&mut waiting), "");
    fs::rename(target.site.path("away"), target.site.repository().join("segments"))
        .expect("bring the data back");
    waiting.set_read_timeout(Some(Duration::from_secs(60))).expect("set a timeout");
    let mut answer = [0; 17];
    waiting.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer, *b"{\"event\":\"stable\"");
}

#[test]
fn noise_harms_nobody() {
    let mut target = Target::new();
    let mut rng = Rng::new(9);
    for socket in target.sockets() {
        for _ in 0..50 {
            let mut noise = vec![0; rng.between(1, 5000) as usize];
            rng.fill(&mut noise);
            let mut stream = connect(&socket);
            let _ = stream.write_all(&noise);
            if rng.chance(50) {
                let _ = stream.write_all(b"\n{\"op\":\"status\"}\n");
            }
        }
    }
    target.still_serves("noise");
    // Nesting that would overflow the stack of a recursive parser.
    let mut deep = vec![b'['; MAX_LINE - 1];
    deep.push(b'\n');
    for socket in target.sockets() {
        let _ = connect(&socket).write_all(&deep);
    }
    target.still_serves("a deep nesting");
}

#[test]
fn a_client_that_leaves_early_does_not_take_its_checkpoint_with_it() {
    let target = Target::new();
    let mut device = target.backend.device(Shape::default());
    device.queues[0].write(0, &[5; 65536]).expect("write");
    let mut control = target.backend.control();
    control
        .send_raw(b"{\"op\":\"checkpoint\",\"wait\":\"stable\",\"label\":\"mine\"}\n")
        .expect("send");
    let Event::Accepted(accepted) = control.next_event().expect("an answer") else {
        panic!("the checkpoint was not accepted");
    };
    drop(control);
    let mut control = target.backend.control();
    control.wait_until_quiet();
    let lines = control.list();
    let line = lines.iter().find(|line| line.snapshot == accepted.snapshot).expect("it is listed");
    assert_eq!(line.state, "stable");
}
