//! How much each role may send to a served catalog, and receive from it.

use super::wire::{MAX_ANSWER, MAX_REQUEST, may_have_long_answer};
use crate::net::frame::{HEADER, Header};
use crate::net::identity::Identity;

/// What one connection may send and receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allowance {
    /// The longest request, in bytes.
    pub(super) request: usize,
    /// The longest answer, in bytes.
    pub(super) answer: usize,
    /// Requests at a time.
    pub(super) requests: usize,
}

/// A client or a supervisor has one connection for all threads of its process.
const TRUSTED: Allowance = Allowance { request: MAX_REQUEST, answer: MAX_ANSWER, requests: 256 };

/// A peer reads and changes two documents of 4 KiB, one request after the other. It is not trusted
/// with more.
const PEER: Allowance = Allowance { request: 16 << 10, answer: 16 << 10, requests: 4 };

impl Allowance {
    /// The allowance of this caller. On plain TCP there is no caller.
    pub(super) fn of(caller: Option<Identity>) -> Allowance {
        match caller {
            Some(Identity::Peer(_)) => PEER,
            _ => TRUSTED,
        }
    }

    /// The memory of a request and its answer, in KiB.
    pub(super) fn request_kib(&self, header: &Header) -> usize {
        let answer = if may_have_long_answer(header.kind) { self.answer } else { 0 };
        message_kib(header.len.max(answer))
    }
}

/// The memory of a message with a body of this many bytes, in KiB.
pub(super) fn message_kib(body: usize) -> usize {
    (HEADER + body).div_ceil(1024) + 1
}
