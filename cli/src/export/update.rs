//! An export to a file or device that holds a snapshot already: only what differs is written, in
//! place.
//!
//! While the file is part way between both snapshots, a record beside it says so. The same command
//! repairs it: it writes all differences again. Another export into the file is refused. A device has
//! no record.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use cairn_store::{Repository, Snapshot};

use super::copy::Copy;
use super::disk::{Disk, Unwritten};
use super::part::lock_file;
use super::record::{Content, FileId, Record, with_suffix};
use super::{Options, jobs};
use crate::failure::{Doing, Exit, Failure, Outcome};

/// The record of an update of this file.
pub(crate) fn record_path(target: &Path) -> PathBuf {
    with_suffix(target, ".cairn-update")
}

pub(crate) fn update(
    repository: &Repository,
    [base, snapshot]: [&Snapshot; 2],
    target: &Path,
    options: &Options,
    doing: &(impl Fn() -> String + Sync),
) -> Outcome {
    let is_device = fs::metadata(target).doing(doing)?.file_type().is_block_device();
    // The kernel refuses a device that is mounted, or in use by another device.
    let flags = if is_device { libc::O_EXCL } else { 0 };
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(target);
    let mut file = file.doing(doing)?;
    lock_file(&file, target, doing)?;
    let [from, to] = [base, snapshot].map(Content::of);
    let jobs = jobs::differences(repository, base, snapshot).doing(doing)?;
    if is_device {
        super::device::check_size(&mut file, from.size.max(to.size), doing)?;
        let disk = Disk::new(file, Unwritten::DeviceData);
        let copy = Copy { repository, geometry: snapshot.geometry, disk: &disk };
        // Behind the end of the base the device has something else, and the snapshots do not differ.
        let grown = from.size..to.size.max(from.size);
        let written = disk.zero(grown).doing(doing);
        let written = written.and_then(|()| copy.run(jobs, &mut |_| Ok(()), doing));
        return written.and_then(|()| disk.sync().doing(doing)).map_err(|failure| {
            failure.and(format!(
                "{} may be part way between {} and {}, which nothing records; run the same command \
                 again, or export the whole snapshot",
                target.display(),
                base.name(),
                snapshot.name()
            ))
        });
    }

    let path = record_path(target);
    let record = Record::new(to, Some(from), FileId::of(&file).doing(doing)?);
    let is_repair = check_record(&path, &record, target, doing)?;
    check_size(&mut file, &record, is_repair, options, doing)?;
    if is_repair && !options.style.json {
        eprintln!("note: completing an interrupted update of {}", target.display());
    }
    // Before the file changes.
    record.write(&path).doing(doing)?;
    file.set_len(base.geometry.size().max(record.content.size)).doing(doing)?;
    let disk = Disk::new(file, Unwritten::Data);
    let copy = Copy { repository, geometry: snapshot.geometry, disk: &disk };
    copy.run(jobs, &mut |_| Ok(()), doing).map_err(|failure| {
        failure.and(format!(
            "{} is part way between {} and {}; run the same command again",
            target.display(),
            base.name(),
            snapshot.name()
        ))
    })?;
    disk.file().set_len(record.content.size).doing(doing)?;
    disk.file().sync_all().doing(doing)?;
    Record::remove(&path).doing(doing)
}

/// Returns whether the same update was interrupted. Fails if another one was.
fn check_record(
    path: &Path,
    record: &Record,
    target: &Path,
    doing: &impl Fn() -> String,
) -> Outcome<bool> {
    let advice = format!(
        "or replace the file with `cairn export {} {} --force`",
        record.content.snapshot,
        target.display()
    );
    let conflict = |why: String| {
        Err(Failure::new(Exit::Conflict, doing(), format!("{}: {why}, {advice}", target.display())))
    };
    let left = match Record::read(path) {
        Ok(left) => left,
        Err(error) => return conflict(format!("an update of it was interrupted, and {error}")),
    };
    let Some(left) = left else { return Ok(false) };
    let bases = left.base.as_ref().zip(record.base.as_ref());
    let is_same = bases.is_some_and(|(one, other)| one.is_equal(other))
        && left.content.is_equal(&record.content);
    if left.file != record.file {
        let record = path.display();
        return conflict(format!(
            "it replaces a file whose update was interrupted; remove {record} if it holds the base"
        ));
    }
    if !is_same {
        let old = left.base.map(|base| base.snapshot).unwrap_or_default();
        let new = left.content.snapshot;
        return conflict(format!(
            "it is part way between {old} and {new}; complete it with \
             `cairn export {new} {} --base {old}`",
            target.display()
        ));
    }
    Ok(true)
}

/// Fails unless the file has the size of the base. A file that is part way may have the new size.
fn check_size(
    file: &mut File,
    record: &Record,
    is_repair: bool,
    options: &Options,
    doing: &impl Fn() -> String,
) -> Outcome {
    let len = file.seek(SeekFrom::End(0)).doing(doing)?;
    let base = record.base.as_ref().map_or(0, |base| base.size);
    if len == base || (is_repair && len == record.content.size) {
        return Ok(());
    }
    let size = |bytes| options.style.size(bytes);
    let why = format!(
        "the file has {} ({len} bytes), and the base {} ({base} bytes): it does not hold the base",
        size(len),
        size(base),
    );
    Err(Failure::new(Exit::Conflict, doing(), why))
}
