//! Checkpoints requested inside a guest, and their content.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use vmm_tests::{Backend, Disk, Guest, image, in_lab};

use crate::MIB;

#[test]
fn a_guest_restarts_from_its_checkpoint_on_an_empty_mirror() {
    in_lab("restart", |lab| {
        lab.import_ext4("vm", 256 * MIB, 40)?;
        let backend = Backend::start(lab, &Disk::of("vm", "vm"))?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt")?;
        guest.run("echo kept > /mnt/file")?;
        let snapshot = guest.run("cairn-agent checkpoint --freeze /mnt --wait stable")?;
        guest.run("echo rolled back >> /mnt/file && sync")?;
        guest.kill()?;
        backend.kill()?;

        // Another mirror, which is empty.
        let disk = Disk { name: "elsewhere".to_owned(), ..Disk::of("vm", snapshot.trim()) };
        let backend = Backend::start(lab, &disk)?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("e2fsck -fn /dev/vda")?;
        guest.run("mount /dev/vda /mnt")?;
        assert_eq!(guest.run("cat /mnt/file")?, "kept\n");

        let (fetched, size) = (backend.stats()?.fetched_bytes, backend.status()?.size);
        assert!(fetched > 0, "an empty mirror must fetch data");
        assert!(fetched < size / 4, "fetched {fetched} of {size} bytes to read one small file");
        Ok(())
    });
}

#[test]
fn each_of_ten_checkpoints_of_a_writing_guest_contains_the_data_synced_before_it() {
    in_lab("ten", |lab| {
        lab.import_ext4("vm", 128 * MIB, 8)?;
        let backend = Backend::start(lab, &Disk::of("vm", "vm"))?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt")?;
        let noise = "dd if=/dev/urandom of=/mnt/noise bs=64k count=16 conv=fsync";
        guest.run(&format!("(while :; do {noise}; done) >/dev/null 2>&1 &"))?;

        let mut snapshots = Vec::new();
        for number in 1..=10 {
            guest.run(&format!("echo {number} > /mnt/{number} && sync"))?;
            let freeze = if number % 2 == 0 { "--freeze /mnt" } else { "" };
            let answer = guest.run(&format!("cairn-agent checkpoint {freeze}"))?;
            snapshots.push(answer.trim().to_owned());
        }
        wait_until_stable(&backend)?;

        for (index, snapshot) in snapshots.iter().enumerate() {
            let number = index + 1;
            let file = lab.export(snapshot)?;
            if number % 2 == 0 {
                image::check_clean(&file)?;
            } else {
                image::recover(&file)?;
            }
            for synced in 1..=number {
                let content = image::read(&file, &format!("/{synced}"))?;
                assert_eq!(content, format!("{synced}\n").as_bytes(), "{snapshot}");
            }
            let later = format!("/{}", number + 1);
            assert!(image::read(&file, &later).is_err(), "{snapshot} contains {later}");
        }
        Ok(())
    });
}

#[test]
fn the_operator_can_take_a_checkpoint_from_the_host() {
    in_lab("operator", |lab| {
        lab.import_ext4("vm", 64 * MIB, 1)?;
        let backend = Backend::start(lab, &Disk::of("vm", "vm"))?;
        let mut guest = Guest::boot(lab, "vm", &[backend.socket()])?;
        guest.run("mount /dev/vda /mnt && echo synced > /mnt/file && sync")?;
        let control = backend.control().display().to_string();
        lab.cairn(&["checkpoint", "--control", &control, "--wait", "stable"])?;

        let list = guest.run("cairn-agent list")?;
        let snapshot = list.lines().last().and_then(|line| line.split('\t').next());
        let file = lab.export(snapshot.unwrap_or_default())?;
        image::recover(&file)?;
        assert_eq!(image::read(&file, "/file")?, b"synced\n");
        Ok(())
    });
}

#[test]
fn one_freeze_spans_two_disks() {
    in_lab("two-disks", |lab| {
        lab.import_ext4("first", 64 * MIB, 1)?;
        lab.import_ext4("second", 64 * MIB, 1)?;
        let disk = |image: &str, port| Disk {
            name: image.to_owned(),
            image: image.to_owned(),
            port,
            ..Disk::of("vm", image)
        };
        let first = Backend::start(lab, &disk("first", 7400))?;
        let second = Backend::start(lab, &disk("second", 7401))?;
        let mut guest = Guest::boot(lab, "vm", &[first.socket(), second.socket()])?;
        guest.run("mount /dev/vda /mnt && mount /dev/vdb /mnt2")?;
        // The second counter follows the first one: at most one behind, never ahead.
        let step = "n=$((n+1)); echo $n > /mnt/count; sync; echo $n > /mnt2/count; sync";
        guest.run("echo 0 > /mnt/count; echo 0 > /mnt2/count; sync")?;
        guest.run(&format!("(n=0; while :; do {step}; done) >/dev/null 2>&1 &"))?;

        let answer = guest.run(
            "cairn-agent checkpoint --freeze /mnt --freeze /mnt2 --port 7400 --port 7401 \
             --wait stable",
        )?;
        let snapshots: Vec<&str> = answer.lines().collect();
        assert!(snapshots[0].starts_with("first@") && snapshots[1].starts_with("second@"));
        let count = |snapshot: &str| -> Result<u64> {
            let file = lab.export(snapshot)?;
            image::check_clean(&file)?;
            Ok(String::from_utf8(image::read(&file, "/count")?)?.trim().parse().unwrap_or(0))
        };
        let (ahead, behind) = (count(snapshots[0])?, count(snapshots[1])?);
        assert!(
            ahead == behind || ahead == behind + 1,
            "{ahead} on the first, {behind} on the second"
        );
        Ok(())
    });
}

fn wait_until_stable(backend: &Backend) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let status = backend.status()?;
        if status.pending.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < end, "not stable within a minute: {:?}", status.pending);
        thread::sleep(Duration::from_millis(50));
    }
}
