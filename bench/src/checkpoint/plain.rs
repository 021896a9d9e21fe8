//! A plain writer, which measures the speed of the disk: one file, written in order with direct
//! I/O, and one sync at the end.

use std::os::unix::fs::FileExt;
use std::time::Instant;

use anyhow::Result;
use seeded_rng::Rng;

use crate::site::Site;
use crate::sys::{self, Aligned};

/// Writes `len` bytes and returns the time in seconds.
pub(super) fn write(site: &Site, len: u64) -> Result<f64> {
    const STEP: usize = 1 << 20;
    let area = site.area()?;
    let file = sys::direct_file(&area.path("plain.raw"), 0)?;
    let mut buffer = Aligned::new(STEP);
    Rng::new(len).fill(buffer.get_mut());
    let begin = Instant::now();
    for offset in (0..len).step_by(STEP) {
        file.write_all_at(buffer.get(), offset)?;
    }
    file.sync_data()?;
    Ok(begin.elapsed().as_secs_f64())
}
