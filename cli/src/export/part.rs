//! An export to a file. The file gets its name only when it is complete.
//!
//! ```text
//! FILE.cairn-part    the content, as far as it is written
//! FILE.cairn-state   a record: of which snapshot, and which chunks are durable
//! ```
//!
//! | killed | is left | the next export |
//! |---|---|---|
//! | before the record is written | an empty part | begins |
//! | later | part and record | continues, if it is of the same content |
//! | after the part was renamed | the file, and a record | has nothing to continue |

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use cairn_store::{Geometry, Repository, Snapshot};

use super::copy::Copy;
use super::disk::{Disk, Unwritten};
use super::record::{Content, FileId, Record, sync_directory, with_suffix};
use super::{Options, jobs, update};
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::sparse::rename_without_replacing;

/// The part of a file that an export has written, locked against other exports.
struct Part {
    file: File,
    path: PathBuf,
    state: PathBuf,
    record: Record,
}

pub(crate) fn export(
    repository: &Repository,
    snapshot: &Snapshot,
    target: &Path,
    options: &Options,
    doing: &(impl Fn() -> String + Sync),
) -> Outcome {
    let replaced = File::open(target).ok();
    if let Some(replaced) = &replaced {
        lock_target(replaced, target, doing)?;
    }
    let mut part = Part::open(target, snapshot, options, doing)?;
    let from = part.record.durable_chunks;
    if from > 0 && !options.style.json {
        let offset = offset_of(snapshot.geometry, from);
        eprintln!(
            "note: continuing an interrupted export at {} of {}",
            options.style.size(offset),
            options.style.size(snapshot.geometry.size())
        );
    }
    let file = part.file.try_clone().doing(doing)?;
    let disk = Disk::new(file, Unwritten::Zeros);
    let copy = Copy { repository, geometry: snapshot.geometry, disk: &disk };
    let copied = copy.run(
        jobs::data(repository, snapshot, from),
        &mut |durable| {
            part.record.durable_chunks = durable;
            part.record.write(&part.state).doing(doing)
        },
        doing,
    );
    copied.map_err(|failure| part.keep(failure))?;
    disk.file().sync_all().doing(doing)?;
    if let Some(replaced) = &replaced {
        take_owner_and_mode(disk.file(), replaced).doing(doing)?;
        disk.file().sync_all().doing(doing)?;
    }
    part.place(target, options.force).doing(doing)
}

/// Locks the file that will be replaced, for as long as it is open. The process of a mirror holds a lock
/// on the mirror's data.
fn lock_target(file: &File, path: &Path, doing: &impl Fn() -> String) -> Outcome {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            let why = format!("another process uses {}; stop it first", path.display());
            Err(Failure::new(Exit::Conflict, doing(), why))
        }
        // Some file systems have no locks.
        _ => Ok(()),
    }
}

/// Gives a new file the owner and the permissions of the file that it replaces, as far as this user may.
fn take_owner_and_mode(new: &File, old: &File) -> io::Result<()> {
    let old = old.metadata()?;
    let _ = std::os::unix::fs::fchown(new, Some(old.uid()), Some(old.gid()));
    new.set_permissions(fs::Permissions::from_mode(old.mode() & 0o777))
}

fn offset_of(geometry: Geometry, chunk: u64) -> u64 {
    (chunk * u64::from(geometry.chunk_size())).min(geometry.size())
}

impl Part {
    /// Opens what an interrupted export of the same content has left, or begins.
    fn open(
        target: &Path,
        snapshot: &Snapshot,
        options: &Options,
        doing: &impl Fn() -> String,
    ) -> Outcome<Part> {
        let (path, state) =
            (with_suffix(target, ".cairn-part"), with_suffix(target, ".cairn-state"));
        let mut file = lock(&path, doing)?;
        if options.restart && file.metadata().doing(doing)?.len() > 0 {
            // Not truncated: if an export was killed at its very end, this is the complete file.
            fs::remove_file(&path).doing(doing)?;
            file = lock(&path, doing)?;
        }
        let content = Content::of(snapshot);
        let fresh = Record::new(content, None, FileId::of(&file).doing(doing)?);
        let size = snapshot.geometry.size();
        let mut record = fresh.clone();
        if file.metadata().doing(doing)?.len() > 0 {
            let why = |why: &str| {
                let why = format!("{}: {why}, or discard it with --restart", path.display());
                Err(Failure::new(Exit::Conflict, doing(), why))
            };
            match Record::read(&state) {
                Ok(Some(left)) if left.base.is_some() || left.file != fresh.file => {
                    return why("it does not belong to the record beside it; move it away");
                }
                Ok(Some(left)) if !left.content.is_equal(&fresh.content) => {
                    let name = &left.content.snapshot;
                    return why(&format!(
                        "it is a part of an export of {name}; continue with \
                         `cairn export {name} {}`",
                        target.display()
                    ));
                }
                Ok(Some(left)) if file.metadata().doing(doing)?.len() == size => record = left,
                // Killed before the file had its length: nothing is in it.
                Ok(Some(_)) => {}
                Ok(None) => return why("the record of its export is missing; move it away"),
                Err(error) => {
                    return why(&format!("its record cannot be used ({error}); move it away"));
                }
            }
        }
        // Before the file gets its length: a file with content has a record.
        record.write(&state).doing(doing)?;
        file.set_len(size).doing(doing)?;
        Ok(Part { file, path, state, record })
    }

    /// Keeps what a failed export has written, if it is worth it.
    fn keep(&self, failure: Failure) -> Failure {
        if self.record.durable_chunks == 0 {
            let _ = fs::remove_file(&self.path).and_then(|()| Record::remove(&self.state));
            return failure;
        }
        failure.and(format!(
            "{} has what was exported so far; the same command continues",
            self.path.display()
        ))
    }

    /// Gives the file the name of the target, durably. Without `force` it does not replace a file
    /// that has appeared in the meantime.
    fn place(&self, target: &Path, force: bool) -> io::Result<()> {
        match force {
            true => fs::rename(&self.path, target)?,
            false => rename_without_replacing(&self.path, target)?,
        }
        sync_directory(target)?;
        Record::remove(&self.state)?;
        // The file that was being updated is replaced.
        Record::remove(&update::record_path(target))
    }
}

/// Opens and locks the file at `path`. Creates it if it does not exist.
fn lock(path: &Path, doing: &impl Fn() -> String) -> Outcome<File> {
    loop {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        let file = file.doing(doing)?;
        if !file.metadata().doing(doing)?.is_file() {
            let why = format!("{} is not a regular file; move it away", path.display());
            return Err(Failure::new(Exit::Conflict, doing(), why));
        }
        lock_file(&file, path, doing)?;
        // Another export may have renamed the file before it was locked.
        let id = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let opened = id(file.metadata().doing(doing)?);
        if fs::metadata(path).is_ok_and(|found| id(found) == opened) {
            return Ok(file);
        }
    }
}

/// Locks a file against other exports.
pub(super) fn lock_file(file: &File, path: &Path, doing: &impl Fn() -> String) -> Outcome {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            let why = format!("another export is writing {}", path.display());
            Err(Failure::new(Exit::Conflict, doing(), why))
        }
        // Some network file systems have no locks.
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(error)) => Err(error).doing(doing),
    }
}
