//! The recorded operations of a workload, and the points at which the power may be cut.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use seeded_rng::Rng;

use crate::disk::{Disk, Losses};
use crate::operation::Operation;
use crate::trace::trace;

/// Runs a workload and records its operations below its [`recorded_root`](crate::recorded_root), an
/// empty directory. The last mark of the workload must be `done`.
///
/// # Panics
///
/// If `strace` is missing or may not trace, if the workload fails, or if it makes a call that the
/// recorder does not support.
pub fn record(workload: &Command) -> Recording {
    let root = tempfile::tempdir().expect("creating a directory to record");
    Recording::new(trace(root.path(), BTreeSet::new(), workload))
}

/// The operations of a workload on a directory.
#[derive(Clone, Debug)]
pub struct Recording {
    operations: Vec<Operation>,
    /// The first point at which the power may be cut.
    first: usize,
    /// The number of points to select, or `None` for all.
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

    /// The number of points at which the power may be cut.
    pub fn points(&self) -> usize {
        self.operations.len() - self.first
    }

    /// Limits the power cuts to about `points` random points, for checks that take long.
    pub fn sampled(self, points: usize) -> Recording {
        Recording { sample: Some(points), ..self }
    }

    /// Selects the points of power cuts: for each operation, whether the power is cut after it. A
    /// sample always contains the last operation. Half of it are syncs, because later operations
    /// rely on them. Marks are not selected, because they change nothing.
    pub(crate) fn select_points(&self, rng: &mut Rng) -> Vec<bool> {
        let all = 0..self.operations.len();
        let Some(wanted) = self.sample else {
            return all.map(|point| point >= self.first).collect();
        };
        let mut selected = vec![false; all.end];
        selected.last_mut().into_iter().for_each(|last| *last = true);
        let is_sync = |point: &usize| {
            matches!(self.operations[*point], Operation::Sync(_) | Operation::SyncWrite(_))
        };
        let points = (self.first..all.end).filter(|point| !self.operations[*point].is_mark());
        let (syncs, others): (Vec<_>, Vec<_>) = points.partition(is_sync);
        for (mut points, wanted) in [(syncs, wanted / 2), (others, wanted.div_ceil(2))] {
            for drawn in 0..wanted.min(points.len()) {
                let other = drawn + rng.below((points.len() - drawn) as u64) as usize;
                points.swap(drawn, other);
                selected[points[drawn]] = true;
            }
        }
        selected
    }

    /// The points directly before each sync between two marks. At these points the most data is not
    /// durable.
    pub fn before_syncs(&self, from: &str, to: &str) -> Vec<usize> {
        let is_sync = |point: &usize| matches!(self.operations[*point], Operation::Sync(_));
        (self.position(from)..self.position(to)).filter(is_sync).collect()
    }

    /// The index of a mark.
    fn position(&self, text: &str) -> usize {
        let is_mark = |one: &Operation| matches!(one, Operation::Mark(mark) if mark == text);
        self.operations.iter().position(is_mark).expect("the recording has this mark")
    }

    /// The recording of a program that is killed at `point`, followed by `next`. A kill loses no
    /// operation. The power is cut only after the kill.
    ///
    /// # Panics
    ///
    /// For the same reasons as [`record`].
    pub fn killed(&self, point: usize, next: &Command) -> Recording {
        let mut operations = self.operations[..point].to_vec();
        let mut disk = Disk::default();
        operations.iter().for_each(|operation| disk.apply(operation));
        let directory = tempfile::tempdir().expect("creating a directory for the remaining files");
        let root = directory.path().join("left");
        let image = disk.image(Losses::Nothing, 1, &mut Rng::new(0));
        image.write_to(&root).expect("writing the remaining files");
        let existing = image.paths().map(Path::to_owned).collect();
        operations.extend(trace(&root, existing, next));
        Recording { first: point, ..Recording::new(operations) }
    }

    /// Limits the power cuts to the points after a mark.
    pub fn after(self, text: &str) -> Recording {
        let first = self.position(text);
        Recording { first, ..self }
    }

    /// The operations before a mark.
    pub fn until(mut self, text: &str) -> Recording {
        self.operations.truncate(self.position(text));
        self
    }

    /// Removes the syncs of files and directories that `of` selects, from the first point on. This
    /// plants a mistake that a check has to find.
    pub fn without_syncs(&self, of: impl Fn(&Path) -> bool) -> Recording {
        let keep = |(point, operation): &(usize, &Operation)| match operation {
            Operation::Sync(path) | Operation::SyncWrite(path) => *point < self.first || !of(path),
            _ => true,
        };
        let kept = self.operations.iter().enumerate().filter(keep);
        Recording { operations: kept.map(|(_, operation)| operation.clone()).collect(), ..*self }
    }
}
