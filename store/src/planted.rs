//! Deliberate defects. A random life that finds none of them would prove nothing, so each must be
//! found: see `maintenance::collection::life`.
//!
//! A test plants a defect for its own thread. Without `cfg(test)` no defect can be planted, and the
//! compiler removes the questions.

/// A deliberate defect of the protocol of collections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    /// A commit of an image begins without its document, and the publication does not ask for it.
    NoCommitDocument,
    /// A blob that is found present keeps its stamp.
    NoStamp,
    /// A sweep ignores the oldest commit document.
    IgnoreOldestCommit,
    /// A place accepts the deletions of an earlier collection.
    EarlierDeletion,
    /// Tombstones count as garbage.
    SweepTombstones,
    /// A mark goes on without a tree node that cannot be read.
    SkipUnreadable,
    /// A collection of an older catalog goes on.
    AcceptOlderCatalog,
}

/// Whether a defect is planted.
#[cfg(not(test))]
pub(crate) const fn is_planted(_: Defect) -> bool {
    false
}

#[cfg(test)]
pub(crate) use self::planting::{is_planted, with_planted};

#[cfg(test)]
mod planting {
    use std::cell::Cell;

    use super::Defect;

    thread_local! {
        static PLANTED: Cell<Option<Defect>> = const { Cell::new(None) };
    }

    pub(crate) fn is_planted(defect: Defect) -> bool {
        PLANTED.get() == Some(defect)
    }

    /// Does `work` with a defect. Returns whether it panicked.
    pub(crate) fn with_planted(defect: Defect, work: impl FnOnce()) -> bool {
        PLANTED.set(Some(defect));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        PLANTED.set(None);
        result.is_err()
    }
}
