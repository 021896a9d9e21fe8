//! `checkpoint`, `status`, `stats` and `resize`: requests to a running disk.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use cairn_agent::{
    Accepted, Checkpoint, Consistency, Event, Failed, Follow, MAX_LINE, QueueStatus, RefusalKind,
    Request, Stats, Status, Wait,
};
use cairn_store::ImageName;
use cairn_store::metadata::parse_pair;
use serde_json::json;

use crate::args::Style;
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{Align, Table, or_dash, print, print_fields, print_json};

/// How long `status`, `stats` and a checkpoint that waits for *accepted* wait for their answer.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How long a checkpoint that waits for *stable* waits.
const STABLE_TIMEOUT: Duration = Duration::from_secs(3600);
/// How long a process that has ended may take to be replaced.
const RESTART_LIMIT: Duration = Duration::from_secs(60);
/// The pause between two attempts to connect.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) fn checkpoint(
    socket: &Path,
    (label, metadata): (Option<String>, &[String]),
    wait: Wait,
    timeout: Option<Duration>,
    style: Style,
) -> Outcome {
    let doing = || format!("taking a checkpoint through {}", socket.display());
    let metadata = metadata.iter().map(|pair| parse_pair(pair)).collect::<Result<Vec<_>, _>>();
    let metadata = metadata.doing(doing)?.into_iter();
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let default = if wait == Wait::Stable { STABLE_TIMEOUT } else { TIMEOUT };
    let consistency = Consistency::Crash;
    let request = Request::Checkpoint(Checkpoint { label, consistency, wait, metadata });
    let mut client = Client::connect(socket, timeout.unwrap_or(default), doing)?;
    let event = client.ask(&request, wait)?;
    let snapshot = match &event {
        Event::Accepted(accepted) => &accepted.snapshot,
        Event::Stable(stable) => &stable.snapshot,
        Event::Failed(failed) => {
            let why = format!("snapshot {} failed: {}", failed.snapshot, failed.reason);
            return Err(Failure::new(Exit::Failure, doing(), why));
        }
        _ => return Err(client.unexpected()),
    };
    if style.json { print_json(&json!(event)) } else { print(&format!("{snapshot}\n")) }
}

pub(crate) fn status(socket: &Path, style: Style) -> Outcome {
    let doing = || format!("asking {} for its status", socket.display());
    let mut client = Client::connect(socket, TIMEOUT, doing)?;
    match client.ask(&Request::Status, Wait::Accepted)? {
        Event::Status(status) if style.json => print_json(&json!(status)),
        Event::Status(status) => print_status(&status, style),
        _ => Err(client.unexpected()),
    }
}

pub(crate) fn stats(socket: &Path, style: Style) -> Outcome {
    let doing = || format!("asking {} for its counters", socket.display());
    let mut client = Client::connect(socket, TIMEOUT, doing)?;
    match client.ask(&Request::Stats, Wait::Accepted)? {
        Event::Stats(stats) if style.json => print_json(&json!(stats)),
        Event::Stats(stats) => print_stats(&stats, style),
        _ => Err(client.unexpected()),
    }
}

/// Fails unless the disk behind a control socket is one of this image that can grow.
pub(crate) fn check_growth(socket: &Path, image: &ImageName) -> Outcome {
    let doing = || format!("looking for the disk of image '{image}' at {}", socket.display());
    let mut client = Client::connect(socket, TIMEOUT, doing)?;
    let Event::Status(status) = client.ask(&Request::Status, Wait::Accepted)? else {
        return Err(client.unexpected());
    };
    let why = if status.image != image.to_string() {
        format!("this is the disk of image '{}'; the image keeps its size", status.image)
    } else if status.read_only {
        "the disk is read-only and keeps the size of its snapshot; the image keeps its size".into()
    } else {
        return Ok(());
    };
    Err(Failure::new(Exit::Usage, doing(), why))
}

/// Lets a running disk grow to the size of its image. Returns the size that it has then.
pub(crate) fn resize(socket: &Path) -> Outcome<u64> {
    let doing = || format!("telling {} that its image has grown", socket.display());
    let mut client = Client::connect(socket, TIMEOUT, doing)?;
    match client.ask(&Request::Resize, Wait::Accepted)? {
        Event::Resized(resized) => Ok(resized.size),
        _ => Err(client.unexpected()),
    }
}

fn print_status(status: &Status, style: Style) -> Outcome {
    let pending = |commit: &cairn_agent::PendingCommit| {
        let progress = format!("{} ({} of {} chunks", commit.snapshot, commit.done, commit.chunks);
        match &commit.last_error {
            Some(error) => format!("{progress}; retrying: {error})"),
            None => progress + ")",
        }
    };
    let failed = |failed: &Failed| format!("{}: {}", failed.snapshot, failed.reason);
    let pending = status.pending.iter().map(pending).collect::<Vec<_>>().join(", ");
    print_fields(&[
        ("image", status.image.clone()),
        ("parent", status.parent.clone()),
        ("size", style.size(status.size)),
        ("chunk size", style.size(status.chunk_size.into())),
        ("mode", if status.read_only { "ro" } else { "rw" }.into()),
        ("connected", if status.connected { "yes" } else { "no" }.into()),
        ("changed", style.size(status.dirty_bytes)),
        ("local", style.size(status.present_bytes)),
        ("pending", or_dash(Some(pending).filter(|list| !list.is_empty()))),
        ("failed", or_dash(status.last_failed.as_ref().map(failed))),
        ("error", or_dash(status.checkpoint_error.as_ref())),
    ])?;
    print_queues(&status.queues)
}

fn print_queues(queues: &[QueueStatus]) -> Outcome {
    if queues.is_empty() {
        return Ok(());
    }
    let columns = [
        "queue",
        "in flight",
        "reads",
        "p50 us",
        "p99",
        "max",
        "writes",
        "p50 us",
        "p99",
        "max",
        "flushes",
        "p50 us",
        "p99",
        "max",
        "discards",
        "errors",
    ];
    let mut table = Table::new(&columns.map(|title| (title, Align::Right)));
    for queue in queues {
        let mut cells = vec![u64::from(queue.queue), queue.in_flight];
        for (count, latency) in [
            (queue.reads, &queue.read_latency),
            (queue.writes, &queue.write_latency),
            (queue.flushes, &queue.flush_latency),
        ] {
            cells.extend([count, latency.p50_us, latency.p99_us, latency.max_us]);
        }
        cells.extend([queue.discards, queue.errors]);
        table.row(cells.iter().map(u64::to_string));
    }
    print("\n")?;
    table.print()
}

fn print_stats(stats: &Stats, style: Style) -> Outcome {
    let count = |number: u64| number.to_string();
    print_fields(&[
        ("reads", count(stats.reads)),
        ("read", style.size(stats.read_bytes)),
        ("writes", count(stats.writes)),
        ("written", style.size(stats.written_bytes)),
        ("flushes", count(stats.flushes)),
        ("discards", count(stats.discards)),
        ("errors", count(stats.errors)),
        ("fetched chunks", count(stats.fetched_chunks)),
        ("fetched", style.size(stats.fetched_bytes)),
        ("fetch errors", count(stats.fetch_errors)),
        ("bad blocks", count(stats.bad_blocks)),
        ("copies", count(stats.copies)),
        ("copied", style.size(stats.copied_bytes)),
        ("spilled copies", count(stats.spilled)),
        ("parked requests", count(stats.parked)),
        ("checkpoints", count(stats.checkpoints)),
        ("stable", count(stats.stable)),
        ("failed", count(stats.failed)),
        ("stalled", count(stats.stalls)),
    ])
}

/// Returns whether the error means that the server has closed the connection.
fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

/// An exchange over a control socket, with a deadline.
struct Client<'a, F> {
    socket: &'a Path,
    stream: BufReader<UnixStream>,
    deadline: Instant,
    timeout: Duration,
    doing: F,
}

impl<'a, F: Fn() -> String> Client<'a, F> {
    fn connect(socket: &'a Path, timeout: Duration, doing: F) -> Outcome<Self> {
        let stream = UnixStream::connect(socket).map_err(|error| {
            let (exit, advice) = match error.kind() {
                io::ErrorKind::NotFound => (Exit::NotFound, "; is cairn-blk running?"),
                io::ErrorKind::ConnectionRefused => (Exit::Unavailable, "; is cairn-blk running?"),
                _ => (Exit::Failure, ""),
            };
            Failure::new(exit, doing(), format!("{error}{advice}"))
        })?;
        let deadline = Instant::now() + timeout;
        Ok(Self { socket, stream: BufReader::new(stream), deadline, timeout, doing })
    }

    /// Sends a request and returns the event that ends the exchange. If the connection ends after a
    /// checkpoint was accepted, the client connects again and follows it: the next cairn-blk
    /// continues to store it.
    fn ask(&mut self, request: &Request, wait: Wait) -> Outcome<Event> {
        self.send(request)?;
        let mut accepted: Option<Accepted> = None;
        loop {
            let Some(event) = self.next()? else {
                let Some(Accepted { number, .. }) = accepted else {
                    let why = "cairn-blk closed the connection without an answer; try again when it is \
                               back. If it had accepted a checkpoint, `cairn ls` shows it then";
                    return Err(Failure::new(Exit::Unavailable, (self.doing)(), why));
                };
                self.reconnect()?;
                self.send(&Request::Follow(Follow { number }))?;
                continue;
            };
            match event {
                Event::Error(refusal) => {
                    let exit = match refusal.kind {
                        RefusalKind::Invalid => Exit::Usage,
                        RefusalKind::Conflict | RefusalKind::Busy => Exit::Conflict,
                        RefusalKind::Denied => Exit::Failure,
                        RefusalKind::Unavailable => Exit::Unavailable,
                    };
                    return Err(Failure::new(exit, (self.doing)(), refusal.message));
                }
                Event::Stable(stable)
                    if accepted.as_ref().is_some_and(|one| one.snapshot != stable.snapshot) =>
                {
                    return Err(self.unexpected());
                }
                event if event.is_final(wait) => return Ok(event),
                Event::Accepted(event) => accepted = Some(event),
                _ => {}
            }
        }
    }

    /// Sends a request. If the connection has ended, reading the answer reports it.
    fn send(&mut self, request: &Request) -> Outcome {
        let line = json!(request).to_string() + "\n";
        self.set_timeout()?;
        match self.stream.get_mut().write_all(line.as_bytes()) {
            Err(error) if !is_closed(&error) => Err(self.failed(&error)),
            _ => Ok(()),
        }
    }

    /// Connects to the next process as soon as it listens.
    fn reconnect(&mut self) -> Outcome {
        let end = Instant::now() + RESTART_LIMIT;
        loop {
            thread::sleep(RECONNECT_INTERVAL);
            if Instant::now() >= end.min(self.deadline) {
                let why = "cairn-blk closed the connection and is not back; it continues to store the \
                           checkpoint when it is, and `cairn ls` shows the result";
                return Err(Failure::new(Exit::Unavailable, (self.doing)(), why));
            }
            if let Ok(stream) = UnixStream::connect(self.socket) {
                self.stream = BufReader::new(stream);
                return Ok(());
            }
        }
    }

    /// Reads an event, or `None` if the connection has ended. The deadline is checked between
    /// reads, so that a server that sends single bytes cannot extend it.
    fn next(&mut self) -> Outcome<Option<Event>> {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            self.set_timeout()?;
            let available = match self.stream.fill_buf() {
                Ok(available) => available,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if is_closed(&error) => return Ok(None),
                Err(error) => return Err(self.failed(&error)),
            };
            if available.is_empty() {
                return Ok(None);
            }
            let len =
                available.iter().position(|b| *b == b'\n').map_or(available.len(), |at| at + 1);
            let taken = self.stream.by_ref().take(len as u64).read_to_end(&mut line);
            taken.map_err(|error| self.failed(&error))?;
            if line.len() > MAX_LINE {
                return Err(self.unexpected());
            }
        }
        serde_json::from_slice(&line).map(Some).map_err(|_| self.unexpected())
    }

    fn set_timeout(&self) -> Outcome {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.timed_out());
        }
        let socket = self.stream.get_ref();
        let set = socket.set_read_timeout(Some(left)).and(socket.set_write_timeout(Some(left)));
        set.map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.timed_out(),
            _ => Failure::new(Exit::Unavailable, (self.doing)(), error),
        }
    }

    fn timed_out(&self) -> Failure {
        let seconds = self.timeout.as_secs_f64();
        let why = format!("no answer within {seconds} s; the request may still be executed");
        Failure::new(Exit::Unavailable, (self.doing)(), why)
    }

    fn unexpected(&self) -> Failure {
        let why =
            "the answer does not match the request; is this the control socket of a cairn-blk?";
        Failure::new(Exit::Failure, (self.doing)(), why)
    }
}
