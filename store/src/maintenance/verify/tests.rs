//! Verifications of repositories in directories.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use tempfile::TempDir;

use super::sample::Sample;
use super::{BlobUse, Verification, Verifier};
use crate::blobs::directory::DirectoryBlobs;
use crate::blobs::{Blobs, NewBlob};
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::ChunkId;
use crate::maintenance::collection::{CollectionOptions, collect};
use crate::repository::Repository;
use crate::snapshot::Snapshot;
use crate::tree::Root;

const CHUNK: usize = 65536;

fn content(number: u64) -> Vec<u8> {
    let mut content = vec![0; CHUNK];
    blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut content);
    content
}

/// Publishes an image with these chunks.
fn publish(repository: &Repository, name: &str, chunks: &[u64]) -> Snapshot {
    let geometry = Geometry::new(64 * CHUNK as u64, CHUNK as u32).unwrap();
    let contents: Vec<_> = chunks.iter().map(|number| content(*number)).collect();
    let chunks: Vec<_> = contents.iter().map(|one| NewBlob::new(one)).collect();
    repository.put_chunks(&chunks).unwrap();
    let at = |(at, one): (usize, &NewBlob<'_>)| (ChunkIndex(at as u64), Some(one.chunk_id()));
    let changes: BTreeMap<_, _> = chunks.iter().enumerate().map(at).collect();
    let root = repository.commit_tree(&Root::default(), geometry, &changes).unwrap().root;
    repository.flush().unwrap();
    repository.publish_image(&name.parse().unwrap(), geometry, &root, 0, 0).unwrap()
}

/// Flips a bit of a blob, wherever it is.
fn damage(repository: &Path, content: &[u8]) {
    let path = repository.join("segments/00000001");
    let bytes = fs::read(&path).unwrap();
    let at = (0..bytes.len()).step_by(4096).find(|at| bytes[*at..].starts_with(content));
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[content[5] ^ 1], at.unwrap() as u64 + 5).unwrap();
}

fn names(report: &Verification) -> Vec<String> {
    report.affected.iter().map(ToString::to_string).collect()
}

/// A repository with three images, of which two share chunks. They have 32 chunks and 3 nodes.
struct Bench {
    _dir: TempDir,
    path: PathBuf,
    url: String,
    all: [Snapshot; 3],
}

impl Bench {
    fn new() -> Bench {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("repository");
        let url = format!("dir:{}", path.display());
        let repository = Repository::open_or_create(&url).unwrap();
        let all = [
            publish(&repository, "one", &(0..20).collect::<Vec<_>>()),
            publish(&repository, "two", &(10..30).collect::<Vec<_>>()),
            publish(&repository, "three", &[100, 101]),
        ];
        Bench { _dir: dir, path, url, all }
    }

    /// A repository without cached nodes.
    fn open(&self) -> Repository {
        Repository::open(&self.url).unwrap()
    }

    fn verify_with(&self, snapshots: &[Snapshot], sample: Option<Sample>) -> Verification {
        let repository = self.open();
        let verifier = Verifier::new(&repository, snapshots.to_vec(), sample).unwrap();
        let (most, last) = (verifier.bytes(), AtomicU64::new(0));
        let report = verifier.run(&|done| {
            last.fetch_max(done, Ordering::SeqCst);
        });
        let report = report.unwrap();
        assert!(last.into_inner() == report.bytes && report.bytes <= most);
        report
    }

    fn verify(&self, snapshots: &[Snapshot]) -> Verification {
        self.verify_with(snapshots, None)
    }

    /// Whether the catalog has each image as verified.
    fn verified(&self) -> [bool; 3] {
        let repository = self.open();
        ["one", "two", "three"].map(|name| {
            let times = repository.catalog().verified(&name.parse().unwrap());
            times.is_ok_and(|times| times.of(1).is_some())
        })
    }
}

#[test]
fn each_blob_is_read_once_and_damage_is_attributed_to_its_snapshots() {
    let bench = Bench::new();
    let all = &bench.all;
    let report = bench.verify(all);
    assert_eq!((report.blobs, report.bytes), (32 + 3, 32 * CHUNK as u64), "{report:?}");
    assert_eq!((report.unreadable, report.verified), (0, 3));

    damage(&bench.path, &content(15));
    damage(&bench.path, &content(29));
    let report = bench.verify(all);
    assert_eq!((report.blobs, report.unreadable, report.lost), (35, 2, 2), "{report:?}");
    assert_eq!(names(&report), ["one@1", "two@1"]);
    assert!(report.errors.iter().all(|one| one.used_as == BlobUse::Chunk && one.is_lost()));
    assert_eq!(names(&bench.verify(&all[1..])), ["two@1"]);
    assert_eq!(names(&bench.verify(&all[2..])), Vec::<String>::new());

    // A tree node.
    let (blobs, mut bytes) = (DirectoryBlobs::open(&bench.path).unwrap(), vec![0; 1 << 16]);
    let len = blobs.get(&all[2].root.0.unwrap().into(), &mut bytes).unwrap();
    damage(&bench.path, &bytes[..len]);
    let report = bench.verify(all);
    assert_eq!((report.blobs, report.unreadable), (33, 3), "its chunks are not known");
    assert_eq!(names(&report), ["one@1", "two@1", "three@1"]);
    assert_eq!(report.errors[0].used_as, BlobUse::Node);
    // What was removed is not affected.
    bench.open().remove_image(&"three".parse().unwrap(), false).unwrap();
    assert_eq!(names(&bench.verify(all)), ["one@1", "two@1"]);
    let report = bench.verify(&all[2..]);
    assert!(report.affected.is_empty() && report.unreadable == 0, "{report:?}");
}

#[test]
fn a_snapshot_is_verified_until_damage_is_found_in_it() {
    let bench = Bench::new();
    assert_eq!(bench.verified(), [false; 3]);
    bench.verify(&bench.all[..1]);
    assert_eq!(bench.verified(), [true, false, false]);
    bench.verify(&bench.all);
    assert_eq!(bench.verified(), [true; 3]);
    damage(&bench.path, &content(25));
    assert_eq!(bench.verified(), [true; 3], "nobody has read it");
    bench.verify(&bench.all);
    assert_eq!(bench.verified(), [true, false, true]);
    // The chunk is stored again.
    let repository = bench.open();
    let again = content(25);
    repository.put_chunks(&[NewBlob::new(&again)]).unwrap();
    repository.flush().unwrap();
    assert_eq!(bench.verified(), [true, false, true]);
    assert_eq!(bench.verify(&bench.all).unreadable, 0);
    assert_eq!(bench.verified(), [true; 3]);
}

#[test]
fn a_sample_reads_its_part_and_verifies_nothing_but_finds_damage() {
    let bench = Bench::new();
    let half = |seed| Some(Sample::new(0.5, seed).unwrap());
    let report = bench.verify_with(&bench.all, half(7));
    let chunks = report.blobs - 3;
    assert!((1..32).contains(&chunks), "{report:?}");
    assert_eq!(report.bytes, chunks * CHUNK as u64);
    assert_eq!((report.verified, bench.verified()), (0, [false; 3]));
    bench.verify(&bench.all);
    damage(&bench.path, &content(101));
    let found = |seed| bench.verify_with(&bench.all, half(seed)).unreadable == 1;
    let selects = |seed| half(seed).unwrap().has(&ChunkId::of(&content(101)));
    for seed in 0..8 {
        assert_eq!(found(seed), selects(seed), "seed {seed}");
    }
    assert_eq!(bench.verified(), [true, true, false]);
}

#[test]
fn a_collection_takes_nothing_from_a_verification_that_runs() {
    let bench = Bench::new();
    let (repository, collector) = (bench.open(), bench.open());
    let verifier = Verifier::new(&repository, bench.all.to_vec(), None).unwrap();
    collector.remove_image(&"two".parse().unwrap(), false).unwrap();
    let free = || collect(&collector, &CollectionOptions::default(), &|_| ()).unwrap().freed;
    assert_eq!(free().objects, 0);
    let report = verifier.run(&|_| ()).unwrap();
    assert_eq!((report.blobs, report.unreadable), (35, 0), "{report:?}");
    assert_eq!(bench.verified(), [true, false, true]);
    assert_eq!(free().objects, 11, "ten chunks and a node");
}

/// Without a reader's document, as with very many snapshots.
#[test]
fn what_was_removed_and_collected_meanwhile_is_not_damage() {
    let bench = Bench::new();
    let (repository, collector) = (bench.open(), bench.open());
    let mut verifier = Verifier::new(&repository, bench.all.to_vec(), None).unwrap();
    verifier._readers.clear();
    collector.remove_image(&"two".parse().unwrap(), false).unwrap();
    let freed = collect(&collector, &CollectionOptions::default(), &|_| ()).unwrap().freed;
    assert_eq!(freed.objects, 11);
    let report = verifier.run(&|_| ()).unwrap();
    assert!(report.is_clean() && report.affected.is_empty(), "{report:?}");
    assert_eq!(bench.verified(), [true, false, true]);
}
