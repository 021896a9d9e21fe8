//! What a verification has found.

use std::collections::HashSet;
use std::io;

use crate::catalog::VerificationBasis;
use crate::cluster::repair::{FoundBlob, FragmentProblem};
use crate::error::{Error, ErrorKind};
use crate::id::{BlobId, PeerId};
use crate::name::SnapshotRef;

/// The most unreadable blobs, and the most fragments, that a report names.
pub(super) const MAX_ERRORS: usize = 1000;

/// The most blobs with bad fragments that are kept for a repair.
const MAX_TO_REPAIR: usize = 100_000;

/// What a snapshot needs a blob for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlobUse {
    /// A part of the disk.
    Chunk,
    /// A node of the tree over the chunks. Chunks below a node that cannot be read are not verified.
    Node,
}

impl BlobUse {
    /// The use as one word.
    pub fn as_str(self) -> &'static str {
        match self {
            BlobUse::Chunk => "chunk",
            BlobUse::Node => "node",
        }
    }
}

/// A blob that cannot be read.
#[derive(Debug)]
pub struct UnreadableBlob {
    /// Its name.
    pub blob: BlobId,
    /// What it is needed for.
    pub used_as: BlobUse,
    /// Why it cannot be read.
    pub error: Error,
}

impl UnreadableBlob {
    /// Whether the blob is damaged or gone. Otherwise it may be readable later.
    pub fn is_lost(&self) -> bool {
        let is_bad_block = |source: &io::Error| source.raw_os_error() == Some(libc::EIO);
        match &self.error {
            Error::Io { source, .. } => is_bad_block(source),
            // It is not known where the blob is.
            Error::Database { .. } => false,
            error => error.kind() == ErrorKind::Corrupt,
        }
    }
}

/// A fragment that is missing or damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundFragment {
    /// The blob that it is a fragment of.
    pub blob: BlobId,
    /// Where it is or should be, and what is wrong with it.
    pub problem: FragmentProblem,
}

/// What a verification has found.
#[derive(Debug, Default)]
pub struct Verification {
    /// Blobs that were read, or could not be read.
    pub blobs: u64,
    /// Bytes of the chunks that were read, without redundancy.
    pub bytes: u64,
    /// The number of blobs that cannot be read.
    pub unreadable: u64,
    /// Of these, the ones that are damaged or gone.
    pub lost: u64,
    /// Some of the blobs that cannot be read.
    pub errors: Vec<UnreadableBlob>,
    /// The snapshots that refer to blobs that cannot be read.
    pub affected: Vec<SnapshotRef>,
    /// The number of fragments that are missing on peers.
    pub missing: u64,
    /// The number of fragments on peers that are damaged or wrong.
    pub damaged: u64,
    /// Blobs that can be read and have less than their redundancy, or a fragment that is damaged.
    pub weak: u64,
    /// Some of the fragments that are missing or damaged.
    pub fragments: Vec<FoundFragment>,
    /// The snapshots that can be read and refer to weak blobs.
    pub weakened: Vec<SnapshotRef>,
    /// The peers whose fragments could not be looked at.
    pub silent: Vec<(PeerId, String)>,
    /// The number of snapshots that the catalog has as verified by this verification.
    pub verified: u64,
    /// What a repair is given.
    pub(super) to_repair: Vec<FoundBlob>,
    /// Whether more blobs have bad fragments than a repair is given.
    pub(super) is_cut: bool,
}

impl Verification {
    /// Whether nothing wrong was found.
    pub fn is_clean(&self) -> bool {
        self.unreadable == 0 && self.weak == 0
    }

    /// The blobs whose fragments are to be repaired, and whether there are more.
    pub fn to_repair(&self) -> (&[FoundBlob], bool) {
        (&self.to_repair, self.is_cut)
    }
}

/// The most names in a [`BlobSet`]: some 50 MiB.
const MAX_IN_SET: usize = if cfg!(test) { 64 } else { 1 << 20 };

/// Names of blobs, as many as fit into memory.
#[derive(Default)]
pub(super) struct BlobSet {
    pub(super) names: HashSet<BlobId>,
    /// Whether there are more. Then every snapshot counts as one that refers to some.
    pub(super) has_more: bool,
}

impl BlobSet {
    /// Adds a name. Returns whether it is not known to be there.
    fn insert(&mut self, blob: BlobId) -> bool {
        if self.names.len() >= MAX_IN_SET {
            let is_new = !self.names.contains(&blob);
            self.has_more |= is_new;
            return is_new;
        }
        self.names.insert(blob)
    }
}

/// What was found so far.
#[derive(Default)]
pub(super) struct Findings {
    pub(super) report: Verification,
    pub(super) basis: VerificationBasis,
    /// The blobs that cannot be read.
    pub(super) unreadable: BlobSet,
    /// Those that are damaged or gone.
    pub(super) lost: BlobSet,
    /// Blobs that can be read, and whose fragments are not all there or are damaged.
    pub(super) weak: BlobSet,
    pub(super) to_repair: Vec<FoundBlob>,
}

impl Findings {
    pub(super) fn new(basis: VerificationBasis) -> Findings {
        Findings { basis, ..Findings::default() }
    }

    /// The error of a database that is damaged, if one was found. It says nothing about the blobs.
    pub(super) fn take_database_error(&mut self) -> Option<Error> {
        let is_database = |one: &UnreadableBlob| matches!(one.error, Error::Database { .. });
        let at = self.report.errors.iter().position(is_database)?;
        Some(self.report.errors.swap_remove(at).error)
    }

    pub(super) fn add(&mut self, blob: BlobId, used_as: BlobUse, error: Error) {
        let one = UnreadableBlob { blob, used_as, error };
        if self.unreadable.insert(blob) {
            self.report.unreadable += 1;
            if one.is_lost() {
                self.report.lost += 1;
                self.lost.insert(blob);
            }
            if self.report.errors.len() < MAX_ERRORS {
                self.report.errors.push(one);
            }
        }
    }

    /// Notes that a blob that was weak cannot be read either.
    pub(super) fn forget_weak(&mut self, blob: &BlobId) {
        if self.weak.names.remove(blob) {
            self.report.weak -= 1;
        }
    }

    /// Adds what is wrong with the fragments of a blob.
    pub(super) fn add_fragments(&mut self, found: FoundBlob, problems: &[FragmentProblem]) {
        let blob = found.wanted.blob;
        if self.weak.insert(blob) {
            self.report.weak += 1;
        }
        for problem in problems {
            match problem.state.is_missing() {
                true => self.report.missing += 1,
                false => self.report.damaged += 1,
            }
            if self.report.fragments.len() < MAX_ERRORS {
                self.report.fragments.push(FoundFragment { blob, problem: *problem });
            }
        }
        match self.to_repair.len() < MAX_TO_REPAIR {
            true => self.to_repair.push(found),
            false => self.report.is_cut = true,
        }
    }
}
