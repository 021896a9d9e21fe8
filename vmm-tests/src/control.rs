//! Requests to a backend over its control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use cairn_agent::{Event, Request};

const LIMIT: Duration = Duration::from_secs(20);

/// Sends a request and returns the first event of the answer.
pub(crate) fn ask(socket: &Path, request: &Request) -> Result<Event> {
    let exchange = || -> Result<Event> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(LIMIT))?;
        writeln!(stream, "{}", serde_json::to_string(request)?)?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    };
    exchange().with_context(|| format!("sending {request:?} to {}", socket.display()))
}
