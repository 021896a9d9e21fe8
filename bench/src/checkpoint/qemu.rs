//! QEMU's incremental backup: a dirty bitmap, and copy-before-write during the backup.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::subject::{Guest, Subject};
use crate::io::{Connection, Shape};
use crate::server::storage_daemon::{Backup, StorageDaemon};
use crate::site::{Area, Site};
use crate::sys;

pub(super) struct QemuDisk {
    daemon: StorageDaemon,
    target: PathBuf,
    size: u64,
    backup: Option<Backup>,
}

impl QemuDisk {
    pub(super) fn start(site: &Site, area: &Area, size: u64) -> Result<QemuDisk> {
        let file = area.path("qemu.raw");
        sys::direct_file(&file, size)?;
        let mut daemon = StorageDaemon::start(site, area, &file)?;
        daemon.track_changes()?;
        Ok(QemuDisk { daemon, target: area.path("backup.raw"), size, backup: None })
    }

    fn backup(&mut self) -> Result<Backup> {
        self.backup.take().context("no backup is prepared")
    }
}

impl Subject for QemuDisk {
    fn connect(&mut self, shape: Shape) -> Result<Box<dyn Connection>> {
        Ok(Box::new(self.daemon.connect(shape)?))
    }

    fn prepare(&mut self) -> Result<()> {
        self.backup = Some(self.daemon.prepare_backup(&self.target, self.size)?);
        Ok(())
    }

    fn begin(&mut self, _: Guest<'_>) -> Result<Option<f64>> {
        let backup = self.backup()?;
        self.daemon.begin_backup(&backup)?;
        self.backup = Some(backup);
        Ok(None)
    }

    fn store(&mut self) -> Result<()> {
        let backup = self.backup()?;
        self.daemon.end_backup(backup)
    }

    fn finish(&mut self, _: Guest<'_>) -> Result<Option<u64>> {
        Ok(None)
    }
}
