//! Child processes that never outlive the test.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

const POLL: Duration = Duration::from_millis(10);

/// A running program whose output goes to a log. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    /// Where this program's part of the log begins.
    log_start: u64,
}

impl Process {
    /// Starts `program`. It is killed when the calling thread ends, however that comes about.
    pub fn start<A: AsRef<OsStr>>(
        name: &str,
        program: &Path,
        arguments: impl IntoIterator<Item = A>,
        log: PathBuf,
    ) -> Result<Process> {
        // A test may start a program again under the same name: its log goes on.
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

    /// Waits until someone listens on the unix socket `path`.
    ///
    /// Looks from outside, because a connection of ours would be one that the server has to handle.
    pub fn wait_for_listener(&mut self, path: &Path, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        while !is_listening(&fs::read_to_string("/proc/net/unix")?, path) {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status}:\n{}", self.name, self.log_tail());
            }
            if Instant::now() > end {
                bail!("{} is not at {} in time:\n{}", self.name, path.display(), self.log_tail());
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Waits until the program has printed a whole line with this in it, and returns that.
    pub fn wait_for_line(&mut self, part: &str, limit: Duration) -> Result<String> {
        let end = Instant::now() + limit;
        loop {
            let text = fs::read(&self.log)?;
            let text = String::from_utf8_lossy(text.get(self.log_start as usize..).unwrap_or(&[]));
            let whole = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
            if let Some(line) = whole.into_iter().find(|line| line.contains(part)) {
                return Ok(line.to_owned());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status}:\n{}", self.name, self.log_tail());
            }
            if Instant::now() > end {
                bail!("{} does not say \"{part}\" in time:\n{}", self.name, self.log_tail());
            }
            thread::sleep(POLL);
        }
    }

    /// Asks the program to end, and fails when it does not.
    pub fn terminate(&mut self, limit: Duration) -> Result<ExitStatus> {
        // The child is not reaped before `wait`, so its id cannot belong to another process.
        let id = self.child.id().to_string();
        Command::new("kill").args(["-s", "TERM", &id]).status()?;
        self.wait(limit)
    }

    /// Waits for the program to end by itself.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > end {
                bail!("{} is still running after {limit:?}:\n{}", self.name, self.log_tail());
            }
            thread::sleep(POLL);
        }
    }

    /// Ends the program as a power cut would.
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
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether `table`, which is `/proc/net/unix`, has a socket at `path` that accepts connections.
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
    fn a_line_counts_once_it_is_whole_and_of_this_program() {
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
    fn a_socket_counts_once_it_listens() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let table = || fs::read_to_string("/proc/net/unix").unwrap();
        assert!(!is_listening(&table(), &path));
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(is_listening(&table(), &path));
        assert!(!is_listening(&table(), Path::new("/elsewhere")));
    }
}
