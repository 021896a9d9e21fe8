//! When each snapshot was last verified completely and found whole.
//!
//! A document has the times of up to [`NUMBERS`] consecutive numbers of an image, as runs of equal
//! times. So a verification of a million snapshots of one image writes about a thousand small
//! documents. Only numbers that were verified are in a run: a number between them may be published
//! later.
//!
//! A verification that finds damage removes the snapshots that it affects from the runs, and raises
//! the document's count of findings. An older verification, which may have read the damaged blob
//! before that, relies on the count that it has read when it began. So a time that was taken back does
//! not return.
//!
//! No peer has a record of these times. A rebuilt catalog has none.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::Catalog;
use super::documents::{ImageDocument, image_key};
use crate::documents::{Change, Query, View};
use crate::error::Result;
use crate::id::ImageId;
use crate::name::ImageName;
use crate::snapshot::Snapshot;

/// The snapshot numbers that share a document.
const NUMBERS: u64 = 1024;

/// The most documents in one change. etcd refuses changes of more than 128 operations.
const MAX_CHANGED: usize = 50;

/// Consecutive snapshots that were verified at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Run {
    first: u64,
    last: u64,
    /// When the verification began: seconds since 1970.
    time: u64,
}

/// The document of some snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct VerifiedDocument {
    /// How many verifications have found damage in these snapshots.
    findings: u64,
    runs: Vec<Run>,
}

impl Run {
    /// Whether the numbers of the run can share a document.
    fn is_possible(&self) -> bool {
        self.first <= self.last && block_of(self.first) == block_of(self.last)
    }
}

impl VerifiedDocument {
    fn times(&self) -> BTreeMap<u64, u64> {
        let numbers = |run: &Run| {
            let time = run.time;
            (run.first..=run.last).map(move |number| (number, time))
        };
        self.runs.iter().filter(|run| run.is_possible()).flat_map(numbers).collect()
    }

    fn set_times(&mut self, times: &BTreeMap<u64, u64>) {
        self.runs.clear();
        for (number, time) in times {
            match self.runs.last_mut() {
                Some(run) if (run.last + 1, run.time) == (*number, *time) => run.last = *number,
                _ => self.runs.push(Run { first: *number, last: *number, time: *time }),
            }
        }
    }
}

/// Which of an image's snapshots were verified, and when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifiedTimes {
    /// The runs, in order.
    runs: Vec<Run>,
}

impl VerifiedTimes {
    /// When the last complete verification that found this snapshot whole began, in seconds since
    /// 1970. `None` if there was none, or if a later one has found damage.
    pub fn of(&self, number: u64) -> Option<u64> {
        let at = self.runs.partition_point(|run| run.last < number);
        self.runs.get(at).filter(|run| run.first <= number).map(|run| run.time)
    }
}

/// The counts of findings when a verification began. It does not say anything about snapshots whose
/// count has changed since.
#[derive(Default)]
pub(crate) struct VerificationBasis(HashMap<(ImageId, u64), u64>);

/// What a verification says about a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verified {
    /// It was read completely, and is whole.
    Whole,
    /// Some of it is damaged or gone.
    Damaged,
}

/// What was found in the snapshots of each document of an image.
type FoundBlocks = BTreeMap<u64, Vec<(u64, Verified)>>;

/// The prefix of the keys of an image's documents.
pub(super) fn verified_of(image: &ImageId) -> String {
    format!("verified/{image}/")
}

fn key_of(image: &ImageId, block: u64) -> String {
    format!("verified/{image}/{block:016x}")
}

fn block_of(number: u64) -> u64 {
    number / NUMBERS
}

fn document(view: &View, key: &str) -> Result<VerifiedDocument> {
    Ok(view.get(key)?.unwrap_or_default())
}

impl Catalog {
    /// When the snapshots of an image were last verified.
    pub fn verified(&self, name: &ImageName) -> Result<VerifiedTimes> {
        let (view, image) = self.read_image(name, |id| vec![Query::Prefix(verified_of(id))])?;
        let documents = view.under::<VerifiedDocument>(&verified_of(&image.id))?;
        Ok(VerifiedTimes { runs: documents.into_iter().flat_map(|(_, one)| one.runs).collect() })
    }

    /// Begins a verification of these snapshots.
    pub(crate) fn begin_verification(&self, snapshots: &[Snapshot]) -> Result<VerificationBasis> {
        let blocks = snapshots.iter().map(|one| (one.image_id, block_of(one.number)));
        let mut blocks: Vec<_> = blocks.collect();
        blocks.sort_unstable();
        blocks.dedup();
        let mut basis = VerificationBasis::default();
        for some in blocks.chunks(MAX_CHANGED) {
            let keys = some.iter().map(|(image, block)| Query::Key(key_of(image, *block)));
            let view = self.read(&keys.collect::<Vec<_>>())?;
            for (image, block) in some {
                let findings = document(&view, &key_of(image, *block))?.findings;
                basis.0.insert((*image, *block), findings);
            }
        }
        Ok(basis)
    }

    /// Notes what a verification that began at `time` has found. Returns how many snapshots it has
    /// noted as whole: not those in whose neighbourhood another verification has found damage since.
    pub(crate) fn end_verification(
        &self,
        basis: &VerificationBasis,
        found: &[(&Snapshot, Verified)],
        time: u64,
    ) -> Result<u64> {
        let mut images: BTreeMap<(&ImageName, ImageId), FoundBlocks> = BTreeMap::new();
        for (one, verified) in found {
            let blocks = images.entry((&one.image, one.image_id)).or_default();
            blocks.entry(block_of(one.number)).or_default().push((one.number, *verified));
        }
        let mut noted = 0;
        for ((name, id), blocks) in images {
            let blocks: Vec<_> = blocks.into_iter().collect();
            for some in blocks.chunks(MAX_CHANGED) {
                noted += self.note_blocks((name, &id), some, basis, time)?;
            }
        }
        Ok(noted)
    }

    /// Notes what was found in some documents of an image. An image that is gone has none.
    fn note_blocks(
        &self,
        (name, id): (&ImageName, &ImageId),
        blocks: &[(u64, Vec<(u64, Verified)>)],
        basis: &VerificationBasis,
        time: u64,
    ) -> Result<u64> {
        let image_key = image_key(name);
        let mut queries = vec![Query::key(&image_key)];
        queries.extend(blocks.iter().map(|(block, _)| Query::Key(key_of(id, *block))));
        self.change(&queries, |view| {
            let (mut change, mut noted) = (Change::default(), 0);
            let image = view.get::<ImageDocument>(&image_key)?;
            if image.is_none_or(|image| image.id != *id) {
                return Ok((change, noted));
            }
            for (block, found) in blocks {
                let key = key_of(id, *block);
                let before = document(view, &key)?;
                let is_current = basis.0.get(&(*id, *block)) == Some(&before.findings);
                let (mut after, mut times) = (before.clone(), before.times());
                for (number, verified) in found {
                    match verified {
                        Verified::Whole if is_current => {
                            noted += 1;
                            let last = times.entry(*number).or_default();
                            *last = time.max(*last);
                        }
                        Verified::Whole => {}
                        Verified::Damaged => drop(times.remove(number)),
                    }
                }
                if found.iter().any(|(_, verified)| *verified == Verified::Damaged) {
                    after.findings += 1;
                }
                after.set_times(&times);
                if after != before {
                    change = change.put(&key, &after);
                }
            }
            Ok((change, noted))
        })
    }
}

#[cfg(test)]
mod tests;
