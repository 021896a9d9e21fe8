//! `gc`: collections of a repository in a directory: how fast they mark, what a commit beside one costs,
//! and how much space is left.
//!
//! Marking is measured with trees whose chunks are not stored: a mark reads no chunk.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Result, ensure};
use cairn_store::maintenance::collection::{
    CollectionOptions, CollectionProgress, CollectionReport, collect,
};
use cairn_store::{
    ChangedChunks, Changes, ChunkId, ChunkIndex, Geometry, NewBlob, Repository, Root, SnapshotRef,
};
use seeded_rng::Rng;
use serde::Serialize;
use serde_json::json;

use crate::args::Args;
use crate::proc::{cpu_time, memory};
use crate::report::goals::Goal;
use crate::report::{Report, table::Table};
use crate::site::Site;
use crate::stats::median;
use crate::sys::settle;

const CHUNK: usize = 256 << 10;

/// The pairs of commits with and without a collection.
const PAIRS: usize = 5;

/// Chunks whose nodes fit into the cache of a handle.
const CACHED: u64 = 200_000;

/// How fast a mark was.
#[derive(Clone, Copy, Debug, Serialize)]
struct Marked {
    blobs: f64,
    seconds: f64,
    /// Seconds of all processors.
    cpu_seconds: f64,
}

/// The changes of a disk on which every chunk is different.
struct Unique(u64);

impl Changes for Unique {
    fn next(&self, from: ChunkIndex) -> cairn_store::Result<Option<(ChunkIndex, Option<ChunkId>)>> {
        let name = || {
            let mut name = [0; 32];
            Rng::new(from.0 + 1).fill(&mut name);
            ChunkId::from_bytes(name)
        };
        Ok((from.0 < self.0).then(|| (from, Some(name()))))
    }

    fn count(&self) -> u64 {
        self.0
    }
}

pub(crate) fn run(site: &Site, args: &Args) -> Result<Report> {
    let many = if args.quick { 1_000_000 } else { 10_000_000 };
    let (mut tables, mut goals) = (Vec::new(), Vec::new());
    let marks = mark_all(site, args, many, &mut tables, &mut goals)?;
    let pairs = commits(site, args, &mut tables, &mut goals)?;
    let space = space(site, args, &mut tables, &mut goals)?;
    let data = json!({ "marks": marks, "pairs": pairs, "space": space });
    Ok(Report { tables, goals, data, charts: Vec::new() })
}

fn open(path: &Path) -> Result<Repository> {
    Ok(Repository::open_or_create(&format!("dir:{}", path.display()))?)
}

/// Creates an image whose chunks are all different and not stored.
fn create(repository: &Repository, name: &str, chunks: u64) -> Result<Root> {
    let commit = repository.begin_commit()?;
    let geometry = Geometry::new(chunks * CHUNK as u64, CHUNK as u32)?;
    let root = repository.commit_tree(&Root::default(), geometry, &Unique(chunks))?.root;
    commit.publish_image(&name.parse()?, geometry, &root, 0, 0)?;
    Ok(root)
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

fn mark_all(
    site: &Site,
    args: &Args,
    many: u64,
    tables: &mut Vec<Table>,
    goals: &mut Vec<Goal>,
) -> Result<Vec<Vec<Marked>>> {
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
    tables.push(table);
    goals.push(Goal::at_least(
        "warm marks, in 1.4 million chunks/s of a core",
        core(&all[0]) / 1.4,
        1.0,
    ));
    goals.push(Goal::at_most(
        "time with a second snapshot",
        seconds(&all[3]) / seconds(&all[0]),
        1.1,
    ));
    goals.push(Goal::limit(
        "memory of this process in a mark",
        peak as f64 / 1048576.0,
        128.0,
        "MiB",
    ));
    Ok(all)
}

/// From here on, the peak of the resident memory is that since this call.
fn reset_peak() -> Result<()> {
    Ok(fs::write("/proc/self/clear_refs", "5")?)
}

/// Imports an image of random chunks. Returns the seconds that it took.
fn import(repository: &Repository, name: &str, contents: &[Vec<u8>]) -> Result<f64> {
    let begin = Instant::now();
    let commit = repository.begin_commit()?;
    let geometry = Geometry::new((contents.len() * CHUNK) as u64, CHUNK as u32)?;
    let mut changes = ChangedChunks::new();
    for (part, contents) in contents.chunks(16).enumerate() {
        let new: Vec<_> = contents.iter().map(|content| NewBlob::new(content)).collect();
        repository.put_chunks(&new)?;
        let named = new.iter().enumerate();
        changes.extend(
            named.map(|(at, one)| (ChunkIndex((part * 16 + at) as u64), Some(one.chunk_id()))),
        );
    }
    let root = repository.commit_tree(&Root::default(), geometry, &changes)?.root;
    commit.publish_image(&name.parse()?, geometry, &root, 0, 0)?;
    Ok(begin.elapsed().as_secs_f64())
}

fn random(seed: u64, chunks: usize) -> Vec<Vec<u8>> {
    let mut rng = Rng::new(seed);
    let mut fill = || {
        let mut content = vec![0; CHUNK];
        rng.fill(&mut content);
        content
    };
    (0..chunks).map(|_| fill()).collect()
}

fn collect_all(repository: &Repository) -> Result<CollectionReport> {
    Ok(collect(repository, &CollectionOptions::default(), &|_| ())?)
}

/// Commits alone and beside collections that have something to free.
fn commits(
    site: &Site,
    args: &Args,
    tables: &mut Vec<Table>,
    goals: &mut Vec<Goal>,
) -> Result<Vec<(f64, f64)>> {
    let area = site.area()?;
    let chunks = if args.quick { 256 } else { 2048 };
    let path = area.path("commits");
    let writer = open(&path)?;
    create(&writer, "names", CACHED)?;
    let mut pairs = Vec::new();
    for pair in 0..PAIRS as u64 {
        eprintln!("pair {}: commits", pair + 1);
        let mut seconds = [0.0; 2];
        for beside in if pair % 2 == 0 { [0, 1] } else { [1, 0] } {
            let seed = pair * 10 + beside as u64 + 1;
            import(&writer, "garbage", &random(seed << 32, chunks))?;
            writer.remove_image(&"garbage".parse()?, false)?;
            let contents = random(seed, chunks);
            settle();
            let is_over = AtomicBool::new(beside == 0);
            seconds[beside] = thread::scope(|scope| {
                let collecting = scope.spawn(|| -> Result<()> {
                    while !is_over.load(Ordering::Relaxed) {
                        collect_all(&open(&path)?)?;
                    }
                    Ok(())
                });
                let taken = import(&writer, &format!("image{seed}"), &contents);
                is_over.store(true, Ordering::Relaxed);
                collecting.join().expect("a collection does not panic")?;
                taken
            })?;
            writer.remove_image(&format!("image{seed}").parse()?, false)?;
            collect_all(&writer)?;
        }
        pairs.push((seconds[0], seconds[1]));
    }
    let [alone, beside] =
        [median(pairs.iter().map(|pair| pair.0)), median(pairs.iter().map(|pair| pair.1))];
    let mut table = Table::new("An import, in seconds", &["alone", "beside collections"]);
    table.row([format!("{alone:.3}"), format!("{beside:.3}")]);
    tables.push(table);
    let slower = median(pairs.iter().map(|pair| pair.1 / pair.0));
    goals.push(Goal::at_most("an import beside collections, of pairs", slower, 1.1));
    Ok(pairs)
}

/// Images that share half of their content. Half of them are removed.
fn space(
    site: &Site,
    args: &Args,
    tables: &mut Vec<Table>,
    goals: &mut Vec<Goal>,
) -> Result<(u64, u64)> {
    const IMAGES: usize = 8;
    let area = site.area()?;
    let path = area.path("space");
    let chunks = if args.quick { 64 } else { 512 };
    let repository = open(&path)?;
    let shared = random(7, chunks);
    for image in 0..IMAGES {
        let mut contents = shared.clone();
        contents.extend(random(100 + image as u64, chunks));
        import(&repository, &format!("image{image}"), &contents)?;
    }
    for image in (0..IMAGES).step_by(2) {
        repository.remove_image(&format!("image{image}").parse()?, false)?;
    }
    let report = collect_all(&repository)?;
    drop(repository);
    let alive = (chunks * CHUNK * (1 + IMAGES / 2)) as u64;
    let used = used(&path)?;
    ensure!(report.freed.bytes >= (chunks * CHUNK * IMAGES / 2) as u64, "{report:?}");
    let mut table =
        Table::new("Space after half of the images were removed", &["MiB alive", "MiB used"]);
    table.row([alive, used].map(|bytes| format!("{:.1}", bytes as f64 / 1048576.0)));
    tables.push(table);
    goals.push(Goal::at_most("space used, of what is alive", used as f64 / alive as f64, 1.05));
    Ok((alive, used))
}

/// The bytes that the files of a directory take on the disk.
fn used(directory: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory)? {
        let (path, metadata) = {
            let entry = entry?;
            (entry.path(), entry.metadata()?)
        };
        bytes += if metadata.is_dir() { used(&path)? } else { metadata.blocks() * 512 };
    }
    Ok(bytes)
}
