//! The lease of an image's writer, and the operations of the writer.

use std::process::{Command, Stdio};

use crate::documents::for_each_document_store;
use crate::support::{TestRepository, name, new_snapshot, owner, write};
use cairn_store::{
    Attachment, Error, ErrorKind, LockedFile, MAX_RESERVED, MirrorId, MirrorOwner, MirrorParent,
    Mode, NewSnapshot, Result, Root, SnapshotRef, SnapshotState, boot_id,
};

for_each_document_store!(
    a_checkpoint_is_pending_then_stable_and_becomes_the_parent,
    the_parent_of_a_published_snapshot_is_the_one_published_before_it,
    a_second_writer_is_refused_and_the_error_names_the_holder,
    readers_do_not_need_the_lease,
    a_fenced_writer_can_change_nothing,
    an_expired_lease_that_no_other_writer_acquired_can_be_renewed,
    the_lease_of_a_dead_process_of_this_boot_is_free_at_once,
    the_lease_of_another_host_holds_until_it_expires,
    the_lock_of_a_mirror_passes_its_lease_within_one_boot_and_no_copy_does,
    a_mirror_that_is_attached_again_keeps_its_parent,
    an_older_copy_of_a_mirror_is_refused,
    a_clean_stop_leaves_no_gap_in_the_numbers,
    numbers_that_were_used_or_skipped_are_not_returned,
    a_restarted_mirror_continues_with_its_unused_numbers,
    numbers_that_were_not_given_back_are_found_by_the_id_of_their_reservation,
    a_copy_of_a_mirror_does_not_use_the_numbers_of_another_copy,
    numbers_that_were_returned_or_are_of_another_image_are_not_resumed,
    only_reserved_numbers_and_free_labels_can_be_announced,
    the_requests_of_a_writer_are_bounded,
    a_restarted_writer_may_repeat_its_last_steps,
    an_image_in_use_cannot_be_removed,
    an_image_with_many_mirrors_can_be_removed,
    a_forgotten_mirror_frees_its_image,
    a_removed_snapshot_cannot_be_attached_but_its_mirrors_keep_it,
    a_mirror_is_attached_by_a_process_of_this_boot,
);

fn kind<T>(result: Result<T>) -> ErrorKind {
    result.err().expect("it is refused").kind()
}

fn publish(attachment: &Attachment, root: &Root) -> u64 {
    let number = attachment.reserve(1).unwrap().start;
    attachment.begin(&new_snapshot(number)).unwrap();
    attachment.announced(number).publish_tree(root, 0, 0).unwrap().number
}

fn a_checkpoint_is_pending_then_stable_and_becomes_the_parent(test: &TestRepository) {
    let first = test.image("a");
    let attachment = test.attach(1, &first).unwrap();
    assert_eq!(attachment.parent(), (1, Root(None)));
    assert_eq!(attachment.reserve(4).unwrap(), 2..6);

    let label = Some("before-upgrade".to_owned());
    attachment.begin(&NewSnapshot { label, ..new_snapshot(2) }).unwrap();
    let at: SnapshotRef = "a@before-upgrade".parse().unwrap();
    assert_eq!(test.repository.catalog().resolve(&at).unwrap().state, SnapshotState::Pending);

    let root = write(&test.repository, &first.root, &[(1, 1)]);
    let snapshot = attachment.announced(2).publish_tree(&root, 111, 222).unwrap();
    assert_eq!(test.repository.catalog().resolve(&at).unwrap(), snapshot);
    assert_eq!((snapshot.root, snapshot.parent), (root, Some(1)));
    assert_eq!((snapshot.stored_bytes, snapshot.dirty_bytes, snapshot.pause_us), (111, 222, 12));
    assert_eq!(snapshot.mirror, Some(owner(1).id));
    assert_eq!(attachment.parent(), (2, root));
    let mirror = test.repository.catalog().mirror(&owner(1).id).unwrap().unwrap();
    assert_eq!((mirror.parent, mirror.root, mirror.mode), (2, root, Mode::ReadWrite));
}

fn the_parent_of_a_published_snapshot_is_the_one_published_before_it(test: &TestRepository) {
    let attachment = test.attach(1, &test.image("a")).unwrap();
    attachment.reserve(2).unwrap();
    attachment.begin(&new_snapshot(2)).unwrap();
    attachment.begin(&new_snapshot(3)).unwrap();
    attachment.announced(2).publish_tree(&Root::default(), 0, 0).unwrap();
    assert_eq!(
        attachment.announced(3).publish_tree(&Root::default(), 0, 0).unwrap().parent,
        Some(2)
    );
}

fn a_second_writer_is_refused_and_the_error_names_the_holder(test: &TestRepository) {
    let first = test.image("a");
    let _holder = test.attach(1, &first).unwrap();
    // The process of the other mirror is another one, which is alive.
    let mut child = Command::new("sleep").arg("60").stdout(Stdio::null()).spawn().unwrap();
    let other = MirrorOwner { pid: child.id(), ..owner(2) };
    let error = test.repository.attach(&other, &first, Mode::ReadWrite).err().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    let message = error.to_string();
    for part in ["'a'", "/mirrors/1", &owner(1).host, &std::process::id().to_string(), "stop"] {
        assert!(message.contains(part), "{message} lacks {part}");
    }
}

fn readers_do_not_need_the_lease(test: &TestRepository) {
    let first = test.image("a");
    let _writer = test.attach(1, &first).unwrap();
    let reader = test.repository.attach(&owner(2), &first, Mode::ReadOnly).unwrap();
    reader.renew().unwrap();
    reader.release(None).unwrap();
    assert_eq!(kind(reader.reserve(1)), ErrorKind::Invalid);
    assert_eq!(kind(reader.announced(2).publish_tree(&Root::default(), 0, 0)), ErrorKind::Invalid);
    reader.detach().unwrap();
    assert!(test.repository.catalog().mirror(&owner(2).id).unwrap().is_none());
}

fn a_fenced_writer_can_change_nothing(test: &TestRepository) {
    let first = test.image("a");
    let old = test.attach(1, &first).unwrap();
    let number = old.reserve(2).unwrap().start;
    old.begin(&new_snapshot(number)).unwrap();
    test.expire_lease();
    let new = test.attach(2, &first).unwrap();

    let fenced = |result: Result<()>| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Fenced { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::Conflict);
    };
    fenced(old.announced(number).publish_tree(&Root::default(), 0, 0).map(drop));
    fenced(old.reserve(1).map(drop));
    fenced(old.renew().map(drop));
    fenced(old.begin(&new_snapshot(number + 1)).map(drop));
    fenced(old.fail(number, "x"));
    fenced(old.release(Some(2..4)));
    fenced(old.detach());
    assert_eq!(publish(&new, &Root::default()), 4);
}

fn an_expired_lease_that_no_other_writer_acquired_can_be_renewed(test: &TestRepository) {
    let attachment = test.attach(1, &test.image("a")).unwrap();
    test.expire_lease();
    assert_eq!(test.repository.catalog().mirrors().unwrap()[0].writer, None);
    attachment.renew().unwrap();
    assert_eq!(test.repository.catalog().mirrors().unwrap()[0].writer, Some(std::process::id()));
}

fn the_lease_of_a_dead_process_of_this_boot_is_free_at_once(test: &TestRepository) {
    let first = test.image("a");
    let old = test.attach(1, &first).unwrap();
    test.end_holder(None);
    let new = test.attach(2, &first).unwrap();
    assert_eq!(kind(old.renew()), ErrorKind::Conflict);
    new.renew().unwrap();
}

fn the_lease_of_another_host_holds_until_it_expires(test: &TestRepository) {
    let first = test.image("a");
    test.attach(1, &first).unwrap();
    test.end_holder(Some("elsewhere"));
    assert_eq!(kind(test.attach(2, &first)), ErrorKind::Conflict);
    assert_eq!(
        kind(test.attach(1, &first)),
        ErrorKind::Conflict,
        "the same mirror, attached from this host"
    );
    test.expire_lease();
    test.attach(1, &first).unwrap();
}

fn the_lock_of_a_mirror_passes_its_lease_within_one_boot_and_no_copy_does(test: &TestRepository) {
    let first = test.image("a");
    let locked =
        |mirror, device, inode| owner(mirror).with_lock(Some(LockedFile { device, inode }));
    let attach = |owner: &MirrorOwner| test.repository.attach(owner, &first, Mode::ReadWrite);
    let old = attach(&locked(1, 5, 6)).unwrap();
    test.edit_holder("pid_namespace", 1.into());
    for other in [locked(1, 5, 7), locked(1, 4, 6), owner(1), locked(2, 5, 6)] {
        assert_eq!(kind(attach(&other)), ErrorKind::Conflict, "{other:?}");
    }
    let new = attach(&locked(1, 5, 6)).unwrap();
    assert_eq!(kind(old.renew()), ErrorKind::Conflict, "the fence is another");
    new.renew().unwrap();
    // Another kernel may have another file with the same numbers.
    test.edit_holder("boot_id", "elsewhere".into());
    assert_eq!(kind(attach(&locked(1, 5, 6))), ErrorKind::Conflict);
    // A holder without a lock proves nothing by having none.
    test.expire_lease();
    attach(&owner(1)).unwrap();
    test.edit_holder("pid_namespace", 1.into());
    assert_eq!(kind(attach(&owner(1))), ErrorKind::Conflict);
}

fn a_mirror_that_is_attached_again_keeps_its_parent(test: &TestRepository) {
    let first = test.image("a");
    let attachment = test.attach(1, &first).unwrap();
    let root = write(&test.repository, &first.root, &[(1, 1)]);
    publish(&attachment, &root);
    attachment.release(None).unwrap();

    let again = test.attach(1, &first).unwrap();
    assert_eq!(again.parent(), (2, root));
    test.image("b");
    let other = test.repository.catalog().resolve(&"b".parse().unwrap()).unwrap();
    assert_eq!(kind(test.attach(1, &other)), ErrorKind::Invalid, "a mirror has one image");
}

/// The files of a mirror name snapshot 1 as its parent. Meanwhile the mirror has published snapshot 2.
fn an_older_copy_of_a_mirror_is_refused(test: &TestRepository) {
    let first = test.image("a");
    let attachment = test.attach(1, &first).unwrap();
    let copy = attachment.standing();
    publish(&attachment, &Root::default());
    let current = attachment.standing();
    attachment.release(None).unwrap();
    let attach = |parent: MirrorParent| {
        test.repository.attach_again(&owner(1), &first, Mode::ReadWrite, &parent)
    };
    let refused = attach(copy).err().expect("it is refused");
    assert!(matches!(refused, Error::OlderMirror { .. }), "{refused}");
    assert_eq!(refused.kind(), ErrorKind::Conflict);
    let message = refused.to_string();
    assert!(message.contains("a@1") && message.contains("a@2"), "{message}");
    // The process died between the publication and its record in the files.
    for parent in [MirrorParent { announced: 2, ..copy }, current] {
        let attachment = attach(parent).unwrap();
        assert_eq!(attachment.parent().0, 2);
        attachment.release(None).unwrap();
    }
}

fn a_clean_stop_leaves_no_gap_in_the_numbers(test: &TestRepository) {
    let first = test.image("a");
    let attachment = test.attach(1, &first).unwrap();
    assert_eq!(attachment.reserve(16).unwrap(), 2..18);
    attachment.begin(&new_snapshot(2)).unwrap();
    attachment.announced(2).publish_tree(&Root::default(), 0, 0).unwrap();
    attachment.release(Some(3..18)).unwrap();
    assert_eq!(kind(attachment.renew()), ErrorKind::Conflict);

    let other = test.attach(2, &first).unwrap();
    assert_eq!(other.reserve(1).unwrap(), 3..4);
}

fn numbers_that_were_used_or_skipped_are_not_returned(test: &TestRepository) {
    let first = test.image("a");
    let attachment = test.attach(1, &first).unwrap();
    attachment.reserve(4).unwrap();
    attachment.begin(&new_snapshot(5)).unwrap();
    attachment.release(Some(3..6)).unwrap();
    let attachment = test.attach(1, &first).unwrap();
    assert_eq!(attachment.reserve(4).unwrap(), 6..10);
    attachment.release(Some(6..8)).unwrap();
    assert_eq!(test.attach(1, &first).unwrap().reserve(1).unwrap(), 10..11);
}

fn a_restarted_mirror_continues_with_its_unused_numbers(test: &TestRepository) {
    let first = test.image("a");
    assert_eq!(test.attach(1, &first).unwrap().reserve(4).unwrap(), 2..6);
    let attachment = test.attach(1, &first).unwrap();
    assert_eq!(attachment.resume(&(3..6), None).unwrap(), 3..6);
    assert_eq!(attachment.reserve(2).unwrap(), 6..8, "they follow the unused numbers");
    attachment.begin(&new_snapshot(3)).unwrap();
    let attachment = test.attach(1, &first).unwrap();
    assert_eq!(attachment.resume(&(4..8), None).unwrap(), 4..8);
    // An announced number counts as used, whatever the mirror has recorded.
    assert_eq!(attachment.resume(&(2..8), None).unwrap(), 4..8);
    // A process may be killed after a reservation and before it has recorded the numbers.
    attachment.reserve(2).unwrap();
    let attachment = test.attach(1, &first).unwrap();
    assert_eq!(attachment.resume(&(5..8), None).unwrap(), 5..10);
    attachment.reserve(2).unwrap();
    let attachment = test.attach(1, &first).unwrap();
    assert_eq!(
        attachment.resume(&(10..10), None).unwrap(),
        10..12,
        "all recorded numbers are used"
    );
    // Another mirror then takes a snapshot.
    attachment.release(None).unwrap();
    let other = test.attach(2, &first).unwrap();
    assert_eq!(publish(&other, &Root::default()), 12);
    other.release(None).unwrap();
    assert_eq!(test.attach(1, &first).unwrap().resume(&(10..12), None).unwrap(), 0..0);
}

/// A process that stops records that no number is left, and then gives its numbers back. It may be
/// killed before that, after it, or after others have used them.
fn numbers_that_were_not_given_back_are_found_by_the_id_of_their_reservation(
    test: &TestRepository,
) {
    let first = test.image("a");
    let attach = || test.attach(1, &first).unwrap();
    let stopping = attach();
    assert_eq!(stopping.reserve(4).unwrap(), 2..6);
    let id = Some(stopping.reservation());
    let next = attach();
    assert_eq!(next.resume(&(2..2), id).unwrap(), 2..6, "it was killed before that");
    assert_eq!(next.reserve(2).unwrap(), 6..8);
    assert_eq!(Some(next.reservation()), id, "they extend the same reservation");
    next.release(Some(2..8)).unwrap();
    let next = attach();
    assert_eq!(next.resume(&(2..2), id).unwrap(), 0..0, "it was killed after that");
    let own = Some(next.reservation());
    assert_ne!(own, id);
    assert_eq!(next.reserve(4).unwrap(), 2..6, "they are free");
    assert_eq!(Some(next.reservation()), own, "it is known before the reservation");
    let next = attach();
    assert_eq!(next.resume(&(2..2), own).unwrap(), 2..6, "it was killed before it recorded them");
    assert_eq!(attach().resume(&(2..2), id).unwrap(), 0..0, "they may have been used");
}

/// A copy of the mirror's directory is used on another host, without the live directory. Then the
/// original is used again, with its live directory.
fn a_copy_of_a_mirror_does_not_use_the_numbers_of_another_copy(test: &TestRepository) {
    let first = test.image("a");
    let attach = || test.attach(1, &first).unwrap();
    let here = attach();
    assert_eq!(here.resume(&(0..0), None).unwrap(), 0..0);
    assert_eq!(here.reserve(4).unwrap(), 2..6);
    let there = attach();
    assert_eq!(there.resume(&(0..0), None).unwrap(), 0..0, "it is unknown which of them were used");
    assert_eq!(there.reserve(4).unwrap(), 6..10);
    let here = attach();
    assert_eq!(here.resume(&(3..6), None).unwrap(), 0..0, "later numbers may have been used");
    assert_eq!(here.reserve(4).unwrap(), 10..14);
    assert_eq!(attach().resume(&(7..10), None).unwrap(), 0..0);
}

fn numbers_that_were_returned_or_are_of_another_image_are_not_resumed(test: &TestRepository) {
    let first = test.image("a");
    let attachment = test.attach(1, &first).unwrap();
    assert_eq!(attachment.reserve(8).unwrap(), 2..10);
    attachment.release(Some(3..10)).unwrap();
    let other = test.attach(2, &first).unwrap();
    assert_eq!(other.reserve(8).unwrap(), 3..11);
    other.release(None).unwrap();
    let attachment = test.attach(1, &first).unwrap();
    assert_eq!(attachment.resume(&(3..10), None).unwrap(), 0..0);
    assert_eq!(attachment.reserve(1).unwrap(), 11..12);

    attachment.release(None).unwrap();
    test.repository.remove_image(&name("a"), true).unwrap();
    let first = test.image("a");
    let attachment = test.attach(1, &first).unwrap();
    attachment.reserve(32).unwrap();
    attachment.release(None).unwrap();
    let attachment = test.attach(1, &first).unwrap();
    assert_eq!(attachment.resume(&(3..10), None).unwrap(), 0..0, "an image of the same name");
    let reader = test.repository.attach(&owner(2), &first, Mode::ReadOnly).unwrap();
    assert_eq!(kind(reader.resume(&(3..10), None)), ErrorKind::Invalid);
}

fn only_reserved_numbers_and_free_labels_can_be_announced(test: &TestRepository) {
    let attachment = test.attach(1, &test.image("a")).unwrap();
    assert_eq!(kind(attachment.begin(&new_snapshot(2))), ErrorKind::Invalid);
    attachment.reserve(4).unwrap();
    let labelled =
        |number, label: &str| NewSnapshot { label: Some(label.into()), ..new_snapshot(number) };
    assert_eq!(kind(attachment.begin(&labelled(2, "7"))), ErrorKind::Invalid);
    assert_eq!(kind(attachment.begin(&new_snapshot(1))), ErrorKind::Conflict);
    attachment.begin(&labelled(2, "x")).unwrap();
    assert_eq!(kind(attachment.begin(&labelled(3, "x"))), ErrorKind::Conflict);
    attachment.fail(2, "no space").unwrap();
    attachment.begin(&labelled(3, "x")).unwrap();
    let found = test.repository.catalog().resolve(&"a@x".parse().unwrap()).unwrap();
    assert_eq!(found.number, 3, "a failed snapshot frees its label");
}

fn the_requests_of_a_writer_are_bounded(test: &TestRepository) {
    let attachment = test.attach(1, &test.image("a")).unwrap();
    for count in [0, MAX_RESERVED + 1, u64::MAX] {
        assert_eq!(kind(attachment.reserve(count)), ErrorKind::Invalid, "{count}");
    }
    let number = attachment.reserve(1).unwrap().start;
    attachment.begin(&new_snapshot(number)).unwrap();
    attachment.fail(number, &"é".repeat(5000)).unwrap();
    let failed = test.repository.catalog().resolve(&"a@2".parse().unwrap()).unwrap();
    assert_eq!(failed.reason.unwrap().chars().count(), 1000);
}

fn a_restarted_writer_may_repeat_its_last_steps(test: &TestRepository) {
    let first = test.image("a");
    let root = write(&test.repository, &first.root, &[(1, 1)]);
    let attachment = test.attach(1, &first).unwrap();
    attachment.reserve(3).unwrap();
    attachment.begin(&new_snapshot(2)).unwrap();
    drop(attachment);

    let attachment = test.attach(1, &first).unwrap();
    attachment.begin(&new_snapshot(2)).unwrap();
    let published = attachment.announced(2).publish_tree(&root, 0, 0).unwrap();
    assert_eq!(attachment.announced(2).publish_tree(&root, 0, 0).unwrap(), published);
    assert_eq!(
        kind(attachment.announced(2).publish_tree(&Root::default(), 0, 0)),
        ErrorKind::Conflict
    );
    attachment.begin(&new_snapshot(2)).expect("the answer to its publication may have been lost");
    assert_eq!(
        test.repository.catalog().snapshots(&name("a")).unwrap()[1],
        published,
        "nothing changes"
    );
    assert_eq!(kind(attachment.fail(2, "x")), ErrorKind::Conflict);
    assert_eq!(kind(attachment.announced(3).publish_tree(&root, 0, 0)), ErrorKind::NotFound);
}

fn an_image_in_use_cannot_be_removed(test: &TestRepository) {
    let first = test.image("a");
    let attachment = test.attach(1, &first).unwrap();
    let remove = |force| test.repository.remove_image(&name("a"), force);
    assert!(matches!(remove(true), Err(Error::Leased { .. })), "never under a live writer");
    assert_eq!(kind(test.repository.forget_mirror(&owner(1).id)), ErrorKind::Conflict);

    attachment.release(None).unwrap();
    let error = remove(false).unwrap_err();
    assert!(matches!(error, Error::Referenced { .. }), "{error}");
    assert!(error.to_string().contains("/mirrors/1"), "{error}");
    remove(true).unwrap();
    assert!(test.repository.catalog().mirrors().unwrap().is_empty());
}

/// More mirrors than a change of etcd may have operations.
fn an_image_with_many_mirrors_can_be_removed(test: &TestRepository) {
    let (first, other) = (test.image("a"), test.image("b"));
    for mirror in 1..=140 {
        let reader = test.repository.attach(&owner(mirror), &first, Mode::ReadOnly).unwrap();
        reader.release(None).unwrap();
    }
    let kept = test.repository.attach(&owner(200), &other, Mode::ReadOnly).unwrap();
    test.repository.remove_image(&name("a"), true).unwrap();
    let left = test.repository.catalog().mirrors().unwrap();
    assert_eq!(left.iter().map(|mirror| mirror.id).collect::<Vec<_>>(), [owner(200).id]);
    kept.detach().unwrap();
}

fn a_forgotten_mirror_frees_its_image(test: &TestRepository) {
    test.attach(1, &test.image("a")).unwrap().release(None).unwrap();
    test.repository.forget_mirror(&owner(1).id).unwrap();
    test.repository.remove_image(&name("a"), false).unwrap();
    let unknown = MirrorId::from_bytes([9; 16]);
    assert_eq!(kind(test.repository.forget_mirror(&unknown)), ErrorKind::NotFound);
}

fn a_removed_snapshot_cannot_be_attached_but_its_mirrors_keep_it(test: &TestRepository) {
    let first = test.image("a");
    let attachment = test.attach(1, &first).unwrap();
    publish(&attachment, &Root::default());
    attachment.release(None).unwrap();
    test.repository.remove_snapshot(&first.name()).unwrap();
    assert_eq!(kind(test.attach(2, &first)), ErrorKind::NotFound);
    test.attach(1, &first).unwrap();
}

fn a_mirror_is_attached_by_a_process_of_this_boot(test: &TestRepository) {
    let first = test.image("a");
    let foreign = MirrorOwner { boot_id: "elsewhere".into(), ..owner(1) };
    assert_eq!(kind(test.repository.attach(&foreign, &first, Mode::ReadWrite)), ErrorKind::Invalid);
    assert_eq!(owner(1).boot_id, boot_id().unwrap());
}
