//! The layout of a repository in a directory: checking it and creating it.
//!
//! ```text
//! PATH/repository.json   the marker, written last
//! PATH/catalog.db        the catalog documents
//! PATH/segments/         the blobs
//! PATH/index.db          the position of each blob
//! PATH/reserve           space for a full file system
//! ```
//!
//! Several processes may create the same repository at once: each step is idempotent.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::blobs::directory::DirectoryBlobs;
use crate::documents::SqliteDocuments;
use crate::durable::reserve;
use crate::error::{Error, Result};
use crate::sys;

const MARKER: &str = "repository.json";
const FORMAT: &str = "cairn-repository";
const VERSION: u64 = 4;

/// Prefixes of the names of a repository's files, except the marker.
const PARTS: [&str; 5] =
    ["segments", "catalog.db", "index.db", "repository.json.", reserve::FILE_NAME];

/// File systems that cannot hold a catalog, by the magic number of `statfs`.
///
/// Processes on several hosts could use such a file system at once, but locks and shared memory do
/// not work across hosts. FUSE is in the list because it does not reveal what is behind it.
const NETWORK_FILE_SYSTEMS: [(u64, &str); 16] = [
    (0x6969, "NFS"),
    (0x517b, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x0102_1997, "9P"),
    (0x6573_5546, "FUSE"),
    (0x00c3_6400, "Ceph"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x7375_7245, "Coda"),
    (0x0bd0_0bd0, "Lustre"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x786f_4256, "a shared folder of VirtualBox"),
];

/// The content of the marker.
#[derive(Serialize, Deserialize)]
struct Marker {
    format: String,
    version: u64,
}

/// Returns the directory that a repository's address names.
pub(crate) fn directory_of(url: &str) -> Result<PathBuf> {
    match url.strip_prefix("dir:") {
        Some(path) if !path.is_empty() => {
            std::path::absolute(path).map_err(|e| Error::io("resolving", Path::new(path), e))
        }
        _ => Err(Error::BadUrl { url: url.into() }),
    }
}

/// Returns the file of the catalog.
pub(crate) fn catalog(path: &Path) -> PathBuf {
    path.join("catalog.db")
}

/// Fails unless the directory is a repository that this program understands. Changes nothing.
pub(crate) fn check(path: &Path) -> Result<()> {
    let file = path.join(MARKER);
    let text = match fs::read(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let path = path.to_owned();
            return Err(match fs::exists(&path) {
                Ok(true) => Error::NotARepository { path },
                _ => Error::NoRepository { path },
            });
        }
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return Err(Error::NotARepository { path: path.to_owned() });
        }
        Err(error) => return Err(Error::io("reading", &file, error)),
    };
    let marker: Marker = serde_json::from_slice(&text)
        .map_err(|error| Error::corrupt(file.display().to_string(), error.to_string()))?;
    if marker.format != FORMAT {
        return Err(Error::NotARepository { path: path.to_owned() });
    }
    Error::check_format(&file, marker.version, VERSION)?;
    check_file_system(path)
}

/// Creates a repository in the directory, unless it is one already. Fails if the directory holds
/// other files, or a repository that has lost its marker: only the marker states the version of its
/// blobs.
pub(crate) fn create(path: &Path) -> Result<()> {
    // The directories that do not exist, the deepest first.
    let missing = path.ancestors().take_while(|dir| !dir.exists()).collect::<Vec<_>>();
    match check(path) {
        Err(Error::NoRepository { .. }) => {
            fs::create_dir_all(path).map_err(|e| Error::io("creating", path, e))?;
        }
        Err(Error::NotARepository { .. }) if is_unfinished(path)? => {
            // Blobs are stored only after the marker is written.
            if DirectoryBlobs::has_segments(path)? {
                return match check(path) {
                    // Another process has written the marker meanwhile.
                    Ok(()) => Ok(()),
                    Err(_) => Err(Error::NoMarker { path: path.to_owned() }),
                };
            }
        }
        other => return other,
    }
    check_file_system(path)?;
    // Both fail if a database of another version is there.
    SqliteDocuments::create(&catalog(path))?;
    DirectoryBlobs::create(path)?;
    write_marker(path)?;
    sys::sync_dir(path)?;
    missing.into_iter().filter_map(Path::parent).try_for_each(sys::sync_dir)
}

/// Writes the marker atomically. It is written last, so a process that sees the marker sees a
/// complete repository.
fn write_marker(path: &Path) -> Result<()> {
    let marker = Marker { format: FORMAT.into(), version: VERSION };
    let mut text = serde_json::to_vec(&marker).expect("the marker is plain data");
    text.push(b'\n');
    // Several processes and threads may write a marker at once, so each uses its own temporary
    // file.
    let random = sys::random().map_err(|e| Error::io("reading", Path::new("/dev/urandom"), e))?;
    let temp = path.join(format!("{MARKER}.{:016x}", u64::from_le_bytes(random)));
    let written = File::create_new(&temp).and_then(|mut file| {
        file.write_all(&text)?;
        file.sync_all()
    });
    written.map_err(|e| Error::io("writing", &temp, e))?;
    let marker = path.join(MARKER);
    fs::rename(&temp, &marker).map_err(|e| Error::io("renaming a file to", &marker, e))
}

/// Returns whether the directory is empty or an incomplete repository: another process is creating
/// it, or has died while it did. The marker may appear during the call.
fn is_unfinished(path: &Path) -> Result<bool> {
    if !path.is_dir() {
        return Ok(false);
    }
    let entries = fs::read_dir(path).map_err(|e| Error::io("reading", path, e))?;
    for entry in entries {
        let name = entry.map_err(|e| Error::io("reading", path, e))?.file_name();
        let name = name.to_string_lossy();
        if name != MARKER && !PARTS.iter().any(|part| name.starts_with(part)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Fails if the directory is on a network file system.
fn check_file_system(path: &Path) -> Result<()> {
    let found = sys::file_system_type(path).map_err(|e| Error::io("examining", path, e))?;
    match NETWORK_FILE_SYSTEMS.iter().find(|(magic, _)| *magic == found) {
        Some((_, file_system)) => {
            Err(Error::NetworkFileSystem { path: path.to_owned(), file_system })
        }
        None => Ok(()),
    }
}
