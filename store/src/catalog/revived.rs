//! Snapshots and images that were removed, and that the catalog has again because it was restored from
//! an older copy. Tombstones on the peers show that they were removed.

use super::Catalog;
use super::documents::{
    ImageDocument, SnapshotDocument, available_key, image_key, label_key, number_of, snapshot_key,
    snapshots_of,
};
use super::index::SnapshotIndex;
use super::records::Record;
use super::removal::names;
use crate::documents::{Change, Query};
use crate::error::Result;
use crate::name::ImageName;

impl Catalog {
    /// Removes what these tombstones say, if the catalog has it. Returns the number of snapshots.
    pub(super) fn remove_revived(&self, tombstones: &[Record]) -> Result<u64> {
        let mut removed = 0;
        for tombstone in tombstones {
            removed += match (tombstone.is_in_summary(), tombstone.number()) {
                (Some(is_in), _) => self.remove_revived_of_summary(tombstone, &is_in)?,
                (None, 0) => self.remove_revived_image(tombstone)?,
                (None, number) => u64::from(self.remove_revived_snapshot(tombstone, number)?),
            };
        }
        Ok(removed)
    }

    /// Removes the snapshots that are in a summary.
    fn remove_revived_of_summary(
        &self,
        summary: &Record,
        is_in: &dyn Fn(u64) -> bool,
    ) -> Result<u64> {
        let (prefix, mut found) = (snapshots_of(&summary.image_id()), Vec::new());
        self.documents.scan(&[&prefix], &mut |key, _| {
            let number = number_of(&key[prefix.len()..])?;
            if is_in(number) {
                found.push(number);
            }
            Ok(())
        })?;
        let mut removed = 0;
        for number in found {
            removed += u64::from(self.remove_revived_snapshot(summary, number)?);
        }
        Ok(removed)
    }

    fn remove_revived_image(&self, tombstone: &Record) -> Result<u64> {
        let (name, id) = (tombstone.image_name(), tombstone.image_id());
        let key = image_key(name);
        let found = self.change(&[Query::key(&key)], |view| {
            let found = view.get::<ImageDocument>(&key)?.filter(|image| image.id == id);
            let change = match &found {
                Some(image) if !image.removing => {
                    let removing = ImageDocument { removing: true, ..image.clone() };
                    Change::default().put(&key, &removing)
                }
                _ => Change::default(),
            };
            Ok((change, found))
        })?;
        let Some(image) = found else { return Ok(0) };
        log(name, 0);
        self.finish_image_removal(name, tombstone)?;
        Ok(image.index.snapshots)
    }

    fn remove_revived_snapshot(&self, tombstone: &Record, number: u64) -> Result<bool> {
        let (name, id) = (tombstone.image_name(), tombstone.image_id());
        let (image_key, key) = (image_key(name), snapshot_key(&id, number));
        let found = self.read(&[Query::key(&key)])?.get::<SnapshotDocument>(&key)?;
        // An older copy of a catalog may give a number out again. The later snapshot stays.
        let is_old = |one: &SnapshotDocument| one.time <= tombstone.recorded();
        let found = found.filter(|one| one.state.has_content() && is_old(one));
        let Some(found) = found else { return Ok(false) };
        let labels: Vec<_> = found.labels.iter().map(|label| label_key(&id, label)).collect();
        let mut queries = vec![Query::key(&image_key), Query::key(&key)];
        queries.extend(labels.iter().cloned().map(Query::Key));
        let is_removed = self.change(&queries, |view| {
            let image = view.get::<ImageDocument>(&image_key)?.filter(|image| image.id == id);
            let snapshot = view.get::<SnapshotDocument>(&key)?;
            let snapshot = snapshot.filter(|one| one.state.has_content() && is_old(one));
            let (Some(mut image), Some(snapshot)) = (image, snapshot) else {
                return Ok((Change::default(), false));
            };
            let newest = match image.index.newest {
                Some(newest) if newest == number => self.newest_before(&id, number)?,
                newest => newest,
            };
            let plain =
                SnapshotDocument { is_pinned: false, is_obsolete: false, ..snapshot.clone() };
            let index: &mut SnapshotIndex = &mut image.index;
            index.lose_content(newest);
            index.edit(&snapshot, &plain);
            index.remove();
            let mut change = Change::default()
                .put(&image_key, &image)
                .remove(Query::key(&key))
                .remove(Query::Key(available_key(&id, number)));
            for label in &labels {
                if names(view, label, number)? {
                    change = change.remove(Query::key(label));
                }
            }
            Ok((change, true))
        })?;
        if is_removed {
            log(name, number);
        }
        Ok(is_removed)
    }
}

fn log(image: &ImageName, snapshot: u64) {
    tracing::warn!(%image, snapshot, "removed again what an older copy of the catalog had");
}
