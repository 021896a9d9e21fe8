//! The attachment of a mirror to its image.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::Repository;
use super::commit::{Commit, SnapshotCommit};
use crate::catalog::{CommitBasis, Holder, Published};
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::name::{ImageName, check_label};
use crate::snapshot::{MirrorParent, NewSnapshot, Snapshot, SnapshotState};
use crate::tree::Root;

/// The most snapshot numbers that one call reserves.
pub const MAX_RESERVED: u64 = 1 << 16;

/// The longest reason of a failed snapshot, in characters. A longer reason is truncated.
const MAX_REASON_CHARS: usize = 1000;

/// A mirror that is attached to its image.
///
/// - Each checkpoint goes from [`begin`](Self::begin) to [`SnapshotCommit::publish`] or
///   [`fail`](Self::fail), in the order of the snapshot numbers.
/// - Every operation fails with a conflict when another writer has taken over the image.
/// - Dropping the attachment changes nothing in the repository: the lease ends with the process, or
///   with [`release`](Self::release).
pub struct Attachment {
    repository: Repository,
    holder: Holder,
    chunk_size: u32,
    /// The size of the mirror.
    size: AtomicU64,
    parent: Mutex<(u64, Root)>,
    /// The mirror may have given out snapshot numbers below this one.
    reserved_end: AtomicU64,
    /// The id of the last reservation.
    reservation: AtomicU64,
}

impl Attachment {
    pub(crate) fn new(
        repository: Repository,
        holder: Holder,
        geometry: Geometry,
        parent: (u64, Root),
    ) -> Self {
        let (parent, reserved_end) = (Mutex::new(parent), AtomicU64::new(0));
        let (chunk_size, size) = (geometry.chunk_size(), AtomicU64::new(geometry.size()));
        let reservation = AtomicU64::new(0);
        Self { repository, holder, chunk_size, size, parent, reserved_end, reservation }
    }

    /// Returns the size of the mirror and of its chunks. At first it is that of the snapshot that the
    /// mirror was attached to.
    pub fn geometry(&self) -> Geometry {
        let size = self.size.load(Ordering::SeqCst);
        Geometry::new(size, self.chunk_size).expect("both were checked when they were set")
    }

    /// Notes the size of the mirror. It only grows.
    pub fn grow(&self, size: u64) -> Result<()> {
        Geometry::new(size, self.chunk_size)?;
        self.size.fetch_max(size, Ordering::SeqCst);
        Ok(())
    }

    /// Returns the bytes of this many chunks.
    pub(super) fn chunk_bytes(&self, chunks: u64) -> u64 {
        chunks * u64::from(self.chunk_size)
    }

    /// Returns the name of the image.
    pub fn image(&self) -> &ImageName {
        self.holder.image_name()
    }

    /// Returns where the mirror stands. A process that attaches the mirror later, to a catalog that
    /// was rebuilt, proves with it which snapshot the mirror continues.
    pub fn standing(&self) -> MirrorParent {
        let (number, root) = self.parent();
        MirrorParent { image: self.holder.image_id(), number, root, announced: number }
    }

    /// Returns the number and the root of the snapshot that holds the mirror's unchanged chunks.
    pub fn parent(&self) -> (u64, Root) {
        *self.lock()
    }

    /// Reserves the image's next `count` snapshot numbers, at most [`MAX_RESERVED`].
    pub fn reserve(&self, count: u64) -> Result<Range<u64>> {
        if !(1..=MAX_RESERVED).contains(&count) {
            return Err(Error::BadArgument(format!(
                "{count} snapshot numbers cannot be reserved at once"
            )));
        }
        let least = self.reserved_end.load(Ordering::SeqCst).max(self.parent().0 + 1);
        let (numbers, reservation) =
            self.repository.catalog().reserve(&self.holder, count, least)?;
        self.reserved_end.fetch_max(numbers.end, Ordering::SeqCst);
        self.reservation.store(reservation, Ordering::SeqCst);
        Ok(numbers)
    }

    /// Takes over the snapshot numbers that a previous process of this mirror reserved.
    ///
    /// `left` are the numbers that the previous process recorded as unused; it is empty if there is
    /// no record. Returns the numbers that are still unused: they are reserved for this copy of the
    /// mirror, and above all snapshots of the image. All other numbers that the mirror had reserved
    /// are never used.
    ///
    /// `reservation` is the id that the previous process recorded with the numbers; `None` if there is
    /// no record.
    ///
    /// Every process calls this before its first [`reserve`](Self::reserve).
    pub fn resume(&self, left: &Range<u64>, reservation: Option<u64>) -> Result<Range<u64>> {
        self.reserved_end.fetch_max(left.end, Ordering::SeqCst);
        let catalog = self.repository.catalog();
        let (numbers, reservation) = catalog.resume(&self.holder, left, reservation)?;
        // They may end beyond `left`.
        self.reserved_end.fetch_max(numbers.end, Ordering::SeqCst);
        self.reservation.store(reservation, Ordering::SeqCst);
        Ok(numbers)
    }

    /// Returns the id of the reservation that the numbers of [`reserve`](Self::reserve) and
    /// [`resume`](Self::resume) belong to.
    pub fn reservation(&self) -> u64 {
        self.reservation.load(Ordering::SeqCst)
    }

    /// Renews the lease. The interval between two calls must be well below
    /// [`LEASE_SECONDS`](crate::LEASE_SECONDS). A reader has no lease. The call only keeps the reader's
    /// mirror from counting as unused.
    ///
    /// Returns the size that the mirror should have: that of its image, or its own if it is a
    /// reader. If the mirror is larger than its image, the image grows.
    ///
    /// If the catalog was rebuilt, this attaches the mirror again.
    pub fn renew(&self) -> Result<u64> {
        let size = self.size.load(Ordering::SeqCst);
        match self.holder.may_write() {
            true => {
                let reserved_end = self.reserved_end.load(Ordering::SeqCst);
                self.repository.catalog().renew(&self.holder, self.parent(), reserved_end, size)
            }
            false => {
                self.repository.catalog().renew_reader(&self.holder, self.parent())?;
                Ok(size)
            }
        }
    }

    /// Announces a snapshot. A snapshot that has not failed may be announced again: its publication
    /// may have been carried out even though the answer was lost.
    ///
    /// Chunks that are put after this call belong to the returned commit. If others belong to it
    /// too, the caller must say so: see [`SnapshotCommit::mark_unverified`].
    pub fn begin(&self, new: &NewSnapshot) -> Result<SnapshotCommit<'_>> {
        new.label.as_deref().map_or(Ok(()), check_label)?;
        let basis = self.repository.catalog().begin(&self.holder, new)?;
        let geometry = Geometry::new(new.size, self.chunk_size)?;
        let commit = Commit::of_mirror(&self.repository, basis)?;
        Ok(SnapshotCommit::new(self, new.number, geometry, commit))
    }

    /// Returns the commit of a snapshot that was announced before. It is unverified: it does not
    /// know when the content was stored.
    pub fn announced(&self, number: u64) -> SnapshotCommit<'_> {
        let commit = Commit::unverified(&self.repository);
        SnapshotCommit::new(self, number, self.geometry(), commit)
    }

    /// Establishes a basis for a commit that has none: see [`Commit`]. Also returns whether the parent's
    /// content was not protected until now.
    pub(super) fn begin_again(&self) -> Result<(CommitBasis, bool)> {
        self.repository.catalog().begin_mirror_commit(&self.holder, self.parent())
    }

    /// Notes that the content of this parent was verified, after [`Self::begin_again`] asked for it.
    pub(super) fn note_parent_verified(&self, parent: (u64, Root)) -> Result<()> {
        self.repository.catalog().note_parent_verified(&self.holder, parent)
    }

    /// Publishes a snapshot whose content is stored. Returns `None` if its basis is gone.
    pub(super) fn publish(&self, number: u64, published: Published) -> Result<Option<Snapshot>> {
        let snapshot = self.publish_with_record(number, published)?;
        if let Some(snapshot) = &snapshot {
            let mut parent = self.lock();
            // A repeated publication of an older snapshot does not move the mirror back.
            if snapshot.number > parent.0 {
                *parent = (snapshot.number, snapshot.root);
            }
        }
        Ok(snapshot)
    }

    /// Makes a published snapshot stable, if its parent is stable. Returns `None` if its basis is
    /// gone.
    pub(super) fn complete(
        &self,
        snapshot: &Snapshot,
        published: Published,
    ) -> Result<Option<Snapshot>> {
        // A repair may have made it stable. The caller may retry until that, so a record is stored
        // only if it will be used.
        let found = self.repository.catalog().resolve(&snapshot.name())?;
        if found.state == SnapshotState::Stable {
            return Ok(Some(found));
        }
        let record = self.repository.catalog().record(&self.holder, snapshot.number, &published)?;
        match record.map(|record| record.state()) {
            Some(Some(SnapshotState::Stable)) => {
                self.publish_with_record(snapshot.number, published)
            }
            Some(_) => Ok(Some(found)),
            None => Ok(None),
        }
    }

    /// Stores the record with the same durability as the content, and publishes the snapshot.
    fn publish_with_record(&self, number: u64, published: Published) -> Result<Option<Snapshot>> {
        let catalog = self.repository.catalog();
        let Some(record) = catalog.record(&self.holder, number, &published)? else {
            return Ok(None);
        };
        let record = self.repository.put_record(record, published.state)?;
        catalog.publish(&self.holder, number, &Published { record, ..published })
    }

    /// Marks an announced snapshot as failed. May be repeated until it succeeds.
    pub fn fail(&self, number: u64, reason: &str) -> Result<()> {
        let reason = reason.chars().take(MAX_REASON_CHARS).collect::<String>();
        let tombstone = self.repository.catalog().fail(&self.holder, number, &reason)?;
        // A record may have been stored for the publication.
        self.repository.put_record(tombstone, SnapshotState::Stable).map(drop)
    }

    /// Ends the lease and returns the reserved numbers that were not used, if they are still the
    /// last numbers of the image. The reference to the parent stays, unless the mirror is ephemeral.
    pub fn release(&self, unused: Option<Range<u64>>) -> Result<()> {
        match (self.holder.may_write(), self.holder.is_ephemeral()) {
            (true, is_ephemeral) => {
                self.repository.catalog().release(&self.holder, unused)?;
                if is_ephemeral {
                    self.repository.put_mirror_removal(&self.holder.mirror_id());
                }
                Ok(())
            }
            (false, true) => self.detach(),
            (false, false) => Ok(()),
        }
    }

    /// Ends the lease and removes the reference to the parent: the mirror no longer exists.
    pub fn detach(&self) -> Result<()> {
        self.repository.catalog().detach(&self.holder)?;
        self.repository.put_mirror_removal(&self.holder.mirror_id());
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, (u64, Root)> {
        self.parent.lock().expect("no thread panics with the parent locked")
    }
}
