//! Child processes that end with the test.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A running program whose output goes to a log. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    /// The offset in the log at which the output of this process begins.
    log_start: u64,
}

impl Process {
    /// Starts `program`. The kernel kills it when the calling thread ends, for whatever reason.
    pub fn start<A: AsRef<OsStr>>(
        name: &str,
        program: &Path,
        arguments: impl IntoIterator<Item = A>,
        log: PathBuf,
    ) -> Result<Process> {
        // A test may start a program again under the same name. Its log is continued.
        let output = File::options().create(true).append(true).open(&log)?;
        let log_start = output.metadata()?.len();
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Process { name: name.to_owned(), child, log, log_start })
    }

    /// Waits until a process listens at the unix socket `path`.
    ///
    /// It reads a table of the kernel instead of connecting, because the server would have to
    /// handle the connection.
    pub fn wait_for_listener(&mut self, path: &Path, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        while !is_listening(&fs::read_to_string("/proc/net/unix")?, path) {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status}:\n{}", self.name, self.log_tail());
            }
            if Instant::now() > end {
                bail!(
                    "{} does not listen at {} in time:\n{}",
                    self.name,
                    path.display(),
                    self.log_tail()
                );
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits until the program has printed a complete line that contains `part`, and returns the
    /// line.
    pub fn wait_for_line(&mut self, part: &str, limit: Duration) -> Result<String> {
        let end = Instant::now() + limit;
        loop {
            let text = fs::read(&self.log)?;
            let text = String::from_utf8_lossy(text.get(self.log_start as usize..).unwrap_or(&[]));
            let complete = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
            if let Some(line) = complete.into_iter().find(|line| line.contains(part)) {
                return Ok(line.to_owned());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status}:\n{}", self.name, self.log_tail());
            }
            if Instant::now() > end {
                bail!("{} does not print \"{part}\" in time:\n{}", self.name, self.log_tail());
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Sends SIGTERM to the program, and fails if it does not end within `limit`.
    pub fn terminate(&mut self, limit: Duration) -> Result<ExitStatus> {
        // The child is not reaped before `wait`, so no other process can have its id.
        let id = self.child.id().to_string();
        Command::new("kill").args(["-s", "TERM", &id]).status()?;
        self.wait(limit)
    }

    /// Waits until the program ends.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > end {
                bail!("{} is still running after {limit:?}:\n{}", self.name, self.log_tail());
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Kills the program with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// The last lines of the log, for error messages.
    pub fn log_tail(&self) -> String {
        const LINES: usize = 20;
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The program may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns whether `table`, the content of `/proc/net/unix`, has a socket at `path` that accepts
/// connections.
fn is_listening(table: &str, path: &Path) -> bool {
    const ACCEPTS_CONNECTIONS: &str = "00010000";
    table.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.get(3) == Some(&ACCEPTS_CONNECTIONS) && words.get(7).map(Path::new) == Some(path)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use std::time::Duration;

    use super::{Path, Process, fs, is_listening};

    #[test]
    fn a_line_counts_if_it_is_complete_and_printed_by_this_process() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        fs::write(&log, "said before\n").unwrap();
        let say = |what: &str| {
            let arguments = ["-c", what];
            Process::start("a shell", Path::new("/bin/sh"), arguments, log.clone()).unwrap()
        };
        let limit = Duration::from_secs(10);
        let mut shell = say("printf 'sa'; printf 'id at last\\n'; sleep 60");
        assert_eq!(shell.wait_for_line("said", limit).unwrap(), "said at last");
        assert!(say("printf 'said without an end'").wait_for_line("without", limit).is_err());
    }

    #[test]
    fn a_socket_counts_if_a_process_listens_at_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let table = || fs::read_to_string("/proc/net/unix").unwrap();
        assert!(!is_listening(&table(), &path));
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(is_listening(&table(), &path));
        assert!(!is_listening(&table(), Path::new("/elsewhere")));
    }
}
