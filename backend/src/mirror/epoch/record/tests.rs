use cairn_store::{ChunkIndex, Consistency, NewSnapshot};

use super::{ChunkCounts, Epoch, EpochFiles, LayerState};
use crate::mirror::epoch::chunk_state::ChunkState;

fn new(label: Option<&str>) -> NewSnapshot {
    let mut metadata = cairn_store::Metadata::default();
    metadata.set("step", "4 of ü").unwrap();
    (0..14).for_each(|key| metadata.set(&format!("key-{key}"), &"v".repeat(100)).unwrap());
    NewSnapshot {
        number: 7,
        label: label.map(String::from),
        metadata,
        is_from_guest: true,
        size: 1 << 20,
        consistency: Consistency::Filesystem,
        time: 1_800_000_000,
        dirty_bytes: 12 << 20,
        pause_us: 33,
    }
}

#[test]
fn an_epoch_is_found_again_with_its_sets_and_its_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (epochs, found) = EpochFiles::open(dir.path(), counts(100_000)).unwrap();
    assert!(found.is_empty());
    epochs.prepare().unwrap();
    let (first, second) = (epochs.allocate().unwrap(), epochs.allocate().unwrap());
    epochs.prepare().unwrap();
    first.begin(Epoch(4));
    second.begin(Epoch(5));
    first.chunks.schedule(3);
    first.chunks.schedule(99_999);
    (first.chunks).set(ChunkIndex(3), &mut false, ChunkState::Pending);
    (first.chunks).set(ChunkIndex(3), &mut true, ChunkState::Idle);
    first.accept(&new(Some("before-upgrade")));
    second.freeze(1 << 20);
    second.settle();
    second.fail("no space");
    drop((epochs, first, second));
    let (_, found) = EpochFiles::open(dir.path(), counts(100_000)).unwrap();
    assert_eq!(found.iter().map(|one| one.epoch().0).collect::<Vec<_>>(), [4, 5]);
    let (first, second) = (&found[0], &found[1]);
    assert_eq!(first.chunks.dirty().iter().collect::<Vec<_>>(), [3, 99_999]);
    assert_eq!(first.chunks.dirty().len(), 2);
    assert_eq!(first.chunks.get(ChunkIndex(3), false), ChunkState::Idle);
    assert_eq!(first.chunks.get(ChunkIndex(99_999), false), ChunkState::Scheduled);
    assert_eq!((first.state(), second.state()), (LayerState::Open, LayerState::Failed));
    assert_eq!(first.accepted(), Some(new(Some("before-upgrade"))));
    assert_eq!(first.failure(), None);
    assert_eq!((second.accepted(), second.failure()), (None, Some("no space".into())));
    first.freeze(1 << 20);
    first.settle();
    first.close();
    assert_eq!(EpochFiles::open(dir.path(), counts(100_000)).unwrap().1.len(), 1);
    assert_eq!(EpochFiles::open(dir.path(), counts(5)).unwrap().1.len(), 0, "of another disk");
}

#[test]
fn a_long_reason_is_cut_between_characters() {
    let dir = tempfile::tempdir().unwrap();
    let (epochs, _) = EpochFiles::open(dir.path(), counts(10)).unwrap();
    let record = epochs.allocate().unwrap();
    record.freeze(1 << 20);
    record.settle();
    record.fail(&"ü".repeat(600));
    assert_eq!(record.failure(), Some("ü".repeat(256)));
}

#[test]
fn the_first_reason_of_a_failure_stays_whatever_the_order_of_failure_and_end() {
    for abandon_first in [true, false] {
        let record = EpochFiles::private(10).allocate().unwrap();
        record.freeze(1 << 20);
        record.settle();
        if abandon_first {
            record.abandon();
            assert_eq!((record.state(), record.failure()), (LayerState::Abandoned, None));
        }
        record.fail("first");
        record.abandon();
        record.fail("second");
        assert_eq!(record.state(), LayerState::Lost);
        assert_eq!(record.failure().as_deref(), Some("first"));
    }
}

#[test]
fn a_damaged_state_counts_as_lost() {
    let record = EpochFiles::private(10).allocate().unwrap();
    record.header[super::word::STATE].store(77, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(record.state(), LayerState::Lost);
}

#[test]
fn a_record_with_a_damaged_state_can_be_closed() {
    let dir = tempfile::tempdir().unwrap();
    let (files, _) = EpochFiles::open(dir.path(), counts(10)).unwrap();
    let record = files.allocate().unwrap();
    record.begin(Epoch(3));
    record.header[super::word::STATE].store(77, std::sync::atomic::Ordering::Relaxed);
    drop(record);
    let (_, mut found) = EpochFiles::open(dir.path(), counts(10)).unwrap();
    let record = found.pop().unwrap();
    assert_eq!(record.state(), LayerState::Lost);
    record.abandon();
    record.close();
    assert_eq!(record.state(), LayerState::Closed);
}

#[test]
fn a_record_of_another_version_is_refused_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (files, _) = EpochFiles::open(dir.path(), counts(10)).unwrap();
    let record = files.allocate().unwrap();
    record.begin(Epoch(3));
    record.header[super::word::VERSION].store(1, std::sync::atomic::Ordering::Relaxed);
    for _ in 0..2 {
        let refused = EpochFiles::open(dir.path(), counts(10)).map(drop).unwrap_err().to_string();
        assert!(refused.contains("another version"), "{refused}");
    }
}

fn counts(chunks: u64) -> ChunkCounts {
    ChunkCounts { now: chunks, capacity: chunks }
}
