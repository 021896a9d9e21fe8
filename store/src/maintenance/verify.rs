//! Reads and verifies every blob that snapshots refer to.
//!
//! ```text
//! new: walk the trees, count ──► run: for each part of the names: walk again, read each chunk once
//!        └─ nodes that cannot be read       └─ chunks that cannot be read ──► which snapshots
//! ```
//!
//! Snapshots share chunks, so the names of the chunks that were read are in memory. If there are
//! too many, the space of names is divided into parts, and one part is verified after the other:
//! memory is bounded, and each chunk is still read once.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use crate::error::{Error, ErrorKind, Result};
use crate::id::{BlobId, ChunkId, NodeId};
use crate::name::SnapshotRef;
use crate::repository::Repository;
use crate::snapshot::Snapshot;
use crate::tree::Referred;

/// The most names of chunks in memory. A name takes some 50 bytes.
const MAX_NAMES: u64 = if cfg!(test) { 4 } else { 4 << 20 };

/// The most unreadable blobs whose errors are kept.
const MAX_ERRORS: usize = 1000;

/// What a snapshot needs a blob for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlobUse {
    /// A part of the disk.
    Chunk,
    /// A node of the tree over the chunks. Chunks below a node that cannot be read are not verified.
    Node,
}

impl BlobUse {
    /// The use as one word.
    pub fn as_str(self) -> &'static str {
        match self {
            BlobUse::Chunk => "chunk",
            BlobUse::Node => "node",
        }
    }
}

/// A blob that cannot be read.
#[derive(Debug)]
pub struct UnreadableBlob {
    /// Its name.
    pub blob: BlobId,
    /// What it is needed for.
    pub used_as: BlobUse,
    /// Why it cannot be read.
    pub error: Error,
}

impl UnreadableBlob {
    /// Whether the blob is damaged or gone. Otherwise it may be readable later.
    pub fn is_lost(&self) -> bool {
        let is_bad_block = |source: &io::Error| source.raw_os_error() == Some(libc::EIO);
        match &self.error {
            Error::Io { source, .. } => is_bad_block(source),
            error => error.kind() == ErrorKind::Corrupt,
        }
    }
}

/// What a verification has found.
#[derive(Debug, Default)]
pub struct Verification {
    /// Blobs that were read, or could not be read.
    pub blobs: u64,
    /// Bytes of the chunks that were read.
    pub bytes: u64,
    /// The number of blobs that cannot be read.
    pub unreadable: u64,
    /// Of these, the ones that are damaged or gone.
    pub lost: u64,
    /// Some of the blobs that cannot be read.
    pub errors: Vec<UnreadableBlob>,
    /// The snapshots that refer to blobs that cannot be read.
    pub affected: Vec<SnapshotRef>,
}

/// A verification of snapshots.
pub struct Verifier<'a> {
    repository: &'a Repository,
    snapshots: Vec<Snapshot>,
    /// The parts into which the names of chunks are divided.
    parts: u64,
    /// Bytes of all chunks that nodes refer to. A chunk that several nodes refer to counts as
    /// often.
    bytes: u64,
    found: Findings,
}

/// What was found so far.
#[derive(Default)]
struct Findings {
    report: Verification,
    unreadable: HashSet<BlobId>,
}

impl Findings {
    fn add(&mut self, blob: BlobId, used_as: BlobUse, error: Error) {
        let one = UnreadableBlob { blob, used_as, error };
        if self.unreadable.insert(blob) {
            self.report.unreadable += 1;
            self.report.lost += u64::from(one.is_lost());
            if self.report.errors.len() < MAX_ERRORS {
                self.report.errors.push(one);
            }
        }
    }
}

/// A chunk that is to be read, and the length of its image's chunks.
type QueuedChunk = (ChunkId, usize);

impl<'a> Verifier<'a> {
    /// Reads all tree nodes of these snapshots. Fails if one of them has no content.
    pub fn new(repository: &'a Repository, snapshots: Vec<Snapshot>) -> Result<Verifier<'a>> {
        let (mut found, mut seen) = (Findings::default(), HashSet::new());
        let (mut chunks, mut bytes, mut nodes) = (0, 0, 0);
        for snapshot in &snapshots {
            snapshot.require_content()?;
            let mut visit = |referred| match referred {
                Referred::Node(_) => nodes += 1,
                Referred::Chunk(_) => {
                    chunks += 1;
                    bytes += u64::from(snapshot.geometry.chunk_size());
                }
            };
            let mut failed = |id: NodeId, error| found.add(id.into(), BlobUse::Node, error);
            let (root, geometry) = (&snapshot.root, snapshot.geometry);
            repository.trees().walk(root, geometry, &mut seen, &mut visit, &mut failed);
        }
        found.report.blobs = nodes;
        let parts = chunks.max(1_u64).div_ceil(MAX_NAMES);
        Ok(Verifier { repository, snapshots, parts, bytes, found })
    }

    /// The most bytes that the verification reads.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads all chunks. `progress` receives the bytes that were read so far.
    pub fn run(mut self, progress: &(dyn Fn(u64) + Sync)) -> Verification {
        let done = AtomicU64::new(0);
        let found = Mutex::new(std::mem::take(&mut self.found));
        for part in 0..self.parts {
            let read = |(id, len): QueuedChunk, buffer: &mut Vec<u8>| {
                buffer.resize(len, 0);
                if let Err(error) = self.repository.read_chunk(&id, buffer) {
                    found.lock().expect("no reader panics").add(id.into(), BlobUse::Chunk, error);
                }
                let before = done.fetch_add(len as u64, Ordering::Relaxed);
                progress(before + len as u64);
            };
            let blobs = self.verify_part(part, &read);
            found.lock().expect("no reader panics").report.blobs += blobs;
        }
        let Findings { mut report, unreadable } = found.into_inner().expect("no reader panics");
        report.bytes = done.into_inner();
        if !unreadable.is_empty() {
            report.affected = self.affected(&unreadable);
            if report.affected.is_empty() {
                // Only snapshots that were removed meanwhile refer to these blobs.
                (report.unreadable, report.lost) = (0, 0);
                report.errors.clear();
            }
        }
        report
    }

    /// Passes the chunks of a part to threads that read them. Returns the number of chunks.
    fn verify_part(&self, part: u64, read: &(dyn Fn(QueuedChunk, &mut Vec<u8>) + Sync)) -> u64 {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let (queue, waiting) = sync_channel::<QueuedChunk>(2 * threads);
        let waiting = Mutex::new(waiting);
        let (mut nodes, mut chunks) = (HashSet::new(), HashSet::new());
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let mut buffer = Vec::new();
                    while let Some(chunk) = next(&waiting) {
                        read(chunk, &mut buffer);
                    }
                });
            }
            for snapshot in &self.snapshots {
                let len = snapshot.geometry.chunk_size() as usize;
                let mut visit = |referred| {
                    if let Referred::Chunk(id) = referred
                        && part_of(&id, self.parts) == part
                        && chunks.insert(id)
                    {
                        queue.send((id, len)).expect("the readers wait for the end of the queue");
                    }
                };
                let (root, geometry) = (&snapshot.root, snapshot.geometry);
                let trees = self.repository.trees();
                // The first walk has reported the nodes that cannot be read.
                trees.walk(root, geometry, &mut nodes, &mut visit, &mut |_, _| ());
            }
            drop(queue);
        });
        chunks.len() as u64
    }

    /// The snapshots that refer to unreadable blobs. Those that were removed meanwhile do not
    /// count.
    fn affected(&self, unreadable: &HashSet<BlobId>) -> Vec<SnapshotRef> {
        let mut answers = HashMap::new();
        let names = self.snapshots.iter().filter(|one| {
            let (root, geometry) = (&one.root, one.geometry);
            self.repository.trees().refers_to(root, geometry, unreadable, &mut answers)
        });
        let is_there = |name: &SnapshotRef| {
            let resolved = self.repository.catalog().resolve(name);
            !resolved.is_err_and(|error| error.kind() == ErrorKind::NotFound)
        };
        names.map(Snapshot::name).filter(is_there).collect()
    }
}

fn next(waiting: &Mutex<Receiver<QueuedChunk>>) -> Option<QueuedChunk> {
    waiting.lock().expect("no reader panics while it waits").recv().ok()
}

/// The part of a chunk's name. A name is a hash, so the parts have about the same size.
fn part_of(id: &ChunkId, parts: u64) -> u64 {
    let [first, ..] = id.as_bytes().as_chunks::<8>().0 else { unreachable!("a name has 32 bytes") };
    ((u128::from(u64::from_be_bytes(*first)) * u128::from(parts)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};

    use tempfile::TempDir;

    use super::{BlobUse, Verification, Verifier};
    use crate::blobs::directory::DirectoryBlobs;
    use crate::blobs::{Blobs, NewBlob};
    use crate::collection::CollectionNumber;
    use crate::encoding::StoragePolicy;
    use crate::error::Result;
    use crate::geometry::{ChunkIndex, Geometry};
    use crate::id::BlobId;
    use crate::repository::Repository;
    use crate::snapshot::Snapshot;
    use crate::tree::Root;

    const CHUNK: usize = 65536;

    fn content(number: u64) -> Vec<u8> {
        let mut content = vec![0; CHUNK];
        blake3::Hasher::new().update(&number.to_le_bytes()).finalize_xof().fill(&mut content);
        content
    }

    /// Publishes an image with these chunks.
    fn publish(repository: &Repository, name: &str, chunks: &[u64]) -> Snapshot {
        let geometry = Geometry::new(64 * CHUNK as u64, CHUNK as u32).unwrap();
        let contents: Vec<_> = chunks.iter().map(|number| content(*number)).collect();
        let chunks: Vec<_> = contents.iter().map(|one| NewBlob::new(one)).collect();
        repository.put_chunks(&chunks).unwrap();
        let at = |(at, one): (usize, &NewBlob<'_>)| (ChunkIndex(at as u64), Some(one.chunk_id()));
        let changes: BTreeMap<_, _> = chunks.iter().enumerate().map(at).collect();
        let root = repository.commit_tree(&Root::default(), geometry, &changes).unwrap().root;
        repository.flush().unwrap();
        repository.publish_image(&name.parse().unwrap(), geometry, &root, 0, 0).unwrap()
    }

    /// Counts the reads of each blob.
    struct Counted(Arc<dyn Blobs>, Arc<Mutex<BTreeMap<BlobId, u64>>>);

    impl Blobs for Counted {
        fn get(&self, id: &BlobId, buf: &mut [u8]) -> Result<usize> {
            *self.1.lock().unwrap().entry(*id).or_default() += 1;
            self.0.get(id, buf)
        }

        fn put(&self, blobs: &[NewBlob<'_>], policy: &StoragePolicy) -> Result<u64> {
            self.0.put(blobs, policy)
        }

        fn flush(&self) -> Result<()> {
            self.0.flush()
        }

        fn raise_stamp(&self, number: CollectionNumber) {
            self.0.raise_stamp(number);
        }

        fn known(&self, ids: &[BlobId], policy: &StoragePolicy) -> Result<Vec<bool>> {
            self.0.known(ids, policy)
        }
    }

    /// Flips a bit of a blob, wherever it is.
    fn damage(repository: &Path, content: &[u8]) {
        let path = repository.join("segments/00000001");
        let bytes = fs::read(&path).unwrap();
        let at = (0..bytes.len()).step_by(4096).find(|at| bytes[*at..].starts_with(content));
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[content[5] ^ 1], at.unwrap() as u64 + 5).unwrap();
    }

    fn names(report: &Verification) -> Vec<String> {
        report.affected.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_blob_is_read_once_and_damage_is_attributed_to_its_snapshots() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("repository");
        let url = format!("dir:{}", path.display());
        let repository = Repository::open_or_create(&url).unwrap();
        let all = [
            publish(&repository, "one", &(0..20).collect::<Vec<_>>()),
            publish(&repository, "two", &(10..30).collect::<Vec<_>>()),
            publish(&repository, "three", &[100, 101]),
        ];
        drop(repository);
        let verify = |snapshots: &[Snapshot]| {
            let counts = Arc::default();
            let wrap = |blobs| Arc::new(Counted(blobs, Arc::clone(&counts))) as Arc<dyn Blobs>;
            let repository = Repository::open_with(&url, wrap).unwrap();
            let verifier = Verifier::new(&repository, snapshots.to_vec()).unwrap();
            let (most, last) = (verifier.bytes(), AtomicU64::new(0));
            let report = verifier.run(&|done| {
                last.fetch_max(done, Ordering::SeqCst);
            });
            assert!(last.into_inner() == report.bytes && report.bytes <= most);
            let counts = counts.lock().unwrap();
            (report, counts.values().copied().max().unwrap(), counts.len() as u64)
        };
        let (report, reads, blobs) = verify(&all);
        assert_eq!((report.blobs, reads, blobs), (32 + 3, 1, 32 + 3), "{report:?}");
        assert_eq!((report.unreadable, report.bytes), (0, 32 * CHUNK as u64));

        damage(&path, &content(15));
        damage(&path, &content(29));
        let (report, ..) = verify(&all);
        assert_eq!((report.blobs, report.unreadable, report.lost), (35, 2, 2), "{report:?}");
        assert_eq!(names(&report), ["one@1", "two@1"]);
        assert!(report.errors.iter().all(|one| one.used_as == BlobUse::Chunk && one.is_lost()));
        assert_eq!(names(&verify(&all[1..]).0), ["two@1"]);
        assert_eq!(names(&verify(&all[2..]).0), Vec::<String>::new());

        // A tree node.
        let (blobs, mut bytes) = (DirectoryBlobs::open(&path).unwrap(), vec![0; 1 << 16]);
        let len = blobs.get(&all[2].root.0.unwrap().into(), &mut bytes).unwrap();
        damage(&path, &bytes[..len]);
        let (report, ..) = verify(&all);
        assert_eq!((report.blobs, report.unreadable), (33, 3), "its chunks are not known");
        assert_eq!(names(&report), ["one@1", "two@1", "three@1"]);
        assert_eq!(report.errors[0].used_as, BlobUse::Node);
        // What was removed is not affected.
        let repository = Repository::open(&url).unwrap();
        repository.remove_image(&"three".parse().unwrap(), false).unwrap();
        assert_eq!(names(&verify(&all).0), ["one@1", "two@1"]);
        let (report, ..) = verify(&all[2..]);
        assert!(report.affected.is_empty() && report.unreadable == 0, "{report:?}");
    }
}
