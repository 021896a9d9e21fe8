//! A client in this process that commits as a backend does.

use std::collections::BTreeMap;

use cairn_store::encoding::Redundancy;
use cairn_store::{
    Attachment, ChangedChunks, ChunkIndex, Consistency, Geometry, LocalCopy, MIN_CHUNK_SIZE,
    MirrorId, MirrorOwner, Mode, NewBlob, NewSnapshot, Repository, Result, Snapshot,
    SnapshotCommit,
};

use crate::lab::random;

pub(crate) const CHUNK: usize = MIN_CHUNK_SIZE as usize;
const CHUNKS: u64 = 300;

/// The seeds of a disk's chunks.
pub(crate) type Disk = BTreeMap<u64, u64>;

/// A client that holds the lease of an image.
pub(crate) struct Writer {
    pub(crate) repository: Repository,
    pub(crate) attachment: Attachment,
}

impl Writer {
    /// Creates an image and attaches to it.
    pub(crate) fn create(repository: &Repository, image: &str, redundancy: Redundancy) -> Writer {
        let repository = repository.with_policy(redundancy.into());
        let geometry = Geometry::new(CHUNKS * CHUNK as u64, MIN_CHUNK_SIZE).unwrap();
        let first = repository.create_image(&image.parse().unwrap(), geometry).unwrap();
        Writer::attach(&repository, &first, image.as_bytes()[0]).unwrap()
    }

    /// Attaches to an existing image.
    pub(crate) fn attach(repository: &Repository, first: &Snapshot, me: u8) -> Result<Writer> {
        let attachment = repository.attach(&owner(me), first, Mode::ReadWrite)?;
        let repository = repository.with_policy(first.policy);
        Ok(Writer { repository, attachment })
    }

    /// Reserves a number and begins the snapshot with it.
    pub(crate) fn begin(&self) -> Result<SnapshotCommit<'_>> {
        let number = self.attachment.reserve(1)?.start;
        let new = NewSnapshot {
            number,
            label: None,
            metadata: cairn_store::Metadata::default(),
            is_from_guest: false,
            size: self.attachment.geometry().size(),
            consistency: Consistency::Crash,
            time: 0,
            dirty_bytes: 0,
            pause_us: 0,
        };
        self.attachment.begin(&new)
    }

    /// Stores the chunks and returns their names.
    pub(crate) fn store(&self, chunks: &Disk) -> Result<ChangedChunks> {
        let contents: Vec<_> = chunks.values().map(|seed| content(*seed)).collect();
        let contents: Vec<_> = contents.iter().map(|one| NewBlob::new(one)).collect();
        self.repository.put_chunks(&contents)?;
        let changes = chunks.keys().zip(&contents);
        Ok(changes.map(|(at, one)| (ChunkIndex(*at), Some(one.chunk_id()))).collect())
    }

    /// Begins, stores and publishes a snapshot.
    pub(crate) fn commit(&self, chunks: &Disk) -> Result<Snapshot> {
        self.publish(chunks).map(|(_, _, snapshot)| snapshot)
    }

    /// As [`commit`](Self::commit). Returns also what is needed to complete the snapshot.
    pub(crate) fn publish(
        &self,
        chunks: &Disk,
    ) -> Result<(SnapshotCommit<'_>, ChangedChunks, Snapshot)> {
        let commit = self.begin()?;
        let changes = self.store(chunks)?;
        let snapshot = commit.publish(&changes, 0, NO_COPY)?;
        Ok((commit, changes, snapshot))
    }
}

/// The mirror of a client.
pub(crate) fn owner(me: u8) -> MirrorOwner {
    let id = MirrorId::from_bytes([me; 16]);
    MirrorOwner::this_process(id, format!("/mirrors/{}", char::from(me))).unwrap()
}

/// A client that has no copy of what it stores.
pub(crate) const NO_COPY: LocalCopy<'static> = &|_, _| false;

/// `count` chunks whose content differs from that of all other seeds.
pub(crate) fn chunks(seed: u64, count: u64) -> Disk {
    (0..count).map(|at| (at, seed * 1_000_000 + at)).collect()
}

pub(crate) fn content(seed: u64) -> Vec<u8> {
    random(seed, CHUNK)
}

/// Fails unless a snapshot holds exactly these chunks.
pub(crate) fn assert_holds(repository: &Repository, snapshot: &Snapshot, disk: &Disk) {
    let mut found = Vec::new();
    let mut buf = vec![0; CHUNK];
    for chunk in repository.chunks(&snapshot.root, snapshot.geometry) {
        let (at, id) = chunk.unwrap();
        repository.read_chunk(&id, &mut buf).unwrap();
        assert!(
            buf == content(disk[&at.0]),
            "chunk {} of {} has the wrong content",
            at.0,
            snapshot.name()
        );
        found.push(at.0);
    }
    assert!(found.iter().eq(disk.keys()), "{} has other chunks", snapshot.name());
}
