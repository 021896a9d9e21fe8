//! Pending fragments: they are durable in the log, and the table does not know them yet.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use super::group::{KnownFragment, LogPosition};
use crate::encoding::fragment::Kind;
use crate::id::BlobId;

/// The pending fragments.
#[derive(Default)]
pub(super) struct Pending {
    /// All pending fragments in the order of the log.
    order: Vec<Arc<KnownFragment>>,
    by_blob: BTreeMap<BlobId, Vec<Arc<KnownFragment>>>,
    /// Fragments of the table that pending ones replace.
    replaced: Vec<Arc<KnownFragment>>,
    /// The bytes of their blocks: after a crash, this much is read again from the log.
    bytes: u64,
}

/// Pending fragments that are to be written to the table.
pub(super) struct Batch {
    pub(super) all: Vec<Arc<KnownFragment>>,
    /// For each segment, the offset up to which the table knows it then.
    pub(super) ends: BTreeMap<u64, u64>,
    pub(super) replaced: Vec<Arc<KnownFragment>>,
}

impl Batch {
    pub(super) fn replaced_places(&self) -> Vec<LogPosition> {
        self.replaced.iter().map(|one| one.place).collect()
    }
}

impl Pending {
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a fragment, which comes after all others in the log. It may replace one.
    pub(super) fn push(&mut self, known: KnownFragment, replaces: Option<KnownFragment>) {
        let known = Arc::new(known);
        let own = self.by_blob.entry(known.description.blob).or_default();
        if let Some(old) = replaces {
            own.retain(|one| one.place != old.place);
            self.replaced.push(Arc::new(old));
        }
        own.push(known.clone());
        self.bytes += known.space();
        self.order.push(known);
    }

    /// A batch of all pending fragments.
    pub(super) fn batch(&self) -> Batch {
        let mut ends = BTreeMap::new();
        for one in &self.order {
            ends.insert(one.place.segment, one.end());
        }
        Batch { all: self.order.clone(), ends, replaced: self.replaced.clone() }
    }

    /// Removes a batch that is in the table. Its fragments were the first ones.
    pub(super) fn remove(&mut self, batch: &Batch) {
        for one in self.order.drain(..batch.all.len()) {
            self.bytes -= one.space();
            if let Some(own) = self.by_blob.get_mut(&one.description.blob) {
                own.retain(|other| other.place != one.place);
                if own.is_empty() {
                    self.by_blob.remove(&one.description.blob);
                }
            }
        }
        self.replaced.drain(..batch.replaced.len());
    }

    /// Whether a fragment is pending.
    pub(super) fn contains(&self, blob: &BlobId, encoding: &BlobId, index: u8) -> bool {
        let is_it =
            |one: &Arc<KnownFragment>| one.index == index && one.description.id() == *encoding;
        self.by_blob.get(blob).is_some_and(|own| own.iter().any(is_it))
    }

    /// The pending fragments of a blob.
    pub(super) fn of_blob(&self, blob: &BlobId) -> Vec<KnownFragment> {
        let own = self.by_blob.get(blob).into_iter().flatten();
        own.map(|one| KnownFragment::clone(one)).collect()
    }

    /// All blobs with pending fragments.
    pub(super) fn names(&self) -> impl Iterator<Item = &BlobId> {
        self.by_blob.keys()
    }

    /// The first `most` blobs with pending fragments after this blob.
    pub(super) fn blobs(&self, after: &BlobId, most: usize) -> Vec<BlobId> {
        let later = self.by_blob.range((Bound::Excluded(*after), Bound::Unbounded));
        later.map(|(blob, _)| *blob).take(most).collect()
    }

    /// The first blob after this one that is a record.
    pub(super) fn record(&self, after: &BlobId) -> Option<BlobId> {
        let is_record = |own: &[Arc<KnownFragment>]| {
            own.iter().any(|one| one.description.kind() == Kind::Record)
        };
        let later = self.by_blob.range((Bound::Excluded(*after), Bound::Unbounded));
        later.filter(|(_, own)| is_record(own)).map(|(blob, _)| *blob).next()
    }
}
