//! The watchdog: a process that thaws when the agent cannot.
//!
//! A frozen file system blocks every process that writes to it, so a freeze must end even if the
//! agent is killed, stopped or stuck. The watchdog is forked before the first freeze. It shares
//! only the open mounts and a socket pair with the agent. Its memory is locked, and it neither
//! allocates memory nor opens files during a freeze, because both could need a frozen file system.
//!
//! The agent sends it messages of one byte:
//!
//! ```text
//!   +    the agent is about to freeze the next mount; the first one starts the time limit
//!   -    that freeze failed
//!   .    everything is thawed: exit
//! ```
//!
//! The agent sends `+` before the freeze. If it dies between the two, the watchdog thaws a file
//! system that is not frozen, which does no harm, and no file system stays frozen. The end of the
//! stream means that the agent has died: the kernel closes its socket only after its last `ioctl`
//! has returned.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::program::sys::{self, Side};

const FREEZING: u8 = b'+';
const NOT_FROZEN: u8 = b'-';
const THAWED: u8 = b'.';
const READY: u8 = b'r';

/// The agent enforces the time limit itself. The watchdog acts this much later, if the agent has
/// not.
const GRACE: Duration = Duration::from_millis(250);

/// A freeze in progress cannot be thawed. After the time limit the watchdog retries at this
/// interval.
const RETRY: Duration = Duration::from_millis(20);

/// The agent's end of the connection to the watchdog.
#[derive(Debug)]
pub(crate) struct Watchdog {
    socket: UnixStream,
}

impl Watchdog {
    /// Forks the watchdog for `mounts` and returns when it is ready.
    pub(crate) fn start(mounts: &[File], limit: Duration) -> io::Result<Watchdog> {
        let (mut socket, theirs) = UnixStream::pair()?;
        sys::ignore_signal(libc::SIGCHLD);
        if sys::fork()? == Side::Child {
            // The agent's death closes its end only if the child has no copy of it.
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

/// Runs the watchdog. An error before `READY` ends the process, which the agent sees as a closed
/// socket.
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
    // The watchdog has thawed the mounts below this index. Thawing them again could end the freeze
    // of another program.
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
            // THAWED is the only other message.
            Message::Byte(_) => return,
            Message::Closed => {
                thaw(&mounts[released..frozen]);
                return;
            }
            Message::Overdue => {
                overdue = true;
                // Only the freeze of the last mount can still be in progress.
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
            // On any other error no message of the agent can arrive.
            Err(_) => return Message::Closed,
        }
    }
}

/// Thaws in the reverse order of the freeze. Returns whether the mount that was frozen last is
/// thawed.
fn thaw(mounts: &[File]) -> bool {
    let mut last = None;
    for mount in mounts.iter().rev() {
        let thawed = sys::thaw(mount.as_fd()).is_ok();
        last.get_or_insert(thawed);
    }
    last.unwrap_or(true)
}
