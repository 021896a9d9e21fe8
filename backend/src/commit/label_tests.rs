//! When the label of a checkpoint is free again.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use cairn_store::{
    Consistency, Error, Geometry, MirrorId, MirrorOwner, Mode, NewSnapshot, Repository, Root,
};

use super::{Commit, CommitQueue, Ending, free_label};
use crate::mirror::epoch::Epoch;
use crate::mirror::epoch::layer::Layer;
use crate::mirror::epoch::record::EpochFiles;
use crate::mirror::files::layer_table::LayerDir;
use crate::mirror::layout::Layout;

fn labelled(number: u64) -> NewSnapshot {
    NewSnapshot {
        number,
        label: Some("mine".into()),
        metadata: cairn_store::Metadata::default(),
        is_from_guest: false,
        size: 1 << 20,
        consistency: Consistency::Crash,
        time: 0,
        dirty_bytes: 0,
        pause_us: 0,
    }
}

fn queue() -> CommitQueue {
    CommitQueue {
        commits: VecDeque::new(),
        numbers: 0..0,
        labels: HashMap::from([("mine".to_owned(), 2)]),
        unrecorded: Vec::new(),
        last_failed: None,
        closed: false,
    }
}

/// A checkpoint that is accepted.
fn accepted(number: u64) -> Arc<Commit> {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::new(Geometry::new(1 << 20, 64 << 10).unwrap());
    let record = EpochFiles::private(16).allocate().unwrap();
    record.begin(Epoch(1));
    let layer = Layer::new(record.into(), LayerDir::new(dir.path(), &layout).into());
    Commit::new(labelled(number), layer.into(), Instant::now())
}

#[test]
fn a_label_is_freed_only_if_neither_a_checkpoint_nor_the_catalog_has_it() {
    let waiting = || CommitQueue { commits: [accepted(2)].into(), ..queue() };
    let unrecorded =
        || CommitQueue { unrecorded: vec![(labelled(2), "a reason".into())], ..queue() };
    for (queue, in_catalog, is_freed) in [
        (queue(), false, true),
        (queue(), true, false),
        (waiting(), false, false),
        (unrecorded(), false, false),
    ] {
        let queue = Mutex::new(queue);
        assert_eq!(free_label(&queue, "mine", || in_catalog), is_freed);
        assert_eq!(!queue.lock().unwrap().labels.contains_key("mine"), is_freed);
    }
    assert!(free_label(&Mutex::new(queue()), "of nobody", || false));
}

/// Two clients ask for a label whose snapshot was removed. The first one gets it while the second one
/// waits for the catalog, which does not know the first one's checkpoint yet. That checkpoint may
/// even become stable before the second one's answer arrives.
#[test]
fn a_label_that_another_checkpoint_got_while_the_catalog_was_asked_is_not_freed() {
    for still_waits in [true, false] {
        let queue = Mutex::new(queue());
        let second = free_label(&queue, "mine", || {
            assert!(free_label(&queue, "mine", || false), "the first client frees the label");
            let mut queue = queue.lock().unwrap();
            queue.labels.insert("mine".into(), 7);
            queue.commits.extend(still_waits.then(|| accepted(7)));
            false
        });
        assert!(!second, "still waits: {still_waits}");
        assert_eq!(queue.lock().unwrap().labels["mine"], 7);
    }
}

#[test]
fn a_failure_does_not_free_the_label_of_another_checkpoint() {
    let mut queue = queue();
    queue.failed(&labelled(3), "the label is in use", Ending::Failed);
    assert_eq!(queue.labels["mine"], 2);
}

#[test]
fn the_label_of_a_failed_checkpoint_is_free_only_if_nobody_published_it() {
    for (ending, is_free) in
        [(Ending::Published, false), (Ending::Unrecorded, false), (Ending::Failed, true)]
    {
        let mut queue = queue();
        queue.failed(&labelled(2), "a reason", ending);
        assert_eq!(!queue.labels.contains_key("mine"), is_free, "{ending:?}");
        assert_eq!(queue.unrecorded.len(), usize::from(ending == Ending::Unrecorded));
    }
}

#[test]
fn a_failure_that_is_recorded_later_frees_the_label_then() {
    let mut queue = queue();
    for ending in [Ending::Unrecorded, Ending::Unrecorded, Ending::Failed] {
        assert!(queue.labels.contains_key("mine"));
        queue.failed(&labelled(2), "a reason", ending);
    }
    assert!(queue.labels.is_empty() && queue.unrecorded.is_empty());
}

/// The answer to a publication may be lost. Then the checkpoint fails here although the catalog has
/// its snapshot.
#[test]
fn a_snapshot_that_was_published_keeps_its_label_whatever_this_process_thinks_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("dir:{}", dir.path().join("repository").display());
    let repository = Repository::open_or_create(&url).unwrap();
    let geometry = Geometry::new(1 << 20, 64 << 10).unwrap();
    let name = "vm1".parse().unwrap();
    let first = repository.publish_image(&name, geometry, &Root::default(), 0, 0).unwrap();
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([1; 16]), "/m").unwrap();
    let attachment = repository.attach(&owner, &first, Mode::ReadWrite).unwrap();
    attachment.reserve(3).unwrap();
    let told = attachment.fail(2, "never announced");
    assert_eq!(Ending::of_failure(&told), Ending::Failed, "{told:?}");
    let commit = attachment.begin(&labelled(3)).unwrap();
    commit.publish_tree(&Root::default(), 0, 0).unwrap();
    let told = attachment.fail(3, "the answer was lost");
    assert_eq!(Ending::of_failure(&told), Ending::Published, "{told:?}");
    let unlabelled = NewSnapshot { label: None, ..labelled(4) };
    attachment.begin(&unlabelled).unwrap();
    let told = attachment.fail(4, "it is only announced");
    assert_eq!(Ending::of_failure(&told), Ending::Failed, "{told:?}");
    let told = Err(Error::CatalogRebuilt { image: "vm1".into(), mirror: "m".into() });
    assert_eq!(Ending::of_failure(&told), Ending::Unrecorded);
}
