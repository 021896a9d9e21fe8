//! The operations of an attached mirror. Each of them relies on the image's fence.

use std::ops::Range;

use super::Catalog;
use super::collection::{CommitBasis, mirror_basis};
use super::documents::{
    AvailableDocument, ImageDocument, LeaseDocument, MirrorDocument, SnapshotDocument,
    available_key, image, label_key, lease_key, mirror_key, put_mirror,
};
use super::holder::{Holder, Published};
use super::index::LabelDocument;
use super::mirrors::{Holding, LEASE_SECONDS, without_writer};
use super::records::Record;
use crate::clock::now;
use crate::documents::{Change, Query, View};
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::name::SnapshotRef;
use crate::snapshot::{NewSnapshot, Snapshot, SnapshotState};
use crate::tree::Root;

impl Catalog {
    /// Reserves `count` snapshot numbers for the mirror, none of them below `least`. Also returns the id
    /// of the reservation: the numbers extend the mirror's last reservation if they follow it.
    ///
    /// A catalog that was restored from an older copy does not know all numbers that it has given out.
    pub(crate) fn reserve(
        &self,
        holder: &Holder,
        count: u64,
        least: u64,
    ) -> Result<(Range<u64>, u64)> {
        let mirror_key = mirror_key(&holder.owner.id);
        let queries = [Query::Key(holder.image_key()), Query::key(&mirror_key)];
        self.change(&queries, |view| {
            let mut image = holder.check(view)?;
            let mut mirror = holder.mirror(view)?;
            let start = image.next_number.max(least);
            let numbers = start..start + count;
            image.next_number = numbers.end;
            if mirror.reserved.end != numbers.start {
                mirror.reserved.start = numbers.start;
                mirror.reservation = holder.fence.unwrap_or(0);
            }
            mirror.reserved.end = numbers.end;
            let change = Change::default().put(holder.image_key(), &image);
            let change = put_mirror(change, &holder.owner.id, &mirror);
            Ok((change, (numbers, mirror.reservation)))
        })
    }

    /// Returns the mirror's reserved numbers that were not used, and drops the rest of its
    /// reservation. `left` has the numbers that one copy of the mirror has recorded as unused, and
    /// `reservation` the id of their reservation, if it was recorded. Also returns that id.
    ///
    /// Every process of a mirror calls this before it reserves, and a process without a record
    /// drops the whole reservation. So a reservation that has a number below `left.end` was made by
    /// processes that share this record. Numbers of it beyond `left.end` were reserved by a process
    /// that was killed before it could record them. If all its numbers are above, another copy of
    /// the mirror may have reserved them. Then `left` counts only if the reservation has the recorded
    /// id: no process has dropped it or given it back since.
    pub(crate) fn resume(
        &self,
        holder: &Holder,
        left: &Range<u64>,
        reservation: Option<u64>,
    ) -> Result<(Range<u64>, u64)> {
        let mirror_key = mirror_key(&holder.owner.id);
        let queries = [Query::Key(holder.image_key()), Query::key(&mirror_key)];
        self.change(&queries, |view| {
            let image = holder.check(view)?;
            let mut mirror = holder.mirror(view)?;
            let start = left.start.max(mirror.reserved.start).max(image.index.highest + 1);
            let is_same = reservation == Some(mirror.reservation);
            let is_own =
                (mirror.reserved.start < left.end || is_same) && start < mirror.reserved.end;
            let (usable, reservation) = match is_own {
                true => (start..mirror.reserved.end, mirror.reservation),
                // The next numbers of this process begin a reservation of their own.
                false => (0..0, holder.fence.unwrap_or(0)),
            };
            let mut change = Change::default();
            if mirror.reserved != usable {
                mirror.reserved = usable.clone();
                change = put_mirror(change, &holder.owner.id, &mirror);
            }
            // A catalog that was rebuilt does not know of all reservations.
            if image.next_number < left.end {
                let image = ImageDocument { next_number: left.end, ..image };
                change = change.put(holder.image_key(), &image);
            }
            Ok((change, (usable, reservation)))
        })
    }

    /// Renews the lease. If the catalog refers to an older parent of the mirror, because it was restored
    /// from a copy, it refers to `parent` again. After a rebuild of the catalog, acquires it again and refers to the
    /// mirror's `parent` again, unless another writer has acquired the image. No number below
    /// `reserved_end` is then given out again. Returns the size of the image, which becomes `size`,
    /// the size of the mirror, if that is larger.
    pub(crate) fn renew(
        &self,
        holder: &Holder,
        parent: (u64, Root),
        reserved_end: u64,
        size: u64,
    ) -> Result<u64> {
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
                Ok(image) => {
                    let (mut change, known) = (change, image.size);
                    // If the catalog was restored from a copy, it is older than the mirror.
                    let image = ImageDocument { size: known.max(size), ..image };
                    let known_mirror = view.get::<MirrorDocument>(&mirror_key)?;
                    if known < size || known_mirror.is_none_or(|mut one| one.move_to(parent)) {
                        // A prune of the mirror's parent relies on the image's document.
                        change = change.put(holder.image_key(), &image);
                    }
                    change = renewed_mirror(view, holder, &image, change, parent)?;
                    Ok((change, known.max(size)))
                }
                Err(Error::CatalogRebuilt { .. }) => {
                    let image = image(view, &holder.image_name)?;
                    let size = image.size.max(size);
                    let image = ImageDocument {
                        size,
                        writer: Some(holder.owner.id),
                        fence: holder.fence.unwrap_or(0),
                        next_number: image.next_number.max(reserved_end),
                        ..image
                    };
                    let known = view.get::<MirrorDocument>(&mirror_key)?;
                    let is_known = |known: &MirrorDocument| {
                        (known.parent, Root(known.root)) == parent
                    };
                    // A rebuilt catalog has every mirror whose reference had not ended.
                    let mirror = match known.is_some_and(|known| is_known(&known)) {
                        false if holder.is_ephemeral() => {
                            holder.mirror_again(view, &image, parent)?
                        }
                        _ => holder.mirror_after_rebuild(view, parent)?,
                    };
                    tracing::info!(image = %holder.image_name, "attached again to a rebuilt catalog");
                    let change = change.put(holder.image_key(), &image);
                    Ok((put_mirror(change, &holder.owner.id, &mirror), size))
                }
                Err(error) => Err(error),
            }
        })
    }

    /// Renews the reference of a mirror that only reads.
    pub(crate) fn renew_reader(&self, holder: &Holder, parent: (u64, Root)) -> Result<()> {
        let mirror_key = mirror_key(&holder.owner.id);
        let queries = [
            Query::Key(holder.image_key()),
            Query::key(&mirror_key),
            Query::Key(holder.snapshot_key(parent.0)),
        ];
        self.change(&queries, |view| {
            let image = view.get::<ImageDocument>(&holder.image_key())?;
            let image = image.filter(|image| image.id == holder.image && !image.removing);
            let gone = || Error::ImageGone { image: holder.image_name.to_string() };
            let image = image.ok_or_else(gone)?;
            let change = match view.version(&mirror_key) {
                0 => Change::default().put(holder.image_key(), &image),
                _ => Change::default(),
            };
            Ok((renewed_mirror(view, holder, &image, change, parent)?, ()))
        })
    }

    /// Announces a snapshot. Returns what protects its blobs until the publication.
    ///
    /// A snapshot may be announced again, even if it is published: a writer that was restarted, or
    /// whose catalog was unreachable, cannot know how far it had come. A failed snapshot cannot be
    /// announced again.
    pub(crate) fn begin(&self, holder: &Holder, new: &NewSnapshot) -> Result<CommitBasis> {
        let number = new.number;
        let label = new.label.as_ref().map(|label| label_key(&holder.image, label));
        let mut queries = holder.queries(number);
        queries.extend(CommitBasis::queries());
        queries.extend(label.iter().cloned().map(Query::Key));
        self.change(&queries, |view| {
            let mut image = holder.check(view)?;
            if number == 0 || number >= image.next_number {
                return Err(Error::BadArgument(format!(
                    "snapshot number {number} is not reserved"
                )));
            }
            if let Some(known) = holder.find(view, number)? {
                let known = holder.own(known, number)?;
                return match known.state {
                    SnapshotState::Failed => Err(holder.wrong_state(number, known)),
                    SnapshotState::Pending => {
                        let mut mirror = holder.mirror(view)?;
                        let (basis, is_new) = mirror_basis(view, &mut mirror)?;
                        let change = Change::default();
                        Ok(match is_new {
                            true => (put_mirror(change, &holder.owner.id, &mirror), basis),
                            false => (change, basis),
                        })
                    }
                    _ => Ok((Change::default(), CommitBasis::of(view)?)),
                };
            }
            let mirror = holder.mirror(view)?;
            if number <= mirror.announced {
                // It was announced before, and then removed.
                let name = SnapshotRef::number(&holder.image_name, number).to_string();
                return Err(Error::WrongState { name, state: "removed", reason: None });
            }
            let known = label.as_ref().map(|label| view.get::<LabelDocument>(label)).transpose()?;
            if known.flatten().is_some_and(|known| !known.failed) {
                let image = holder.image_name.to_string();
                let selector = new.label.clone().unwrap_or_default();
                return Err(Error::SnapshotExists { image, selector });
            }
            Geometry::new(new.size, image.chunk_size)?;
            // Unless the catalog was restored from a copy, the image has this size already.
            image.size = image.size.max(new.size);
            let snapshot = SnapshotDocument {
                parent: Some(mirror.parent),
                size: new.size,
                root: None,
                time: new.time,
                labels: new.label.iter().cloned().collect(),
                is_pinned: false,
                metadata: new.metadata.clone(),
                is_from_guest: new.is_from_guest,
                is_obsolete: false,
                edits: 0,
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
            let mut mirror = MirrorDocument { announced: number, ..mirror };
            let (basis, _) = mirror_basis(view, &mut mirror)?;
            image.index.add(number, &snapshot);
            let change = Change::default()
                .put(holder.image_key(), &image)
                .put(holder.snapshot_key(number), &snapshot);
            let change = put_mirror(change, &holder.owner.id, &mirror);
            let change = match &label {
                Some(label) => change.put(label, &LabelDocument { number, failed: false }),
                None => change,
            };
            Ok((change, basis))
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
        let record =
            |one| Record::new(&holder.image_name, &image, number, one, published.basis.epoch);
        Ok(snapshot.map(record))
    }

    /// Publishes an announced snapshot and makes it the mirror's parent. The same content may be
    /// published again, for the reason given in [`Catalog::begin`]. That may also make an available
    /// snapshot stable. Returns `None`, and changes nothing, if its basis is gone.
    pub(crate) fn publish(
        &self,
        holder: &Holder,
        number: u64,
        published: &Published,
    ) -> Result<Option<Snapshot>> {
        self.change(&holder.publish_queries(number, published), |view| {
            let mut image = holder.check(view)?;
            let before = holder.own(holder.existing(view, &image, number)?, number)?;
            let published = holder.published(view, number, before.clone(), published)?;
            let Some(snapshot) = published else { return Ok((Change::default(), None)) };
            let mut change = Change::default();
            if !before.state.has_content() {
                image.index.gain_content(number);
                change = change.put(holder.image_key(), &image);
            }
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
            let mut mirror = known.clone();
            // After a rebuild the mirror may refer to an older snapshot than this published one.
            if before.state == SnapshotState::Pending || known.parent < number {
                mirror.parent = number;
                mirror.root = snapshot.root;
                mirror.is_parent_available = snapshot.state == SnapshotState::Available;
            }
            // Unless it has announced a later snapshot, the mirror has published all that it stored.
            if known.announced <= number {
                mirror.storing_since = None;
            }
            if mirror != known {
                change = put_mirror(change, &holder.owner.id, &mirror);
                // A prune of the mirror's parent relies on the image's document.
                if before.state.has_content() {
                    change = change.put(holder.image_key(), &image);
                }
            }
            Ok((change, Some(snapshot.snapshot(&holder.image_name, &image, number)?)))
        })
    }

    /// Marks an announced snapshot as failed. Returns its tombstone. The snapshot may be of another
    /// mirror, which may be lost: the holder of the lease is the image's only writer.
    ///
    /// Fails with [`Error::NoSnapshot`] if the catalog does not have the snapshot.
    pub(crate) fn fail(&self, holder: &Holder, number: u64, reason: &str) -> Result<Record> {
        self.change(&holder.queries(number), |view| {
            let image = holder.check(view)?;
            // A snapshot that was never announced, or only to a catalog that was lost, is not there.
            let found = holder.find(view, number)?;
            let mut snapshot = found.ok_or_else(|| holder.no_snapshot(number))?;
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
            let failed = LabelDocument { number, failed: true };
            let put = |change: Change, label: &String| {
                change.put(label_key(&holder.image, label), &failed)
            };
            Ok((snapshot.labels.iter().fold(change, put), record))
        })
    }

    /// Releases the lease. Unused numbers are returned if no number was reserved after them, so
    /// that a clean stop leaves no gap. An ephemeral mirror is forgotten.
    pub(crate) fn release(&self, holder: &Holder, unused: Option<Range<u64>>) -> Result<()> {
        let mirror_key = mirror_key(&holder.owner.id);
        let queries = [Query::Key(holder.image_key()), Query::key(&mirror_key)];
        self.change(&queries, |view| {
            let mut image = holder.check(view)?;
            let known = view.get::<MirrorDocument>(&mirror_key)?;
            // A number that a snapshot ever had is not used again, also if the snapshot was removed.
            if let Some(unused) = unused
                .as_ref()
                .filter(|range| range.start < range.end && range.start > 0)
                .filter(|range| range.end == image.next_number)
                .filter(|range| range.start > image.index.highest)
            {
                image.next_number = unused.start;
            }
            let holding =
                Holding { id: &holder.owner.id, name: &holder.image_name, document: Some(image) };
            let change = match known {
                Some(known) if !known.is_ephemeral => {
                    let mirror = MirrorDocument { reserved: 0..0, seen: now(), ..known };
                    put_mirror(Change::default(), &holder.owner.id, &mirror)
                }
                _ => Change::default().remove(Query::key(&mirror_key)),
            };
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

/// Adds to a change that the mirror is in use. The mirror gets its document again if it has none.
fn renewed_mirror(
    view: &View,
    holder: &Holder,
    image: &ImageDocument,
    change: Change,
    parent: (u64, Root),
) -> Result<Change> {
    let id = &holder.owner.id;
    match view.get::<MirrorDocument>(&mirror_key(id))? {
        Some(mut mirror) => {
            let is_moved = mirror.move_to(parent);
            let is_due = mirror.note_use(now()) || is_moved;
            Ok(if is_due { put_mirror(change, id, &mirror) } else { change })
        }
        None => {
            let mirror = holder.mirror_again(view, image, parent)?;
            tracing::info!(image = %holder.image_name, "the catalog refers to the mirror again");
            Ok(put_mirror(change, id, &mirror))
        }
    }
}
