//! Summaries of removals: one record with the numbers of an image's removed snapshots. It takes the
//! place of the records and tombstones of all these snapshots, so that the peers need not keep records
//! of everything that ever existed.
//!
//! Numbers are never used again, so a summary stays true. `maintenance/collection` makes summaries.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Catalog;
use super::collection::{COLLECTION, current};
use super::documents::{IMAGES, ImageDocument, MIRRORS, MirrorDocument, StoredSummary, image_key};
use super::records::Record;
use crate::collection::CollectionNumber;
use crate::documents::{Change, Query};
use crate::error::{Error, Result};
use crate::id::{BlobId, ImageId, MirrorId};
use crate::name::ImageName;

/// The most ranges of a summary. Numbers of snapshots that exist, and numbers that no snapshot has got,
/// divide ranges.
pub(crate) const MAX_RANGES: usize = 50_000;

/// The numbers of snapshots of an image that do not exist any more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemovalSummary {
    /// The collection that has made the summary.
    pub(crate) collection: CollectionNumber,
    /// The numbers of all snapshots that were removed or have failed.
    pub(crate) removed: NumberRanges,
    /// The part of these that was never published.
    pub(crate) failed: NumberRanges,
}

impl RemovalSummary {
    /// Whether this has all numbers of another summary.
    pub(crate) fn contains_all(&self, other: &RemovalSummary) -> bool {
        self.removed.contains_all(&other.removed) && self.failed.contains_all(&other.failed)
    }

    /// Adds all numbers of another summary.
    pub(crate) fn add_all(&mut self, other: &RemovalSummary) {
        other.removed.iter().for_each(|range| self.removed.add(range));
        other.failed.iter().for_each(|range| self.failed.add(range));
    }
}

/// Numbers, as ranges that are sorted, not empty, and apart from each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<(u64, u64)>", into = "Vec<(u64, u64)>")]
pub(crate) struct NumberRanges(Vec<Range<u64>>);

impl NumberRanges {
    /// The ranges in their order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<u64>> {
        self.0.iter().cloned()
    }

    /// The number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn contains(&self, number: u64) -> bool {
        let after = self.0.partition_point(|one| one.start <= number);
        after > 0 && number < self.0[after - 1].end
    }

    fn contains_all(&self, other: &NumberRanges) -> bool {
        // Ranges are apart from each other, so one of them has each range of a part.
        let has = |range: &Range<u64>| {
            let after = self.0.partition_point(|one| one.start <= range.start);
            after > 0 && range.end <= self.0[after - 1].end
        };
        other.0.iter().all(has)
    }

    /// Adds the numbers of a range, which is not empty.
    pub(crate) fn add(&mut self, range: Range<u64>) {
        // Those that overlap with it or touch it.
        let from = self.0.partition_point(|one| one.end < range.start);
        let to = self.0.partition_point(|one| one.start <= range.end);
        let mut joined = range;
        if from < to {
            joined.start = joined.start.min(self.0[from].start);
            joined.end = joined.end.max(self.0[to - 1].end);
        }
        self.0.splice(from..to, [joined]);
    }
}

impl TryFrom<Vec<(u64, u64)>> for NumberRanges {
    type Error = Error;

    fn try_from(pairs: Vec<(u64, u64)>) -> Result<NumberRanges> {
        let is_apart = pairs.windows(2).all(|two| two[0].1 < two[1].0);
        if !is_apart || pairs.iter().any(|(start, end)| *start == 0 || start >= end) {
            return Err(Error::corrupt("a record", "its ranges of numbers are not in order"));
        }
        Ok(NumberRanges(pairs.into_iter().map(|(start, end)| start..end).collect()))
    }
}

impl From<NumberRanges> for Vec<(u64, u64)> {
    fn from(ranges: NumberRanges) -> Self {
        ranges.0.into_iter().map(|range| (range.start, range.end)).collect()
    }
}

/// What the catalog has, as far as it decides which records are needed.
pub(crate) struct RecordsInUse {
    /// The images, each with the summary of its removals that is noted.
    pub(crate) images: HashMap<ImageId, (ImageName, Option<StoredSummary>)>,
    /// The parents of mirrors. A rebuild learns from the record of a parent, removed or not, what the
    /// mirror's content is.
    pub(crate) parents: HashSet<(ImageId, u64)>,
    pub(crate) mirrors: HashSet<MirrorId>,
}

impl Catalog {
    /// What decides which records are needed.
    pub(crate) fn records_in_use(&self) -> Result<RecordsInUse> {
        let (mut images, mut parents, mut mirrors) =
            (HashMap::new(), HashSet::new(), HashSet::new());
        self.documents.scan(&[IMAGES, MIRRORS], &mut |key, document| {
            if let Some(name) = key.strip_prefix(IMAGES) {
                let image: ImageDocument = document.decode(key)?;
                images.insert(image.id, (name.parse()?, image.summary));
            } else {
                let mirror: MirrorDocument = document.decode(key)?;
                parents.insert((mirror.image_id, mirror.parent));
                let id = key[MIRRORS.len()..].parse();
                mirrors.insert(id.map_err(|_| Error::corrupt(key, "it does not end with an id"))?);
            }
            Ok(())
        })?;
        Ok(RecordsInUse { images, parents, mirrors })
    }

    /// The record with a summary of removals; `None` if the image does not exist any more.
    pub(crate) fn summary_record(
        &self,
        name: &ImageName,
        id: &ImageId,
        summary: RemovalSummary,
    ) -> Result<Option<Record>> {
        let key = image_key(name);
        let view = self.read(&[Query::key(&key)])?;
        let image = view.get::<ImageDocument>(&key)?.filter(|one| one.id == *id && !one.removing);
        Ok(image.map(|image| Record::summary(name, &image, summary)))
    }

    /// Notes that the peers have a summary, unless a later collection has begun: then a process that
    /// reads all records may have read some peers before they got the summary.
    pub(crate) fn note_summary(
        &self,
        name: &ImageName,
        id: &ImageId,
        record: BlobId,
        collection: CollectionNumber,
    ) -> Result<()> {
        let key = image_key(name);
        self.change(&[Query::key(&key), Query::key(COLLECTION)], |view| {
            let image = view.get::<ImageDocument>(&key)?;
            let image = image.filter(|one| one.id == *id && !one.removing);
            let (Some(image), true) = (image, current(view)? == collection) else {
                return Ok((Change::default(), ()));
            };
            let summary = Some(StoredSummary { collection, record });
            Ok((Change::default().put(&key, &ImageDocument { summary, ..image }), ()))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::{Strategy, prop_assert_eq, proptest};

    use super::NumberRanges;

    fn ranges() -> impl Strategy<Value = Vec<(u64, u64)>> {
        proptest::collection::vec((1u64..60, 1u64..8), 0..12)
    }

    fn both(ranges: &[(u64, u64)]) -> (NumberRanges, BTreeSet<u64>) {
        let (mut joined, mut all) = (NumberRanges::default(), BTreeSet::new());
        for (start, len) in ranges {
            joined.add(*start..start + len);
            all.extend(*start..start + len);
        }
        (joined, all)
    }

    proptest! {
        #[test]
        fn ranges_are_the_set_of_their_numbers(one in ranges(), other in ranges()) {
            let ((one, numbers), (other, others)) = (both(&one), both(&other));
            for number in 0..70 {
                prop_assert_eq!(one.contains(number), numbers.contains(&number));
            }
            prop_assert_eq!(one.iter().flatten().collect::<BTreeSet<_>>(), numbers.clone());
            prop_assert_eq!(one.contains_all(&other), numbers.is_superset(&others));
            let text = serde_json::to_string(&one).unwrap();
            prop_assert_eq!(serde_json::from_str::<NumberRanges>(&text).unwrap(), one);
        }
    }

    #[test]
    fn ranges_that_are_not_in_order_are_refused() {
        for bad in
            ["[[0,1]]", "[[2,2]]", "[[3,2]]", "[[1,2],[2,3]]", "[[5,6],[1,2]]", "[[1,4],[2,9]]"]
        {
            serde_json::from_str::<NumberRanges>(bad).unwrap_err();
        }
        serde_json::from_str::<NumberRanges>("[[1,2],[3,18446744073709551615]]").unwrap();
    }
}
