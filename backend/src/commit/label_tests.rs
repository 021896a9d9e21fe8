//! When the label of a checkpoint is free again.

use std::collections::{HashSet, VecDeque};

use cairn_store::{
    Consistency, Error, Geometry, MirrorId, MirrorOwner, Mode, NewSnapshot, Repository, Root,
};

use super::{CommitQueue, Ending};

fn labelled(number: u64) -> NewSnapshot {
    NewSnapshot {
        number,
        label: Some("mine".into()),
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
        labels: HashSet::from(["mine".to_owned()]),
        unrecorded: Vec::new(),
        closed: false,
    }
}

#[test]
fn the_label_of_a_failed_checkpoint_is_free_only_if_nobody_published_it() {
    for (ending, is_free) in
        [(Ending::Published, false), (Ending::Unrecorded, false), (Ending::Failed, true)]
    {
        let mut queue = queue();
        queue.failed(&labelled(2), "a reason", ending);
        assert_eq!(!queue.labels.contains("mine"), is_free, "{ending:?}");
        assert_eq!(queue.unrecorded.len(), usize::from(ending == Ending::Unrecorded));
    }
}

#[test]
fn a_failure_that_is_recorded_later_frees_the_label_then() {
    let mut queue = queue();
    for ending in [Ending::Unrecorded, Ending::Unrecorded, Ending::Failed] {
        assert!(queue.labels.contains("mine"));
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
