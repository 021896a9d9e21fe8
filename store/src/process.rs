//! The identity of a process, by which other processes can tell whether it is alive.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::sys;

/// A process. It differs from a later process with the same pid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// The id of the kernel's boot.
    pub(crate) boot_id: String,
    /// The namespace of its pid: each container of a host has its own.
    pub(crate) pid_namespace: u64,
    pub(crate) pid: u32,
    /// Clock ticks from the boot to the start of the process.
    pub(crate) start_time: u64,
}

impl Process {
    /// The process that runs this code.
    pub(crate) fn current() -> Result<Self> {
        Self::on_this_host(std::process::id())
    }

    /// The process with this pid, of this host and namespace.
    pub(crate) fn on_this_host(pid: u32) -> Result<Self> {
        let start_time = start_time(pid).ok().flatten().ok_or_else(|| {
            Error::BadArgument(format!("process {pid} does not run on this host"))
        })?;
        Ok(Self { boot_id: boot_id()?, pid_namespace: pid_namespace()?, pid, start_time })
    }

    /// Whether `observer` sees that the process is dead. A process of another host or another
    /// namespace cannot be seen, so it never counts as dead.
    pub(crate) fn is_dead(&self, observer: &Process) -> bool {
        self.boot_id == observer.boot_id
            && self.pid_namespace == observer.pid_namespace
            && match start_time(self.pid) {
                Ok(found) => found != Some(self.start_time),
                // This process may not look at it, or cannot open files.
                Err(_) => !sys::has_process(self.pid),
            }
    }
}

/// A file that a process has locked (`flock`, exclusively) for as long as it holds a lease.
///
/// It proves the end of a process that cannot be seen, of another container for example. The proof
/// has two parts:
///
/// - Both processes have the same kernel: the lease has the `boot_id` of the process that asks.
/// - While the holder of the lease lives, it has its file open. So its file system stays in use, and
///   neither the device number nor the inode number can name another file. The process that asks
///   has locked a file with the same two numbers. So it has the holder's lock, and the holder has
///   ended.
///
/// A copy of the file has another inode number, on the same host too, and proves nothing. Only a
/// file system of this kernel keeps its numbers like this: a network file system may give the
/// inode number of an open file to another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedFile {
    /// The device number of its file system.
    pub device: u64,
    /// Its inode number.
    pub inode: u64,
}

/// The id of the current boot of this host's kernel.
pub fn boot_id() -> Result<String> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = fs::read_to_string(path).map_err(|e| Error::io("reading", path, e))?;
    Ok(text.trim().into())
}

/// The name of this host.
pub fn host_name() -> Result<String> {
    let path = Path::new("/proc/sys/kernel/hostname");
    let text = fs::read_to_string(path).map_err(|e| Error::io("reading", path, e))?;
    Ok(text.trim().into())
}

fn pid_namespace() -> Result<u64> {
    let path = Path::new("/proc/self/ns/pid");
    Ok(fs::metadata(path).map_err(|e: io::Error| Error::io("reading", path, e))?.ino())
}

/// When the process started; `None` if it does not exist or is a zombie.
fn start_time(pid: u32) -> io::Result<Option<u64>> {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => Ok(parse_stat(&stat)),
        // Where processes of other users are hidden, their files do not exist either.
        Err(error) if error.kind() == io::ErrorKind::NotFound && !sys::has_process(pid) => Ok(None),
        // It ended while the file was read.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads fields 3 (state) and 22 (start time). The program's name, field 2, may contain spaces and
/// parentheses, so the fields are counted from the last closing parenthesis.
fn parse_stat(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X" | "x") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{Process, parse_stat};

    #[test]
    fn a_program_name_with_parentheses_does_not_shift_the_fields() {
        let tail = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20";
        assert_eq!(parse_stat(&format!("7 (a) R 0 (b) {tail}")), Some(4242));
        assert_eq!(parse_stat(&format!("7 (a) Z{}", &tail[1..])), None);
        assert_eq!(parse_stat("nonsense"), None);
    }

    #[test]
    fn this_process_is_alive_and_an_earlier_one_with_its_pid_is_dead() {
        let me = Process::current().unwrap();
        assert!(!me.is_dead(&me));
        let before = Process { start_time: me.start_time - 1, ..me.clone() };
        assert!(before.is_dead(&me));
    }

    /// Runs this test again in a process that may open only a few files.
    #[test]
    fn a_process_that_cannot_open_files_sees_no_deaths() {
        const CHILD: &str = "CAIRN_TEST_WITHOUT_FILES";
        if std::env::var_os(CHILD).is_none() {
            let name = "process::tests::a_process_that_cannot_open_files_sees_no_deaths";
            let test = std::env::current_exe().unwrap();
            let script = format!("ulimit -n 32; exec {} --exact {name}", test.display());
            let mut shell = std::process::Command::new("sh");
            let output = shell.args(["-c", &script]).env(CHILD, "").output().unwrap();
            return assert!(output.status.success(), "{output:?}");
        }
        let me = Process::current().unwrap();
        let parent = Process::on_this_host(std::os::unix::process::parent_id()).unwrap();
        let mut open = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            open.push(file);
        }
        let dead = [&me, &parent].map(|one| one.is_dead(&me));
        let before = Process { pid: u32::MAX >> 1, ..me.clone() }.is_dead(&me);
        drop(open);
        assert_eq!((dead, before), ([false, false], true));
    }

    #[test]
    fn processes_that_cannot_be_seen_never_count_as_dead() {
        let me = Process::current().unwrap();
        let gone = Process { start_time: 0, ..me.clone() };
        assert!(gone.is_dead(&me));
        assert!(!Process { boot_id: "other".into(), ..gone.clone() }.is_dead(&me));
        assert!(!Process { pid_namespace: 1, ..gone }.is_dead(&me));
    }
}
