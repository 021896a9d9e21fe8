//! Creating and listing images and snapshots.

use std::collections::HashMap;
use std::ops::Range;

use super::Catalog;
use super::collection::{CommitBasis, commit_key, protects};
use super::documents::{
    AvailableDocument, DRAFTS, DraftDocument, IMAGES, ImageDocument, MIRRORS, MirrorDocument,
    SNAPSHOTS, SnapshotDocument, available_key, draft_key, image, image_key, number_of,
    snapshot_key, snapshots, snapshots_of,
};
use super::index::{Located, SnapshotIndex};
use super::records::Record;
use crate::clock::now;
use crate::cluster::membership::{ClusterEpoch, LOSSES};
use crate::documents::{Change, Query, View};
use crate::encoding::StoragePolicy;
use crate::error::{Error, Result};
use crate::geometry::{Geometry, MAX_SIZE};
use crate::id::{BlobId, ImageId, LeaseId};
use crate::metadata::Metadata;
use crate::name::{ImageName, SnapshotRef};
use crate::snapshot::{Consistency, Image, Snapshot, SnapshotState};
use crate::sys;
use crate::tree::Root;

/// The most snapshots of an image that are listed with one read.
const FEW_SNAPSHOTS: u64 = if cfg!(test) { 3 } else { 1000 };

/// The most snapshots that are read at a time while others are printed.
const SNAPSHOTS_IN_PAGE: u64 = if cfg!(test) { 7 } else { 1000 };

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
    pub(super) fn snapshot(geometry: Geometry, one: &SnapshotDocument) -> Referrer {
        Referrer { geometry, root: Root(one.root), record: one.record }
    }
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
        let mut image = ImageDocument {
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
            index: SnapshotIndex::default(),
            summary: None,
        };
        let snapshot = SnapshotDocument {
            parent: None,
            size: geometry.size(),
            root: first.root.0,
            time,
            labels: Vec::new(),
            is_pinned: false,
            metadata: Metadata::default(),
            is_from_guest: false,
            is_obsolete: false,
            edits: 0,
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
        image.index.add(FIRST, &snapshot);
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

    pub(crate) fn id(&self) -> ImageId {
        self.image.id
    }

    #[cfg(test)]
    pub(crate) fn set_created(&mut self, created: u64) {
        self.image.created = created;
    }
}

impl Catalog {
    /// All images, by name.
    pub fn images(&self) -> Result<Vec<Image>> {
        let mut all = Vec::new();
        self.each_image(|image| {
            all.push(image);
            Ok(())
        })?;
        Ok(all)
    }

    /// Passes all images to `each`, by name. Few of them are in memory at a time. Fails with the
    /// error of `each` if it returns one.
    pub fn each_image(&self, mut each: impl FnMut(Image) -> Result<()>) -> Result<()> {
        // Checks the version of the documents.
        self.read(&[])?;
        self.documents.scan(&[IMAGES], &mut |key, document| {
            let image: ImageDocument = document.decode(key)?;
            each(image.image(&key[IMAGES.len()..].parse()?)?)
        })?;
        Ok(())
    }

    /// The content that snapshots and mirrors refer to, by storage policy.
    pub(crate) fn roots(&self) -> Result<HashMap<StoragePolicy, Vec<Referrer>>> {
        // Checks the version of the documents.
        self.read(&[])?;
        let mut all: HashMap<StoragePolicy, Vec<Referrer>> = HashMap::new();
        let mut images: HashMap<ImageId, (StoragePolicy, u32)> = HashMap::new();
        // In the order of the keys: the images come first.
        self.documents.scan(&[IMAGES, MIRRORS, SNAPSHOTS], &mut |key, document| {
            if key.starts_with(IMAGES) {
                let image: ImageDocument = document.decode(key)?;
                images.insert(image.id, (image.policy(), image.chunk_size));
                return Ok(());
            }
            // A mirror keeps its parent's content, even if the parent snapshot was removed. The tree
            // itself tells the size that the parent had.
            let (id, size, root, record) = if key.starts_with(MIRRORS) {
                let mirror: MirrorDocument = document.decode(key)?;
                (mirror.image_id, MAX_SIZE, mirror.root, None)
            } else {
                let snapshot: SnapshotDocument = document.decode(key)?;
                if !snapshot.state.has_content() {
                    return Ok(());
                }
                (snapshot_of(key)?.0, snapshot.size, snapshot.root, snapshot.record)
            };
            // A snapshot without an image is left from a rebuild that was killed.
            if let Some((policy, chunk_size)) = images.get(&id) {
                let geometry = Geometry::new(size, *chunk_size)?;
                let referrer = Referrer { geometry, root: Root(root), record };
                all.entry(*policy).or_default().push(referrer);
            }
            Ok(())
        })?;
        Ok(all)
    }

    /// Reports the id of every snapshot whose image the catalog has, and whether it has content and is
    /// not being removed.
    pub(crate) fn each_snapshot_id(
        &self,
        mut report: impl FnMut(&ImageId, u64, bool),
    ) -> Result<()> {
        let mut images = HashMap::new();
        // In the order of the keys: the images come first.
        self.documents.scan(&[IMAGES, SNAPSHOTS], &mut |key, document| {
            if key.starts_with(IMAGES) {
                let image: ImageDocument = document.decode(key)?;
                images.insert(image.id, image.removing);
            } else {
                let (image, number) = snapshot_of(key)?;
                // A snapshot without an image is left from a rebuild that was killed, or that runs.
                if let Some(removing) = images.get(&image) {
                    let snapshot: SnapshotDocument = document.decode(key)?;
                    report(&image, number, snapshot.state.has_content() && !removing);
                }
            }
            Ok(())
        })?;
        Ok(())
    }

    /// One image.
    pub fn image(&self, name: &ImageName) -> Result<Image> {
        image(&self.read(&[Query::Key(image_key(name))])?, name)?.image(name)
    }

    /// Gives the disk of an image another size, which is not smaller. Returns the image as it was.
    ///
    /// Snapshots keep their sizes. The process that serves a disk of the image learns of its size
    /// when it renews its lease.
    pub fn resize(&self, name: &ImageName, size: u64) -> Result<Image> {
        let key = image_key(name);
        self.change(&[Query::key(&key)], |view| {
            let before = image(view, name)?;
            Geometry::new(size, before.chunk_size)?;
            if size < before.size {
                let (name, before) = (name.to_string(), before.size);
                return Err(Error::CannotShrink { name, before, size });
            }
            let change = match size == before.size {
                true => Change::default(),
                false => Change::default().put(&key, &ImageDocument { size, ..before.clone() }),
            };
            Ok((change, before.image(name)?))
        })
    }

    /// The snapshots of an image, oldest first, in any state. They are all in memory at once: see
    /// [`Catalog::each_snapshot`].
    pub fn snapshots(&self, name: &ImageName) -> Result<Vec<Snapshot>> {
        let all_of = |id: &ImageId| vec![Query::Prefix(snapshots_of(id))];
        let (view, document) = self.read_image(name, all_of)?;
        let all = snapshots(&view, &document.id)?.into_iter();
        all.map(|(number, one)| one.snapshot(name, &document, number)).collect()
    }

    /// Passes the snapshots of an image to `each`, oldest first, in any state. Few of them are in
    /// memory at a time. Fails with the error of `each` if it returns one.
    pub fn each_snapshot(
        &self,
        name: &ImageName,
        mut each: impl FnMut(Snapshot) -> Result<()>,
    ) -> Result<()> {
        let document = image(&self.read(&[Query::Key(image_key(name))])?, name)?;
        // A scan has a cost of its own, such as a connection.
        if document.index.snapshots <= FEW_SNAPSHOTS {
            return self.snapshots(name)?.into_iter().try_for_each(each);
        }
        let prefix = snapshots_of(&document.id);
        self.documents.scan(&[&prefix], &mut |key, one| {
            let (number, one) = (number_of(&key[prefix.len()..])?, one.decode(key)?);
            each(SnapshotDocument::snapshot(one, name, &document, number)?)
        })?;
        Ok(())
    }

    /// As [`Catalog::each_image`], until `each` returns `false`.
    pub fn each_image_while(&self, each: impl FnMut(Image) -> Result<bool>) -> Result<()> {
        until_enough(each, |each| self.each_image(each))
    }

    /// Passes the snapshots of an image with numbers above `after` to `each`, oldest first, in any state,
    /// until it returns `false`. They are read in pages, so `each` may take its time, and what is published
    /// or removed meanwhile may be among them or not.
    pub fn each_snapshot_after(
        &self,
        name: &ImageName,
        after: u64,
        mut each: impl FnMut(Snapshot) -> Result<bool>,
    ) -> Result<()> {
        let document = image(&self.read(&[Query::Key(image_key(name))])?, name)?;
        let mut next = after.saturating_add(1);
        if document.index.snapshots <= FEW_SNAPSHOTS {
            // Their numbers may be far apart.
            for one in self.snapshots(name)?.into_iter().filter(|one| one.number >= next) {
                if !each(one)? {
                    break;
                }
            }
            return Ok(());
        }
        while next < document.next_number {
            let end = next.saturating_add(SNAPSHOTS_IN_PAGE).min(document.next_number);
            for one in self.snapshots_between(name, &document, next..end)? {
                if !each(one)? {
                    return Ok(());
                }
            }
            next = end;
        }
        Ok(())
    }

    /// The snapshots with these numbers, oldest first.
    fn snapshots_between(
        &self,
        name: &ImageName,
        document: &ImageDocument,
        numbers: Range<u64>,
    ) -> Result<Vec<Snapshot>> {
        let prefix = snapshots_of(&document.id);
        let (mut end, mut found) = (numbers.end, Vec::new());
        while numbers.start < end {
            let limit = (end - numbers.start) as usize;
            let view = self.documents.last(&prefix, &snapshot_key(&document.id, end), limit)?;
            let page = snapshots(&view, &document.id)?;
            end = page.first().map_or(numbers.start, |(number, _)| *number);
            let inside = page.into_iter().rev().filter(|(number, _)| numbers.contains(number));
            found.extend(inside);
        }
        let snapshot =
            |(number, one): (u64, SnapshotDocument)| one.snapshot(name, document, number);
        found.into_iter().rev().map(snapshot).collect()
    }

    /// The last `limit` snapshots of an image, oldest first, in any state, and the number of all its
    /// snapshots.
    pub fn last_snapshots(&self, name: &ImageName, limit: usize) -> Result<(Vec<Snapshot>, u64)> {
        let document = image(&self.read(&[Query::Key(image_key(name))])?, name)?;
        let prefix = snapshots_of(&document.id);
        let (mut before, mut all) = (Query::after(&prefix), Vec::new());
        while all.len() < limit {
            let page = self.documents.last(&prefix, &before, limit - all.len())?;
            let Some(first) = page.documents.keys().next() else { break };
            before = first.clone();
            for (number, one) in snapshots(&page, &document.id)?.into_iter().rev() {
                all.push(one.snapshot(name, &document, number)?);
            }
        }
        all.reverse();
        let total = document.index.snapshots.max(all.len() as u64);
        Ok((all, total))
    }

    /// The snapshot with this name. Without a selector it is the newest one with content. A
    /// snapshot that is named may be pending or failed, so callers that need content ask
    /// [`Snapshot::require_content`].
    pub fn resolve(&self, name: &SnapshotRef) -> Result<Snapshot> {
        let Located { number, image, snapshot } = self.locate(name)?;
        snapshot.snapshot(&name.image, &image, number)
    }

    /// Fails if the name of a draft is taken.
    pub(crate) fn check_free(&self, draft: &Draft) -> Result<()> {
        let key = image_key(&draft.name);
        check_free(&self.read(&[Query::key(&key)])?, &draft.name)
    }

    /// Notes that the record of a draft may be on the peers from now on. If the process ends before
    /// [`Catalog::insert`], a repair finds the draft, and stores its tombstone. Returns `false` if the
    /// cluster is in another epoch: then a rebuild may have begun that does not know of this draft.
    /// Fails if the name is taken.
    pub(crate) fn begin_draft(&self, draft: &Draft, epoch: ClusterEpoch) -> Result<bool> {
        self.change(&[Query::Key(image_key(&draft.name)), Query::key(LOSSES)], |view| {
            check_free(view, &draft.name)?;
            if ClusterEpoch::of(view)? != epoch {
                return Ok((Change::default(), false));
            }
            let (name, image) = (draft.name.clone(), draft.image.clone());
            let document = DraftDocument { name, image, given_up: false };
            Ok((Change::default().put(draft_key(&draft.image.id), &document), true))
        })
    }

    /// Gives up a draft: its image cannot be created from here on. Returns its tombstone, which has to
    /// be stored before [`Catalog::end_draft`]. Returns `None` if there is no such draft, or if a
    /// rebuild has created the image.
    pub(crate) fn give_up_draft(&self, id: &ImageId) -> Result<Option<Record>> {
        let key = draft_key(id);
        let draft: Option<DraftDocument> = self.read(&[Query::key(&key)])?.get(&key)?;
        let Some(DraftDocument { name, .. }) = draft else { return Ok(None) };
        let image_key = image_key(&name);
        self.change(&[Query::key(&key), Query::key(&image_key)], |view| {
            let Some(draft) = view.get::<DraftDocument>(&key)? else {
                return Ok((Change::default(), None));
            };
            if view.get::<ImageDocument>(&image_key)?.is_some_and(|image| image.id == *id) {
                return Ok((Change::default().remove(Query::key(&key)), None));
            }
            let tombstone = Record::removal(&draft.name, &draft.image, 0);
            let given_up = DraftDocument { given_up: true, ..draft };
            Ok((Change::default().put(&key, &given_up), Some(tombstone)))
        })
    }

    /// Removes the note of a draft whose tombstone is stored.
    pub(crate) fn end_draft(&self, id: &ImageId) -> Result<()> {
        let remove = || Change::default().remove(Query::Key(draft_key(id)));
        self.change(&[], |_| Ok((remove(), ())))
    }

    /// The ids of drafts whose creation has begun `seconds` ago and is not complete. A time in the
    /// future is that of a clock that was set back.
    pub(crate) fn old_drafts(&self, seconds: u64) -> Result<Vec<ImageId>> {
        let (mut old, now) = (Vec::new(), now());
        self.documents.scan(&[DRAFTS], &mut |key, document| {
            let DraftDocument { image, .. } = document.decode(key)?;
            if now.abs_diff(image.created) >= seconds {
                old.push(image.id);
            }
            Ok(())
        })?;
        Ok(old)
    }

    /// Creates the image of a draft, and ends the `commit` that stored its content, if there is one.
    /// `record` is the name of its first snapshot's record. Returns `None` if the basis is gone: if the
    /// cluster is in another epoch than the one in which the content was stored, or if the document of
    /// the commit does not protect the content any more.
    /// Fails if the image is a clone and its source was removed, or if it has a record and a repair has
    /// given up its draft.
    pub(crate) fn insert(
        &self,
        draft: &Draft,
        basis: &CommitBasis,
        commit: Option<&LeaseId>,
        record: Option<BlobId>,
    ) -> Result<Option<Snapshot>> {
        let Draft { name, image, snapshot, source } = draft;
        let mut queries = vec![Query::Key(image_key(name)), Query::key(LOSSES)];
        queries.extend(commit.map(|commit| Query::Key(commit_key(commit))));
        let source_key = source.as_ref().map(|one| snapshot_key(&one.image_id, one.number));
        queries.extend(source_key.iter().cloned().map(Query::Key));
        let draft_key = record.map(|_| draft_key(&image.id));
        queries.extend(draft_key.iter().cloned().map(Query::Key));
        self.change(&queries, |view| {
            let restored = view.get::<ImageDocument>(&image_key(name))?;
            if let (Some(key), true) = (&draft_key, restored.is_some_and(|one| one.id == image.id))
            {
                // A rebuild has found the record.
                let snapshot = SnapshotDocument { record, ..snapshot.clone() };
                let change = Change::default().remove(Query::key(key));
                return Ok((change, Some(snapshot.snapshot(name, image, FIRST)?)));
            }
            check_free(view, name)?;
            if let Some(key) = &draft_key
                && view.get::<DraftDocument>(key)?.is_none_or(|draft| draft.given_up)
            {
                return Err(Error::DraftGivenUp { name: name.to_string() });
            }
            if let (Some(source), Some(key)) = (source, &source_key) {
                let found = view.get::<SnapshotDocument>(key)?;
                if found.is_none_or(|one| !one.state.has_content()) {
                    return Err(Error::NoSnapshot { name: source.name().to_string() });
                }
            }
            let is_protected = commit.map_or(Ok(true), |commit| protects(view, commit, basis))?;
            if ClusterEpoch::of(view)? != basis.epoch || !is_protected {
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
            if let Some(key) = &draft_key {
                change = change.remove(Query::key(key));
            }
            if let Some(commit) = commit {
                change = change.remove(Query::Key(commit_key(commit)));
            }
            Ok((change, Some(snapshot.snapshot(name, image, FIRST)?)))
        })
    }

    /// The basis of what is published now.
    pub(crate) fn commit_basis(&self) -> Result<CommitBasis> {
        CommitBasis::of(&self.read(&CommitBasis::queries())?)
    }
}

/// Passes what `scan` finds to `each`, until `each` returns `false`. A scan ends only with an error.
fn until_enough<T>(
    mut each: impl FnMut(T) -> Result<bool>,
    scan: impl FnOnce(&mut dyn FnMut(T) -> Result<()>) -> Result<()>,
) -> Result<()> {
    let mut is_enough = false;
    let scanned = scan(&mut |one| match each(one)? {
        true => Ok(()),
        false => {
            is_enough = true;
            Err(Error::BadArgument("the scan is long enough".into()))
        }
    });
    if is_enough { Ok(()) } else { scanned }
}

/// The image and the number of a snapshot with this key.
pub(super) fn snapshot_of(key: &str) -> Result<(ImageId, u64)> {
    let parts = key.strip_prefix(SNAPSHOTS).and_then(|key| key.split_once('/'));
    let (id, number) =
        parts.ok_or_else(|| Error::corrupt("the catalog", format!("'{key}' names no snapshot")))?;
    Ok((id.parse()?, number_of(number)?))
}

fn check_free(view: &View, name: &ImageName) -> Result<()> {
    match view.get::<ImageDocument>(&image_key(name))? {
        None => Ok(()),
        Some(image) if image.removing => Err(Error::BeingRemoved { name: name.to_string() }),
        Some(_) => Err(Error::ImageExists { name: name.to_string() }),
    }
}
