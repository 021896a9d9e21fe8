//! Where a life takes place: a repository in a directory, or peers that serve sockets, with a catalog.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;

use crate::cluster::client::Connection;
use crate::cluster::client::blobs_tests::Site as PeerSite;
use crate::cluster::membership::{self, Health, drain, lose};
use crate::documents::{Change, Documents, Query, SqliteDocuments};
use crate::encoding::Redundancy;
use crate::encoding::fragment::Kind;
use crate::id::BlobId;
use crate::maintenance::collection::tests::Site;
use crate::maintenance::sweep_tests::Heartbeats;
use crate::maintenance::{rebuild_catalog, repair_all};
use crate::net::identity::Security;
use crate::repository::Repository;

/// The number of peers. Content has two copies.
const PEERS: usize = 4;

/// The copies of each blob on peers.
const COPIES: usize = 2;

/// A copy of a catalog.
pub(in super::super) struct CatalogCopy(TempDir);

impl CatalogCopy {
    fn of(catalog: &Path) -> CatalogCopy {
        let copy = CatalogCopy(TempDir::new().unwrap());
        let database = rusqlite::Connection::open(catalog).unwrap();
        database.execute("VACUUM INTO ?", [copy.path().to_str().unwrap()]).unwrap();
        copy
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("catalog.db")
    }
}

/// Peers and their catalog.
pub(in super::super) struct PeerPlace {
    pub(in super::super) site: PeerSite,
    directory: TempDir,
    /// The number of catalogs that there have been.
    catalogs: u32,
    pub(in super::super) documents: Arc<dyn Documents>,
    beating: Option<Heartbeats>,
}

pub(in super::super) enum Place {
    Directory(Site),
    Peers(Box<PeerPlace>),
}

impl Place {
    pub(in super::super) fn peers() -> Place {
        let (site, directory) = (PeerSite::new(PEERS), TempDir::new().unwrap());
        let documents = documents(&directory.path().join("catalog0.db"));
        let beating = Some(Heartbeats::of(&site, &documents));
        let place = PeerPlace { site, directory, catalogs: 0, documents, beating };
        Place::Peers(Box::new(place))
    }

    /// Opens the repository, as a process of its own.
    pub(in super::super) fn open(&self) -> Repository {
        match self {
            Place::Directory(site) => site.open(),
            Place::Peers(peers) => peers.open(),
        }
    }

    /// The names of all stored content.
    pub(in super::super) fn stored(&self) -> BTreeSet<BlobId> {
        match self {
            Place::Directory(site) => site.stored(),
            Place::Peers(peers) => peers.content().into_keys().collect(),
        }
    }

    pub(in super::super) fn copy_catalog(&self) -> CatalogCopy {
        CatalogCopy::of(&match self {
            Place::Directory(site) => site.catalog(),
            Place::Peers(peers) => peers.catalog(),
        })
    }

    /// Replaces the catalog by a copy. Processes that have it open see the one before.
    pub(in super::super) fn restore_catalog(&mut self, copy: &CatalogCopy) {
        match self {
            Place::Directory(site) => {
                let path = site.catalog();
                let new = path.with_extension("new");
                fs::copy(copy.path(), &new).unwrap();
                for file in ["catalog.db-wal", "catalog.db-shm"] {
                    let _ = fs::remove_file(path.with_file_name(file));
                }
                fs::rename(new, path).unwrap();
            }
            Place::Peers(peers) => peers.use_catalog(Some(copy)),
        }
    }
}

impl PeerPlace {
    fn catalog(&self) -> std::path::PathBuf {
        self.directory.path().join(format!("catalog{}.db", self.catalogs))
    }

    pub(in super::super) fn open(&self) -> Repository {
        let repository = Repository::of_cluster(self.documents.clone(), &Security::INSECURE);
        repository.unwrap().with_policy(Redundancy::Replicas(COPIES as u8).into())
    }

    /// All peers join another catalog: a copy, or an empty one.
    pub(in super::super) fn use_catalog(&mut self, copy: Option<&CatalogCopy>) {
        self.beating = None;
        self.catalogs += 1;
        let path = self.catalog();
        if let Some(copy) = copy {
            fs::copy(copy.path(), &path).unwrap();
        }
        self.documents = documents(&path);
        self.beating = Some(Heartbeats::of(&self.site, &self.documents));
    }

    /// The catalog is lost, and rebuilt from the records on the peers.
    pub(in super::super) fn rebuild(&mut self) {
        self.use_catalog(None);
        self.rebuild_missing();
    }

    /// Restores what the catalog does not have.
    pub(in super::super) fn rebuild_missing(&self) {
        let rebuilt = rebuild_catalog(&self.open(), false).unwrap();
        assert!(rebuilt.left.is_empty(), "{rebuilt:?}");
    }

    /// The peer dies and is lost. A repair restores what it had. Then it returns, with its old blobs or
    /// without.
    pub(in super::super) fn lose_and_return(&mut self, at: usize, is_empty: bool) {
        self.site.stop(at);
        let others: Vec<_> = (0..PEERS).filter(|other| *other != at).collect();
        self.beating = Some(Heartbeats::of_some(&self.site, &others, &self.documents));
        let id = self.site.peers[at].id;
        lose(&*self.documents, &id).unwrap();
        self.repair();
        if is_empty {
            self.site.wipe(at);
        }
        self.site.restart(at);
        self.beating = Some(Heartbeats::of(&self.site, &self.documents));
        if is_empty {
            membership::forget(&*self.documents, &id).unwrap();
        }
    }

    /// The peer stops, and the catalog knows that it is down.
    pub(in super::super) fn take_away(&mut self, at: usize) {
        self.take_all_away(&[at]);
    }

    pub(in super::super) fn take_all_away(&mut self, away: &[usize]) {
        away.iter().for_each(|at| self.site.stop(*at));
        let others: Vec<_> = (0..PEERS).filter(|other| !away.contains(other)).collect();
        self.beating = Some(Heartbeats::of_some(&self.site, &others, &self.documents));
        // Their heartbeats are missing for long enough.
        let ids = away.iter().map(|at| format!("alive/{}", self.site.peers[*at].id));
        let gone = ids.fold(Change::default(), |all, key| all.remove(Query::key(key)));
        assert!(self.documents.commit(&gone).unwrap());
    }

    /// The peer is up again.
    pub(in super::super) fn bring_back(&mut self, at: usize) {
        self.bring_all_back(&[at]);
    }

    pub(in super::super) fn bring_all_back(&mut self, away: &[usize]) {
        away.iter().for_each(|at| self.site.restart(*at));
        self.beating = Some(Heartbeats::of(&self.site, &self.documents));
    }

    /// The peer is drained while a repair runs, and used again, whether it is empty or not.
    pub(in super::super) fn drain_for_a_while(&self, at: usize) {
        let id = self.site.peers[at].id;
        drain(&*self.documents, &id, true).unwrap();
        repair_all(&self.open(), None, &|_| ()).unwrap();
        drain(&*self.documents, &id, false).unwrap();
    }

    /// The peer is drained until it is empty, and used again.
    pub(in super::super) fn drain(&self, at: usize) {
        let id = self.site.peers[at].id;
        drain(&*self.documents, &id, true).unwrap();
        self.repair();
        drain(&*self.documents, &id, false).unwrap();
    }

    /// The peer loses its table, and makes it again from its log.
    pub(in super::super) fn lose_table(&mut self, at: usize) {
        self.site.stop(at);
        for file in ["fragments.db", "fragments.db-wal", "fragments.db-shm"] {
            let _ = fs::remove_file(self.site.peers[at].directory().join(file));
        }
        self.site.restart(at);
    }

    /// Repairs until nothing is left to do.
    pub(in super::super) fn repair(&self) {
        let repository = self.open();
        for _ in 0..10 {
            let report = repair_all(&repository, None, &|_| ()).unwrap();
            if !report.is_incomplete() {
                return;
            }
        }
        panic!("a repair does not end");
    }

    /// The number of fragments of each blob of content that the peers have.
    pub(in super::super) fn content(&self) -> BTreeMap<BlobId, usize> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut found = BTreeMap::new();
        for peer in &self.site.peers {
            runtime.block_on(async {
                let connection =
                    Connection::open(&peer.address, &Security::INSECURE).await.unwrap();
                let mut after = BlobId::from_bytes([0; 32]);
                loop {
                    let page = connection.list(&after, 4096).await.unwrap();
                    let Some((last, _)) = page.last() else { break };
                    after = *last;
                    for (blob, _) in page.iter().filter(|(_, held)| held.kind == Kind::Content) {
                        *found.entry(*blob).or_default() += 1;
                    }
                }
            });
        }
        found
    }

    /// Every blob has its copies, and every peer is up.
    pub(in super::super) fn check_whole(&self) {
        let wrong: Vec<_> =
            self.content().into_iter().filter(|(_, copies)| *copies != COPIES).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        let (peers, _) = membership::peers(&*self.documents).unwrap();
        assert_eq!(peers.iter().filter(|peer| peer.health == Health::Up).count(), PEERS);
    }

    pub(in super::super) fn count(&self) -> u64 {
        PEERS as u64
    }
}

fn documents(path: &Path) -> Arc<dyn Documents> {
    if !path.exists() {
        SqliteDocuments::create(path).unwrap();
    }
    Arc::new(SqliteDocuments::open(path).unwrap())
}
