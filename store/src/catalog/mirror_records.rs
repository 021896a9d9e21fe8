//! The record of a mirror's reference to its parent, as a blob on the peers.
//!
//! A mirror keeps its parent's content, even if the parent snapshot was removed. So a rebuilt
//! catalog needs to know the mirrors, too. A record is stored when a mirror is attached for the
//! first time. Each snapshot that the mirror publishes moves the reference: the record of that
//! snapshot names the mirror. A tombstone is stored when the mirror is detached or forgotten.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::Catalog;
use super::documents::{ImageDocument, MirrorDocument, image_key, mirror_key, put_mirror, text};
use super::records::Record;
use crate::clock::now;
use crate::collection::CollectionNumber;
use crate::documents::{Change, Query};
use crate::encoding::Redundancy;
use crate::error::Result;
use crate::id::{ImageId, MirrorId};
use crate::snapshot::{MirrorOwner, MirrorParent, Mode, Snapshot};
use crate::tree::Root;

/// The format name in every record of a mirror.
pub(super) const FORMAT: &str = "cairn-mirror-record";
pub(super) const VERSION: u32 = 1;

/// A record of a mirror, or its tombstone.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct MirrorReference {
    format: String,
    version: u32,
    #[serde(with = "text")]
    mirror: MirrorId,
    /// The redundancy of the mirror's image.
    #[serde(with = "text")]
    pub(super) redundancy: Redundancy,
    /// `None` in a tombstone.
    document: Option<MirrorDocument>,
    /// When this was recorded: seconds since 1970.
    recorded: u64,
}

impl MirrorReference {
    fn new(mirror: MirrorId, redundancy: Redundancy, document: MirrorDocument) -> MirrorReference {
        MirrorReference { document: Some(document), ..MirrorReference::removal(mirror, redundancy) }
    }

    /// The tombstone of a mirror.
    pub(crate) fn removal(mirror: MirrorId, redundancy: Redundancy) -> MirrorReference {
        let (format, version, recorded) = (FORMAT.to_owned(), VERSION, now());
        MirrorReference { format, version, mirror, redundancy, document: None, recorded }
    }

    /// The mirror, whether this is its tombstone, and when this was recorded.
    pub(super) fn subject(&self) -> (MirrorId, bool, u64) {
        (self.mirror, self.document.is_none(), self.recorded)
    }

    #[cfg(test)]
    pub(super) fn set_recorded(&mut self, recorded: u64) {
        self.recorded = recorded;
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("records are plain data")
    }
}

impl Catalog {
    /// The record of a mirror that is about to be attached. Returns `None` if the catalog knows the
    /// mirror, and has a record of it.
    pub(crate) fn new_mirror(
        &self,
        owner: &MirrorOwner,
        snapshot: &Snapshot,
        mode: Mode,
        parent: Option<&MirrorParent>,
    ) -> Result<Option<MirrorReference>> {
        let queries = super::mirrors::attach_queries(owner, snapshot, parent);
        let view = self.read(&queries)?;
        if view.version(&mirror_key(&owner.id)) != 0 {
            return Ok(None);
        }
        let document = super::mirrors::attached_mirror(&view, owner, snapshot, mode, parent)?;
        Ok(Some(MirrorReference::new(owner.id, snapshot.policy.redundancy, document)))
    }

    /// Restores the mirrors that the catalog does not have, of images that it has.
    pub(super) fn rebuild_mirrors(
        &self,
        references: Vec<MirrorReference>,
        records: &[Record],
    ) -> Result<u64> {
        let published = published_by_mirrors(records);
        let mut newest: BTreeMap<MirrorId, MirrorReference> = BTreeMap::new();
        for one in references {
            let known = newest.entry(one.mirror).or_insert_with(|| one.clone());
            // A tombstone wins over a record of the same second.
            let key = |one: &MirrorReference| (one.recorded, one.document.is_none());
            if key(&one) > key(known) {
                *known = one;
            }
        }
        let mut restored = 0;
        for (id, reference) in newest {
            let Some(mut mirror) = reference.document else { continue };
            if let Some((number, root)) = published.get(&(mirror.image_id, id))
                && *number > mirror.parent
            {
                // Whether it was stable then is not known.
                (mirror.parent, mirror.root, mirror.is_parent_available) = (*number, root.0, true);
            }
            (mirror.announced, mirror.reserved) = (0, 0..0);
            // A later process of the mirror may adopt what it has stored, whenever that was.
            mirror.storing_since = Some(CollectionNumber::FIRST);
            restored += u64::from(self.restore_mirror(&id, &mirror)?);
        }
        Ok(restored)
    }

    /// Restores one mirror. Returns `false` if the catalog has it, or does not have its image.
    fn restore_mirror(&self, id: &MirrorId, mirror: &MirrorDocument) -> Result<bool> {
        let (key, image_key) = (mirror_key(id), image_key(&mirror.image));
        self.change(&[Query::key(&key), Query::key(&image_key)], |view| {
            let image = view.get::<ImageDocument>(&image_key)?;
            let has_image = image.is_some_and(|one| one.id == mirror.image_id && !one.removing);
            if !has_image || view.version(&key) != 0 {
                return Ok((Change::default(), false));
            }
            Ok((put_mirror(Change::default(), id, mirror), true))
        })
    }
}

/// The last snapshot that each mirror published, whether it was removed since or not.
fn published_by_mirrors(records: &[Record]) -> BTreeMap<(ImageId, MirrorId), (u64, Root)> {
    let mut failures: HashMap<ImageId, Vec<&Record>> = HashMap::new();
    for record in records.iter().filter(|record| record.has_failures()) {
        failures.entry(record.image_id()).or_default().push(record);
    }
    let has_failed = |image: &ImageId, number| {
        failures.get(image).is_some_and(|all| all.iter().any(|one| one.has_failed(number)))
    };
    let mut last = BTreeMap::new();
    let published = records.iter().filter_map(Record::published_by);
    let published = published.filter(|((image, _), number, _)| !has_failed(image, *number));
    for (key, number, root) in published {
        let known = last.entry(key).or_insert((number, root));
        if number > known.0 {
            *known = (number, root);
        }
    }
    last
}
