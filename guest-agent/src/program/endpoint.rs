//! The address of the process that serves a disk.

use std::fmt;
use std::path::PathBuf;

/// Where a disk's process listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// A vsock port of the host.
    Vsock(u32),
    /// A unix socket, for tests and for sandboxes without vsock.
    Unix(PathBuf),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Vsock(port) => write!(f, "vsock:{port}"),
            Endpoint::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}
