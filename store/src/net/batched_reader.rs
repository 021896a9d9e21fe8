//! Reading a socket with fewer wake-ups.
//!
//! A block arrives in many packets. A wake-up for each packet costs more than receiving the data.
//! So a receiver that expects much data is woken only when much data is there (`SO_RCVLOWAT`).

use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::tcp::OwnedReadHalf;

use crate::sys::set_least_to_read;

/// A receiver that expects less than this is woken as soon as any byte arrives.
const UNBATCHED_BYTES: usize = 16 << 10;

/// The most bytes to wait for. With more, the sender could have to wait for the receiver, and a
/// slow sender would look like a silent one.
const MAX_BATCH_BYTES: usize = 64 << 10;

/// The receiving half of a connection. It waits for as many bytes as the caller wants to read.
pub(crate) struct BatchedReader {
    socket: OwnedReadHalf,
    /// The number of bytes that wake the receiver.
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
        // No data was there a moment ago. If enough has arrived meanwhile, the kernel wakes the
        // task when the option is set.
        if read.is_pending() && wake_bytes != self.wake_bytes {
            set_least_to_read(self.socket.as_ref().as_fd(), wake_bytes as i32)?;
            self.wake_bytes = wake_bytes;
        }
        read
    }
}
