//! Differences of trees, compared with those of plain maps.

use std::collections::BTreeMap;

use proptest::prelude::{ProptestConfig, prop_assert, prop_assert_eq, proptest};

use super::tests::{Changes, changes, chunk, disk, runs_of_changes, trees};
use super::{Difference, Root, Trees};
use crate::encoding::StoragePolicy;
use crate::error::Result;
use crate::geometry::{ChunkIndex, Geometry, MIN_CHUNK_SIZE};
use crate::id::ChunkId;

fn commit(trees: &Trees, base: &Root, geometry: Geometry, changes: &Changes) -> Root {
    trees.commit(base, geometry, changes, &StoragePolicy::default()).unwrap().root
}

/// The differences of two maps.
fn of_maps(
    old: &BTreeMap<ChunkIndex, ChunkId>,
    new: &BTreeMap<ChunkIndex, ChunkId>,
) -> Vec<Difference> {
    let mut all: Vec<_> = old.keys().chain(new.keys()).copied().collect();
    all.sort_unstable();
    all.dedup();
    let difference = |index: ChunkIndex| {
        let [old, new] = [old, new].map(|map| map.get(&index).copied());
        Difference { index, old, new }
    };
    all.into_iter().map(difference).filter(|one| one.old != one.new).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn the_differences_of_trees_are_those_of_maps((geometry, runs) in runs_of_changes()) {
        let (_, trees) = trees();
        let (mut roots, mut maps) = (vec![Root::default()], vec![BTreeMap::new()]);
        for run in &runs {
            let root = commit(&trees, roots.last().unwrap(), geometry, run);
            let content = trees.chunks(&root, geometry).collect::<Result<BTreeMap<_, _>>>();
            roots.push(root);
            maps.push(content.unwrap());
        }
        for (old, old_map) in roots.iter().zip(&maps) {
            for (new, new_map) in roots.iter().zip(&maps) {
                let found = trees.differences((old, geometry), (new, geometry)).unwrap();
                let found = found.collect::<Result<Vec<_>>>().unwrap();
                prop_assert_eq!(found, of_maps(old_map, new_map));
            }
        }
    }

    #[test]
    fn disks_of_different_sizes_are_compared(
        (small, small_runs) in runs_of_changes(), (large, large_runs) in runs_of_changes(),
    ) {
        let (_, trees) = trees();
        let fold = |geometry, runs: &[Changes]| runs.iter().fold(Root::default(), |root, run| {
            commit(&trees, &root, geometry, run)
        });
        let one = (small, fold(small, &small_runs));
        let other = (large, fold(large, &large_runs));
        let map = |(geometry, root): (Geometry, Root)| {
            trees.chunks(&root, geometry).collect::<Result<BTreeMap<_, _>>>().unwrap()
        };
        for (old, new) in [(one, other), (other, one)] {
            let found = trees.differences((&old.1, old.0), (&new.1, new.0)).unwrap();
            let found = found.collect::<Result<Vec<_>>>().unwrap();
            prop_assert!(found.is_sorted_by_key(|one| one.index));
            prop_assert_eq!(found, of_maps(&map(old), &map(new)));
        }
    }
}

#[test]
fn a_tree_of_a_grown_disk_differs_only_in_what_was_written() {
    let (_, trees) = trees();
    let (small, large) = (disk(3), disk(70_000));
    let old = commit(&trees, &Root::default(), small, &changes(&[(0, Some(1)), (2, Some(2))]));
    let new = commit(&trees, &old, large, &changes(&[(2, Some(3)), (69_999, Some(4))]));
    let found = trees.differences((&old, small), (&new, large)).unwrap();
    let expected = [(2, Some(2), 3), (69_999, None, 4)].map(|(index, old, new)| Difference {
        index: ChunkIndex(index),
        old: old.map(chunk),
        new: Some(chunk(new)),
    });
    assert_eq!(found.collect::<Result<Vec<_>>>().unwrap(), expected);
}

#[test]
fn equal_subtrees_are_not_read() {
    let (blobs, trees) = trees();
    let geometry = disk(65_536);
    let all: Changes = (0..65_536).map(|index| (ChunkIndex(index), Some(chunk(1)))).collect();
    let all: Changes =
        all.into_iter().map(|(index, id)| (index, id.filter(|_| index.0 % 7 != 0))).collect();
    let old = commit(&trees, &Root::default(), geometry, &all);
    let new = commit(&trees, &old, geometry, &changes(&[(40_000, Some(9))]));
    let before = blobs.reads();
    let found = trees.differences((&old, geometry), (&new, geometry)).unwrap();
    assert_eq!(found.count(), 1);
    // A root and a leaf of each tree, of 258 nodes. The last one may be in the cache.
    let read = blobs.reads() - before;
    assert!(read == 3 || read == 4, "{read}");
    let before = blobs.reads();
    assert_eq!(trees.differences((&new, geometry), (&new, geometry)).unwrap().count(), 0);
    assert_eq!(blobs.reads(), before);
}

#[test]
fn an_unreadable_node_ends_the_differences() {
    let (blobs, trees) = trees();
    let geometry = disk(65_536);
    let old = commit(&trees, &Root::default(), geometry, &changes(&[(0, Some(1))]));
    let new = commit(&trees, &old, geometry, &changes(&[(300, Some(2)), (9000, Some(3))]));
    blobs.forget_all();
    let mut found = trees.differences((&old, geometry), (&new, geometry)).unwrap();
    assert!(found.next().unwrap().is_err());
    assert!(found.next().is_none());
}

#[test]
fn disks_with_other_chunk_sizes_are_not_compared() {
    let (_, trees) = trees();
    let other = Geometry::new(1 << 20, 2 * MIN_CHUNK_SIZE).unwrap();
    let root = Root::default();
    let failed = trees.differences((&root, disk(1)), (&root, other)).err().unwrap();
    assert!(failed.to_string().contains("chunks of the same size"), "{failed}");
}
