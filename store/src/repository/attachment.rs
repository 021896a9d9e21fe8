//! A mirror's hold on its image.

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

/// The most numbers that are reserved at once.
pub const MAX_RESERVED: u64 = 1 << 16;

/// The longest reason of a failed snapshot, in characters; the rest is cut off.
const MAX_REASON: usize = 1000;

/// A mirror that is attached to its image.
///
/// Each checkpoint goes [`begin`](Self::begin) → [`publish`](Self::publish) or [`fail`](Self::fail), in
/// the order of the numbers. Every operation fails with a conflict when another writer has taken the
/// image over. Dropping the attachment changes nothing in the repository: the lease ends with the
/// process, or with [`release`](Self::release).
pub struct Attachment {
    repository: Repository,
    holder: Holder,
    parent: Mutex<(u64, Root)>,
    /// The snapshots that were announced and are not stable.
    announced: Mutex<BTreeMap<u64, Announced>>,
}

/// How it was when a snapshot was announced first.
#[derive(Clone, Copy, Default)]
struct Announced {
    /// How many peers had been lost.
    losses: u64,
    /// What had gone to the peers. If several are announced at once, all count what each of them sends.
    counters: Counters,
}

impl Attachment {
    pub(crate) fn new(repository: Repository, holder: Holder, parent: u64, root: Root) -> Self {
        Self { repository, holder, parent: Mutex::new((parent, root)), announced: Mutex::default() }
    }

    /// The image.
    pub fn image(&self) -> &ImageName {
        self.holder.image_name()
    }

    /// The number and content of the snapshot that the mirror's unchanged parts come from.
    pub fn parent(&self) -> (u64, Root) {
        *self.lock()
    }

    /// Takes the image's next snapshot numbers, at most [`MAX_RESERVED`] of them.
    pub fn reserve(&self, count: u64) -> Result<Range<u64>> {
        if !(1..=MAX_RESERVED).contains(&count) {
            return Err(Error::BadArgument(format!("{count} numbers cannot be reserved at once")));
        }
        self.repository.catalog().reserve(&self.holder, count)
    }

    /// Takes up snapshot numbers that an earlier process of this mirror had reserved. `left` is
    /// what that process has recorded as unused; it is empty if there is no record. Returns the
    /// numbers that nobody has used: they are reserved for this copy of the mirror, and above all
    /// snapshots of the image. All other numbers that the mirror had reserved are never used.
    ///
    /// Every process calls this before its first [`reserve`](Self::reserve).
    pub fn resume(&self, left: &Range<u64>) -> Result<Range<u64>> {
        self.repository.catalog().resume(&self.holder, left)
    }

    /// Keeps the lease alive. It must be called well within [`LEASE_SECONDS`](crate::LEASE_SECONDS); a
    /// reader has no lease, and nothing to do.
    pub fn renew(&self) -> Result<()> {
        if self.holder.may_write() { self.repository.catalog().renew(&self.holder) } else { Ok(()) }
    }

    /// Announces a snapshot. To announce one again that has not failed is fine: its publication may have been carried
    /// out though nobody was told.
    pub fn begin(&self, new: &NewSnapshot) -> Result<()> {
        new.label.as_deref().map_or(Ok(()), check_label)?;
        let losses = self.repository.catalog().begin(&self.holder, new)?;
        // Before anything of it is put, or put again.
        self.repository.note_losses(losses);
        let counters = self.repository.counters();
        self.all_announced().entry(new.number).or_insert(Announced { losses, counters });
        Ok(())
    }

    /// Makes the content durable, and then, in one transaction, publishes the snapshot and moves the
    /// mirror's reference to it. To publish the same content again is fine.
    ///
    /// If a peer was lost since the snapshot was announced, a part of the content may have been lost with it. Then it is
    /// only available, and the next repair makes it stable. So it is if its parent is only available.
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

    /// Waits until a published snapshot has its full redundancy, and makes it stable. Fails if a peer was lost meanwhile, or
    /// its parent is not stable, as long as no repair has looked at it.
    pub fn complete(&self, snapshot: &Snapshot) -> Result<Snapshot> {
        self.repository.flush_all()?;
        // This is asked again and again, maybe until a repair was there: no record is stored that is of no use.
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

    /// What is to be published of a snapshot whose content is stored.
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

    /// Stores the record, as well as the content is, and publishes.
    fn publish_with(&self, record: &Record, number: u64, what: Published) -> Result<Snapshot> {
        let record = self.repository.put_record(record, what.state)?;
        self.repository.catalog().publish(&self.holder, number, &Published { record, ..what })
    }

    /// Gives up an announced snapshot.
    pub fn fail(&self, number: u64, reason: &str) -> Result<()> {
        let reason = reason.chars().take(MAX_REASON).collect::<String>();
        let record = self.repository.catalog().fail(&self.holder, number, &reason)?;
        // One may have been stored for its publication.
        self.repository.put_removal(&record);
        self.all_announced().remove(&number);
        Ok(())
    }

    /// Ends the lease and gives back reserved numbers that were not used, if they are still the
    /// image's last. The reference on the parent stays.
    pub fn release(&self, unused: Option<Range<u64>>) -> Result<()> {
        if !self.holder.may_write() {
            return Ok(());
        }
        self.repository.catalog().release(&self.holder, unused)
    }

    /// Ends the lease and drops the reference: the mirror is no more.
    pub fn detach(&self) -> Result<()> {
        self.repository.catalog().detach(&self.holder)
    }

    /// How it was when this was announced. Of one that nobody announced here nothing is known.
    fn announced(&self, number: u64) -> Announced {
        self.all_announced().get(&number).copied().unwrap_or_default()
    }

    fn all_announced(&self) -> MutexGuard<'_, BTreeMap<u64, Announced>> {
        self.announced.lock().expect("no thread panics while it holds what was announced")
    }

    fn lock(&self) -> MutexGuard<'_, (u64, Root)> {
        self.parent.lock().expect("no thread panics while it holds the parent")
    }
}
