//! System calls that are not in the standard library: sockets, shared memory and priorities.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// A unix socket that a hypervisor uses.
pub(crate) enum UnixSocket {
    /// Each connection is one hypervisor.
    Listener(UnixListener),
    /// The only connection.
    Stream(UnixStream),
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Lowers the priority of this thread and of the threads that it starts.
pub(crate) fn yield_to_others() {
    const NICE: libc::c_int = 10;
    // SAFETY: no memory is passed. On Linux this affects the calling thread only, and lowering
    // one's own priority needs no privilege.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

/// Returns a random id.
pub(crate) fn random_id() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Creates zeroed memory that can be shared by passing its descriptor.
pub(crate) fn shared_memory(len: u64) -> io::Result<File> {
    // SAFETY: the name is a C string; the result is checked.
    let fd = check(unsafe { libc::memfd_create(c"cairn-ledger".as_ptr(), libc::MFD_CLOEXEC) })?;
    // SAFETY: a new descriptor that nothing else owns.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(len)?;
    Ok(file)
}

/// Whether this is an event descriptor. The kernel gives this name to nothing else.
pub(crate) fn is_event(file: &File) -> io::Result<bool> {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    Ok(name.as_os_str() == "anon_inode:[eventfd]")
}

/// The size of the pages of a file of huge pages. Returns `None` for other files.
pub(crate) fn huge_page_bytes(file: &File) -> io::Result<Option<u64>> {
    // SAFETY: an all-zero statfs is a valid value of that plain struct.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is writable and large enough, and the descriptor is open.
    check(unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut stat) })?;
    Ok((stat.f_type == libc::HUGETLBFS_MAGIC).then_some(stat.f_bsize as u64))
}

/// Whether the files of a directory are only in memory.
pub(crate) fn is_in_memory(path: &Path) -> io::Result<bool> {
    const RAMFS_MAGIC: libc::__fsword_t = 0x8584_58f6;
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())?;
    // SAFETY: an all-zero statfs is a valid value of that plain struct.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string, and `stat` is writable and large enough.
    check(unsafe { libc::statfs(path.as_ptr(), &raw mut stat) })?;
    Ok([libc::TMPFS_MAGIC, RAMFS_MAGIC].contains(&stat.f_type))
}

/// The descriptor that comes with the next bytes of a stream, if there is one. It also stays in the
/// socket: this is a duplicate.
pub(crate) fn peek_descriptor(stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0u8; 1];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: byte.len() };
    let mut control = DescriptorMessage([0; 4]);
    // SAFETY: an all-zero msghdr is a valid value of that plain struct.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = DescriptorMessage::LEN;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: `message` refers to `byte` and `control`, which are writable and live longer than the
    // call.
    let read = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, flags) };
    if read < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has filled in `message`.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: the header is null, or it is in `control`.
    let Some(header) = (unsafe { header.as_ref() }) else { return Ok(None) };
    let is_descriptor =
        header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS;
    if !is_descriptor || header.cmsg_len < DescriptorMessage::LEN {
        return Ok(None);
    }
    // SAFETY: the message has room for one descriptor, which the kernel has put there. It is new,
    // and nothing else owns it.
    unsafe {
        let fd = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
        Ok(Some(OwnedFd::from_raw_fd(fd)))
    }
}

/// Aligned space for a control message with one descriptor.
#[repr(C)]
struct DescriptorMessage([u64; 4]);

impl DescriptorMessage {
    /// The bytes that are used: room for one descriptor and no more, so that the kernel drops others.
    // SAFETY: CMSG_LEN only computes.
    const LEN: usize = unsafe { libc::CMSG_LEN(size_of::<RawFd>() as u32) } as usize;
}

/// Sends bytes on a stream, without waiting. Returns `WouldBlock` if there is no room for them.
pub(crate) fn send_at_once(stream: &UnixStream, bytes: &[u8]) -> io::Result<()> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `bytes` is readable memory of this length.
    let sent = unsafe { libc::send(stream.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    match usize::try_from(sent) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Makes a pending and every later accept on this socket fail.
pub(crate) fn shutdown(listener: &UnixListener) {
    // SAFETY: the descriptor is open, and no memory is passed. Fails only if the socket is shut
    // down already.
    unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) };
}

/// Waits until bytes arrive, and copies the first ones without taking them or the descriptors that
/// come with them. Returns how many were copied, which is 0 at the end of the connection.
pub(crate) fn peek(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        // SAFETY: the buffer is live, writable, and has the length that is passed.
        let len = unsafe {
            let buffer = bytes.as_mut_ptr().cast();
            libc::recv(stream.as_raw_fd(), buffer, bytes.len(), libc::MSG_PEEK)
        };
        match usize::try_from(len) {
            Ok(len) => return Ok(len),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
}

/// Listens on a unix socket, and replaces one that nobody listens on any more. A `private` socket
/// is accessible to this user only. Call this before other threads create files.
pub(crate) fn listen(path: &Path, private: bool) -> io::Result<UnixListener> {
    if UnixStream::connect(path).is_ok() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there"));
    }
    match std::fs::symlink_metadata(path) {
        Ok(found) if std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
            std::fs::remove_file(path)?;
        }
        Ok(_) => return Err(io::Error::other("the path exists and is not a socket")),
        Err(_) => {}
    }
    // SAFETY: this changes a number of the process. It is restored below, and no other thread
    // depends on it.
    let before = private.then(|| unsafe { libc::umask(0o177) });
    let listener = UnixListener::bind(path);
    if let Some(before) = before {
        // SAFETY: as above.
        unsafe { libc::umask(before) };
    }
    listener
}

/// Takes over a unix socket that was inherited under this descriptor number, listening or
/// connected.
pub(crate) fn inherited(fd: RawFd) -> io::Result<UnixSocket> {
    let mut listening: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: both pointers are to live variables of the sizes that are passed.
    check(unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_ACCEPTCONN,
            (&raw mut listening).cast(),
            &raw mut len,
        )
    })?;
    // SAFETY: the number is an open socket, and by the convention of the argument this process owns
    // it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok(match listening {
        0 => UnixSocket::Stream(socket.into()),
        _ => UnixSocket::Listener(socket.into()),
    })
}

/// A listening AF_VSOCK socket, on hosts whose kernel supports it.
pub(crate) struct VsockListener(OwnedFd);

impl VsockListener {
    /// Listens on this port for all guests.
    pub(crate) fn bind(port: u32) -> io::Result<VsockListener> {
        // SAFETY: no memory is passed.
        let fd = check(unsafe {
            libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)
        })?;
        // SAFETY: a new descriptor that nothing else owns.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: an all-zero sockaddr_vm is a valid value of that plain struct.
        let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
        address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
        address.svm_cid = libc::VMADDR_CID_ANY;
        address.svm_port = port;
        let len = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
        // SAFETY: the address is live and has the length that is passed.
        check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) })?;
        // SAFETY: no memory is passed.
        check(unsafe { libc::listen(socket.as_raw_fd(), 16) })?;
        Ok(VsockListener(socket))
    }

    /// Waits for a connection. Returns the guest's context id and the stream. Only reading, writing
    /// and closing are used, so the stream can be treated as a unix stream.
    pub(crate) fn accept(&self) -> io::Result<(u32, UnixStream)> {
        // SAFETY: as in `bind`.
        let mut peer: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
        // SAFETY: both pointers are to live variables of the sizes that are passed.
        let fd = check(unsafe {
            libc::accept4(
                self.0.as_raw_fd(),
                (&raw mut peer).cast(),
                &raw mut len,
                libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            )
        })?;
        // SAFETY: a new descriptor that nothing else owns.
        let stream = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok((peer.svm_cid, stream.into()))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::DescriptorMessage;

    /// Sends bytes together with a descriptor.
    pub(crate) fn send_descriptor(stream: &UnixStream, bytes: &[u8], fd: &impl AsRawFd) {
        let mut bytes = bytes.to_vec();
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut control = DescriptorMessage([0; 4]);
        // SAFETY: an all-zero msghdr is a valid value. `message` refers to `bytes` and `control`,
        // which live longer than the call, and the control message fits into `control`.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            message.msg_control = (&raw mut control).cast();
            message.msg_controllen = DescriptorMessage::LEN;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = DescriptorMessage::LEN;
            libc::CMSG_DATA(header).cast::<i32>().write_unaligned(fd.as_raw_fd());
            libc::sendmsg(stream.as_raw_fd(), &raw const message, 0)
        };
        assert_eq!(sent, bytes.len() as isize);
    }
}
