//! GET_VRING_BASE_SKIP_DRAIN, a message that the `vhost` crate does not know.
//!
//! The crate ends the connection at an unknown message. So the code of each message is looked at
//! before the crate receives it, and this message is received and answered here. It has the layout
//! of GET_VRING_BASE, in words of 32 bits:
//!
//! ```text
//! request: 45, flags, 8, index of the ring, 0
//! reply:   45, flags, 8, index of the ring, next available index
//! ```

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Error, Result};

use super::Handler;
use crate::sys;

/// The protocol feature that allows the message. It needs GET_VRING_BASE_INFLIGHT as well.
pub(super) const FEATURE: VhostUserProtocolFeatures =
    VhostUserProtocolFeatures::from_bits_retain(1 << 23);

const CODE: u32 = 45;
const VERSION: u32 = 1;
const PAYLOAD_BYTES: u32 = 8;

/// Whether the next message is this one. Waits for a message. A hypervisor sends the head of a
/// message at once, so a part of a code counts as another message. So does the end of the
/// connection.
pub(super) fn is_next(stream: &UnixStream) -> bool {
    let mut code = [0; 4];
    sys::peek(stream, &mut code).is_ok_and(|len| len == code.len())
        && u32::from_ne_bytes(code) == CODE
}

/// Receives the message, stops the ring, and answers.
pub(super) fn serve(mut stream: &UnixStream, handler: &mut Handler) -> Result<()> {
    let mut message = [0; 20];
    stream.read_exact(&mut message).map_err(Error::SocketBroken)?;
    let (words, _) = message.as_chunks();
    let [_, flags, size, index, _] = [0, 1, 2, 3, 4].map(|at| u32::from_ne_bytes(words[at]));
    if flags & !VhostUserHeaderFlag::NEED_REPLY.bits() != VERSION || size != PAYLOAD_BYTES {
        return Err(Error::InvalidMessage);
    }
    let base = handler.get_vring_base_skip_drain(index)?;
    let flags = VERSION | VhostUserHeaderFlag::REPLY.bits();
    let reply = [CODE, flags, PAYLOAD_BYTES, index, base].map(u32::to_ne_bytes);
    stream.write_all(reply.as_flattened()).map_err(Error::SocketBroken)
}
