//! System calls that std does not offer. All unsafe code of the agent is in this module.
#![allow(unsafe_code)]

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `_IOWR('X', 119, int)`, from `linux/fs.h`.
const FIFREEZE: libc::c_ulong = 0xC004_5877;
/// `_IOWR('X', 120, int)`, from `linux/fs.h`.
const FITHAW: libc::c_ulong = 0xC004_5878;

/// Connects to `port` of the hypervisor's host.
pub(crate) fn connect_to_host(port: u32) -> io::Result<OwnedFd> {
    // SAFETY: socket() takes no pointers.
    let raw = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    check(raw)?;
    // SAFETY: socket() just returned `raw`, and nothing else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(raw) };

    // SAFETY: sockaddr_vm is plain integers, for which all zeros is a valid value.
    let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = libc::VMADDR_CID_HOST;
    address.svm_port = port;
    // SAFETY: the pointer and the length describe `address`, which outlives the call.
    check(unsafe {
        libc::connect(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            mem::size_of::<libc::sockaddr_vm>() as libc::socklen_t,
        )
    })?;
    Ok(socket)
}

/// Flushes the file system that contains `directory`, then blocks all writes to it.
pub(crate) fn freeze(directory: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: FIFREEZE ignores its argument and touches no memory of ours.
    check(unsafe { libc::ioctl(directory.as_raw_fd(), FIFREEZE, 0) })
}

/// Ends a freeze. Fails with `EINVAL` if the file system is not frozen.
pub(crate) fn thaw(directory: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: FITHAW ignores its argument and touches no memory of ours.
    check(unsafe { libc::ioctl(directory.as_raw_fd(), FITHAW, 0) })
}

/// Flushes the file system that contains `directory` to its disk.
pub(crate) fn sync_filesystem(directory: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: syncfs() takes no pointers.
    check(unsafe { libc::syncfs(directory.as_raw_fd()) })
}

/// Flushes all file systems to their disks.
pub(crate) fn sync_all() {
    // SAFETY: sync() has no arguments and cannot fail.
    unsafe { libc::sync() }
}

/// Locks all pages of this process in memory, so that it can run while nothing can be paged in.
pub(crate) fn lock_memory() -> io::Result<()> {
    // SAFETY: mlockall() takes no pointers.
    check(unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) })
}

/// Starts a session of its own, so that signals to the terminal or the process group do not arrive.
pub(crate) fn leave_session() -> io::Result<()> {
    // SAFETY: setsid() has no arguments.
    check(unsafe { libc::setsid() })
}

/// Ignores `signal`. If `SIGCHLD` is ignored, no child becomes a zombie.
pub(crate) fn ignore_signal(signal: libc::c_int) {
    // SAFETY: SIG_IGN installs no handler, so no code of ours runs in signal context.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

/// The process in which [`fork`] has returned.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Parent,
    Child,
}

/// Forks this process.
pub(crate) fn fork() -> io::Result<Side> {
    // SAFETY: the agent has one thread, so the child inherits no lock that another thread holds.
    let pid = unsafe { libc::fork() };
    check(pid)?;
    Ok(if pid == 0 { Side::Child } else { Side::Parent })
}

/// Ends this process without the cleanup of an ordinary exit, which is left to the parent.
pub(crate) fn exit_child() -> ! {
    // SAFETY: _exit() has no preconditions and does not return.
    unsafe { libc::_exit(0) }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
