//! System calls without a safe form in the standard library, and files for direct I/O.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Child;
use std::time::Duration;

/// Creates memory that can be shared with another process by its descriptor.
pub(crate) fn memfd(len: u64) -> Result<File> {
    // SAFETY: the name is a C string that outlives the call.
    let fd = unsafe { libc::memfd_create(c"guest-memory".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the call above returned this descriptor, and nothing else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    Ok(file)
}

/// Sends SIGTERM to a child that was not waited for yet.
pub(crate) fn terminate(child: &Child) {
    // SAFETY: kill takes no pointers. The child is not reaped, so no other process has its id.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
}

/// Flushes all file systems, so that delayed writes do not disturb the next measurement.
pub(crate) fn settle() {
    // SAFETY: sync takes no arguments.
    unsafe { libc::sync() };
}

/// The CPU time of all ended children of this process, and of their ended children.
pub(crate) fn children_cpu_time() -> Result<Duration> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call writes one rusage, which outlives it.
    if unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr()) } != 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: all bits zero are a valid rusage, and the call has succeeded.
    let usage = unsafe { usage.assume_init() };
    let time = |one: libc::timeval| Duration::new(one.tv_sec as u64, one.tv_usec as u32 * 1000);
    Ok(time(usage.ru_utime) + time(usage.ru_stime))
}

/// The number of clock ticks in a second. CPU times in /proc are in clock ticks.
pub(crate) fn clock_ticks() -> f64 {
    // SAFETY: sysconf takes no pointers.
    unsafe { libc::sysconf(libc::_SC_CLK_TCK) as f64 }
}

/// Makes ext4 place each new subdirectory in another part of the disk, as it does for the
/// directories of the root. Other file systems do not support it.
pub(crate) fn spread_out(directory: &Path) -> Result<()> {
    const TOP_DIRECTORY: libc::c_int = 0x0002_0000;
    let file = File::open(directory)?;
    let mut flags: libc::c_int = 0;
    // SAFETY: the call writes one int, which outlives it.
    let got = unsafe { libc::ioctl(file.as_raw_fd(), libc::FS_IOC_GETFLAGS, &mut flags) };
    flags |= TOP_DIRECTORY;
    // SAFETY: the call reads one int, which outlives it.
    let set = unsafe { libc::ioctl(file.as_raw_fd(), libc::FS_IOC_SETFLAGS, &flags) };
    if got == 0 && set == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Opens a file for direct I/O and sets its length. Creates it as a hole if it does not exist.
pub(crate) fn direct_file(path: &Path, len: u64) -> Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(libc::O_DIRECT)
        .open(path)?;
    file.set_len(len)?;
    Ok(file)
}

/// Allocates all blocks of a file, so that writes to it allocate nothing.
pub(crate) fn allocate(file: &File, len: u64) -> Result<()> {
    // SAFETY: fallocate takes no pointers.
    match unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len as libc::off_t) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// Memory that is aligned for direct I/O.
pub(crate) struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    const ALIGN: usize = 4096;

    pub(crate) fn new(len: usize) -> Aligned {
        let bytes = vec![0; len + Self::ALIGN];
        let start = bytes.as_ptr().align_offset(Self::ALIGN);
        Aligned { bytes, start, len }
    }

    pub(crate) fn get(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    pub(crate) fn get_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    pub(crate) fn read(&mut self, file: &File, offset: u64) -> Result<()> {
        file.read_exact_at(self.get_mut(), offset)
    }
}
