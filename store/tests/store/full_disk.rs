//! A full disk: nothing is lost, and the repository continues when there is space again.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::{assert_holds, content, disk, name, write};
use cairn_store::cluster::repair::Wanted;
use cairn_store::encoding::Redundancy;
use cairn_store::maintenance::WantedBlobs;
use cairn_store::{BlobId, ErrorKind, Repository, Root};
use tempfile::TempDir;

/// A small file system, which is unmounted when this is dropped.
struct SmallDisk {
    dir: TempDir,
}

impl SmallDisk {
    /// Mounts the file system; `None` if this user may not mount.
    fn mount() -> Option<Self> {
        let dir = TempDir::new().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=8m", "cairn-test"])
            .arg(dir.path())
            .output()
            .is_ok_and(|output| output.status.success());
        mounted.then_some(Self { dir })
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.dir.path()).status();
    }
}

#[test]
fn a_full_disk_is_reported_as_unavailable_and_works_again_when_space_is_free() {
    let Some(small) = SmallDisk::mount() else {
        eprintln!("skipped: mounting a small tmpfs needs root");
        return;
    };
    let repository = Repository::open_or_create(&crate::support::url(&small.dir)).unwrap();
    let kept = [(0, 1), (1, 2)];
    let root = write(&repository, &Root::default(), &kept);
    let snapshot = repository.publish_image(&name("kept"), disk(1000), &root, 0, 0).unwrap();
    let ballast = small.path().join("ballast");
    fs::write(&ballast, vec![1; 4 << 20]).unwrap();

    let mut fitted = 0;
    let error = loop {
        match repository.put_chunk(&content(1000 + fitted)) {
            Ok(_) => fitted += 1,
            Err(error) => break error,
        }
        assert!(fitted < 1000, "the disk does not fill up");
    };
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("no space left"), "{error}");
    let mut buf = content(0);
    for (_, seed) in kept {
        repository.read_chunk(&cairn_store::ChunkId::of(&content(seed)), &mut buf).unwrap();
    }
    assert_holds(&repository, &snapshot, &kept);

    fs::remove_file(ballast).unwrap();
    let more = [(5, 5000), (6, 5001), (7, 1000)];
    let root = write(&repository, &Root::default(), &more);
    let after = repository.publish_image(&name("after"), disk(1000), &root, 0, 0).unwrap();
    assert_holds(&repository, &after, &more);
}

/// The names of a repair's blobs do not fit into the directory for temporary files.
#[test]
fn a_repair_without_space_for_its_names_fails_and_frees_what_it_has_used() {
    let Some(small) = SmallDisk::mount() else {
        eprintln!("skipped: mounting a small tmpfs needs root");
        return;
    };
    let mut wanted = WantedBlobs::within(small.path());
    for number in 0..1_100_000_u64 {
        let mut name = [0; 32];
        name[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
        wanted.add(&Wanted::content(BlobId::from_bytes(name), Redundancy::NONE));
    }
    let Err(error) = wanted.finish() else { panic!("36 MiB fit into 8 MiB") };
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    let directory = small.path().display().to_string();
    assert!(text.contains("TMPDIR") && text.contains(&directory), "{text}");
    // The space is free again.
    fs::write(small.path().join("file"), vec![1; 7 << 20]).unwrap();
}
