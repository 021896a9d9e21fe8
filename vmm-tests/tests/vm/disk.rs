//! The disk keeps written data when guests and backends restart or are killed.

use std::fs;

use vmm_tests::{Backend, Disk, Guest, image, in_lab};

use crate::MIB;

#[test]
fn a_file_system_made_by_the_guest_survives_its_reboot() {
    in_lab("reboot", |lab| {
        let file = lab.path("blank");
        image::blank(&file, 256 * MIB)?;
        lab.import(&file, "vm")?;
        let backend = Backend::start(lab, &Disk::of("vm", "vm"))?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;

        // The full path, because busybox has its own, limited mke2fs.
        guest.run("/sbin/mke2fs -q -t ext4 /dev/vda")?;
        guest.run("mount /dev/vda /mnt")?;
        guest.run("dd if=/dev/urandom of=/mnt/data bs=1M count=8 2>/dev/null")?;
        let written = guest.run("sha256sum /mnt/data")?;
        guest.run("umount /mnt")?;
        guest.reboot()?;

        guest.run("e2fsck -fn /dev/vda")?;
        guest.run("mount /dev/vda /mnt")?;
        assert_eq!(guest.run("sha256sum /mnt/data")?, written);
        Ok(())
    });
}

#[test]
fn synced_data_survives_a_guest_that_is_killed_and_a_backend_that_stays() {
    in_lab("kill", |lab| {
        lab.import_ext4("vm", 256 * MIB, 8)?;
        let backend = Backend::start(lab, &Disk::of("vm", "vm"))?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt")?;
        guest.run("echo precious > /mnt/file && sync")?;
        guest.kill()?;

        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt")?;
        assert_eq!(guest.run("cat /mnt/file")?, "precious\n");
        guest.run("umount /mnt && e2fsck -fn /dev/vda")?;
        guest.power_off()?;
        backend.stop()
    });
}

#[test]
fn a_guest_continues_when_its_backend_is_stopped_and_started_again() {
    in_lab("restarted-backend", |lab| {
        lab.import_ext4("vm", 256 * MIB, 8)?;
        let disk = Disk::of("vm", "vm");
        let backend = Backend::start(lab, &disk)?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt && echo precious > /mnt/file && sync")?;
        // The backend stops while the guest writes.
        guest.run("dd if=/dev/urandom of=/run/data bs=1M count=16 2>/dev/null")?;
        guest.run("(cp /run/data /mnt/copy && sync && touch /run/copied) >/dev/null 2>&1 &")?;
        backend.stop()?;
        let _backend = Backend::start(lab, &disk)?;

        guest.run("for i in $(seq 30); do test -e /run/copied && exit; sleep 1; done; exit 1")?;
        guest.run("umount /mnt && e2fsck -fn /dev/vda && mount /dev/vda /mnt")?;
        guest.run("cmp /run/data /mnt/copy")?;
        assert_eq!(guest.run("cat /mnt/file")?, "precious\n");
        Ok(())
    });
}

#[test]
fn synced_data_survives_the_death_of_guest_and_backend() {
    in_lab("both-killed", |lab| {
        lab.import_ext4("vm", 256 * MIB, 8)?;
        let disk = Disk::of("vm", "vm");
        let backend = Backend::start(lab, &disk)?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt && echo precious > /mnt/file && sync")?;
        guest.run("(while :; do cp /bin/busybox /mnt/noise; sync; done) >/dev/null 2>&1 &")?;
        backend.kill()?;
        guest.kill()?;

        let backend = Backend::start(lab, &disk)?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt")?;
        assert_eq!(guest.run("cat /mnt/file")?, "precious\n");
        guest.run("umount /mnt && e2fsck -fn /dev/vda")?;
        Ok(())
    });
}

#[test]
fn a_read_only_disk_can_be_read_but_not_written() {
    in_lab("read-only", |lab| {
        let original = lab.import_ext4("vm", 64 * MIB, 8)?;
        let disk = Disk { read_only: true, ..Disk::of("vm", "vm") };
        let backend = Backend::start(lab, &disk)?;
        let parent = backend.status()?.parent;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;

        assert_eq!(guest.run("blockdev --getro /dev/vda")?, "1\n");
        guest.run("mount -o ro /dev/vda /mnt")?;
        let sum = guest.run("cat /mnt/data/0? | sha256sum")?;
        assert_ne!(guest.attempt("touch /mnt/file")?.code, 0);
        guest.run("umount /mnt")?;
        let write = "dd if=/dev/zero of=/dev/vda bs=4k count=1 conv=fsync";
        assert_ne!(guest.attempt(write)?.code, 0);
        guest.run("mount -o ro /dev/vda /mnt")?;
        assert_eq!(guest.run("cat /mnt/data/0? | sha256sum")?, sum);

        assert_eq!(backend.status()?.dirty_bytes, 0);
        guest.power_off()?;
        backend.stop()?;
        assert!(fs::read(lab.export(&parent)?)? == fs::read(original)?, "the image has changed");
        Ok(())
    });
}
