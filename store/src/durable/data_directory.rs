//! The data directory of a server. One process uses it at a time. A marker names its format and id.
//!
//! ```text
//! DIR/lock          locked by the process that uses the directory
//! DIR/NAME.json     the marker: format, version, and an id
//! DIR/…             the server's own files
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

/// A kind of data directory.
pub(crate) struct DataDirectory {
    /// What the server is, in a word: `peer` or `catalog`.
    pub(crate) server: &'static str,
    /// The file name of the marker.
    pub(crate) marker: &'static str,
    pub(crate) format: &'static str,
    pub(crate) version: u64,
    /// The prefixes of the names of the server's own files.
    pub(crate) parts: &'static [&'static str],
}

impl DataDirectory {
    /// Locks a directory for this process. If it is empty or does not exist, creates it first, with
    /// the id `new_id` or a random one; `make` then creates the server's files. Returns the lock,
    /// which closing the file releases, and the server's id.
    pub(crate) fn take(
        &self,
        directory: &Path,
        new_id: Option<String>,
        make: impl FnOnce() -> Result<()>,
    ) -> Result<(File, String)> {
        fs::create_dir_all(directory).map_err(|error| Error::io("creating", directory, error))?;
        // This comes before the lock, so that no file is created in a directory of another kind.
        if self.read_marker(directory)?.is_none() {
            self.check_unused(directory)?;
        }
        let lock = lock(directory)?;
        // Another process may have created the marker meanwhile.
        let id = match self.read_marker(directory)? {
            Some(id) => id,
            // The marker is written last. Files without it are unfinished and are created again.
            None => {
                make()?;
                self.write_marker(directory, new_id)?
            }
        };
        Ok((lock, id))
    }

    /// The id in the marker; `None` if there is no marker.
    pub(crate) fn read_marker(&self, directory: &Path) -> Result<Option<String>> {
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
        Error::check_format(&path, marker.version, self.version)?;
        Ok(Some(marker.id))
    }

    /// Fails if the directory holds anything but the server's own files.
    fn check_unused(&self, directory: &Path) -> Result<()> {
        let failed = |error| Error::io("reading", directory, error);
        for entry in fs::read_dir(directory).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let name = name.to_string_lossy();
            // Another process may be creating these files at the same time.
            let is_ours = name == "lock"
                || name.starts_with(self.marker)
                || self.parts.iter().any(|part| name.starts_with(part));
            if !is_ours {
                let reason = format!("is not a {}'s data directory", self.server);
                return Err(Error::NotEmpty { path: directory.to_owned(), reason });
            }
        }
        Ok(())
    }

    /// Writes a marker with the id `new_id` or a random one, atomically. Returns the id.
    fn write_marker(&self, directory: &Path, new_id: Option<String>) -> Result<String> {
        let path = directory.join(self.marker);
        let failed = |error| Error::io("writing", &path, error);
        let id: String = match new_id {
            Some(id) => id,
            None => {
                let random: [u8; 16] = sys::random().map_err(failed)?;
                random.iter().map(|byte| format!("{byte:02x}")).collect()
            }
        };
        let marker = Marker { format: self.format.into(), version: self.version, id: id.clone() };
        let text = serde_json::to_string_pretty(&marker).expect("a marker is plain data") + "\n";
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
