//! How fast collections mark.
//!
//! Marking is measured with trees whose chunks are not stored: a mark reads no chunk.

use std::fs;
use std::sync::Mutex;
use std::time::Instant;

use anyhow::Result;
use cairn_store::maintenance::collection::{CollectionOptions, CollectionProgress, collect};
use cairn_store::{Repository, SnapshotRef};
use serde::Serialize;

use super::{CACHED, MIB, Results, create, open};
use crate::args::Args;
use crate::proc::{cpu_time, memory};
use crate::report::goals::Goal;
use crate::report::table::Table;
use crate::site::Site;
use crate::stats::median;
use crate::sys::settle;

/// How fast a mark was.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Marked {
    blobs: f64,
    seconds: f64,
    /// Seconds of all processors.
    cpu_seconds: f64,
}

/// Measures a dry collection until it begins to sweep.
fn mark(repository: &Repository) -> Result<Marked> {
    let me = std::process::id();
    let (begin, before) = (Instant::now(), cpu_time(me)?);
    let end = Mutex::new(None);
    let options = CollectionOptions { dry_run: true, ..CollectionOptions::default() };
    let report = collect(repository, &options, &|progress| {
        let mut end = end.lock().expect("nothing panics with the lock");
        if end.is_none() && matches!(progress, CollectionProgress::Sweeping { .. }) {
            *end = cpu_time(me).ok().map(|cpu| (begin.elapsed(), cpu - before));
        }
    })?;
    let end = end.into_inner().expect("nothing panics with the lock");
    let (elapsed, cpu) = end.expect("a collection sweeps");
    let (seconds, cpu_seconds) = (elapsed.as_secs_f64(), cpu.as_secs_f64());
    Ok(Marked { blobs: report.marked as f64, seconds, cpu_seconds })
}

/// Removes clean pages from memory. Only root can do that.
fn drop_caches() -> Result<()> {
    settle();
    Ok(fs::write("/proc/sys/vm/drop_caches", "1")?)
}

pub(super) fn run(site: &Site, args: &Args, results: &mut Results) -> Result<Vec<Vec<Marked>>> {
    let many = if args.quick { 1_000_000 } else { 10_000_000 };
    let area = site.area()?;
    let [few_path, many_path, twice_path] = ["few", "many", "twice"].map(|name| area.path(name));
    create(&open(&few_path)?, "disk", CACHED)?;
    create(&open(&many_path)?, "disk", many)?;
    let twice = open(&twice_path)?;
    create(&twice, "disk", CACHED)?;
    twice.clone_snapshot(&"disk".parse::<SnapshotRef>()?, &"again".parse()?)?;
    let cases = [
        format!("{CACHED} chunks, nodes in the handle's cache"),
        format!("{many} chunks, nodes in the page cache"),
        format!("{many} chunks, nodes on the disk"),
        format!("{CACHED} chunks and a second snapshot of them, in the cache"),
    ];
    let mut all = vec![Vec::new(); cases.len()];
    let mut peak = 0;
    for round in 0..args.rounds() {
        eprintln!("round {}: marks", round + 1);
        let few = open(&few_path)?;
        mark(&few)?;
        all[0].push(mark(&few)?);
        reset_peak()?;
        all[1].push(mark(&open(&many_path)?)?);
        peak = peak.max(memory(std::process::id())?.peak);
        drop_caches()?;
        all[2].push(mark(&open(&many_path)?)?);
        mark(&twice)?;
        all[3].push(mark(&twice)?);
    }
    let head = ["what", "blobs", "seconds", "million/s", "million/s of one core"];
    let mut table = Table::new("Marking", &head);
    let rate = |marks: &[Marked]| median(marks.iter().map(|one| one.blobs / one.seconds / 1e6));
    let core = |marks: &[Marked]| median(marks.iter().map(|one| one.blobs / one.cpu_seconds / 1e6));
    let seconds = |marks: &[Marked]| median(marks.iter().map(|one| one.seconds));
    for (name, marks) in cases.iter().zip(&all) {
        table.row([
            name.clone(),
            format!("{:.0}", marks[0].blobs),
            format!("{:.2}", seconds(marks)),
            format!("{:.2}", rate(marks)),
            format!("{:.2}", core(marks)),
        ]);
    }
    results.tables.push(table);
    results.goals.push(Goal::at_least(
        "warm marks, in 1.4 million chunks/s of a core",
        core(&all[0]) / 1.4,
        1.0,
    ));
    results.goals.push(Goal::at_most(
        "time with a second snapshot",
        seconds(&all[3]) / seconds(&all[0]),
        1.1,
    ));
    results.goals.push(Goal::limit(
        "memory of this process in a mark",
        peak as f64 / MIB,
        128.0,
        "MiB",
    ));
    Ok(all)
}

/// From here on, the peak of the resident memory is that since this call.
fn reset_peak() -> Result<()> {
    Ok(fs::write("/proc/self/clear_refs", "5")?)
}
