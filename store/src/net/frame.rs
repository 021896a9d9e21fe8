//! Frames on a stream, with timeouts.
//!
//! ```text
//! 0            4      6      8                16
//! ┌────────────┬──────┬──────┬────────────────┬─────────┐
//! │ body bytes │ kind │ zero │ request number │ body    │
//! └────────────┴──────┴──────┴────────────────┴─────────┘
//! ```
//!
//! All numbers are little endian. An answer has the number of its request.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::message::malformed;
use crate::buffers::Buffer;
use crate::error::Result;

/// Bytes of a header.
pub(crate) const HEADER: usize = 16;

/// How long a body may take to arrive, and a batch of frames to be sent.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(30);

/// The size of a read buffer. The frames of small messages fit; longer bodies bypass it.
pub(crate) const READ_AHEAD_BYTES: usize = 1024;

/// Frames are sent as soon as they have this many bytes, even if more messages wait.
const SEND_BATCH_BYTES: usize = 256 << 10;

/// The kind of a message, and its body in parts. The parts are sent without being copied together.
pub(crate) type Message = (u16, Vec<Bytes>);

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// The kind of the message.
    pub(crate) kind: u16,
    /// The number of the request. An answer has the number of its request.
    pub(crate) number: u64,
    /// Bytes of the body.
    pub(crate) len: usize,
}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&(self.len as u32).to_le_bytes());
        bytes[4..6].copy_from_slice(&self.kind.to_le_bytes());
        bytes[8..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// Decodes a header. Fails if the body would have more than `max_body` bytes.
    pub(crate) fn from_bytes(bytes: &[u8; HEADER], max_body: usize) -> Result<Header> {
        let [a, b, c, d, e, f, zero @ .., _, _, _, _, _, _, _, _] = *bytes;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if len > max_body || zero != [0; 2] {
            return Err(malformed("a frame that is too long, or of another protocol"));
        }
        let number = u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
        Ok(Header { kind: u16::from_le_bytes([e, f]), number, len })
    }
}

/// Reads the next header. Returns `None` if the other side has closed the connection, or is silent
/// for longer than `idle`. The inner error is a header that breaks the protocol.
pub(crate) async fn read_header(
    reader: &mut (impl AsyncRead + Unpin),
    idle: Duration,
    max_body: usize,
) -> io::Result<Option<Result<Header>>> {
    let mut bytes = [0; HEADER];
    match timeout(idle, reader.read_exact(&mut bytes)).await {
        Ok(Ok(_)) => Ok(Some(Header::from_bytes(&bytes, max_body))),
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Ok(Err(error)) => Err(error),
        Err(_) => Ok(None),
    }
}

/// Reads the body that follows a header.
pub(crate) async fn read_body(
    reader: &mut (impl AsyncRead + Unpin),
    header: &Header,
) -> io::Result<Bytes> {
    read_aligned_body::<0>(reader, header, |_| 0).await
}

/// Reads the body that follows a header. The body has at least `N` bytes. From its first `N` bytes,
/// `aligned_at` computes the offset in the body that is placed at the start of a page in memory, so
/// that direct I/O can write the bytes from there without a copy.
pub(crate) async fn read_aligned_body<const N: usize>(
    reader: &mut (impl AsyncRead + Unpin),
    header: &Header,
    aligned_at: impl FnOnce(&[u8; N]) -> usize,
) -> io::Result<Bytes> {
    let read = async {
        let mut lead = [0; N];
        reader.read_exact(&mut lead).await?;
        let mut body = Buffer::new(header.len, aligned_at(&lead));
        let (start, rest) = body.split_at_mut(N);
        start.copy_from_slice(&lead);
        reader.read_exact(rest).await?;
        Ok(body.share())
    };
    timeout(TRANSFER_TIMEOUT, read).await?
}

/// Frames that wait to be sent. Their parts are sent with vectored writes, without a copy.
#[derive(Default)]
pub(crate) struct OutgoingFrames {
    parts: VecDeque<Bytes>,
    bytes: usize,
}

impl OutgoingFrames {
    /// Appends a frame.
    pub(crate) fn push(&mut self, number: u64, (kind, parts): Message) {
        let header = Header { kind, number, len: parts.iter().map(Bytes::len).sum() };
        self.bytes += HEADER + header.len;
        self.parts.push_back(Bytes::copy_from_slice(&header.to_bytes()));
        self.parts.extend(parts.into_iter().filter(|part| !part.is_empty()));
    }

    /// Whether the frames should be sent before more are appended.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes >= SEND_BATCH_BYTES
    }

    /// Sends all frames.
    pub(crate) async fn send(&mut self, writer: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        timeout(TRANSFER_TIMEOUT, async {
            writer.write_all_buf(self).await?;
            writer.flush().await
        })
        .await?
    }
}

impl Buf for OutgoingFrames {
    fn remaining(&self) -> usize {
        self.bytes
    }

    fn chunk(&self) -> &[u8] {
        self.parts.front().map_or(&[], |part| part)
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let pairs = slices.iter_mut().zip(&self.parts);
        pairs.map(|(slice, part)| *slice = IoSlice::new(part)).count()
    }

    fn advance(&mut self, mut count: usize) {
        self.bytes -= count;
        while let Some(front) = self.parts.front_mut() {
            if count < front.len() {
                front.advance(count);
                return;
            }
            count -= front.len();
            self.parts.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, prop_assert_eq, proptest};

    use super::{Buf, Bytes, HEADER, Header, IoSlice, OutgoingFrames};

    proptest! {
        #[test]
        fn frames_are_sent_unchanged_however_the_writes_are_split(
            frames in vec(vec(vec(any::<u8>(), 0..40), 0..4), 0..6),
            steps in vec(1usize..60, 1..40),
        ) {
            let mut out = OutgoingFrames::default();
            let mut expected = Vec::new();
            for (number, parts) in (0..).zip(&frames) {
                let body = parts.concat();
                let header = Header { kind: 3, number, len: body.len() };
                expected.extend_from_slice(&[&header.to_bytes()[..], &body].concat());
                out.push(number, (3, parts.iter().map(|part| Bytes::copy_from_slice(part)).collect()));
            }
            prop_assert_eq!(out.remaining(), frames.iter().flatten().flatten().count() + HEADER * frames.len());
            let mut found = Vec::new();
            for step in steps.iter().cycle() {
                let mut slices = [IoSlice::new(&[]); 3];
                let count = out.chunks_vectored(&mut slices);
                let taken: Vec<u8> = slices[..count].iter().flat_map(|slice| slice.to_vec()).collect();
                let taken = &taken[..taken.len().min(*step)];
                found.extend_from_slice(taken);
                let len = taken.len();
                out.advance(len);
                if !out.has_remaining() {
                    break;
                }
            }
            prop_assert_eq!(found, expected);
        }
    }
}
