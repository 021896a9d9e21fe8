//! The differences of two trees, compared with those of two maps.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop_assert_eq, prop_oneof, proptest,
};

use super::{ChangedRange, RangeContent};
use crate::encoding::StoragePolicy;
use crate::geometry::{ChunkIndex, Geometry, MIN_CHUNK_SIZE, SECTOR_SIZE};
use crate::id::ChunkId;
use crate::tree::tests::MemoryBlobs;
use crate::tree::{Root, Trees};

const CHUNK: u64 = MIN_CHUNK_SIZE as u64;

type Disk = BTreeMap<ChunkIndex, Option<ChunkId>>;

fn disk(size: u64) -> Geometry {
    Geometry::new(size, MIN_CHUNK_SIZE).unwrap()
}

fn chunk(byte: u8) -> ChunkId {
    ChunkId::from_bytes([byte; 32])
}

fn ranges(
    trees: &Arc<Trees>,
    one: (&Root, Geometry),
    other: (&Root, Geometry),
) -> Vec<ChangedRange> {
    let mut found = Vec::new();
    let mut each = |range| {
        found.push(range);
        Ok(())
    };
    trees.changed_ranges(one, other, &mut each).unwrap();
    found
}

/// Compares what two disks have between all places where one of them may change.
fn naive(one: (&Disk, u64), other: (&Disk, u64)) -> Vec<ChangedRange> {
    let mut edges = vec![0, one.1, other.1];
    for index in one.0.keys().chain(other.0.keys()) {
        edges.extend([index.0 * CHUNK, (index.0 + 1) * CHUNK]);
    }
    edges.sort_unstable();
    edges.dedup();
    let at = |(disk, size): (&Disk, u64), offset: u64| {
        (offset < size).then(|| disk.get(&ChunkIndex(offset / CHUNK)).copied().flatten())
    };
    let mut found: Vec<ChangedRange> = Vec::new();
    for pair in edges.windows(2) {
        let (start, end) = (pair[0], pair[1]);
        let (before, after) = (at(one, start), at(other, start));
        if before == after {
            continue;
        }
        let content = match after {
            Some(Some(_)) => RangeContent::Data,
            Some(None) => RangeContent::Zero,
            None => RangeContent::Gone,
        };
        match found.last_mut() {
            Some(last) if (last.end, last.content) == (start, content) => last.end = end,
            _ => found.push(ChangedRange { start, end, content }),
        }
    }
    // The edges reach beyond the disks where a chunk is cut.
    let size = one.1.max(other.1);
    found.retain_mut(|range| {
        range.end = range.end.min(size);
        range.start < range.end
    });
    found
}

fn two_disks() -> impl Strategy<Value = (u64, Disk, u64, Vec<(u64, Option<u8>)>)> {
    let chunks =
        || prop_oneof![1..4_u64, Just(255), Just(256), Just(257), 65_530..65_540_u64, Just(70_000)];
    let size = || {
        (chunks(), prop_oneof![Just(0), 1..128_u64])
            .prop_map(|(chunks, cut)| chunks * CHUNK - cut * SECTOR_SIZE)
    };
    let index = || prop_oneof![0..5_u64, 250..260_u64, 65_525..65_545_u64, 0..70_000_u64];
    let changes = || vec((index(), any::<Option<u8>>()), 0..40);
    (size(), changes(), size(), changes()).prop_map(|(one, first, other, second)| {
        let inside = first.into_iter().filter(|(index, _)| *index < one.div_ceil(CHUNK));
        let first = inside.map(|(index, byte)| (ChunkIndex(index), byte.map(chunk))).collect();
        (one, first, other, second)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_ranges_are_those_of_a_naive_comparison((one, first, other, second) in two_disks()) {
        let trees = Arc::new(Trees::new(Arc::new(MemoryBlobs::default()), 0));
        let policy = StoragePolicy::default();
        let base = trees.commit(&Root::default(), disk(one), &first, &policy).unwrap().root;
        let inside = |index: u64| index < other.div_ceil(CHUNK);
        // The second disk has a part of the first, and its own changes.
        let mut model: Disk = first.clone();
        model.retain(|index, _| inside(index.0));
        for (index, byte) in second.iter().filter(|(index, _)| inside(*index)) {
            model.insert(ChunkIndex(*index), byte.map(chunk));
        }
        let root = trees.commit(&Root::default(), disk(other), &model, &policy).unwrap().root;
        let (one, other) = ((&base, disk(one)), (&root, disk(other)));
        let expected = naive((&first, one.1.size()), (&model, other.1.size()));
        prop_assert_eq!(ranges(&trees, one, other), expected);
        let backward = naive((&model, other.1.size()), (&first, one.1.size()));
        prop_assert_eq!(ranges(&trees, other, one), backward);
        prop_assert_eq!(ranges(&trees, one, one), Vec::new());
    }
}

#[test]
fn the_cost_follows_the_change_and_not_the_size() {
    let blobs = Arc::new(MemoryBlobs::default());
    let trees = Arc::new(Trees::new(blobs.clone(), 0));
    let (geometry, policy) = (disk(70_000 * CHUNK), StoragePolicy::default());
    let all: Disk = (0..70_000).map(|index| (ChunkIndex(index), Some(chunk(1)))).collect();
    let base = trees.commit(&Root::default(), geometry, &all, &policy).unwrap().root;
    let change = Disk::from([(ChunkIndex(40_000), Some(chunk(2))), (ChunkIndex(40_001), None)]);
    let next = trees.commit(&base, geometry, &change, &policy).unwrap().root;
    let before = blobs.reads();
    let found = ranges(&trees, (&base, geometry), (&next, geometry));
    let reads = blobs.reads() - before;
    assert!(reads <= 2 * 3, "{reads} reads of a path of three nodes in each tree");
    let (at, content) = (40_000 * CHUNK, [RangeContent::Data, RangeContent::Zero]);
    let range = |number: u64, content| ChangedRange {
        start: at + number * CHUNK,
        end: at + (number + 1) * CHUNK,
        content,
    };
    assert_eq!(found, [range(0, content[0]), range(1, content[1])]);
}

#[test]
fn a_disk_that_has_grown_without_a_write_differs_by_its_tail_only() {
    let trees = Arc::new(Trees::new(Arc::new(MemoryBlobs::default()), 0));
    let policy = StoragePolicy::default();
    let small = disk(3 * CHUNK - SECTOR_SIZE);
    let content = Disk::from([(ChunkIndex(2), Some(chunk(2)))]);
    let root = trees.commit(&Root::default(), small, &content, &policy).unwrap().root;
    let large = disk(1000 * CHUNK);
    let found = ranges(&trees, (&root, small), (&root, large));
    let range = |start, end, content| ChangedRange { start, end, content };
    // The end of the small disk cuts a chunk with data.
    let tail = [
        range(small.size(), 3 * CHUNK, RangeContent::Data),
        range(3 * CHUNK, large.size(), RangeContent::Zero),
    ];
    assert_eq!(found, tail);
    let gone = range(small.size(), large.size(), RangeContent::Gone);
    assert_eq!(ranges(&trees, (&root, large), (&root, small)), [gone]);
    // The tree of the large disk has more levels, and the old root is in one of its slots.
    let more = Disk::from([(ChunkIndex(999), Some(chunk(9)))]);
    let grown = trees.commit(&root, large, &more, &policy).unwrap().root;
    let last = range(999 * CHUNK, 1000 * CHUNK, RangeContent::Data);
    assert_eq!(ranges(&trees, (&root, large), (&grown, large)), [last]);
    let other = Geometry::new(large.size(), 2 * MIN_CHUNK_SIZE).unwrap();
    let mismatch = trees.changed_ranges((&root, small), (&root, other), &mut |_| Ok(()));
    assert!(mismatch.unwrap_err().to_string().contains("chunks"));
}
