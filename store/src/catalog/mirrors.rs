//! The mirrors that refer to images, and the lease that makes one of them an image's writer.
//!
//! A lease is live until it expires, unless its process is seen to be dead. The same mirror may
//! also show that it has the lock of the lease's process, which has then ended. Every acquisition
//! raises the image's fence, and every operation of a writer succeeds only while the image's fence
//! is the writer's. So a writer that was replaced learns that before it changes anything. A writer
//! whose lease has expired continues as long as no other mirror has acquired the lease.

use super::Catalog;
use super::documents::{
    ImageDocument, LEASES, LeaseDocument, MIRRORS, MirrorDocument, SnapshotDocument, image,
    image_key, lease_key, live_lease, mirror_key, put_mirror, snapshot_key,
};
use super::holder::Holder;
use crate::clock::now;
use crate::documents::{Change, Query, View};
use crate::error::{Error, Result};
use crate::id::MirrorId;
use crate::name::SnapshotRef;
use crate::process::Process;
use crate::snapshot::{MirrorOwner, MirrorParent, MirrorRecord, Mode, Snapshot, SnapshotState};
use crate::tree::Root;

/// How long a lease lasts without a renewal, in seconds.
pub const LEASE_SECONDS: u64 = 60;

impl Catalog {
    /// All mirrors, by image.
    pub fn mirrors(&self) -> Result<Vec<MirrorRecord>> {
        let observer = Process::current()?;
        let view = self.read(&[Query::prefix(MIRRORS), Query::prefix(LEASES)])?;
        let all = view.under::<MirrorDocument>(MIRRORS)?.into_iter();
        let mut all: Vec<_> = all
            .map(|(id, mirror)| {
                let lease = view.get(&lease_key(&mirror.image_id))?;
                Ok(mirror.record(id.parse()?, lease, &observer))
            })
            .collect::<Result<_>>()?;
        all.sort_by(|one, other| {
            (&one.image, one.attached, one.id).cmp(&(&other.image, other.attached, other.id))
        });
        Ok(all)
    }

    /// What is known about a mirror.
    pub fn mirror(&self, id: &MirrorId) -> Result<Option<MirrorRecord>> {
        let view = self.read(&[Query::Key(mirror_key(id))])?;
        let Some(mirror) = view.get::<MirrorDocument>(&mirror_key(id))? else { return Ok(None) };
        let key = lease_key(&mirror.image_id);
        let lease = self.read(&[Query::key(&key)])?.get(&key)?;
        Ok(Some(mirror.record(*id, lease, &Process::current()?)))
    }

    /// Records the mirror, and acquires the lease if it may write. Returns the holder, and the
    /// number and the content of the mirror's parent.
    ///
    /// A mirror that the catalog does not know continues from `parent`, if that is given and the
    /// catalog has it. Otherwise it starts from the snapshot.
    pub(crate) fn attach(
        &self,
        owner: &MirrorOwner,
        snapshot: &Snapshot,
        mode: Mode,
        parent: Option<&MirrorParent>,
    ) -> Result<(Holder, u64, Root)> {
        let process = Process::on_this_host(owner.pid)?;
        if process.boot_id != owner.boot_id {
            return Err(Error::BadArgument(
                "a mirror can only be attached by a process of its own host".into(),
            ));
        }
        let (name, id) = (&snapshot.image, &snapshot.image_id);
        let queries = attach_queries(owner, snapshot, parent);
        self.change(&queries, |view| {
            let mut document = image(view, name)?;
            if document.id != *id {
                return Err(Error::NoSnapshot { name: snapshot.name().to_string() });
            }
            if let Some(lease) = live_lease(view, id, &process)?
                && (mode == Mode::ReadWrite || lease.mirror == owner.id)
                && !lease.passes_to(owner, &process)
            {
                return Err(lease.conflict(name));
            }
            let mirror = attached_mirror(view, owner, snapshot, mode, parent)?;
            let (parent, root) = (mirror.parent, Root(mirror.root));
            let mut change = put_mirror(Change::default(), &owner.id, &mirror);
            let fence = match mode {
                Mode::ReadWrite => {
                    // Writers that were attached before the catalog was rebuilt have lower fences.
                    document.fence = document.fence.max(document.restored << 24) + 1;
                    document.writer = Some(owner.id);
                    let lease = LeaseDocument::new(owner, process.clone());
                    change = change.put_for(LEASE_SECONDS as u32, lease_key(id), &lease);
                    Some(document.fence)
                }
                Mode::ReadOnly if document.writer == Some(owner.id) => {
                    document.writer = None;
                    change = change.remove(Query::Key(lease_key(id)));
                    None
                }
                Mode::ReadOnly => None,
            };
            let holder = Holder {
                owner: owner.clone(),
                process: process.clone(),
                image: document.id,
                image_name: name.clone(),
                fence,
                restored: document.restored,
            };
            // The image is written in any case, so that a concurrent removal of the image
            // conflicts.
            Ok((change.put(image_key(name), &document), (holder, parent, root)))
        })
    }
}

/// A mirror and the image that it may be the writer of.
pub(super) struct Holding<'a> {
    pub(super) id: &'a MirrorId,
    pub(super) name: &'a crate::name::ImageName,
    pub(super) document: Option<ImageDocument>,
}

/// Adds to a change that the mirror is no longer the image's writer, if it was.
pub(super) fn without_writer(change: Change, holding: &Holding<'_>) -> Change {
    match &holding.document {
        Some(document) if document.writer == Some(*holding.id) => {
            let document = ImageDocument { writer: None, ..document.clone() };
            change
                .put(image_key(holding.name), &document)
                .remove(Query::Key(lease_key(&document.id)))
        }
        _ => change,
    }
}

/// The documents that an attachment relies on.
pub(super) fn attach_queries(
    owner: &MirrorOwner,
    snapshot: &Snapshot,
    parent: Option<&MirrorParent>,
) -> Vec<Query> {
    let (name, id) = (&snapshot.image, &snapshot.image_id);
    let start = parent.map_or(snapshot.number, |parent| parent.number);
    let keys = [image_key(name), snapshot_key(id, start), mirror_key(&owner.id), lease_key(id)];
    keys.map(Query::Key).into()
}

/// The mirror's document after it is attached. A mirror that was attached before keeps its parent,
/// whatever snapshot is requested: its local data is derived from that parent.
///
/// The catalog may have a later parent than the mirror's own files: the process may have died
/// between a publication and its record in these files. Such a snapshot is one that the files have
/// announced before, and each number is given out only once. So a later parent that the files have
/// not announced was published by another copy of the mirror.
pub(super) fn attached_mirror(
    view: &View,
    owner: &MirrorOwner,
    snapshot: &Snapshot,
    mode: Mode,
    parent: Option<&MirrorParent>,
) -> Result<MirrorDocument> {
    let known = view.get::<MirrorDocument>(&mirror_key(&owner.id))?;
    if let Some(known) = known {
        if known.image_id != snapshot.image_id {
            return Err(Error::BadArgument(format!(
                "mirror {} belongs to image '{}' ({}), not to '{}' ({}); use another directory",
                owner.id, known.image, known.image_id, snapshot.image, snapshot.image_id
            )));
        }
        let (host, path, is_ephemeral) =
            (owner.host.clone(), owner.path.clone(), owner.is_ephemeral);
        let (attached, seen) = (now(), now());
        let known = MirrorDocument { host, path, mode, attached, seen, is_ephemeral, ..known };
        return match parent {
            // The catalog was rebuilt without the records of the mirror's last snapshots.
            Some(parent) if parent.number > known.parent => {
                let found = own_parent(view, snapshot, parent)?;
                Ok(MirrorDocument {
                    parent: parent.number,
                    root: parent.root.0,
                    is_parent_available: found.state == SnapshotState::Available,
                    // A snapshot of the catalog.
                    is_parent_unverified: false,
                    ..known
                })
            }
            // Another copy of the mirror has published this snapshot. Local data that is older than
            // the snapshot would hide the snapshot's content.
            Some(parent) if parent.number.max(parent.announced) < known.parent => {
                let name = |number| SnapshotRef::number(&snapshot.image, number).to_string();
                Err(Error::OlderMirror {
                    path: owner.path.clone(),
                    continued: name(parent.number),
                    published: name(known.parent),
                })
            }
            _ => Ok(known),
        };
    }
    // The snapshot may have been removed since it was looked up. Only content that the catalog
    // refers to is safe from garbage collection.
    let start = parent.map_or(snapshot.number, |parent| parent.number);
    let name = SnapshotRef::number(&snapshot.image, start).to_string();
    let found = view.get::<SnapshotDocument>(&snapshot_key(&snapshot.image_id, start))?;
    let document = image(view, &snapshot.image)?;
    let mut announced = 0;
    if let Some(parent) = parent {
        own_parent(view, snapshot, parent).map_err(|error| match owner.is_ephemeral {
            true => Error::ReferenceEnded { mirror: owner.id.to_string(), parent: name.clone() },
            false => error,
        })?;
        // The catalog knew the mirror before. What it announced then and is not there was removed.
        announced = document.index.highest;
    }
    let found = found.ok_or(Error::NoSnapshot { name })?;
    let found = found.snapshot(&snapshot.image, &document, start)?;
    found.require_content()?;
    Ok(MirrorDocument {
        image: snapshot.image.clone(),
        image_id: snapshot.image_id,
        host: owner.host.clone(),
        path: owner.path.clone(),
        mode,
        parent: found.number,
        root: found.root.0,
        is_parent_available: found.state == SnapshotState::Available,
        is_parent_unverified: false,
        attached: now(),
        announced,
        reserved: 0..0,
        reservation: 0,
        storing_since: None,
        is_ephemeral: owner.is_ephemeral,
        seen: now(),
    })
}

/// The snapshot that a mirror's own files name as its parent. Fails if the catalog does not have it
/// with the same content.
fn own_parent(view: &View, snapshot: &Snapshot, parent: &MirrorParent) -> Result<SnapshotDocument> {
    let found = view.get::<SnapshotDocument>(&snapshot_key(&snapshot.image_id, parent.number))?;
    let is_same = |one: &SnapshotDocument| {
        one.state.has_content()
            && Root(one.root) == parent.root
            && parent.image == snapshot.image_id
    };
    let name = || SnapshotRef::number(&snapshot.image, parent.number).to_string();
    found.filter(is_same).ok_or_else(|| Error::UnknownParent { name: name() })
}
