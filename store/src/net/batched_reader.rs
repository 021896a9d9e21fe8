//! Reading from a socket what is known to come.
//!
//! A block comes in many packets. To be woken for each of them costs more than to receive it, so whoever waits for
//! much is woken when there is much.

use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::tcp::OwnedReadHalf;

use crate::sys::set_least_to_read;

/// Of what is less than this, every byte counts.
const UNBATCHED_BYTES: usize = 16 << 10;

/// More is not waited for: the sender must not wait for the receiver, and who sends slowly must be seen to send.
const MAX_BATCH_BYTES: usize = 64 << 10;

/// The receiving half of a connection, that waits for as much as is wanted of it.
pub(crate) struct BatchedReader {
    socket: OwnedReadHalf,
    /// It is woken for so many bytes.
    wake_bytes: usize,
}

impl BatchedReader {
    pub(crate) fn new(socket: OwnedReadHalf) -> BatchedReader {
        BatchedReader { socket, wake_bytes: 1 }
    }
}

impl AsyncRead for BatchedReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.socket).poll_read(cx, buf);
        let wake_bytes = if buf.remaining() < UNBATCHED_BYTES {
            1
        } else {
            buf.remaining().min(MAX_BATCH_BYTES)
        };
        // There is nothing, or was nothing a moment ago: if there is enough by now, the kernel says so when this is set.
        if read.is_pending() && wake_bytes != self.wake_bytes {
            set_least_to_read(self.socket.as_ref().as_fd(), wake_bytes as i32)?;
            self.wake_bytes = wake_bytes;
        }
        read
    }
}
