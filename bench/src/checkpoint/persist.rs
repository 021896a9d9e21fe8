//! Stores a whole file in a repository, as Cairn stores a frozen epoch. Two threads store batches,
//! and each batch is flushed before the next one. Then the tree is stored and the image is
//! published.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use anyhow::{Context, Result};
use cairn_store::{
    ChunkId, ChunkIndex, DEFAULT_CHUNK_SIZE, Geometry, ImageName, Repository, Root, is_zero,
};

use crate::sys::Aligned;

const THREADS: usize = 2;
const BATCH: u64 = 8 << 20;

pub(super) struct Persister {
    repository: Repository,
    geometry: Geometry,
    published: u64,
}

impl Persister {
    pub(super) fn new(store: &str, size: u64) -> Result<Persister> {
        let repository = Repository::open_or_create(store)?;
        Ok(Persister {
            repository,
            geometry: Geometry::new(size, DEFAULT_CHUNK_SIZE)?,
            published: 0,
        })
    }

    /// Stores the content of the file and publishes it.
    pub(super) fn persist(&mut self, file: &File) -> Result<()> {
        let stored = Mutex::new(BTreeMap::new());
        let next = AtomicU64::new(0);
        let work = || self.store_batches(file, &next, &stored);
        thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
            let mut results = threads.into_iter().map(|t| t.join().expect("no worker panics"));
            results.try_for_each(|result| result)
        })?;
        let changes = stored.into_inner().expect("no thread panics with the list locked");
        let tree = self.repository.commit_tree(&Root::default(), self.geometry, &changes)?;
        self.published += 1;
        let name: ImageName = format!("bench{}", self.published).parse()?;
        let size = self.geometry.size();
        self.repository.publish_image(&name, self.geometry, &tree.root, size, size)?;
        Ok(())
    }

    fn store_batches(
        &self,
        file: &File,
        next: &AtomicU64,
        stored: &Mutex<BTreeMap<ChunkIndex, Option<ChunkId>>>,
    ) -> Result<()> {
        let chunk_size = u64::from(DEFAULT_CHUNK_SIZE);
        let mut chunk = Aligned::new(chunk_size as usize);
        loop {
            let begin = next.fetch_add(BATCH, Ordering::Relaxed);
            if begin >= self.geometry.size() {
                return Ok(());
            }
            let end = (begin + BATCH).min(self.geometry.size());
            let mut ids = Vec::new();
            for offset in (begin..end).step_by(chunk_size as usize) {
                chunk.read(file, offset).context("reading the disk")?;
                let id = match is_zero(chunk.get()) {
                    true => None,
                    false => Some(self.repository.put_chunk(chunk.get())?.id),
                };
                ids.push((ChunkIndex(offset / chunk_size), id));
            }
            self.repository.flush()?;
            stored.lock().expect("no thread panics with the list locked").extend(ids);
        }
    }
}
