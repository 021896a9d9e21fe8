//! Tests of the sweep of drained peers, and of records of images that were never created.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{rebuild_catalog, repair_all, repair_while};
use crate::blobs::NewBlob;
use crate::catalog::{Draft, FirstSnapshot};
use crate::cluster::client::Connection;
use crate::cluster::client::blobs_tests::Site;
use crate::cluster::membership::{Announcement, PeerStats, drain, lose, send_heartbeat};
use crate::cluster::repair::DELETION_TIMEOUT;
use crate::cluster::stalling_proxy::{Stall, StallingProxy};
use crate::cluster::tests::content;
use crate::documents::{Documents, SqliteDocuments};
use crate::encoding::Redundancy;
use crate::error::Error;
use crate::geometry::{ChunkIndex, Geometry};
use crate::id::BlobId;
use crate::name::{ImageName, SnapshotRef};
use crate::net::identity::Security;
use crate::repository::Repository;
use crate::snapshot::{Consistency, SnapshotState};
use crate::tree::Root;

const CHUNK: usize = 65536;

/// Sends the heartbeats of all peers until it is dropped. They continue while a peer is stopped, so
/// the catalog does not notice.
pub(super) struct Heartbeats {
    stop: mpsc::Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeats {
    pub(super) fn of(site: &Site, documents: &Arc<dyn Documents>) -> Heartbeats {
        Heartbeats::of_some(site, &(0..site.peers.len()).collect::<Vec<_>>(), documents)
    }

    /// The heartbeats of some of the peers.
    pub(super) fn of_some(
        site: &Site,
        peers: &[usize],
        documents: &Arc<dyn Documents>,
    ) -> Heartbeats {
        let announcements = peers.iter().map(|at| &site.peers[*at]).map(|peer| {
            let domain = peer.id.to_string();
            Announcement { id: peer.id, address: peer.address.clone(), domain }
        });
        let (announcements, documents): (Vec<_>, _) = (announcements.collect(), documents.clone());
        let stats = PeerStats { capacity: 1 << 40, ..PeerStats::default() };
        let all_beat = move || {
            announcements
                .iter()
                .for_each(|one| send_heartbeat(&*documents, one, &stats, 1).unwrap())
        };
        all_beat();
        let (stop, stopped) = mpsc::channel();
        let thread = thread::spawn(move || {
            while stopped.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                all_beat();
            }
        });
        Heartbeats { stop, thread: Some(thread) }
    }
}

impl Drop for Heartbeats {
    fn drop(&mut self) {
        let _ = self.stop.send(());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// The names of a peer's records.
fn records(address: &str) -> BTreeSet<BlobId> {
    runtime().block_on(async {
        let connection = Connection::open(address, &Security::INSECURE).await.unwrap();
        let page = connection.records(&BlobId::from_bytes([0; 32])).await.unwrap();
        page.iter().map(|record| record.description.blob).collect()
    })
}

fn has(address: &str, blob: BlobId) -> bool {
    runtime().block_on(async {
        let connection = Connection::open(address, &Security::INSECURE).await.unwrap();
        !connection.have(&[blob], None).await.unwrap()[0].is_empty()
    })
}

/// A document store in a file.
pub(super) fn documents(dir: &TempDir, file: &str) -> Arc<dyn Documents> {
    let path = dir.path().join(file);
    SqliteDocuments::create(&path).unwrap();
    Arc::new(SqliteDocuments::open(&path).unwrap())
}

#[test]
fn a_rebuild_does_not_restore_an_image_that_could_not_be_created() {
    let site = Site::new(2);
    let dir = TempDir::new().unwrap();
    let first = documents(&dir, "catalog.db");
    let _beating = Heartbeats::of(&site, &first);
    let repository = Repository::of_cluster(first, &Security::INSECURE).unwrap();
    let size = |chunks: u64| Geometry::new(chunks * CHUNK as u64, CHUNK as u32).unwrap();
    let [vm, other] = ["vm", "other"].map(|name| name.parse::<ImageName>().unwrap());
    repository.create_image(&vm, size(4)).unwrap();
    repository.create_image(&other, size(9)).unwrap();
    // Creations that lose against an existing image, alone and at the same time.
    repository.create_image(&vm, size(1)).unwrap_err();
    repository.clone_snapshot(&SnapshotRef::number(&other, 1), &vm).unwrap_err();
    let third: ImageName = "third".parse().unwrap();
    let made: Vec<bool> = std::thread::scope(|scope| {
        let make = |chunks| {
            let (repository, third) = (&repository, &third);
            scope.spawn(move || repository.create_image(third, size(chunks)).is_ok())
        };
        let all: Vec<_> = (1..9).map(make).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(made.iter().filter(|made| **made).count(), 1, "{made:?}");
    let before = repository.catalog().images().unwrap();
    // The catalog is lost and rebuilt.
    let second = documents(&dir, "again.db");
    let _also_beating = Heartbeats::of(&site, &second);
    let again = Repository::of_cluster(second, &Security::INSECURE).unwrap();
    let rebuilt = rebuild_catalog(&again, false).unwrap();
    assert_eq!((rebuilt.images, rebuilt.snapshots), (3, 3));
    assert_eq!(again.catalog().images().unwrap(), before);
}

#[test]
fn nothing_counts_as_garbage_while_a_tree_node_cannot_be_read() {
    let mut site = Site::new(3);
    let dir = TempDir::new().unwrap();
    let documents = documents(&dir, "catalog.db");
    let _beating = Heartbeats::of(&site, &documents);
    let open = || Repository::of_cluster(documents.clone(), &Security::INSECURE).unwrap();
    let repository = open().with_policy(Redundancy::NONE.into());
    let geometry = Geometry::new(40 * CHUNK as u64, CHUNK as u32).unwrap();
    let chunks: Vec<_> = (0..60).map(|number| content(number, CHUNK).1).collect();
    let chunks: Vec<_> = chunks.iter().map(|one| NewBlob::new(one)).collect();
    repository.put_chunks(&chunks).unwrap();
    // Nothing refers to the last 20 chunks: they are garbage.
    let named = &chunks[..40];
    let changes: BTreeMap<_, _> = named
        .iter()
        .enumerate()
        .map(|(at, one)| (ChunkIndex(at as u64), Some(one.chunk_id())))
        .collect();
    let root = repository.commit_tree(&Root::default(), geometry, &changes).unwrap().root;
    repository.publish_image(&"vm".parse().unwrap(), geometry, &root, 0, 0).unwrap();
    site.peers.iter().for_each(|peer| peer.age(25 * 3600));

    let node: BlobId = root.0.unwrap().into();
    let holds = |at: &usize| has(&site.peers[*at].address, node);
    let holder = (0..3).find(holds).unwrap();
    let drained = (holder + 1) % 3;
    let before = site.fragments_of(drained);
    assert!(before > 2, "{before} fragments of 60 chunks");
    drain(&*documents, &site.peers[drained].id, true).unwrap();
    site.stop(holder);
    // Another client, which has no tree node in its cache.
    let report = repair_all(&open(), None, &|_| ()).unwrap();
    // The record can be read, and is moved if it was on the drained peer.
    assert!(report.moved <= 1 && report.dropped == report.moved, "{report:?}");
    assert_eq!(site.fragments_of(drained), before - report.moved, "{report:?}");

    site.restart(holder);
    let repository = open();
    let report = repair_all(&repository, None, &|_| ()).unwrap();
    assert!(!report.is_incomplete(), "{report:?}");
    assert_eq!(site.fragments_of(drained), 0, "the garbage is deleted, too");
    let mut buffer = vec![0; CHUNK];
    for chunk in named {
        repository.read_chunk(&chunk.chunk_id(), &mut buffer).unwrap();
        assert!(buffer == chunk.content);
    }
}

/// The catalog refers to no record of a removed image.
#[test]
fn records_of_removals_keep_their_redundancy_when_peers_are_drained_and_lost() {
    let mut site = Site::new(5);
    let dir = TempDir::new().unwrap();
    let first = documents(&dir, "catalog.db");
    let beating = Heartbeats::of(&site, &first);
    let repository = Repository::of_cluster(first.clone(), &Security::INSECURE).unwrap();
    let repository = repository.with_policy(Redundancy::Replicas(2).into());
    let geometry = Geometry::new(4 * CHUNK as u64, CHUNK as u32).unwrap();
    let name: ImageName = "vm".parse().unwrap();
    repository.create_image(&name, geometry).unwrap();
    repository.remove_image(&name, true).unwrap();
    site.peers.iter().for_each(|peer| peer.age(25 * 3600));
    let holders = |site: &Site, left: &[usize]| {
        let mut holders: BTreeMap<BlobId, Vec<usize>> = BTreeMap::new();
        for at in left {
            for record in records(&site.peers[*at].address) {
                holders.entry(record).or_default().push(*at);
            }
        }
        holders
    };
    let mut left: Vec<usize> = (0..5).collect();
    let before = holders(&site, &left);
    assert_eq!(before.len(), 2, "the record of the image, and that of its removal");
    assert!(before.values().all(|on| on.len() == 2), "{before:?}");

    // A holder is drained and ends empty. Nothing is lost with it.
    let drained = before.values().next().unwrap()[0];
    drain(&*first, &site.peers[drained].id, true).unwrap();
    let report = repair_all(&repository, None, &|_| ()).unwrap();
    assert!(!report.is_incomplete() && report.moved > 0, "{report:?}");
    assert_eq!(site.fragments_of(drained), 0);
    left.retain(|at| *at != drained);
    let after = holders(&site, &left);
    assert!(after.keys().eq(before.keys()) && after.values().all(|on| on.len() == 2), "{after:?}");

    // Another holder is lost.
    let gone = after.values().next_back().unwrap()[0];
    drop(beating);
    site.stop(gone);
    lose(&*first, &site.peers[gone].id).unwrap();
    left.retain(|at| *at != gone);
    let _beating = Heartbeats::of_some(&site, &left, &first);
    let report = repair_all(&repository, None, &|_| ()).unwrap();
    assert!(!report.is_incomplete() && report.moved > 0, "{report:?}");
    let after = holders(&site, &left);
    assert!(after.keys().eq(before.keys()) && after.values().all(|on| on.len() == 2), "{after:?}");

    // The catalog is lost, too. The image stays removed.
    let second = documents(&dir, "again.db");
    let _also_beating = Heartbeats::of_some(&site, &left, &second);
    let again = Repository::of_cluster(second, &Security::INSECURE).unwrap();
    assert_eq!(rebuild_catalog(&again, true).unwrap().images, 0);
}

#[test]
fn a_sweep_deletes_nothing_after_its_time_from_a_peer_that_stalls() {
    let mut site = Site::new(3);
    let proxy = StallingProxy::start(&site.peers[0].address, Stall::Deletions);
    site.peers[0].address = proxy.address.clone();
    let dir = TempDir::new().unwrap();
    let documents = documents(&dir, "catalog.db");
    let _beating = Heartbeats::of(&site, &documents);
    let repository = Repository::of_cluster(documents.clone(), &Security::INSECURE).unwrap();
    let repository = repository.with_policy(Redundancy::NONE.into());
    // Nothing refers to these chunks.
    let chunks: Vec<_> = (0..30).map(|number| content(number, CHUNK).1).collect();
    let chunks: Vec<_> = chunks.iter().map(|one| NewBlob::new(one)).collect();
    repository.put_chunks(&chunks).unwrap();
    repository.flush_all().unwrap();
    site.peers.iter().for_each(|peer| peer.age(25 * 3600));
    let before = site.fragments_of(0);
    assert!(before > 0, "no chunk of 30 is on the peer");
    drain(&*documents, &site.peers[0].id, true).unwrap();
    let begin = Instant::now();
    repair_all(&repository, None, &|_| ()).unwrap();
    assert!(begin.elapsed() < DELETION_TIMEOUT + Duration::from_secs(20), "{:?}", begin.elapsed());
    // Another repair may hold the lease by now.
    proxy.release();
    runtime().block_on(proxy.wait_for_answers(1));
    assert_eq!(site.fragments_of(0), before, "chunks were deleted too late");
    repair_all(&repository, None, &|_| ()).unwrap();
    assert_eq!(site.fragments_of(0), 0, "a sweep in time deletes them");
}

/// The new snapshot refers to chunks that are a day old, and that nothing referred to when the repair
/// read the references. Some of them are on a drained peer.
#[test]
fn a_snapshot_that_is_published_during_a_repair_loses_nothing_to_the_sweep() {
    let site = Site::new(3);
    let dir = TempDir::new().unwrap();
    let documents = documents(&dir, "catalog.db");
    let _beating = Heartbeats::of(&site, &documents);
    let repository = Repository::of_cluster(documents.clone(), &Security::INSECURE).unwrap();
    let repository = repository.with_policy(Redundancy::NONE.into());
    let geometry = Geometry::new(40 * CHUNK as u64, CHUNK as u32).unwrap();
    let chunks: Vec<_> = (0..60).map(|number| content(number, CHUNK).1).collect();
    let chunks: Vec<_> = chunks.iter().map(|one| NewBlob::new(one)).collect();
    repository.put_chunks(&chunks).unwrap();
    let publish = |name: &str, chunks: &[NewBlob<'_>]| {
        let changes = chunks.iter().enumerate();
        let changes = changes.map(|(at, one)| (ChunkIndex(at as u64), Some(one.chunk_id())));
        let root = repository.commit_tree(
            &Root::default(),
            geometry,
            &changes.collect::<BTreeMap<_, _>>(),
        );
        let root = root.unwrap().root;
        repository.publish_image(&name.parse().unwrap(), geometry, &root, 0, 0).unwrap();
    };
    publish("before", &chunks[..20]);
    site.peers.iter().for_each(|peer| peer.age(25 * 3600));
    drain(&*documents, &site.peers[0].id, true).unwrap();
    let held = |at: usize, some: &[NewBlob<'_>]| {
        some.iter().filter(|one| has(&site.peers[at].address, one.id())).count()
    };
    let (later, garbage) = (&chunks[20..40], &chunks[40..]);
    let drained = held(0, later);
    assert!(drained > 0 && held(0, garbage) > 0, "the drained peer holds {drained} of 20");
    // Repair asks whether to go on when it has read the references, before it looks at any blob.
    let is_published = std::cell::Cell::new(false);
    let proceed = || {
        if !is_published.replace(true) {
            // Another thread, because this one runs the repair's requests.
            thread::scope(|scope| scope.spawn(|| publish("meanwhile", later)).join().unwrap());
        }
        true
    };
    let report = repair_while(&repository, None, &proceed, &|_| ()).unwrap();
    assert!(is_published.get() && !report.is_incomplete(), "{report:?}");
    assert_eq!(held(0, garbage), 0, "what nothing refers to is swept");
    assert_eq!(held(0, later), drained, "this repair did not look at the new snapshot");
    let report = repair_all(&repository, None, &|_| ()).unwrap();
    assert!(!report.is_incomplete(), "{report:?}");
    assert_eq!(site.fragments_of(0), 0, "the next one moves its chunks");
    let mut buffer = vec![0; CHUNK];
    for chunk in &chunks[..40] {
        repository.read_chunk(&chunk.chunk_id(), &mut buffer).unwrap();
        assert!(buffer == chunk.content);
    }
}

#[test]
fn a_sweep_keeps_the_content_that_is_being_read_although_its_image_was_removed() {
    let site = Site::new(3);
    let dir = TempDir::new().unwrap();
    let documents = documents(&dir, "catalog.db");
    let _beating = Heartbeats::of(&site, &documents);
    let repository = Repository::of_cluster(documents.clone(), &Security::INSECURE).unwrap();
    let repository = repository.with_policy(Redundancy::NONE.into());
    let geometry = Geometry::new(20 * CHUNK as u64, CHUNK as u32).unwrap();
    let chunks: Vec<_> = (0..20).map(|number| content(number, CHUNK).1).collect();
    let chunks: Vec<_> = chunks.iter().map(|one| NewBlob::new(one)).collect();
    repository.put_chunks(&chunks).unwrap();
    let changes = chunks.iter().enumerate();
    let changes = changes.map(|(at, one)| (ChunkIndex(at as u64), Some(one.chunk_id())));
    let changes: BTreeMap<_, _> = changes.collect();
    let root = repository.commit_tree(&Root::default(), geometry, &changes).unwrap().root;
    let name: ImageName = "vm".parse().unwrap();
    let snapshot = repository.publish_image(&name, geometry, &root, 0, 0).unwrap();
    let reading = repository.begin_reading(&snapshot, "exports").unwrap();
    repository.remove_image(&name, false).unwrap();
    site.peers.iter().for_each(|peer| peer.age(25 * 3600));
    (0..3).for_each(|at| drain(&*documents, &site.peers[at].id, true).unwrap());
    repair_all(&repository, None, &|_| ()).unwrap();
    let held = |chunk: &&NewBlob<'_>| (0..3).any(|at| has(&site.peers[at].address, chunk.id()));
    assert_eq!(chunks.iter().filter(held).count(), 20);
    drop(reading);
    repair_all(&repository, None, &|_| ()).unwrap();
    assert_eq!(chunks.iter().filter(held).count(), 0, "it is garbage");
}

/// The catalog is lost, and peers are drained before it is rebuilt.
#[test]
fn nothing_counts_as_garbage_while_the_catalog_is_not_rebuilt() {
    let site = Site::new(3);
    let dir = TempDir::new().unwrap();
    let first = documents(&dir, "catalog.db");
    let beating = Heartbeats::of(&site, &first);
    let repository = Repository::of_cluster(first, &Security::INSECURE).unwrap();
    let repository = repository.with_policy(Redundancy::Replicas(2).into());
    let geometry = Geometry::new(20 * CHUNK as u64, CHUNK as u32).unwrap();
    let chunks: Vec<_> = (0..20).map(|number| content(number, CHUNK).1).collect();
    let chunks: Vec<_> = chunks.iter().map(|one| NewBlob::new(one)).collect();
    repository.put_chunks(&chunks).unwrap();
    let changes = chunks.iter().enumerate();
    let changes = changes.map(|(at, one)| (ChunkIndex(at as u64), Some(one.chunk_id())));
    let root = repository
        .commit_tree(&Root::default(), geometry, &changes.collect::<BTreeMap<_, _>>())
        .unwrap()
        .root;
    repository.publish_image(&"vm".parse().unwrap(), geometry, &root, 0, 0).unwrap();
    site.peers.iter().for_each(|peer| peer.age(25 * 3600));
    drop((repository, beating));

    let second = documents(&dir, "again.db");
    let _beating = Heartbeats::of(&site, &second);
    let again = Repository::of_cluster(second.clone(), &Security::INSECURE).unwrap();
    let held =
        |at: usize| chunks.iter().filter(|one| has(&site.peers[at].address, one.id())).count();
    let before: Vec<_> = (0..3).map(held).collect();
    for at in [0, 1] {
        drain(&*second, &site.peers[at].id, true).unwrap();
    }
    repair_all(&again, None, &|_| ()).unwrap();
    assert_eq!((0..3).map(held).collect::<Vec<_>>(), before, "chunks were deleted");
    assert_eq!(rebuild_catalog(&again, false).unwrap().snapshots, 1);
    let mut buffer = vec![0; CHUNK];
    for chunk in &chunks {
        again.read_chunk(&chunk.chunk_id(), &mut buffer).unwrap();
        assert!(buffer == chunk.content);
    }
    // Now the catalog refers to them. They are moved.
    let report = repair_all(&again, None, &|_| ()).unwrap();
    assert!(report.moved > 0, "{report:?}");
}

/// A draft of the image `vm` whose creation began long ago.
fn old_draft(geometry: Geometry) -> Draft {
    let content = FirstSnapshot {
        root: Root::default(),
        state: SnapshotState::Stable,
        consistency: Consistency::Crash,
        dirty_bytes: 0,
        stored_bytes: 0,
        sent_bytes: 0,
        saved_bytes: 0,
    };
    let (name, policy) = ("vm".parse().unwrap(), Redundancy::Replicas(2).into());
    let mut draft = Draft::new(&name, geometry, policy, &content).unwrap();
    draft.set_created(1);
    draft
}

/// The process that creates an image is killed between the record and the catalog's document. The image
/// is created again and removed.
#[test]
fn an_interrupted_creation_does_not_return_after_the_image_was_removed() {
    let site = Site::new(3);
    let dir = TempDir::new().unwrap();
    let first = documents(&dir, "catalog.db");
    let _beating = Heartbeats::of(&site, &first);
    let repository = Repository::of_cluster(first, &Security::INSECURE).unwrap();
    let geometry = Geometry::new(4 * CHUNK as u64, CHUNK as u32).unwrap();
    let name: ImageName = "vm".parse().unwrap();
    let draft = old_draft(geometry);
    let catalog = repository.catalog();
    let basis = catalog.commit_basis().unwrap();
    assert!(catalog.begin_draft(&draft, basis.epoch).unwrap());
    let record = repository.put_record(draft.record(basis.epoch), SnapshotState::Stable).unwrap();

    repository.create_image(&name, geometry).unwrap();
    repository.remove_image(&name, true).unwrap();
    repair_all(&repository, None, &|_| ()).unwrap();
    // A process that was only slow cannot complete the creation any more.
    let late = catalog.insert(&draft, &basis, None, record);
    assert!(matches!(late, Err(Error::DraftGivenUp { .. })), "{:?}", late.err());
    let second = documents(&dir, "again.db");
    let _also_beating = Heartbeats::of(&site, &second);
    let again = Repository::of_cluster(second, &Security::INSECURE).unwrap();
    assert_eq!(rebuild_catalog(&again, false).unwrap().images, 0);
}

/// A tombstone of an image that exists would remove it at the next rebuild.
#[test]
fn no_image_is_created_whose_tombstone_may_be_stored() {
    let site = Site::new(3);
    let dir = TempDir::new().unwrap();
    let documents = documents(&dir, "catalog.db");
    let _beating = Heartbeats::of(&site, &documents);
    let repository = Repository::of_cluster(documents, &Security::INSECURE).unwrap();
    let geometry = Geometry::new(4 * CHUNK as u64, CHUNK as u32).unwrap();
    let (draft, catalog) = (old_draft(geometry), repository.catalog());
    let basis = catalog.commit_basis().unwrap();
    assert!(catalog.begin_draft(&draft, basis.epoch).unwrap());
    let record = repository.put_record(draft.record(basis.epoch), SnapshotState::Stable).unwrap();

    // A rebuild does not create it either, because the creation may still be given up. After the
    // rebuild began, no creation begins or ends that it does not know.
    assert_eq!(rebuild_catalog(&repository, true).unwrap().images, 0);
    assert!(catalog.insert(&draft, &basis, None, record).unwrap().is_none());
    assert!(!catalog.begin_draft(&old_draft(geometry), basis.epoch).unwrap());

    // A repair gives it up between any two steps.
    let basis = catalog.commit_basis().unwrap();
    assert!(catalog.give_up_draft(&draft.id()).unwrap().is_some());
    let late = catalog.insert(&draft, &basis, None, record);
    assert!(matches!(late, Err(Error::DraftGivenUp { .. })), "{:?}", late.err());
    assert!(catalog.give_up_draft(&draft.id()).unwrap().is_some(), "the repair was interrupted");
    catalog.end_draft(&draft.id()).unwrap();
    assert!(catalog.give_up_draft(&draft.id()).unwrap().is_none());

    // What was created is not given up.
    let second = old_draft(geometry);
    assert!(catalog.begin_draft(&second, basis.epoch).unwrap());
    assert!(catalog.insert(&second, &basis, None, record).unwrap().is_some());
    assert!(catalog.give_up_draft(&second.id()).unwrap().is_none());
}
