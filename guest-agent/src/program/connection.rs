//! A connection to the process that serves a disk. Sends requests and receives events, within a
//! deadline.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::{Event, MAX_LINE, Request};

use crate::program::endpoint::Endpoint;
use crate::program::error::Error;
use crate::program::sys;

/// The instant at which waiting ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    pub(crate) fn after(duration: Duration) -> Deadline {
        Deadline(Instant::now() + duration)
    }

    /// The remaining time, or `None` if the deadline has passed.
    fn remaining(self) -> Option<Duration> {
        let left = self.0.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }
}

#[derive(Debug)]
pub(crate) struct Connection {
    endpoint: Endpoint,
    stream: UnixStream,
    /// Received bytes after the last line that was returned.
    pending: Vec<u8>,
}

impl Connection {
    pub(crate) fn open(endpoint: Endpoint) -> Result<Connection, Error> {
        let stream = match &endpoint {
            // The operations of a connected stream socket are the same for every address family, so
            // std's type for unix sockets also works for vsock.
            Endpoint::Vsock(port) => sys::connect_to_host(*port).map(UnixStream::from),
            Endpoint::Unix(path) => UnixStream::connect(path),
        };
        match stream {
            Ok(stream) => Ok(Connection { endpoint, stream, pending: Vec::new() }),
            Err(source) => Err(Error::Connect { endpoint, source }),
        }
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(crate) fn send(&mut self, request: &Request, deadline: Deadline) -> Result<(), Error> {
        let mut line = serde_json::to_vec(request).map_err(|e| self.protocol(e.to_string()))?;
        line.push(b'\n');
        let left = self.left(deadline)?;
        self.stream
            .set_write_timeout(Some(left))
            .and_then(|()| self.stream.write_all(&line))
            .map_err(|e| self.transport("sending the request", e))
    }

    /// Receives the next event. Without a deadline it waits without limit.
    pub(crate) fn receive(&mut self, deadline: Option<Deadline>) -> Result<Event, Error> {
        let line = self.line(deadline)?;
        serde_json::from_slice(&line).map_err(|e| self.protocol(e.to_string()))
    }

    /// The error for an event that is not the expected answer.
    pub(crate) fn unexpected(&self, event: Event) -> Error {
        match event {
            Event::Error(refusal) => Error::Refused { endpoint: self.endpoint.clone(), refusal },
            Event::Failed(failed) => {
                Error::NotStored { snapshot: failed.snapshot, reason: failed.reason }
            }
            _ => self.protocol("the answer does not match the request".to_owned()),
        }
    }

    fn line(&mut self, deadline: Option<Deadline>) -> Result<Vec<u8>, Error> {
        let mut searched = 0;
        loop {
            let newline = self.pending[searched..].iter().position(|&b| b == b'\n');
            let end = newline.map(|at| searched + at + 1);
            if end.unwrap_or(self.pending.len()) > MAX_LINE {
                return Err(self.protocol(format!("a line of more than {MAX_LINE} bytes")));
            }
            if let Some(end) = end {
                let rest = self.pending.split_off(end);
                return Ok(std::mem::replace(&mut self.pending, rest));
            }
            searched = self.pending.len();
            self.fill(deadline)?;
        }
    }

    fn fill(&mut self, deadline: Option<Deadline>) -> Result<(), Error> {
        let limit = deadline.map(|deadline| self.left(deadline)).transpose()?;
        let mut buffer = [0; 4096];
        let result =
            self.stream.set_read_timeout(limit).and_then(|()| self.stream.read(&mut buffer));
        match result {
            Ok(0) => Err(Error::Closed(self.endpoint.clone())),
            Ok(count) => {
                self.pending.extend_from_slice(&buffer[..count]);
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(e) => Err(self.transport("waiting for the answer", e)),
        }
    }

    fn left(&self, deadline: Deadline) -> Result<Duration, Error> {
        deadline.remaining().ok_or_else(|| Error::Timeout(self.endpoint.clone()))
    }

    fn transport(&self, doing: &'static str, source: io::Error) -> Error {
        let endpoint = self.endpoint.clone();
        match source.kind() {
            // A socket's timeout is reported as either of these, depending on the system.
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::Timeout(endpoint),
            _ => Error::Transport { endpoint, doing, source },
        }
    }

    fn protocol(&self, reason: String) -> Error {
        Error::Protocol { endpoint: self.endpoint.clone(), reason }
    }
}
