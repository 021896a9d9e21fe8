//! A repository with one image, and the cairn-blk that serves it.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::Server;
use super::control::Control;
use crate::io::{Shape, vhost::VhostDisk};
use crate::site::{Area, Site};

const IMAGE: &str = "bench";

/// The number of queues of each server. A client may use fewer.
pub(crate) const QUEUES: usize = 2;

pub(crate) struct Cairn {
    server: Server,
    socket: PathBuf,
    control: PathBuf,
}

impl Cairn {
    /// Creates an empty image of `size` bytes and serves it, with the additional arguments `more`.
    pub(crate) fn start(site: &Site, area: &Area, size: u64, more: &[&str]) -> Result<Cairn> {
        let output = Command::new(&site.cairn)
            .args(["--store", &area.store(), "create", IMAGE, &size.to_string()])
            .output()
            .context("starting cairn")?;
        if !output.status.success() {
            bail!("cairn create failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        let (socket, control) = (area.socket("cairn.s"), area.socket("cairn.c"));
        let mut command = Command::new(&site.cairn_blk);
        command
            .args(["--store", &area.store(), "--image", IMAGE])
            .arg("--mirror")
            .arg(area.path("mirror"))
            .arg("--live")
            .arg(&site.live)
            .arg("--socket-path")
            .arg(&socket)
            .arg("--control")
            .arg(&control)
            .args(["--num-queues", &QUEUES.to_string()])
            .args(&site.blk_args)
            .args(more);
        let mut server = Server::start(&mut command, area.path("cairn-blk.log"))?;
        server.until(|| Control::connect(&control)?.status())?;
        server.until_exists(&socket)?;
        Ok(Cairn { server, socket, control })
    }

    pub(crate) fn connect(&self, shape: Shape) -> Result<VhostDisk> {
        VhostDisk::connect(&self.socket, shape)
    }

    pub(crate) fn control(&self) -> Result<Control> {
        Control::connect(&self.control)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.server.pid()
    }
}
