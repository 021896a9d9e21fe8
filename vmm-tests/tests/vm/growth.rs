//! A disk grows under a running guest.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use vmm_tests::{Backend, Disk, Guest, image, in_lab};

use crate::MIB;

/// Waits until the guest's kernel knows this size of the disk.
fn await_size(guest: &mut Guest, bytes: u64) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let sectors: u64 = guest.run("cat /sys/block/vda/size")?.trim().parse()?;
        if sectors * 512 == bytes {
            return Ok(());
        }
        ensure!(Instant::now() < end, "the guest's disk has {sectors} sectors");
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_guest_sees_its_disk_grow_and_its_checkpoint_restarts_with_the_new_size() {
    in_lab("growth", |lab| {
        lab.import_ext4("vm", 64 * MIB, 4)?;
        let disk = Disk::of("vm", "vm");
        let backend = Backend::start(lab, &disk)?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt && echo small > /mnt/file && sync")?;
        let small = guest.run("cairn-agent checkpoint --freeze /mnt --wait stable")?;

        let control = backend.control().display().to_string();
        lab.cairn(&["resize", "vm", "192M", "--control", &control])?;
        await_size(&mut guest, 192 * MIB)?;
        guest.run("resize2fs /dev/vda")?;
        // More than the disk could hold before.
        guest.run("dd if=/dev/urandom of=/mnt/later bs=1M count=80 conv=fsync 2>/dev/null")?;
        let written = guest.run("sha256sum < /mnt/later")?;

        // The image grows while the backend is away. QEMU connects again and is told of it.
        backend.kill()?;
        lab.cairn(&["resize", "vm", "256M"])?;
        let backend = Backend::start(lab, &disk)?;
        await_size(&mut guest, 256 * MIB)?;
        guest.run("resize2fs /dev/vda")?;
        assert_eq!(guest.run("sha256sum < /mnt/later")?, written);
        let large = guest.run("cairn-agent checkpoint --freeze /mnt --wait stable")?;
        guest.run("umount /mnt && e2fsck -fn /dev/vda")?;
        guest.power_off()?;
        backend.stop()?;

        let file = lab.export(small.trim())?;
        image::check_clean(&file)?;
        assert_eq!(file.metadata()?.len(), 64 * MIB);
        assert_eq!(image::read(&file, "/file")?, b"small\n");
        let disk = Disk { name: "elsewhere".to_owned(), ..Disk::of("vm", large.trim()) };
        let backend = Backend::start(lab, &disk)?;
        assert_eq!(backend.status()?.size, 256 * MIB);
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("e2fsck -fn /dev/vda && mount /dev/vda /mnt")?;
        assert_eq!(guest.run("sha256sum < /mnt/later")?, written);
        Ok(())
    });
}
