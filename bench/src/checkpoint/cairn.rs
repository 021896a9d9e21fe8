//! Cairn: selective copy-on-write.

use std::time::Duration;

use anyhow::Result;

use super::subject::{Guest, Subject};
use crate::io::{Connection, Shape};
use crate::server::cairn::Cairn;
use crate::server::control::Control;
use crate::site::{Area, Site};

/// The number of additional checkpoints. It is less than the number that may be pending at a time.
const MORE_CHECKPOINTS: usize = 10;

pub(super) struct CairnDisk {
    cairn: Cairn,
    control: Control,
    copied_before: u64,
}

impl CairnDisk {
    pub(super) fn start(site: &Site, area: &Area, size: u64) -> Result<CairnDisk> {
        let cairn = Cairn::start(site, area, size, &[])?;
        let control = cairn.control()?;
        Ok(CairnDisk { cairn, control, copied_before: 0 })
    }

    fn copied(&mut self) -> Result<u64> {
        self.control.copied_bytes()
    }
}

impl Subject for CairnDisk {
    fn connect(&mut self, shape: Shape) -> Result<Box<dyn Connection>> {
        Ok(Box::new(self.cairn.connect(shape)?))
    }

    fn prepare(&mut self) -> Result<()> {
        self.copied_before = self.copied()?;
        Ok(())
    }

    fn begin(&mut self, _: Guest<'_>) -> Result<Option<f64>> {
        Ok(Some(self.control.checkpoint()?.pause_us as f64))
    }

    fn store(&mut self) -> Result<()> {
        self.control.stable().map(drop)
    }

    fn finish(&mut self, _: Guest<'_>) -> Result<Option<u64>> {
        Ok(Some(self.copied()? - self.copied_before))
    }

    fn more_pauses(&mut self) -> Result<Vec<f64>> {
        let mut pauses = Vec::new();
        for _ in 0..MORE_CHECKPOINTS {
            // Each one uses its own connection, which does not wait until it is stable.
            pauses.push(self.cairn.control()?.checkpoint()?.pause_us as f64);
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(pauses)
    }
}
