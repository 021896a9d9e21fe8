//! Creating, listing and removing images and snapshots.

use std::collections::HashMap;

use super::Catalog;
use super::documents::{
    IMAGES, ImageDocument, LEASES, MIRRORS, MirrorDocument, SNAPSHOTS, SnapshotDocument, image,
    image_key, label_key, labels_of, lease_key, live_lease, mirror_key, newest, snapshot_key,
    snapshots, snapshots_of,
};
use super::records::Record;
use crate::clock::now;
use crate::cluster::membership::{LOSSES, losses};
use crate::documents::{Change, Query, View};
use crate::encoding::StoragePolicy;
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::id::{BlobId, MirrorId};
use crate::name::{ImageName, Selector, SnapshotRef};
use crate::process::Process;
use crate::snapshot::{Consistency, Image, Snapshot, SnapshotState};
use crate::sys;
use crate::tree::Root;

/// The number of an image's first snapshot.
const FIRST: u64 = 1;

/// The first snapshot of an image that is being created.
pub(crate) struct FirstSnapshot {
    pub(crate) root: Root,
    pub(crate) state: SnapshotState,
    pub(crate) consistency: Consistency,
    pub(crate) dirty_bytes: u64,
    pub(crate) stored_bytes: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) saved_bytes: u64,
}

/// The content that a snapshot or a mirror refers to.
pub(crate) struct Referrer {
    pub(crate) geometry: Geometry,
    pub(crate) root: Root,
    pub(crate) record: Option<BlobId>,
}

impl Referrer {
    fn snapshot(geometry: Geometry, one: &SnapshotDocument) -> Referrer {
        Referrer { geometry, root: Root(one.root), record: one.record }
    }
}

/// A snapshot that was *available* when it was read.
pub(crate) struct Available {
    pub(crate) policy: StoragePolicy,
    pub(crate) refers: Referrer,
    key: String,
    version: u64,
}

/// An image that is to be created.
pub(crate) struct Draft {
    name: ImageName,
    image: ImageDocument,
    snapshot: SnapshotDocument,
    source: Option<(ImageName, u64)>,
    /// The count of lost peers before the image's content was stored, if it has content.
    losses: Option<u64>,
}

impl Draft {
    pub(crate) fn new(
        name: &ImageName,
        geometry: Geometry,
        policy: StoragePolicy,
        first: &FirstSnapshot,
    ) -> Result<Draft> {
        let random = sys::random().map_err(|e| Error::io("reading", "/dev/urandom".as_ref(), e))?;
        let time = now();
        let image = ImageDocument {
            id: MirrorId::from_bytes(random),
            size: geometry.size(),
            chunk_size: geometry.chunk_size(),
            created: time,
            origin: None,
            redundancy: policy.redundancy,
            compression: policy.compression,
            next_number: FIRST + 1,
            fence: 0,
            writer: None,
        };
        let snapshot = SnapshotDocument {
            parent: None,
            root: first.root.0,
            time,
            label: None,
            state: first.state,
            consistency: first.consistency,
            dirty_bytes: first.dirty_bytes,
            stored_bytes: first.stored_bytes,
            sent_bytes: first.sent_bytes,
            saved_bytes: first.saved_bytes,
            pause_us: 0,
            reason: None,
            mirror: None,
            record: None,
        };
        Ok(Draft { name: name.clone(), image, snapshot, source: None, losses: None })
    }

    /// Notes the count of lost peers before the image's content was stored.
    pub(crate) fn since(self, losses: u64) -> Draft {
        Draft { losses: self.snapshot.root.map(|_| losses), ..self }
    }

    /// An image whose first snapshot has the content of a snapshot of another image.
    pub(crate) fn clone_of(source: &Snapshot, name: &ImageName) -> Result<Draft> {
        source.require_content()?;
        let first = FirstSnapshot {
            root: source.root,
            // A clone of a snapshot that is only available is itself only available.
            state: source.state,
            consistency: source.consistency,
            dirty_bytes: 0,
            stored_bytes: 0,
            sent_bytes: 0,
            saved_bytes: 0,
        };
        let mut draft = Draft::new(name, source.geometry, source.policy, &first)?;
        draft.image.origin = Some(source.name().to_string());
        draft.source = Some((source.image.clone(), source.number));
        Ok(draft)
    }

    pub(crate) fn record(&self) -> Record {
        Record::new(&self.name, &self.image, FIRST, Some(self.snapshot.clone()))
    }

    /// The record that says that the image was not created.
    pub(crate) fn removal(&self) -> Record {
        Record::new(&self.name, &self.image, 0, None)
    }
}

impl Catalog {
    /// All images, by name.
    pub fn images(&self) -> Result<Vec<Image>> {
        let view = self.read(&[Query::prefix(IMAGES), Query::prefix(SNAPSHOTS)])?;
        let all = view.under::<ImageDocument>(IMAGES)?.into_iter();
        all.map(|(name, document)| {
            let name = name.parse()?;
            document.image(&name, &snapshots(&view, &name)?)
        })
        .collect()
    }

    /// The content that snapshots and mirrors refer to, by storage policy.
    pub(crate) fn roots(&self) -> Result<HashMap<StoragePolicy, Vec<Referrer>>> {
        let view = self.read(&[IMAGES, SNAPSHOTS, MIRRORS].map(Query::prefix))?;
        let mut all: HashMap<StoragePolicy, Vec<Referrer>> = HashMap::new();
        let images = view.under::<ImageDocument>(IMAGES)?;
        for (name, image) in &images {
            let geometry = image.geometry()?;
            let known = snapshots(&view, &name.parse()?)?.into_iter();
            let known = known.filter(|(_, one)| one.state.has_content());
            let known = known.map(|(_, one)| Referrer::snapshot(geometry, &one));
            all.entry(image.policy()).or_default().extend(known);
        }
        // A mirror keeps its parent's content, even if the parent snapshot was removed.
        let images: HashMap<_, _> = images.into_iter().collect();
        for (_, mirror) in view.under::<MirrorDocument>(MIRRORS)? {
            if let Some(image) = images.get(mirror.image.as_str()) {
                let (geometry, root) = (image.geometry()?, Root(mirror.root));
                let referrer = Referrer { geometry, root, record: None };
                all.entry(image.policy()).or_default().push(referrer);
            }
        }
        Ok(all)
    }

    /// The snapshots that are *available*: published, perhaps without full redundancy.
    pub(crate) fn available(&self) -> Result<Vec<Available>> {
        let view = self.read(&[IMAGES, SNAPSHOTS].map(Query::prefix))?;
        let mut found = Vec::new();
        for (name, image) in view.under::<ImageDocument>(IMAGES)? {
            let name: ImageName = name.parse()?;
            let (policy, geometry) = (image.policy(), image.geometry()?);
            let all = snapshots(&view, &name)?.into_iter();
            let available = all.filter(|(_, one)| one.state == SnapshotState::Available);
            found.extend(available.map(|(number, one)| {
                let key = snapshot_key(&name, number);
                let version = view.version(&key);
                Available { policy, refers: Referrer::snapshot(geometry, &one), key, version }
            }));
        }
        Ok(found)
    }

    /// Makes an available snapshot stable. Leaves it alone if it was removed or has changed since
    /// it was read: its key may belong to another snapshot.
    pub(crate) fn promote(&self, available: &Available) -> Result<()> {
        let Available { key, version, .. } = available;
        self.change(&[Query::key(key)], |view| {
            let change = match view.get::<SnapshotDocument>(key)? {
                Some(one) if view.version(key) == *version => {
                    let stable = SnapshotDocument { state: SnapshotState::Stable, ..one };
                    Change::default().put(key, &stable)
                }
                _ => Change::default(),
            };
            Ok((change, ()))
        })
    }

    /// One image.
    pub fn image(&self, name: &ImageName) -> Result<Image> {
        let view = self.read(&with_snapshots(name))?;
        image(&view, name)?.image(name, &snapshots(&view, name)?)
    }

    /// The snapshots of an image, oldest first, in any state.
    pub fn snapshots(&self, name: &ImageName) -> Result<Vec<Snapshot>> {
        let view = self.read(&with_snapshots(name))?;
        let document = image(&view, name)?;
        let all = snapshots(&view, name)?.into_iter();
        all.map(|(number, one)| one.snapshot(name, &document, number)).collect()
    }

    /// The snapshot with this name. Without a selector it is the newest one with content. A snapshot that is
    /// named may be pending or failed, so callers that need content ask
    /// [`Snapshot::require_content`].
    pub fn resolve(&self, name: &SnapshotRef) -> Result<Snapshot> {
        let queries = match name.selector {
            Selector::Number(number) => {
                let key = snapshot_key(&name.image, number);
                [Query::Key(image_key(&name.image)), Query::Key(key)]
            }
            _ => with_snapshots(&name.image),
        };
        resolve(&self.read(&queries)?, name)
    }

    /// Fails if there is an image with the name of the draft.
    pub(crate) fn check_free(&self, draft: &Draft) -> Result<()> {
        let key = image_key(&draft.name);
        match self.read(&[Query::key(&key)])?.version(&key) {
            0 => Ok(()),
            _ => Err(Error::ImageExists { name: draft.name.to_string() }),
        }
    }

    /// Creates the image of a draft. `record` is the name of its first snapshot's record. Fails if
    /// the image is a clone and its source was removed.
    pub(crate) fn insert(&self, draft: &Draft, record: Option<BlobId>) -> Result<Snapshot> {
        let Draft { name, image, snapshot, source, .. } = draft;
        let mut queries = vec![Query::Key(image_key(name)), Query::key(LOSSES)];
        if let Some((image, number)) = source {
            queries.push(Query::Key(snapshot_key(image, *number)));
        }
        self.change(&queries, |view| {
            if view.version(&image_key(name)) != 0 {
                return Err(Error::ImageExists { name: name.to_string() });
            }
            if let Some((image, number)) = source
                && view.version(&snapshot_key(image, *number)) == 0
            {
                let name = SnapshotRef::number(image, *number).to_string();
                return Err(Error::NoSnapshot { name });
            }
            let mut snapshot = SnapshotDocument { record, ..snapshot.clone() };
            let losses = losses(view)?;
            if draft.losses.is_some_and(|before| before != losses) {
                // A repair before this moment did not know the blobs that the lost peer held.
                snapshot.state = SnapshotState::Available;
            }
            let change = Change::default()
                .put(image_key(name), image)
                .put(snapshot_key(name, FIRST), &snapshot);
            Ok((change, snapshot.snapshot(name, image, FIRST)?))
        })
    }

    /// The count of lost peers.
    pub(crate) fn losses(&self) -> Result<u64> {
        losses(&self.read(&[Query::key(LOSSES)])?)
    }

    /// Removes a snapshot. Also returns the record of the removal.
    pub(crate) fn remove_snapshot(&self, name: &SnapshotRef) -> Result<(Snapshot, Record)> {
        let observer = Process::current()?;
        let queries = [
            Query::Key(image_key(&name.image)),
            Query::Prefix(snapshots_of(&name.image)),
            Query::Key(lease_key(&name.image)),
        ];
        self.change(&queries, |view| {
            let document = image(view, &name.image)?;
            let snapshot = resolve(view, name)?;
            match snapshot.state {
                SnapshotState::Pending => {
                    // A live writer is about to publish it.
                    if let Some(lease) = live_lease(view, &name.image, &observer)? {
                        return Err(lease.conflict(&name.image));
                    }
                }
                SnapshotState::Stable | SnapshotState::Available => {
                    let mut others = snapshots(view, &name.image)?;
                    others.retain(|(number, _)| *number != snapshot.number);
                    if newest(&others).is_none() {
                        return Err(Error::OnlyStable { name: snapshot.name().to_string() });
                    }
                }
                SnapshotState::Failed => {}
            }
            let key = snapshot_key(&name.image, snapshot.number);
            // A writer whose lease has expired may be publishing the snapshot.
            let relies_on = vec![(key.clone(), view.version(&key))];
            // The image is written, so that two processes that remove the last two snapshots
            // conflict.
            let change = Change { relies_on, ..Change::default() }
                .put(image_key(&name.image), &document)
                .remove(Query::Key(key));
            let label = snapshot.label.as_ref().filter(|_| snapshot.state != SnapshotState::Failed);
            let change = match label {
                Some(label) => change.remove(Query::Key(label_key(&name.image, label))),
                None => change,
            };
            let record = Record::new(&name.image, &document, snapshot.number, None);
            Ok((change, (snapshot, record)))
        })
    }

    /// Removes an image with its snapshots and mirrors. Returns the record of the removal.
    pub(crate) fn remove_image(&self, name: &ImageName, force: bool) -> Result<Record> {
        let observer = Process::current()?;
        let queries = [
            Query::Key(image_key(name)),
            Query::Key(lease_key(name)),
            Query::prefix(MIRRORS),
            Query::prefix(LEASES),
        ];
        self.change(&queries, |view| {
            let document = image(view, name)?;
            if let Some(lease) = live_lease(view, name, &observer)? {
                return Err(lease.conflict(name));
            }
            let mut users = view.under::<MirrorDocument>(MIRRORS)?;
            users.retain(|(_, mirror)| mirror.image == *name);
            if let Some((id, mirror)) = users.first().filter(|_| !force) {
                return Err(Error::Referenced {
                    image: name.to_string(),
                    mirror: id.clone(),
                    host: mirror.host.clone(),
                    path: mirror.path.clone(),
                });
            }
            let mut change = Change::default()
                .remove(Query::Key(image_key(name)))
                .remove(Query::Key(lease_key(name)))
                .remove(Query::Prefix(snapshots_of(name)))
                .remove(Query::Prefix(labels_of(name)));
            for (id, _) in users {
                change = change.remove(Query::Key(mirror_key(&id.parse()?)));
            }
            // Number 0 stands for the whole image.
            Ok((change, Record::new(name, &document, 0, None)))
        })
    }
}

fn with_snapshots(name: &ImageName) -> [Query; 2] {
    [Query::Key(image_key(name)), Query::Prefix(snapshots_of(name))]
}

/// The snapshot with this name. The view has the image and all its snapshots, or at least the
/// snapshot with the selected number.
fn resolve(view: &View, name: &SnapshotRef) -> Result<Snapshot> {
    let document = image(view, &name.image)?;
    let all = snapshots(view, &name.image)?;
    let wanted = match &name.selector {
        Selector::Number(number) => Some(*number),
        Selector::Newest => newest(&all),
        // Several failed snapshots may have the label. A snapshot that has not failed comes first.
        Selector::Label(label) => {
            let named = all.iter().filter(|(_, one)| one.label.as_ref() == Some(label));
            named
                .max_by_key(|(number, one)| (one.state != SnapshotState::Failed, *number))
                .map(|(number, _)| *number)
        }
    };
    let found = all.into_iter().find(|(number, _)| Some(*number) == wanted);
    let (number, one) = found.ok_or_else(|| Error::NoSnapshot { name: name.to_string() })?;
    one.snapshot(&name.image, &document, number)
}
