//! Trees compared with a plain map, with blobs in memory.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use proptest::collection::{btree_map, vec};
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop_assert_eq, prop_oneof, proptest,
};

use super::{MAX_NODE, Node, Referred, Root, Trees};
use crate::blobs::{Blobs, NewBlob};
use crate::collection::CollectionNumber;
use crate::encoding::StoragePolicy;
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::{ChunkIndex, Geometry, MIN_CHUNK_SIZE};
use crate::id::{BlobId, ChunkId, NodeId};

/// Blobs in memory, and the number of reads.
#[derive(Default)]
pub(super) struct MemoryBlobs {
    all: Mutex<HashMap<BlobId, Vec<u8>>>,
    reads: AtomicUsize,
}

impl MemoryBlobs {
    fn count(&self) -> usize {
        self.all.lock().unwrap().len()
    }

    /// How often a blob was read.
    pub(super) fn reads(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }

    /// Loses all blobs.
    pub(super) fn forget_all(&self) {
        self.all.lock().unwrap().clear();
    }
}

impl Blobs for MemoryBlobs {
    fn get(&self, id: &BlobId, buf: &mut [u8]) -> Result<usize> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let blobs = self.all.lock().unwrap();
        let Some(content) = blobs.get(id) else {
            return Err(Error::MissingBlob { id: *id });
        };
        buf[..content.len()].copy_from_slice(content);
        Ok(content.len())
    }

    fn put(&self, blobs: &[NewBlob<'_>], _: &StoragePolicy) -> Result<u64> {
        let mut all = self.all.lock().unwrap();
        let add = |blob: &NewBlob<'_>| match all.insert(blob.id(), blob.content.to_vec()) {
            Some(_) => 0,
            None => blob.content.len() as u64,
        };
        Ok(blobs.iter().map(add).sum())
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn raise_stamp(&self, _: CollectionNumber) {}

    fn known(&self, ids: &[BlobId], _: &StoragePolicy) -> Result<Vec<bool>> {
        let all = self.all.lock().unwrap();
        Ok(ids.iter().map(|id| all.contains_key(id)).collect())
    }
}

pub(super) type Changes = BTreeMap<ChunkIndex, Option<ChunkId>>;

/// Trees with a cache of one node, so that nearly every step reads stored bytes.
pub(super) fn trees() -> (Arc<MemoryBlobs>, Arc<Trees>) {
    let blobs = Arc::new(MemoryBlobs::default());
    (Arc::clone(&blobs), Arc::new(Trees::new(blobs, 0)))
}

pub(super) fn disk(chunks: u64) -> Geometry {
    Geometry::new(chunks * u64::from(MIN_CHUNK_SIZE), MIN_CHUNK_SIZE).unwrap()
}

pub(super) fn chunk(byte: u8) -> ChunkId {
    ChunkId::from_bytes([byte; 32])
}

pub(super) fn changes(list: &[(u64, Option<u8>)]) -> Changes {
    list.iter().map(|(index, byte)| (ChunkIndex(*index), byte.map(chunk))).collect()
}

pub(super) fn runs_of_changes() -> impl Strategy<Value = (Geometry, Vec<Changes>)> {
    let sizes = prop_oneof![
        1..3_u64,
        Just(255),
        Just(256),
        Just(257),
        Just(65_536),
        Just(65_537),
        66_000..70_000_u64,
        16_777_000..16_778_000_u64,
    ];
    sizes.prop_flat_map(|chunks| {
        // Most indexes are near the edges of nodes and of the disk, where mistakes are likely.
        let index = prop_oneof![
            0..chunks,
            (0..300_u64).prop_map(move |i| i.min(chunks - 1)),
            (65_400..65_700_u64).prop_map(move |i| i.min(chunks - 1)),
            (0..3_u64).prop_map(move |i| (chunks - 1).saturating_sub(i)),
        ];
        let change = (index.prop_map(ChunkIndex), any::<Option<u8>>().prop_map(|b| b.map(chunk)));
        let map = vec(change, 0..40).prop_map(Changes::from_iter);
        (Just(disk(chunks)), vec(map, 1..6))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_tree_holds_what_a_map_holds((geometry, runs) in runs_of_changes()) {
        let (_, trees) = trees();
        let mut model = BTreeMap::new();
        let mut root = Root::default();
        for run in &runs {
            root = trees.commit(&root, geometry, run, &StoragePolicy::default()).unwrap().root;
            for (index, chunk) in run {
                match chunk {
                    Some(chunk) => model.insert(*index, *chunk),
                    None => model.remove(index),
                };
            }
            let stored = trees.chunks(&root, geometry).collect::<Result<BTreeMap<_, _>>>().unwrap();
            prop_assert_eq!(&stored, &model);
            for index in run.keys() {
                let found = trees.chunk_at(&root, geometry, *index).unwrap();
                prop_assert_eq!(found, model.get(index).copied());
                let rest = trees.chunks(&root, geometry).starting_at(*index);
                let rest = rest.collect::<Result<BTreeMap<_, _>>>().unwrap();
                prop_assert_eq!(rest, model.clone().split_off(index));
            }
        }
        prop_assert_eq!(root.0.is_none(), model.is_empty());
    }

    #[test]
    fn equal_content_has_one_root_whatever_led_to_it((geometry, runs) in runs_of_changes()) {
        let (_, trees) = trees();
        let root = runs.iter().fold(Root::default(), |root, run| {
            trees.commit(&root, geometry, run, &StoragePolicy::default()).unwrap().root
        });
        let content = trees.chunks(&root, geometry).map(|chunk| {
            let (index, id) = chunk.unwrap();
            (index, Some(id))
        });
        let content = content.collect::<Changes>();
        let at_once = trees.commit(&Root::default(), geometry, &content, &StoragePolicy::default()).unwrap().root;
        let mut one_by_one = Root::default();
        for (index, id) in content.iter().rev() {
            let change = Changes::from([(*index, *id)]);
            one_by_one = trees.commit(&one_by_one, geometry, &change, &StoragePolicy::default()).unwrap().root;
        }
        prop_assert_eq!(root, at_once);
        prop_assert_eq!(root, one_by_one);
    }

    #[test]
    fn a_tree_that_grew_with_its_disk_has_the_root_of_one_that_did_not(
        (small, runs) in runs_of_changes(),
        more in prop_oneof![Just(0), 1..300_u64, Just(65_536), Just(16_777_216)],
        later in vec((0..400_u64, any::<Option<u8>>()), 0..4),
    ) {
        let (policy, chunks) = (StoragePolicy::default(), small.chunk_count() + more);
        let (large, (_, trees)) = (disk(chunks), trees());
        let commit = |base: &Root, geometry, changes: &Changes| {
            trees.commit(base, geometry, changes, &policy).unwrap().root
        };
        let before = runs.iter().fold(Root::default(), |root, run| commit(&root, small, run));
        let read = |root: &Root, geometry| -> Changes {
            let chunks = trees.chunks(root, geometry).map(|chunk| chunk.unwrap());
            chunks.map(|(index, id)| (index, Some(id))).collect()
        };
        let mut content = read(&before, small);
        prop_assert_eq!(&read(&before, large), &content, "the old tree, after the growth");
        prop_assert_eq!(trees.chunk_at(&before, large, ChunkIndex(chunks - 1)).unwrap(),
            content.get(&ChunkIndex(chunks - 1)).copied().flatten());
        // Near the old end, and near the new one.
        let later: Changes = later.into_iter().map(|(at, byte)| {
            let at = if at < 200 { small.chunk_count() + at } else { chunks - 1 + 200 - at.min(chunks + 199) };
            (ChunkIndex(at.min(chunks - 1)), byte.map(chunk))
        }).collect();
        let after = commit(&before, large, &later);
        content.extend(later);
        content.retain(|_, id| id.is_some());
        prop_assert_eq!(&read(&after, large), &content);
        prop_assert_eq!(after, commit(&Root::default(), large, &content), "at once");
    }

    #[test]
    fn arbitrary_bytes_are_refused_or_are_the_one_encoding_of_a_node(
        bytes in vec(any::<u8>(), 0..200),
        bitmap in btree_map(0..32_usize, any::<u8>(), 0..4),
    ) {
        let mut bytes = [b"CRNN\x01\x00\0\0".as_slice(), &[0; 32], &bytes].concat();
        bitmap.iter().for_each(|(at, byte)| bytes[8 + at] = *byte);
        if let Ok(node) = Node::decode(&bytes) {
            prop_assert_eq!(node.encode(), bytes);
        }
    }
}

#[test]
fn a_changed_chunk_adds_one_path_of_nodes() {
    let (blobs, trees) = trees();
    let geometry = disk(70_000);
    let full = (0..70_000).map(|index| (ChunkIndex(index), Some(chunk((index % 251) as u8))));
    let full = trees
        .commit(
            &Root::default(),
            geometry,
            &full.collect::<BTreeMap<_, _>>(),
            &StoragePolicy::default(),
        )
        .unwrap();
    let before = blobs.count();

    let one = trees
        .commit(&full.root, geometry, &changes(&[(69_999, Some(252))]), &StoragePolicy::default())
        .unwrap();
    assert_eq!(blobs.count() - before, 3);
    assert!(one.new_bytes > 0);

    let near = trees
        .commit(
            &one.root,
            geometry,
            &changes(&[(0, Some(253)), (1, None)]),
            &StoragePolicy::default(),
        )
        .unwrap();
    assert_eq!(blobs.count() - before, 6, "neighbours share their path");

    let again = trees
        .commit(&full.root, geometry, &changes(&[(69_999, Some(252))]), &StoragePolicy::default())
        .unwrap();
    assert_eq!((again.root, again.new_bytes), (one.root, 0));
    assert_ne!(near.root, one.root);
}

#[test]
fn a_change_to_equal_content_adds_nothing() {
    let (blobs, trees) = trees();
    let base = trees
        .commit(&Root::default(), disk(300), &changes(&[(299, Some(1))]), &StoragePolicy::default())
        .unwrap();
    let before = blobs.count();
    let same = trees
        .commit(
            &base.root,
            disk(300),
            &changes(&[(299, Some(1)), (7, None)]),
            &StoragePolicy::default(),
        )
        .unwrap();
    assert_eq!((same.root, same.new_bytes, blobs.count()), (base.root, 0, before));
}

#[test]
fn a_disk_of_holes_has_no_nodes() {
    let (blobs, trees) = trees();
    let geometry = disk(70_000);
    let empty = trees
        .commit(&Root::default(), geometry, &changes(&[(69_000, None)]), &StoragePolicy::default())
        .unwrap();
    assert_eq!((empty.root, blobs.count()), (Root(None), 0));

    let one = trees
        .commit(
            &Root::default(),
            geometry,
            &changes(&[(69_000, Some(1))]),
            &StoragePolicy::default(),
        )
        .unwrap();
    let none = trees
        .commit(&one.root, geometry, &changes(&[(69_000, None)]), &StoragePolicy::default())
        .unwrap();
    assert_eq!(none.root, Root(None));
}

#[test]
fn chunks_beyond_the_disk_are_refused() {
    let (_, trees) = trees();
    let error = trees
        .commit(&Root::default(), disk(10), &changes(&[(10, Some(1))]), &StoragePolicy::default())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let error = trees.chunk_at(&Root::default(), disk(10), ChunkIndex(10)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn a_tree_of_a_larger_disk_is_reported_as_corrupt() {
    let blobs: Arc<MemoryBlobs> = Arc::default();
    // The cache is large: a cached node is checked again for another position.
    let trees = Arc::new(Trees::new(blobs, 1 << 20));
    let wide = trees
        .commit(&Root::default(), disk(256), &changes(&[(255, Some(1))]), &StoragePolicy::default())
        .unwrap()
        .root;
    let high =
        trees.commit(&wide, disk(257), &changes(&[]), &StoragePolicy::default()).unwrap().root;
    assert_ne!(high, wide);
    for (root, geometry) in [(wide, disk(255)), (high, disk(256))] {
        let error = trees.chunk_at(&root, geometry, ChunkIndex(0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        let mut chunks = trees.chunks(&root, geometry);
        assert_eq!(chunks.next().unwrap().unwrap_err().kind(), ErrorKind::Corrupt);
        assert!(chunks.next().is_none(), "the walk ends after an error");
    }
}

#[test]
fn a_missing_or_invalid_node_is_reported_as_corrupt_and_not_as_a_hole() {
    let (blobs, trees) = trees();
    let missing = Root(Some(NodeId::from_bytes([7; 32])));
    let error = trees.chunk_at(&missing, disk(10), ChunkIndex(0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);

    let content = [b'x'; MAX_NODE];
    blobs.put(&[NewBlob::new(&content)], &StoragePolicy::default()).unwrap();
    let foreign = Root(Some(NodeId::from_bytes(*BlobId::of(&content).as_bytes())));
    let error = trees.chunk_at(&foreign, disk(10), ChunkIndex(0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

/// The reads of [`Meeting`].
#[derive(Default)]
struct Reads {
    all: usize,
    under_way: usize,
    /// The most that were under way.
    most: usize,
    /// Whether one has waited for another in vain.
    gave_up: bool,
}

/// Blobs whose reads, except the first one, end when two are under way, or after a long time.
struct Meeting {
    blobs: Arc<MemoryBlobs>,
    reads: Mutex<Reads>,
    changed: Condvar,
}

impl Blobs for Meeting {
    fn get(&self, id: &BlobId, buf: &mut [u8]) -> Result<usize> {
        let mut reads = self.reads.lock().unwrap();
        (reads.all, reads.under_way) = (reads.all + 1, reads.under_way + 1);
        reads.most = reads.most.max(reads.under_way);
        self.changed.notify_all();
        let is_alone = |reads: &mut Reads| reads.all > 1 && reads.most < 2 && !reads.gave_up;
        let timeout = Duration::from_secs(20);
        let (mut reads, waited) =
            self.changed.wait_timeout_while(reads, timeout, is_alone).unwrap();
        reads.gave_up |= waited.timed_out();
        reads.under_way -= 1;
        self.blobs.get(id, buf)
    }

    fn put(&self, _: &[NewBlob<'_>], _: &StoragePolicy) -> Result<u64> {
        unreachable!("nobody writes")
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn raise_stamp(&self, _: CollectionNumber) {}

    fn known(&self, ids: &[BlobId], _: &StoragePolicy) -> Result<Vec<bool>> {
        unreachable!("nobody asks for {} blobs", ids.len())
    }
}

#[test]
fn a_walk_over_all_blobs_reads_several_nodes_at_a_time_and_visits_each_once() {
    let (blobs, trees) = trees();
    // A node has 256 children, so this tree has a root and 40 nodes below it.
    let geometry = disk(256 * 40);
    let changes: Changes = (0..40 * 256)
        .step_by(64)
        .map(|at: u64| (ChunkIndex(at), Some(ChunkId::of(&at.to_le_bytes()))))
        .collect();
    let policy = StoragePolicy::default();
    let root = trees.commit(&Root::default(), geometry, &changes, &policy).unwrap().root;
    let (reads, changed) = (Mutex::default(), Condvar::new());
    // The root is read alone.
    let meeting = Arc::new(Meeting { blobs: blobs.clone(), reads, changed });
    let walk = |blobs: Arc<dyn Blobs>| {
        let (mut nodes, mut chunks, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
        let trees = Trees::new(blobs, 0);
        let unread = trees.references(&root, geometry, &mut seen, &mut |referred| match referred {
            Referred::Node(id) => nodes.push(BlobId::from(id)),
            Referred::Chunk(id) => chunks.push(id),
        });
        chunks.sort_unstable();
        (nodes, chunks, unread)
    };
    let (nodes, chunks, unread) = walk(meeting.clone());
    assert!((2..=16).contains(&meeting.reads.lock().unwrap().most), "reads at a time");
    let mut expected: Vec<ChunkId> = changes.values().copied().flatten().collect();
    expected.sort_unstable();
    assert_eq!((nodes.len(), unread), (41, 0));
    assert!(chunks == expected);
    // Without two of the nodes, what is below the others is visited.
    let gone = &nodes[7..9];
    gone.iter().for_each(|id| drop(blobs.all.lock().unwrap().remove(id)));
    let (again, chunks, unread) = walk(blobs.clone());
    assert_eq!((again.len(), chunks.len(), unread), (41, expected.len() - 8, 2));
}
