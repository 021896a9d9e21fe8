//! A `cairn-blk` process.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use cairn_agent::{DEFAULT_PORT, Event, Request, Stats, Status};

use crate::control;
use crate::lab::Lab;
use crate::process::Process;

const START_LIMIT: Duration = Duration::from_secs(30);
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// The disk that a backend serves.
#[derive(Clone, Debug)]
pub struct Disk {
    /// The name of the process, its sockets and its mirror.
    pub name: String,
    /// `image` or `image@N`.
    pub image: String,
    /// The guest whose agent may request checkpoints.
    pub guest: String,
    /// The vsock port for its requests.
    pub port: u32,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The most bytes of checkpoints that are stored in a second; 0 means no limit.
    pub commit_rate: u64,
    /// Whether a checkpoint is published as soon as it is available, before it is stable.
    pub optimistic: bool,
}

impl Disk {
    /// The first disk of `guest`, writable, named like the guest.
    pub fn of(guest: &str, image: &str) -> Disk {
        Disk {
            name: guest.to_owned(),
            image: image.to_owned(),
            guest: guest.to_owned(),
            port: DEFAULT_PORT,
            read_only: false,
            commit_rate: 0,
            optimistic: false,
        }
    }
}

/// A running `cairn-blk`. Dropping it kills the process.
#[derive(Debug)]
pub struct Backend {
    process: Process,
    socket: PathBuf,
    control: PathBuf,
    mirror: PathBuf,
}

impl Backend {
    /// Starts `cairn-blk` with the lab's repository and waits until it serves the disk.
    pub fn start(lab: &Lab, disk: &Disk) -> Result<Backend> {
        let file = |part: &str| lab.path(&format!("{}.{part}", disk.name));
        let (socket, control, mirror) = (file("disk"), file("control"), file("mirror"));
        lab.remove(&socket)?;
        lab.remove(&control)?;

        let mut arguments = lab.store().arguments();
        let mut option = |name: &str, value: String| arguments.extend([format!("--{name}"), value]);
        option("image", disk.image.clone());
        option("mirror", mirror.display().to_string());
        option("live", lab.path("live").display().to_string());
        option("socket-path", socket.display().to_string());
        option("control", control.display().to_string());
        option("vsock", lab.vsock(&disk.guest).display().to_string());
        option("vsock-port", disk.port.to_string());
        option("num-queues", "2".to_owned());
        option("commit-rate", disk.commit_rate.to_string());
        if disk.optimistic {
            option("durability", "optimistic".to_owned());
        }
        if disk.read_only {
            arguments.push("--read-only".to_owned());
        }
        let program = &lab.tools().cairn_blk;
        let mut process = Process::start("cairn-blk", program, arguments, file("blk.log"))?;
        process.wait_for_listener(&socket, START_LIMIT)?;
        process.wait_for_listener(&control, START_LIMIT)?;
        let backend = Backend { process, socket, control, mirror };
        // The sockets exist before the mirror and the image are open. A status shows that they are.
        backend.status().with_context(|| format!("starting:\n{}", backend.process.log_tail()))?;
        Ok(backend)
    }

    /// The socket for the hypervisor.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The control socket for the operator.
    pub fn control(&self) -> &Path {
        &self.control
    }

    /// The directory of the mirror.
    pub fn mirror(&self) -> &Path {
        &self.mirror
    }

    /// The properties and the state of the disk.
    pub fn status(&self) -> Result<Status> {
        match control::ask(&self.control, &Request::Status)? {
            Event::Status(status) => Ok(status),
            other => bail!("expected a status, got {other:?}"),
        }
    }

    /// The counters since the start of the process.
    pub fn stats(&self) -> Result<Stats> {
        match control::ask(&self.control, &Request::Stats)? {
            Event::Stats(stats) => Ok(stats),
            other => bail!("expected the counters, got {other:?}"),
        }
    }

    /// Kills the process with SIGKILL.
    pub fn kill(mut self) -> Result<()> {
        self.process.kill()
    }

    /// Stops the process with SIGTERM. It must end soon and successfully.
    pub fn stop(mut self) -> Result<()> {
        let status = self.process.terminate(STOP_LIMIT)?;
        ensure!(status.success(), "cairn-blk ended with {status}:\n{}", self.process.log_tail());
        Ok(())
    }
}
