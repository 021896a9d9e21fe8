//! The agent in a real guest: freezes end, and a guest sees only its own disk.

use std::io::{BufRead, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vmm_tests::{Backend, Disk, Guest, in_lab};

use crate::MIB;

#[test]
fn an_agent_killed_during_the_freeze_leaves_nothing_frozen() {
    in_lab("killed-agent", |lab| {
        lab.import_ext4("vm", 64 * MIB, 1)?;
        let backend = Backend::start(lab, &Disk::of("vm", "vm"))?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt")?;
        let asked = silent_host(UnixListener::bind(lab.vsock_port("vm", 7999))?);

        guest.run(
            "cairn-agent checkpoint --freeze /mnt --port 7999 --timeout 600 >/dev/null 2>&1 & \
             echo $! > /run/agent",
        )?;
        // The agent sends its request after the freeze.
        let _connection =
            asked.recv_timeout(Duration::from_secs(30)).context("no request arrived")?;
        guest.run("(echo x > /mnt/file && touch /run/written) >/dev/null 2>&1 & sleep 1")?;
        assert_ne!(
            guest.attempt("test -e /run/written")?.code,
            0,
            "the file system was not frozen"
        );
        guest.run("kill -9 $(cat /run/agent)")?;
        guest.run("for i in $(seq 10); do test -e /run/written && exit; sleep 1; done; exit 1")?;

        // The next checkpoint succeeds.
        guest.run("cairn-agent checkpoint --freeze /mnt --wait stable")?;
        Ok(())
    });
}

#[test]
fn the_guest_sees_its_disk_and_its_snapshots() {
    in_lab("list", |lab| {
        lab.import_ext4("vm", 64 * MIB, 1)?;
        let backend = Backend::start(lab, &Disk::of("vm", "vm"))?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        let status: cairn_agent::Status =
            serde_json::from_str(&guest.run("cairn-agent status --json")?)?;
        assert_eq!((status.image.as_str(), status.size), ("vm", 64 * MIB));
        assert!(status.connected);

        let taken = guest.run("cairn-agent checkpoint --label mine --wait stable")?;
        let list = guest.run("cairn-agent list")?;
        let last = list.lines().last().unwrap_or_default();
        assert!(last.starts_with(taken.trim()) && last.ends_with("mine"), "{list}");
        // A label names one snapshot.
        assert_eq!(guest.attempt("cairn-agent checkpoint --label mine")?.code, 4);
        // No disk listens at another port.
        assert_eq!(guest.attempt("cairn-agent status --port 7401")?.code, 6);
        Ok(())
    });
}

#[test]
fn an_agent_follows_its_checkpoint_when_the_backend_is_replaced() {
    in_lab("followed", |lab| {
        lab.import_ext4("vm", 64 * MIB, 1)?;
        let disk = Disk::of("vm", "vm");
        // So slow that the backend is replaced while it stores the checkpoint.
        let backend = Backend::start(lab, &Disk { commit_rate: 2 * MIB, ..disk.clone() })?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt")?;
        guest.run("dd if=/dev/urandom of=/mnt/data bs=1M count=32 2>/dev/null; sync")?;
        guest.run(
            "(cairn-agent checkpoint --wait stable >/run/taken 2>&1; echo $? >/run/code) >/dev/null 2>&1 &",
        )?;
        let deadline = Instant::now() + Duration::from_secs(30);
        while backend.status()?.pending.is_empty() {
            ensure!(Instant::now() < deadline, "no checkpoint was requested");
            thread::sleep(Duration::from_millis(10));
        }
        backend.stop()?;
        let _backend = Backend::start(lab, &disk)?;
        guest.run("for i in $(seq 60); do test -e /run/code && exit; sleep 1; done; exit 1")?;
        assert_eq!(guest.run("cat /run/code")?, "0\n", "{:?}", guest.run("cat /run/taken"));
        let taken = guest.run("cat /run/taken")?;
        let list = guest.run("cairn-agent list")?;
        let is_stable = |line: &str| line.starts_with(taken.trim()) && line.contains("stable");
        assert!(list.lines().any(is_stable), "{taken} is not stable in {list}");
        Ok(())
    });
}

/// Accepts a connection, reads a request, and sends the connection to the caller. Never answers.
fn silent_host(listener: UnixListener) -> Receiver<UnixStream> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a socket of this test");
        let asked = BufReader::new(&stream).read_line(&mut String::new());
        if asked.is_ok_and(|length| length > 0) {
            // The test may have ended.
            let _ = sender.send(stream);
        }
    });
    receiver
}
