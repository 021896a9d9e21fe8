//! `gc`: collections: how fast they mark, what a commit and a guest beside one pay, and how much space is
//! left.

mod commits;
mod guest;
mod marks;
mod space;

use std::path::Path;
use std::thread;
use std::time::Instant;

use anyhow::Result;
use cairn_store::maintenance::collection::{CollectionOptions, CollectionReport, collect};
use cairn_store::{
    ChangedChunks, Changes, ChunkId, ChunkIndex, Geometry, NewBlob, Repository, Root,
};
use seeded_rng::Rng;
use serde_json::json;

use crate::args::Args;
use crate::report::goals::Goal;
use crate::report::{Report, table::Table};
use crate::site::Site;

const CHUNK: usize = 256 << 10;

const MIB: f64 = (1 << 20) as f64;

/// Chunks whose nodes fit into the cache of a handle.
const CACHED: u64 = 200_000;

/// The tables and goals of the parts.
#[derive(Default)]
struct Results {
    tables: Vec<Table>,
    goals: Vec<Goal>,
}

pub(crate) fn run(site: &Site, args: &Args) -> Result<Report> {
    let mut results = Results::default();
    let mut data = json!({});
    if args.wants("marks") {
        data["marks"] = json!(marks::run(site, args, &mut results)?);
    }
    if args.wants("commits") {
        data["commits"] = json!(commits::run(site, args, &mut results)?);
    }
    if args.wants("guest") {
        data["guest"] = json!(guest::run(site, args, &mut results)?);
    }
    if args.wants("space") {
        data["space"] = json!(space::run(site, args, &mut results)?);
    }
    let Results { tables, goals } = results;
    Ok(Report { tables, goals, data, charts: Vec::new() })
}

fn open(path: &Path) -> Result<Repository> {
    Ok(Repository::open_or_create(&format!("dir:{}", path.display()))?)
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

/// Creates an image whose chunks are all different and not stored. A mark reads no chunk.
fn create(repository: &Repository, name: &str, chunks: u64) -> Result<Root> {
    let commit = repository.begin_commit()?;
    let geometry = Geometry::new(chunks * CHUNK as u64, CHUNK as u32)?;
    let root = repository.commit_tree(&Root::default(), geometry, &Unique(chunks))?.root;
    commit.publish_image(&name.parse()?, geometry, &root, 0, 0)?;
    Ok(root)
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

/// Collects in a thread of its own, because the thread keeps the low priority of a collection.
fn collect_all(repository: &Repository) -> Result<CollectionReport> {
    let collected = thread::scope(|scope| {
        let all = || collect(repository, &CollectionOptions::default(), &|_| ());
        scope.spawn(all).join().expect("a collection does not panic")
    });
    Ok(collected?)
}
