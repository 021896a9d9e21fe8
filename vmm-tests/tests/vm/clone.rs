//! Clones share their common data and nothing else.

use vmm_tests::{Backend, Disk, Guest, image, in_lab};

use crate::MIB;

#[test]
fn two_clones_of_one_snapshot_diverge_and_share_stored_data() {
    in_lab("clone", |lab| {
        const DATA: u64 = 40;
        lab.import_ext4("origin", 256 * MIB, DATA)?;
        let backend = Backend::start(lab, &Disk::of("origin", "origin"))?;
        let parent = backend.status()?.parent;
        backend.stop()?;
        let before = lab.repository_bytes()?;
        assert!(before > DATA * MIB, "the repository contains the data");

        let mut snapshots = Vec::new();
        for name in ["left", "right"] {
            lab.cairn(&["clone", &parent, name])?;
            let backend = Backend::start(lab, &Disk::of(name, name))?;
            let mut guest = Guest::boot(lab, name, &[backend.socket()])?;
            guest.run("mount /dev/vda /mnt")?;
            guest.run(&format!("echo {name} > /mnt/who"))?;
            let answer = guest.run("cairn-agent checkpoint --freeze /mnt --wait stable")?;
            snapshots.push((name, answer.trim().to_owned()));
            guest.kill()?;
            backend.stop()?;
        }

        let grown = lab.repository_bytes()? - before;
        assert!(grown < DATA * MIB / 2, "two clones added {grown} bytes");
        for (name, snapshot) in snapshots {
            assert!(snapshot.starts_with(&format!("{name}@")), "{snapshot}");
            let file = lab.export(&snapshot)?;
            image::check_clean(&file)?;
            assert_eq!(image::read(&file, "/who")?, format!("{name}\n").as_bytes());
        }
        let original = lab.export(&parent)?;
        assert!(image::read(&original, "/who").is_err(), "a clone wrote to its origin");
        Ok(())
    });
}
