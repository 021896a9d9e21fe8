//! The index of an image's snapshots in its document, so that no operation reads all of them.
//!
//! | change of a snapshot's document | effect |
//! |---|---|
//! | created | `snapshots`, `highest`; if it has content, as below |
//! | gets content: published | `with_content`, `newest` |
//! | loses its content: removal begins | `with_content`, `newest`, `obsolete` |
//! | is pinned or unpinned, or marked obsolete | `pinned`, `obsolete` |
//! | removed | `snapshots` |
//!
//! Each of these changes writes the image's document in the same transaction, and relies on its
//! version. So the index is exact at every moment, and a change that has read the index and the
//! snapshots in two steps conflicts if one of them has changed in between. A rebuild of the catalog
//! counts the documents again.

use serde::{Deserialize, Serialize};

use super::Catalog;
use super::documents::{
    ImageDocument, SnapshotDocument, image, image_key, label_key, number_of, snapshot_key,
    snapshots_of,
};
use crate::documents::{Query, View};
use crate::error::{Error, Result};
use crate::id::ImageId;
use crate::name::{Selector, SnapshotRef};

/// Snapshots that are read at a time in search of one with content.
const SEARCHED_TOGETHER: usize = 32;

/// The counts and the newest of an image's snapshots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SnapshotIndex {
    /// The number of snapshots, in any state.
    pub(super) snapshots: u64,
    /// The number of snapshots with content.
    pub(super) with_content: u64,
    /// The number of the newest snapshot with content.
    pub(super) newest: Option<u64>,
    /// The number of pinned snapshots.
    pub(super) pinned: u64,
    /// The number of snapshots with content that their guests do not need any more.
    pub(super) obsolete: u64,
    /// The highest number that a snapshot of the image ever had in this catalog.
    pub(super) highest: u64,
}

impl SnapshotIndex {
    /// Adds a snapshot whose document is created.
    pub(super) fn add(&mut self, number: u64, one: &SnapshotDocument) {
        self.snapshots += 1;
        self.highest = self.highest.max(number);
        if one.state.has_content() {
            self.gain_content(number);
            self.pinned += u64::from(one.is_pinned);
            self.obsolete += u64::from(one.is_obsolete);
        }
    }

    /// Notes that a snapshot with content is pinned or not, and obsolete or not, other than before.
    pub(super) fn edit(&mut self, before: &SnapshotDocument, after: &SnapshotDocument) {
        let change = |count: &mut u64, before: bool, after: bool| {
            *count = (*count + u64::from(after)).saturating_sub(u64::from(before));
        };
        change(&mut self.pinned, before.is_pinned, after.is_pinned);
        change(&mut self.obsolete, before.is_obsolete, after.is_obsolete);
    }

    /// Notes that a snapshot without content gets content.
    pub(super) fn gain_content(&mut self, number: u64) {
        self.with_content += 1;
        self.newest = self.newest.max(Some(number));
    }

    /// Notes that a snapshot with content loses it. `newest` is then the newest one with content.
    pub(super) fn lose_content(&mut self, newest: Option<u64>) {
        debug_assert!(self.with_content > 0, "the index counts every snapshot with content");
        self.with_content = self.with_content.saturating_sub(1);
        self.newest = newest;
    }

    /// Removes a snapshot without content whose document is removed.
    pub(super) fn remove(&mut self) {
        debug_assert!(self.snapshots > 0, "the index counts every snapshot");
        self.snapshots = self.snapshots.saturating_sub(1);
    }
}

/// The snapshot that a label names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LabelDocument {
    pub(super) number: u64,
    /// Whether the snapshot has failed. Another one may then take the label.
    pub(super) failed: bool,
}

/// A snapshot that was found by its name.
pub(super) struct Located {
    pub(super) number: u64,
    pub(super) image: ImageDocument,
    pub(super) snapshot: SnapshotDocument,
}

impl Catalog {
    /// Finds the snapshot with this name, as of one moment.
    pub(super) fn locate(&self, name: &SnapshotRef) -> Result<Located> {
        let key = image_key(&name.image);
        let mut asked: Option<(ImageId, Option<u64>)> = None;
        loop {
            let mut queries = vec![Query::key(&key)];
            if let Some((id, number)) = &asked {
                queries.extend(label_query(id, name));
                queries.extend(number.map(|number| Query::Key(snapshot_key(id, number))));
            }
            let view = self.read(&queries)?;
            let image = image(&view, &name.image)?;
            let number = selected(&view, &image, name)?;
            let known = asked.replace((image.id, number));
            // A label is read with the image's id, and a snapshot with its number. Both may change
            // from one read to the next.
            if known != asked {
                continue;
            }
            let missing = || Error::NoSnapshot { name: name.to_string() };
            let number = number.ok_or_else(missing)?;
            let snapshot = view.get(&snapshot_key(&image.id, number))?.ok_or_else(missing)?;
            return Ok(Located { number, image, snapshot });
        }
    }

    /// The newest snapshot with content below `number`.
    pub(super) fn newest_before(&self, id: &ImageId, number: u64) -> Result<Option<u64>> {
        let prefix = snapshots_of(id);
        let mut before = snapshot_key(id, number);
        loop {
            let view = self.documents.last(&prefix, &before, SEARCHED_TOGETHER)?;
            let Some(first) = view.documents.keys().next() else { return Ok(None) };
            before = first.clone();
            for (key, one) in view.under::<SnapshotDocument>(&prefix)?.into_iter().rev() {
                if one.state.has_content() {
                    return number_of(&key).map(Some);
                }
            }
        }
    }

    /// Counts the snapshots of an image.
    pub(super) fn count(&self, id: &ImageId) -> Result<SnapshotIndex> {
        let prefix = snapshots_of(id);
        let mut index = SnapshotIndex::default();
        self.documents.scan(&[&prefix], &mut |key, document| {
            let one: SnapshotDocument = document.decode(key)?;
            index.add(number_of(&key[prefix.len()..])?, &one);
            Ok(())
        })?;
        Ok(index)
    }
}

/// The query for the label in this name, if it has one.
pub(super) fn label_query(id: &ImageId, name: &SnapshotRef) -> Option<Query> {
    match &name.selector {
        Selector::Label(label) => Some(Query::Key(label_key(id, label))),
        Selector::Number(_) | Selector::Newest => None,
    }
}

/// The number of the snapshot that has this name in a view of the image and of the label.
pub(super) fn selected(
    view: &View,
    image: &ImageDocument,
    name: &SnapshotRef,
) -> Result<Option<u64>> {
    Ok(match &name.selector {
        Selector::Number(number) => Some(*number),
        Selector::Newest => image.index.newest,
        Selector::Label(label) => {
            let found = view.get::<LabelDocument>(&label_key(&image.id, label))?;
            found.map(|label| label.number)
        }
    })
}
