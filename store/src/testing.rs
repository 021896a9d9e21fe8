//! What tests of several modules need.

use std::net::TcpListener;

use crate::sys;

/// Listens at a port that stays ours while nobody does: the system gives the higher ones to anybody.
pub(crate) fn own_port() -> TcpListener {
    let random = || 10_000 + u16::from_le_bytes(sys::random().unwrap()) % 22_000;
    let mut tries = (0..100).filter_map(|_| TcpListener::bind(("127.0.0.1", random())).ok());
    tries.next().expect("a port is free")
}
