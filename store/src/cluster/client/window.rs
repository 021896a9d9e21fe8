//! The window: blobs that were put and are not stored with full redundancy yet.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::encoding::fragment::{Blocks, Description, Plain};
use crate::encoding::redundancy::{Redundancy, StoragePolicy};
use crate::error::{Error, Result};
use crate::id::BlobId;

/// The blobs of the window, and the threads that wait for them.
#[derive(Default)]
pub(super) struct Window {
    /// Blobs by number, in the order of their puts. A number without an entry is a blob that is
    /// being copied.
    pub(super) entries: BTreeMap<u64, Option<Entry>>,
    /// The number of each blob and redundancy.
    pub(super) names: HashMap<(BlobId, Redundancy), u64>,
    /// The number of the entry that has a blob's content.
    pub(super) contents: HashMap<BlobId, u64>,
    /// Bytes of all entries.
    pub(super) bytes: usize,
    /// The number of the next blob.
    pub(super) next: u64,
    /// Blobs that left the window although they lack some of their redundancy. They can be read
    /// from the peers.
    pub(super) degraded: HashSet<(BlobId, StoragePolicy)>,
    /// Threads in `flush` or `flush_available`.
    pub(super) flushing: usize,
    /// Of these, the threads in `flush_available`.
    pub(super) availability_waiters: usize,
    /// Threads that wait until another thread has copied a blob.
    pub(super) copying: usize,
}

/// A blob in the window.
pub(super) struct Entry {
    pub(super) blob: BlobId,
    pub(super) policy: StoragePolicy,
    pub(super) bytes: usize,
    pub(super) content: Content,
    pub(super) status: Status,
    /// The value of [`Cluster::losses`](super::Cluster::losses) when the blob was last sent.
    pub(super) losses: u64,
    /// Whether enough of it is durable to read it if this host fails.
    pub(super) available: bool,
}

/// A blob's content.
#[derive(Clone)]
pub(super) enum Content {
    /// Not encoded yet.
    Plain(Plain),
    /// Encoded into blocks.
    Cut(Arc<(Description, Blocks)>),
}

/// Whether a blob is being stored.
pub(super) enum Status {
    UnderWay,
    /// It could not be stored, for this reason.
    Failed(String),
}

impl Window {
    /// The result of the blobs before this number for which `counts` holds; `None` if one of them
    /// is still being copied or stored.
    pub(super) fn failure(
        &self,
        before: u64,
        counts: impl Fn(&Entry) -> bool,
    ) -> Option<Result<()>> {
        let mut failed = None;
        let mut blobs = 0;
        for entry in self.entries.range(..before).map(|(_, entry)| entry) {
            let entry = entry.as_ref()?;
            match &entry.status {
                _ if !counts(entry) => {}
                Status::UnderWay => return None,
                Status::Failed(reason) => {
                    blobs += 1;
                    failed.get_or_insert_with(|| reason.clone());
                }
            }
        }
        Some(failed.map_or(Ok(()), |reason| Err(Error::NotStored { blobs, reason })))
    }

    /// Whether a blob in the window could not be stored.
    pub(super) fn has_failed(&self) -> bool {
        let has_failed = |entry: &Entry| matches!(entry.status, Status::Failed(_));
        self.entries.values().flatten().any(has_failed)
    }

    /// Removes a blob from the window.
    pub(super) fn remove(&mut self, number: u64) -> Option<Entry> {
        let entry = self.entries.remove(&number)??;
        self.bytes -= entry.bytes;
        self.names.remove(&(entry.blob, entry.policy.redundancy));
        if self.contents.get(&entry.blob) == Some(&number) {
            self.contents.remove(&entry.blob);
        }
        Some(entry)
    }

    /// Removes the blobs that could not be stored with full redundancy but can be read from the
    /// peers. Returns whether there was any.
    pub(super) fn evict_degraded(&mut self) -> bool {
        let can_leave =
            |entry: &Entry| entry.available && matches!(entry.status, Status::Failed(_));
        let all = self.entries.iter().filter(|(_, entry)| entry.as_ref().is_some_and(can_leave));
        let numbers: Vec<u64> = all.map(|(number, _)| *number).collect();
        for number in &numbers {
            let removed = self.remove(*number);
            self.degraded.extend(removed.map(|entry| (entry.blob, entry.policy)));
        }
        !numbers.is_empty()
    }
}

impl Content {
    pub(super) fn read(&self, buf: &mut [u8]) -> Result<usize> {
        let too_long = || Error::corrupt("a blob", "it is longer than the buffer");
        match self {
            Content::Plain(plain) => {
                let content = plain.content();
                buf.get_mut(..content.len()).ok_or_else(too_long)?.copy_from_slice(content);
                Ok(content.len())
            }
            Content::Cut(cut) => {
                let (description, blocks) = &**cut;
                let len = description.len as usize;
                let all: Vec<_> =
                    (0..description.width()).map(|index| Some(blocks.get(index))).collect();
                description.decode(&all, buf.get_mut(..len).ok_or_else(too_long)?)?;
                Ok(len)
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Content::Plain(plain) => plain.content().len(),
            Content::Cut(cut) => cut.0.len as usize,
        }
    }
}
