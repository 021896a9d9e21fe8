//! The process that thaws when the agent cannot.
//!
//! A frozen file system blocks everyone who writes to it, so a freeze must end even when the agent
//! is killed, stopped or stuck. The watchdog is forked before the first freeze and shares nothing
//! with the agent but the open mounts and a socket pair. It has its memory locked and neither
//! allocates nor opens anything while something is frozen, because both could need the very
//! file system that is frozen.
//!
//! What the agent says to it, one byte each:
//!
//! ```text
//!   +    the next mount is about to be frozen; the first one starts the clock
//!   -    that did not happen after all
//!   .    all is thawed: leave
//! ```
//!
//! `+` is said before the freeze, so an agent that dies in between costs a needless thaw and
//! never a file system that stays frozen. The end of the stream is the death of the agent: the
//! kernel closes the socket only when the dying agent is out of its last `ioctl`.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::sys::{self, Side};

const FREEZING: u8 = b'+';
const NOT_FROZEN: u8 = b'-';
const THAWED: u8 = b'.';
const READY: u8 = b'r';

/// The agent keeps the time limit itself; the watchdog steps in only when it did not.
const GRACE: Duration = Duration::from_millis(250);

/// A freeze under way cannot be thawed yet; after the time limit this is how often to try.
const RETRY: Duration = Duration::from_millis(20);

/// The agent's end.
#[derive(Debug)]
pub(crate) struct Watchdog {
    socket: UnixStream,
}

impl Watchdog {
    /// Forks the watchdog for `mounts` and returns when it is on guard.
    pub(crate) fn start(mounts: &[File], limit: Duration) -> io::Result<Watchdog> {
        let (mut socket, theirs) = UnixStream::pair()?;
        sys::ignore_signal(libc::SIGCHLD);
        if sys::fork()? == Side::Child {
            // While a copy of the agent's end is open here, its death would go unnoticed.
            drop(socket);
            guard(theirs, mounts, limit + GRACE);
            sys::exit_child();
        }
        drop(theirs);
        socket.read_exact(&mut [0])?;
        Ok(Watchdog { socket })
    }

    pub(crate) fn freezing(&mut self) -> io::Result<()> {
        self.socket.write_all(&[FREEZING])
    }

    pub(crate) fn not_frozen(&mut self) -> io::Result<()> {
        self.socket.write_all(&[NOT_FROZEN])
    }

    pub(crate) fn thawed(mut self) -> io::Result<()> {
        self.socket.write_all(&[THAWED])
    }
}

/// The life of the watchdog. Whatever goes wrong before `READY` ends it, which the agent sees.
fn guard(mut socket: UnixStream, mounts: &[File], limit: Duration) {
    if sys::leave_session().is_err() || sys::lock_memory().is_err() {
        return;
    }
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
        sys::ignore_signal(signal);
    }
    if socket.write_all(&[READY]).is_err() {
        return;
    }

    let mut frozen = 0;
    // Mounts below this index were thawed from here. To thaw them again could end the freeze of
    // another program.
    let mut released = 0;
    let mut deadline: Option<Instant> = None;
    let mut overdue = false;
    loop {
        match next_byte(&mut socket, deadline) {
            Message::Byte(FREEZING) => {
                frozen = (frozen + 1).min(mounts.len());
                let wait = if overdue { RETRY } else { limit };
                deadline.get_or_insert_with(|| Instant::now() + wait);
            }
            Message::Byte(NOT_FROZEN) => {
                frozen = frozen.saturating_sub(1);
                released = released.min(frozen);
            }
            // THAWED; nothing else is ever said.
            Message::Byte(_) => return,
            Message::Closed => {
                thaw(&mounts[released..frozen]);
                return;
            }
            Message::Overdue => {
                overdue = true;
                // Only the last one can still be on its way into the freeze.
                let all = thaw(&mounts[released..frozen]);
                released = if all { frozen } else { frozen.saturating_sub(1).max(released) };
                deadline = (released < frozen).then(|| Instant::now() + RETRY);
            }
        }
    }
}

enum Message {
    Byte(u8),
    Closed,
    Overdue,
}

fn next_byte(socket: &mut UnixStream, deadline: Option<Instant>) -> Message {
    loop {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Message::Overdue;
        }
        let mut byte = [0];
        match socket.set_read_timeout(left).and_then(|()| socket.read(&mut byte)) {
            Ok(0) => return Message::Closed,
            Ok(_) => return Message::Byte(byte[0]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Message::Overdue,
            // Nothing else is known to happen; whatever it is, the agent cannot be heard.
            Err(_) => return Message::Closed,
        }
    }
}

/// Thaws in the reverse order of the freeze; whether the one that was frozen last is thawed.
fn thaw(mounts: &[File]) -> bool {
    let mut last = None;
    for mount in mounts.iter().rev() {
        let thawed = sys::thaw(mount.as_fd()).is_ok();
        last.get_or_insert(thawed);
    }
    last.unwrap_or(true)
}
