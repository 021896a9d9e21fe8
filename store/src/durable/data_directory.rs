//! The data directory of a server: one process at a time, and a marker that says what it is, and which one.
//!
//! ```text
//! DIR/lock          held by the process that serves it
//! DIR/NAME.json     the marker: format, version, and a random id
//! DIR/…             what the server keeps
//! ```

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::sys;

#[derive(Serialize, Deserialize)]
struct Marker {
    format: String,
    version: u64,
    id: String,
}

/// What a directory is for.
pub(crate) struct DataDirectory {
    /// What keeps its data there, in a word.
    pub(crate) server: &'static str,
    /// The name of the marker.
    pub(crate) marker: &'static str,
    pub(crate) format: &'static str,
    pub(crate) version: u64,
    /// What the names of the server's own files begin with.
    pub(crate) parts: &'static [&'static str],
}

impl DataDirectory {
    /// Takes a directory for this process. One that is empty, or not there, is made first: `make` makes what the
    /// server needs. It is free again when the file is closed. Returns the server's id, too.
    pub(crate) fn take(
        &self,
        directory: &Path,
        make: impl FnOnce() -> Result<()>,
    ) -> Result<(File, String)> {
        fs::create_dir_all(directory).map_err(|error| Error::io("making", directory, error))?;
        // Before the lock: nothing is put into a directory of something else.
        if self.read_marker(directory)?.is_none() {
            self.check_unused(directory)?;
        }
        let lock = lock(directory)?;
        // Another process may have made it meanwhile.
        let id = match self.read_marker(directory)? {
            Some(id) => id,
            // The marker comes last: without it, what is there is half made, and is made again.
            None => {
                make()?;
                self.write_marker(directory)?
            }
        };
        Ok((lock, id))
    }

    /// Whose directory it is; nothing if it is nobody's yet.
    fn read_marker(&self, directory: &Path) -> Result<Option<String>> {
        let path = directory.join(self.marker);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io("reading", &path, error)),
        };
        let corrupt = |reason: String| Error::corrupt(path.display().to_string(), reason);
        let marker: Marker =
            serde_json::from_slice(&text).map_err(|error| corrupt(error.to_string()))?;
        if marker.format != self.format {
            return Err(corrupt(format!("it is not the marker of a {}", self.server)));
        }
        let (object, found) = (path.display().to_string(), marker.version);
        let supported = self.version;
        match found {
            _ if found < supported => Err(Error::OlderFormat { object, found, supported }),
            _ if found > supported => Err(Error::NewerFormat { object, found, supported }),
            _ => Ok(Some(marker.id)),
        }
    }

    /// Fails if there is anything else than the server's own files.
    fn check_unused(&self, directory: &Path) -> Result<()> {
        let failed = |error| Error::io("reading", directory, error);
        for entry in fs::read_dir(directory).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let name = name.to_string_lossy();
            // Another process may be making it.
            let is_ours = name == "lock"
                || name.starts_with(self.marker)
                || self.parts.iter().any(|part| name.starts_with(part));
            if !is_ours {
                let reason = format!("not a {}'s", self.server);
                return Err(Error::NotEmpty { path: directory.to_owned(), reason });
            }
        }
        Ok(())
    }

    /// Writes a marker with a new id, whole or not at all.
    fn write_marker(&self, directory: &Path) -> Result<String> {
        let path = directory.join(self.marker);
        let failed = |error| Error::io("writing", &path, error);
        let random: [u8; 16] = sys::random().map_err(failed)?;
        let id: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let marker = Marker { format: self.format.into(), version: self.version, id: id.clone() };
        let text = serde_json::to_string_pretty(&marker).expect("a marker is plain") + "\n";
        let new = directory.join(format!("{}.new", self.marker));
        let mut file = File::create(&new).map_err(failed)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
        fs::rename(&new, &path).map_err(failed)?;
        sys::sync_dir(directory)?;
        if let Some(parent) = directory.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            sys::sync_dir(parent)?;
        }
        Ok(id)
    }
}

/// Locks a directory for this process.
fn lock(directory: &Path) -> Result<File> {
    let path = directory.join("lock");
    let failed = |error| Error::io("locking", &path, error);
    let file =
        File::options().write(true).create(true).truncate(false).open(&path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(Error::InUse { path: directory.to_owned() }),
        Err(fs::TryLockError::Error(error)) => Err(failed(error)),
    }
}
