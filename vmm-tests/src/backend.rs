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

/// Which disk to serve, and to whom.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Names the process, its sockets and its mirror.
    pub name: String,
    /// `image` or `image@N`.
    pub image: String,
    /// The guest whose agent may ask for checkpoints.
    pub guest: String,
    /// The vsock port at which it asks.
    pub port: u32,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Bytes of checkpoints that are stored in a second at most; 0 is unlimited.
    pub commit_rate: u64,
    /// Whether a checkpoint is published as soon as it can be read.
    pub optimistic: bool,
}

impl Disk {
    /// The first disk of `guest`, writable, with a mirror of the guest's name.
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

/// One running `cairn-blk`, killed when it is dropped.
#[derive(Debug)]
pub struct Backend {
    process: Process,
    socket: PathBuf,
    control: PathBuf,
    mirror: PathBuf,
}

impl Backend {
    /// Starts it on the lab's repository and waits until it serves.
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
        // The sockets are there before the mirror and the image have been looked at.
        backend.status().with_context(|| format!("starting:\n{}", backend.process.log_tail()))?;
        Ok(backend)
    }

    /// Where the hypervisor connects.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Where the operator connects.
    pub fn control(&self) -> &Path {
        &self.control
    }

    /// The directory of the local copy.
    pub fn mirror(&self) -> &Path {
        &self.mirror
    }

    /// What the disk is and does.
    pub fn status(&self) -> Result<Status> {
        match control::ask(&self.control, &Request::Status)? {
            Event::Status(status) => Ok(status),
            other => bail!("asked for the status, got {other:?}"),
        }
    }

    /// Counters since its start.
    pub fn stats(&self) -> Result<Stats> {
        match control::ask(&self.control, &Request::Stats)? {
            Event::Stats(stats) => Ok(stats),
            other => bail!("asked for the counters, got {other:?}"),
        }
    }

    /// Ends it as `kill -9` does.
    pub fn kill(mut self) -> Result<()> {
        self.process.kill()
    }

    /// Ends it in good order, which it must do soon and with success.
    pub fn stop(mut self) -> Result<()> {
        let status = self.process.terminate(STOP_LIMIT)?;
        ensure!(status.success(), "cairn-blk ended with {status}:\n{}", self.process.log_tail());
        Ok(())
    }
}
