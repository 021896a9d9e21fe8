//! Named interleavings: on peers, with grace periods, and with processes that are killed.

use std::cell::Cell;
use std::time::Duration;

use super::life::place::Place;
use super::tests::{
    Disk, Site, attach, changes, collect_with, geometry, import, new, put, read, resolve, store,
    store_tree,
};
use super::{CollectionOptions, CollectionProgress, CollectionReport, collect};
use crate::catalog::SpaceHolder;
use crate::collection::CollectionNumber;
use crate::documents::{Change, Query};
use crate::encoding::Redundancy;
use crate::error::ErrorKind;
use crate::name::SnapshotRef;
use crate::repository::Repository;
use crate::repository::attachment::Attachment;
use crate::snapshot::Snapshot;
use crate::tree::Root;

/// A day and an hour, in seconds.
const LONG: u64 = 25 * 3600;

pub(super) fn disk(chunks: impl IntoIterator<Item = (u64, u64)>) -> Disk {
    chunks.into_iter().collect()
}

pub(super) fn collect_now(place: &Place) -> CollectionReport {
    collect(&place.open(), &CollectionOptions::default(), &|_| ()).unwrap()
}

/// Collects with a grace period of a day.
fn collect_with_grace(repository: &Repository) -> CollectionReport {
    let options = CollectionOptions { grace: Duration::from_secs(24 * 3600), ..Default::default() };
    collect(repository, &options, &|_| ()).unwrap()
}

/// Makes all collections so far a day older.
fn wait_a_day(repository: &Repository) {
    let key = "collections";
    let view = repository.documents().read(&[Query::key(key)]).unwrap();
    let mut document: serde_json::Value = view.get(key).unwrap().unwrap();
    for one in document["begun"].as_array_mut().unwrap() {
        one["time"] = (one["time"].as_u64().unwrap() - LONG).into();
    }
    assert!(repository.documents().commit(&Change::default().put(key, &document)).unwrap());
}

/// Everything that is stored is referred to, and the other way round.
fn assert_exact(site: &Site) {
    assert_eq!(site.stored(), site.referred());
}

fn kinds(holders: &[SpaceHolder]) -> Vec<&str> {
    holders.iter().map(|one| one.kind).collect()
}

pub(super) fn checkpoint(repository: &Repository, mirror: &Attachment, change: &Disk) -> Snapshot {
    let number = mirror.reserve(1).unwrap().start;
    let commit = mirror.begin(&new(number)).unwrap();
    put(repository, change);
    commit.publish(&changes(change), 0, &|_, _| false).unwrap()
}

#[test]
fn an_import_outlives_the_grace_period_and_two_collections() {
    let site = Site::new();
    let repository = site.open();
    let all = disk((0..10).map(|at| (at, at + 1)));
    let commit = repository.begin_commit().unwrap();
    put(&repository, &all);
    for _ in 0..2 {
        let report = collect_with_grace(&site.open());
        assert_eq!((report.freed.objects, report.waiting.objects), (0, 10));
        assert_eq!(kinds(&report.holders), ["commit"]);
        wait_a_day(&repository);
    }
    let root = store(&repository, &Root::default(), &all);
    let image = commit.publish_image(&"a".parse().unwrap(), geometry(), &root, 0, 0).unwrap();
    let report = collect_with_grace(&site.open());
    assert_eq!(report.freed.objects, 0);
    assert_eq!(read(&site.open(), &image).unwrap(), all);
    assert_exact(&site);
}

#[test]
fn garbage_goes_with_the_first_collection_after_the_grace_period() {
    let site = Site::new();
    let repository = site.open();
    import(&repository, "b", &disk([(0, 2)]));
    repository.remove_image(&"b".parse().unwrap(), false).unwrap();
    assert_eq!(collect_with_grace(&repository).freed.objects, 0);
    wait_a_day(&repository);
    assert_eq!(collect_with_grace(&repository).freed.objects, 2);
}

/// The host of a mirror is down for a day. The chunks of its layer are in no local file any more.
#[test]
fn a_layer_of_a_dead_process_is_adopted_after_the_grace_period_and_two_collections() {
    for mut place in [Place::Directory(Site::new()), Place::peers()] {
        let (change, content) = (disk([(3, 9)]), disk([(0, 1), (3, 9)]));
        let (base, number) = {
            let repository = place.open();
            let base = import(&repository, "a", &disk([(0, 1)]));
            let attachment = attach(&repository, 1, &base);
            let number = attachment.reserve(1).unwrap().start;
            attachment.begin(&new(number)).unwrap();
            put(&repository, &change);
            (base, number)
        };
        for _ in 0..2 {
            let report = collect_with_grace(&place.open());
            assert_eq!(report.freed.objects, 0);
            assert_eq!(report.holders[0].collection, Some(CollectionNumber(0)));
            wait_a_day(&place.open());
            if let Place::Peers(peers) = &mut place {
                peers.site.peers.iter().for_each(|peer| peer.age(LONG as u32));
                peers.repair();
            }
        }
        let repository = place.open();
        let attachment = attach(&repository, 1, &base);
        let commit = attachment.begin(&new(number)).unwrap();
        commit.mark_unverified();
        let snapshot = commit.publish(&changes(&change), 0, &|_, _| false).unwrap();
        assert_eq!(read(&place.open(), &snapshot).unwrap(), content);
        let report = collect_now(&place);
        assert_eq!((report.holders.len(), report.freed.objects), (0, 0));
        assert_eq!(read(&place.open(), &snapshot).unwrap(), content);
    }
}

/// borg loses data silently here: the writer has learned from the index that the chunk is stored.
#[test]
fn a_writer_with_a_stale_index_stores_again_what_a_killed_collection_removed() {
    let site = Site::new();
    let writer = site.open();
    let base = import(&writer, "a", &disk([(0, 1)]));
    let gone = import(&writer, "b", &disk([(0, 2)]));
    assert_eq!(read(&writer, &gone).unwrap(), disk([(0, 2)]));
    writer.remove_image(&"b".parse().unwrap(), false).unwrap();
    // The collector dies after it has removed the rows, and before it has punched any hole.
    let collector = site.open();
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        collect(&collector, &CollectionOptions::default(), &|progress| {
            if matches!(progress, super::CollectionProgress::Sweeping { freed: 1.., .. }) {
                std::panic::resume_unwind(Box::new("killed"));
            }
        })
    }));
    assert!(died.is_err());
    assert!(read(&site.open(), &gone).is_err());
    let attachment = attach(&writer, 1, &base);
    let number = attachment.reserve(1).unwrap().start;
    let commit = attachment.begin(&new(number)).unwrap();
    let change = disk([(7, 2)]);
    put(&writer, &change);
    let snapshot = commit.publish(&changes(&change), 0, &|_, _| false).unwrap();
    // It gives back the space of what the first one removed.
    site.collect();
    for repository in [&writer, &site.open()] {
        assert_eq!(read(repository, &snapshot).unwrap(), disk([(0, 1), (7, 2)]));
    }
    assert_exact(&site);
}

#[test]
fn a_commit_on_peers_reuses_a_chunk_between_the_mark_and_the_sweep() {
    let place = Place::peers();
    for (is_begun_before, content) in [(true, 2), (false, 3)] {
        let repository = place.open();
        let name = format!("a{content}");
        let base = import(&repository, &name, &disk([(0, 1)]));
        import(&repository, "b", &disk([(0, content)]));
        repository.remove_image(&"b".parse().unwrap(), false).unwrap();
        let attachment = attach(&repository, content as u8, &base);
        let number = attachment.reserve(1).unwrap().start;
        let early = is_begun_before.then(|| attachment.begin(&new(number)).unwrap());
        let change = disk([(7, content)]);
        let report = collect_with(&place.open(), || {
            let late;
            let commit = match &early {
                Some(commit) => commit,
                None => {
                    late = attachment.begin(&new(number)).unwrap();
                    &late
                }
            };
            put(&repository, &change);
            commit.publish(&changes(&change), 0, &|_, _| false).unwrap();
        });
        // The commit that began before holds back all content.
        assert_eq!(report.bound < report.number, is_begun_before, "{report:?}");
        let newest = resolve(&repository, &format!("{name}@2")).unwrap();
        assert_eq!(read(&place.open(), &newest).unwrap(), disk([(0, 1), (7, content)]));
        collect_now(&place);
        assert_eq!(read(&place.open(), &newest).unwrap(), disk([(0, 1), (7, content)]));
    }
}

#[test]
fn a_clone_on_peers_of_a_snapshot_that_is_being_removed_is_complete_or_does_not_exist() {
    let place = Place::peers();
    let repository = place.open();
    let base = import(&repository, "a", &disk([(0, 1)]));
    let mirror = attach(&repository, 1, &base);
    let number = mirror.reserve(1).unwrap().start;
    let commit = mirror.begin(&new(number)).unwrap();
    put(&repository, &disk([(0, 2)]));
    commit.publish(&changes(&disk([(0, 2)])), 0, &|_, _| false).unwrap();
    let source: SnapshotRef = "a@1".parse().unwrap();
    collect_with(&place.open(), || {
        repository.clone_snapshot(&source, &"early".parse().unwrap()).unwrap();
        repository.remove_snapshot(&source).unwrap();
    });
    collect_now(&place);
    assert!(repository.clone_snapshot(&source, &"late".parse().unwrap()).is_err());
    let clone = resolve(&place.open(), "early").unwrap();
    assert_eq!(read(&place.open(), &clone).unwrap(), disk([(0, 1)]));
}

/// The peer has garbage from before, and copies of what is stored while it is down do not reach it.
#[test]
fn a_peer_that_is_down_during_the_mark_is_swept_when_it_is_back() {
    let mut place = Place::peers();
    let repository = place.open();
    let kept = import(&repository, "a", &disk((0..8).map(|at| (at, at + 1))));
    import(&repository, "b", &disk((0..8).map(|at| (at, at + 20))));
    repository.remove_image(&"b".parse().unwrap(), false).unwrap();
    let collector = place.open();
    let Place::Peers(peers) = &mut place else { unreachable!() };
    let at = (0..4).find(|at| peers.site.fragments_of(*at) > 4).unwrap();
    let before = peers.site.fragments_of(at);
    peers.take_away(at);
    let peers = std::cell::RefCell::new(peers);
    let is_back = Cell::new(false);
    let report = collect(&collector, &CollectionOptions::default(), &|progress| {
        // While it marks. The sweep has not begun.
        if matches!(progress, CollectionProgress::Marking { .. }) && !is_back.replace(true) {
            peers.borrow_mut().bring_back(at);
        }
    });
    assert!(is_back.get());
    assert!(report.unwrap().silent.is_empty());
    assert!(peers.borrow().site.fragments_of(at) < before);
    drop(repository);
    assert_eq!(collect_now(&place).freed.objects, 0);
    assert_eq!(read(&place.open(), &kept).unwrap(), disk((0..8).map(|at| (at, at + 1))));
}

/// All peers that have the blobs of a long import are drained before it ends.
#[test]
fn a_sweep_of_drained_peers_keeps_what_a_running_commit_has_stored() {
    let place = Place::peers();
    let Place::Peers(peers) = &place else { unreachable!() };
    let repository = place.open();
    import(&repository, "other", &disk([(0, 50)]));
    let all = disk((0..10).map(|at| (at, at + 1)));
    let commit = repository.begin_commit().unwrap();
    put(&repository, &all);
    peers.site.peers.iter().for_each(|peer| peer.age(LONG as u32));
    (0..4).for_each(|at| peers.drain_for_a_while(at));
    let root = store_tree(&repository, &Root::default(), &all);
    let image = commit.publish_image(&"a".parse().unwrap(), geometry(), &root, 0, 0).unwrap();
    assert_eq!(read(&place.open(), &image).unwrap(), all);
}

#[test]
fn a_prune_goes_on_if_the_records_of_one_image_cannot_be_stored() {
    use crate::maintenance::prune::{PruneOptions, prune};
    use crate::name::Scope;
    use crate::retention::RetentionPolicy;
    let mut place = Place::peers();
    let wide = place.open().with_policy(Redundancy::Replicas(4).into());
    for (repository, image) in [(&wide, "a"), (&place.open(), "b")] {
        let first = import(repository, image, &disk([(0, 1)]));
        let mirror = attach(repository, image.as_bytes()[0], &first);
        checkpoint(repository, &mirror, &disk([(1, 2)]));
    }
    let policy = RetentionPolicy { last: Some(1), ..RetentionPolicy::default() };
    wide.catalog().set_policy(&Scope::All, &policy).unwrap();
    drop(wide);
    let Place::Peers(peers) = &mut place else { unreachable!() };
    peers.take_away(3);
    let mut lines = Vec::new();
    let pruned = prune(&place.open(), &Scope::All, &PruneOptions::default(), &mut |one| {
        lines.push((one.name.to_string(), one.is_removed, one.reason));
        Ok(())
    });
    assert_eq!(pruned.unwrap_err().kind(), ErrorKind::Unavailable);
    let failed = lines.iter().find(|(name, ..)| name == "a@1").unwrap();
    assert!(!failed.1 && failed.2.starts_with("the removal failed: "), "{failed:?}");
    let removed: Vec<_> = lines.iter().filter(|(_, is_removed, _)| *is_removed).collect();
    assert_eq!(removed.iter().map(|(name, ..)| &**name).collect::<Vec<_>>(), ["b@1"]);
}
