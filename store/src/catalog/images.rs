//! Creating and listing images and snapshots.

use std::collections::HashMap;

use super::Catalog;
use super::documents::{
    AVAILABLE, AvailableDocument, IMAGES, ImageDocument, MIRRORS, MirrorDocument, SNAPSHOTS,
    SnapshotDocument, available_key, image_key, newest, number_of, snapshot_key, snapshots,
    snapshots_of,
};
use super::records::Record;
use crate::clock::now;
use crate::cluster::membership::{ClusterEpoch, LOSSES};
use crate::documents::{Change, Query, View};
use crate::encoding::StoragePolicy;
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::id::{BlobId, ImageId};
use crate::name::{ImageName, Selector, SnapshotRef};
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
    /// The key of its entry in the index of available snapshots.
    index: String,
}

/// An image that is to be created.
pub(crate) struct Draft {
    name: ImageName,
    image: ImageDocument,
    snapshot: SnapshotDocument,
    /// The snapshot that it is a clone of, if it is one.
    source: Option<Snapshot>,
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
            id: ImageId::from_bytes(random),
            size: geometry.size(),
            chunk_size: geometry.chunk_size(),
            created: time,
            origin: None,
            redundancy: policy.redundancy,
            compression: policy.compression,
            next_number: FIRST + 1,
            fence: 0,
            writer: None,
            removing: false,
            restored: 0,
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
            is_parent_available: false,
            record: None,
        };
        Ok(Draft { name: name.clone(), image, snapshot, source: None })
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
        draft.source = Some(source.clone());
        Ok(draft)
    }

    pub(crate) fn record(&self, epoch: ClusterEpoch) -> Record {
        Record::new(&self.name, &self.image, FIRST, self.snapshot.clone(), epoch)
    }

    /// The record that says that the image was not created.
    pub(crate) fn removal(&self) -> Record {
        Record::removal(&self.name, &self.image, 0)
    }
}

impl Catalog {
    /// All images, by name.
    pub fn images(&self) -> Result<Vec<Image>> {
        let view = self.read(&[Query::prefix(IMAGES), Query::prefix(SNAPSHOTS)])?;
        let all = view.under::<ImageDocument>(IMAGES)?.into_iter();
        all.map(|(name, document)| document.image(&name.parse()?, &snapshots(&view, &document.id)?))
            .collect()
    }

    /// The content that snapshots and mirrors refer to, by storage policy.
    pub(crate) fn roots(&self) -> Result<HashMap<StoragePolicy, Vec<Referrer>>> {
        let view = self.read(&[IMAGES, SNAPSHOTS, MIRRORS].map(Query::prefix))?;
        let mut all: HashMap<StoragePolicy, Vec<Referrer>> = HashMap::new();
        let images = view.under::<ImageDocument>(IMAGES)?.into_iter();
        let images: HashMap<_, _> = images.map(|(_, image)| (image.id, image)).collect();
        for (id, image) in &images {
            let geometry = image.geometry()?;
            let known = snapshots(&view, id)?.into_iter();
            let known = known.filter(|(_, one)| one.state.has_content());
            let known = known.map(|(_, one)| Referrer::snapshot(geometry, &one));
            all.entry(image.policy()).or_default().extend(known);
        }
        // A mirror keeps its parent's content, even if the parent snapshot was removed.
        for (_, mirror) in view.under::<MirrorDocument>(MIRRORS)? {
            if let Some(image) = images.get(&mirror.image_id) {
                let (geometry, root) = (image.geometry()?, Root(mirror.root));
                let referrer = Referrer { geometry, root, record: None };
                all.entry(image.policy()).or_default().push(referrer);
            }
        }
        Ok(all)
    }

    /// Whether a snapshot is *available*: published, perhaps without full redundancy.
    pub(crate) fn has_available(&self) -> Result<bool> {
        Ok(!self.available()?.is_empty())
    }

    /// The snapshots that are *available*.
    pub(crate) fn available(&self) -> Result<Vec<Available>> {
        let index = self.read(&[Query::prefix(AVAILABLE)])?;
        let mut found = Vec::new();
        for (key, entry) in index.under::<AvailableDocument>(AVAILABLE)? {
            let (id, number) = parse_available(&key)?;
            let snapshot_key = snapshot_key(&id, number);
            let keys = [image_key(&entry.image), snapshot_key.clone()];
            let view = self.read(&keys.map(Query::Key))?;
            let image = view.get::<ImageDocument>(&image_key(&entry.image))?;
            let snapshot = view.get::<SnapshotDocument>(&snapshot_key)?;
            // The snapshot may have been removed since the index was read.
            if let (Some(image), Some(one)) = (image.filter(|image| image.id == id), snapshot)
                && one.state == SnapshotState::Available
            {
                found.push(Available {
                    policy: image.policy(),
                    refers: Referrer::snapshot(image.geometry()?, &one),
                    version: view.version(&snapshot_key),
                    key: snapshot_key,
                    index: available_key(&id, number),
                });
            }
        }
        Ok(found)
    }

    /// Makes an available snapshot stable. Leaves it alone if it was removed or has changed since
    /// it was read.
    pub(crate) fn promote(&self, available: &Available) -> Result<()> {
        let Available { key, version, index, .. } = available;
        self.change(&[Query::key(key)], |view| {
            let change = match view.get::<SnapshotDocument>(key)? {
                Some(one) if view.version(key) == *version => {
                    let stable = SnapshotDocument { state: SnapshotState::Stable, ..one };
                    Change::default().put(key, &stable).remove(Query::key(index))
                }
                _ => Change::default(),
            };
            Ok((change, ()))
        })
    }

    /// One image.
    pub fn image(&self, name: &ImageName) -> Result<Image> {
        let (view, document) = self.read_image(name, all_snapshots)?;
        document.image(name, &snapshots(&view, &document.id)?)
    }

    /// The snapshots of an image, oldest first, in any state.
    pub fn snapshots(&self, name: &ImageName) -> Result<Vec<Snapshot>> {
        let (view, document) = self.read_image(name, all_snapshots)?;
        let all = snapshots(&view, &document.id)?.into_iter();
        all.map(|(number, one)| one.snapshot(name, &document, number)).collect()
    }

    /// The snapshot with this name. Without a selector it is the newest one with content. A
    /// snapshot that is named may be pending or failed, so callers that need content ask
    /// [`Snapshot::require_content`].
    pub fn resolve(&self, name: &SnapshotRef) -> Result<Snapshot> {
        let (view, document) = self.read_image(&name.image, |id| match name.selector {
            Selector::Number(number) => vec![Query::Key(snapshot_key(id, number))],
            _ => all_snapshots(id),
        })?;
        resolve(&view, &document, name)
    }

    /// Fails if there is an image with the name of the draft.
    pub(crate) fn check_free(&self, draft: &Draft) -> Result<()> {
        let key = image_key(&draft.name);
        check_free(&self.read(&[Query::key(&key)])?, &draft.name)
    }

    /// Creates the image of a draft. `record` is the name of its first snapshot's record. Returns
    /// `None` if the cluster is in another epoch than the one in which the content was stored.
    /// Fails if the image is a clone and its source was removed.
    pub(crate) fn insert(
        &self,
        draft: &Draft,
        epoch: ClusterEpoch,
        record: Option<BlobId>,
    ) -> Result<Option<Snapshot>> {
        let Draft { name, image, snapshot, source } = draft;
        let mut queries = vec![Query::Key(image_key(name)), Query::key(LOSSES)];
        let source_key = source.as_ref().map(|one| snapshot_key(&one.image_id, one.number));
        queries.extend(source_key.iter().cloned().map(Query::Key));
        self.change(&queries, |view| {
            check_free(view, name)?;
            if let (Some(source), Some(key)) = (source, &source_key) {
                let found = view.get::<SnapshotDocument>(key)?;
                if found.is_none_or(|one| !one.state.has_content()) {
                    return Err(Error::NoSnapshot { name: source.name().to_string() });
                }
            }
            if ClusterEpoch::of(view)? != epoch {
                return Ok((Change::default(), None));
            }
            let snapshot = SnapshotDocument { record, ..snapshot.clone() };
            let mut change = Change::default()
                .put(image_key(name), image)
                .put(snapshot_key(&image.id, FIRST), &snapshot);
            if snapshot.state == SnapshotState::Available {
                let entry = AvailableDocument { image: name.clone() };
                change = change.put(available_key(&image.id, FIRST), &entry);
            }
            Ok((change, Some(snapshot.snapshot(name, image, FIRST)?)))
        })
    }

    /// The current epoch of the cluster.
    pub(crate) fn cluster_epoch(&self) -> Result<ClusterEpoch> {
        ClusterEpoch::of(&self.read(&[Query::key(LOSSES)])?)
    }
}

pub(super) fn all_snapshots(image: &ImageId) -> Vec<Query> {
    vec![Query::Prefix(snapshots_of(image))]
}

fn check_free(view: &View, name: &ImageName) -> Result<()> {
    match view.get::<ImageDocument>(&image_key(name))? {
        None => Ok(()),
        Some(image) if image.removing => Err(Error::BeingRemoved { name: name.to_string() }),
        Some(_) => Err(Error::ImageExists { name: name.to_string() }),
    }
}

/// The image and the number of an entry of the index of available snapshots.
fn parse_available(key: &str) -> Result<(ImageId, u64)> {
    let parts = key.split_once('/');
    let (id, number) = parts.ok_or_else(|| {
        Error::corrupt("the catalog", format!("'{AVAILABLE}{key}' names no snapshot"))
    })?;
    Ok((id.parse()?, number_of(number)?))
}

/// The snapshot with this name. The view has all snapshots of the image, or at least the one with
/// the selected number.
pub(super) fn resolve(
    view: &View,
    document: &ImageDocument,
    name: &SnapshotRef,
) -> Result<Snapshot> {
    let all = snapshots(view, &document.id)?;
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
    one.snapshot(&name.image, document, number)
}
