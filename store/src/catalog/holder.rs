//! An attached mirror, and what its operations check before they change anything.

use super::collection::CommitBasis;
use super::documents::{
    ImageDocument, MirrorDocument, SnapshotDocument, image_key, mirror_key, snapshot_key,
};
use crate::clock::now;
use crate::cluster::membership::{ClusterEpoch, LOSSES};
use crate::documents::{Query, View};
use crate::error::{Error, Result};
use crate::id::{BlobId, ImageId, MirrorId};
use crate::name::{ImageName, SnapshotRef};
use crate::process::Process;
use crate::snapshot::{MirrorOwner, Mode, SnapshotState};
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
    /// What protects its blobs.
    pub(crate) basis: CommitBasis,
    /// The content of the mirror's parent, from which unchanged parts come; `None` if all content was
    /// put.
    pub(crate) base: Option<Root>,
    /// The name of the snapshot's record, if it has one.
    pub(crate) record: Option<BlobId>,
}

impl Published {
    /// The document of an announced snapshot after its publication.
    pub(super) fn apply(
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

    pub(crate) fn is_ephemeral(&self) -> bool {
        self.owner.is_ephemeral
    }

    pub(crate) fn may_write(&self) -> bool {
        self.fence.is_some()
    }

    pub(super) fn image_key(&self) -> String {
        image_key(&self.image_name)
    }

    pub(super) fn snapshot_key(&self, number: u64) -> String {
        snapshot_key(&self.image, number)
    }

    /// The image, if this mirror is still its writer.
    pub(super) fn check(&self, view: &View) -> Result<ImageDocument> {
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
    pub(super) fn is_free_after_rebuild(&self, image: &ImageDocument, fence: u64) -> bool {
        image.restored > self.restored && image.writer.is_none() && image.fence <= fence
    }

    /// The snapshot with this number, if it exists.
    pub(super) fn find(&self, view: &View, number: u64) -> Result<Option<SnapshotDocument>> {
        view.get(&self.snapshot_key(number))
    }

    /// The snapshot with this number, of any mirror. Fails if it does not exist. After a rebuild of
    /// the catalog the error says that the mirror has to announce the snapshot again.
    pub(super) fn existing(
        &self,
        view: &View,
        image: &ImageDocument,
        number: u64,
    ) -> Result<SnapshotDocument> {
        self.find(view, number)?.ok_or_else(|| match image.restored > self.restored {
            // Snapshots that were only announced are in no record.
            true => self.rebuilt(),
            false => self.no_snapshot(number),
        })
    }

    pub(super) fn no_snapshot(&self, number: u64) -> Error {
        Error::NoSnapshot { name: SnapshotRef::number(&self.image_name, number).to_string() }
    }

    /// The error while the mirror has not announced its state to a rebuilt catalog.
    pub(super) fn rebuilt(&self) -> Error {
        let (image, mirror) = (self.image_name.to_string(), self.owner.id.to_string());
        Error::CatalogRebuilt { image, mirror }
    }

    /// Returns the snapshot if this mirror announced it. Fails otherwise.
    pub(super) fn own(&self, snapshot: SnapshotDocument, number: u64) -> Result<SnapshotDocument> {
        if snapshot.mirror != Some(self.owner.id) {
            let (image, selector) = (self.image_name.to_string(), number.to_string());
            return Err(Error::SnapshotExists { image, selector });
        }
        Ok(snapshot)
    }

    /// The document of a snapshot of this mirror after it is published. A snapshot that was
    /// published before does not change, except that it may become stable. Returns `None` if its basis
    /// is gone: if the cluster is in another epoch than the one in which the content was stored, or
    /// if the mirror's document does not protect the content any more.
    ///
    /// A snapshot whose parent is only *available* is at most *available*: unchanged blobs are the
    /// parent's. If the parent's document was removed, the state that the parent had when it became
    /// the parent counts.
    pub(super) fn published(
        &self,
        view: &View,
        number: u64,
        before: SnapshotDocument,
        published: &Published,
    ) -> Result<Option<SnapshotDocument>> {
        let mirror = self.mirror(view)?;
        let CommitBasis { epoch, collection } = published.basis;
        let has_base = published.base.is_none_or(|base| mirror.root == base.0);
        let has_base = has_base && !mirror.is_parent_unverified;
        let is_protected = mirror.storing_since == Some(collection) && has_base;
        // What is published protects itself.
        let is_protected = is_protected || before.state != SnapshotState::Pending;
        if ClusterEpoch::of(view)? != epoch || !is_protected {
            return Ok(None);
        }
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
                    // A record that an edit has stored since has more than the published one.
                    record: match before.edits {
                        0 => published.record.or(before.record),
                        _ => before.record,
                    },
                    ..before
                }))
            }
            (SnapshotState::Stable | SnapshotState::Available, _) if same => Ok(Some(before)),
            _ => Err(self.wrong_state(number, before)),
        }
    }

    pub(super) fn mirror(&self, view: &View) -> Result<MirrorDocument> {
        let mirror = view.get(&mirror_key(&self.owner.id))?;
        mirror.ok_or_else(|| match self.owner.is_ephemeral {
            true => {
                let (image, mirror) = (self.image_name.to_string(), self.owner.id.to_string());
                Error::Unreferenced { image, mirror }
            }
            false => Error::NoMirror { id: self.owner.id.to_string() },
        })
    }

    /// The document of this mirror, which the catalog does not have any more: it has expired, or was
    /// removed. Fails unless the catalog has the parent snapshot. It then had that all the time, so no
    /// collection has deleted its content.
    pub(super) fn mirror_again(
        &self,
        view: &View,
        image: &ImageDocument,
        (number, root): (u64, Root),
    ) -> Result<MirrorDocument> {
        let found = self.find(view, number)?;
        let is_same = |one: &SnapshotDocument| one.state.has_content() && one.root == root.0;
        let found = found.filter(is_same).ok_or_else(|| Error::ReferenceEnded {
            mirror: self.owner.id.to_string(),
            parent: SnapshotRef::number(&self.image_name, number).to_string(),
        })?;
        let mode = if self.may_write() { Mode::ReadWrite } else { Mode::ReadOnly };
        let is_parent_available = found.state == SnapshotState::Available;
        // A snapshot with a lower number that is not there was removed.
        let announced = image.index.highest;
        let document = self.document(mode, (number, root), is_parent_available);
        Ok(MirrorDocument { announced, ..document })
    }

    /// The mirror's document in a rebuilt catalog.
    pub(super) fn mirror_after_rebuild(
        &self,
        view: &View,
        parent: (u64, Root),
    ) -> Result<MirrorDocument> {
        // If the answer to a later publication was lost, the mirror publishes it again.
        let (number, Root(root)) = parent;
        let parent = self.find(view, number)?.filter(|one| one.root == root);
        let is_stable = parent.is_some_and(|one| one.state == SnapshotState::Stable);
        Ok(self.document(Mode::ReadWrite, (number, Root(root)), !is_stable))
    }

    /// A document of this mirror that knows nothing but its parent.
    fn document(
        &self,
        mode: Mode,
        (parent, root): (u64, Root),
        is_parent_available: bool,
    ) -> MirrorDocument {
        let MirrorOwner { host, path, is_ephemeral, .. } = self.owner.clone();
        let now = now();
        MirrorDocument {
            image: self.image_name.clone(),
            image_id: self.image,
            host,
            path,
            mode,
            parent,
            root: root.0,
            is_parent_available,
            is_parent_unverified: false,
            attached: now,
            announced: 0,
            reserved: 0..0,
            reservation: 0,
            storing_since: None,
            is_ephemeral,
            seen: now,
        }
    }

    /// The documents that an operation on a snapshot relies on.
    pub(super) fn queries(&self, number: u64) -> Vec<Query> {
        vec![
            Query::Key(self.image_key()),
            Query::Key(self.snapshot_key(number)),
            Query::Key(mirror_key(&self.owner.id)),
        ]
    }

    /// The documents that a publication relies on.
    pub(super) fn publish_queries(&self, number: u64, published: &Published) -> Vec<Query> {
        let mut queries = self.queries(number);
        queries.push(Query::Key(self.snapshot_key(published.parent)));
        queries.push(Query::key(LOSSES));
        queries
    }

    pub(super) fn wrong_state(&self, number: u64, snapshot: SnapshotDocument) -> Error {
        let name = SnapshotRef::number(&self.image_name, number).to_string();
        Error::WrongState { name, state: snapshot.state.as_str(), reason: snapshot.reason }
    }
}
