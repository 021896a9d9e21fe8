//! The data directory of a catalog that is served.
//!
//! ```text
//! DIR/catalog.json   the marker: which catalog this is
//! DIR/catalog.db     the documents
//! DIR/lock           one process serves it
//! ```

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::super::Embedded;
use crate::error::{Error, ErrorKind, Result};
use crate::id::CatalogId;
use crate::sys;

const MARKER: &str = "catalog.json";
const DATABASE: &str = "catalog.db";
const FORMAT: &str = "cairn-catalog";
const VERSION: u64 = 1;

/// What the names in the directory of a catalog that is half made begin with.
const PARTS: [&str; 3] = ["lock", DATABASE, "catalog.json.new"];

#[derive(Serialize, Deserialize)]
struct Marker {
    format: String,
    version: u64,
    id: String,
}

/// A catalog's directory, in use by this process.
pub struct CatalogStore {
    id: CatalogId,
    names: Arc<Embedded>,
    _lock: File,
}

impl CatalogStore {
    /// Opens a data directory, and makes it first if it is empty or not there.
    pub fn open(directory: &Path) -> Result<CatalogStore> {
        fs::create_dir_all(directory).map_err(|error| Error::io("making", directory, error))?;
        // Before the lock: nothing is put into a directory of something else.
        let found = read_marker(directory)?;
        if found.is_none() {
            check_unused(directory)?;
        }
        let lock = lock(directory)?;
        let id = match read_marker(directory)? {
            Some(id) => id,
            None => make(directory)?,
        };
        let names = Arc::new(Embedded::open(&directory.join(DATABASE))?);
        Ok(CatalogStore { id, names, _lock: lock })
    }

    /// Which catalog this is.
    pub fn id(&self) -> CatalogId {
        self.id
    }

    /// Its documents. Who changes them here is seen by all who are served.
    pub fn names(&self) -> &Arc<Embedded> {
        &self.names
    }
}

/// Locks a data directory for this process.
fn lock(directory: &Path) -> Result<File> {
    let path = directory.join("lock");
    let failed = |error| Error::io("locking", &path, error);
    let file =
        File::options().write(true).create(true).truncate(false).open(&path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => {
            let reason = "another process serves it; stop that one, or name another directory";
            let (address, kind) = (directory.display().to_string(), ErrorKind::Conflict);
            Err(Error::Catalog { address, kind, reason: reason.into() })
        }
        Err(fs::TryLockError::Error(error)) => Err(failed(error)),
    }
}

/// Which catalog a data directory is; nothing if it is none yet.
fn read_marker(directory: &Path) -> Result<Option<CatalogId>> {
    let path = directory.join(MARKER);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("reading", &path, error)),
    };
    let corrupt = |reason: String| Error::corrupt(path.display().to_string(), reason);
    let marker: Marker =
        serde_json::from_slice(&text).map_err(|error| corrupt(error.to_string()))?;
    if marker.format != FORMAT {
        return Err(corrupt("it is not the marker of a catalog".into()));
    }
    if marker.version != VERSION {
        let (object, found) = (path.display().to_string(), marker.version);
        return Err(Error::NewerFormat { object, found, supported: VERSION });
    }
    marker.id.parse().map(Some)
}

/// Fails if there is anything else than parts of a catalog.
fn check_unused(directory: &Path) -> Result<()> {
    let failed = |error| Error::io("reading", directory, error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let name = name.to_string_lossy();
        // Another process may be making it.
        if name != MARKER && !PARTS.iter().any(|part| name.starts_with(part)) {
            let reason = "is not empty and not a catalog's; name another directory";
            return Err(Error::BadArgument(format!("{} {reason}", directory.display())));
        }
    }
    Ok(())
}

/// Makes a new catalog. The marker comes last: without it, what is there is half made, and is made again.
fn make(directory: &Path) -> Result<CatalogId> {
    let path = directory.join(MARKER);
    let failed = |error| Error::io("writing", &path, error);
    Embedded::create(&directory.join(DATABASE))?;
    let id = CatalogId::from_bytes(sys::random().map_err(failed)?);
    let marker = Marker { format: FORMAT.into(), version: VERSION, id: id.to_string() };
    let text = serde_json::to_string_pretty(&marker).expect("a marker is plain") + "\n";
    let new = directory.join("catalog.json.new");
    let mut file = File::create(&new).map_err(failed)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
    fs::rename(&new, &path).map_err(failed)?;
    sys::sync_dir(directory)?;
    if let Some(parent) = directory.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        sys::sync_dir(parent)?;
    }
    Ok(id)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::CatalogStore;
    use crate::cluster::peer::PeerStore;

    #[test]
    fn a_directory_is_never_taken_for_something_else() {
        let dir = TempDir::new().unwrap();
        let of = |name: &str| dir.path().join(name);
        let catalog = CatalogStore::open(&of("catalog")).unwrap();
        let second = CatalogStore::open(&of("catalog")).map(drop).unwrap_err().to_string();
        assert!(second.contains("another process"), "{second}");
        let id = catalog.id();
        drop(catalog);
        assert_eq!(CatalogStore::open(&of("catalog")).unwrap().id(), id);
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
        assert_ne!(CatalogStore::open(dir.path()).unwrap().id(), first);
    }
}
