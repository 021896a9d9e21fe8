//! Making, listing and removing images and snapshots.

use super::documents::{
    IMAGES, ImageDocument, LEASES, MIRRORS, MirrorDocument, SNAPSHOTS, SnapshotDocument, image,
    image_key, label_key, labels_of, lease_key, live_lease, mirror_key, newest, snapshot_key,
    snapshots, snapshots_of,
};
use super::{Catalog, now};
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::id::MirrorId;
use crate::name::{ImageName, Selector, SnapshotRef};
use crate::names::{Change, View, Wanted};
use crate::process::Process;
use crate::snapshot::{Consistency, Image, Snapshot, SnapshotState};
use crate::sys;
use crate::tree::Root;

/// The number of an image's first snapshot.
const FIRST: u64 = 1;

/// The first snapshot of an image that is being made.
pub(crate) struct FirstSnapshot {
    pub(crate) root: Root,
    pub(crate) consistency: Consistency,
    pub(crate) dirty_bytes: u64,
    pub(crate) stored_bytes: u64,
}

impl Catalog {
    pub(crate) fn images(&self) -> Result<Vec<Image>> {
        let view = self.read(&[Wanted::prefix(IMAGES), Wanted::prefix(SNAPSHOTS)])?;
        let all = view.under::<ImageDocument>(IMAGES)?.into_iter();
        all.map(|(name, document)| {
            let name = name.parse()?;
            document.image(&name, &snapshots(&view, &name)?)
        })
        .collect()
    }

    pub(crate) fn image(&self, name: &ImageName) -> Result<Image> {
        let view = self.read(&with_snapshots(name))?;
        image(&view, name)?.image(name, &snapshots(&view, name)?)
    }

    pub(crate) fn snapshots(&self, name: &ImageName) -> Result<Vec<Snapshot>> {
        let view = self.read(&with_snapshots(name))?;
        let document = image(&view, name)?;
        let all = snapshots(&view, name)?.into_iter();
        all.map(|(number, one)| one.snapshot(name, &document, number)).collect()
    }

    pub(crate) fn resolve(&self, name: &SnapshotRef) -> Result<Snapshot> {
        let wanted = match name.selector {
            Selector::Number(number) => {
                let key = snapshot_key(&name.image, number);
                [Wanted::Key(image_key(&name.image)), Wanted::Key(key)]
            }
            _ => with_snapshots(&name.image),
        };
        resolve(&self.read(&wanted)?, name)
    }

    pub(crate) fn create_image(
        &self,
        name: &ImageName,
        geometry: Geometry,
        first: &FirstSnapshot,
    ) -> Result<Snapshot> {
        let id = new_id()?;
        self.change(&[Wanted::Key(image_key(name))], |view| {
            insert(view, Change::default(), name, id, geometry, None, first)
        })
    }

    pub(crate) fn clone_snapshot(
        &self,
        source: &SnapshotRef,
        name: &ImageName,
    ) -> Result<Snapshot> {
        let id = new_id()?;
        // The number, so that what the clone relies on is one document.
        let source = self.resolve(source)?;
        let wanted = [
            Wanted::Key(image_key(&source.image)),
            Wanted::Key(snapshot_key(&source.image, source.number)),
            Wanted::Key(image_key(name)),
        ];
        self.change(&wanted, |view| {
            let source = resolve(view, &source.name())?;
            source.require_content()?;
            let first = FirstSnapshot {
                root: source.root,
                consistency: source.consistency,
                dirty_bytes: 0,
                stored_bytes: 0,
            };
            let origin = Some(source.name().to_string());
            insert(view, Change::default(), name, id, source.geometry, origin, &first)
        })
    }

    pub(crate) fn remove_snapshot(&self, name: &SnapshotRef) -> Result<Snapshot> {
        let observer = Process::current()?;
        let wanted = [
            Wanted::Key(image_key(&name.image)),
            Wanted::Prefix(snapshots_of(&name.image)),
            Wanted::Key(lease_key(&name.image)),
        ];
        self.change(&wanted, |view| {
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
            // The image is written so that of two who remove the last two one begins again.
            let change = Change::default()
                .put(image_key(&name.image), &document)
                .remove(Wanted::Key(snapshot_key(&name.image, snapshot.number)));
            let label = snapshot.label.as_ref().filter(|_| snapshot.state != SnapshotState::Failed);
            let change = match label {
                Some(label) => change.remove(Wanted::Key(label_key(&name.image, label))),
                None => change,
            };
            Ok((change, snapshot))
        })
    }

    pub(crate) fn remove_image(&self, name: &ImageName, force: bool) -> Result<()> {
        let observer = Process::current()?;
        let wanted = [
            Wanted::Key(image_key(name)),
            Wanted::Key(lease_key(name)),
            Wanted::prefix(MIRRORS),
            Wanted::prefix(LEASES),
        ];
        self.change(&wanted, |view| {
            image(view, name)?;
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
                .remove(Wanted::Key(image_key(name)))
                .remove(Wanted::Key(lease_key(name)))
                .remove(Wanted::Prefix(snapshots_of(name)))
                .remove(Wanted::Prefix(labels_of(name)));
            for (id, _) in users {
                change = change.remove(Wanted::Key(mirror_key(&id.parse()?)));
            }
            Ok((change, ()))
        })
    }
}

fn with_snapshots(name: &ImageName) -> [Wanted; 2] {
    [Wanted::Key(image_key(name)), Wanted::Prefix(snapshots_of(name))]
}

/// The snapshot that people call this, in a view of the image and of all its snapshots, or of this one.
fn resolve(view: &View, name: &SnapshotRef) -> Result<Snapshot> {
    let document = image(view, &name.image)?;
    let all = snapshots(view, &name.image)?;
    let wanted = match &name.selector {
        Selector::Number(number) => Some(*number),
        Selector::Newest => newest(&all),
        // Several failed snapshots can have had the label: one that did not fail is meant, if any.
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

fn new_id() -> Result<MirrorId> {
    let random = sys::random();
    random.map(MirrorId::from_bytes).map_err(|e| Error::io("reading", "/dev/urandom".as_ref(), e))
}

/// Adds a new image to a change, unless the view has one of this name.
fn insert(
    view: &View,
    change: Change,
    name: &ImageName,
    id: MirrorId,
    geometry: Geometry,
    origin: Option<String>,
    first: &FirstSnapshot,
) -> Result<(Change, Snapshot)> {
    if view.version(&image_key(name)) != 0 {
        return Err(Error::ImageExists { name: name.to_string() });
    }
    let time = now();
    let document = ImageDocument {
        id,
        size: geometry.size(),
        chunk_size: geometry.chunk_size(),
        created: time,
        origin,
        next_number: FIRST + 1,
        fence: 0,
        writer: None,
    };
    let snapshot = SnapshotDocument {
        parent: None,
        root: first.root.0,
        time,
        label: None,
        state: SnapshotState::Stable,
        consistency: first.consistency,
        dirty_bytes: first.dirty_bytes,
        stored_bytes: first.stored_bytes,
        pause_us: 0,
        reason: None,
        mirror: None,
    };
    let change = change.put(image_key(name), &document).put(snapshot_key(name, FIRST), &snapshot);
    Ok((change, snapshot.snapshot(name, &document, FIRST)?))
}
