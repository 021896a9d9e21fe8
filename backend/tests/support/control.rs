//! A client of the control socket and of the guest's socket, which use the same protocol.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use cairn_agent::{
    Accepted, Checkpoint, Event, MAX_LINE, Refusal, RefusalKind, Request, SnapshotLine, Stats,
    Status, Wait,
};

/// Longer than any answer should take, short enough for a test to fail in time.
const TIME_LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct Control {
    reader: BufReader<UnixStream>,
}

impl Control {
    pub(crate) fn connect(path: &Path) -> std::io::Result<Control> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(TIME_LIMIT))?;
        stream.set_write_timeout(Some(TIME_LIMIT))?;
        Ok(Control { reader: BufReader::new(stream) })
    }

    pub(crate) fn send(&mut self, request: &Request) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        self.send_raw(&line)
    }

    pub(crate) fn send_raw(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.reader.get_mut().write_all(bytes)
    }

    /// The next event; an error of kind `UnexpectedEof` when the other side closed.
    pub(crate) fn next_event(&mut self) -> std::io::Result<Event> {
        let mut line = String::new();
        let limit = 4 * MAX_LINE as u64;
        match (&mut self.reader).take(limit).read_line(&mut line)? {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(serde_json::from_str(&line)
                .unwrap_or_else(|e| panic!("not an event ({e}): {line:?}"))),
        }
    }

    pub(crate) fn ask(&mut self, request: &Request) -> std::io::Result<Event> {
        self.send(request)?;
        self.next_event()
    }

    /// Requests a checkpoint, and returns when it is accepted or refused.
    pub(crate) fn checkpoint(&mut self) -> Result<Accepted, Refusal> {
        self.checkpoint_with(Checkpoint::default())
    }

    pub(crate) fn checkpoint_with(&mut self, checkpoint: Checkpoint) -> Result<Accepted, Refusal> {
        match self.ask(&Request::Checkpoint(checkpoint)).expect("ask for a checkpoint") {
            Event::Accepted(accepted) => Ok(accepted),
            Event::Error(refusal) => Err(refusal),
            other => panic!("a checkpoint was answered with {other:?}"),
        }
    }

    /// Takes a checkpoint and waits for its end: `Stable`, `Failed` or `Error`. Asks again when the
    /// backend is busy.
    pub(crate) fn checkpoint_to_the_end(&mut self) -> Event {
        let wait = Wait::Stable;
        let request = Request::Checkpoint(Checkpoint { wait, ..Checkpoint::default() });
        let deadline = Instant::now() + TIME_LIMIT;
        loop {
            self.send(&request).expect("send the request");
            let last = loop {
                let event = self.next_event().expect("read the answer");
                if event.is_final(wait) {
                    break event;
                }
            };
            match last {
                Event::Error(Refusal { kind: RefusalKind::Busy, .. })
                    if Instant::now() < deadline =>
                {
                    std::thread::sleep(Duration::from_millis(5));
                }
                event => return event,
            }
        }
    }

    /// Takes a checkpoint that must become stable, and returns its number.
    pub(crate) fn stable_checkpoint(&mut self) -> u64 {
        match self.checkpoint_to_the_end() {
            Event::Stable(stable) => stable.number,
            other => panic!("a checkpoint ended with {other:?}"),
        }
    }

    pub(crate) fn status(&mut self) -> Status {
        match self.ask(&Request::Status).expect("ask for the status") {
            Event::Status(status) => status,
            other => panic!("status was answered with {other:?}"),
        }
    }

    pub(crate) fn list(&mut self) -> Vec<SnapshotLine> {
        match self.ask(&Request::List).expect("ask for the list") {
            Event::Snapshots(list) => list.snapshots,
            other => panic!("list was answered with {other:?}"),
        }
    }

    pub(crate) fn stats(&mut self) -> Stats {
        match self.ask(&Request::Stats).expect("ask for the counters") {
            Event::Stats(stats) => stats,
            other => panic!("stats was answered with {other:?}"),
        }
    }

    /// Waits until no checkpoint is pending.
    pub(crate) fn wait_until_quiet(&mut self) {
        let deadline = Instant::now() + TIME_LIMIT;
        loop {
            let pending = self.status().pending;
            if pending.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "checkpoints still pending: {pending:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
