//! The data directory of a catalog that is served.
//!
//! ```text
//! DIR/catalog.json   the marker: which catalog this is
//! DIR/catalog.db     the documents
//! DIR/lock           one process serves it
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

/// A catalog's directory, in use by this process.
pub struct CatalogStore {
    id: CatalogId,
    documents: Arc<SqliteDocuments>,
    _lock: File,
}

impl CatalogStore {
    /// Opens a data directory, and makes it first if it is empty or not there.
    pub fn open(directory: &Path) -> Result<CatalogStore> {
        let database = directory.join(DATABASE);
        let (lock, id) = DIRECTORY.take(directory, || SqliteDocuments::create(&database))?;
        let id = id.parse()?;
        let documents = Arc::new(SqliteDocuments::open(&database)?);
        Ok(CatalogStore { id, documents, _lock: lock })
    }

    /// Which catalog this is.
    pub fn id(&self) -> CatalogId {
        self.id
    }

    /// Its documents. Who changes them here is seen by all who are served.
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

    /// A process that another test has just begun has the lock until it runs its program.
    fn open_again(directory: &Path) -> CatalogStore {
        for _ in 0..600 {
            match CatalogStore::open(directory) {
                Err(error) if error.to_string().contains("another process") => {
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
                opened => return opened.unwrap(),
            }
        }
        panic!("its lock is not free");
    }

    #[test]
    fn a_directory_is_never_taken_for_something_else() {
        let dir = TempDir::new().unwrap();
        let of = |name: &str| dir.path().join(name);
        let catalog = CatalogStore::open(&of("catalog")).unwrap();
        let second = CatalogStore::open(&of("catalog")).map(drop).unwrap_err().to_string();
        assert!(second.contains("another process"), "{second}");
        let id = catalog.id();
        drop(catalog);
        assert_eq!(open_again(&of("catalog")).id(), id);
        assert!(PeerStore::open(&of("catalog"), None).is_err(), "no peer");

        let peer = PeerStore::open(&of("peer"), None).unwrap();
        drop(peer);
        let before = fs::read_dir(of("peer")).unwrap().count();
        assert!(CatalogStore::open(&of("peer")).is_err(), "no catalog");
        assert_eq!(fs::read_dir(of("peer")).unwrap().count(), before, "nothing is left there");
    }

    #[test]
    fn a_catalog_that_is_half_made_is_made_again() {
        let dir = TempDir::new().unwrap();
        let first = CatalogStore::open(dir.path()).unwrap().id();
        fs::remove_file(dir.path().join("catalog.json")).unwrap();
        fs::write(dir.path().join("catalog.json.new"), "{").unwrap();
        assert_ne!(open_again(dir.path()).id(), first);
    }
}
