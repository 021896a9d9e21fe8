//! The other strategies of the paper: offline, pre-copy and plain copy-on-write. They use a raw
//! file as the disk, and store it in Cairn's repository.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use anyhow::{Context, Result};

use super::persist::Persister;
use super::redirect::{RedirectedDisk, Redirects};
use super::subject::{Guest, Subject};
use crate::io::{Connection, Shape, ring::RawDisk};
use crate::site::Area;
use crate::sys::{self, Aligned};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strategy {
    /// Writes wait until everything is stored.
    Offline,
    /// Writes wait until everything is copied to another local file, which is then stored.
    Precopy,
    /// Writes go to a side file while the disk is stored, and are merged back afterwards.
    Cow,
}

pub(super) struct StrategyDisk {
    strategy: Strategy,
    disk: Arc<File>,
    /// The side file, for copies or for redirected writes.
    side: Arc<File>,
    redirects: Arc<Redirects>,
    persister: Persister,
    size: u64,
}

impl StrategyDisk {
    pub(super) fn new(strategy: Strategy, area: &Area, size: u64) -> Result<StrategyDisk> {
        let disk = Arc::new(sys::direct_file(&area.path("disk.raw"), size)?);
        let side = Arc::new(sys::direct_file(&area.path("side.raw"), size)?);
        if strategy != Strategy::Offline {
            sys::allocate(&side, size).context("allocating the side file")?;
        }
        let redirects = Arc::new(Redirects::new(size));
        let persister = Persister::new(&area.store(), size)?;
        Ok(StrategyDisk { strategy, disk, side, redirects, persister, size })
    }
}

impl Subject for StrategyDisk {
    fn connect(&mut self, shape: Shape) -> Result<Box<dyn Connection>> {
        Ok(match self.strategy {
            Strategy::Offline | Strategy::Precopy => Box::new(RawDisk::open(&self.disk, shape)?),
            Strategy::Cow => {
                let redirects = Arc::clone(&self.redirects);
                Box::new(RedirectedDisk::open(&self.disk, &self.side, redirects, shape)?)
            }
        })
    }

    fn begin(&mut self, guest: Guest<'_>) -> Result<Option<f64>> {
        match self.strategy {
            Strategy::Offline => guest.stopped(|| self.persister.persist(&self.disk))?,
            Strategy::Precopy => guest.stopped(|| copy(&self.disk, &self.side, self.size))?,
            Strategy::Cow => guest.stopped(|| {
                self.redirects.begin();
                Ok(())
            })?,
        }
        Ok(None)
    }

    fn store(&mut self) -> Result<()> {
        match self.strategy {
            Strategy::Offline => Ok(()),
            Strategy::Precopy => self.persister.persist(&self.side),
            Strategy::Cow => self.persister.persist(&self.disk),
        }
    }

    fn finish(&mut self, guest: Guest<'_>) -> Result<Option<u64>> {
        match self.strategy {
            Strategy::Offline => Ok(Some(0)),
            Strategy::Precopy => Ok(Some(self.size)),
            Strategy::Cow => {
                guest.stopped(|| {
                    self.redirects.end();
                    Ok(())
                })?;
                self.redirects.merge(&self.disk, &self.side).map(Some)
            }
        }
    }
}

/// Copies the whole file with two threads, which are enough for the speed of the disk.
fn copy(from: &File, to: &File, size: u64) -> Result<()> {
    const STEP: u64 = 1 << 20;
    let next = AtomicU64::new(0);
    let work = || -> Result<()> {
        let mut buffer = Aligned::new(STEP as usize);
        loop {
            let offset = next.fetch_add(STEP, Ordering::Relaxed);
            if offset >= size {
                return Ok(());
            }
            buffer.read(from, offset).context("reading the data to copy")?;
            to.write_all_at(buffer.get(), offset).context("writing the copy")?;
        }
    };
    thread::scope(|scope| {
        let threads = [scope.spawn(work), scope.spawn(work)];
        threads.into_iter().try_for_each(|t| t.join().expect("a copying thread does not panic"))
    })
}
