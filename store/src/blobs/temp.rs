//! Files that have no name in the repository yet.
//!
//! A temporary file's name tells its owner: `NAMESPACE-PID-START-SERIAL`. Whoever opens the repository
//! removes those whose owner is dead.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::process::Process;
use crate::sys;

/// A file of an owner that cannot be seen from here (another container) goes after this time. It is far
/// longer than a blob waits to be synced.
const FOREIGN_AGE: Duration = Duration::from_secs(24 * 3600);

/// What direct I/O needs of addresses and lengths, on any usual disk.
const ALIGNMENT: usize = 4096;

/// The directory of temporary files, on the file system of the blobs.
pub(crate) struct TempDir {
    path: PathBuf,
    owner: Process,
}

impl TempDir {
    pub(crate) fn new(path: PathBuf) -> Result<Self> {
        Ok(Self { path, owner: Process::current()? })
    }

    /// Writes `content` to a file of its own. It is not synced.
    pub(crate) fn write(&self, content: &[u8]) -> Result<TempFile> {
        // Two handles in one process share the owner's name, so the serial is the process's.
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let Process { pid_namespace, pid, start_time, .. } = &self.owner;
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let path = self.path.join(format!("{pid_namespace}-{pid}-{start_time}-{serial}"));
        let direct = is_aligned(content);
        let file = create(&path, direct).map_err(|e| Error::io("creating", &path, e))?;
        let temp =
            TempFile { file, path, len: content.len() as u64, placed: AtomicBool::new(false) };
        write(&temp.file, content, direct).map_err(|e| Error::io("writing", &temp.path, e))?;
        Ok(temp)
    }

    /// Removes what dead processes left behind. Failures are harmless: the next one tries again.
    pub(crate) fn remove_stale(&self) {
        let Ok(entries) = fs::read_dir(&self.path) else { return };
        for entry in entries.flatten() {
            let Some(owner) = entry.file_name().to_str().and_then(|name| self.owner_of(name))
            else {
                continue;
            };
            let stale = if owner.pid_namespace == self.owner.pid_namespace {
                owner.is_dead(&self.owner)
            } else {
                let age = entry.metadata().and_then(|m| m.modified()).map(|t| t.elapsed());
                matches!(age, Ok(Ok(age)) if age > FOREIGN_AGE)
            };
            if stale && let Err(error) = fs::remove_file(entry.path()) {
                tracing::debug!(path = %entry.path().display(), %error, "stale file stays");
            }
        }
    }

    /// The owner that the name tells. The boot is not part of it: a process of an earlier boot has
    /// another start time, up to a coincidence that costs only space.
    fn owner_of(&self, name: &str) -> Option<Process> {
        let mut parts = name.split('-');
        let owner = Process {
            boot_id: self.owner.boot_id.clone(),
            pid_namespace: parts.next()?.parse().ok()?,
            pid: parts.next()?.parse().ok()?,
            start_time: parts.next()?.parse().ok()?,
        };
        parts.next()?.parse::<u64>().ok()?;
        parts.next().is_none().then_some(owner)
    }
}

/// Whether the content can go to the disk without a copy in the page cache. Chunks usually can, and
/// are seldom read again soon by the host that wrote them.
fn is_aligned(content: &[u8]) -> bool {
    !content.is_empty()
        && content.len().is_multiple_of(ALIGNMENT)
        && content.as_ptr().addr().is_multiple_of(ALIGNMENT)
}

/// Makes a file, for direct I/O if that is wanted and the file system has it.
fn create(path: &Path, direct: bool) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create_new(true);
    if direct {
        match options.clone().custom_flags(libc::O_DIRECT).open(path) {
            // Some file systems notice only when the file exists.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                let _ = fs::remove_file(path);
            }
            opened => return opened,
        }
    }
    options.open(path)
}

/// Writes the whole file and leaves it open for buffers of any alignment.
fn write(file: &File, content: &[u8], direct: bool) -> io::Result<()> {
    if !direct {
        return file.write_all_at(content, 0);
    }
    let written = file.write_all_at(content, 0);
    sys::end_direct_io(file)?;
    match written {
        // The disk's own blocks may be larger than the alignment.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => file.write_all_at(content, 0),
        written => written,
    }
}

/// A temporary file. It is removed when it is dropped without having been placed.
#[derive(Debug)]
pub(crate) struct TempFile {
    file: File,
    path: PathBuf,
    len: u64,
    placed: AtomicBool,
}

impl TempFile {
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Returns when the content is durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io("syncing", &self.path, e))
    }

    /// Gives the file its name, in place of whatever had it.
    pub(crate) fn place(&self, target: &Path) -> Result<()> {
        fs::rename(&self.path, target).map_err(|e| Error::io("naming", target, e))?;
        self.placed.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if !self.placed.load(Ordering::Relaxed) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Makes the directory's entries durable.
pub(crate) fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(|e| Error::io("syncing", path, e))
}
