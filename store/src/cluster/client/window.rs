//! The blobs that are on their way to the peers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::encoding::fragment::{Blocks, Description, Plain};
use crate::encoding::redundancy::{Redundancy, StoragePolicy};
use crate::error::{Error, Result};
use crate::id::BlobId;

#[derive(Default)]
pub(super) struct Window {
    /// By their number, in the order of their puts. One without an entry is just being copied.
    pub(super) entries: BTreeMap<u64, Option<Entry>>,
    pub(super) names: HashMap<(BlobId, Redundancy), u64>,
    /// Where a blob's content is.
    pub(super) contents: HashMap<BlobId, u64>,
    pub(super) bytes: usize,
    pub(super) next: u64,
    /// Blobs that had to leave the window though they can only be read: they lack some of their redundancy.
    pub(super) degraded: HashSet<(BlobId, StoragePolicy)>,
    /// Threads that wait until blobs are durable,
    pub(super) flushing: usize,
    /// those among them that are content when they can be read,
    pub(super) availability_waiters: usize,
    /// and those that wait until another one has copied a blob.
    pub(super) copying: usize,
}

/// A blob of the window.
pub(super) struct Entry {
    pub(super) blob: BlobId,
    pub(super) policy: StoragePolicy,
    pub(super) bytes: usize,
    pub(super) content: Content,
    pub(super) status: Status,
    /// See [`Cluster::losses`](super::Cluster::losses): as it was when it was last sent.
    pub(super) losses: u64,
    /// Whether it could be read already if this host failed.
    pub(super) available: bool,
}

/// What is there of a blob's content.
#[derive(Clone)]
pub(super) enum Content {
    Plain(Plain),
    Cut(Arc<(Description, Blocks)>),
}

pub(super) enum Status {
    UnderWay,
    Failed(String),
}

impl Window {
    /// What failed among the blobs before this number, if nothing of them is under way.
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

    /// Whether a blob of the window could not be stored.
    pub(super) fn has_failed(&self) -> bool {
        let has_failed = |entry: &Entry| matches!(entry.status, Status::Failed(_));
        self.entries.values().flatten().any(has_failed)
    }

    /// Takes a blob out of the window.
    pub(super) fn remove(&mut self, number: u64) -> Option<Entry> {
        let entry = self.entries.remove(&number)??;
        self.bytes -= entry.bytes;
        self.names.remove(&(entry.blob, entry.policy.redundancy));
        if self.contents.get(&entry.blob) == Some(&number) {
            self.contents.remove(&entry.blob);
        }
        Some(entry)
    }

    /// Makes room by letting go what can be read from the peers, and could not be stored with its full redundancy.
    /// Returns whether there was any.
    pub(super) fn evict_degraded(&mut self) -> bool {
        let is_enough =
            |entry: &Entry| entry.available && matches!(entry.status, Status::Failed(_));
        let all = self.entries.iter().filter(|(_, entry)| entry.as_ref().is_some_and(is_enough));
        let numbers: Vec<u64> = all.map(|(number, _)| *number).collect();
        for number in &numbers {
            let gone = self.remove(*number);
            self.degraded.extend(gone.map(|entry| (entry.blob, entry.policy)));
        }
        !numbers.is_empty()
    }
}

impl Content {
    pub(super) fn read(&self, buf: &mut [u8]) -> Result<usize> {
        let too_long = || Error::corrupt("a blob", "it is longer than it should be");
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
