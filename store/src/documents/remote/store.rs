//! The data directory of a served catalog.
//!
//! ```text
//! DIR/catalog.json   the marker: format, version and the catalog's id
//! DIR/catalog.db     the documents
//! DIR/lock           locked by the process that serves the catalog
//! ```

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use crate::documents::SqliteDocuments;
use crate::durable::data_directory::DataDirectory;
use crate::error::Result;
use crate::id::CatalogId;

const DATABASE: &str = "catalog.db";

const DIRECTORY: DataDirectory = DataDirectory {
    server: "catalog",
    marker: "catalog.json",
    format: "cairn-catalog",
    version: 1,
    parts: &[DATABASE],
};

/// A catalog's data directory, locked by this process.
pub struct CatalogStore {
    id: CatalogId,
    documents: Arc<SqliteDocuments>,
    _lock: File,
}

impl CatalogStore {
    /// Opens a data directory. Creates it if it does not exist or is empty.
    pub fn open(directory: &Path) -> Result<CatalogStore> {
        let database = directory.join(DATABASE);
        let (lock, id) = DIRECTORY.take(directory, None, || SqliteDocuments::create(&database))?;
        let id = id.parse()?;
        let documents = Arc::new(SqliteDocuments::open_served(&database)?);
        Ok(CatalogStore { id, documents, _lock: lock })
    }

    /// The catalog's id.
    pub fn id(&self) -> CatalogId {
        self.id
    }

    /// The catalog's documents. All clients see changes that are made here.
    pub fn documents(&self) -> &Arc<SqliteDocuments> {
        &self.documents
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use tempfile::TempDir;

    use super::CatalogStore;
    use crate::cluster::peer::PeerStore;

    /// Opens the directory, with retries: a child process that another test has just forked holds a
    /// copy of the lock until it executes its program.
    fn open_again(directory: &Path) -> CatalogStore {
        for _ in 0..600 {
            match CatalogStore::open(directory) {
                Err(error) if error.to_string().contains("another process") => {
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
                opened => return opened.unwrap(),
            }
        }
        panic!("the lock stays held");
    }

    #[test]
    fn a_directory_of_another_kind_is_refused_and_left_unchanged() {
        let dir = TempDir::new().unwrap();
        let of = |name: &str| dir.path().join(name);
        let catalog = CatalogStore::open(&of("catalog")).unwrap();
        let second = CatalogStore::open(&of("catalog")).map(drop).unwrap_err().to_string();
        assert!(second.contains("another process"), "{second}");
        let id = catalog.id();
        drop(catalog);
        assert_eq!(open_again(&of("catalog")).id(), id);
        assert!(PeerStore::open(&of("catalog"), None).is_err(), "it is not a peer's");

        let peer = PeerStore::open(&of("peer"), None).unwrap();
        drop(peer);
        let before = fs::read_dir(of("peer")).unwrap().count();
        assert!(CatalogStore::open(&of("peer")).is_err(), "it is not a catalog's");
        assert_eq!(fs::read_dir(of("peer")).unwrap().count(), before, "no file was added");
    }

    #[test]
    fn a_directory_without_its_marker_is_created_again() {
        let dir = TempDir::new().unwrap();
        let first = CatalogStore::open(dir.path()).unwrap().id();
        fs::remove_file(dir.path().join("catalog.json")).unwrap();
        fs::write(dir.path().join("catalog.json.new"), "{").unwrap();
        assert_ne!(open_again(dir.path()).id(), first);
    }
}
