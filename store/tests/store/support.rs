//! A repository in a directory of its own, with chunks whose content follows from a seed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use std::sync::Arc;

use cairn_store::documents;
use cairn_store::documents::{Change, Documents, Query, SqliteDocuments};
use cairn_store::net::identity::Security;
use cairn_store::{
    Attachment, ChunkIndex, Consistency, Geometry, ImageName, MIN_CHUNK_SIZE, MirrorId,
    MirrorOwner, Mode, NewSnapshot, Repository, Root, Snapshot,
};
use tempfile::TempDir;

use crate::documents::DocumentServer;

pub(crate) const CHUNK: usize = MIN_CHUNK_SIZE as usize;

/// A repository in a directory of its own.
pub(crate) struct TestRepository {
    pub(crate) dir: TempDir,
    pub(crate) repository: Repository,
    /// The server of the documents; `None` if they are in the directory.
    server: Option<DocumentServer>,
}

impl TestRepository {
    pub(crate) fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let repository = Repository::open_or_create(&url(&dir)).unwrap();
        Self { dir, repository, server: None }
    }

    /// A repository whose documents are on a server.
    pub(crate) fn with(server: DocumentServer) -> Self {
        let TestRepository { dir, .. } = TestRepository::new();
        let repository = Repository::with_documents(&url(&dir), server.documents()).unwrap();
        Self { dir, repository, server: Some(server) }
    }

    /// Opens the repository again, as another process would.
    pub(crate) fn again(&self) -> Repository {
        open(&self.url(), self.catalog_address())
    }

    /// The address of the documents, if they are not in the directory.
    pub(crate) fn catalog_address(&self) -> Option<&str> {
        self.server.as_ref().map(DocumentServer::address)
    }

    pub(crate) fn url(&self) -> String {
        url(&self.dir)
    }

    pub(crate) fn image(&self, name_: &str) -> Snapshot {
        self.repository.create_image(&name(name_), disk(1000)).unwrap()
    }

    pub(crate) fn attach(
        &self,
        mirror: u8,
        snapshot: &Snapshot,
    ) -> cairn_store::Result<Attachment> {
        self.repository.attach(&owner(mirror), snapshot, Mode::ReadWrite)
    }

    /// The catalog's documents.
    pub(crate) fn documents(&self) -> Arc<dyn Documents> {
        match &self.server {
            Some(server) => server.documents(),
            None => Arc::new(SqliteDocuments::open(&self.dir.path().join("catalog.db")).unwrap()),
        }
    }

    /// Lets the lease of image `a` expire.
    pub(crate) fn expire_lease(&self) {
        let change = Change::default().remove(Query::Key(self.lease_key()));
        assert!(self.documents().commit(&change).unwrap());
    }

    /// Lets the document of an ephemeral mirror expire, as it does when its process renews nothing.
    pub(crate) fn expire_mirror(&self, mirror: u8) {
        let change = Change::default().remove(Query::Key(format!("mirrors/{}", owner(mirror).id)));
        assert!(self.documents().commit(&change).unwrap());
    }

    fn lease_key(&self) -> String {
        let newest = self.repository.catalog().resolve(&"a".parse().unwrap()).unwrap();
        format!("leases/{}", newest.image_id)
    }

    /// Changes the holder of the lease of image `a` to a dead process, of this host or of another.
    pub(crate) fn end_holder(&self, boot_id: Option<&str>) {
        self.edit_holder("start_time", 1.into());
        if let Some(boot_id) = boot_id {
            self.edit_holder("boot_id", boot_id.into());
        }
    }

    /// Changes a field of the process that holds the lease of image `a`.
    pub(crate) fn edit_holder(&self, field: &str, value: serde_json::Value) {
        let documents = self.documents();
        let key = self.lease_key();
        let view = documents.read(&[Query::key(&key)]).unwrap();
        let mut lease: serde_json::Value = view.get(&key).unwrap().unwrap();
        lease["process"][field] = value;
        assert!(documents.commit(&Change::default().put_for(60, key, &lease)).unwrap());
    }

    /// All blobs in the index.
    pub(crate) fn known_blobs(&self) -> Vec<[u8; 32]> {
        known_blobs(self.dir.path())
    }

    /// The file of the first segment, and the range of a blob in it.
    pub(crate) fn locate(&self, blob: &[u8; 32]) -> (PathBuf, Range<usize>) {
        let index = rusqlite::Connection::open(self.dir.path().join("index.db")).unwrap();
        let find = "SELECT segment, offset, length FROM blobs WHERE id = ?";
        let (segment, start, len): (u64, usize, usize) = index
            .query_row(find, [blob], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
            .unwrap();
        assert_eq!(segment, 1);
        (self.dir.path().join("segments/00000001"), start..start + len)
    }
}

/// All blobs in the index of a repository.
pub(crate) fn known_blobs(repository: &Path) -> Vec<[u8; 32]> {
    let index = rusqlite::Connection::open(repository.join("index.db")).unwrap();
    let mut query = index.prepare("SELECT id FROM blobs").unwrap();
    let rows = query.query_map([], |row| row.get(0)).unwrap();
    rows.map(Result::unwrap).collect()
}

/// Opens a repository whose documents are in its directory or at this address.
pub(crate) fn open(url: &str, documents: Option<&str>) -> Repository {
    match documents {
        Some(address) => {
            let documents = documents::open(address, &Security::INSECURE).unwrap();
            Repository::with_documents(url, documents).unwrap()
        }
        None => Repository::open(url).unwrap(),
    }
}

pub(crate) fn url(dir: &TempDir) -> String {
    url_of(dir.path())
}

pub(crate) fn url_of(path: &Path) -> String {
    format!("dir:{}", path.display())
}

pub(crate) fn name(text: &str) -> ImageName {
    text.parse().unwrap()
}

pub(crate) fn disk(chunks: u64) -> Geometry {
    Geometry::new(chunks * CHUNK as u64, MIN_CHUNK_SIZE).unwrap()
}

pub(crate) fn owner(mirror: u8) -> MirrorOwner {
    let id = MirrorId::from_bytes([mirror; 16]);
    MirrorOwner::this_process(id, format!("/mirrors/{mirror}")).unwrap()
}

/// The content of a chunk with this seed.
pub(crate) fn content(seed: u64) -> Vec<u8> {
    (seed + 1).to_le_bytes().repeat(CHUNK / 8)
}

/// Stores chunks, given as index and seed, over `base`. Returns the root of the tree.
pub(crate) fn write(repository: &Repository, base: &Root, seeds: &[(u64, u64)]) -> Root {
    let put = |seed: u64| repository.put_chunk(&content(seed)).unwrap().id;
    let changes = seeds.iter().map(|(index, seed)| (ChunkIndex(*index), Some(put(*seed))));
    let changes = changes.collect::<BTreeMap<_, _>>();
    repository.commit_tree(base, disk(1000), &changes).unwrap().root
}

pub(crate) fn new_snapshot(number: u64) -> NewSnapshot {
    NewSnapshot {
        number,
        label: None,
        metadata: cairn_store::Metadata::default(),
        is_from_guest: false,
        size: disk(1000).size(),
        consistency: Consistency::Filesystem,
        time: 1_700_000_000,
        dirty_bytes: 0,
        pause_us: 12,
    }
}

/// Asserts that a snapshot has exactly these chunks, given as index and seed.
pub(crate) fn assert_holds(repository: &Repository, snapshot: &Snapshot, seeds: &[(u64, u64)]) {
    snapshot.require_content().unwrap();
    let expected = seeds.iter().copied().collect::<BTreeMap<_, _>>();
    let mut found = 0;
    for chunk in repository.chunks(&snapshot.root, snapshot.geometry) {
        let (index, id) = chunk.unwrap();
        let mut buf = vec![0; CHUNK];
        repository.read_chunk(&id, &mut buf).unwrap();
        assert!(buf == content(expected[&index.0]), "chunk {} of {}", index.0, snapshot.name());
        found += 1;
    }
    assert_eq!(found, expected.len(), "chunks of {}", snapshot.name());
}
