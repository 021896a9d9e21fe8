//! `verify`: `cairn verify` of a repository in a directory, beside reading the same bytes with direct
//! I/O and hashing them with BLAKE3 on all processors.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use cairn_store::{BlobId, ChunkIndex, Geometry, NewBlob, Repository, Root};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::Args;
use crate::cluster::data::{CHUNK, Data};
use crate::report::goals::Goal;
use crate::report::{Report, table::Table};
use crate::site::{Area, Site};
use crate::stats::median;
use crate::sys::{self, Aligned};

const MIB: f64 = (1 << 20) as f64;

/// The bytes that the plain reader reads and hashes at a time.
const BLOCK: usize = 4 << 20;

/// The least speed of a verification, compared with the plain reader.
const GOAL: f64 = 0.8;

/// Images, each with a part of the data. The second one has the data in the opposite order, so its tree
/// leads from the end of a segment to the beginning.
const IMAGES: u64 = 2;

#[derive(Clone, Copy, Debug, Serialize)]
struct Figure {
    /// MiB a second of `cairn verify`, with the start of the program.
    verify: f64,
    /// MiB a second of the plain reader.
    plain: f64,
}

pub(crate) fn run(site: &Site, args: &Args) -> Result<Report> {
    let area = site.area()?;
    let bytes: usize = if args.quick { 256 << 20 } else { 2 << 30 };
    fill(&area, bytes)?;
    let segments = segments(&area)?;
    sys::settle();
    let mut figures = Vec::new();
    for round in 0..args.rounds() {
        // Each is the first in every other round.
        let first = round % 2 == 0;
        let mut figure = Figure { verify: 0.0, plain: 0.0 };
        for is_plain in [first, !first] {
            match is_plain {
                true => figure.plain = plain(&segments)?,
                false => figure.verify = verify(site, &area, bytes)?,
            }
        }
        let Figure { verify, plain } = figure;
        eprintln!("round {}: verify {verify:.0} MiB/s, plain {plain:.0} MiB/s", round + 1);
        figures.push(figure);
    }
    let of = |value: fn(&Figure) -> f64| median(figures.iter().map(value));
    let title = format!("{} MiB of chunks that cannot be compressed", bytes >> 20);
    let mut table = Table::new(title, &["reader", "MiB/s"]);
    table.row(["cairn verify".into(), format!("{:.0}", of(|one| one.verify))]);
    table.row(["O_DIRECT and BLAKE3".into(), format!("{:.0}", of(|one| one.plain))]);
    // Of each round, because the machine's speed differs from round to round.
    let ratio = of(|one| one.verify / one.plain);
    let goals = vec![Goal::at_least("cairn verify, of the plain reader", ratio, GOAL)];
    Ok(Report {
        tables: vec![table],
        goals,
        data: json!({ "rounds": figures }),
        charts: Vec::new(),
    })
}

/// Stores the data as images.
fn fill(area: &Area, bytes: usize) -> Result<()> {
    let repository = Repository::open_or_create(&area.store())?;
    let part = bytes / IMAGES as usize;
    let geometry = Geometry::new(part as u64, CHUNK as u32)?;
    let mut data = Data::new(64 << 20);
    for image in 0..IMAGES {
        let mut changes = std::collections::BTreeMap::new();
        for group in 0..(part / (64 << 20)) as u64 {
            data.make_unique(image << 32 | group);
            let blobs: Vec<_> = data.bytes().chunks(CHUNK).map(NewBlob::new).collect();
            repository.put_chunks(&blobs)?;
            for blob in &blobs {
                let last = geometry.chunk_count() - 1 - changes.len() as u64;
                let at = if image == 0 { changes.len() as u64 } else { last };
                changes.insert(ChunkIndex(at), Some(blob.chunk_id()));
            }
        }
        let root = repository.commit_tree(&Root::default(), geometry, &changes)?.root;
        repository.flush()?;
        let name = format!("image{image}").parse()?;
        repository.publish_image(&name, geometry, &root, 0, 0)?;
    }
    Ok(())
}

/// The segments with their lengths.
fn segments(area: &Area) -> Result<Vec<(PathBuf, u64)>> {
    let directory = area.path("repository").join("segments");
    let mut all = Vec::new();
    for entry in fs::read_dir(&directory).context("listing the segments")? {
        let entry = entry?;
        all.push((entry.path(), entry.metadata()?.len()));
    }
    all.sort();
    Ok(all)
}

fn verify(site: &Site, area: &Area, bytes: usize) -> Result<f64> {
    let begin = Instant::now();
    let output = Command::new(&site.cairn)
        .args(["verify", "--json", "--store", &area.store()])
        .stderr(Stdio::inherit())
        .output()
        .context("starting cairn verify")?;
    let seconds = begin.elapsed().as_secs_f64();
    let report: Value = serde_json::from_slice(&output.stdout).context("reading its report")?;
    ensure!(output.status.success(), "cairn verify failed: {report}");
    ensure!(report["bytes"] == bytes, "cairn verify has read other data: {report}");
    Ok(bytes as f64 / MIB / seconds)
}

/// Reads the segments with direct I/O in large blocks, one after the other, and hashes each block.
fn plain(segments: &[(PathBuf, u64)]) -> Result<f64> {
    let blocks: Vec<(&Path, u64, usize)> = segments
        .iter()
        .flat_map(|(path, len)| {
            let starts = (0..*len).step_by(BLOCK);
            starts
                .map(move |start| (path.as_path(), start, (BLOCK as u64).min(len - start) as usize))
        })
        .collect();
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let begin = Instant::now();
    // As many as keep the disk and all processors busy.
    let threads = 2 * thread::available_parallelism()?.get();
    thread::scope(|scope| {
        let readers: Vec<_> =
            (0..threads).map(|_| scope.spawn(|| read_blocks(&blocks, &next, &done))).collect();
        readers.into_iter().try_for_each(|one| one.join().expect("no reader panics"))
    })?;
    Ok(done.into_inner() as f64 / MIB / begin.elapsed().as_secs_f64())
}

fn read_blocks(blocks: &[(&Path, u64, usize)], next: &AtomicUsize, done: &AtomicU64) -> Result<()> {
    let mut buffer = Aligned::new(BLOCK);
    let mut open: Option<(&Path, File)> = None;
    while let Some((path, start, len)) = blocks.get(next.fetch_add(1, Ordering::Relaxed)).copied() {
        if open.as_ref().is_none_or(|(other, _)| *other != path) {
            let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
            open = Some((path, file));
        }
        let (_, file) = open.as_ref().expect("a file was opened");
        let bytes = &mut buffer.get_mut()[..len];
        file.read_exact_at(bytes, start)?;
        // As many hashes as a verification computes.
        for chunk in bytes.chunks(CHUNK) {
            std::hint::black_box(BlobId::of(chunk));
        }
        done.fetch_add(len as u64, Ordering::Relaxed);
    }
    Ok(())
}
