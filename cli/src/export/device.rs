//! An export to a block device, which is written as a whole: what is a hole becomes zeros.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use cairn_store::{Repository, Snapshot};

use super::copy::Copy;
use super::disk::{Disk, Unwritten};
use super::jobs;
use crate::failure::{Doing, Exit, Failure, Outcome};

pub(crate) fn export(
    repository: &Repository,
    snapshot: &Snapshot,
    target: &Path,
    doing: &(impl Fn() -> String + Sync),
) -> Outcome {
    // The kernel refuses a device that is mounted, or in use by another device.
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).custom_flags(libc::O_EXCL).open(target);
    let mut file = file.doing(doing)?;
    check_size(&mut file, snapshot.geometry.size(), doing)?;
    let disk = Disk::new(file, Unwritten::DeviceData);
    let copy = Copy { repository, geometry: snapshot.geometry, disk: &disk };
    copy.run(jobs::whole(repository, snapshot), &mut |_| Ok(()), doing)?;
    disk.sync().doing(doing)
}

/// Fails if the device is smaller than the disk. What is behind the disk stays as it is.
pub(super) fn check_size(file: &mut File, size: u64, doing: &impl Fn() -> String) -> Outcome {
    let len = file.seek(SeekFrom::End(0)).doing(doing)?;
    if len >= size {
        return Ok(());
    }
    let why = format!("the device has {len} bytes, and the disk {size}; use a larger device");
    Err(Failure::new(Exit::Conflict, doing(), why))
}
