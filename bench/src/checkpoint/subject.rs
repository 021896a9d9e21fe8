//! Who takes a checkpoint, and how.

use anyhow::Result;

use super::cairn::CairnDisk;
use super::qemu::QemuDisk;
use super::strategy::{Strategy, StrategyDisk};
use crate::io::{Connection, Shape};
use crate::load::Gate;
use crate::site::{Area, Site};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    Cairn,
    /// A dirty bitmap and `blockdev-backup` with `sync=incremental`.
    Qemu,
    Paper(Strategy),
}

impl Contender {
    pub(super) const ALL: [Contender; 5] = [
        Contender::Cairn,
        Contender::Qemu,
        Contender::Paper(Strategy::Offline),
        Contender::Paper(Strategy::Precopy),
        Contender::Paper(Strategy::Cow),
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Contender::Cairn => "cairn",
            Contender::Qemu => "qemu backup",
            Contender::Paper(Strategy::Offline) => "offline",
            Contender::Paper(Strategy::Precopy) => "precopy",
            Contender::Paper(Strategy::Cow) => "cow",
        }
    }

    pub(super) fn start(self, site: &Site, area: &Area, size: u64) -> Result<Box<dyn Subject>> {
        Ok(match self {
            Contender::Cairn => Box::new(CairnDisk::start(site, area, size)?),
            Contender::Qemu => Box::new(QemuDisk::start(site, area, size)?),
            Contender::Paper(strategy) => Box::new(StrategyDisk::new(strategy, area, size)?),
        })
    }
}

/// The guest, as far as a checkpoint can stop it.
#[derive(Clone, Copy)]
pub(super) struct Guest<'a>(Option<&'a Gate>);

impl<'a> Guest<'a> {
    /// One that does nothing anyway.
    pub(super) const IDLE: Guest<'static> = Guest(None);

    pub(super) fn behind(gate: &'a Gate) -> Guest<'a> {
        Guest(Some(gate))
    }

    /// Does something while the guest's writes wait.
    pub(super) fn stopped<T>(&self, act: impl FnOnce() -> Result<T>) -> Result<T> {
        if let Some(gate) = self.0 {
            gate.close();
        }
        let result = act();
        if let Some(gate) = self.0 {
            gate.open();
        }
        result
    }
}

/// A disk of which checkpoints are taken. For each of them: `prepare`, `begin`, `store`, `finish`.
pub(super) trait Subject: Send {
    fn connect(&mut self, shape: Shape) -> Result<Box<dyn Connection>>;

    /// What can be done before the checkpoint is asked for.
    fn prepare(&mut self) -> Result<()> {
        Ok(())
    }

    /// Returns when the state of this moment is safe from the guest's writes. Where the server measures
    /// that itself, with its own figure in microseconds.
    fn begin(&mut self, guest: Guest<'_>) -> Result<Option<f64>>;

    /// Returns when that state is durable elsewhere.
    fn store(&mut self) -> Result<()>;

    /// Returns when the disk is as before the checkpoint, with the bytes that the guest's writes caused
    /// to be copied, where they are known.
    fn finish(&mut self, guest: Guest<'_>) -> Result<Option<u64>>;

    /// The pauses of more checkpoints in a row, in microseconds, for who has a figure of its own. No
    /// other checkpoint can follow.
    fn more_pauses(&mut self) -> Result<Vec<f64>> {
        Ok(Vec::new())
    }
}
