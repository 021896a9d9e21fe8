//! System calls that the standard library does not have.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use crate::error::{Error, Result};

/// Writes all slices, one after the other, at `offset`. There are at most 1024 slices.
pub(crate) fn write_all_at(file: &File, slices: &[&[u8]], offset: u64) -> io::Result<()> {
    let vectors: Vec<_> = slices.iter().copied().map(IoSlice::new).collect();
    let count = vectors.len().try_into().expect("there are at most 1024 slices");
    // SAFETY: `IoSlice` has the layout of `iovec`, each is borrowed memory, and the kernel only
    // reads it.
    let written = unsafe {
        libc::pwritev64(file.as_raw_fd(), vectors.as_ptr().cast(), count, offset as libc::off64_t)
    };
    // The rest of a partial write is written alone, which reports its error: a full disk, for
    // example.
    let mut done = match usize::try_from(written) {
        Ok(done) => done,
        Err(_) => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => 0,
            error => return Err(error),
        },
    };
    let mut at = offset;
    for slice in slices {
        let skip = done.min(slice.len());
        file.write_all_at(&slice[skip..], at + skip as u64)?;
        done -= skip;
        at += slice.len() as u64;
    }
    Ok(())
}

/// Sets how many bytes make a socket readable (`SO_RCVLOWAT`). The end of the stream makes it
/// readable, too.
pub(crate) fn set_least_to_read(socket: BorrowedFd<'_>, bytes: libc::c_int) -> io::Result<()> {
    let len = size_of_val(&bytes) as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of the value, and the descriptor is open while it is
    // borrowed.
    let set = unsafe {
        let (fd, value) = (socket.as_raw_fd(), (&raw const bytes).cast());
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, value, len)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Allocates a part of the file. The file then reaches at least to the part's end. Existing content
/// does not change.
pub(crate) fn allocate(file: &File, part: Range<u64>) -> io::Result<()> {
    let (start, len) = (part.start as libc::off64_t, (part.end - part.start) as libc::off64_t);
    // SAFETY: the call takes no pointers, and the descriptor is open while `file` is borrowed.
    match unsafe { libc::fallocate64(file.as_raw_fd(), 0, start, len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Allocates space for the first `len` bytes of the file. The file's length does not change.
pub(crate) fn allocate_beyond_end(file: &File, len: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: the call takes no pointers, and the descriptor is open while `file` is borrowed.
    match unsafe { libc::fallocate64(file.as_raw_fd(), mode, 0, len as libc::off64_t) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Frees the space of a part of the file. The part then reads as zeros, and the file's length does
/// not change.
pub(crate) fn punch(file: &File, part: Range<u64>) -> io::Result<()> {
    let (start, len) = (part.start as libc::off64_t, (part.end - part.start) as libc::off64_t);
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: the call takes no pointers, and the descriptor is open while `file` is borrowed.
    match unsafe { libc::fallocate64(file.as_raw_fd(), mode, start, len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The first part of the file at or after `from` that takes space; `None` if there is none.
pub(crate) fn next_data(file: &File, from: u64) -> io::Result<Option<Range<u64>>> {
    let seek = |from: u64, whence| {
        // SAFETY: the call takes no pointers, and the descriptor is open while `file` is borrowed.
        match unsafe { libc::lseek64(file.as_raw_fd(), from as libc::off64_t, whence) } {
            -1 => Err(io::Error::last_os_error()),
            at => Ok(at as u64),
        }
    };
    match seek(from, libc::SEEK_DATA) {
        Ok(start) => Ok(Some(start..seek(start, libc::SEEK_HOLE)?)),
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Makes a directory's entries durable.
pub(crate) fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(|e| Error::io("syncing", path, e))
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

/// Until it is dropped, the kernel serves the I/O of the calling thread only when no other thread
/// wants the disk. Not every I/O scheduler honours that. The thread should hold no lock meanwhile:
/// others would wait with it.
pub(crate) struct IdleIoPriority(());

impl IdleIoPriority {
    const CLASS_NONE: libc::c_int = 0;
    const CLASS_IDLE: libc::c_int = 3;

    pub(crate) fn set() -> IdleIoPriority {
        Self::set_class(Self::CLASS_IDLE);
        IdleIoPriority(())
    }

    /// Sets the class of the calling thread. A failure is ignored: the thread then has another
    /// priority, which is not wrong.
    fn set_class(class: libc::c_int) {
        /// The target of the call is one thread; its id 0 is the calling thread.
        const WHO_PROCESS: libc::c_int = 1;
        const CLASS_SHIFT: libc::c_int = 13;
        // SAFETY: the call takes no pointers.
        unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, class << CLASS_SHIFT) };
    }
}

impl Drop for IdleIoPriority {
    fn drop(&mut self) {
        Self::set_class(Self::CLASS_NONE);
    }
}

/// Drops a part of the file from the page cache, except pages that are dirty or in use.
pub(crate) fn drop_cached(file: &File, part: Range<u64>) -> io::Result<()> {
    let (start, len) = (part.start as libc::off64_t, (part.end - part.start) as libc::off64_t);
    // SAFETY: the call takes no pointers, and the descriptor is open while `file` is borrowed.
    match unsafe { libc::posix_fadvise64(file.as_raw_fd(), start, len, libc::POSIX_FADV_DONTNEED) }
    {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// The magic number of the file system that holds `path`.
pub(crate) fn file_system_type(path: &Path) -> io::Result<u64> {
    // The field's type differs between targets; the magic numbers have 32 bits.
    Ok(file_system(path)?.f_type as u64 & 0xffff_ffff)
}

/// Bytes that are free on the file system that holds `path`.
pub(crate) fn free_space(path: &Path) -> Result<u64> {
    let stat = file_system(path)
        .map_err(|error| Error::io("examining the file system of", path, error))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_bsize as u64))
}

/// The size of the file system that holds `path`, in bytes.
pub(crate) fn file_system_size(path: &Path) -> Result<u64> {
    let stat = file_system(path)
        .map_err(|error| Error::io("examining the file system of", path, error))?;
    Ok(stat.f_blocks.saturating_mul(stat.f_bsize as u64))
}

fn file_system(path: &Path) -> io::Result<libc::statfs> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut stat = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: `path` is a C string and `stat` has room for the structure that the kernel fills.
    if unsafe { libc::statfs(path.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the kernel has filled the structure, which has only numbers.
    Ok(unsafe { stat.assume_init() })
}

/// Gives the calling thread the lowest priority, for as long as it runs. Only a privileged thread could
/// undo that.
pub(crate) fn lower_priority() {
    // SAFETY: the call only changes how the kernel schedules this thread: 0 stands for it. It cannot fail
    // for the thread itself.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
}

/// Whether there is a process with this pid, of any user.
pub(crate) fn has_process(pid: u32) -> bool {
    let Ok(pid) = libc::pid_t::try_from(pid) else { return false };
    // SAFETY: signal 0 is sent to nobody.
    let found = unsafe { libc::kill(pid, 0) };
    found == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// The time since the boot of the kernel, with the time that the host slept (`CLOCK_BOOTTIME`).
/// Nobody can set this clock.
pub(crate) fn time_since_boot() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is the structure that the kernel fills.
    let got = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    assert_eq!(got, 0, "Linux has this clock since 2.6.39");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Raises the number of files that this process may have open as far as the system permits. Returns
/// the number.
pub(crate) fn raise_open_files() -> io::Result<u64> {
    let mut limit = MaybeUninit::<libc::rlimit64>::uninit();
    // SAFETY: `limit` has room for the structure that the kernel fills.
    if unsafe { libc::getrlimit64(libc::RLIMIT_NOFILE, limit.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the kernel has filled the structure.
    let before = unsafe { limit.assume_init() };
    let raised = libc::rlimit64 { rlim_cur: before.rlim_max, ..before };
    // SAFETY: the kernel only reads the structure.
    match unsafe { libc::setrlimit64(libc::RLIMIT_NOFILE, &raw const raised) } {
        0 => Ok(raised.rlim_cur),
        // A sandbox may forbid the change.
        _ => Ok(before.rlim_cur),
    }
}

/// Random bytes that nobody can predict.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}
