//! Finding the data of a sparse file.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

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
