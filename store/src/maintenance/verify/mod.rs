//! Reads and verifies every blob that snapshots refer to.
//!
//! ```text
//! new: walk the trees ─► names, sorted ─────────────► run ─┬─ a directory: in the order of the segments
//!        └─ nodes that cannot be read                    └─ peers: every fragment of every blob
//!                                                              │
//!        when each snapshot was verified ◄── which snapshots ◄─┴─ what cannot be read, and why
//! ```
//!
//! | file | does |
//! |---|---|
//! | `mod` | the order of the steps, and which snapshots are affected |
//! | `report` | what a verification has found |
//! | [`sample`] | which blobs are read if not all are |
//! | `directory` | reads chunks in the order of the segments |
//! | `peers` | reads all fragments on peers |
//!
//! Snapshots share chunks. Their names are sorted in temporary files, so each chunk is read once, in
//! bounded memory. The names of the tree nodes are in memory.
//!
//! A verification is a [reader](Repository::begin_reading) of up to [`MAX_READERS`] snapshots, so that a
//! collection beside it takes nothing away. Of further snapshots, those that are removed meanwhile are
//! left out of the report.

mod directory;
mod peers;
mod report;
pub mod sample;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use self::directory::SegmentReads;
use self::report::{BlobSet, Findings};
pub use self::report::{BlobUse, FoundFragment, UnreadableBlob, Verification};
use self::sample::Sample;
use crate::catalog::Verified;
use crate::clock::now;
use crate::durable::sorted_runs::{RunSorter, SortedRuns, temporary_directory};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ChunkId, NodeId};
use crate::repository::{ReaderLease, Repository};
use crate::snapshot::Snapshot;
use crate::tree::Referred;

/// The most snapshots that have a reader's document each while they are verified.
pub const MAX_READERS: usize = 256;

/// The most names of chunks in memory: 36 MiB.
const MAX_NAMES: usize = if cfg!(test) { 8 } else { 1 << 20 };

/// The length of an entry: the name of a chunk and its length, or of a node and 0.
const ENTRY: usize = 36;

/// The chunks and nodes that are to be read, in the order of their names.
type SortedChunks = SortedRuns<ENTRY>;

/// A verification of snapshots.
pub struct Verifier<'a> {
    repository: &'a Repository,
    snapshots: Vec<Snapshot>,
    sample: Option<Sample>,
    chunks: SortedChunks,
    /// The names of the tree nodes.
    nodes: HashSet<NodeId>,
    /// Bytes of all chunks that are to be read. A chunk that several nodes refer to counts as often.
    bytes: u64,
    found: Findings,
    /// When the verification began: seconds since 1970.
    begun: u64,
    /// Dropped when the verification is over.
    _readers: Vec<ReaderLease>,
}

impl<'a> Verifier<'a> {
    /// Reads all tree nodes of these snapshots. Fails if one of them has no content. With a sample,
    /// [`Verifier::run`] reads only some of the chunks.
    pub fn new(
        repository: &'a Repository,
        snapshots: Vec<Snapshot>,
        sample: Option<Sample>,
    ) -> Result<Verifier<'a>> {
        snapshots.iter().try_for_each(Snapshot::require_content)?;
        let begun = now();
        let basis = repository.catalog().begin_verification(&snapshots)?;
        let (snapshots, readers) = begin_reading(repository, snapshots)?;
        let (mut found, mut nodes, mut unread) =
            (Findings::new(basis), HashSet::new(), HashSet::new());
        let (mut sorter, mut bytes) = (names(), 0);
        let is_directory = repository.blobs_in_directory().is_some();
        for snapshot in &snapshots {
            let len = snapshot.geometry.chunk_size();
            let mut visit = |referred| {
                if let Referred::Chunk(id) = referred
                    && sample.is_none_or(|sample| sample.has(&id))
                {
                    if is_directory {
                        sorter.push(entry(&id, len));
                    }
                    bytes += u64::from(len);
                }
            };
            let mut failed = |id: NodeId, error| {
                unread.insert(id);
                found.add(id.into(), BlobUse::Node, error);
            };
            let (root, geometry) = (&snapshot.root, snapshot.geometry);
            repository.trees().walk(root, geometry, &mut nodes, &mut visit, &mut failed);
        }
        // The walk has read them from caches.
        for id in nodes.iter().filter(|id| is_directory && !unread.contains(*id)) {
            sorter.push(entry(&ChunkId::from_bytes(*id.as_bytes()), 0));
        }
        if let Some(error) = found.take_database_error() {
            return Err(error);
        }
        found.report.blobs = nodes.len() as u64;
        let chunks = sorter.finish()?;
        let _readers = readers;
        Ok(Verifier { repository, snapshots, sample, chunks, nodes, bytes, found, begun, _readers })
    }

    /// The most bytes that the verification reads, without redundancy.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads all chunks. `progress` receives the bytes that were read so far. Notes in the catalog
    /// which snapshots are whole, unless a sample was read, and which are damaged.
    pub fn run(mut self, progress: &(dyn Fn(u64) + Sync)) -> Result<Verification> {
        let done = AtomicU64::new(0);
        let mut found = std::mem::take(&mut self.found);
        match self.repository.blobs_in_directory() {
            Some(blobs) => {
                let found = Mutex::new(&mut found);
                SegmentReads { blobs, chunks: &self.chunks }.run(&|id, len, result| {
                    let mut found = found.lock().expect("no reader panics");
                    // The nodes are counted already.
                    let used_as = if len == 0 { BlobUse::Node } else { BlobUse::Chunk };
                    found.report.blobs += u64::from(len > 0);
                    if let Err(error) = result {
                        found.add(id.into(), used_as, error);
                    }
                    drop(found);
                    let before = done.fetch_add(u64::from(len), Ordering::Relaxed);
                    progress(before + u64::from(len));
                })?;
            }
            None => self.check_fragments(&mut found, &done, progress)?,
        }
        if let Some(error) = found.take_database_error() {
            return Err(error);
        }
        found.report.bytes = done.into_inner();
        self.conclude(found)
    }

    /// Attributes what was found to snapshots, and notes it in the catalog.
    fn conclude(self, found: Findings) -> Result<Verification> {
        let Findings { mut report, basis, unreadable, lost, weak, to_repair } = found;
        report.to_repair = to_repair;
        let affected = self.referring(&unreadable);
        let (damaged, weakened) = (self.referring(&lost), self.referring(&weak));
        let is_complete = self.sample.is_none() && report.silent.is_empty() && !report.is_cut;
        let verdict = |at: usize| match damaged.contains(&at) || weakened.contains(&at) {
            true => Some(Verified::Damaged),
            false if !is_complete || affected.contains(&at) => None,
            false => Some(Verified::Whole),
        };
        let all = self.snapshots.iter().enumerate();
        let verdicts: Vec<_> = all.filter_map(|(at, one)| Some((one, verdict(at)?))).collect();
        let catalog = self.repository.catalog();
        report.verified = catalog.end_verification(&basis, &verdicts, self.begun)?;
        let there = |at: &usize| Some(&self.snapshots[*at]).filter(|one| self.is_there(one));
        report.affected = affected.iter().filter_map(there).map(Snapshot::name).collect();
        let weakened = weakened.iter().filter(|at| !affected.contains(at));
        report.weakened = weakened.filter_map(there).map(Snapshot::name).collect();
        if report.affected.is_empty() {
            // Only snapshots that were removed meanwhile refer to blobs that cannot be read.
            (report.unreadable, report.lost) = (0, 0);
            report.errors.clear();
        }
        Ok(report)
    }

    /// The positions of the snapshots that refer to one of these blobs.
    fn referring(&self, blobs: &BlobSet) -> BTreeSet<usize> {
        let BlobSet { names, has_more } = blobs;
        let mut answers = HashMap::new();
        let mut refers = |one: &Snapshot| {
            let (root, geometry) = (&one.root, one.geometry);
            *has_more || self.repository.trees().refers_to(root, geometry, names, &mut answers)
        };
        let all = self.snapshots.iter().enumerate().filter(|_| !names.is_empty());
        all.filter(|(_, one)| refers(one)).map(|(at, _)| at).collect()
    }

    /// Whether a snapshot was not removed meanwhile.
    fn is_there(&self, snapshot: &Snapshot) -> bool {
        match self.repository.catalog().resolve(&snapshot.name()) {
            Ok(now) => now.state.has_content() && now.root == snapshot.root,
            Err(error) => error.kind() != ErrorKind::NotFound,
        }
    }
}

/// Begins to read the snapshots. Leaves out those that were removed since they were listed.
fn begin_reading(
    repository: &Repository,
    snapshots: Vec<Snapshot>,
) -> Result<(Vec<Snapshot>, Vec<ReaderLease>)> {
    if snapshots.len() > MAX_READERS {
        return Ok((snapshots, Vec::new()));
    }
    let (mut there, mut readers) = (Vec::new(), Vec::new());
    for snapshot in snapshots {
        match repository.begin_reading(&snapshot, "a verification") {
            Ok(reader) => {
                readers.push(reader);
                there.push(snapshot);
            }
            Err(Error::NoSnapshot { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok((there, readers))
}

fn names() -> RunSorter<ENTRY> {
    RunSorter::new(&temporary_directory(), ENTRY, MAX_NAMES)
}

fn entry(id: &ChunkId, len: u32) -> [u8; ENTRY] {
    let mut entry = [0; ENTRY];
    entry[..32].copy_from_slice(id.as_bytes());
    entry[32..].copy_from_slice(&len.to_be_bytes());
    entry
}

/// The name and the length of an entry.
fn parse(entry: &[u8; ENTRY]) -> (ChunkId, u32) {
    let (name, len) = entry.split_first_chunk::<32>().expect("36 bytes");
    (ChunkId::from_bytes(*name), u32::from_be_bytes(len.try_into().expect("4 bytes")))
}
