//! Which records are not needed any more, and which summaries are to be made. Pure: decisions about
//! sorted entries.

use std::collections::HashSet;

use crate::catalog::{MAX_RANGES, RemovalSummary};
use crate::id::{BlobId, ImageId};

/// What a record says. Records of one number are looked at in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RecordKind {
    /// The image was removed.
    ImageRemoval,
    /// Many snapshots of the image were removed.
    Summary,
    /// A snapshot was removed.
    Removal,
    /// A snapshot was never published.
    Failure,
    /// A snapshot exists, or existed.
    Snapshot,
    /// A mirror exists, or existed.
    Mirror,
    /// A mirror is gone.
    MirrorRemoval,
}

/// A summary of an image that peers have listed.
#[derive(Clone, Debug)]
pub(super) struct ListedSummary {
    pub(super) record: BlobId,
    pub(super) summary: RemovalSummary,
    /// Whether an earlier collection has made it, and enough peers have it.
    pub(super) is_settled: bool,
}

/// Decides about the records of one image, one by one in the order of number and kind.
///
/// A collection makes summaries, and a later one deletes what they make unnecessary. So whoever reads
/// all records while one collection runs finds either the summary, or everything that it replaces.
pub(super) struct ImageFold<'a> {
    image: ImageId,
    /// Whether the catalog has the image.
    is_listed: bool,
    /// Whether enough peers have a tombstone of the image.
    is_removed: bool,
    summaries: &'a [ListedSummary],
    /// The summary on whose word other records are deleted.
    base: Option<&'a ListedSummary>,
    /// All that any summary has.
    known: RemovalSummary,
    /// The numbers of tombstones.
    found: RemovalSummary,
    parents: &'a HashSet<(ImageId, u64)>,
}

impl RecordKind {
    /// All kinds, in their order.
    pub(super) const ALL: [RecordKind; 7] = [
        RecordKind::ImageRemoval,
        RecordKind::Summary,
        RecordKind::Removal,
        RecordKind::Failure,
        RecordKind::Snapshot,
        RecordKind::Mirror,
        RecordKind::MirrorRemoval,
    ];
}

impl<'a> ImageFold<'a> {
    /// `summaries` are all that were listed, and `is_removed` tells whether enough peers list a
    /// tombstone of the image.
    pub(super) fn new(
        image: ImageId,
        is_listed: bool,
        is_removed: bool,
        summaries: &'a [ListedSummary],
        parents: &'a HashSet<(ImageId, u64)>,
    ) -> Self {
        let settled = summaries.iter().filter(|one| one.is_settled);
        let base = settled.max_by_key(|one| one.summary.collection);
        let mut known = RemovalSummary::default();
        summaries.iter().for_each(|one| known.add_all(&one.summary));
        let found = RemovalSummary::default();
        ImageFold { image, is_listed, is_removed, summaries, base, known, found, parents }
    }

    /// Looks at a record. Returns whether it is not needed any more.
    pub(super) fn see(&mut self, number: u64, kind: RecordKind, record: &BlobId) -> bool {
        if self.is_removed {
            return kind != RecordKind::ImageRemoval;
        }
        // An image that is being created, or that is not in the catalog for another reason.
        if !self.is_listed {
            return false;
        }
        let base = self.base.map(|base| &base.summary);
        let (is_covered, is_covered_failure) = match base {
            Some(base) => (base.removed.contains(number), base.failed.contains(number)),
            None => (false, false),
        };
        match kind {
            RecordKind::ImageRemoval | RecordKind::Mirror | RecordKind::MirrorRemoval => false,
            RecordKind::Summary => {
                let is_base = self.base.is_some_and(|base| base.record == *record);
                let one = self.summaries.iter().find(|one| one.record == *record);
                !is_base && base.zip(one).is_some_and(|(base, one)| base.contains_all(&one.summary))
            }
            RecordKind::Removal => {
                self.found.removed.add(number..number + 1);
                is_covered
            }
            RecordKind::Failure => {
                self.found.removed.add(number..number + 1);
                self.found.failed.add(number..number + 1);
                is_covered && is_covered_failure
            }
            RecordKind::Snapshot => is_covered && !self.parents.contains(&(self.image, number)),
        }
    }

    /// The summary to make, unless a single one has everything that is known.
    pub(super) fn end(self) -> Option<RemovalSummary> {
        let mut all = self.known;
        all.add_all(&self.found);
        let is_whole = self.summaries.iter().any(|one| one.summary.contains_all(&all));
        let is_empty = all == RemovalSummary::default();
        if self.is_removed || !self.is_listed || is_whole || is_empty {
            return None;
        }
        (all.removed.len() + all.failed.len() <= MAX_RANGES).then_some(all)
    }
}
