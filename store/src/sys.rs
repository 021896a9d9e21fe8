//! The system calls that the standard library lacks.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Asks the kernel to start writing the file's dirty pages, without waiting for them.
///
/// This is a hint that makes a later sync short. File systems without it simply sync longer.
pub(crate) fn start_writeback(file: &File) {
    // SAFETY: the call takes no pointers, and the descriptor is open while `file` is borrowed.
    unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Ends direct I/O on the file, so that buffers of any alignment can be used with it.
pub(crate) fn end_direct_io(file: &File) -> io::Result<()> {
    // SAFETY: the call takes no pointers, and the descriptor is open while `file` is borrowed.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_DIRECT) } == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The magic number of the file system that holds `path`.
pub(crate) fn file_system_type(path: &Path) -> io::Result<u64> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut stat = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: `path` is a C string and `stat` has room for the structure that the kernel fills.
    if unsafe { libc::statfs(path.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the kernel has filled the structure; all of it is plain numbers.
    let stat = unsafe { stat.assume_init() };
    // The field's type differs between targets; the magic numbers have 32 bits.
    Ok(stat.f_type as u64 & 0xffff_ffff)
}
