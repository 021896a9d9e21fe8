//! Finding the data of a sparse file, and making holes.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The first range of data in `file` at or after `from` and before `end`. If the file system does
/// not support holes, the whole rest counts as data.
pub(crate) fn next_data(file: &File, from: u64, end: u64) -> io::Result<Option<Range<u64>>> {
    if from >= end {
        return Ok(None);
    }
    let start = match seek(file, from, libc::SEEK_DATA) {
        Ok(start) if start < end => start,
        Ok(_) => return Ok(None),
        Err(error) => {
            return match error.raw_os_error() {
                Some(libc::ENXIO) => Ok(None),
                Some(libc::EINVAL | libc::EOPNOTSUPP) => Ok(Some(from..end)),
                _ => Err(error),
            };
        }
    };
    Ok(Some(start..seek(file, start, libc::SEEK_HOLE)?.min(end)))
}

/// Allocates space for a range of a file. The content and the length do not change.
pub(crate) fn allocate(file: &File, range: Range<u64>) -> io::Result<()> {
    fallocate(file, range, 0)
}

fn fallocate(file: &File, range: Range<u64>, mode: libc::c_int) -> io::Result<()> {
    let start = libc::off_t::try_from(range.start).map_err(io::Error::other)?;
    let len = libc::off_t::try_from(range.end - range.start).map_err(io::Error::other)?;
    let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: the call takes no pointers, and the descriptor is open while `file` is borrowed.
    match unsafe { libc::fallocate(file.as_raw_fd(), mode, start, len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes a range of a file or a block device zeros without writing them, if possible with a hole, or
/// by a discard that leaves zeros. Returns `false`, and may have changed nothing, if that is not
/// supported.
pub(crate) fn zero(file: &File, range: Range<u64>) -> io::Result<bool> {
    // On a device the second one lets the kernel write zeros.
    for mode in [libc::FALLOC_FL_PUNCH_HOLE, libc::FALLOC_FL_ZERO_RANGE] {
        let Err(error) = fallocate(file, range.clone(), mode) else { return Ok(true) };
        match error.raw_os_error() {
            // The last one is what a device says of a part of its block.
            Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::EINVAL) => {}
            _ => return Err(error),
        }
    }
    Ok(false)
}

/// Gives a file another name, unless that name is in use.
pub(crate) fn rename_without_replacing(from: &Path, to: &Path) -> io::Result<()> {
    let [old, new] = [from, to].map(|path| CString::new(path.as_os_str().as_bytes()));
    let (old, new) = (old?, new?);
    let (at, flags) = (libc::AT_FDCWD, libc::RENAME_NOREPLACE);
    // SAFETY: both paths are C strings that outlive the call.
    if unsafe { libc::renameat2(at, old.as_ptr(), at, new.as_ptr(), flags) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // The file system does not support the flag.
        Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP) if !fs::exists(to)? => {
            fs::rename(from, to)
        }
        Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP) => {
            Err(io::ErrorKind::AlreadyExists.into())
        }
        _ => Err(error),
    }
}

fn seek(file: &File, offset: u64, whence: libc::c_int) -> io::Result<u64> {
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: the call takes no pointers, and the descriptor is open while `file` is borrowed.
    let found = unsafe { libc::lseek(file.as_raw_fd(), offset, whence) };
    u64::try_from(found).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::next_data;
    use std::os::unix::fs::FileExt;

    #[test]
    fn holes_are_skipped() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 << 20).unwrap();
        file.write_all_at(b"x", 1 << 20).unwrap();
        let data = next_data(&file, 0, 4 << 20).unwrap().unwrap();
        assert!(data.contains(&(1 << 20)), "{data:?}");
        assert_eq!(next_data(&file, data.end, 4 << 20).unwrap(), None);
        assert_eq!(next_data(&file, 4 << 20, 4 << 20).unwrap(), None);
    }
}
