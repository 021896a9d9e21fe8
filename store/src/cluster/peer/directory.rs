//! The data directory of a peer: one process at a time, and a marker that says whose it is.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::table::{self, DATABASE};
use crate::blobs::LocalBlobs;
use crate::error::{Error, Result};
use crate::id::PeerId;
use crate::sys;

const MARKER: &str = "peer.json";
const FORMAT: &str = "cairn-peer";
/// Version 1 was never released.
const VERSION: u64 = 2;

/// What the names in the directory of a peer that is half made begin with.
const PARTS: [&str; 5] = ["lock", "segments", "index.db", DATABASE, "peer.json.new"];

#[derive(Serialize, Deserialize)]
struct Marker {
    format: String,
    version: u64,
    id: String,
}

/// Takes a data directory for this process, and makes it first if it is empty or not there. It is free again when
/// the file is closed.
pub(super) fn take(directory: &Path) -> Result<(File, PeerId)> {
    fs::create_dir_all(directory).map_err(|error| Error::io("making", directory, error))?;
    let lock = lock(directory)?;
    let id = match read_marker(directory)? {
        Some(id) => id,
        None => make(directory)?,
    };
    Ok((lock, id))
}

/// Locks a data directory for this process.
fn lock(directory: &Path) -> Result<File> {
    let path = directory.join("lock");
    let failed = |error| Error::io("locking", &path, error);
    let file =
        File::options().write(true).create(true).truncate(false).open(&path).map_err(failed)?;
    file.try_lock().map_err(|error| failed(error.into()))?;
    Ok(file)
}

/// Who the peer of a data directory is; nothing if it is none yet.
fn read_marker(directory: &Path) -> Result<Option<PeerId>> {
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
        return Err(corrupt("it is not the marker of a peer".into()));
    }
    let (object, found, supported) = (path.display().to_string(), marker.version, VERSION);
    match found {
        VERSION => {}
        ..VERSION => return Err(Error::OlderFormat { object, found, supported }),
        _ => return Err(Error::NewerFormat { object, found, supported }),
    }
    marker.id.parse().map(Some)
}

/// Makes a new peer. The marker comes last: without it, what is there is half made, and is made again.
fn make(directory: &Path) -> Result<PeerId> {
    let path = directory.join(MARKER);
    let failed = |error| Error::io("writing", &path, error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if !PARTS.iter().any(|part| name.to_string_lossy().starts_with(part)) {
            let reason = "is not empty and not a peer's; name another directory";
            return Err(Error::BadArgument(format!("{} {reason}", directory.display())));
        }
    }
    LocalBlobs::create(directory)?;
    table::make(directory)?;
    let id = PeerId::from_bytes(sys::random().map_err(failed)?);
    let marker = Marker { format: FORMAT.into(), version: VERSION, id: id.to_string() };
    let text = serde_json::to_string_pretty(&marker).expect("a marker is plain") + "\n";
    let new = directory.join("peer.json.new");
    let mut file = File::create(&new).map_err(failed)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
    fs::rename(&new, &path).map_err(failed)?;
    sys::sync_dir(directory)?;
    if let Some(parent) = directory.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        sys::sync_dir(parent)?;
    }
    Ok(id)
}
