//! `export`: writing a snapshot to a file, from eight peers over a limited link, and from a repository
//! on the local disk whose data is in the page cache.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::json;

use crate::args::Args;
use crate::cluster::PEERS;
use crate::cluster::data::Data;
use crate::cluster::link::{FAR, Link, RATE};
use crate::proc::succeed;
use crate::report::goals::Goal;
use crate::report::{Report, table::Table};
use crate::server::catalog::Catalog;
use crate::site::{Area, Site};
use crate::stats::median;
use crate::sys::{Aligned, direct_file, settle};

const MIB: f64 = (1 << 20) as f64;

/// The bytes of one write of the plain writers.
const WRITE: usize = 1 << 20;

/// How often a round measures each way to write to the local disk.
const PASSES: usize = 3;

/// The ways to write to the local disk.
const WRITERS: [&str; 4] = ["cairn export", "O_DIRECT", "O_DIRECT, 4 threads", "cp and sync"];

/// An export over the link.
#[derive(Clone, Copy, Debug, Serialize)]
struct OverLink {
    seconds: f64,
    /// Bytes of the disk.
    bytes: f64,
    /// Bytes received over the link, as the interface counts them.
    received: f64,
}

impl OverLink {
    /// The part of the link's speed that carried content of the disk, without headers and without
    /// what was received twice.
    fn useful(&self) -> f64 {
        self.bytes * 8.0 / self.seconds / RATE
    }

    fn busy(&self) -> f64 {
        self.received * 8.0 / self.seconds / RATE
    }
}

pub(crate) fn run(site: &Site, args: &Args) -> Result<Report> {
    let mut data = Data::new(if args.quick { 128 << 20 } else { 1 << 30 });
    data.make_unique(1);
    let mut over_link = Vec::new();
    if args.wants("link") {
        over_link = measure_link(site, args, data.bytes())?;
    }
    let mut to_disk: [Vec<f64>; WRITERS.len()] = Default::default();
    if args.wants("disk") {
        measure_disk(site, args, data.bytes(), &mut to_disk)?;
    }
    let (mut tables, mut goals) = (Vec::new(), Vec::new());
    if !over_link.is_empty() {
        let of = |value: fn(&OverLink) -> f64| median(over_link.iter().map(value));
        let head = ["export", "MiB/s", "received MiB", "link busy", "with the disk's content"];
        let mut table = Table::new("From eight peers, rs=4+4, over 1 Gbit/s", &head);
        table.row([
            "cairn export".into(),
            format!("{:.1}", of(|one| one.bytes / MIB / one.seconds)),
            format!("{:.0}", of(|one| one.received / MIB)),
            format!("{:.1} %", 100.0 * of(OverLink::busy)),
            format!("{:.1} %", 100.0 * of(OverLink::useful)),
        ]);
        tables.push(table);
        goals.push(Goal::at_least("1 Gbit/s: the link is busy", of(OverLink::busy), 0.9));
    }
    if !to_disk[0].is_empty() {
        let rate =
            |at: usize| data.bytes().len() as f64 / MIB / median(to_disk[at].iter().copied());
        let head = ["writer", "MiB/s", "of O_DIRECT"];
        let mut table = Table::new("To the local disk, source in the page cache", &head);
        for (at, name) in WRITERS.into_iter().enumerate() {
            let ratio = format!("{:.2}", rate(at) / rate(1));
            table.row([name.into(), format!("{:.0}", rate(at)), ratio]);
        }
        tables.push(table);
        // Of each pass, because the speed of the disk changes from minute to minute.
        let ratios = to_disk[0].iter().zip(&to_disk[1]).map(|(cairn, plain)| plain / cairn);
        goals.push(Goal::at_least("local disk: of a plain O_DIRECT writer", median(ratios), 0.8));
    }
    let data = json!({ "link": over_link, "disk_seconds": to_disk });
    Ok(Report { tables, goals, data, charts: Vec::new() })
}

/// Exports from peers behind a limited link, after an import beside them.
fn measure_link(site: &Site, args: &Args, disk: &[u8]) -> Result<Vec<OverLink>> {
    let link = Link::new().context("creating a limited link, which needs root, ip and tc")?;
    let area = site.area()?;
    let host = (Some(link.namespace()), FAR);
    let catalog = Catalog::with_peers(PEERS, site, &area, &area.path("catalog"), host)?;
    catalog.wait_for_peers(site, PEERS)?;
    let source = area.path("disk.raw");
    fs::write(&source, disk).context("writing the disk")?;
    let source = source.to_str().context("a path of this program is not UTF-8")?;
    let import = ["import", source, "vm1", "--redundancy", "rs=4+4"];
    catalog.cairn_in(site, Some(link.namespace()), &import)?;
    let mut rounds = Vec::new();
    for round in 0..args.rounds() {
        let target = area.path(&format!("exported{round}.raw"));
        settle();
        let (before, begin) = (link.traffic()?, Instant::now());
        let target_path = target.to_str().context("a path of this program is not UTF-8")?;
        catalog.cairn(site, &["export", "vm1", target_path])?;
        let (seconds, after) = (begin.elapsed().as_secs_f64(), link.traffic()?);
        let received = (after.received - before.received) as f64;
        let figure = OverLink { seconds, bytes: disk.len() as f64, received };
        let (busy, useful) = (figure.busy(), figure.useful());
        eprintln!("round {}: link {busy:.3} busy, {useful:.3} with content", round + 1);
        if round == 0 {
            ensure!(fs::read(&target)? == disk, "the exported disk is wrong");
        }
        fs::remove_file(&target).context("removing a file")?;
        rounds.push(figure);
    }
    Ok(rounds)
}

/// Writes to the local disk in each way, in alternating order.
fn measure_disk(
    site: &Site,
    args: &Args,
    disk: &[u8],
    seconds: &mut [Vec<f64>; WRITERS.len()],
) -> Result<()> {
    let area = site.area()?;
    let source = area.path("disk.raw");
    fs::write(&source, disk).context("writing the disk")?;
    let mut import = Command::new(&site.cairn);
    import.args(["--store", &area.store(), "import"]).arg(&source).arg("vm1");
    succeed(import)?;
    let passes = if args.quick { 1 } else { PASSES } * args.rounds() as usize;
    for pass in 0..passes {
        let mut order: Vec<usize> = (0..WRITERS.len()).collect();
        if pass % 2 == 1 {
            order.reverse();
        }
        for at in order {
            let target = area.path(&format!("target{pass}-{at}"));
            warm(&area.path("repository/segments"))?;
            warm(&source)?;
            settle();
            let begin = Instant::now();
            match at {
                0 => {
                    let mut export = Command::new(&site.cairn);
                    export.args(["--store", &area.store(), "export", "vm1"]).arg(&target);
                    succeed(export)?;
                }
                1 => write_direct(&target, disk, 1)?,
                2 => write_direct(&target, disk, 4)?,
                _ => copy(&source, &target)?,
            }
            let took = begin.elapsed().as_secs_f64();
            let (name, rate) = (WRITERS[at], disk.len() as f64 / MIB / took);
            eprintln!("pass {}: {name}: {rate:.0} MiB/s", pass + 1);
            seconds[at].push(took);
            fs::remove_file(&target).context("removing a file")?;
        }
    }
    drop::<Area>(area);
    Ok(())
}

/// Reads a file, or the files of a directory, into the page cache.
fn warm(path: &Path) -> Result<()> {
    if path.is_dir() {
        return fs::read_dir(path)?.try_for_each(|entry| warm(&entry?.path()));
    }
    io::copy(&mut File::open(path)?, &mut io::sink()).context("reading a file")?;
    Ok(())
}

/// A plain writer: a new file, direct I/O of 1 MiB by each thread, and one sync at the end.
fn write_direct(path: &Path, bytes: &[u8], threads: usize) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let file = direct_file(path, bytes.len() as u64).context("creating a file")?;
    let next = AtomicUsize::new(0);
    let write = || -> io::Result<()> {
        let mut buffer = Aligned::new(WRITE);
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed) * WRITE;
            let Some(part) = bytes.get(at..bytes.len().min(at + WRITE)) else { return Ok(()) };
            if part.is_empty() {
                return Ok(());
            }
            buffer.get_mut()[..part.len()].copy_from_slice(part);
            file.write_all_at(&buffer.get()[..part.len()], at as u64)?;
        }
    };
    thread::scope(|scope| {
        let writers: Vec<_> = (0..threads).map(|_| scope.spawn(write)).collect();
        writers.into_iter().try_for_each(|one| one.join().expect("a writer does not panic"))
    })
    .context("writing with direct I/O")?;
    file.sync_all().context("syncing")
}

/// A copy through the page cache, synced at the end.
fn copy(source: &Path, target: &Path) -> Result<()> {
    let mut copy = Command::new("cp");
    copy.arg(source).arg(target);
    succeed(copy)?;
    File::open(target)?.sync_all().context("syncing")
}
