//! What `usage` says, compared with a naive count and with what collections free.

use std::collections::{BTreeMap, BTreeSet};

use seeded_rng::Rng;
use tempfile::TempDir;

use super::{ImageUsage, mirror_usage, usage};
use crate::blobs::NewBlob;
use crate::catalog::RootOwner;
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::{BlobId, MirrorId};
use crate::maintenance::collection::{CollectionOptions, collect};
use crate::name::{ImageName, SnapshotRef};
use crate::repository::Repository;
use crate::snapshot::{MirrorOwner, Mode, Snapshot};
use crate::tree::{Referred, Root};

const CHUNK: u64 = 65536;

struct Bench {
    _dir: TempDir,
    repository: Repository,
}

fn name(text: &str) -> ImageName {
    text.parse().unwrap()
}

impl Bench {
    fn new() -> Bench {
        let dir = TempDir::new().unwrap();
        let url = format!("dir:{}", dir.path().join("repository").display());
        Bench { _dir: dir, repository: Repository::open_or_create(&url).unwrap() }
    }

    /// Stores a tree that differs from `base` by these chunks, of which each has a number as content.
    fn tree(&self, base: &Root, geometry: Geometry, changes: &[(u64, u64)]) -> Root {
        let content = |number: u64| {
            let mut content = vec![0; CHUNK as usize];
            Rng::new(number + 1).fill(&mut content);
            content
        };
        let contents: Vec<_> = changes.iter().map(|(_, number)| content(*number)).collect();
        let blobs: Vec<_> = contents.iter().map(|content| NewBlob::new(content)).collect();
        self.repository.put_chunks(&blobs).unwrap();
        let change = |((index, _), blob): (&(u64, u64), &NewBlob<'_>)| {
            (ChunkIndex(*index), Some(blob.chunk_id()))
        };
        let changes: BTreeMap<_, _> = changes.iter().zip(&blobs).map(change).collect();
        let root = self.repository.commit_tree(base, geometry, &changes).unwrap().root;
        self.repository.flush().unwrap();
        root
    }

    fn image(&self, text: &str, chunks: u64, changes: &[(u64, u64)]) -> Snapshot {
        let geometry = Geometry::new(chunks * CHUNK, CHUNK as u32).unwrap();
        let root = self.tree(&Root::default(), geometry, changes);
        self.repository.publish_image(&name(text), geometry, &root, 0, 0).unwrap()
    }

    /// Attaches a mirror to the newest snapshot of an image.
    fn attach(&self, image: &str, id: u8) -> crate::Attachment {
        let newest = self.repository.catalog().resolve(&image.parse().unwrap()).unwrap();
        let owner = MirrorOwner::this_process(MirrorId::from_bytes([id; 16]), "/mirror").unwrap();
        self.repository.attach(&owner, &newest, Mode::ReadWrite).unwrap()
    }

    /// Takes a snapshot through a mirror.
    fn snapshot(
        &self,
        attachment: &crate::Attachment,
        base: &Root,
        changes: &[(u64, u64)],
    ) -> Root {
        let root = self.tree(base, attachment.geometry(), changes);
        let number = attachment.reserve(1).unwrap().start;
        let new = crate::NewSnapshot {
            number,
            label: None,
            metadata: crate::Metadata::default(),
            is_from_guest: false,
            size: attachment.geometry().size(),
            consistency: crate::Consistency::Crash,
            time: 0,
            dirty_bytes: 0,
            pause_us: 0,
        };
        attachment.begin(&new).unwrap();
        attachment.announced(number).publish_tree(&root, 0, 0).unwrap();
        root
    }

    fn usage(&self) -> Vec<ImageUsage> {
        usage(&self.repository, &|_| true, &|_| ()).unwrap()
    }

    fn collect(&self) -> u64 {
        collect(&self.repository, &CollectionOptions::default(), &|_| ()).unwrap().freed.bytes
    }

    /// All blobs of everything that keeps content.
    fn blobs(&self) -> Vec<(String, u64, BTreeSet<BlobId>, BTreeSet<BlobId>)> {
        let roots = self.repository.catalog().collection_roots(true).unwrap();
        let mut all = Vec::new();
        for root in &roots.roots {
            let (mut chunks, mut blobs) = (BTreeSet::new(), BTreeSet::new());
            let mut visit = |referred| match referred {
                Referred::Node(id) => drop(blobs.insert(BlobId::from(id))),
                Referred::Chunk(id) => {
                    chunks.insert(BlobId::from(id));
                    blobs.insert(BlobId::from(id));
                }
            };
            let mut seen = std::collections::HashSet::new();
            let trees = self.repository.trees();
            assert_eq!(trees.references(&root.root, root.geometry, &mut seen, &mut visit), 0);
            let image = match root.owner == RootOwner::Snapshot {
                true => roots.images[root.image as usize].to_string(),
                false => String::new(),
            };
            all.push((image, root.number, chunks, blobs));
        }
        all
    }

    /// Compares with sets of names.
    fn assert_right(&self) {
        let all = self.blobs();
        for image in self.usage() {
            let text = image.image.to_string();
            let chunks = |is_own: &dyn Fn(&str, u64) -> bool| -> BTreeSet<BlobId> {
                let own = all.iter().filter(|one| is_own(&one.0, one.1));
                own.flat_map(|one| one.2.iter().copied()).collect()
            };
            let own = chunks(&|name, _| name == text);
            let others = chunks(&|name, _| name != text);
            let unique = own.difference(&others).count() as u64 * CHUNK;
            let shared = own.intersection(&others).count() as u64 * CHUNK;
            assert_eq!((image.unique.chunks, image.shared), (unique, shared), "{text}");
            for snapshot in &image.snapshots {
                let number = snapshot.number;
                let own = chunks(&|name, one| (name, one) == (&text, number));
                let others = chunks(&|name, one| (name, one) != (&text, number));
                let unique = own.difference(&others).count() as u64 * CHUNK;
                assert_eq!(snapshot.unique.chunks, unique, "{text}@{number}");
            }
        }
    }
}

#[test]
fn unique_and_shared_bytes_are_those_of_a_naive_count() {
    let bench = Bench::new();
    let seed = std::env::var("CAIRN_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("CAIRN_SEED={seed}");
    let mut rng = Rng::new(seed);
    for image in 0..3 {
        let text = format!("image{image}");
        // Two levels. Indices are few, so that trees share nodes, and contents, so that they share chunks.
        let change = |rng: &mut Rng| (rng.below(6) * 97, rng.below(20));
        let changes: Vec<_> = (0..5).map(|_| change(&mut rng)).collect();
        let first = bench.image(&text, 600, &changes);
        let attachment = bench.attach(&text, image);
        let mut root = first.root;
        for _ in 0..4 {
            let changes: Vec<_> = (0..rng.below(3)).map(|_| change(&mut rng)).collect();
            root = bench.snapshot(&attachment, &root, &changes);
        }
        if image == 0 {
            attachment.detach().unwrap();
        }
    }
    bench.repository.clone_snapshot(&"image1@2".parse().unwrap(), &name("clone")).unwrap();
    bench.assert_right();
}

#[test]
fn a_removal_frees_what_was_said() {
    let bench = Bench::new();
    let first = bench.image("vm", 600, &[(0, 1), (1, 2), (2, 2), (300, 3), (301, 4)]);
    let attachment = bench.attach("vm", 1);
    // @2 has a chunk of its own in the first leaf, @3 replaces it, @4 has one in the second leaf.
    let second = bench.snapshot(&attachment, &first.root, &[(5, 10)]);
    let third = bench.snapshot(&attachment, &second, &[(5, 11)]);
    bench.snapshot(&attachment, &third, &[(310, 12), (311, 1)]);
    bench.image("other", 600, &[(0, 4), (7, 20)]);
    bench.repository.clone_snapshot(&"vm@3".parse().unwrap(), &name("clone")).unwrap();
    bench.collect();
    let said = |image: &str, number: Option<u64>| {
        let all = bench.usage();
        let usage = all.iter().find(|one| one.image.as_str() == image).unwrap();
        match number {
            Some(number) => {
                usage.snapshots.iter().find(|one| one.number == number).unwrap().unique.stored
            }
            None => usage.unique.stored,
        }
    };
    let node = 16 << 10;
    // @2: a chunk, a leaf and a root. @3 is kept by its clone. The mirror keeps @4.
    assert!((CHUNK..CHUNK + node).contains(&said("vm", Some(2))), "{}", said("vm", Some(2)));
    assert_eq!(said("vm", Some(3)), 0);
    assert_eq!(said("vm", Some(4)), 0);
    bench.assert_right();
    for number in [2, 3, 1, 4] {
        let removed = SnapshotRef::number(&name("vm"), number);
        if number == 4 {
            // The last one, and its mirror.
            attachment.detach().unwrap();
            let said = said("vm", None);
            bench.repository.remove_image(&name("vm"), false).unwrap();
            assert_eq!((bench.collect(), said > 0), (said, true));
            break;
        }
        let said = said("vm", Some(number));
        bench.repository.remove_snapshot(&removed).unwrap();
        assert_eq!(bench.collect(), said, "{removed}");
        bench.assert_right();
    }
    let said = said("clone", None);
    bench.repository.remove_image(&name("clone"), false).unwrap();
    assert_eq!((bench.collect(), said > 3 * CHUNK), (said, true));
    assert_eq!(bench.usage()[0].shared, 0);
}

#[test]
fn images_that_were_not_asked_for_count_as_others() {
    let bench = Bench::new();
    bench.image("one", 4, &[(0, 1), (1, 2), (2, 1)]);
    bench.image("two", 4, &[(0, 1)]);
    bench
        .repository
        .create_image(&name("empty"), Geometry::new(CHUNK, CHUNK as u32).unwrap())
        .unwrap();
    let asked = |wanted: &str| usage(&bench.repository, &|image| image.as_str() == wanted, &|_| ());
    let one = asked("one").unwrap();
    assert_eq!(one.len(), 1);
    assert_eq!((one[0].unique.chunks, one[0].shared), (CHUNK, CHUNK));
    // One of its chunks occurs twice.
    let snapshot = &one[0].snapshots[0];
    assert_eq!((snapshot.data, snapshot.shared()), (3 * CHUNK, 2 * CHUNK));
    let empty = asked("empty").unwrap();
    assert_eq!((empty[0].unique.stored, empty[0].snapshots[0].data), (0, 0));
    assert_eq!(asked("none").unwrap(), []);
}

#[test]
fn a_mirror_that_is_forgotten_frees_what_was_said() {
    let bench = Bench::new();
    let said = || mirror_usage(&bench.repository, &|_| ()).unwrap();
    let id = |id| MirrorId::from_bytes([id; 16]);
    let first = bench.image("vm", 600, &[(0, 1), (1, 2), (300, 3)]);
    bench.image("other", 600, &[(0, 2)]);
    let attachment = bench.attach("vm", 1);
    bench.snapshot(&attachment, &first.root, &[(5, 10), (301, 11)]);
    attachment.release(None).unwrap();
    assert_eq!(said(), BTreeMap::new(), "its snapshot exists");
    // The next snapshot comes from another mirror, so that the first one continues a removed snapshot.
    let second = bench.attach("vm", 2);
    let newest = bench.repository.catalog().resolve(&"vm".parse().unwrap()).unwrap();
    bench.snapshot(&second, &newest.root, &[(5, 12)]);
    second.release(None).unwrap();
    bench.repository.remove_snapshot(&"vm@2".parse().unwrap()).unwrap();
    bench.collect();
    let alone = said();
    assert_eq!(alone.keys().copied().collect::<Vec<_>>(), [id(1)]);
    // Chunk 10. Chunk 11 is in the snapshot after it, too.
    assert_eq!(alone[&id(1)].chunks, CHUNK);
    bench.repository.forget_mirror(&id(1)).unwrap();
    assert_eq!((bench.collect(), said()), (alone[&id(1)].stored, BTreeMap::new()));
}

#[test]
fn what_two_mirrors_keep_belongs_to_neither() {
    let bench = Bench::new();
    let first = bench.image("vm", 4, &[(0, 1)]);
    let attachment = bench.attach("vm", 1);
    bench.snapshot(&attachment, &first.root, &[(1, 2)]);
    let newest = bench.repository.catalog().resolve(&"vm".parse().unwrap()).unwrap();
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([2; 16]), "/second").unwrap();
    let reader = bench.repository.attach(&owner, &newest, Mode::ReadOnly).unwrap();
    attachment.release(None).unwrap();
    bench.image("last", 4, &[(0, 1)]);
    bench.repository.remove_snapshot(&"vm@2".parse().unwrap()).unwrap();
    let all = mirror_usage(&bench.repository, &|_| ()).unwrap();
    assert_eq!(all.values().map(|bytes| bytes.chunks).collect::<Vec<_>>(), [0, 0]);
    bench.repository.forget_mirror(&MirrorId::from_bytes([1; 16])).unwrap();
    let all = mirror_usage(&bench.repository, &|_| ()).unwrap();
    assert_eq!(all.values().map(|bytes| bytes.chunks).collect::<Vec<_>>(), [CHUNK]);
    drop(reader);
}
