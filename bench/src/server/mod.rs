//! Starts and stops the servers under test.

pub(crate) mod cairn;
pub(crate) mod catalog;
pub(crate) mod control;
pub(crate) mod peer;
mod qmp;
pub(crate) mod storage_daemon;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::sys;

const START_LIMIT: Duration = Duration::from_secs(30);
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// A server process. Dropping it stops the process.
pub(crate) struct Server {
    child: Child,
    log: PathBuf,
}

impl Server {
    fn start(command: &mut Command, log: PathBuf) -> Result<Server> {
        let file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let child = command
            .spawn()
            .with_context(|| format!("starting {}", command.get_program().to_string_lossy()))?;
        Ok(Server { child, log })
    }

    /// Repeats `attempt` until it succeeds. Fails if the server ends, or after the time limit.
    fn until<T>(&mut self, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            if let Some(status) = self.child.try_wait().context("checking a server")? {
                bail!("a server ended during its start with {status}:\n{}", self.log());
            }
            match attempt() {
                Ok(value) => return Ok(value),
                Err(error) if Instant::now() > deadline => {
                    return Err(error).context(format!("a server is not ready:\n{}", self.log()));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Waits until the socket of the server exists.
    fn until_exists(&mut self, socket: &Path) -> Result<()> {
        self.until(|| match socket.exists() {
            true => Ok(()),
            false => bail!("{} does not exist", socket.display()),
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        sys::terminate(&self.child);
        let deadline = Instant::now() + STOP_LIMIT;
        while let Ok(None) = self.child.try_wait() {
            if Instant::now() > deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
