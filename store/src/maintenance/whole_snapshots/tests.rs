//! Tests of the decision which *available* snapshots become stable.

use std::collections::BTreeMap;

use seeded_rng::Rng;
use tempfile::TempDir;

use super::whole_snapshots;
use crate::blobs::NewBlob;
use crate::cluster::repair::Wanted;
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::BlobId;
use crate::maintenance::references::all_references;
use crate::maintenance::wanted::{SortedWanted, WantedBlobs, names};
use crate::name::ImageName;
use crate::repository::{Durability, Repository};
use crate::tree::Root;

const CHUNK: u32 = 65536;

/// A repository in which snapshots are only *available*.
fn repository(dir: &TempDir) -> Repository {
    let url = format!("dir:{}", dir.path().join("repository").display());
    Repository::open_or_create(&url).unwrap().with_durability(Durability::Optimistic)
}

/// Publishes an image with these chunks over a parent. Returns its root.
fn publish(
    repository: &Repository,
    name: &str,
    (parent, geometry): (&Root, Geometry),
    chunks: &[(u64, u32)],
) -> Root {
    let content = |number: u32| {
        let mut content = vec![7; CHUNK as usize];
        content[..4].copy_from_slice(&number.to_le_bytes());
        content
    };
    let mut changes = BTreeMap::new();
    for (index, number) in chunks {
        let content = content(*number);
        let chunk = NewBlob::new(&content);
        changes.insert(ChunkIndex(*index), Some(chunk.chunk_id()));
        repository.put_chunks(&[chunk]).unwrap();
    }
    let root = repository.commit_tree(parent, geometry, &changes).unwrap().root;
    repository.publish_image(&name.parse::<ImageName>().unwrap(), geometry, &root, 0, 0).unwrap();
    root
}

fn sorted(all: &[Wanted]) -> SortedWanted {
    let mut wanted = WantedBlobs::new();
    all.iter().for_each(|one| wanted.add(one));
    wanted.finish().unwrap()
}

/// Which snapshots are whole after a repair that looked at these blobs and found some of them short.
fn whole(repository: &Repository, looked_at: &[Wanted], short: &[BlobId]) -> Vec<bool> {
    let available = repository.catalog().available().unwrap();
    let mut names = names();
    short.iter().for_each(|blob| names.push(*blob.as_bytes()));
    let (looked_at, short) = (sorted(looked_at), names.finish().unwrap());
    whole_snapshots(repository, &available, &looked_at, &short).unwrap()
}

fn references(repository: &Repository) -> Vec<Wanted> {
    let mut all = Vec::new();
    assert_eq!(all_references(repository, |one| all.push(one)).unwrap(), 0);
    all
}

#[test]
fn only_a_snapshot_that_repair_looked_at_completely_is_whole() {
    let dir = TempDir::new().unwrap();
    let repository = repository(&dir);
    let geometry = Geometry::new(1 << 20, CHUNK).unwrap();
    publish(&repository, "vm", (&Root::default(), geometry), &[(3, 1)]);
    let wanted = references(&repository);
    assert_eq!(wanted.len(), 2, "a node and a chunk");
    assert_eq!(whole(&repository, &wanted, &[]), [true]);
    assert_eq!(whole(&repository, &wanted, &[BlobId::of(b"another one")]), [true]);
    for (at, one) in wanted.iter().enumerate() {
        assert_eq!(whole(&repository, &wanted, &[one.blob]), [false]);
        let mut less = wanted.clone();
        less.remove(at);
        assert_eq!(whole(&repository, &less, &[]), [false], "nobody has looked at {}", one.blob);
        // With another code, or as a record, the blob is another one for repair.
        less.push(Wanted { redundancy: "rs=2+2".parse().unwrap(), ..*one });
        less.push(Wanted::record(one.blob, one.redundancy));
        assert_eq!(whole(&repository, &less, &[]), [false]);
        less.push(Wanted { redundancy: "replicas=3".parse().unwrap(), ..*one });
        assert_eq!(whole(&repository, &less, &[]), [true], "more copies are enough");
    }
}

/// Snapshots that share nodes and chunks, some on two levels of nodes: exactly those are whole that
/// refer to no short blob and to none that repair has not looked at.
#[test]
fn exactly_the_snapshots_without_a_bad_blob_are_whole() {
    let seed = std::env::var("CAIRN_SEED").map_or(1, |text| text.parse().expect("a number"));
    println!("CAIRN_SEED={seed}");
    let mut rng = Rng::new(seed);
    let dir = TempDir::new().unwrap();
    let repository = repository(&dir);
    // A node has 256 children.
    let geometry = Geometry::new(u64::from(CHUNK) * 1000, CHUNK).unwrap();
    let mut root = Root::default();
    for number in 0..8 {
        let mut chunk = || (rng.below(1000), rng.below(60) as u32);
        let chunks: Vec<_> = (0..5).map(|_| chunk()).collect();
        root = publish(&repository, &format!("vm{number}"), (&root, geometry), &chunks);
    }
    let available = repository.catalog().available().unwrap();
    let of_snapshot = |at: usize| {
        let mut all = Vec::new();
        let super::Available { policy, refers, .. } = &available[at];
        let mut seen = std::collections::HashSet::new();
        let mut add = |one: Wanted| all.push(one);
        crate::maintenance::references::references_of(
            &repository,
            refers,
            policy,
            &mut seen,
            &mut add,
        );
        all
    };
    let own: Vec<Vec<Wanted>> = (0..available.len()).map(of_snapshot).collect();
    let all = references(&repository);
    let (mut wholes, mut others) = (0, 0);
    for _ in 0..60 {
        let few = |rng: &mut Rng| -> Vec<BlobId> {
            (0..rng.below(3)).map(|_| all[rng.below(all.len() as u64) as usize].blob).collect()
        };
        let (short, unseen) = (few(&mut rng), few(&mut rng));
        let looked_at: Vec<Wanted> =
            all.iter().filter(|one| !unseen.contains(&one.blob)).copied().collect();
        let is_good = |one: &Wanted| !short.contains(&one.blob) && !unseen.contains(&one.blob);
        let expected: Vec<bool> = own.iter().map(|own| own.iter().all(is_good)).collect();
        assert_eq!(whole(&repository, &looked_at, &short), expected);
        wholes += expected.iter().filter(|is_whole| **is_whole).count();
        others += expected.iter().filter(|is_whole| !**is_whole).count();
    }
    assert!(wholes > 20 && others > 20, "{wholes} whole, {others} not");
}
