//! A full disk: nothing is lost, and the repository continues when there is space again.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use crate::support::{assert_holds, content, disk, name, write};
use cairn_store::cluster::peer::PeerStore;
use cairn_store::cluster::protocol::FragmentId;
use cairn_store::cluster::repair::Wanted;
use cairn_store::encoding::Redundancy;
use cairn_store::encoding::fragment::{Fragment, encode};
use cairn_store::maintenance::WantedBlobs;
use cairn_store::maintenance::verify::{BlobUse, Verifier};
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

/// A loop-mounted ext4, which is unmounted when this is dropped.
struct SmallExt4 {
    dir: TempDir,
}

impl SmallExt4 {
    fn mount(mib: u64) -> Option<Self> {
        let dir = TempDir::new().unwrap();
        let image = dir.path().join("image");
        fs::File::create(&image).unwrap().set_len(mib << 20).unwrap();
        let at = dir.path().join("mount");
        fs::create_dir(&at).unwrap();
        let is_done =
            |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
        // No blocks are kept for root, who runs this test.
        let is_mounted = is_done(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image))
            && is_done(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&at));
        is_mounted.then_some(Self { dir })
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("mount")
    }
}

impl Drop for SmallExt4 {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

/// Writes a file until nothing more fits.
fn fill(path: &Path) {
    use std::io::Write;
    let mut file = fs::File::create(path).unwrap();
    for size in [1 << 20, 4096, 512] {
        while file.write_all(&vec![1; size]).and_then(|()| file.sync_data()).is_ok() {}
    }
}

/// Somebody else fills the disk. Snapshots can still be listed and removed, and a collection gives
/// space back, again and again.
#[test]
fn a_repository_on_a_full_disk_can_be_listed_removed_from_and_collected() {
    let Some(small) = SmallExt4::mount(48) else {
        eprintln!("skipped: mounting a small ext4 needs root");
        return;
    };
    let url = crate::support::url_of(&small.path().join("repository"));
    let open = || Repository::open(&url).unwrap();
    let chunks = |from: u64| (0..100).map(move |at| (at, from + at)).collect::<Vec<_>>();
    let repository = Repository::open_or_create(&url).unwrap();
    for image in 0..3_u64 {
        let root = write(&repository, &Root::default(), &chunks(1000 * image));
        let image = name(&format!("vm{image}"));
        repository.publish_image(&image, disk(1000), &root, 0, 0).unwrap();
    }
    // All databases are closed, so their logs and their shared memory are gone.
    drop(repository);
    for round in 0..3 {
        let ballast = small.path().join(format!("ballast{round}"));
        fill(&ballast);
        let repository = open();
        assert_eq!(repository.catalog().images().unwrap().len(), 3 - round);
        let error = repository.put_chunk(&content(5000)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("no space left"), "{error}");
        drop(repository);
        open().remove_image(&name(&format!("vm{round}")), false).unwrap();
        let options = cairn_store::maintenance::collection::CollectionOptions::default();
        let report =
            cairn_store::maintenance::collection::collect(&open(), &options, &|_| ()).unwrap();
        assert!(report.freed.bytes >= 100 * content(0).len() as u64, "{report:?}");
        // The space is there for others, and for the next time that the disk is full.
        let free = || fs::write(small.path().join("other"), vec![1; 3 << 20]);
        free().unwrap();
        fs::remove_file(small.path().join("other")).unwrap();
    }
    fs::remove_file(small.path().join("ballast0")).unwrap();
    let repository = open();
    let root = write(&repository, &Root::default(), &chunks(9000));
    let snapshot = repository.publish_image(&name("after"), disk(1000), &root, 0, 0).unwrap();
    assert_holds(&repository, &snapshot, &chunks(9000));
}

/// A peer without a capacity fills its file system, whose last block some other program takes. It can
/// still delete, and open again.
#[test]
fn a_peer_on_a_full_disk_deletes_and_opens_again() {
    let number_of = |number: u64| {
        let mut content = vec![0; 64 << 10];
        blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut content);
        let (description, blocks) = encode(&BlobId::of(&content), &content, Redundancy::NONE);
        Fragment { description, index: 0, block: blocks.share(0) }
    };
    let id = |Fragment { description, index, .. }: &Fragment| FragmentId {
        blob: description.blob,
        encoding: description.id(),
        index: *index,
    };
    let Some(small) = SmallExt4::mount(64) else {
        eprintln!("skipped: mounting a small ext4 needs root");
        return;
    };
    let directory = small.path().join("peer");
    let store = PeerStore::open(&directory, None).unwrap();
    let mut all = Vec::new();
    let refused = (0..10_000).find_map(|number| {
        let one = number_of(number);
        let put = store.put(std::slice::from_ref(&one)).and_then(|mut all| all.remove(0));
        all.push(one);
        put.and_then(|()| store.flush()).err()
    });
    assert_eq!(refused.unwrap().kind(), ErrorKind::Unavailable);
    all.pop();
    assert!(all.len() > 200, "{}", all.len());
    let ballast = small.path().join("ballast");
    let mut delete_some = |store: &PeerStore| {
        let some: Vec<_> = all.drain(..100).map(|one| id(&one)).collect();
        let deleted: u64 = some.chunks(10).map(|some| store.delete(some, 0).unwrap()).sum();
        assert!(deleted >= 100 * (64 << 10), "{deleted}");
    };
    fill(&ballast);
    delete_some(&store);
    drop(store);
    fs::remove_file(&ballast).unwrap();
    fill(&ballast);
    delete_some(&PeerStore::open(&directory, None).unwrap());
}

/// The page cache has the right bytes of a damaged disk.
#[test]
fn a_verification_reads_the_disk_and_not_the_page_cache() {
    let Some(small) = SmallExt4::mount(64) else {
        eprintln!("skipped: mounting a small ext4 needs root");
        return;
    };
    let url = crate::support::url_of(&small.path().join("repository"));
    let repository = Repository::open_or_create(&url).unwrap();
    let chunks: Vec<_> = (0..50).map(|at| (at, 7000 + at)).collect();
    let root = write(&repository, &Root::default(), &chunks);
    let snapshot = repository.publish_image(&name("a"), disk(1000), &root, 0, 0).unwrap();
    drop(repository);
    let verify = || {
        let repository = Repository::open(&url).unwrap();
        Verifier::new(&repository, vec![snapshot.clone()], None).unwrap().run(&|_| ()).unwrap()
    };
    assert_eq!((verify().unreadable, verify().verified), (0, 1));
    let segment = small.path().join("repository/segments/00000001");
    assert!(Command::new("sync").arg("-f").arg(&segment).status().unwrap().success());
    let bytes = fs::read(&segment).unwrap();
    let image = small.dir.path().join("image");
    let backing = fs::read(&image).unwrap();
    let file = fs::File::options().write(true).open(&image).unwrap();
    // A chunk, and everything else: the nodes, and the records of groups, which nobody reads.
    let chunk = content(7007);
    let is_chunk =
        |at: usize| chunks.iter().any(|(_, seed)| bytes[at..].starts_with(&content(*seed)[..64]));
    // A block is found by its beginning.
    let blocks: std::collections::HashMap<&[u8], usize> =
        (0..backing.len()).step_by(1024).map(|at| (&backing[at..at + 64], at)).collect();
    let mut at = 0;
    while at < bytes.len() {
        let is_other = !is_chunk(at);
        let begin = &bytes[at..at + 64];
        if (is_other || bytes[at..].starts_with(&chunk)) && begin != [0; 64] {
            file.write_all_at(&[begin[8] ^ 1], blocks[begin] as u64 + 8).unwrap();
        }
        at += if is_other { 4096 } else { chunk.len() };
    }
    file.sync_all().unwrap();
    let mut cached = vec![0; bytes.len()];
    fs::File::open(&segment).unwrap().read_exact_at(&mut cached, 0).unwrap();
    assert!(cached == bytes, "the page cache has what was written");
    let report = verify();
    let uses: Vec<_> = report.errors.iter().map(|one| one.used_as).collect();
    assert!(uses.contains(&BlobUse::Chunk) && uses.contains(&BlobUse::Node), "{report:?}");
    let repository = Repository::open(&url).unwrap();
    assert!(repository.catalog().verified(&name("a")).unwrap().of(1).is_none());
}
