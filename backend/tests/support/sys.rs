//! System calls that have no safe form in the standard library.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, Command};

use vmm_sys_util::eventfd::EventFd;

/// Memory that can be shared with another process by its descriptor.
pub(crate) fn memfd(len: u64) -> File {
    // SAFETY: the name is a C string that outlives the call.
    let fd = unsafe {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        libc::memfd_create(c"guest-memory".as_ptr(), flags)
    };
    assert!(fd >= 0, "memfd_create: {}", std::io::Error::last_os_error());
    // SAFETY: the call above returned this descriptor, and nothing else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len).expect("size the guest's memory");
    file
}

/// Lets a [`memfd`] keep its length for ever.
pub(crate) fn seal_length(file: &File) {
    let seals = libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    // SAFETY: fcntl with F_ADD_SEALS takes no pointers.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    assert_eq!(result, 0, "fcntl: {}", std::io::Error::last_os_error());
}

/// Memory like [`memfd`], in huge pages, or why that is not possible here. No pages are allocated.
pub(crate) fn memfd_of_huge_pages(len: u64) -> std::io::Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB;
    // SAFETY: as in `memfd`.
    let fd = unsafe { libc::memfd_create(c"huge-pages".as_ptr(), flags) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: as in `memfd`.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    Ok(file)
}

/// Any descriptor where the protocol has an event.
pub(crate) fn as_event(fd: impl Into<OwnedFd>) -> EventFd {
    // SAFETY: nothing else owns the descriptor any more.
    unsafe { EventFd::from_raw_fd(fd.into().into_raw_fd()) }
}

/// A socket whose end takes a minute: its peer, which comes with it, does not read what was sent.
pub(crate) fn lingering_socket() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = listener.local_addr().expect("an address");
    let mut socket = TcpStream::connect(address).expect("connect");
    let (peer, _) = listener.accept().expect("accept");
    socket.set_nonblocking(true).expect("a socket that does not block");
    while socket.write(&[0; 64 << 10]).is_ok() {}
    let linger = libc::linger { l_onoff: 1, l_linger: 60 };
    // SAFETY: the option is a live variable of the size that is passed.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of_val(&linger) as libc::socklen_t,
        )
    };
    assert_eq!(result, 0, "setsockopt: {}", std::io::Error::last_os_error());
    (socket, peer)
}

/// Sends `signal` to a child that was not waited for yet.
pub(crate) fn signal(child: &Child, signal: i32) {
    // SAFETY: kill takes no pointers; the child is not reaped, so its id is still its own.
    let result = unsafe { libc::kill(child.id() as i32, signal) };
    assert_eq!(result, 0, "kill: {}", std::io::Error::last_os_error());
}

/// Waits until a child that was told to stop has done so.
pub(crate) fn wait_until_stopped(child: &Child) {
    let mut status = 0;
    // SAFETY: the status is writable. A child that has only stopped is not reaped.
    let result = unsafe { libc::waitpid(child.id() as i32, &raw mut status, libc::WUNTRACED) };
    assert!(result > 0 && libc::WIFSTOPPED(status), "cairn-blk ended instead of stopping");
}

/// Lets a child inherit `fd` as it is: clears its close-on-exec flag.
pub(crate) fn inherit(fd: i32) {
    // SAFETY: fcntl with F_SETFD takes no pointers.
    let result = unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
    assert_eq!(result, 0, "fcntl: {}", std::io::Error::last_os_error());
}

/// Mounts a tmpfs of `bytes` bytes, or returns why that is not possible here.
pub(crate) fn mount_tmpfs(at: &Path, bytes: u64) -> Result<Mounted, std::io::Error> {
    let target = c_string(at);
    let options = CString::new(format!("size={bytes}")).expect("no NUL in a number");
    // SAFETY: all pointers are C strings that outlive the call.
    let result = unsafe {
        libc::mount(
            c"tmpfs".as_ptr(),
            target.as_ptr(),
            c"tmpfs".as_ptr(),
            0,
            options.as_ptr().cast(),
        )
    };
    match result {
        0 => Ok(Mounted(target)),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Mounts the file system in the file `image`, on a device whose sectors have `sector_bytes` bytes,
/// or returns why that is not possible here.
pub(crate) fn mount_image(
    image: &Path,
    at: &Path,
    sector_bytes: u32,
) -> Result<Mounted, std::io::Error> {
    let run = |command: &mut Command| {
        let output = command.output()?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            false => Err(std::io::Error::other(String::from_utf8_lossy(&output.stderr))),
        }
    };
    let sectors = sector_bytes.to_string();
    let device =
        run(Command::new("losetup").args(["--find", "--show", "-b", &sectors]).arg(image))?;
    let mounted = run(Command::new("mount").arg(&device).arg(at));
    // While the file system is mounted, the device stays. It is gone with the file system.
    run(Command::new("losetup").args(["--detach", &device]))?;
    mounted.map(|_| Mounted(c_string(at)))
}

fn c_string(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("no NUL in a path")
}

/// A mounted file system, detached when dropped.
pub(crate) struct Mounted(CString);

impl Drop for Mounted {
    fn drop(&mut self) {
        // SAFETY: the path is a C string that outlives the call.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}
