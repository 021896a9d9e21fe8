//! What users may change of a snapshot: its labels, its pin, its metadata and its obsolete mark.
//!
//! In a cluster the change is also in a record on the peers, so that it survives the catalog:
//!
//! ```text
//! edit: the documents, with one more edit ─► the record is stable on the peers ─► note_record
//! ```
//!
//! Each edit raises the snapshot's count of edits, and the record has the count of the document. So
//! of two records of a snapshot the later one is known, whatever the clocks of the hosts say, and it
//! has every edit before it. A command that ends between the steps has not reported its edit: then
//! the catalog has it, and a rebuilt catalog may not. The same command stores a record again.

use super::Catalog;
use super::documents::{SnapshotDocument, image, image_key, label_key, snapshot_key};
use super::index::{LabelDocument, Located, label_query, selected};
use super::records::Record;
use super::removal::names;
use crate::cluster::membership::{ClusterEpoch, LOSSES};
use crate::documents::{Change, Query};
use crate::error::{Error, Result};
use crate::id::BlobId;
use crate::name::{SnapshotRef, check_label};
use crate::snapshot::Snapshot;

/// The most labels of a snapshot.
pub const MAX_LABELS: usize = 8;

/// A change of what users say about a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotEdit {
    /// Adds a label.
    AddLabel(String),
    /// Removes a label.
    RemoveLabel(String),
    /// Keeps the snapshot from removal, or no longer.
    Pin(bool),
    /// Changes the metadata.
    Metadata {
        /// Keys and their values.
        set: Vec<(String, String)>,
        /// Keys to remove. A key that is not there is no error.
        unset: Vec<String>,
    },
    /// Marks the snapshot as obsolete by the wish of its guest. Refused unless the snapshot was
    /// requested from inside the guest.
    Obsolete,
}

impl SnapshotEdit {
    /// The label whose document the edit changes.
    fn label(&self) -> Option<&str> {
        match self {
            SnapshotEdit::AddLabel(label) | SnapshotEdit::RemoveLabel(label) => Some(label),
            SnapshotEdit::Pin(_) | SnapshotEdit::Metadata { .. } | SnapshotEdit::Obsolete => None,
        }
    }

    /// Applies the edit to a snapshot with this name. The label must be free.
    fn apply(&self, one: &mut SnapshotDocument, name: &SnapshotRef) -> Result<()> {
        match self {
            SnapshotEdit::AddLabel(label) if !one.labels.contains(label) => {
                if one.labels.len() == MAX_LABELS {
                    let (what, actual) = ("the list of labels of a snapshot", MAX_LABELS + 1);
                    return Err(Error::TooLarge { what, actual, limit: MAX_LABELS });
                }
                one.labels.push(label.clone());
            }
            SnapshotEdit::AddLabel(_) => {}
            SnapshotEdit::RemoveLabel(label) => {
                let at = one.labels.iter().position(|known| known == label);
                let missing = || Error::NoLabel { name: name.to_string(), label: label.clone() };
                one.labels.remove(at.ok_or_else(missing)?);
            }
            SnapshotEdit::Pin(is_pinned) => one.is_pinned = *is_pinned,
            SnapshotEdit::Metadata { set, unset } => {
                unset.iter().for_each(|key| one.metadata.remove(key));
                set.iter().try_for_each(|(key, value)| one.metadata.set(key, value))?;
            }
            SnapshotEdit::Obsolete if !one.is_from_guest => {
                return Err(Error::NotFromGuest { name: name.to_string() });
            }
            SnapshotEdit::Obsolete => one.is_obsolete = true,
        }
        Ok(())
    }
}

/// An edit that the catalog has, and that the peers do not have yet.
pub(crate) struct Edited {
    pub(crate) snapshot: Snapshot,
    pub(crate) record: Record,
    edits: u64,
}

impl Catalog {
    /// Changes what users say about a snapshot, which must have content.
    pub(crate) fn edit(&self, name: &SnapshotRef, edit: &SnapshotEdit) -> Result<Edited> {
        edit.label().map_or(Ok(()), check_label)?;
        self.retry(|| {
            let Located { number, image: found, .. } = self.locate(name)?;
            let (id, key) = (found.id, snapshot_key(&found.id, number));
            let label = edit.label().map(|label| label_key(&id, label));
            let image_key = image_key(&name.image);
            let mut queries = vec![Query::key(&image_key), Query::key(&key), Query::key(LOSSES)];
            queries.extend(label.iter().cloned().map(Query::Key));
            queries.extend(label_query(&id, name));
            self.try_change(&queries, |view| {
                let mut image = image(view, &name.image)?;
                let before = view.get::<SnapshotDocument>(&key)?;
                let is_same = image.id == id && selected(view, &image, name)? == Some(number);
                let Some(before) = before.filter(|_| is_same) else { return Ok(None) };
                before.clone().snapshot(&name.image, &image, number)?.require_content()?;
                let mut after = before.clone();
                edit.apply(&mut after, &SnapshotRef::number(&name.image, number))?;
                let mut change = Change::default();
                if let Some(key) = &label {
                    let is_own = names(view, key, number)?;
                    let taken = view.get::<LabelDocument>(key)?.is_some_and(|one| !one.failed);
                    change = match edit {
                        SnapshotEdit::AddLabel(label) if taken && !is_own => {
                            let (image, selector) = (name.image.to_string(), label.clone());
                            return Err(Error::SnapshotExists { image, selector });
                        }
                        SnapshotEdit::AddLabel(_) => {
                            change.put(key, &LabelDocument { number, failed: false })
                        }
                        _ if is_own => change.remove(Query::key(key)),
                        _ => change,
                    };
                }
                after.edits += 1;
                let counts = image.index;
                image.index.edit(&before, &after);
                if image.index != counts {
                    change = change.put(&image_key, &image);
                }
                let change = change.put(&key, &after);
                let (edits, epoch) = (after.edits, ClusterEpoch::of(view)?);
                let snapshot = after.clone().snapshot(&name.image, &image, number)?;
                let recorded = SnapshotDocument { record: None, ..after };
                let record = Record::new(&name.image, &image, number, recorded, epoch);
                Ok(Some((change, Edited { snapshot, record, edits })))
            })
        })
    }

    /// Notes the name of the record that the peers have of an edit, unless a later edit has another
    /// one.
    pub(crate) fn note_record(
        &self,
        snapshot: &Snapshot,
        edits: u64,
        record: BlobId,
    ) -> Result<()> {
        let key = snapshot_key(&snapshot.image_id, snapshot.number);
        self.change(&[Query::key(&key)], |view| {
            let change = match view.get::<SnapshotDocument>(&key)? {
                Some(one) if one.edits == edits => {
                    let noted = SnapshotDocument { record: Some(record), ..one };
                    Change::default().put(&key, &noted)
                }
                _ => Change::default(),
            };
            Ok((change, ()))
        })
    }
}

impl Edited {
    /// The number of edits of the snapshot, which the record has, too.
    pub(crate) fn edits(&self) -> u64 {
        self.edits
    }
}
