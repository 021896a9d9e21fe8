//! What was asked of a directory, step by step.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use seeded_rng::Rng;

use crate::disk::{Disk, Losses};
use crate::operation::Operation;
use crate::trace::trace;

/// Runs a workload and records what it does below its [`recorded_root`], an
/// empty directory. Its last mark is `done`.
///
/// # Panics
///
/// If there is no `strace` or it may not trace, if the workload fails, and if it does what the recorder
/// cannot follow.
pub fn record(workload: &Command) -> Recording {
    let root = tempfile::tempdir().expect("a directory to record");
    Recording::new(trace(root.path(), BTreeSet::new(), workload))
}

/// What a workload did to a directory.
#[derive(Clone, Debug)]
pub struct Recording {
    operations: Vec<Operation>,
    /// At points before this one the power is not cut.
    first: usize,
    /// How many points are tried, if not all.
    sample: Option<usize>,
}

impl Recording {
    pub(crate) fn new(operations: Vec<Operation>) -> Recording {
        Recording { operations, first: 0, sample: None }
    }

    pub(crate) fn operations(&self) -> &[Operation] {
        &self.operations
    }

    pub(crate) fn marks(&self) -> Vec<String> {
        let mark = |operation: &Operation| match operation {
            Operation::Mark(text) => Some(text.clone()),
            _ => None,
        };
        self.operations.iter().filter_map(mark).collect()
    }

    /// The points at which the power can be cut.
    pub fn points(&self) -> usize {
        self.operations.len() - self.first
    }

    /// As if the power could be cut at about so many points only, which are drawn at random: for checks that
    /// take long.
    pub fn sampled(self, points: usize) -> Recording {
        Recording { sample: Some(points), ..self }
    }

    /// For each operation whether the power is cut behind it. The last one is always among those that are
    /// drawn. Half of them are syncs, behind which others rely on them for the first time. Marks alone change
    /// nothing.
    pub(crate) fn is_tried(&self, rng: &mut Rng) -> Vec<bool> {
        let all = 0..self.operations.len();
        let Some(wanted) = self.sample else {
            return all.map(|point| point >= self.first).collect();
        };
        let mut tried = vec![false; all.end];
        tried.last_mut().into_iter().for_each(|last| *last = true);
        let is_sync = |point: &usize| {
            matches!(self.operations[*point], Operation::Sync(_) | Operation::SyncWrite(_))
        };
        let points = (self.first..all.end).filter(|point| !self.operations[*point].is_mark());
        let (syncs, others): (Vec<_>, Vec<_>) = points.partition(is_sync);
        for (mut points, wanted) in [(syncs, wanted / 2), (others, wanted.div_ceil(2))] {
            for drawn in 0..wanted.min(points.len()) {
                let other = drawn + rng.below((points.len() - drawn) as u64) as usize;
                points.swap(drawn, other);
                tried[points[drawn]] = true;
            }
        }
        tried
    }

    /// The points right before each sync between two marks: there the most is in the kernel's hands.
    pub fn before_syncs(&self, from: &str, to: &str) -> Vec<usize> {
        let is_sync = |point: &usize| matches!(self.operations[*point], Operation::Sync(_));
        (self.place(from)..self.place(to)).filter(is_sync).collect()
    }

    /// Where a mark is.
    fn place(&self, text: &str) -> usize {
        let is_it = |one: &Operation| matches!(one, Operation::Mark(mark) if mark == text);
        self.operations.iter().position(is_it).expect("a mark of this recording")
    }

    /// What the directory goes through when the program is killed at `point`, and `next` runs after it.
    /// A kill loses nothing that the kernel has. The power is cut after it only.
    ///
    /// # Panics
    ///
    /// As [`record`](crate::record).
    pub fn killed(&self, point: usize, next: &Command) -> Recording {
        let mut operations = self.operations[..point].to_vec();
        let mut disk = Disk::default();
        operations.iter().for_each(|operation| disk.apply(operation));
        let place = tempfile::tempdir().expect("a directory for what is left");
        let root = place.path().join("left");
        let image = disk.image(Losses::Nothing, 1, &mut Rng::new(0));
        image.write_to(&root).expect("writing what is left");
        let existing = image.paths().map(Path::to_owned).collect();
        operations.extend(trace(&root, existing, next));
        Recording { first: point, ..Recording::new(operations) }
    }

    /// What came after a mark: at the points before it the power is not cut.
    pub fn after(self, text: &str) -> Recording {
        let first = self.place(text);
        Recording { first, ..self }
    }

    /// What came before a mark.
    pub fn until(mut self, text: &str) -> Recording {
        self.operations.truncate(self.place(text));
        self
    }

    /// As if syncs of these files and directories did nothing, from the first point on: a planted mistake.
    pub fn without_syncs(&self, of: impl Fn(&Path) -> bool) -> Recording {
        let keep = |(point, operation): &(usize, &Operation)| match operation {
            Operation::Sync(path) | Operation::SyncWrite(path) => *point < self.first || !of(path),
            _ => true,
        };
        let kept = self.operations.iter().enumerate().filter(keep);
        Recording { operations: kept.map(|(_, operation)| operation.clone()).collect(), ..*self }
    }
}
