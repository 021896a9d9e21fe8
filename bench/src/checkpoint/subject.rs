//! The contenders, and the steps of a checkpoint.

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

/// The guest, which a checkpoint can stop.
#[derive(Clone, Copy)]
pub(super) struct Guest<'a>(Option<&'a Gate>);

impl<'a> Guest<'a> {
    /// A guest without load.
    pub(super) const IDLE: Guest<'static> = Guest(None);

    pub(super) fn behind(gate: &'a Gate) -> Guest<'a> {
        Guest(Some(gate))
    }

    /// Calls `action` while the guest's writes wait.
    pub(super) fn stopped<T>(&self, action: impl FnOnce() -> Result<T>) -> Result<T> {
        if let Some(gate) = self.0 {
            gate.close();
        }
        let result = action();
        if let Some(gate) = self.0 {
            gate.open();
        }
        result
    }
}

/// A disk under test. The steps of a checkpoint are `prepare`, `begin`, `store` and `finish`, in
/// this order.
pub(super) trait Subject: Send {
    fn connect(&mut self, shape: Shape) -> Result<Box<dyn Connection>>;

    /// Does work that is possible before the request.
    fn prepare(&mut self) -> Result<()> {
        Ok(())
    }

    /// Freezes the state of the disk: later writes of the guest do not change it. Returns the pause
    /// in microseconds if the server reports one.
    fn begin(&mut self, guest: Guest<'_>) -> Result<Option<f64>>;

    /// Stores the frozen state, and returns when it is durable.
    fn store(&mut self) -> Result<()>;

    /// Returns when the disk is as before the checkpoint. The result is the number of bytes that
    /// were copied because of the guest's writes, if it is known.
    fn finish(&mut self, guest: Guest<'_>) -> Result<Option<u64>>;

    /// Takes more checkpoints and returns their pauses in microseconds, if the server reports
    /// pauses. No other checkpoint can follow.
    fn more_pauses(&mut self) -> Result<Vec<f64>> {
        Ok(Vec::new())
    }
}
