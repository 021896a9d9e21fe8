//! The file `mac.key`: the secrets that [seals](crate::encoding::SealKeys) are made with.
//!
//! Clients and supervisors have it, peers do not. The first secret makes seals. The others verify the
//! seals that were made before.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::encoding::{SealKeyId, SealKeys};
use crate::error::{Error, Result};
use crate::sys;

/// The name of the file.
pub(super) const MAC_KEYS: &str = "mac.key";

const FORMAT: &str = "cairn-mac-keys";
const VERSION: u64 = 1;

/// The mode of the file.
const PRIVATE: u32 = 0o600;

/// The content of the file.
#[derive(Serialize, Deserialize)]
struct MacKeys {
    format: String,
    version: u64,
    /// Secrets in hexadecimal digits, the newest first.
    keys: Vec<String>,
}

impl MacKeys {
    fn read(path: &Path) -> Result<MacKeys> {
        let text = fs::read(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::BadKeys(format!(
                "there is no {}; copy it from the directory that `cairn keys init` has created",
                path.display()
            )),
            _ => Error::BadKeys(format!("reading {}: {error}", path.display())),
        })?;
        let keys: MacKeys =
            serde_json::from_slice(&text).map_err(|error| damaged(path, &error.to_string()))?;
        if keys.format != FORMAT {
            return Err(damaged(path, "it does not hold keys for seals"));
        }
        Error::check_format(path, keys.version, VERSION)?;
        if keys.keys.is_empty() {
            return Err(damaged(path, "it holds no key"));
        }
        Ok(keys)
    }

    fn secrets(&self, path: &Path) -> Result<Vec<[u8; 32]>> {
        let secret = |text: &String| {
            let parsed = blake3::Hash::from_hex(text).map(|hash| *hash.as_bytes());
            parsed.map_err(|_| damaged(path, "a key is not 32 bytes"))
        };
        self.keys.iter().map(secret).collect()
    }

    /// Writes the file durably.
    fn write(&self, directory: &Path) -> Result<()> {
        let (path, new) = (directory.join(MAC_KEYS), directory.join(format!("{MAC_KEYS}.new")));
        let text = serde_json::to_string_pretty(self).expect("keys are plain data") + "\n";
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(PRIVATE);
        let written = options
            .open(&new)
            .and_then(|mut file: File| {
                file.write_all(text.as_bytes()).and_then(|()| file.sync_all())
            })
            .and_then(|()| fs::rename(&new, &path));
        written.map_err(|error| Error::io("writing", &path, error))?;
        sys::sync_dir(directory)
    }
}

fn damaged(path: &Path, reason: &str) -> Error {
    Error::BadKeys(format!(
        "{} cannot be used: {reason}; copy it from the directory that `cairn keys init` has \
         created, or from another client",
        path.display()
    ))
}

/// Reads the keys in a directory.
pub(super) fn load(directory: &Path) -> Result<SealKeys> {
    let path = directory.join(MAC_KEYS);
    Ok(SealKeys::new(&MacKeys::read(&path)?.secrets(&path)?))
}

/// Creates the file in a directory that does not have it.
pub(super) fn create(directory: &Path) -> Result<()> {
    let keys = MacKeys { format: FORMAT.into(), version: VERSION, keys: vec![secret(directory)?] };
    keys.write(directory)
}

/// Copies the file to another directory.
pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    MacKeys::read(&from.join(MAC_KEYS))?.write(to)
}

/// Adds a key that makes all seals from now on. The old keys still verify. Returns the id of the new
/// key, and how many there were before.
pub(super) fn rotate(directory: &Path) -> Result<(SealKeyId, usize)> {
    let path = directory.join(MAC_KEYS);
    let mut keys = MacKeys::read(&path)?;
    keys.secrets(&path)?;
    let before = keys.keys.len();
    keys.keys.insert(0, secret(directory)?);
    keys.write(directory)?;
    let id = load(directory)?.current().expect("the file has a key");
    Ok((id, before))
}

/// Removes all keys but the one that makes seals. Returns its id, and how many were removed.
pub(super) fn retire(directory: &Path) -> Result<(SealKeyId, usize)> {
    let path = directory.join(MAC_KEYS);
    let mut keys = MacKeys::read(&path)?;
    keys.secrets(&path)?;
    let retired = keys.keys.len() - 1;
    if retired > 0 {
        keys.keys.truncate(1);
        keys.write(directory)?;
    }
    let id = load(directory)?.current().expect("the file has a key");
    Ok((id, retired))
}

fn secret(directory: &Path) -> Result<String> {
    let secret: [u8; 32] =
        sys::random().map_err(|error| Error::io("reading random bytes for", directory, error))?;
    Ok(blake3::Hash::from_bytes(secret).to_hex().to_string())
}
