//! The sockets of the process.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use super::error::StartError;
use crate::args::Args;
use crate::control::Listeners;
use crate::sys::{self, UnixSocket};

/// The sockets. They are bound first, so that a wrong path is reported before anything is changed.
pub(super) struct Sockets {
    pub(super) hypervisor: UnixSocket,
    pub(super) listeners: Listeners,
    pub(super) paths: SocketPaths,
}

/// The path of a socket, and its inode when it was bound.
struct BoundSocket {
    path: PathBuf,
    inode: Option<u64>,
}

impl BoundSocket {
    fn new(path: PathBuf) -> BoundSocket {
        let inode = fs::symlink_metadata(&path).map(|file| file.ino()).ok();
        BoundSocket { path, inode }
    }

    /// Removes the socket, unless it was removed already or another process has bound its own
    /// there.
    fn remove(&self) {
        let found = fs::symlink_metadata(&self.path).map(|file| file.ino()).ok();
        if found.is_some() && found == self.inode {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Sockets {
    pub(super) fn open(args: &Args) -> Result<Sockets, StartError> {
        let error = |path: String| move |source| StartError::Socket { path, source };
        let mut paths = Vec::new();
        let mut listen = |path: PathBuf, private| {
            let listener =
                sys::listen(&path, private).map_err(error(path.display().to_string()))?;
            paths.push(BoundSocket::new(path));
            Ok(listener)
        };
        let control = args.control.clone().map(|path| listen(path, true)).transpose()?;
        let proxy = args.vsock.as_ref().map(|path| {
            let mut path = path.clone().into_os_string();
            path.push(format!("_{}", args.vsock_port));
            listen(path.into(), false)
        });
        let proxy = proxy.transpose()?;
        let hypervisor = match (&args.socket_path, args.fd) {
            (Some(path), _) => UnixSocket::Listener(listen(path.clone(), false)?),
            (None, Some(fd)) => sys::inherited(fd).map_err(error(format!("descriptor {fd}")))?,
            (None, None) => unreachable!("the arguments demand one of them"),
        };
        let vsock = args.guest_cid.map(|guest| {
            let bound = sys::VsockListener::bind(args.vsock_port);
            bound
                .map(|listener| (listener, guest))
                .map_err(error(format!("vsock port {}", args.vsock_port)))
        });
        let listeners = Listeners { control, proxy, vsock: vsock.transpose()? };
        Ok(Sockets { hypervisor, listeners, paths: SocketPaths(paths) })
    }
}

/// The paths of the sockets that were bound.
pub(super) struct SocketPaths(Vec<BoundSocket>);

impl SocketPaths {
    pub(super) fn remove(&self) {
        self.0.iter().for_each(BoundSocket::remove);
    }
}
