//! Records of removed snapshots on real peers, through collections, a peer that is away, and the loss of
//! the catalog.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::catalog::RecordSubject;
use crate::cluster::client::Connection;
use crate::cluster::client::blobs_tests::Site;
use crate::cluster::membership::{self, Health};
use crate::documents::Documents;
use crate::encoding::Redundancy;
use crate::id::{BlobId, MirrorId};
use crate::maintenance::collection::tests::{attach, changes, geometry, new, put, resolve};
use crate::maintenance::collection::{CollectionOptions, CollectionReport, collect};
use crate::maintenance::rebuild_catalog;
use crate::maintenance::sweep_tests::{Heartbeats, documents};
use crate::net::identity::Security;
use crate::repository::Repository;
use crate::repository::attachment::Attachment;
use crate::snapshot::{MirrorOwner, Mode};
use crate::tree::Root;

const AWAY: usize = 3;

/// A cluster of four peers with two copies of everything, and a catalog.
struct Bench {
    site: Site,
    documents: Arc<dyn Documents>,
    repository: Repository,
    beating: Option<Heartbeats>,
    _dir: TempDir,
}

impl Bench {
    fn new() -> Bench {
        let (site, dir) = (Site::new(4), TempDir::new().unwrap());
        let documents = documents(&dir, "catalog.db");
        let beating = Some(Heartbeats::of(&site, &documents));
        let repository = open(&documents);
        Bench { site, documents, repository, beating, _dir: dir }
    }

    /// Beats for these peers only, and waits until the catalog has noticed.
    fn beat(&mut self, peers: &[usize]) {
        self.beating = None;
        self.beating = Some(Heartbeats::of_some(&self.site, peers, &self.documents));
        let begin = Instant::now();
        let up = || {
            let (all, _) = membership::peers(&*self.documents).unwrap();
            all.iter().filter(|peer| peer.health == Health::Up).count()
        };
        while up() != peers.len() {
            assert!(
                begin.elapsed() < Duration::from_secs(120),
                "the peers are not as they should be"
            );
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn collect(&self) -> CollectionReport {
        let repository = open(&self.documents);
        collect(&repository, &CollectionOptions::default(), &|_| ()).unwrap()
    }

    /// What the records of a peer are about.
    fn records(&self, peer: usize) -> BTreeSet<String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let page = runtime.block_on(async {
            let address = &self.site.peers[peer].address;
            let connection = Connection::open(address, &Security::INSECURE).await.unwrap();
            connection.records(&BlobId::from_bytes([0; 32])).await.unwrap()
        });
        let about = |record: &[u8]| match RecordSubject::of(record).unwrap() {
            RecordSubject::Snapshot { number, .. } => format!("snapshot {number}"),
            RecordSubject::Removal { number, .. } => format!("removal {number}"),
            RecordSubject::ImageRemoval(_) => "removal of an image".into(),
            RecordSubject::Summary(_, all) => {
                let text = |ranges| serde_json::to_string(ranges).unwrap();
                format!("summary {} {}", text(&all.removed), text(&all.failed))
            }
            RecordSubject::Mirror { is_removal, .. } => {
                (if is_removal { "removal of a mirror" } else { "mirror" }).into()
            }
        };
        page.iter().map(|record| about(&record.block)).collect()
    }

    /// What the records of these peers are about.
    fn records_of(&self, peers: &[usize]) -> BTreeSet<String> {
        peers.iter().flat_map(|peer| self.records(*peer)).collect()
    }
}

fn open(documents: &Arc<dyn Documents>) -> Repository {
    let repository = Repository::of_cluster(documents.clone(), &Security::INSECURE).unwrap();
    repository.with_policy(Redundancy::Replicas(2).into())
}

fn checkpoint(repository: &Repository, attachment: &Attachment, content: u64) -> u64 {
    let disk = [(content, content)].into();
    let number = attachment.reserve(1).unwrap().start;
    let commit = attachment.begin(&new(number)).unwrap();
    put(repository, &disk);
    commit.publish(&changes(&disk), 0, &|_, _| false).unwrap();
    number
}

fn remove(repository: &Repository, name: &str) {
    repository.remove_snapshot(&name.parse().unwrap()).unwrap();
}

#[test]
fn records_of_what_was_removed_go_and_a_rebuild_restores_exactly_the_rest() {
    let mut bench = Bench::new();
    let repository = bench.repository.clone();
    repository.create_image(&"vm".parse().unwrap(), geometry()).unwrap();
    repository.create_image(&"gone".parse().unwrap(), geometry()).unwrap();
    let writer = attach(&repository, 1, &resolve(&repository, "vm").unwrap());
    (2..=6).for_each(|number| assert_eq!(checkpoint(&repository, &writer, number), number));
    let failed = writer.reserve(1).unwrap().start;
    writer.begin(&new(failed)).unwrap();
    writer.fail(failed, "the test wants it").unwrap();
    // A mirror that only reads keeps the content of a snapshot that is removed.
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([2; 16]), "/reader").unwrap();
    let third = resolve(&repository, "vm@3").unwrap();
    let reader = repository.attach(&owner, &third, Mode::ReadOnly).unwrap();
    // Another one is gone.
    let owner = MirrorOwner::this_process(MirrorId::from_bytes([3; 16]), "/other").unwrap();
    repository.attach(&owner, &third, Mode::ReadOnly).unwrap().detach().unwrap();

    // A peer does not hear of the removals.
    bench.site.stop(AWAY);
    bench.beat(&[0, 1, 2]);
    for name in ["vm@2", "vm@3", "vm@5"] {
        remove(&repository, name);
    }
    repository.remove_image(&"gone".parse().unwrap(), false).unwrap();
    let reports = [bench.collect(), bench.collect()];
    assert!(reports.iter().all(|report| report.silent.len() == 1), "{reports:?}");
    let expected = [
        "mirror",
        "removal of a mirror",
        "removal of an image",
        "snapshot 1",
        "snapshot 4",
        "snapshot 6",
        "summary [[2,4],[5,6],[7,8]] [[7,8]]",
    ];
    let unneeded = |found: BTreeSet<String>| -> Vec<String> {
        found.into_iter().filter(|one| !expected.contains(&one.as_str())).collect()
    };
    let found = bench.records_of(&[0, 1, 2]);
    let allowed = ["snapshot 3".to_owned()];
    assert!(unneeded(found.clone()).iter().all(|one| allowed.contains(one)), "{found:?}");
    assert!(found.contains("summary [[2,4],[5,6],[7,8]] [[7,8]]"), "{found:?}");

    // The peer returns with old records. The next collections delete them, too.
    bench.site.restart(AWAY);
    bench.beat(&[0, 1, 2, AWAY]);
    let stale = bench.records(AWAY);
    bench.collect();
    bench.collect();
    let found = bench.records_of(&[0, 1, 2, AWAY]);
    assert_eq!(unneeded(found), allowed, "the parent of a mirror");
    assert!(!bench.records(AWAY).contains("removal of a mirror"), "{stale:?}");

    // The catalog is lost. What was removed stays removed, and no number is used again.
    let dir = TempDir::new().unwrap();
    drop((writer, reader, repository));
    let documents = documents(&dir, "again.db");
    let _beating = Heartbeats::of(&bench.site, &documents);
    let again = open(&documents);
    let rebuilt = rebuild_catalog(&again, false).unwrap();
    assert_eq!((rebuilt.images, rebuilt.snapshots, rebuilt.mirrors), (1, 3, 2), "{rebuilt:?}");
    let all = again.catalog().snapshots(&"vm".parse().unwrap()).unwrap();
    assert_eq!(all.iter().map(|one| one.number).collect::<Vec<_>>(), [1, 4, 6]);
    let mirrors = again.catalog().mirrors().unwrap();
    let kept: Vec<_> = mirrors.iter().map(|one| (one.parent, one.root)).collect();
    assert!(kept.contains(&(3, third.root)) && kept.iter().any(|one| one.0 == 6), "{kept:?}");
    let writer = attach(&again, 1, &resolve(&again, "vm").unwrap());
    assert!(writer.reserve(1).unwrap().start > failed);
}

#[test]
fn a_dry_run_deletes_no_record_and_makes_no_summary() {
    let bench = Bench::new();
    let repository = &bench.repository;
    repository.create_image(&"vm".parse().unwrap(), geometry()).unwrap();
    let writer = attach(repository, 1, &resolve(repository, "vm").unwrap());
    (2..=4).for_each(|number| assert_eq!(checkpoint(repository, &writer, number), number));
    remove(repository, "vm@2");
    let before = bench.records_of(&[0, 1, 2, 3]);
    let options = CollectionOptions { dry_run: true, ..CollectionOptions::default() };
    collect(&open(&bench.documents), &options, &|_| ()).unwrap();
    assert_eq!(bench.records_of(&[0, 1, 2, 3]), before);
    bench.collect();
    let summarised = bench.records_of(&[0, 1, 2, 3]);
    let report = collect(&open(&bench.documents), &options, &|_| ()).unwrap();
    assert_eq!(bench.records_of(&[0, 1, 2, 3]), summarised);
    // The record and the tombstone, with two copies each.
    assert_eq!(bench.collect().freed.objects, report.freed.objects);
    assert_eq!(report.freed.objects, 4);
}

#[test]
fn a_rebuilt_catalog_frees_what_was_stored_before_it_was_lost() {
    let bench = Bench::new();
    let repository = &bench.repository;
    repository.create_image(&"kept".parse().unwrap(), geometry()).unwrap();
    (0..3).for_each(|_| drop(bench.collect()));
    let (name, disk) = ("vm".parse().unwrap(), [(1, 1)].into());
    put(repository, &disk);
    let tree = repository.commit_tree(&Root::default(), geometry(), &changes(&disk)).unwrap();
    repository.publish_image(&name, geometry(), &tree.root, 0, 0).unwrap();

    let dir = TempDir::new().unwrap();
    let documents = documents(&dir, "again.db");
    let _beating = Heartbeats::of(&bench.site, &documents);
    let again = open(&documents);
    assert_eq!(rebuild_catalog(&again, false).unwrap().images, 2);
    again.remove_image(&name, false).unwrap();
    let report = collect(&again, &CollectionOptions::default(), &|_| ()).unwrap();
    // Two copies of a chunk and a node. The records of the image go, too.
    assert_eq!(report.waiting.objects, 0, "{report:?}");
    assert!(report.freed.objects >= 4, "{report:?}");
}
