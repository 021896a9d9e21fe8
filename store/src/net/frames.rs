//! Frames over a stream, with limits of time.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use crate::buffers::Buffer;
use crate::cluster::protocol;
use crate::cluster::protocol::MAX_BODY;
use crate::error::Result;

/// Bytes before a body.
pub(crate) const HEADER: usize = 16;

/// What comes before a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// What the body is.
    pub(crate) kind: u16,
    /// Which request it is, or answers.
    pub(crate) number: u64,
    /// Bytes of the body.
    pub(crate) len: usize,
}

impl Header {
    /// As it is sent.
    pub(crate) fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&(self.len as u32).to_le_bytes());
        bytes[4..6].copy_from_slice(&self.kind.to_le_bytes());
        bytes[8..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// As it was received, where a body has at most `longest` bytes.
    pub(crate) fn from_bytes(bytes: &[u8; HEADER], longest: usize) -> Result<Header> {
        let [a, b, c, d, e, f, zero @ .., _, _, _, _, _, _, _, _] = *bytes;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if len > longest || zero != [0; 2] {
            return Err(crate::error::Error::corrupt("a message", "a frame that nobody sends"));
        }
        let number = u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
        Ok(Header { kind: u16::from_le_bytes([e, f]), number, len })
    }
}

/// How long a body may take to come, and what is sent together to go.
pub(crate) const PROGRESS: Duration = Duration::from_secs(30);

/// Bytes that are read ahead: the frames of small messages. What is longer goes to its place at once.
pub(crate) const READ_AHEAD: usize = 1024;

/// Bytes that are sent together, about.
const TOGETHER: usize = 256 << 10;

/// The next header; nothing if the other side has closed, or is silent for longer than `idle`.
pub(crate) async fn read_header(
    reader: &mut (impl AsyncRead + Unpin),
    idle: Duration,
) -> io::Result<Option<Result<Header>>> {
    read_header_within(reader, idle, MAX_BODY).await
}

/// The next header, of a body of at most `longest` bytes.
pub(crate) async fn read_header_within(
    reader: &mut (impl AsyncRead + Unpin),
    idle: Duration,
    longest: usize,
) -> io::Result<Option<Result<Header>>> {
    let mut bytes = [0; HEADER];
    match timeout(idle, reader.read_exact(&mut bytes)).await {
        Ok(Ok(_)) => Ok(Some(Header::from_bytes(&bytes, longest))),
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Ok(Err(error)) => Err(error),
        Err(_) => Ok(None),
    }
}

/// The body behind a header. The first block of a put begins at the start of a page, and so do the others if they are as
/// long as pages: then they can go to the disk as they are.
pub(crate) async fn read_body(
    reader: &mut (impl AsyncRead + Unpin),
    header: &Header,
) -> io::Result<Bytes> {
    let read = async {
        let mut lead = [0; protocol::LEAD];
        let has_blocks = header.kind == protocol::PUT && header.len >= lead.len();
        let (at, lead) = match has_blocks {
            true => {
                reader.read_exact(&mut lead).await?;
                (protocol::blocks_at(&lead), &lead[..])
            }
            false => (0, &[][..]),
        };
        let mut body = Buffer::new(header.len, at);
        let (start, rest) = body.split_at_mut(lead.len());
        start.copy_from_slice(lead);
        reader.read_exact(rest).await?;
        Ok(body.share())
    };
    timeout(PROGRESS, read).await?
}

/// Sends one frame. It may stay in the writer's buffer.
pub(crate) async fn write(
    writer: &mut (impl AsyncWrite + Unpin),
    number: u64,
    (kind, body): (u16, Vec<u8>),
) -> io::Result<()> {
    let header = Header { kind, number, len: body.len() };
    timeout(PROGRESS, async {
        writer.write_all(&header.to_bytes()).await?;
        writer.write_all(&body).await
    })
    .await?
}

/// Frames on their way out, in parts that are not joined.
#[derive(Default)]
pub(crate) struct Frames {
    parts: VecDeque<Bytes>,
    bytes: usize,
}

impl Frames {
    /// Adds one.
    pub(crate) fn push(&mut self, number: u64, (kind, parts): (u16, Vec<Bytes>)) {
        let header = Header { kind, number, len: parts.iter().map(Bytes::len).sum() };
        self.bytes += HEADER + header.len;
        self.parts.push_back(Bytes::copy_from_slice(&header.to_bytes()));
        self.parts.extend(parts.into_iter().filter(|part| !part.is_empty()));
    }

    /// Whether they should be sent before more is added.
    pub(crate) fn are_many(&self) -> bool {
        self.bytes >= TOGETHER
    }

    /// Sends them all.
    pub(crate) async fn send(&mut self, writer: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        timeout(PROGRESS, async {
            writer.write_all_buf(self).await?;
            writer.flush().await
        })
        .await?
    }
}

impl Buf for Frames {
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

    use super::{Buf, Bytes, Frames, HEADER, Header, IoSlice};

    proptest! {
        #[test]
        fn what_goes_out_is_what_was_added_however_it_is_taken(
            frames in vec(vec(vec(any::<u8>(), 0..40), 0..4), 0..6),
            steps in vec(1usize..60, 1..40),
        ) {
            let mut out = Frames::default();
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
