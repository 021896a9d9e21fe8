//! Frames over a stream, with limits of time.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::wire::{HEADER, Header, MAX_BODY};
use crate::error::Result;

/// How long a body may take to come, and a frame to go.
pub(crate) const PROGRESS: Duration = Duration::from_secs(30);

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
        Ok(Ok(_)) => Ok(Some(Header::within(&bytes, longest))),
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Ok(Err(error)) => Err(error),
        Err(_) => Ok(None),
    }
}

/// The body behind a header.
pub(crate) async fn read_body(
    reader: &mut (impl AsyncRead + Unpin),
    header: &Header,
) -> io::Result<Vec<u8>> {
    let mut body = vec![0; header.len];
    timeout(PROGRESS, reader.read_exact(&mut body)).await??;
    Ok(body)
}

/// Sends a frame. It may stay in the writer's buffer.
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
