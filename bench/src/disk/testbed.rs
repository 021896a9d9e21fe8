//! The disks that are compared. All of them exist for the whole run.

use std::fs::File;

use anyhow::Result;

use super::workload::Areas;
use crate::io::{Connection, Shape, ring::RawDisk};
use crate::load::write_once;
use crate::server::{cairn::Cairn, storage_daemon::StorageDaemon};
use crate::site::{Area, Site};
use crate::sys;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    Raw,
    /// qemu-storage-daemon with its defaults: the I/O thread polls for a while before it sleeps.
    Qemu,
    /// qemu-storage-daemon without polling, to measure CPU time.
    QemuQuiet,
    /// Cairn with its defaults: a worker polls for a while before it sleeps, if a processor is
    /// idle.
    Cairn,
    /// Cairn without polling, to measure CPU time.
    CairnQuiet,
}

impl Contender {
    pub(super) const ALL: [Contender; 5] = [
        Contender::Raw,
        Contender::Qemu,
        Contender::QemuQuiet,
        Contender::Cairn,
        Contender::CairnQuiet,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Contender::Raw => "raw file",
            Contender::Qemu => "qemu-storage-daemon",
            Contender::QemuQuiet => "qemu-storage-daemon, no polling",
            Contender::Cairn => "cairn",
            Contender::CairnQuiet => "cairn, no polling",
        }
    }

    pub(super) fn is_quiet(self) -> bool {
        matches!(self, Contender::QemuQuiet | Contender::CairnQuiet)
    }
}

pub(super) struct Testbed {
    pub(super) areas: Areas,
    raw: File,
    qemu: StorageDaemon,
    cairn: Cairn,
    quiet_cairn: Cairn,
    // Dropped after the servers.
    _areas: [Area; 2],
}

impl Testbed {
    /// Creates the disks and writes their first part, each through its own server.
    pub(super) fn new(site: &Site, areas: Areas) -> Result<Testbed> {
        eprintln!("preparing the disks");
        let area = site.area()?;
        let raw = sys::direct_file(&area.path("raw"), areas.size())?;
        let file = area.path("qemu.raw");
        sys::direct_file(&file, areas.size())?;
        let qemu = StorageDaemon::start(site, &area, &file)?;
        let cairn = Cairn::start(site, &area, areas.size(), &[])?;
        let other = site.area()?;
        let quiet_cairn = Cairn::start(site, &other, areas.size(), &["--poll-us", "0"])?;
        let mut testbed = Testbed { areas, raw, qemu, cairn, quiet_cairn, _areas: [area, other] };
        for contender in [Contender::Raw, Contender::Qemu, Contender::Cairn, Contender::CairnQuiet]
        {
            let shape = Shape { queues: 1, depth: 8, longest: 256 << 10, polls: false };
            write_once(testbed.connect(contender, shape)?.first(), shape.depth, areas.prefilled())?;
        }
        sys::settle();
        Ok(testbed)
    }

    pub(super) fn connect(
        &mut self,
        contender: Contender,
        shape: Shape,
    ) -> Result<Box<dyn Connection>> {
        Ok(match contender {
            Contender::Raw => Box::new(RawDisk::open(&self.raw, shape)?),
            Contender::Qemu | Contender::QemuQuiet => {
                self.qemu.set_polling(!contender.is_quiet())?;
                Box::new(self.qemu.connect(shape)?)
            }
            Contender::Cairn => Box::new(self.cairn.connect(shape)?),
            Contender::CairnQuiet => Box::new(self.quiet_cairn.connect(shape)?),
        })
    }

    /// The process that serves the disk. For the raw file it is this process, including the load.
    pub(super) fn pid(&self, contender: Contender) -> u32 {
        match contender {
            Contender::Raw => std::process::id(),
            Contender::Qemu | Contender::QemuQuiet => self.qemu.pid(),
            Contender::Cairn => self.cairn.pid(),
            Contender::CairnQuiet => self.quiet_cairn.pid(),
        }
    }
}
