//! The attachment of a mirror to its image.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use super::Repository;
use crate::catalog::{Holder, Published, Record};
use crate::cluster::Counters;
use crate::error::{Error, Result};
use crate::name::{ImageName, check_label};
use crate::snapshot::{NewSnapshot, Snapshot, SnapshotState};
use crate::tree::Root;

/// The most snapshot numbers that one call reserves.
pub const MAX_RESERVED: u64 = 1 << 16;

/// The longest reason of a failed snapshot, in characters. A longer reason is truncated.
const MAX_REASON_CHARS: usize = 1000;

/// A mirror that is attached to its image.
///
/// - Each checkpoint goes from [`begin`](Self::begin) to [`publish`](Self::publish) or
///   [`fail`](Self::fail), in the order of the snapshot numbers.
/// - Every operation fails with a conflict when another writer has taken over the image.
/// - Dropping the attachment changes nothing in the repository: the lease ends with the process, or
///   with [`release`](Self::release).
pub struct Attachment {
    repository: Repository,
    holder: Holder,
    parent: Mutex<(u64, Root)>,
    /// The announced snapshots that are not stable, by number.
    announced: Mutex<BTreeMap<u64, Announced>>,
}

/// The counters at the moment when a snapshot was first announced.
#[derive(Clone, Copy, Default)]
struct Announced {
    /// The catalog's count of lost peers.
    losses: u64,
    /// The bytes that had gone to the peers. If several snapshots are announced at the same time,
    /// each of them counts the bytes of all.
    counters: Counters,
}

impl Attachment {
    pub(crate) fn new(repository: Repository, holder: Holder, parent: u64, root: Root) -> Self {
        Self { repository, holder, parent: Mutex::new((parent, root)), announced: Mutex::default() }
    }

    /// Returns the name of the image.
    pub fn image(&self) -> &ImageName {
        self.holder.image_name()
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
        self.repository.catalog().reserve(&self.holder, count)
    }

    /// Takes over the snapshot numbers that a previous process of this mirror reserved.
    ///
    /// `left` are the numbers that the previous process recorded as unused; it is empty if there is
    /// no record. Returns the numbers that are still unused: they are reserved for this copy of the
    /// mirror, and above all snapshots of the image. All other numbers that the mirror had reserved
    /// are never used.
    ///
    /// Every process calls this before its first [`reserve`](Self::reserve).
    pub fn resume(&self, left: &Range<u64>) -> Result<Range<u64>> {
        self.repository.catalog().resume(&self.holder, left)
    }

    /// Renews the lease. The interval between two calls must be well below
    /// [`LEASE_SECONDS`](crate::LEASE_SECONDS). A reader has no lease, so the call does nothing.
    pub fn renew(&self) -> Result<()> {
        if self.holder.may_write() { self.repository.catalog().renew(&self.holder) } else { Ok(()) }
    }

    /// Announces a snapshot. A snapshot that has not failed may be announced again: its publication
    /// may have been carried out even though the answer was lost.
    pub fn begin(&self, new: &NewSnapshot) -> Result<()> {
        new.label.as_deref().map_or(Ok(()), check_label)?;
        let losses = self.repository.catalog().begin(&self.holder, new)?;
        // Before any chunk of the snapshot is put, or put again.
        self.repository.note_losses(losses);
        let counters = self.repository.counters();
        self.all_announced().entry(new.number).or_insert(Announced { losses, counters });
        Ok(())
    }

    /// Makes the content durable. Then, in one transaction, publishes the snapshot and moves the
    /// mirror's reference to it. The same content may be published again.
    ///
    /// A snapshot that would become *stable* becomes only *available* in two cases. The next repair
    /// makes it stable.
    ///
    /// - A peer was lost since the snapshot was announced, and part of the content may be lost with
    ///   it.
    /// - The parent of the snapshot is only *available*.
    pub fn publish(
        &self,
        number: u64,
        root: &Root,
        stored_bytes: u64,
        dirty_bytes: u64,
    ) -> Result<Snapshot> {
        self.repository.flush()?;
        let state = self.repository.published_state();
        let parent = self.parent().0;
        let published = self.published(state, parent, number, root, stored_bytes, dirty_bytes);
        let record = self.repository.catalog().record(&self.holder, number, &published)?;
        let snapshot = self.publish_with(&record, number, published)?;
        let mut parent = self.lock();
        // A repeated publication of an older snapshot does not move the mirror back.
        if snapshot.number > parent.0 {
            *parent = (snapshot.number, snapshot.root);
        }
        if snapshot.state == SnapshotState::Stable {
            self.all_announced().remove(&number);
        }
        Ok(snapshot)
    }

    /// Waits until a published snapshot has its full redundancy, and makes it stable. Fails if a
    /// peer was lost in the meantime, or if the parent is not stable, until a repair has checked
    /// the snapshot.
    pub fn complete(&self, snapshot: &Snapshot) -> Result<Snapshot> {
        self.repository.flush_all()?;
        // The caller may retry until a repair has run. So a record is stored only if it will be
        // used.
        let mut completed = self.repository.catalog().resolve(&snapshot.name())?;
        let Snapshot { number, root, stored_bytes, dirty_bytes, .. } = *snapshot;
        let state = SnapshotState::Stable;
        if completed.state != state {
            let parent = snapshot.parent.unwrap_or(0);
            let published = self.published(state, parent, number, &root, stored_bytes, dirty_bytes);
            let record = self.repository.catalog().record(&self.holder, number, &published)?;
            if record.state() == Some(state) {
                completed = self.publish_with(&record, number, published)?;
            }
        }
        if completed.state != state {
            return Err(Error::LostMeanwhile { name: snapshot.name().to_string() });
        }
        self.all_announced().remove(&number);
        Ok(completed)
    }

    /// Builds the publication of a snapshot whose content is stored.
    fn published(
        &self,
        state: SnapshotState,
        parent: u64,
        number: u64,
        root: &Root,
        stored_bytes: u64,
        dirty_bytes: u64,
    ) -> Published {
        let Announced { losses, counters } = self.announced(number);
        let (sent_bytes, saved_bytes) =
            self.repository.traffic_since(&counters, stored_bytes, dirty_bytes);
        let (root, record) = (*root, None);
        Published {
            root,
            state,
            stored_bytes,
            dirty_bytes,
            sent_bytes,
            saved_bytes,
            parent,
            losses,
            record,
        }
    }

    /// Stores the record with the same durability as the content, and publishes the snapshot.
    fn publish_with(&self, record: &Record, number: u64, published: Published) -> Result<Snapshot> {
        let record = self.repository.put_record(record, published.state)?;
        self.repository.catalog().publish(&self.holder, number, &Published { record, ..published })
    }

    /// Marks an announced snapshot as failed.
    pub fn fail(&self, number: u64, reason: &str) -> Result<()> {
        let reason = reason.chars().take(MAX_REASON_CHARS).collect::<String>();
        let record = self.repository.catalog().fail(&self.holder, number, &reason)?;
        // A record may have been stored for the publication, so the removal is recorded as well.
        self.repository.put_removal(&record);
        self.all_announced().remove(&number);
        Ok(())
    }

    /// Ends the lease and returns the reserved numbers that were not used, if they are still the
    /// last numbers of the image. The reference to the parent stays.
    pub fn release(&self, unused: Option<Range<u64>>) -> Result<()> {
        if !self.holder.may_write() {
            return Ok(());
        }
        self.repository.catalog().release(&self.holder, unused)
    }

    /// Ends the lease and removes the reference to the parent: the mirror no longer exists.
    pub fn detach(&self) -> Result<()> {
        self.repository.catalog().detach(&self.holder)
    }

    /// Returns the counters of a snapshot's announcement. They are 0 if the snapshot was not
    /// announced through this attachment.
    fn announced(&self, number: u64) -> Announced {
        self.all_announced().get(&number).copied().unwrap_or_default()
    }

    fn all_announced(&self) -> MutexGuard<'_, BTreeMap<u64, Announced>> {
        self.announced.lock().expect("no thread panics with the announcements locked")
    }

    fn lock(&self) -> MutexGuard<'_, (u64, Root)> {
        self.parent.lock().expect("no thread panics with the parent locked")
    }
}
