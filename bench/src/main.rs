//! Compares Cairn with other programs.
//!
//! ```text
//!   args ─► disk ───────┐   site     the directories and programs of a run
//!           checkpoint ─┤   server   starts and stops cairn-blk and qemu-storage-daemon
//!           cost ───────┤   io       a queue: of a vhost-user disk, or of a raw file
//!           redundancy ─┤   load     the requests of a guest, and their latencies
//!           clients ────┤   cluster  peers as processes, limited links, and test data
//!           rebuild ────┤
//!           export ─────┤
//!           scale ──────┤
//!           backup ─────┤
//!           gc ─────────┤
//!           verify ─────┤
//!             │         │
//!             ▼         ▼
//!           report: tables, JSON, Markdown, charts, goals
//! ```
//!
//! Each round of a case measures all contenders one after the other, so that a slow minute of the
//! machine affects them equally. The report contains medians over the rounds.

mod args;
mod backup;
mod checkpoint;
mod clients;
mod cluster;
mod cost;
mod disk;
mod export;
mod gc;
mod io;
mod load;
mod proc;
mod rebuild;
mod redundancy;
mod report;
mod scale;
mod server;
mod site;
mod stats;
mod sys;
mod verify;

use anyhow::Result;
use clap::Parser;

use crate::args::{Args, Case};
use crate::report::Report;
use crate::site::Site;

fn main() -> Result<()> {
    let args = Args::parse();
    let site = Site::new(&args)?;
    let mut passed = true;
    for case in args.case.each() {
        println!("== {} ==", case.name());
        warn_if_busy()?;
        let report = match case {
            Case::Disk => disk::run(&site, &args)?,
            Case::Checkpoint => checkpoint::run(&site, &args)?,
            Case::Cost => cost::run(&site, &args)?,
            Case::Redundancy => redundancy::run(&site, &args)?,
            Case::Clients => clients::run(&site, &args)?,
            Case::Rebuild => rebuild::run(&site, &args)?,
            Case::Export => export::run(&site, &args)?,
            Case::Scale => scale::run(&site, &args)?,
            Case::Backup => backup::run(&site, &args)?,
            Case::Gc => gc::run(&site, &args)?,
            Case::Verify => verify::run(&site, &args)?,
            Case::All => unreachable!("`each` returns the single cases"),
        };
        warn_if_busy()?;
        passed &= finish(&args, *case, &report)?;
    }
    if !passed {
        println!("Some goals were missed; see above.");
    }
    Ok(())
}

/// Prints a warning if other programs use the processors, because they disturb the measurement.
fn warn_if_busy() -> Result<()> {
    const LIMIT_CORES: f64 = 0.2;
    let busy = proc::busy_cores()?;
    if busy > LIMIT_CORES {
        println!(
            "WARNING: other programs keep {busy:.1} cores busy; the results are not reliable."
        );
    }
    Ok(())
}

fn finish(args: &Args, case: Case, report: &Report) -> Result<bool> {
    print!("{}", report.text());
    report.save(&args.out, case.name())?;
    println!("written: {}/{}.*\n", args.out.display(), case.name());
    Ok(report.passed())
}
