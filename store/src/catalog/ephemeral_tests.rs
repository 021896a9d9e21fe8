//! The document of an ephemeral mirror expires, whichever operation wrote it last.

use rusqlite::Connection;

use crate::documents::{Documents, SqliteDocuments};
use crate::error::Result;
use crate::geometry::{Geometry, MIN_CHUNK_SIZE};
use crate::id::MirrorId;
use crate::repository::Repository;
use crate::snapshot::{Consistency, MirrorOwner, Mode, NewSnapshot};
use crate::tree::Root;

struct Place {
    dir: tempfile::TempDir,
    repository: Repository,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("dir:{}", dir.path().join("repository").display());
        let repository = Repository::open_or_create(&url).unwrap();
        Place { dir, repository }
    }

    fn catalog_path(&self) -> std::path::PathBuf {
        self.dir.path().join("repository/catalog.db")
    }

    /// Whether the mirror's document expires; `None` if there is none.
    fn expires(&self) -> Option<bool> {
        let database = Connection::open(self.catalog_path()).unwrap();
        let query = "SELECT expires IS NOT NULL FROM documents WHERE key LIKE 'mirrors/%'";
        database.query_row(query, [], |row| row.get(0)).ok()
    }
}

fn owner() -> MirrorOwner {
    MirrorOwner::this_process(MirrorId::from_bytes([1; 16]), "/m").unwrap().with_ephemeral(true)
}

fn new_snapshot(number: u64, size: u64) -> NewSnapshot {
    NewSnapshot {
        number,
        label: None,
        metadata: crate::metadata::Metadata::default(),
        is_from_guest: false,
        size,
        consistency: Consistency::Crash,
        time: 1_700_000_000,
        dirty_bytes: 0,
        pause_us: 0,
    }
}

#[test]
fn the_document_of_an_ephemeral_mirror_expires_after_every_operation() {
    let place = Place::new();
    let geometry = Geometry::new(1 << 20, MIN_CHUNK_SIZE).unwrap();
    let first = place.repository.create_image(&"vm1".parse().unwrap(), geometry).unwrap();
    let attach = |owner: &MirrorOwner, mode| place.repository.attach(owner, &first, mode).unwrap();
    let attachment = attach(&owner(), Mode::ReadWrite);
    let check = |operation: &str, result: Result<()>| {
        result.unwrap();
        assert_eq!(place.expires(), Some(true), "after {operation}");
    };
    check("attach", Ok(()));
    check("resume", attachment.resume(&(0..0), None).map(drop));
    check("reserve", attachment.reserve(2).map(drop));
    let commit = attachment.begin(&new_snapshot(2, geometry.size())).unwrap();
    check("begin", Ok(()));
    check("begin again", attachment.begin(&new_snapshot(2, geometry.size())).map(drop));
    commit.mark_unverified();
    check("publish", commit.publish_tree(&Root::default(), 0, 0).map(drop));
    check("renew", attachment.renew().map(drop));
    drop(attach(&owner(), Mode::ReadWrite));
    check("attach again", Ok(()));
    let reader = attach(&owner(), Mode::ReadOnly);
    check("attach for reading", Ok(()));
    check("renew a reader", reader.renew().map(drop));
    // A mirror that is started without the option is an ordinary one from then on, and the reverse.
    drop(attach(&owner().with_ephemeral(false), Mode::ReadWrite));
    assert_eq!(place.expires(), Some(false));
    let attachment = attach(&owner(), Mode::ReadWrite);
    check("attach as ephemeral", Ok(()));
    attachment.release(None).unwrap();
    assert_eq!(place.expires(), None);
}

/// A change that relies on a document may be in progress when the document expires. A scan that does
/// not show the document yet must not hide it either.
#[test]
fn a_scan_shows_a_document_until_a_change_has_removed_it() {
    let place = Place::new();
    let documents = SqliteDocuments::open(&place.catalog_path()).unwrap();
    let put = |key: &str| crate::documents::Change::default().put_for(600, key, &1);
    documents.commit(&put("readers/a")).unwrap();
    let database = Connection::open(place.catalog_path()).unwrap();
    database.execute("UPDATE documents SET expires = 1 WHERE key = 'readers/a'", []).unwrap();
    let scanned = || {
        let mut keys = Vec::new();
        let each = &mut |key: &str, _| {
            keys.push(key.to_owned());
            Ok(())
        };
        documents.scan(&["readers/"], each).unwrap();
        keys
    };
    assert_eq!(scanned(), ["readers/a"]);
    let key = crate::documents::Query::key("readers/a");
    assert!(documents.read(&[key]).unwrap().documents.is_empty(), "for all others it is gone");
    documents.commit(&put("readers/b")).unwrap();
    assert_eq!(scanned(), ["readers/b"]);
}
