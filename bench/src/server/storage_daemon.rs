//! qemu-storage-daemon, a vhost-user-blk server, and its incremental backup.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::qmp::Qmp;
use super::{Server, cairn::QUEUES};
use crate::io::{Shape, vhost::VhostDisk};
use crate::site::{Area, Site};

/// How long an I/O thread polls by default, in nanoseconds.
const POLL_NS: u64 = 32768;

pub(crate) struct StorageDaemon {
    server: Server,
    socket: PathBuf,
    qmp: Qmp,
    backups: u64,
}

impl StorageDaemon {
    /// Serves an existing raw file.
    pub(crate) fn start(site: &Site, area: &Area, file: &Path) -> Result<StorageDaemon> {
        let (socket, monitor) = (area.socket("qemu.s"), area.socket("qemu.m"));
        let mut command = Command::new(&site.storage_daemon);
        command
            .arg("--chardev")
            .arg(format!("socket,id=m,path={},server=on,wait=off", monitor.display()))
            .args(["--monitor", "chardev=m", "--object", "iothread,id=io0"])
            .arg("--blockdev")
            .arg(format!(
                "driver=file,filename={},node-name=disk,cache.direct=on,aio=io_uring,discard=unmap",
                file.display()
            ))
            .arg("--export")
            .arg(format!(
                "type=vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path={},writable=on,\
                 iothread=io0,num-queues={QUEUES}",
                socket.display()
            ));
        let mut server = Server::start(&mut command, area.path("storage-daemon.log"))?;
        server.until_exists(&socket)?;
        let qmp = server.until(|| Qmp::connect(&monitor))?;
        Ok(StorageDaemon { server, socket, qmp, backups: 0 })
    }

    pub(crate) fn connect(&self, shape: Shape) -> Result<VhostDisk> {
        VhostDisk::connect(&self.socket, shape)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// Sets whether the I/O thread polls before it sleeps. By default it polls.
    pub(crate) fn set_polling(&mut self, on: bool) -> Result<()> {
        let value = if on { POLL_NS } else { 0 };
        let property = json!({ "path": "/objects/io0", "property": "poll-max-ns", "value": value });
        self.qmp.execute("qom-set", property).map(drop)
    }

    /// Starts recording which blocks change, for the next incremental backup.
    pub(crate) fn track_changes(&mut self) -> Result<()> {
        let bitmap = json!({ "node": "disk", "name": "dirty" });
        self.qmp.execute("block-dirty-bitmap-add", bitmap).map(drop)
    }

    /// Creates the target file of the next backup.
    pub(crate) fn prepare_backup(&mut self, target: &Path, size: u64) -> Result<Backup> {
        self.backups += 1;
        let node = format!("target{}", self.backups);
        let file =
            File::create(target).with_context(|| format!("creating {}", target.display()))?;
        file.set_len(size)?;
        let blockdev = json!({
            "driver": "file", "node-name": node, "filename": target,
            "cache": { "direct": true }, "aio": "io_uring",
        });
        self.qmp.execute("blockdev-add", blockdev)?;
        Ok(Backup { node, file })
    }

    /// Starts the backup. When it returns, the backup has its point in time: later writes are not
    /// part of it.
    pub(crate) fn begin_backup(&mut self, backup: &Backup) -> Result<()> {
        let job = json!({
            "job-id": "backup", "device": "disk", "target": backup.node,
            "sync": "incremental", "bitmap": "dirty",
        });
        self.qmp.execute("blockdev-backup", job).map(drop)
    }

    /// Waits until the backup is complete and durable.
    pub(crate) fn end_backup(&mut self, backup: Backup) -> Result<()> {
        let result = self.qmp.wait_for("BLOCK_JOB_COMPLETED")?;
        if let Some(error) = result.get("error") {
            bail!("the backup failed: {error}");
        }
        backup.file.sync_data().context("syncing the backup")?;
        self.qmp.execute("blockdev-del", json!({ "node-name": backup.node })).map(drop)
    }
}

/// The target of a backup.
pub(crate) struct Backup {
    node: String,
    file: File,
}
