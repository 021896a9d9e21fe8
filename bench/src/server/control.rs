//! A client of cairn-blk's control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cairn_agent::{Accepted, Checkpoint, Event, Request, Stable, Status, Wait};

/// The longest wait for an event. The largest checkpoint is stable within this time.
const TIMEOUT: Duration = Duration::from_secs(300);

pub(crate) struct Control {
    reader: BufReader<UnixStream>,
}

impl Control {
    pub(crate) fn connect(path: &Path) -> Result<Control> {
        let stream = UnixStream::connect(path)
            .with_context(|| format!("connecting to {}", path.display()))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(Control { reader: BufReader::new(stream) })
    }

    fn send(&mut self, request: &Request) -> Result<()> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        self.reader.get_mut().write_all(&line).context("writing to the control socket")
    }

    fn receive(&mut self) -> Result<Event> {
        let mut line = String::new();
        self.reader.read_line(&mut line).context("reading from the control socket")?;
        serde_json::from_str(&line).with_context(|| format!("not an event: {line:?}"))
    }

    /// Requests a checkpoint. The caller must call [`Control::stable`] next.
    pub(crate) fn checkpoint(&mut self) -> Result<Accepted> {
        let checkpoint = Checkpoint { wait: Wait::Stable, ..Checkpoint::default() };
        self.send(&Request::Checkpoint(checkpoint))?;
        match self.receive()? {
            Event::Accepted(accepted) => Ok(accepted),
            other => bail!("the answer to a checkpoint is {other:?}"),
        }
    }

    pub(crate) fn stable(&mut self) -> Result<Stable> {
        match self.receive()? {
            Event::Stable(stable) => Ok(stable),
            other => bail!("a checkpoint ended with {other:?}"),
        }
    }

    pub(crate) fn status(&mut self) -> Result<Status> {
        self.send(&Request::Status)?;
        match self.receive()? {
            Event::Status(status) => Ok(status),
            other => bail!("the answer to a status request is {other:?}"),
        }
    }

    /// Bytes that copy-on-write has copied since the start.
    pub(crate) fn copied_bytes(&mut self) -> Result<u64> {
        self.send(&Request::Stats)?;
        match self.receive()? {
            Event::Stats(stats) => Ok(stats.copied_bytes),
            other => bail!("the answer to a stats request is {other:?}"),
        }
    }
}
