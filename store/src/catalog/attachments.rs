//! The operations of an attached mirror. Each of them relies on the image's fence.

use std::ops::Range;

use super::Catalog;
use super::documents::{
    AvailableDocument, ImageDocument, LeaseDocument, MirrorDocument, SnapshotDocument,
    available_key, image, image_key, label_key, lease_key, mirror_key, snapshot_key, snapshots,
    snapshots_of,
};
use super::mirrors::{Holding, LEASE_SECONDS, without_writer};
use super::records::Record;
use crate::clock::now;
use crate::cluster::membership::{ClusterEpoch, LOSSES};
use crate::documents::{Change, Query, View};
use crate::error::{Error, Result};
use crate::id::{BlobId, ImageId, MirrorId};
use crate::name::{ImageName, SnapshotRef};
use crate::process::Process;
use crate::snapshot::{MirrorOwner, Mode, NewSnapshot, Snapshot, SnapshotState};
use crate::tree::Root;

/// An attached mirror, as the catalog identifies it.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    pub(super) owner: MirrorOwner,
    pub(super) process: Process,
    /// The image's id. Another image may get the same name later.
    pub(super) image: ImageId,
    pub(super) image_name: ImageName,
    /// The image's fence after this mirror acquired the lease; `None` if the mirror only reads.
    pub(super) fence: Option<u64>,
    /// The image's `restored` when the mirror was attached.
    pub(super) restored: u64,
}

/// What is to be published of a snapshot.
pub(crate) struct Published {
    pub(crate) root: Root,
    pub(crate) state: SnapshotState,
    pub(crate) stored_bytes: u64,
    pub(crate) dirty_bytes: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) saved_bytes: u64,
    /// The number of the snapshot that it was derived from.
    pub(crate) parent: u64,
    /// The epoch in which all of its blobs are known to be stored.
    pub(crate) epoch: ClusterEpoch,
    /// The name of the snapshot's record, if it has one.
    pub(crate) record: Option<BlobId>,
}

impl Published {
    /// The document of an announced snapshot after its publication.
    fn apply(
        &self,
        snapshot: SnapshotDocument,
        parent: u64,
        is_parent_available: bool,
    ) -> SnapshotDocument {
        SnapshotDocument {
            parent: Some(parent),
            is_parent_available,
            root: self.root.0,
            stored_bytes: self.stored_bytes,
            sent_bytes: self.sent_bytes,
            saved_bytes: self.saved_bytes,
            dirty_bytes: self.dirty_bytes,
            state: self.state,
            record: self.record,
            ..snapshot
        }
    }
}

impl Holder {
    pub(crate) fn image_name(&self) -> &ImageName {
        &self.image_name
    }

    pub(crate) fn mirror_id(&self) -> MirrorId {
        self.owner.id
    }

    pub(crate) fn image_id(&self) -> ImageId {
        self.image
    }

    pub(crate) fn may_write(&self) -> bool {
        self.fence.is_some()
    }

    fn image_key(&self) -> String {
        image_key(&self.image_name)
    }

    fn snapshot_key(&self, number: u64) -> String {
        snapshot_key(&self.image, number)
    }

    /// The image, if this mirror is still its writer.
    fn check(&self, view: &View) -> Result<ImageDocument> {
        let Some(fence) = self.fence else {
            let mirror = self.owner.id;
            return Err(Error::BadArgument(format!(
                "mirror {mirror} is attached for reading only"
            )));
        };
        let found = view.get::<ImageDocument>(&self.image_key())?;
        let image = found.ok_or_else(|| Error::ImageGone { image: self.image_name.to_string() })?;
        let is_ours = image.writer == Some(self.owner.id) && image.fence == fence;
        let (name, mirror) = (self.image_name.to_string(), self.owner.id.to_string());
        match image.id == self.image {
            true if is_ours => Ok(image),
            true if self.is_free_after_rebuild(&image, fence) => Err(self.rebuilt()),
            _ => Err(Error::Fenced { image: name, mirror }),
        }
    }

    /// Whether the image was restored since the mirror was attached, and no writer has acquired it
    /// since.
    fn is_free_after_rebuild(&self, image: &ImageDocument, fence: u64) -> bool {
        image.restored > self.restored && image.writer.is_none() && image.fence <= fence
    }

    /// The snapshot with this number, if it exists.
    fn find(&self, view: &View, number: u64) -> Result<Option<SnapshotDocument>> {
        view.get(&self.snapshot_key(number))
    }

    /// The snapshot with this number, of any mirror. Fails if it does not exist.
    fn existing(
        &self,
        view: &View,
        image: &ImageDocument,
        number: u64,
    ) -> Result<SnapshotDocument> {
        self.find(view, number)?.ok_or_else(|| match image.restored > self.restored {
            // Snapshots that were only announced are in no record.
            true => self.rebuilt(),
            false => Error::NoSnapshot {
                name: SnapshotRef::number(&self.image_name, number).to_string(),
            },
        })
    }

    /// The error while the mirror has not announced its state to a rebuilt catalog.
    fn rebuilt(&self) -> Error {
        let (image, mirror) = (self.image_name.to_string(), self.owner.id.to_string());
        Error::CatalogRebuilt { image, mirror }
    }

    /// Returns the snapshot if this mirror announced it. Fails otherwise.
    fn own(&self, snapshot: SnapshotDocument, number: u64) -> Result<SnapshotDocument> {
        if snapshot.mirror != Some(self.owner.id) {
            let (image, selector) = (self.image_name.to_string(), number.to_string());
            return Err(Error::SnapshotExists { image, selector });
        }
        Ok(snapshot)
    }

    /// The document of a snapshot of this mirror after it is published. A snapshot that was
    /// published before does not change, except that it may become stable. Returns `None` if the
    /// cluster is in another epoch than the one in which the content was stored.
    ///
    /// A snapshot whose parent is only *available* is at most *available*: unchanged blobs are the
    /// parent's. If the parent's document was removed, the state that the parent had when it became
    /// the parent counts.
    fn published(
        &self,
        view: &View,
        number: u64,
        before: SnapshotDocument,
        published: &Published,
    ) -> Result<Option<SnapshotDocument>> {
        if ClusterEpoch::of(view)? != published.epoch {
            return Ok(None);
        }
        let mirror = self.mirror(view)?;
        let parent = self.find(view, published.parent)?;
        let is_parent_available = match parent.filter(|one| one.state.has_content()) {
            Some(parent) => parent.state == SnapshotState::Available,
            None if before.state == SnapshotState::Pending => mirror.is_parent_available,
            None => before.is_parent_available,
        };
        let state = match is_parent_available && published.root.0.is_some() {
            true => SnapshotState::Available,
            false => published.state,
        };
        let published = Published { state, ..*published };
        let same = before.root == published.root.0;
        match (before.state, published.state) {
            (SnapshotState::Pending, _) => {
                Ok(Some(published.apply(before, mirror.parent, is_parent_available)))
            }
            (SnapshotState::Available, SnapshotState::Stable) if same => {
                Ok(Some(SnapshotDocument {
                    state: SnapshotState::Stable,
                    stored_bytes: published.stored_bytes,
                    sent_bytes: published.sent_bytes,
                    saved_bytes: published.saved_bytes,
                    record: published.record.or(before.record),
                    ..before
                }))
            }
            (SnapshotState::Stable | SnapshotState::Available, _) if same => Ok(Some(before)),
            _ => Err(self.wrong_state(number, before)),
        }
    }

    fn mirror(&self, view: &View) -> Result<MirrorDocument> {
        let mirror = view.get(&mirror_key(&self.owner.id))?;
        mirror.ok_or_else(|| Error::NoMirror { id: self.owner.id.to_string() })
    }

    /// The mirror's document in a rebuilt catalog.
    fn mirror_after_rebuild(&self, view: &View, parent: (u64, Root)) -> Result<MirrorDocument> {
        // If the answer to a later publication was lost, the mirror publishes it again.
        let (number, Root(root)) = parent;
        let parent = self.find(view, number)?.filter(|one| one.root == root);
        let is_stable = parent.is_some_and(|one| one.state == SnapshotState::Stable);
        Ok(MirrorDocument {
            image: self.image_name.clone(),
            image_id: self.image,
            host: self.owner.host.clone(),
            path: self.owner.path.clone(),
            mode: Mode::ReadWrite,
            parent: number,
            root,
            is_parent_available: !is_stable,
            attached: now(),
            announced: 0,
            reserved: 0..0,
        })
    }

    /// The documents that an operation on a snapshot relies on.
    fn queries(&self, number: u64) -> Vec<Query> {
        vec![
            Query::Key(self.image_key()),
            Query::Key(self.snapshot_key(number)),
            Query::Key(mirror_key(&self.owner.id)),
        ]
    }

    /// The documents that a publication relies on.
    fn publish_queries(&self, number: u64, published: &Published) -> Vec<Query> {
        let mut queries = self.queries(number);
        queries.push(Query::Key(self.snapshot_key(published.parent)));
        queries.push(Query::key(LOSSES));
        queries
    }

    fn wrong_state(&self, number: u64, snapshot: SnapshotDocument) -> Error {
        let name = SnapshotRef::number(&self.image_name, number).to_string();
        Error::WrongState { name, state: snapshot.state.as_str(), reason: snapshot.reason }
    }
}

impl Catalog {
    /// Reserves `count` snapshot numbers for the mirror.
    pub(crate) fn reserve(&self, holder: &Holder, count: u64) -> Result<Range<u64>> {
        let mirror_key = mirror_key(&holder.owner.id);
        let queries = [Query::Key(holder.image_key()), Query::key(&mirror_key)];
        self.change(&queries, |view| {
            let mut image = holder.check(view)?;
            let mut mirror = holder.mirror(view)?;
            let numbers = image.next_number..image.next_number + count;
            image.next_number = numbers.end;
            if mirror.reserved.end != numbers.start {
                mirror.reserved.start = numbers.start;
            }
            mirror.reserved.end = numbers.end;
            let change = Change::default().put(holder.image_key(), &image);
            Ok((change.put(&mirror_key, &mirror), numbers))
        })
    }

    /// Returns the mirror's reserved numbers that were not used, and drops the rest of its
    /// reservation. `left` has the numbers that one copy of the mirror has recorded as unused.
    ///
    /// Every process of a mirror calls this before it reserves, and a process without a record
    /// drops the whole reservation. So a reservation that has a number below `left.end` was made by
    /// processes that share this record. Numbers of it beyond `left.end` were reserved by a process
    /// that was killed before it could record them. If all its numbers are above, another copy of
    /// the mirror has reserved them, and `left` is ignored.
    pub(crate) fn resume(&self, holder: &Holder, left: &Range<u64>) -> Result<Range<u64>> {
        let mirror_key = mirror_key(&holder.owner.id);
        let queries = [
            Query::Key(holder.image_key()),
            Query::key(&mirror_key),
            Query::Prefix(snapshots_of(&holder.image)),
        ];
        self.change(&queries, |view| {
            let image = holder.check(view)?;
            let mut mirror = holder.mirror(view)?;
            let all = snapshots(view, &holder.image)?;
            let last = all.iter().map(|(number, _)| *number).max().unwrap_or(0);
            let start = left.start.max(mirror.reserved.start).max(last + 1);
            let is_own = mirror.reserved.start < left.end && start < mirror.reserved.end;
            let usable = if is_own { start..mirror.reserved.end } else { 0..0 };
            let mut change = Change::default();
            if mirror.reserved != usable {
                mirror.reserved = usable.clone();
                change = change.put(&mirror_key, &mirror);
            }
            // A catalog that was rebuilt does not know of all reservations.
            if image.next_number < left.end {
                let image = ImageDocument { next_number: left.end, ..image };
                change = change.put(holder.image_key(), &image);
            }
            Ok((change, usable))
        })
    }

    /// Renews the lease. After a rebuild of the catalog, acquires it again and refers to the
    /// mirror's `parent` again, unless another writer has acquired the image. No number below
    /// `reserved_end` is then given out again.
    pub(crate) fn renew(
        &self,
        holder: &Holder,
        parent: (u64, Root),
        reserved_end: u64,
    ) -> Result<()> {
        let mirror_key = mirror_key(&holder.owner.id);
        let queries = [
            Query::Key(holder.image_key()),
            Query::key(&mirror_key),
            Query::Key(holder.snapshot_key(parent.0)),
        ];
        self.change(&queries, |view| {
            let lease = LeaseDocument::new(&holder.owner, holder.process.clone());
            let key = lease_key(&holder.image);
            let change = Change::default().put_for(LEASE_SECONDS as u32, key, &lease);
            match holder.check(view) {
                Ok(_) => Ok((change, ())),
                Err(Error::CatalogRebuilt { .. }) => {
                    let image = image(view, &holder.image_name)?;
                    let image = ImageDocument {
                        writer: Some(holder.owner.id),
                        fence: holder.fence.unwrap_or(0),
                        next_number: image.next_number.max(reserved_end),
                        ..image
                    };
                    let mirror = holder.mirror_after_rebuild(view, parent)?;
                    tracing::info!(image = %holder.image_name, "attached again to a rebuilt catalog");
                    let change = change.put(holder.image_key(), &image);
                    Ok((change.put(&mirror_key, &mirror), ()))
                }
                Err(error) => Err(error),
            }
        })
    }

    /// Announces a snapshot. Returns the cluster's epoch.
    ///
    /// A snapshot may be announced again, even if it is published: a writer that was restarted, or
    /// whose catalog was unreachable, cannot know how far it had come. A failed snapshot cannot be
    /// announced again.
    pub(crate) fn begin(&self, holder: &Holder, new: &NewSnapshot) -> Result<ClusterEpoch> {
        let number = new.number;
        let label = new.label.as_ref().map(|label| label_key(&holder.image, label));
        let mut queries = holder.queries(number);
        queries.push(Query::key(LOSSES));
        queries.extend(label.iter().cloned().map(Query::Key));
        self.change(&queries, |view| {
            let image = holder.check(view)?;
            if number == 0 || number >= image.next_number {
                return Err(Error::BadArgument(format!(
                    "snapshot number {number} is not reserved"
                )));
            }
            if let Some(known) = holder.find(view, number)? {
                let known = holder.own(known, number)?;
                return match known.state {
                    SnapshotState::Failed => Err(holder.wrong_state(number, known)),
                    _ => Ok((Change::default(), ClusterEpoch::of(view)?)),
                };
            }
            let mirror = holder.mirror(view)?;
            if number <= mirror.announced {
                // It was announced before, and then removed.
                let name = SnapshotRef::number(&holder.image_name, number).to_string();
                return Err(Error::WrongState { name, state: "removed", reason: None });
            }
            if label.as_ref().is_some_and(|label| view.version(label) != 0) {
                let image = holder.image_name.to_string();
                let selector = new.label.clone().unwrap_or_default();
                return Err(Error::SnapshotExists { image, selector });
            }
            let snapshot = SnapshotDocument {
                parent: Some(mirror.parent),
                root: None,
                time: new.time,
                label: new.label.clone(),
                state: SnapshotState::Pending,
                consistency: new.consistency,
                dirty_bytes: new.dirty_bytes,
                stored_bytes: 0,
                sent_bytes: 0,
                saved_bytes: 0,
                pause_us: new.pause_us,
                reason: None,
                mirror: Some(holder.owner.id),
                is_parent_available: false,
                record: None,
            };
            let mirror = MirrorDocument { announced: number, ..mirror };
            let change = Change::default()
                .put(holder.snapshot_key(number), &snapshot)
                .put(mirror_key(&holder.owner.id), &mirror);
            let change = match &label {
                Some(label) => change.put(label, &number),
                None => change,
            };
            Ok((change, ClusterEpoch::of(view)?))
        })
    }

    /// The record of a snapshot as it will be published. Returns `None` if the cluster is in
    /// another epoch.
    pub(crate) fn record(
        &self,
        holder: &Holder,
        number: u64,
        published: &Published,
    ) -> Result<Option<Record>> {
        let view = self.read(&holder.publish_queries(number, published))?;
        let image = holder.check(&view)?;
        let before = holder.own(holder.existing(&view, &image, number)?, number)?;
        let snapshot = holder.published(&view, number, before, published)?;
        let record = |one| Record::new(&holder.image_name, &image, number, one, published.epoch);
        Ok(snapshot.map(record))
    }

    /// Publishes an announced snapshot and makes it the mirror's parent. The same content may be
    /// published again, for the reason given in [`Catalog::begin`]. That may also make an available
    /// snapshot stable. Returns `None`, and changes nothing, if the cluster is in another epoch.
    pub(crate) fn publish(
        &self,
        holder: &Holder,
        number: u64,
        published: &Published,
    ) -> Result<Option<Snapshot>> {
        self.change(&holder.publish_queries(number, published), |view| {
            let image = holder.check(view)?;
            let before = holder.own(holder.existing(view, &image, number)?, number)?;
            let published = holder.published(view, number, before.clone(), published)?;
            let Some(snapshot) = published else { return Ok((Change::default(), None)) };
            let mut change = Change::default();
            if snapshot.state != before.state {
                change = change.put(holder.snapshot_key(number), &snapshot);
                let index = available_key(&holder.image, number);
                change = match snapshot.state {
                    SnapshotState::Available => {
                        let entry = AvailableDocument { image: holder.image_name.clone() };
                        change.put(index, &entry)
                    }
                    _ => change.remove(Query::Key(index)),
                };
            }
            let known = holder.mirror(view)?;
            // After a rebuild the mirror may refer to an older snapshot than this published one.
            if before.state == SnapshotState::Pending || known.parent < number {
                let mirror = MirrorDocument {
                    parent: number,
                    root: snapshot.root,
                    is_parent_available: snapshot.state == SnapshotState::Available,
                    ..known
                };
                change = change.put(mirror_key(&holder.owner.id), &mirror);
            }
            Ok((change, Some(snapshot.snapshot(&holder.image_name, &image, number)?)))
        })
    }

    /// Marks an announced snapshot as failed. Returns its tombstone. The snapshot may be of another mirror, which may be lost: the holder of the lease is the image's only writer.
    pub(crate) fn fail(&self, holder: &Holder, number: u64, reason: &str) -> Result<Record> {
        self.change(&holder.queries(number), |view| {
            let image = holder.check(view)?;
            let mut snapshot = holder.existing(view, &image, number)?;
            if snapshot.state.has_content() {
                return Err(holder.wrong_state(number, snapshot));
            }
            let record = Record::failure(&holder.image_name, &image, number);
            if snapshot.state != SnapshotState::Pending {
                return Ok((Change::default(), record));
            }
            snapshot.state = SnapshotState::Failed;
            snapshot.reason = Some(reason.to_owned());
            let change = Change::default().put(holder.snapshot_key(number), &snapshot);
            let change = match snapshot.label {
                // The next attempt may use the label.
                Some(label) => change.remove(Query::Key(label_key(&holder.image, &label))),
                None => change,
            };
            Ok((change, record))
        })
    }

    /// Releases the lease. Unused numbers are returned if no number was reserved after them, so
    /// that a clean stop leaves no gap.
    pub(crate) fn release(&self, holder: &Holder, unused: Option<Range<u64>>) -> Result<()> {
        let mirror_key = mirror_key(&holder.owner.id);
        let queries = [
            Query::Key(holder.image_key()),
            Query::key(&mirror_key),
            Query::Prefix(snapshots_of(&holder.image)),
        ];
        self.change(&queries, |view| {
            let mut image = holder.check(view)?;
            let mirror = MirrorDocument { reserved: 0..0, ..holder.mirror(view)? };
            if let Some(unused) = unused
                .as_ref()
                .filter(|range| range.start < range.end && range.start > 0)
                .filter(|range| range.end == image.next_number)
            {
                let all = snapshots(view, &holder.image)?;
                if all.iter().all(|(number, _)| *number < unused.start) {
                    image.next_number = unused.start;
                }
            }
            let holding =
                Holding { id: &holder.owner.id, name: &holder.image_name, document: Some(image) };
            let change = Change::default().put(&mirror_key, &mirror);
            Ok((without_writer(change, &holding), ()))
        })
    }

    /// Removes the mirror and its lease.
    pub(crate) fn detach(&self, holder: &Holder) -> Result<()> {
        let id = &holder.owner.id;
        let queries = [Query::Key(holder.image_key()), Query::Key(mirror_key(id))];
        self.change(&queries, |view| {
            let document = match holder.may_write() {
                true => Some(holder.check(view)?),
                false => None,
            };
            let change = Change::default().remove(Query::Key(mirror_key(id)));
            let holding = Holding { id, name: &holder.image_name, document };
            Ok((without_writer(change, &holding), ()))
        })
    }
}
