//! The lock on a file of the mirror, which one process has at a time.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait for the lock of a process that lives: it may be about to end.
const LIVING_TIMEOUT: Duration = Duration::from_secs(2);

/// How long to wait for a lock whose process has ended, or cannot be seen. The kernel keeps the lock
/// until the last write of the process has landed. A slow disk needs its time for that.
const DEAD_TIMEOUT: Duration = Duration::from_secs(60);

/// The time after which the log says what the start waits for.
const LOG_AFTER: Duration = Duration::from_secs(1);

/// Locks a file. Returns `WouldBlock` if another process keeps the lock.
pub(super) fn lock(file: &File) -> io::Result<()> {
    let start = Instant::now();
    let mut is_logged = false;
    while let Err(error) = file.try_lock() {
        let error = io::Error::from(error);
        let waited = start.elapsed();
        if error.kind() != io::ErrorKind::WouldBlock
            || waited >= DEAD_TIMEOUT
            || (waited >= LIVING_TIMEOUT && holder(file)?.is_some_and(is_alive))
        {
            return Err(error);
        }
        if waited >= LOG_AFTER && !std::mem::replace(&mut is_logged, true) {
            tracing::info!(
                "another process has the mirror, or its last writes are under way: waiting"
            );
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// The process that took the lock on a file. `None` if the kernel does not tell: the process belongs
/// to another container, or it has ended inside of this one.
fn holder(file: &File) -> io::Result<Option<u32>> {
    let metadata = file.metadata()?;
    let (major, minor) = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
    let mut name = format!(":{}", metadata.ino());
    // On btrfs, a file has another device number than its file system, with the major number 0.
    if major > 0 {
        name = format!("{major:02x}:{minor:02x}{name}");
    }
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    Ok(locks.lines().find_map(|line| parse_lock(line, &name)))
}

/// The process of a line of `/proc/locks`, if the line is about a lock (`flock`) of a file whose name
/// ends with `name`.
fn parse_lock(line: &str, name: &str) -> Option<u32> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let is_lock = fields.next()? == "FLOCK";
    let pid = fields.nth(2)?.parse().ok()?;
    (is_lock && fields.next()?.ends_with(name)).then_some(pid)
}

/// Whether a process runs. A process that has ended and was not waited for does not.
fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X' | 'x'))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;
    use std::{fs::File, io, process, thread};

    use super::{DEAD_TIMEOUT, holder, is_alive, lock, parse_lock};

    #[test]
    fn the_process_of_a_lock_is_found() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert_eq!(holder(file.as_file()).expect("read the locks"), None);
        lock(file.as_file()).expect("lock");
        let other = File::open(file.path()).expect("open it again");
        assert_eq!(holder(&other).expect("read the locks"), Some(process::id()));
        assert!(is_alive(process::id()));
        // The lock of a process that lives ends the wait early.
        let start = Instant::now();
        assert_eq!(lock(&other).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(start.elapsed() < DEAD_TIMEOUT / 2);
    }

    #[test]
    fn only_locks_of_the_file_count() {
        let line = "3: FLOCK  ADVISORY  WRITE 717 fd:00:99 0 EOF";
        assert_eq!(parse_lock(line, "fd:00:99"), Some(717));
        assert_eq!(parse_lock(line, ":99"), Some(717));
        assert_eq!(parse_lock(line, "fd:00:9"), None);
        assert_eq!(parse_lock(line, ":9"), None);
        assert_eq!(parse_lock("3: POSIX  ADVISORY  WRITE 717 fd:00:99 0 EOF", "fd:00:99"), None);
        // Somebody who waits for the lock does not have it.
        assert_eq!(parse_lock("3: -> FLOCK  ADVISORY  WRITE 9 fd:00:99 0 EOF", "fd:00:99"), None);
        assert_eq!(parse_lock("", "fd:00:99"), None);
    }

    #[test]
    fn a_process_that_was_not_waited_for_is_not_alive() {
        let mut child = process::Command::new("true").spawn().expect("start a process");
        while is_alive(child.id()) {
            thread::yield_now();
        }
        child.wait().expect("wait for the process");
        assert!(!is_alive(child.id()));
    }
}
