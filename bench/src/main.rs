//! Cairn side by side with other programs, in one run.
//!
//! ```text
//!   args ─► disk ───────┐   site     where files and sockets are, and which programs
//!           checkpoint ─┤   server   starts and stops cairn-blk and qemu-storage-daemon
//!           cost ───────┤   io       a queue: of a vhost-user disk, or of a raw file
//!           redundancy ─┤   load     what the guest does, and what it sees
//!           clients ────┤   cluster  peers as processes, links, and what is persisted to them
//!           rebuild ────┤
//!             │         │
//!             ▼         ▼
//!           report: tables, JSON, Markdown, charts, goals
//! ```
//!
//! Each case measures all contenders in turn, round after round, so that a slow minute of the machine
//! hits them alike, and reports medians over the rounds.

mod args;
mod checkpoint;
mod clients;
mod cluster;
mod cost;
mod disk;
mod io;
mod load;
mod proc;
mod rebuild;
mod redundancy;
mod report;
mod server;
mod site;
mod stats;
mod sys;

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
        look_around()?;
        let report = match case {
            Case::Disk => disk::run(&site, &args)?,
            Case::Checkpoint => checkpoint::run(&site, &args)?,
            Case::Cost => cost::run(&site, &args)?,
            Case::Redundancy => redundancy::run(&site, &args)?,
            Case::Clients => clients::run(&site, &args)?,
            Case::Rebuild => rebuild::run(&site, &args)?,
            Case::All => unreachable!("it is split into its cases"),
        };
        look_around()?;
        passed &= finish(&args, *case, &report)?;
    }
    if !passed {
        println!("Some goals were missed: see above.");
    }
    Ok(())
}

/// Says so when something else runs: its figures would be noise.
fn look_around() -> Result<()> {
    const NOISE: f64 = 0.2;
    let busy = proc::busy_cores()?;
    if busy > NOISE {
        println!(
            "WARNING: other programs keep {busy:.1} cores busy; the figures are not worth much."
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
