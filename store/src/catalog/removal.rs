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
    image_key, label_key, labels_of, lease_key, live_lease, mirror_key, snapshot_key, snapshots_of,
};
use super::index::{LabelDocument, Located, label_query, selected};
use super::records::Record;
use crate::documents::{Change, Query, View};
use crate::error::{Error, Result};
use crate::name::{ImageName, SnapshotRef};
use crate::process::Process;
use crate::snapshot::{Snapshot, SnapshotState};

/// The most mirrors that are removed with one change. etcd refuses changes of more than 128
/// operations.
const MIRRORS_IN_CHANGE: usize = 100;

impl Catalog {
    /// Begins the removal of a snapshot. Returns the snapshot as it was, and its tombstone. Refuses
    /// to remove the last snapshot with content.
    pub(crate) fn begin_removal(&self, name: &SnapshotRef) -> Result<(Snapshot, Record)> {
        let observer = Process::current()?;
        self.retry(|| {
            let Located { number, image: found, snapshot } = self.locate(name)?;
            let (id, key) = (found.id, snapshot_key(&found.id, number));
            let label = snapshot.label.map(|label| label_key(&id, &label));
            let mut queries = vec![
                Query::Key(image_key(&name.image)),
                // A writer whose lease has expired may be publishing the snapshot.
                Query::key(&key),
                Query::Key(lease_key(&id)),
            ];
            queries.extend(label.iter().cloned().map(Query::Key));
            queries.extend(label_query(&id, name));
            self.try_change(&queries, |view| {
                let mut image = image(view, &name.image)?;
                let document = view.get::<SnapshotDocument>(&key)?;
                let is_same = image.id == id && selected(view, &image, name)? == Some(number);
                let Some(document) = document.filter(|_| is_same) else { return Ok(None) };
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
                    }
                    SnapshotState::Failed => {
                        if let Some(label) = &label
                            && names(view, label, number)?
                        {
                            change = change.remove(Query::key(label));
                        }
                    }
                    SnapshotState::Removing => {
                        return Ok(Some((Change::default(), (snapshot, record))));
                    }
                }
                // A failed snapshot loses its label at once. Another one keeps it until it is gone,
                // so that the same name completes the removal.
                let had_label = snapshot.state != SnapshotState::Failed;
                let removing = SnapshotDocument {
                    state: SnapshotState::Removing,
                    label: document.label.filter(|_| had_label),
                    reason: None,
                    ..document
                };
                // The image is written in any case, so that two processes that remove the last two
                // snapshots conflict.
                let change = change
                    .put(image_key(&name.image), &image)
                    .put(&key, &removing)
                    .remove(Query::Key(available_key(&id, number)));
                Ok(Some((change, (snapshot, record))))
            })
        })
    }

    /// Removes the document of a snapshot whose tombstone is stored.
    pub(crate) fn finish_removal(&self, snapshot: &Snapshot) -> Result<()> {
        let (id, image_key) = (&snapshot.image_id, image_key(&snapshot.image));
        let key = snapshot_key(id, snapshot.number);
        let label = snapshot.label.as_ref().map(|label| label_key(id, label));
        let mut queries = vec![Query::key(&key), Query::key(&image_key)];
        queries.extend(label.iter().cloned().map(Query::Key));
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
            if let Some(label) = &label
                && names(view, label, snapshot.number)?
            {
                change = change.remove(Query::key(label));
            }
            Ok((change, ()))
        })
    }

    /// Begins the removal of an image. Returns its tombstone. Fails while a live writer holds the
    /// image's lease, and, without `force`, while mirrors refer to the image.
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
                        .remove(Query::Key(lease_key(&id)))
                        .remove(Query::Prefix(snapshots_of(&id)))
                        .remove(Query::Prefix(available_of(&id)))
                        .remove(Query::Prefix(labels_of(&id)));
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

/// Whether the label is that of the snapshot with this number.
fn names(view: &View, label: &str, number: u64) -> Result<bool> {
    Ok(view.get::<LabelDocument>(label)?.is_some_and(|label| label.number == number))
}
