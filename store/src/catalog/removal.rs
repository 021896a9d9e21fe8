//! Removing snapshots and images.
//!
//! A removal has three steps, and the caller carries out the second:
//!
//! ```text
//! begin: the document says *removing* ──► the tombstone is stable on the peers ──► finish: the
//!                                                                      documents are removed
//! ```
//!
//! So a snapshot whose removal was reported does not return when the catalog is rebuilt. A removal
//! that was interrupted is completed by the same command.

use super::Catalog;
use super::documents::{
    ImageDocument, MIRRORS, MirrorDocument, SnapshotDocument, available_key, available_of, image,
    image_key, label_key, labels_of, lease_key, live_lease, mirror_key, policy_key, snapshot_key,
    snapshots_of,
};
use super::index::{LabelDocument, Located, label_query, selected};
use super::readers::{READERS, read_snapshots};
use super::records::Record;
use super::verified::verified_of;
use crate::documents::{Change, Query, View};
use crate::error::{Error, Result};
use crate::id::ImageId;
use crate::name::{ImageName, Scope, SnapshotRef};
use crate::process::Process;
use crate::snapshot::{Snapshot, SnapshotState};

/// The most mirrors that are removed with one change. etcd refuses changes of more than 128
/// operations.
const MIRRORS_IN_CHANGE: usize = 100;

/// What must still hold when a prune removes a snapshot. It was decided earlier, without a lock.
#[derive(Clone, Debug)]
pub(crate) struct PruneCheck {
    /// The state that the snapshot had.
    pub(crate) state: SnapshotState,
    /// A stable snapshot of the image that stays. `None` if the snapshot has no content.
    pub(crate) stable: Option<u64>,
    /// The documents of policies that apply to the image, with their versions.
    pub(crate) policies: Vec<(String, u64)>,
}

/// Why a prune does not remove a snapshot that it has meant to remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Pinned,
    /// A mirror, by its id, continues from it.
    Parent(String),
    /// Somebody reads it.
    Read(String),
    /// The snapshot, the stable one that was to stay, or the policy has changed, or is gone.
    Changed,
}

/// A removal that has begun: the snapshot as it was, and its tombstone.
type Begun = (Snapshot, Record);

impl Catalog {
    /// Begins the removal of a snapshot. Returns the snapshot as it was, and its tombstone. Refuses
    /// to remove a pinned snapshot, and the last one with content.
    pub(crate) fn begin_removal(&self, name: &SnapshotRef) -> Result<Begun> {
        match self.begin_removal_if(name, None)? {
            Ok(begun) => Ok(begun),
            Err(_) => Err(Error::Pinned { name: name.to_string() }),
        }
    }

    /// Begins a removal that a prune has decided, if everything that it depends on still holds.
    pub(crate) fn begin_pruning(
        &self,
        name: &SnapshotRef,
        check: &PruneCheck,
    ) -> Result<std::result::Result<Begun, Refused>> {
        match self.begin_removal_if(name, Some(check)) {
            Err(Error::NoSnapshot { .. } | Error::NoImage { .. } | Error::OnlyStable { .. }) => {
                Ok(Err(Refused::Changed))
            }
            result => result,
        }
    }

    fn begin_removal_if(
        &self,
        name: &SnapshotRef,
        check: Option<&PruneCheck>,
    ) -> Result<std::result::Result<Begun, Refused>> {
        let observer = Process::current()?;
        self.retry(|| {
            let Located { number, image: found, snapshot } = self.locate(name)?;
            let (id, key) = (found.id, snapshot_key(&found.id, number));
            let labels: Vec<String> =
                snapshot.labels.iter().map(|label| label_key(&id, label)).collect();
            let mut queries = vec![
                Query::Key(image_key(&name.image)),
                // A writer whose lease has expired may be publishing the snapshot.
                Query::key(&key),
                Query::Key(lease_key(&id)),
            ];
            queries.extend(labels.iter().cloned().map(Query::Key));
            queries.extend(label_query(&id, name));
            queries.extend(check.iter().flat_map(|check| check.queries(&id)));
            self.try_change(&queries, |view| {
                let mut image = image(view, &name.image)?;
                let document = view.get::<SnapshotDocument>(&key)?;
                let is_same = image.id == id && selected(view, &image, name)? == Some(number);
                let Some(document) = document.filter(|_| is_same) else { return Ok(None) };
                if document.labels != snapshot.labels {
                    return Ok(None);
                }
                if let Some(refused) = refusal(view, &id, number, &document, check, &observer)? {
                    return Ok(Some((Change::default(), Err(refused))));
                }
                let snapshot = document.clone().snapshot(&name.image, &image, number)?;
                let record = Record::removal(&name.image, &image, number);
                let mut change = Change::default();
                match snapshot.state {
                    SnapshotState::Pending => {
                        // A live writer is about to publish it.
                        if let Some(lease) = live_lease(view, &id, &observer)? {
                            return Err(lease.conflict(&name.image));
                        }
                    }
                    SnapshotState::Stable | SnapshotState::Available => {
                        if image.index.with_content == 1 {
                            return Err(Error::OnlyStable { name: snapshot.name().to_string() });
                        }
                        let newest = match image.index.newest {
                            // The change conflicts if a snapshot gets or loses content meanwhile.
                            Some(newest) if newest == number => self.newest_before(&id, number)?,
                            newest => newest,
                        };
                        image.index.lose_content(newest);
                        let unmarked = SnapshotDocument { is_obsolete: false, ..document.clone() };
                        image.index.edit(&document, &unmarked);
                    }
                    SnapshotState::Failed => {
                        for label in &labels {
                            if names(view, label, number)? {
                                change = change.remove(Query::key(label));
                            }
                        }
                    }
                    SnapshotState::Removing => {
                        return Ok(Some((Change::default(), Ok((snapshot, record)))));
                    }
                }
                // A failed snapshot loses its labels at once. Another one keeps them until it is
                // gone, so that the same name completes the removal.
                let had_labels = snapshot.state != SnapshotState::Failed;
                let removing = SnapshotDocument {
                    state: SnapshotState::Removing,
                    labels: if had_labels { document.labels } else { Vec::new() },
                    is_obsolete: false,
                    reason: None,
                    ..document
                };
                // The image is written in any case, so that two processes that remove the last two
                // snapshots conflict.
                let change = change
                    .put(image_key(&name.image), &image)
                    .put(&key, &removing)
                    .remove(Query::Key(available_key(&id, number)));
                Ok(Some((change, Ok((snapshot, record)))))
            })
        })
    }

    /// Removes the document of a snapshot whose tombstone is stored.
    pub(crate) fn finish_removal(&self, snapshot: &Snapshot) -> Result<()> {
        let (id, image_key) = (&snapshot.image_id, image_key(&snapshot.image));
        let key = snapshot_key(id, snapshot.number);
        let labels: Vec<_> = snapshot.labels.iter().map(|label| label_key(id, label)).collect();
        let mut queries = vec![Query::key(&key), Query::key(&image_key)];
        queries.extend(labels.iter().cloned().map(Query::Key));
        self.change(&queries, |view| {
            let found = view.get::<SnapshotDocument>(&key)?;
            if found.is_none_or(|one| one.state != SnapshotState::Removing) {
                return Ok((Change::default(), ()));
            }
            let mut change = Change::default().remove(Query::key(&key));
            let image = view.get::<ImageDocument>(&image_key)?;
            if let Some(mut image) = image.filter(|image| image.id == *id) {
                image.index.remove();
                change = change.put(&image_key, &image);
            }
            for label in &labels {
                if names(view, label, snapshot.number)? {
                    change = change.remove(Query::key(label));
                }
            }
            Ok((change, ()))
        })
    }

    /// Begins the removal of an image. Returns its tombstone. Fails while a live writer holds the
    /// image's lease, while a snapshot is pinned, and, without `force`, while mirrors refer to the
    /// image.
    pub(crate) fn begin_image_removal(&self, name: &ImageName, force: bool) -> Result<Record> {
        let observer = Process::current()?;
        let key = image_key(name);
        self.retry(|| {
            // An image whose removal was interrupted is found, too.
            let find = |view: &View| match view.get::<ImageDocument>(&key)? {
                Some(image) => Ok(image),
                None => Err(Error::NoImage { name: name.to_string() }),
            };
            let id = find(&self.read(&[Query::key(&key)])?)?.id;
            let queries = [Query::key(&key), Query::Key(lease_key(&id)), Query::prefix(MIRRORS)];
            self.try_change(&queries, |view| {
                let image = find(view)?;
                if image.id != id {
                    return Ok(None);
                }
                let tombstone = Record::removal(name, &image, 0);
                if image.removing {
                    return Ok(Some((Change::default(), tombstone)));
                }
                if let Some(lease) = live_lease(view, &id, &observer)? {
                    return Err(lease.conflict(name));
                }
                if image.index.pinned > 0 {
                    let (image, pinned) = (name.to_string(), image.index.pinned);
                    return Err(Error::HasPinned { image, pinned });
                }
                let users = view.under::<MirrorDocument>(MIRRORS)?;
                let user = users.iter().find(|(_, mirror)| mirror.image_id == id);
                if let Some((mirror_id, mirror)) = user.filter(|_| !force) {
                    return Err(Error::Referenced {
                        image: name.to_string(),
                        mirror: mirror_id.clone(),
                        host: mirror.host.clone(),
                        path: mirror.path.clone(),
                    });
                }
                let removing = ImageDocument { removing: true, ..image };
                Ok(Some((Change::default().put(&key, &removing), tombstone)))
            })
        })
    }

    /// Removes the documents of an image whose tombstone is stored: the image, its snapshots and
    /// its mirrors. The mirrors go first, some with each change, because etcd refuses large ones.
    pub(crate) fn finish_image_removal(&self, name: &ImageName, tombstone: &Record) -> Result<()> {
        let (id, key) = (tombstone.image_id(), image_key(name));
        loop {
            let is_done = self.change(&[Query::key(&key), Query::prefix(MIRRORS)], |view| {
                let found = view.get::<ImageDocument>(&key)?;
                if found.is_none_or(|image| image.id != id || !image.removing) {
                    return Ok((Change::default(), true));
                }
                let mirrors = view.under::<MirrorDocument>(MIRRORS)?;
                let own = mirrors.iter().filter(|(_, document)| document.image_id == id);
                let own = own.map(|(mirror, _)| Ok(mirror_key(&mirror.parse()?)));
                let own: Vec<String> = own.collect::<Result<_>>()?;
                let is_last = own.len() <= MIRRORS_IN_CHANGE;
                let mut change = Change::default();
                if is_last {
                    change = change
                        .remove(Query::key(&key))
                        // Not for an image that gets the name later.
                        .remove(Query::Key(policy_key(&Scope::Image(name.clone()))))
                        .remove(Query::Key(lease_key(&id)))
                        .remove(Query::Prefix(snapshots_of(&id)))
                        .remove(Query::Prefix(available_of(&id)))
                        .remove(Query::Prefix(labels_of(&id)))
                        .remove(Query::Prefix(verified_of(&id)));
                }
                for mirror in own.into_iter().take(MIRRORS_IN_CHANGE) {
                    change = change.remove(Query::Key(mirror));
                }
                Ok((change, is_last))
            })?;
            if is_done {
                return Ok(());
            }
        }
    }
}

impl PruneCheck {
    /// The documents that the decision depends on. Those that are queried by key cannot change until
    /// the removal has begun. A mirror gets another parent only with a change that writes the image's
    /// document, and a reader begins with a change that writes the snapshot's. So neither is queried by
    /// key.
    fn queries(&self, id: &ImageId) -> Vec<Query> {
        let mut queries = vec![Query::prefix(MIRRORS), Query::prefix(READERS)];
        queries.extend(self.stable.map(|number| Query::Key(snapshot_key(id, number))));
        queries.extend(self.policies.iter().map(|(key, _)| Query::key(key)));
        queries
    }
}

/// Why a snapshot is not removed, if so: it is pinned, or a prune's decision no longer holds.
fn refusal(
    view: &View,
    id: &ImageId,
    number: u64,
    document: &SnapshotDocument,
    check: Option<&PruneCheck>,
    observer: &Process,
) -> Result<Option<Refused>> {
    if document.is_pinned {
        return Ok(Some(Refused::Pinned));
    }
    let Some(check) = check else { return Ok(None) };
    let mirrors = view.under::<MirrorDocument>(MIRRORS)?;
    let mut parents = mirrors.into_iter().filter(|(_, mirror)| mirror.image_id == *id);
    if document.state.has_content()
        && let Some((mirror, _)) = parents.find(|(_, mirror)| mirror.parent == number)
    {
        return Ok(Some(Refused::Parent(mirror)));
    }
    let mut readers = read_snapshots(view, observer)?.into_iter();
    if let Some(read) = readers.find(|one| one.image == *id && one.number == number) {
        return Ok(Some(Refused::Read(read.reader)));
    }
    let is_stable = match check.stable {
        Some(stable) => {
            let found = view.get::<SnapshotDocument>(&snapshot_key(id, stable))?;
            stable != number && found.is_some_and(|one| one.state == SnapshotState::Stable)
        }
        None => !document.state.has_content(),
    };
    let has_policies = check.policies.iter().all(|(key, version)| view.version(key) == *version);
    let is_same = document.state == check.state && is_stable && has_policies;
    Ok((!is_same).then_some(Refused::Changed))
}

/// Whether the label is that of the snapshot with this number.
pub(super) fn names(view: &View, label: &str, number: u64) -> Result<bool> {
    Ok(view.get::<LabelDocument>(label)?.is_some_and(|label| label.number == number))
}
