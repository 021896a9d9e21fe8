//! The agent in a real guest: freezes end, and a guest learns about its own disk only.

use std::os::unix::net::UnixListener;

use vmm_tests::{Backend, Disk, Guest, in_lab};

use crate::MIB;

#[test]
fn an_agent_killed_during_the_freeze_leaves_nothing_frozen() {
    in_lab("killed-agent", |lab| {
        lab.import_ext4("vm", 64 * MIB, 1)?;
        let backend = Backend::start(lab, &Disk::of("vm", "vm"))?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt")?;
        // A host that lets the agent connect and never answers.
        let _silent = UnixListener::bind(lab.vsock_port("vm", 7999))?;

        guest.run(
            "cairn-agent checkpoint --freeze /mnt --port 7999 --timeout 600 >/dev/null 2>&1 & \
             echo $! > /run/agent; sleep 2",
        )?;
        guest.run("(echo x > /mnt/file && touch /run/written) >/dev/null 2>&1 & sleep 1")?;
        assert_ne!(guest.attempt("test -e /run/written")?.code, 0, "nothing was frozen");
        guest.run("kill -9 $(cat /run/agent); sleep 1")?;
        guest.run("test -e /run/written")?;

        // And the next checkpoint is none the worse for it.
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
        assert_eq!(guest.attempt("cairn-agent checkpoint --label mine")?.code, 2);
        // No disk answers at another port.
        assert_eq!(guest.attempt("cairn-agent status --port 7401")?.code, 6);
        Ok(())
    });
}
