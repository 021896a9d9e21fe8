//! Syncing segments, and refusing to go on after a sync that failed.
//!
//! A failed sync may have lost bytes whose write had returned, and the kernel reports that only
//! once: the next sync succeeds. So the first failure poisons the store until it is opened again.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::segment::Segment;
use crate::error::{Error, Result};

/// Syncs the segments of one directory.
pub(crate) struct SegmentSync {
    directory: PathBuf,
    poisoned: AtomicBool,
}

impl SegmentSync {
    pub(crate) fn new(directory: PathBuf) -> SegmentSync {
        SegmentSync { directory, poisoned: AtomicBool::new(false) }
    }

    /// Fails if a sync has failed before.
    pub(crate) fn check(&self) -> Result<()> {
        match self.poisoned.load(Ordering::SeqCst) {
            true => Err(Error::Poisoned { path: self.directory.clone() }),
            false => Ok(()),
        }
    }

    /// Makes content durable, given as the end of each part and the segment that holds it. Returns
    /// the end of the content in each segment, by the segment's number.
    pub(crate) fn sync<'a>(
        &self,
        parts: impl Iterator<Item = (&'a Arc<Segment>, u64)>,
    ) -> Result<BTreeMap<u64, u64>> {
        let mut segments = BTreeMap::new();
        for (segment, end) in parts {
            let (_, last) = segments.entry(segment.number).or_insert((segment, 0));
            *last = end.max(*last);
        }
        for (segment, end) in segments.values() {
            // Before the sync and before any index: either may fail and have happened all the same.
            segment.set_known(*end);
            segment.sync().map_err(|error| {
                let directory = self.directory.display();
                tracing::error!(%error, %directory, "a sync failed; stored content may be lost");
                self.poisoned.store(true, Ordering::SeqCst);
                Error::Poisoned { path: self.directory.clone() }
            })?;
        }
        Ok(segments.into_iter().map(|(number, (_, end))| (number, end)).collect())
    }
}
