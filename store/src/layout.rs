//! The directory of a repository: what makes it one, and how it comes to be.
//!
//! ```text
//! PATH/repository.json   the marker, written last
//! PATH/catalog.db        the names
//! PATH/blobs/00 … ff/    the blobs
//! PATH/tmp/              files without a name yet
//! ```
//!
//! Several processes may make the same repository at once: each step is fine with being done already.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::blobs::{DirBlobs, TempDir, sync_dir};
use crate::catalog::Catalog;
use crate::error::{Error, Result};
use crate::sys;

const MARKER: &str = "repository.json";
const FORMAT: &str = "cairn-repository";
const VERSION: u64 = 1;

/// What a repository that was not finished may hold.
const PARTS: [&str; 6] =
    ["blobs", "tmp", "catalog.db", "catalog.db-journal", "catalog.db-wal", "catalog.db-shm"];

/// File systems that cannot hold a catalog, for processes of several hosts could use it at once: their
/// locks differ, and shared memory does not reach from one host to another. FUSE is among them because
/// it does not tell what is behind it.
const NETWORK: [(u64, &str); 16] = [
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

#[derive(Serialize, Deserialize)]
struct Marker {
    format: String,
    version: u64,
}

/// The directory that a repository's address names.
pub(crate) fn directory_of(url: &str) -> Result<PathBuf> {
    match url.strip_prefix("dir:") {
        Some(path) if !path.is_empty() => {
            std::path::absolute(path).map_err(|e| Error::io("finding", Path::new(path), e))
        }
        _ => Err(Error::BadUrl { url: url.into() }),
    }
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
    if marker.version > VERSION {
        let (object, found) = (file.display().to_string(), marker.version);
        return Err(Error::NewerFormat { object, found, supported: VERSION });
    }
    check_file_system(path)
}

/// Makes the directory a repository if it is none. A directory with other things in it is left alone.
pub(crate) fn create(path: &Path) -> Result<()> {
    // The directories that do not exist yet, the deepest first.
    let missing = path.ancestors().take_while(|dir| !dir.exists()).collect::<Vec<_>>();
    match check(path) {
        Err(Error::NoRepository { .. }) => {
            fs::create_dir_all(path).map_err(|e| Error::io("creating", path, e))?;
        }
        Err(Error::NotARepository { .. }) if is_unfinished(path)? => {}
        other => return other,
    }
    check_file_system(path)?;
    DirBlobs::create(path)?;
    Catalog::create(path)?;
    write_marker(path)?;
    sync_dir(path)?;
    missing.into_iter().filter_map(Path::parent).try_for_each(sync_dir)
}

/// The marker comes last and whole, so that whoever sees it sees a finished repository.
fn write_marker(path: &Path) -> Result<()> {
    let marker = Marker { format: FORMAT.into(), version: VERSION };
    let mut text = serde_json::to_vec(&marker).expect("the marker is plain data");
    text.push(b'\n');
    let temp = TempDir::new(path.join("tmp"))?.write(&text)?;
    temp.sync()?;
    temp.place(&path.join(MARKER))
}

/// Whether the directory is empty, or another process is making it or died while it did. The marker
/// may appear in between.
fn is_unfinished(path: &Path) -> Result<bool> {
    if !path.is_dir() {
        return Ok(false);
    }
    let entries = fs::read_dir(path).map_err(|e| Error::io("reading", path, e))?;
    for entry in entries {
        let name = entry.map_err(|e| Error::io("reading", path, e))?.file_name();
        if name != MARKER && !PARTS.iter().any(|part| name == *part) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn check_file_system(path: &Path) -> Result<()> {
    let found = sys::file_system_type(path).map_err(|e| Error::io("examining", path, e))?;
    match NETWORK.iter().find(|(magic, _)| *magic == found) {
        Some((_, file_system)) => {
            Err(Error::NetworkFileSystem { path: path.to_owned(), file_system })
        }
        None => Ok(()),
    }
}
