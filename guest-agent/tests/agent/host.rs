//! A fake `cairn-blk`: a unix socket with answers that the test defines.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use cairn_agent::{Accepted, Event, Request, Stable};
use tempfile::TempDir;

pub(crate) const AGENT: &str = env!("CARGO_BIN_EXE_cairn-agent");

/// Serves connections one after the other until the test ends.
pub(crate) struct Host {
    directory: TempDir,
    requests: Receiver<Request>,
}

impl Host {
    pub(crate) fn answering(answer: impl Fn(&Request, &mut UnixStream) + Send + 'static) -> Host {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("disk")).unwrap();
        let (sender, requests) = channel();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let mut answers = stream.try_clone().unwrap();
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let request = serde_json::from_str(&line).unwrap();
                    answer(&request, &mut answers);
                    let _ = sender.send(request);
                }
            }
        });
        Host { directory, requests }
    }

    /// Accepts every checkpoint as `image@7`, and reports it as stable if the client waits for
    /// that.
    pub(crate) fn accepting(image: &'static str) -> Host {
        Host::answering(move |request, stream| {
            let Request::Checkpoint(checkpoint) = request else { panic!("{request:?}") };
            say(stream, &accepted(image));
            if checkpoint.wait == cairn_agent::Wait::Stable {
                say(stream, &stable(image));
            }
        })
    }

    /// Reads requests and never answers.
    pub(crate) fn silent() -> Host {
        Host::answering(|_, _| ())
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("disk")
    }

    /// The next request that has arrived.
    pub(crate) fn request(&self) -> Request {
        self.requests.recv_timeout(Duration::from_secs(10)).expect("the agent sends a request")
    }

    /// Whether no further request has arrived.
    pub(crate) fn has_no_request(&self) -> bool {
        self.requests.try_recv().is_err()
    }
}

pub(crate) fn say(stream: &mut UnixStream, event: &Event) {
    let line = serde_json::to_string(event).unwrap();
    // The agent may have ended.
    let _ = writeln!(stream, "{line}");
}

pub(crate) fn accepted(image: &str) -> Event {
    let snapshot = format!("{image}@7");
    Event::Accepted(Accepted { snapshot, number: 7, dirty_bytes: 4096, pause_us: 12 })
}

pub(crate) fn stable(image: &str) -> Event {
    Event::Stable(Stable {
        snapshot: format!("{image}@7"),
        number: 7,
        dirty_bytes: 4096,
        stored_bytes: 512,
        elapsed_ms: 3,
    })
}

/// Runs the agent with the words of `line` as arguments, and with `--unix` for each of `sockets`.
pub(crate) fn agent(line: &str, sockets: &[&Path]) -> Output {
    let mut command = Command::new(AGENT);
    command.args(line.split_whitespace());
    for socket in sockets {
        command.arg("--unix").arg(socket);
    }
    command.output().unwrap()
}
