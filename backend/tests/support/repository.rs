//! Images into the repository and snapshots out of it, through the library and without the backend.

use std::collections::BTreeMap;

use cairn_store::documents::{Change, Documents, Query, SqliteDocuments};
use cairn_store::{
    ChunkIndex, Consistency, Geometry, ImageName, Metadata, MirrorId, MirrorOwner, Mode,
    NewSnapshot, Repository, Root, Snapshot, SnapshotRef, is_zero,
};
use serde_json::Value;

use super::backend::Site;

pub(crate) fn open(store: &str) -> Repository {
    Repository::open(store).expect("open the repository")
}

pub(crate) fn image(name: &str) -> ImageName {
    name.parse().expect("the name of an image")
}

/// Makes an image whose first snapshot is `disk`, and the repository if there is none.
pub(crate) fn import(store: &str, name: &str, chunk_size: u32, disk: &[u8]) -> Snapshot {
    let repository = Repository::open_or_create(store).expect("make the repository");
    let geometry = Geometry::new(disk.len() as u64, chunk_size).expect("a possible disk");
    let mut changes = BTreeMap::new();
    let mut stored = 0;
    for (index, content) in disk.chunks(chunk_size as usize).enumerate() {
        if is_zero(content) {
            continue;
        }
        let mut chunk = content.to_vec();
        chunk.resize(chunk_size as usize, 0);
        let put = repository.put_chunk(&chunk).expect("store a chunk");
        stored += put.new_bytes;
        changes.insert(ChunkIndex(index as u64), Some(put.id));
    }
    let tree = repository.commit_tree(&Root::default(), geometry, &changes).expect("make the tree");
    repository
        .publish_image(&image(name), geometry, &tree.root, stored, disk.len() as u64)
        .expect("publish the image")
}

/// Makes an image of zeros.
pub(crate) fn create(store: &str, name: &str, chunk_size: u32, size: u64) -> Snapshot {
    let repository = Repository::open_or_create(store).expect("make the repository");
    let geometry = Geometry::new(size, chunk_size).expect("a possible disk");
    repository.create_image(&image(name), geometry).expect("make the image")
}

/// The snapshot `name@number`, as the repository knows it.
pub(crate) fn snapshot(store: &str, name: &str, number: u64) -> Snapshot {
    let name = SnapshotRef::number(&image(name), number);
    open(store).catalog().resolve(&name).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The whole content of a stable snapshot.
pub(crate) fn export(store: &str, name: &str, number: u64) -> Vec<u8> {
    let snapshot = snapshot(store, name, number);
    snapshot.require_content().unwrap_or_else(|e| panic!("export {}: {e}", snapshot.name()));
    content(store, &snapshot)
}

fn content(store: &str, snapshot: &Snapshot) -> Vec<u8> {
    let (repository, geometry) = (open(store), snapshot.geometry);
    let mut disk = vec![0; geometry.size() as usize];
    let mut chunk = vec![0; geometry.chunk_size() as usize];
    for entry in repository.chunks(&snapshot.root, geometry) {
        let (index, id) = entry.unwrap_or_else(|e| panic!("walk {}: {e}", snapshot.name()));
        repository.read_chunk(&id, &mut chunk).unwrap_or_else(|e| panic!("read {index:?}: {e}"));
        let (at, len) = (geometry.offset_of(index) as usize, geometry.len_of(index));
        disk[at..at + len].copy_from_slice(&chunk[..len]);
        assert!(is_zero(&chunk[len..]), "{index:?} holds data beyond the end of the disk");
    }
    disk
}

/// Keeps the catalog from answering until the result is dropped.
pub(crate) fn silence_catalog(site: &Site) -> rusqlite::Connection {
    let path = site.repository().join("catalog.db");
    let catalog = rusqlite::Connection::open(path).expect("open the catalog");
    catalog.execute_batch("BEGIN IMMEDIATE").expect("lock the catalog");
    catalog
}

/// Changes the process that holds the lease of an image, as the catalog records it.
pub(crate) fn edit_lease_process(site: &Site, image: &Snapshot, field: &str, value: Value) {
    let path = site.repository().join("catalog.db");
    let documents = SqliteDocuments::open(&path).expect("open the catalog");
    let key = format!("leases/{}", image.image_id);
    let view = documents.read(&[Query::key(&key)]).expect("read the lease");
    let mut lease: Value = view.get(&key).expect("a lease").expect("the image has a writer");
    lease["process"][field] = value;
    let change = Change::default().put_for(60, key, &lease);
    assert!(documents.commit(&change).expect("change the lease"));
}

/// Publishes a snapshot of zeros through a mirror that is gone afterwards. Returns its number.
pub(crate) fn publish_empty(store: &str, name: &str) -> u64 {
    let repository = open(store);
    let newest = repository.catalog().resolve(&name.parse().expect("a name")).expect("an image");
    let id = MirrorId::from_bytes([200; 16]);
    let owner = MirrorOwner::this_process(id, "/elsewhere").expect("an owner");
    let writer = repository.attach(&owner, &newest, Mode::ReadWrite).expect("attach");
    let number = writer.reserve(1).expect("a number").start;
    let new = NewSnapshot {
        number,
        label: None,
        metadata: Metadata::default(),
        is_from_guest: false,
        size: newest.geometry.size(),
        consistency: Consistency::Crash,
        time: 0,
        dirty_bytes: 0,
        pause_us: 0,
    };
    let commit = writer.begin(&new).expect("announce");
    commit.publish_tree(&Root::default(), 0, 0).expect("publish");
    writer.detach().expect("detach");
    number
}
