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
const LITTLE: usize = 16 << 10;

/// More is not waited for: the sender must not wait for the receiver, and who sends slowly must be seen to send.
const MUCH: usize = 64 << 10;

/// The receiving half of a connection, that waits for as much as is wanted of it.
pub(crate) struct Patient {
    socket: OwnedReadHalf,
    /// It is woken for so many bytes.
    least: usize,
}

impl Patient {
    pub(crate) fn new(socket: OwnedReadHalf) -> Patient {
        Patient { socket, least: 1 }
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.socket).poll_read(cx, buf);
        let least = if buf.remaining() < LITTLE { 1 } else { buf.remaining().min(MUCH) };
        // There is nothing, or was nothing a moment ago: if there is enough by now, the kernel says so when this is set.
        if read.is_pending() && least != self.least {
            set_least_to_read(self.socket.as_ref().as_fd(), least as i32)?;
            self.least = least;
        }
        read
    }
}
