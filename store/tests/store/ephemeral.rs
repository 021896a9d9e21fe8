//! Ephemeral mirrors: their reference ends when no process renews it, and nothing that needed it is
//! published or served wrong afterwards.

use cairn_store::maintenance::collection::{CollectionOptions, collect};
use cairn_store::{
    Attachment, ChunkId, ChunkIndex, Error, ErrorKind, MirrorOwner, Mode, Result, Root, Snapshot,
};
use std::collections::BTreeMap;

use crate::documents::for_each_document_store;
use crate::support::{TestRepository, assert_holds, content, new_snapshot, owner, write};

for_each_document_store!(
    an_ephemeral_mirror_is_forgotten_when_it_stops,
    an_ephemeral_mirror_holds_its_root_as_long_as_its_reference,
    a_writer_that_was_away_publishes_what_is_complete_and_only_after_a_renewal,
    a_writer_that_was_away_and_lost_its_parent_publishes_nothing,
    a_mirror_whose_reference_has_ended_is_attached_again_if_its_parent_exists,
    a_removed_checkpoint_does_not_return_through_a_mirror_that_was_away,
    a_reader_that_was_away_refers_to_its_snapshot_again,
);

fn ephemeral(mirror: u8) -> MirrorOwner {
    owner(mirror).with_ephemeral(true)
}

fn attach(test: &TestRepository, snapshot: &Snapshot) -> Attachment {
    test.repository.attach(&ephemeral(1), snapshot, Mode::ReadWrite).unwrap()
}

/// Publishes a checkpoint with one more chunk.
fn checkpoint(test: &TestRepository, attachment: &Attachment, chunk: u64) -> Snapshot {
    let number = attachment.reserve(1).unwrap().start;
    let commit = attachment.begin(&new_snapshot(number)).unwrap();
    let root = write(&test.repository, &attachment.parent().1, &[(chunk, chunk)]);
    commit.publish_tree(&root, 0, 0).unwrap()
}

/// Deletes what nothing refers to. Returns the number of deleted blobs.
fn collected(test: &TestRepository) -> u64 {
    collect(&test.again(), &CollectionOptions::default(), &|_| ()).unwrap().freed.objects
}

fn kind<T>(result: Result<T>) -> ErrorKind {
    result.err().expect("it is refused").kind()
}

fn has_mirror(test: &TestRepository) -> bool {
    test.repository.catalog().mirror(&owner(1).id).unwrap().is_some()
}

fn an_ephemeral_mirror_is_forgotten_when_it_stops(test: &TestRepository) {
    let first = test.image("a");
    let attachment = attach(test, &first);
    checkpoint(test, &attachment, 1);
    let listed = test.repository.catalog().mirror(&owner(1).id).unwrap().unwrap();
    assert!(listed.is_ephemeral && listed.writer.is_some());
    let unused = attachment.reserve(4).unwrap();
    attachment.release(Some(unused.clone())).unwrap();
    assert!(!has_mirror(test));
    // The next one gets the lease and the unused numbers.
    let next = test.attach(2, &first).unwrap();
    assert_eq!(next.reserve(1).unwrap().start, unused.start);

    let reader = test.repository.attach(&ephemeral(1), &first, Mode::ReadOnly).unwrap();
    assert!(has_mirror(test));
    reader.release(None).unwrap();
    assert!(!has_mirror(test));
}

fn an_ephemeral_mirror_holds_its_root_as_long_as_its_reference(test: &TestRepository) {
    let first = test.image("a");
    let attachment = attach(test, &first);
    let snapshot = checkpoint(test, &attachment, 1);
    test.repository.remove_snapshot(&snapshot.name()).unwrap();
    assert_eq!(collected(test), 0);
    attachment.renew().unwrap();
    test.expire_mirror(1);
    // A chunk and the nodes above it.
    assert!(collected(test) >= 2);
}

/// Its process was suspended while it stored a checkpoint. The reference ended, and a collection ran.
fn a_writer_that_was_away_publishes_what_is_complete_and_only_after_a_renewal(
    test: &TestRepository,
) {
    let first = test.image("a");
    let attachment = attach(test, &first);
    let parent = checkpoint(test, &attachment, 1);
    let number = attachment.reserve(2).unwrap().start;
    let commit = attachment.begin(&new_snapshot(number)).unwrap();
    let put = |seed: u64| test.repository.put_chunk(&content(seed)).unwrap().id;
    let changes: BTreeMap<ChunkIndex, Option<ChunkId>> =
        [(ChunkIndex(2), Some(put(2))), (ChunkIndex(3), Some(put(3)))].into();
    test.repository.flush().unwrap();
    test.expire_mirror(1);
    assert!(collected(test) >= 2, "nothing protects the chunks");

    let local = |at: ChunkIndex, buffer: &mut [u8]| {
        buffer.copy_from_slice(&content(at.0));
        true
    };
    let error = commit.publish(&changes, 0, &local).unwrap_err();
    assert!(matches!(error, Error::Unreferenced { .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "the caller tries again");
    let others = [attachment.begin(&new_snapshot(number + 1)).map(drop), {
        attachment.reserve(1).map(drop)
    }];
    others.into_iter().for_each(|other| assert_eq!(kind(other), ErrorKind::Unavailable));
    attachment.renew().unwrap();
    // What the collection has deleted comes from the local copy. Without one, nothing is published.
    let without = commit.publish(&changes, 0, &|_, _| false);
    assert!(matches!(without, Err(Error::ContentLost { .. })), "{without:?}");
    let published = commit.publish(&changes, 0, &local).unwrap();
    assert_eq!(published.parent, Some(parent.number));
    assert_holds(&test.again(), &published, &[(1, 1), (2, 2), (3, 3)]);
    assert_eq!(collected(test), 0);
    assert_holds(&test.again(), &published, &[(1, 1), (2, 2), (3, 3)]);
}

fn a_writer_that_was_away_and_lost_its_parent_publishes_nothing(test: &TestRepository) {
    let first = test.image("a");
    let attachment = attach(test, &first);
    let parent = checkpoint(test, &attachment, 1);
    let number = attachment.reserve(1).unwrap().start;
    let commit = attachment.begin(&new_snapshot(number)).unwrap();
    let root = write(&test.repository, &attachment.parent().1, &[(2, 2)]);
    test.repository.remove_snapshot(&parent.name()).unwrap();
    test.expire_mirror(1);
    assert!(collected(test) >= 2);

    let refused = |result: Result<()>| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        assert!(error.to_string().contains("a@2, which it continues, was removed"), "{error}");
    };
    refused(attachment.renew().map(drop));
    assert_eq!(kind(commit.publish_tree(&root, 0, 0)), ErrorKind::Unavailable);
    // A read finds an error, never other content.
    let lost = test.repository.read_chunk(&ChunkId::of(&content(1)), &mut content(0));
    assert!(lost.is_err());
    // Nor is it attached again.
    let standing = attachment.standing();
    drop(attachment);
    let again = test.repository.attach_again(&ephemeral(1), &first, Mode::ReadWrite, &standing);
    refused(again.map(drop));
    assert!(!has_mirror(test));
    // What it had announced fails, and another mirror goes on.
    test.expire_lease();
    let next = test.attach(2, &first).unwrap();
    next.fail(number, "its process died").unwrap();
    checkpoint(test, &next, 5);
}

fn a_mirror_whose_reference_has_ended_is_attached_again_if_its_parent_exists(
    test: &TestRepository,
) {
    let first = test.image("a");
    let attachment = attach(test, &first);
    let parent = checkpoint(test, &attachment, 1);
    let standing = attachment.standing();
    drop(attachment);
    test.expire_mirror(1);
    let again = test.repository.attach_again(&ephemeral(1), &first, Mode::ReadWrite, &standing);
    let again = again.unwrap();
    assert_eq!(again.parent(), (parent.number, parent.root));
    let next = checkpoint(test, &again, 2);
    assert_holds(&test.again(), &next, &[(1, 1), (2, 2)]);
}

fn a_removed_checkpoint_does_not_return_through_a_mirror_that_was_away(test: &TestRepository) {
    let first = test.image("a");
    let attachment = attach(test, &first);
    let number = attachment.reserve(2).unwrap().start;
    attachment.begin(&new_snapshot(number)).unwrap();
    test.expire_lease();
    test.expire_mirror(1);
    test.repository.remove_snapshot(&format!("a@{number}").parse().unwrap()).unwrap();
    attachment.renew().unwrap();
    assert_eq!(kind(attachment.begin(&new_snapshot(number))), ErrorKind::Conflict);
    let standing = attachment.standing();
    test.expire_mirror(1);
    let again = test.repository.attach_again(&ephemeral(1), &first, Mode::ReadWrite, &standing);
    let again = again.unwrap();
    assert_eq!(kind(again.begin(&new_snapshot(number))), ErrorKind::Conflict);
    // A number that was never announced is not a removed one.
    again.begin(&new_snapshot(number + 1)).unwrap();
}

fn a_reader_that_was_away_refers_to_its_snapshot_again(test: &TestRepository) {
    let first = test.image("a");
    let writer = test.attach(2, &first).unwrap();
    let snapshot = checkpoint(test, &writer, 1);
    let reader = test.repository.attach(&ephemeral(1), &snapshot, Mode::ReadOnly).unwrap();
    test.expire_mirror(1);
    reader.renew().unwrap();
    assert!(has_mirror(test));
    let third = checkpoint(test, &writer, 2);
    writer.release(None).unwrap();
    test.expire_mirror(1);
    test.repository.remove_snapshot(&snapshot.name()).unwrap();
    let error = reader.renew().unwrap_err();
    assert!(matches!(error, Error::ReferenceEnded { .. }), "{error}");
    assert_holds(&test.again(), &third, &[(1, 1), (2, 2)]);
    assert_eq!(attachment_root(&reader), snapshot.root);
}

fn attachment_root(attachment: &Attachment) -> Root {
    attachment.parent().1
}
