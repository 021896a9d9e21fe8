//! Collections while the catalog is an older copy, is rebuilt, or loses an answer.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use super::interleaving_tests::{checkpoint, collect_now, disk};
use super::life::place::Place;
use super::tests::{Site, attach, changes, geometry, import, new, put, read, resolve};
use super::{CollectionOptions, CollectionProgress, collect};
use crate::documents::{Change, Changed, Document, Documents, Query, View};
use crate::encoding::Redundancy;
use crate::error::{Error, ErrorKind, Result};
use crate::id::BlobId;
use crate::net::identity::Security;
use crate::repository::Repository;

#[test]
fn a_catalog_on_peers_that_was_restored_from_a_backup_collects_nothing_until_it_is_completed() {
    let mut place = Place::peers();
    let repository = place.open();
    import(&repository, "a", &disk([(0, 1)]));
    import(&repository, "removed", &disk([(0, 2)]));
    let base = resolve(&repository, "a").unwrap();
    let mirror = attach(&repository, 1, &base);
    let publish = |content| {
        let number = mirror.reserve(1).unwrap().start;
        let commit = mirror.begin(&new(number)).unwrap();
        let change = disk([(5, content)]);
        put(&repository, &change);
        commit.publish(&changes(&change), 0, &|_, _| false).unwrap()
    };
    publish(3);
    let copy = place.copy_catalog();
    let last = publish(4);
    repository.remove_snapshot(&"a@2".parse().unwrap()).unwrap();
    repository.remove_image(&"removed".parse().unwrap(), false).unwrap();
    import(&repository, "later", &disk([(0, 6)]));
    collect_now(&place);
    drop(mirror);
    place.restore_catalog(&copy);
    let repository = place.open();
    resolve(&repository, "a@2").expect("the copy has it");
    let before = place.stored();
    let refused = collect(&repository, &CollectionOptions::default(), &|_| ());
    assert!(matches!(refused, Err(Error::Revived { snapshots: 2 })), "{refused:?}");
    assert_eq!(place.stored(), before);
    let Place::Peers(peers) = &place else { unreachable!() };
    peers.rebuild_missing();
    let names = || {
        let mut names: Vec<String> = Vec::new();
        repository
            .catalog()
            .each_image(|image| {
                let all = repository.catalog().snapshots(&image.name)?.into_iter();
                names.extend(all.map(|one| one.name().to_string()));
                Ok(())
            })
            .unwrap();
        names
    };
    assert_eq!(names(), ["a@1", "a@3", "later@1"]);
    // The copy has the mirror with its older parent, which was removed. Until its process runs, or it
    // is forgotten, the collection names that parent.
    let options = CollectionOptions::default();
    let refused = collect(&repository, &options, &|_| ()).unwrap_err();
    assert!(matches!(&refused, Error::CannotMark { names, .. } if *names == ["a@2"]), "{refused}");
    let options = CollectionOptions { give_up: vec!["a@2".parse().unwrap()], ..options };
    collect(&repository, &options, &|_| ()).unwrap();
    assert_eq!(read(&repository, &last).unwrap(), disk([(0, 1), (5, 4)]));
    let root: BlobId = last.root.0.unwrap().into();
    assert!(place.stored().contains(&root));
}

#[test]
fn a_rebuild_after_the_roots_were_read_loses_nothing() {
    let mut place = Place::peers();
    let all = disk((0..20).map(|at| (at, at + 40)));
    let copy = {
        let repository = place.open();
        import(&repository, "a", &disk((0..20).map(|at| (at, at + 1))));
        let copy = place.copy_catalog();
        import(&repository, "later", &all);
        copy
    };
    place.restore_catalog(&copy);
    let Place::Peers(peers) = &place else { unreachable!() };
    let is_done = Cell::new(false);
    let rebuild = || {
        if !is_done.replace(true) {
            peers.rebuild_missing();
        }
    };
    let collect_beside = || {
        collect(&place.open(), &CollectionOptions::default(), &|progress| {
            if matches!(progress, CollectionProgress::Marking { .. }) {
                rebuild();
            }
        })
    };
    let refused = collect_beside();
    assert!(matches!(refused, Err(Error::Unlisted { .. })), "{refused:?}");
    rebuild();
    is_done.set(false);
    let refused = collect_beside();
    assert!(matches!(refused, Err(Error::ClusterChanged)), "{refused:?}");
    assert_eq!(collect_now(&place).freed.objects, 0);
    let later = resolve(&place.open(), "later").unwrap();
    assert_eq!(read(&place.open(), &later).unwrap(), all);
}

#[test]
fn a_rebuild_while_a_collection_looks_for_lost_snapshots_loses_nothing() {
    let mut place = Place::peers();
    let all = disk((0..20).map(|at| (at, at + 40)));
    import(&place.open(), "a", &all);
    let Place::Peers(peers) = &mut place else { unreachable!() };
    peers.use_catalog(None);
    let peers = &*peers;
    let collector = peers.open();
    let collected = thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(1500));
            peers.rebuild_missing();
        });
        collect(&collector, &CollectionOptions::default(), &|_| ())
    });
    // If the rebuild was late, the collection has refused.
    assert!(collected.is_err() || collected.is_ok_and(|report| report.freed.objects == 0));
    let a = resolve(&place.open(), "a").unwrap();
    assert_eq!(read(&place.open(), &a).unwrap(), all);
}

/// What a catalog knows about images.
fn images_of(repository: &Repository) -> Change {
    let mut copy = Change::default();
    let add = &mut |key: &str, document: Document| {
        let value: serde_json::Value = document.decode(key)?;
        copy = std::mem::take(&mut copy).put(key, &value);
        Ok(())
    };
    repository.documents().scan(&IMAGES, add).unwrap();
    copy
}

const IMAGES: [&str; 3] = ["images/", "mirrors/", "snapshots/"];

fn restore_images(repository: &Repository, copy: &Change) {
    let lost = IMAGES.iter().fold(Change::default(), |all, one| all.remove(Query::prefix(*one)));
    assert!(repository.documents().commit(&lost).unwrap());
    assert!(repository.documents().commit(copy).unwrap());
}

/// An older catalog would give numbers out again that the mirror has published. The mirror would take the
/// snapshot for an old one, and leave its changes out of the next.
#[test]
fn a_mirror_goes_on_with_higher_numbers_when_the_catalog_is_an_older_copy() {
    for published in [1, 4] {
        let site = Site::new();
        let repository = site.open();
        let base = import(&repository, "a", &disk([(0, 1)]));
        let mirror = attach(&repository, 1, &base);
        let copy = images_of(&repository);
        let mut expected = disk([(0, 1)]);
        for at in 1..=published {
            checkpoint(&repository, &mirror, &disk([(at, at + 10)]));
            expected.insert(at, at + 10);
        }
        restore_images(&repository, &copy);
        mirror.renew().unwrap();
        for at in 20..23 {
            let taken = checkpoint(&repository, &mirror, &disk([(at, at + 10)]));
            expected.insert(at, at + 10);
            assert_eq!((taken.number, mirror.parent().0), (at + published - 18, taken.number));
            assert_eq!(read(&repository, &taken).unwrap(), expected, "{}", taken.name());
        }
    }
}

/// What a test does before a change of the catalog is carried out, and what it makes of the answer.
type BeforeCommit = Box<dyn Fn(&Change) + Send + Sync>;
type AfterCommit = Box<dyn Fn(&Change, bool) -> Result<bool> + Send + Sync>;

/// Documents whose changes a test sees.
struct WatchedDocuments {
    inner: Arc<dyn Documents>,
    before: BeforeCommit,
    after: AfterCommit,
}

impl Documents for WatchedDocuments {
    fn read(&self, queries: &[Query]) -> Result<View> {
        self.inner.read(queries)
    }

    fn scan(
        &self,
        prefixes: &[&str],
        each: &mut dyn FnMut(&str, Document) -> Result<()>,
    ) -> Result<u64> {
        self.inner.scan(prefixes, each)
    }

    fn last(&self, prefix: &str, before: &str, limit: usize) -> Result<View> {
        self.inner.last(prefix, before, limit)
    }

    fn changed(&self, prefix: &str, revision: u64) -> Result<Changed> {
        self.inner.changed(prefix, revision)
    }

    fn commit(&self, change: &Change) -> Result<bool> {
        (self.before)(change);
        (self.after)(change, self.inner.commit(change)?)
    }

    fn wait(&self, folder: &str, revision: u64, limit: Duration) -> Result<bool> {
        self.inner.wait(folder, revision, limit)
    }
}

fn writes(change: &Change, prefix: &str) -> bool {
    change.puts.iter().any(|put| put.key.starts_with(prefix))
}

#[test]
fn the_checkpoint_after_a_publication_whose_answer_was_lost_is_complete() {
    let place = Place::peers();
    let Place::Peers(peers) = &place else { unreachable!() };
    let is_losing = Arc::new(AtomicBool::new(false));
    let losing = is_losing.clone();
    let documents = WatchedDocuments {
        inner: peers.documents.clone(),
        before: Box::new(|_| ()),
        after: Box::new(move |change, done| {
            if writes(change, "snapshots/") && losing.load(Ordering::SeqCst) {
                let (peer, reason) = ("catalog".into(), "the answer was lost".into());
                return Err(Error::Peer { peer, kind: ErrorKind::Unavailable, reason });
            }
            Ok(done)
        }),
    };
    let repository = Repository::of_cluster(Arc::new(documents), &Security::INSECURE)
        .unwrap()
        .with_policy(Redundancy::Replicas(2).into());
    let base = import(&repository, "a", &disk([(0, 1)]));
    let mirror = attach(&repository, 1, &base);
    let number = mirror.reserve(2).unwrap().start;
    {
        let commit = mirror.begin(&new(number)).unwrap();
        let change = disk([(1, 11)]);
        put(&repository, &change);
        is_losing.store(true, Ordering::SeqCst);
        commit.publish(&changes(&change), 0, &|_, _| false).unwrap_err();
        is_losing.store(false, Ordering::SeqCst);
    }
    // The backend gives up. The next checkpoint has the changes of this one, too.
    let _ = mirror.fail(number, "the catalog was away");
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        let commit = mirror.begin(&new(number + 1)).unwrap();
        commit.mark_unverified();
        let all = disk([(1, 11), (2, 12)]);
        put(&repository, &all);
        let snapshot = commit.publish(&changes(&all), 0, &|_, _| false).unwrap();
        done.send(read(&repository, &snapshot).unwrap()).unwrap();
    });
    let found = is_done.recv_timeout(Duration::from_secs(60)).expect("the checkpoint ends");
    assert_eq!(found, disk([(0, 1), (1, 11), (2, 12)]));
}

/// The catalog is an older copy, and the peers that know that are down when the collection begins.
#[test]
fn records_on_peers_that_come_back_during_the_mark_stop_the_collection() {
    for away in 0..4 {
        let mut place = Place::peers();
        let all = disk((0..20).map(|at| (at, at + 40)));
        import(&place.open(), "a", &disk((0..20).map(|at| (at, at + 1))));
        let copy = place.copy_catalog();
        import(&place.open(), "later", &all);
        place.restore_catalog(&copy);
        // The nodes of the first image are in the cache of the collector.
        let collector = place.open();
        read(&collector, &resolve(&collector, "a").unwrap()).unwrap();
        let Place::Peers(peers) = &mut place else { unreachable!() };
        let others: Vec<_> = (0..4).filter(|at| *at != away).collect();
        peers.take_all_away(&others);
        let peers = std::cell::RefCell::new(peers);
        let is_back = Cell::new(false);
        let collected = collect(&collector, &CollectionOptions::default(), &|progress| {
            if matches!(progress, CollectionProgress::Marking { .. }) && !is_back.replace(true) {
                peers.borrow_mut().bring_all_back(&others);
            }
        });
        assert!(collected.is_err(), "{collected:?}");
        if !is_back.get() {
            peers.borrow_mut().bring_all_back(&others);
        }
        peers.borrow().rebuild_missing();
        let later = resolve(&place.open(), "later").unwrap();
        assert_eq!(read(&place.open(), &later).unwrap(), all);
    }
}

/// A rebuild restores images before their mirrors. The parent of the mirror was removed, so only the
/// mirror needs its content.
#[test]
fn a_collection_during_a_rebuild_leaves_what_its_mirrors_need() {
    let mut place = Place::peers();
    let repository = place.open();
    let base = import(&repository, "a", &disk((0..10).map(|at| (at, at + 1))));
    let mirror = attach(&repository, 1, &base);
    checkpoint(&repository, &mirror, &disk([(5, 30)]));
    let (_, root) = mirror.parent();
    import(&repository, "b", &disk([(0, 1)]));
    repository.remove_snapshot(&"a@2".parse().unwrap()).unwrap();
    drop((mirror, repository));
    let Place::Peers(peers) = &mut place else { unreachable!() };
    peers.use_catalog(None);
    let collector = peers.open();
    let is_done = Arc::new(AtomicBool::new(false));
    let done = is_done.clone();
    let documents = WatchedDocuments {
        inner: peers.documents.clone(),
        // Before the first mirror is restored.
        before: Box::new(move |change| {
            if writes(change, "mirrors/") && !done.swap(true, Ordering::SeqCst) {
                drop(collect(&collector, &CollectionOptions::default(), &|_| ()));
            }
        }),
        after: Box::new(|_, done| Ok(done)),
    };
    let repository = Repository::of_cluster(Arc::new(documents), &Security::INSECURE).unwrap();
    crate::maintenance::rebuild_catalog(&repository, false).unwrap();
    assert!(is_done.load(Ordering::SeqCst));
    let repository = place.open();
    let mut buf = vec![0; geometry().chunk_size() as usize];
    for chunk in repository.chunks(&root, geometry()) {
        repository.read_chunk(&chunk.unwrap().1, &mut buf).unwrap();
    }
}
