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
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Process { name: name.to_owned(), child, log })
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

    use super::{Path, fs, is_listening};

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
