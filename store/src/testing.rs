//! Helpers for the tests of several modules.

use std::net::TcpListener;

use crate::sys;

/// Listens on a port below the range from which the system assigns ports. So a server that stops
/// can listen on its port again later.
pub(crate) fn own_port() -> TcpListener {
    let random = || 10_000 + u16::from_le_bytes(sys::random().unwrap()) % 22_000;
    let mut tries = (0..100).filter_map(|_| TcpListener::bind(("127.0.0.1", random())).ok());
    tries.next().expect("a port is free")
}
